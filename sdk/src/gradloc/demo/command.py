"""`gradloc demo`: a real GRPO run on this machine, a real fault, and the services that find it."""

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gradloc.demo.envelope import FAULT_NAMES, MODELS, SMOLLM2, TINY
from gradloc.demo.performance import House, Script, Told, opened, perform, staged
from gradloc.demo.review import in_short, review
from gradloc.demo.smollm2 import WeightsMissing, weights_path
from gradloc.workstation.processes import StartFailed, interruptible


@click.command(name="demo")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    help=f"One of {', '.join(FAULT_NAMES)}; token-mismatch if not given. Several are played one after the other.",
)
@click.option("--all", "is_all", is_flag=True, help="Play every fault, one after the other, and show a table.")
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default=TINY,
    show_default=True,
    help=f"tiny: a transformer that sorts digits. {SMOLLM2}: a language model that adds numbers (`make smollm`).",
)
@click.option("--seed", type=click.IntRange(0, 10**6), default=1, show_default=True, help="Chooses data and place.")
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(40, 10_000),
    default=None,
    help="Of training; what the fault needs if not given.",
)
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
    faults: tuple[str, ...],
    is_all: bool,
    model: str,
    seed: int,
    num_steps: int | None,
    strategy: Literal["attribution", "bisect"],
    kill_redis_at_step: int | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Train a small transformer with GRPO, let a fault strike, and find the token that did it.

    Redis, detector, Ray job, reporter and a Slack-compatible endpoint run for real on this machine.
    Exit code 0: the truth was found (with --fault none: nothing was; with several or --all: of every one);
    1: it was not; 2: bad input.
    """
    unknown = [fault for fault in faults if fault not in FAULT_NAMES]
    if unknown:
        raise click.UsageError(f"unknown fault {unknown[0]!r}; expected one of {', '.join(FAULT_NAMES)}")
    if is_all and faults:
        raise click.UsageError("--all plays every fault; leave out --fault, or name those you want")
    faults = FAULT_NAMES if is_all else faults or FAULT_NAMES[:1]
    is_one = len(faults) == 1
    _check_model(model, faults)
    if not is_one and (kill_redis_at_step is not None or keep):
        raise click.UsageError("--kill-redis-at-step and --keep are for one fault; several share their services")
    script = Script(
        faults[0],
        seed,
        num_steps or MODELS[model].steps_for(faults[0]),
        strategy,
        kill_redis_at_step,
        model=model,
    )
    if kill_redis_at_step is not None and kill_redis_at_step >= script.num_steps:
        raise click.UsageError(
            f"--kill-redis-at-step {kill_redis_at_step} is beyond the last of {script.num_steps} steps"
        )
    console = Console(stderr=as_json, highlight=False)
    work = Path(tempfile.mkdtemp(prefix="gradloc-demo-"))
    try:
        with interruptible():
            if is_one:
                result = _play(script, work, console, keep)
            else:
                result = _play_all(faults, script, num_steps, work, console)
    except StartFailed as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(result))
    is_right = result["right"] if is_one else all(row["right"] for row in result["faults"])
    sys.exit(0 if is_right else 1)


def _check_model(model: str, faults: tuple[str, ...]) -> None:
    """Raises click.UsageError for what the model does not know, or where its weights are not installed."""
    known = MODELS[model].faults
    unknown = [fault for fault in faults if fault not in known]
    if unknown:
        raise click.UsageError(f"--model {model} knows the faults {', '.join(known)}; {unknown[0]!r} is for {TINY}")
    if model != SMOLLM2:
        return
    try:
        weights_path()
    except WeightsMissing as error:
        raise click.UsageError(str(error)) from None


def _play(script: Script, work: Path, console: Console, keep: bool) -> dict[str, Any]:
    with _progress(console, script.num_steps) as (progress, tell), perform(script, work, tell) as played:
        result = review(script, played)
        progress.stop()
        _show(result, played.station.reporter_url, console, keep)
        if keep:
            _stay(console)
    return result


def _play_all(
    faults: tuple[str, ...], first: Script, num_steps: int | None, work: Path, console: Console
) -> dict[str, Any]:
    """Every fault in a run of its own; services and the pretrained policy are shared."""
    rows: list[dict[str, Any]] = []

    def tell(told: Told) -> None:
        console.print(Text(f"  {told.text}", style="dim"))

    with opened(work, first.seed, first.strategy, tell, first.model) as house:
        for number, fault in enumerate(faults, start=1):
            script = replace(first, fault=fault, num_steps=num_steps or first.cast.steps_for(fault), number=number)
            rows.append(_one_of_all(house, script, work / str(number), console))
    _show_all(rows, console)
    return {"seed": first.seed, "strategy": first.strategy, "faults": rows}


def _one_of_all(house: House, script: Script, work: Path, console: Console) -> dict[str, Any]:
    try:
        with _progress(console, script.num_steps) as (_, tell), staged(house, script, work, tell) as played:
            row = in_short(review(script, played))
    except StartFailed as error:
        house.station.check()  # the services are everybody's: without them nothing that follows means anything
        row = {**in_short({}), "fault": script.fault, "right": False, "error": str(error)}
    mark = Text("right", "bold green") if row["right"] else Text("WRONG", "bold red")
    console.print(Text(f"{script.fault}: ").append_text(mark))
    shutil.rmtree(work, ignore_errors=True)
    return row


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[tuple[Progress, Callable[[Told], None]]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=total)

        def tell(told: Told) -> None:
            if told.step is None:
                progress.console.print(Text(f"  {told.text}", style="dim"))
                progress.update(bar, description=told.text)
            else:
                progress.update(bar, completed=told.step + 1, description=f"training  norm {told.grad_norm:9.4g}")

        yield progress, tell


def _show_all(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(box=None)
    for name in ("fault", "", "verdict", "cause", "truth", "found"):
        table.add_column(name, no_wrap=name == "fault", overflow="fold")
    for row in rows:
        mark = Text("right", "green") if row["right"] else Text("WRONG", "bold red")
        words = (row["verdict"] or "-", row["cause"] or row.get("error") or "-")
        table.add_row(row["fault"], mark, *words, _place(row["truth"]), _place(row["found"]))
    console.print(table)


def _place(place: dict[str, Any] | None) -> str:
    """step 23 rank 0 micro-batch 3 sequence 1 token 12"""
    if place is None:
        return "-"
    keys = ("step", "rank", "micro_batch", "sequence", "token")
    parts = [f"{key.replace('_', '-')} {place[key]}" for key in keys if place.get(key) is not None]
    return " ".join([*parts, *([str(place["place"])] if "place" in place else [])])


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
