"""`gradloc whatif SNAPSHOT`: the saved step under remedies, without some tokens, or with its norm clipped."""

import json
import sys

import click
from rich.console import Console
from rich.table import Table

from gradloc_localizer.terminal import EXIT_REJECTED, progress_bar
from gradloc_proto.codec import plain_number

_NUM_LAYERS_SHOWN = 3


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
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), help="Norm to stay under; the snapshot's own if not given."
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
    limit: float | None,
    as_json: bool,
    factories: tuple[str, ...],
    device: str,
    threads: int,
) -> None:
    """What the norm of the step in SNAPSHOT would have been under a remedy, and how far the update would point where
    the step without its culprits does. Without options: under every remedy with its defaults."""
    try:
        with progress_bar(quiet=as_json) as on_progress:
            # torch takes a second that `gradloc whatif --help` should not wait for.
            from gradloc import whatif as changes_of
            from gradloc.snapshot import open_snapshot
            from gradloc_localizer.driver import Options
            from gradloc_localizer.foretelling import Drop, foretell

            changes: list[changes_of.Change] = []
            if token_clip is not None:
                changes.append(changes_of.token_clip(*_bounds("--token-clip", token_clip)))
            if seq_clip is not None:
                changes.append(changes_of.seq_clip(*_bounds("--seq-clip", seq_clip)))
            if advantage_clip is not None:
                changes.append(changes_of.advantage_clip(advantage_clip))
            if layer_clip:
                healthy = open_snapshot(snapshot).manifest.healthy_layer_norms
                if not healthy:
                    raise ValueError("--layer-clip: the snapshot holds no healthy layer norms to compare with")
                changes.append(changes_of.layer_clip(healthy))
            if clip_norm is not None:
                changes.append(changes_of.norm_clip(clip_norm))
            options = Options(limit=limit, allowed_factories=factories, device=device, num_threads=threads)
            told = foretell(snapshot, changes, [Drop(*_place(drop)) for drop in drops], options, on_progress)
    except (ValueError, OSError) as error:
        line = str(error).split("\n", maxsplit=1)[0]
        click.echo(f"gradloc whatif: {line}", err=True)
        sys.exit(EXIT_REJECTED)
    if as_json:
        click.echo(json.dumps(_finite(told.as_dict())))
        return
    console = Console()
    console.print(f"Step {told.step} · limit {told.limit:.4g} · verdict: {told.finding.verdict}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("the step", "left"),
        ("norm", "right"),
        ("", "left"),
        ("cosine", "right"),
        ("tokens", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in told.rows:
        table.add_row(
            row.name,
            f"{row.norm:.4g}",
            "holds" if told.holds(row) else "too large",
            "" if row.cosine is None else f"{row.cosine:.3f}",
            "" if row.num_changed is None else str(row.num_changed),
        )
    console.print(table)
    console.print("cosine: to the update without the culprits; tokens: whose coefficient changes", style="dim")
    for name, needs in told.skipped:
        console.print(f"{name}: not tried, the snapshot holds no {needs}", markup=False)


def _bounds(option: str, text: str) -> tuple[float, float, str] | tuple[float, float]:
    """LOW:HIGH or LOW:HIGH:WORD. Raises ValueError."""
    parts = text.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
        rest = parts[2:]
        if len(rest) > 1:
            raise ValueError
    except (ValueError, IndexError):
        raise ValueError(
            f"{option} is {text[:40]!r}; expected LOW:HIGH such as 0.5:5, with one more word at most"
        ) from None
    return (low, high, rest[0]) if rest else (low, high)


def _place(text: str) -> list[int]:
    parts = text.split(":")
    if len(parts) not in (3, 4) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"--drop is {text[:40]!r}; expected RANK:MICRO:SEQ or RANK:MICRO:SEQ:TOKEN such as 3:0:2:358")
    return [int(part[:9]) for part in parts]


def _finite(value: object) -> object:
    """Strict JSON: numbers that are not finite as the strings that messages use."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return plain_number(value) if isinstance(value, float) else value
