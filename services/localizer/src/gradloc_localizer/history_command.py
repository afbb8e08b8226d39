"""`gradloc history`: the findings of a run over time, and runs compared with each other."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradloc_localizer.history import Comparison, RunHistory, compare
from gradloc_localizer.history_sources import Reporter, SourceRejected, from_file
from gradloc_localizer.html_report import history_page, span
from gradloc_localizer.terminal import EXIT_REJECTED
from gradloc_proto.codec import plain

TOKEN_VARIABLE = "GRADLOC_TOKEN"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--reporter",
    metavar="URL",
    envvar="GRADLOC_REPORTER",
    help="Ask this reporter; RUN is a run id then, else a file of findings. The token is GRADLOC_TOKEN's.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write it there as one self-contained page as well.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def history(runs: tuple[str, ...], reporter: str | None, html: Path | None, as_json: bool) -> None:
    """Which cause came first in RUN, what came after it, and, of several runs in the order in which they were made,
    which causes were gone after a fix and which remained.

    RUN is a file of what `gradloc localize --json` or `gradloc tail --json` printed, or a run id (--reporter).
    """
    try:
        if reporter is None:
            found = [one for run in runs for one in from_file(Path(run))]
        else:
            door = Reporter(reporter, os.environ.get(TOKEN_VARIABLE))
            found = [door.history(run) for run in runs]
        told = compare(found)
        if html is not None:
            html.write_text(history_page(told), encoding="utf-8")
    except SourceRejected as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")
    if as_json:
        click.echo(json.dumps(plain(asdict(told))))
    else:
        Console().print(_text(told))


def _refuse(reason: str) -> None:
    click.echo(f"gradloc history: {reason}", err=True)
    sys.exit(EXIT_REJECTED)


def _text(told: Comparison) -> RenderableType:
    parts: list[RenderableType] = []
    for index, run in enumerate(told.runs):
        parts += _run(run)
        changed = told.changed_labels[index]
        parts += [Text(f"  {name}: {before} -> {after}", style="dim") for name, (before, after) in changed.items()]
    if len(told.runs) > 1:
        table = Table(box=None, pad_edge=False)
        table.add_column("cause")
        for run in told.runs:
            table.add_column(Text(run.run_id), justify="right")
        table.add_column("in the last run")
        for course in told.courses:
            table.add_row(course.cause, *(str(count or "-") for count in course.counts), course.fate)
        parts += [Text("From run to run", style="bold"), table]
    return Group(*parts)


def _run(run: RunHistory) -> list[RenderableType]:
    steps = "" if run.last_step is None else f" in {run.last_step + 1:,} steps"
    number = f"{run.num_findings} finding{'' if run.num_findings == 1 else 's'}"
    parts: list[RenderableType] = [Text(f"{run.run_id} · {number}{steps}", style="bold")]
    if not run.episodes:
        return parts
    table = Table(box=None, pad_edge=False)
    for name in (
        "steps",
        "cause",
        "verdict",
        "findings",
        "worst norm",
        "usual x",
        "without",
        "fix that would have held",
    ):
        table.add_column(name)
    for one in run.episodes:
        fix = "" if one.fix is None or not one.fix_holds else f"{one.fix} (norm {_number(one.fix_norm)})"
        table.add_row(
            span(one),
            Text(f"{one.cause} ({one.confidence})"),
            ", ".join(one.verdicts),
            str(one.num_findings),
            _number(one.norm),
            _number(one.times_healthy),
            _number(one.norm_without),
            Text(fix),
        )
    return [*parts, table]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
