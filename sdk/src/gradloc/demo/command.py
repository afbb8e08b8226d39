"""`gradloc demo`: a real GRPO run on this machine, a real fault, and the services that find it."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gradloc.demo.envelope import FAULT_NAMES
from gradloc.demo.performance import Script, Told, perform
from gradloc.demo.review import review
from gradloc.workstation.processes import StartFailed, interruptible

NUM_STEPS = 60


@click.command(name="demo")
@click.option("--fault", default="token-mismatch", show_default=True, help=f"One of {', '.join(FAULT_NAMES)}.")
@click.option("--seed", type=click.IntRange(0, 10**6), default=1, show_default=True, help="Chooses data and place.")
@click.option("--steps", "num_steps", type=click.IntRange(40, 10_000), default=NUM_STEPS, show_default=True)
@click.option("--strategy", type=click.Choice(["attribution", "bisect"]), default="attribution", show_default=True)
@click.option(
    "--kill-redis-at-step",
    type=click.IntRange(0),
    default=None,
    metavar="N",
    help="Kill Redis at this step and leave it dead. Then exit 0 means: training reached its last step, "
    "and events_dropped says what was lost.",
)
@click.option("--keep", is_flag=True, help="Leave the services up to look around, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def demo(
    fault: str,
    seed: int,
    num_steps: int,
    strategy: Literal["attribution", "bisect"],
    kill_redis_at_step: int | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Train a small transformer with GRPO, let a fault strike, and find the token that did it.

    Redis, detector, Ray job, reporter and a Slack-compatible endpoint run for real on this machine.
    Exit code 0: the truth was found (with --fault none: nothing was); 1: it was not; 2: bad input.
    """
    if fault not in FAULT_NAMES:
        raise click.UsageError(f"unknown fault {fault!r}; expected one of {', '.join(FAULT_NAMES)}")
    if kill_redis_at_step is not None and kill_redis_at_step >= num_steps:
        raise click.UsageError(f"--kill-redis-at-step {kill_redis_at_step} is beyond the last of {num_steps} steps")
    script = Script(fault, seed, num_steps, strategy, kill_redis_at_step)
    console = Console(stderr=as_json, highlight=False)
    work = Path(tempfile.mkdtemp(prefix="gradloc-demo-"))
    try:
        with interruptible():
            result = _play(script, work, console, keep)
    except StartFailed as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(result))
    sys.exit(0 if result["right"] else 1)


def _play(script: Script, work: Path, console: Console, keep: bool) -> dict[str, Any]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=script.num_steps)

        def tell(told: Told) -> None:
            if told.step is None:
                progress.console.print(Text(f"  {told.text}", style="dim"))
                progress.update(bar, description=told.text)
            else:
                progress.update(bar, completed=told.step + 1, description=f"training  norm {told.grad_norm:9.4g}")

        with perform(script, work, tell) as played:
            progress.update(bar, description="the judge looks at every token")
            result = review(script, played)
            progress.stop()
            _show(result, played.station.reporter_url, console, keep)
            if keep:
                _stay(console)
    return result


def _show(result: dict[str, Any], page: str, console: Console, keep: bool) -> None:
    if result["slack"]:
        console.print(Panel(Text(result["slack"]), title="Slack", expand=False))
    table = Table("", "truth (brute force)", "found", box=None)
    truth, found = result["truth"] or {}, result["found"] or {}
    for key in ("step", "rank", "micro_batch", "sequence", "token"):
        table.add_row(key.replace("_", "-"), str(truth.get(key, "-")), str(found.get(key, "-")))
    console.print(table)
    console.print(
        f"training: {result['training_steps']} steps, waited {_seconds(result['trainer_stall_s'])} for us; "
        f"alert after {_seconds(result['seconds_to_alert'])}, culprit after {_seconds(result['seconds_to_culprit'])}; "
        f"{result['steps_during_localization']} steps went on meanwhile; {result['events_dropped']} events dropped"
    )
    if keep:
        console.print(f"page: {page}")
    verdict = (
        Text("as it should be", style="bold green") if result["right"] else Text("NOT as it should be", "bold red")
    )
    console.print(verdict)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _stay(console: Console) -> None:
    console.print("services stay up; Ctrl-C ends them")
    try:
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        console.print("ending ...")
