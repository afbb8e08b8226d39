"""The `detector` command: options, signals, exit codes. Wires bus, dispatcher, service and metrics server."""

import json
import logging
import math
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import click

from gradloc_detector.dispatch import Dispatcher, JobTemplate, RayJobs
from gradloc_detector.metrics import Metrics, MetricsServer
from gradloc_detector.policy import SENSITIVITY_RANGE, Policy
from gradloc_detector.service import DetectorService, Settings
from gradloc_proto.bus import BusUnavailable
from gradloc_proto.redis_bus import RedisBus

log = logging.getLogger("gradloc.detector")


class _Range(click.FloatRange):
    """A range that NaN is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is not a number; expected one", param, ctx) if math.isnan(number) else number


class BadInput(click.ClickException):
    """One clear line on standard error, exit code 2."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        click.echo(f"gradloc detector: {self.message}", err=True)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@click.command()
@click.option(
    "--redis",
    "redis_url",
    envvar="GRADLOC_REDIS_URL",
    default="redis://127.0.0.1:6379/0",
    show_default=True,
    help="Redis of the streams. [env: GRADLOC_REDIS_URL]",
)
@click.option(
    "--ray-address",
    envvar="GRADLOC_RAY_ADDRESS",
    default=None,
    help="Ray's dashboard, as http://host:8265; without it incidents are told but not localized. "
    "[env: GRADLOC_RAY_ADDRESS; the token is RAY_AUTH_TOKEN]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of /metrics and /healthz.")
@click.option("--port", type=click.IntRange(0, 65535), default=9471, show_default=True, help="Their port; 0: any.")
@click.option("--jobs-max", type=click.IntRange(1, 10_000), default=4, show_default=True, help="Ray jobs at a time.")
@click.option("--localizer-python", default="python", show_default=True, help="Python of the Ray jobs.")
@click.option(
    "--strategy",
    type=click.Choice(["attribution", "bisect"]),
    default="attribution",
    show_default=True,
    help="How the localizer searches.",
)
@click.option(
    "--snapshot-timeout",
    "snapshot_timeout_s",
    type=_Range(1.0, 86_400.0),
    default=Policy.__dataclass_fields__["snapshot_timeout_s"].default,
    show_default=True,
    help="Seconds to wait for a spike's snapshot.",
)
@click.option(
    "--sensitivity",
    envvar="GRADLOC_SENSITIVITY",
    type=_Range(*SENSITIVITY_RANGE),
    default=Policy.__dataclass_fields__["sensitivity"].default,
    show_default=True,
    help="Limits are multiplied by it: 2 tolerates spikes twice as large. For runs that are new to the detector. "
    "[env: GRADLOC_SENSITIVITY]",
)
@click.option("--json", "is_json", is_flag=True, help="Log lines as JSON.")
def detector(
    redis_url: str,
    ray_address: str | None,
    host: str,
    port: int,
    jobs_max: int,
    localizer_python: str,
    strategy: str,
    snapshot_timeout_s: float,
    sensitivity: float,
    is_json: bool,
) -> None:
    """Fold the steps of all runs: open incidents, publish limits, send localizations to Ray."""
    _configure_logs(is_json=is_json)
    try:
        bus = RedisBus(redis_url)
        bus.ping()
        jobs = RayJobs(ray_address, token=os.environ.get("RAY_AUTH_TOKEN")) if ray_address else None
    except ValueError as error:
        raise BadInput(str(error)) from None
    except BusUnavailable as error:
        raise BadInput(f"{error}; start Redis there, or name another with --redis or GRADLOC_REDIS_URL") from None
    metrics = Metrics()
    try:
        server = MetricsServer(metrics, host=host, port=port)
    except OSError as error:
        raise BadInput(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None
    dispatcher = None
    if jobs is not None:
        dispatcher = Dispatcher(bus, jobs, JobTemplate(python=localizer_python, strategy=strategy))
        dispatcher.start()
    service = DetectorService(
        bus,
        dispatcher=dispatcher,
        metrics=metrics,
        policy=Policy(snapshot_timeout_s=snapshot_timeout_s, sensitivity=sensitivity),
        settings=Settings(jobs_max=jobs_max),
    )
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    where = f"localizations go to {ray_address}" if ray_address else "no --ray-address, so incidents are not localized"
    log.info("detector ready: metrics on http://%s:%d/metrics; %s", host, server.port, where)
    service.run(stop)
    server.close()
    bus.close()
    log.info("detector ended; leases released")


def _configure_logs(*, is_json: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if is_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log a line per poll


def main() -> None:
    """Entry point of `python -m gradloc_detector`."""
    detector(prog_name="gradloc detector")
