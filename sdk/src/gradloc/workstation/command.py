"""`gradloc up`: all services on one workstation, until Ctrl-C."""

import json
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Literal

import click
from rich.console import Console
from rich.panel import Panel

from gradloc.workstation.processes import StartFailed
from gradloc.workstation.station import Plan, Station, station, wait_for_services
from gradloc_proto.redis_bus import display_url

_WATCH_INTERVAL_S = 1.0


@click.command(name="up")
@click.option(
    "--redis", "redis_url", default=None, metavar="URL", help="Your Redis; an embedded one is started without it."
)
@click.option("--store", "store_url", default=None, metavar="URL", help="Where snapshots go; below --data without it.")
@click.option(
    "--data",
    "data_dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".gradloc"),
    show_default=True,
    help="Folder for the database, logs, the embedded Redis and snapshots.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="Port of page and REST; 0: any."
)
@click.option("--num-cpus", type=click.IntRange(1), default=2, show_default=True, help="CPUs of the localizer's pool.")
@click.option("--strategy", type=click.Choice(["attribution", "bisect"]), default="attribution", show_default=True)
@click.option("--slack-channel", default=None, metavar="ID", help="With a bot's token in GRADLOC_SLACK_TOKEN.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one line of JSON.")
def up(
    redis_url: str | None,
    store_url: str | None,
    data_dir: Path,
    port: int,
    num_cpus: int,
    strategy: Literal["attribution", "bisect"],
    slack_channel: str | None,
    as_json: bool,
) -> None:
    """Run Redis, detector, localizer pool and reporter on this machine until Ctrl-C.

    Prints what to put into a training script.
    """
    console = Console(stderr=True)
    redis_url = redis_url or os.environ.get("GRADLOC_REDIS_URL") or None
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    plan = Plan(data_dir, redis_url, store_url, port, num_cpus, strategy, slack_channel)
    try:
        with console.status("starting ...") as status, station(plan, lambda text: status.update(text)) as running:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, end)
            wait_for_services(running, lambda text: status.update(text))
            status.stop()
            _announce(running, as_json, console)
            while not stop.wait(_WATCH_INTERVAL_S):
                for child in running.services_that_ended():
                    raise StartFailed(f"{child.name} ended; its log {child.log} ends with:\n{child.last_lines()}")
            console.print("ending ...")
    except (StartFailed, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from None
    except (ConnectionError, ValueError) as error:
        where = display_url(redis_url) if redis_url else "the embedded Redis"
        raise click.UsageError(f"{where}: {error}") from None


def _announce(running: Station, as_json: bool, console: Console) -> None:
    if as_json:
        addresses = {
            "redis": display_url(running.redis_url),
            "store": running.store_url,
            "page": running.reporter_url,
            "ray": running.ray.address,
            "detector_metrics": f"{running.detector_url}/metrics",
        }
        click.echo(json.dumps(addresses))
        return
    text = (
        f"page and REST   {running.reporter_url}\n"
        f"metrics         {running.reporter_url}/metrics  {running.detector_url}/metrics\n\n"
        "In the training script:\n\n"
        '  probe = gradloc.watch(model, optimizer, run="my-run",\n'
        f'                        redis="{display_url(running.redis_url)}",\n'
        f'                        store="{running.store_url}")\n'
        "  probe.tokens(logp, ids, mask, ...)   # per micro-batch, before backward\n"
        "  probe.observe(loss=...)              # per step, before clipping\n\n"
        "Ctrl-C ends all of it."
    )
    console.print(Panel(text, title="gradloc is up", expand=False))
