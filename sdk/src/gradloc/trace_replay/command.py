"""`gradloc replay FILE`: what the detector would have said of a finished run."""

import json
from pathlib import Path

import click

from gradloc.trace_replay import chart, files
from gradloc.trace_replay.judged import Verdict, judged
from gradloc_proto.codec import plain_number
from gradloc_proto.rules import Sensitivity


def report(path: Path, kind: str, verdict: Verdict) -> dict[str, object]:
    """The result as JSON-able data; a number that is not finite as text."""
    flags = [
        {"row": index, "step": one.row.step} | json.loads(flag.model_dump_json())
        for index, one in verdict.flagged
        for flag in one.flags
    ]
    last = verdict.rows[-1]
    return {
        "file": str(path),
        "format": kind,
        "num_steps": len(verdict.rows),
        "num_restarts": verdict.num_restarts,
        "num_repeated": verdict.num_repeated,
        "num_flagged": len(verdict.flagged),
        "flagged_steps": [one.row.step for _, one in verdict.flagged],
        "flags": flags,
        "limit": last.limit,
        "healthy_norm": last.healthy,
    }


@click.command(name="replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--sensitivity", default=1.0, show_default=True, help="2 tolerates spikes twice as large.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a picture: .html or .png.")
@click.option("--series", is_flag=True, help="With --json: norm, limit and healthy norm of every step too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def replay(file: Path, sensitivity: float, plot: Path | None, series: bool, as_json: bool) -> None:
    """Judge a finished run from its log FILE, step by step, as the detector would have live.

    FILE: CSV with a column grad_norm (also a W&B export), trainer_state.json, JSON lines, TensorBoard
    events, or the console log of TRL or verl.
    """
    if not 0.01 <= sensitivity <= 100:
        raise click.UsageError(f"--sensitivity {sensitivity:g}; expected 0.01 to 100")
    if plot is not None and plot.suffix not in (".html", ".png"):
        raise click.UsageError(f"--plot {plot}; expected a name that ends in .html or .png")
    try:
        kind, rows = files.read(file)
        verdict = judged(rows, Sensitivity(scale=sensitivity))
        if plot is not None and plot.suffix == ".png":
            chart.write_png(plot, file.name, verdict)
        elif plot is not None:
            plot.write_text(chart.as_html(file.name, verdict), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    result = report(file, kind, verdict)
    if as_json:
        if series:
            result["series"] = [
                {
                    "step": one.row.step,
                    "norm": plain_number(one.row.norm),
                    "limit": one.limit,
                    "healthy_norm": one.healthy,
                }
                for one in verdict.rows
            ]
        click.echo(json.dumps(result))
        return
    click.echo(f"{chart.title_of(file.name, verdict)} ({kind})")
    for _, one in verdict.flagged:
        others = "".join(f" · {flag.rule} {flag.series}" for flag in one.flags[1:4])
        click.echo(f"  {chart.note_of(one)}, {one.flags[0].score:.3g}x healthy{others}")
    if plot is not None:
        click.echo(f"picture: {plot}")
