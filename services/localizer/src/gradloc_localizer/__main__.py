"""Entry of the Ray job. Owns arguments, environment, signals and exit codes.

The Redis URL comes from GRADLOC_REDIS_URL of the pool: arguments of a job are shown by Ray's API.
"""

import logging
import os
import signal
import sys
from types import FrameType

import click

from gradloc_localizer.job import EXIT_FAILED, Job, Stopped, perform
from gradloc_proto.bus import BusUnavailable
from gradloc_proto.identities import check_run_id
from gradloc_proto.redis_bus import RedisBus

EXIT_STOPPED = 143


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run", "run_id", required=True, help="Run that the incident belongs to.")
@click.option("--attempt", type=click.IntRange(min=0), required=True, help="Attempt of the run.")
@click.option("--incident", "incident_id", required=True, help="Incident to explain.")
@click.option("--localization-attempt", type=click.IntRange(min=1), required=True, help="Grows with each try.")
@click.option("--snapshot", required=True, help="URL of the snapshot's folder.")
@click.option("--strategy", type=click.Choice(["attribution", "bisect"]), default="attribution", show_default=True)
@click.option("--redis", envvar="GRADLOC_REDIS_URL", help="Redis URL; better given by GRADLOC_REDIS_URL.")
@click.option("--device", envvar="GRADLOC_DEVICE", default="auto", show_default=True, help="cpu, cuda, cuda:0 or auto.")
@click.option(
    "--threads",
    envvar="GRADLOC_TORCH_THREADS",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Threads of torch.",
)
@click.option(
    "--replicas",
    envvar="GRADLOC_REPLICAS",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Replicas of the model that share the work; each beyond the first takes one spare_gpu.",
)
@click.option(
    "--split",
    envvar="GRADLOC_SPLIT",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes that hold a model together which is too large for one; each beyond the first takes one spare_gpu.",
)
@click.option("--probes", envvar="GRADLOC_PROBES", help="Store where answers are kept, for a job that is killed.")
def main(
    run_id: str,
    attempt: int,
    incident_id: str,
    localization_attempt: int,
    snapshot: str,
    strategy: str,
    redis: str | None,
    device: str,
    threads: int,
    replicas: int,
    split: int,
    probes: str | None,
) -> None:
    """Localize one incident's spike from its snapshot and publish the finding."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if not redis:
        raise click.UsageError("no Redis URL; set GRADLOC_REDIS_URL in the Ray pool's environment")
    if split > 1 and replicas > 1:
        raise click.UsageError("--split and --replicas are both more than 1; a split model has no replicas: give one")
    job = Job(
        run_id=run_id,
        attempt=attempt,
        incident_id=incident_id,
        localization_attempt=localization_attempt,
        snapshot=snapshot,
        strategy=strategy,
        device=device,
        num_threads=threads,
        num_replicas=replicas,
        num_processes=split,
        probes=probes or None,
        reference=os.environ.get("GRADLOC_REFERENCE") or None,
        checkpoints=tuple(filter(None, os.environ.get("GRADLOC_CHECKPOINTS", "").split(","))),
        allowed_factories=tuple(filter(None, os.environ.get("GRADLOC_ALLOWED_FACTORIES", "").split(","))),
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        check_run_id(run_id)
        bus = RedisBus(redis)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        sys.exit(perform(job, bus))
    except BusUnavailable as error:
        click.echo(f"gradloc localizer: {error}; nothing could be published", err=True)
        sys.exit(EXIT_FAILED)
    except Stopped:
        sys.exit(EXIT_STOPPED)
    finally:
        bus.close()


if __name__ == "__main__":
    main()
