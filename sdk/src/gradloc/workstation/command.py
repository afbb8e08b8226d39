"""`gradloc up`: all services on this workstation until Ctrl-C."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.text import Text

from gradloc.workstation.processes import StartFailed, interruptible
from gradloc.workstation.services import Plan, Workstation

DEFAULT_FOLDER = Path(".gradloc")
EXIT_BAD_INPUT = 2


@click.command(name="up")
@click.option("--redis", "redis_url", envvar="GRADLOC_REDIS_URL", help="Redis to use; an own one is started if absent.")
@click.option("--store", help="Where snapshots go, any fsspec URL; a folder under --folder if absent.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8321, show_default=True, help="Of page and REST; 0: any."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_FOLDER,
    show_default=True,
    help="Data and logs.",
)
@click.option("--num-cpus", type=click.IntRange(1, 1024), default=2, show_default=True, help="CPUs for localizations.")
@click.option("--strategy", type=click.Choice(["attribution", "bisect"]), default="attribution", show_default=True)
@click.option("--slack-channel", metavar="ID", help="Slack channel; the bot's token is in GRADLOC_SLACK_TOKEN.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one line of JSON.")
def up(
    redis_url: str | None,
    store: str | None,
    port: int,
    folder: Path,
    num_cpus: int,
    strategy: str,
    slack_channel: str | None,
    as_json: bool,
) -> None:
    """Run Redis, Ray, detector and reporter on this machine until Ctrl-C."""
    console = Console(stderr=True)
    slack = ("--slack-channel", slack_channel) if slack_channel else ()
    plan = Plan(
        folder=folder.resolve(),
        redis_url=redis_url,
        store=store,
        reporter_port=port,
        num_cpus=num_cpus,
        strategy=strategy,
        reporter_arguments=slack,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with interruptible(), console.status("starting Redis") as status:
            _run(Workstation(plan, on_stage=lambda stage: status.update(f"starting {stage}")), status, as_json=as_json)
    except KeyboardInterrupt:
        console.print("ended")
    except (ValueError, StartFailed, OSError) as error:
        click.echo(f"gradloc up: {str(error).splitlines()[0]}", err=True)
        sys.exit(1 if isinstance(error, StartFailed) else EXIT_BAD_INPUT)


def _run(workstation: Workstation, status: Status, *, as_json: bool) -> None:
    with workstation:
        status.update("waiting for Ray")
        workstation.wait_ray()
        status.stop()
        if as_json:
            click.echo(json.dumps(_addresses(workstation)))
        else:
            Console().print(_guide(workstation))
        workstation.watch()


def _addresses(workstation: Workstation) -> dict[str, str]:
    assert workstation.ray is not None
    return {
        "redis": workstation.redis_url,
        "store": workstation.store_url,
        "page": workstation.reporter_url,
        "rest": f"{workstation.reporter_url}/api/v1",
        "metrics": f"{workstation.reporter_url}/metrics",
        "ray": workstation.ray.address,
        "logs": str(workstation.logs),
    }


def _guide(workstation: Workstation) -> Panel:
    text = Text.assemble(
        "Put this into the training script:\n\n",
        (
            f'    probe = gradloc.watch(model, optimizer, run="my-run",\n'
            f'                          redis="{workstation.redis_url}",\n'
            f'                          store="{workstation.store_url}")\n',
            "bold",
        ),
        f"\nPage   {workstation.reporter_url}\n",
        f"REST   {workstation.reporter_url}/api/v1\n",
        f"Logs   {workstation.logs}\n\n",
        f"Watch a run with: gradloc tail my-run --redis {workstation.redis_url}\nCtrl-C ends all of it.",
    )
    return Panel(text, title="gradloc is up")
