"""`gradloc whatif SNAPSHOT`: the saved step under remedies, without some tokens, or with its norm clipped.

On this machine, or by the what-if app of a cluster (--serve).
"""

import json
import sys
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from gradloc_localizer import whatif_client
from gradloc_localizer.asked import read
from gradloc_localizer.terminal import EXIT_REJECTED, progress_bar
from gradloc_proto.whatif import WhatIfOptions


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("snapshot")
@click.option(
    "--drop",
    "drops",
    multiple=True,
    metavar="RANK:MICRO:SEQ[:TOKEN]",
    help="Leave out a token, or a whole sequence, as a finding names it. May be repeated.",
)
@click.option(
    "--token-clip", metavar="LOW:HIGH[:MODE]", help="TokenClip with these bounds; MODE: mask (default) or clip."
)
@click.option(
    "--seq-clip", metavar="LOW:HIGH[:MEAN]", help="SeqClip; MEAN: both (default), geometric, arithmetic, product."
)
@click.option("--advantage-clip", type=click.FloatRange(min=0, min_open=True), help="Advantages clipped to this size.")
@click.option("--layer-clip", is_flag=True, help="LayerClip, with the snapshot's healthy layer norms as its history.")
@click.option("--clip-norm", type=click.FloatRange(min=0, min_open=True), help="The whole norm clipped to this.")
@click.option("--skip-above", type=click.FloatRange(min=0, min_open=True), help="No update where the norm is above.")
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), help="Norm to stay under; the snapshot's own if not given."
)
@click.option(
    "--serve",
    metavar="URL",
    help="Let the what-if app at this address compute it; SNAPSHOT then ends in RUN/ATTEMPT/STEP. Its token: "
    "GRADLOC_WHATIF_TOKEN.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON, layer norms too.")
@click.option("--allow-factory", "factories", multiple=True, metavar="MODULE:FUNCTION", help="As for gradloc localize.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:0 or auto.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads of torch.")
def whatif(
    snapshot: str,
    drops: tuple[str, ...],
    token_clip: str | None,
    seq_clip: str | None,
    advantage_clip: float | None,
    layer_clip: bool,
    clip_norm: float | None,
    skip_above: float | None,
    limit: float | None,
    serve: str | None,
    as_json: bool,
    factories: tuple[str, ...],
    device: str,
    threads: int,
) -> None:
    """What the norm of the step in SNAPSHOT would have been under a remedy, and how far the update would point where
    the step without its culprits does. Without options: under every remedy with its defaults."""
    try:
        options = WhatIfOptions(
            drop=drops,
            token_clip=token_clip,
            seq_clip=seq_clip,
            advantage_clip=advantage_clip,
            layer_clip=layer_clip,
            clip_norm=clip_norm,
            skip_above=skip_above,
            limit=limit,
        )
        asked = read(options)
        with progress_bar(quiet=as_json) as on_progress:
            if serve is not None:
                told = whatif_client.ask(serve, whatif_client.request_of(snapshot, options), on_progress)
            else:
                # torch takes a second that `gradloc whatif --help` should not wait for.
                from gradloc_localizer.driver import Options
                from gradloc_localizer.foretelling import Foreteller

                how = Options(limit=limit, allowed_factories=factories, device=device, num_threads=threads)
                told = Foreteller(snapshot, how, on_progress).tell(asked, on_progress).as_dict()
    except ValidationError as error:
        _refuse(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}")
    except (ValueError, OSError) as error:
        _refuse(str(error).split("\n", maxsplit=1)[0])
    if as_json:
        click.echo(json.dumps(told))
    else:
        _show(told)


def _refuse(line: str) -> None:
    click.echo(f"gradloc whatif: {line}", err=True)
    sys.exit(EXIT_REJECTED)


def _show(told: dict[str, Any]) -> None:
    console = Console()
    console.print(f"Step {told['step']} · limit {_number(told['limit'])} · verdict: {told['verdict']}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("the step", "left"),
        ("norm", "right"),
        ("", "left"),
        ("cosine", "right"),
        ("tokens", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in told["rows"]:
        table.add_row(
            row["name"],
            _number(row["norm"]),
            "holds" if row["holds"] else "too large",
            "" if row["cosine"] is None else f"{float(row['cosine']):.3f}",
            "" if row["num_changed"] is None else str(row["num_changed"]),
        )
    console.print(table)
    console.print("cosine: to the update without the culprits; tokens: whose coefficient changes", style="dim")
    for skipped in told["skipped"]:
        console.print(f"{skipped['name']}: not tried, the snapshot holds no {skipped['needs']}", markup=False)
    if replica := told.get("replica"):
        started = "a replica was started for this answer" if replica["started"] else "a replica was ready"
        console.print(f"{started}; it began after {replica['waited_s']:.1f} s", style="dim")


def _number(value: float | str) -> str:
    """Numbers that are not finite come as strings."""
    return f"{float(value):.4g}"
