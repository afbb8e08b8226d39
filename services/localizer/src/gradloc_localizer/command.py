"""`gradloc localize SNAPSHOT`: explain a saved step on this machine, without Redis or Ray."""

import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from gradloc_localizer import picture
from gradloc_localizer.report import report
from gradloc_localizer.terminal import EXIT_REJECTED, progress_bar
from gradloc_proto.finding import without_text

WHOLE_SEQUENCE = 131_072  # positions of a page: more than people read, less than a browser minds


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("snapshot")
@click.option(
    "--strategy",
    type=click.Choice(["attribution", "bisect"]),
    default="attribution",
    show_default=True,
    help="attribution: all shares from two forward passes; bisect: the published search.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the finding there as one self-contained page as well.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the top of that page there as a picture; needs Chromium.",
)
@click.option("--redact", is_flag=True, help="Leave out the text of tokens and the names of samples, everywhere.")
@click.option("--json", "as_json", is_flag=True, help="Print the finding as one line of JSON.")
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), help="Norm to explain; the snapshot's own if not given."
)
@click.option(
    "--allow-factory",
    "factories",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Allow the snapshot to build its model with this function of an installed module.",
)
@click.option(
    "--reference", metavar="SNAPSHOT", help="A healthy step of the same run: how well replays of the run match."
)
@click.option(
    "--weights", metavar="CHECKPOINT", help="Weights for a snapshot that only refers to them: a folder or URL."
)
@click.option(
    "--split",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes of this machine that hold a model together which is too large for one GPU, each on its own.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:0 or auto.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads of torch.")
def localize(
    snapshot: str,
    strategy: str,
    html: Path | None,
    png: Path | None,
    redact: bool,
    as_json: bool,
    limit: float | None,
    factories: tuple[str, ...],
    reference: str | None,
    weights: str | None,
    split: int,
    device: str,
    threads: int,
) -> None:
    """Explain the step in SNAPSHOT (a folder or URL such as STORE/RUN/ATTEMPT/STEP): which tokens made its
    gradient norm, with proof, cause and fix."""
    try:
        with progress_bar(quiet=as_json) as on_progress:
            # torch takes a second that `gradloc localize --help` should not wait for.
            from gradloc_localizer.driver import Options, explain

            options = Options(
                strategy="bisect" if strategy == "bisect" else "attribution",
                limit=limit,
                allowed_factories=factories,
                device=device,
                num_threads=threads,
                reference=reference,
                weights=weights,
                num_processes=split,
                num_positions=None if html is None and png is None else WHOLE_SEQUENCE,
            )
            if split > 1:
                from gradloc_localizer.split_processes import explain_here

                manifest, finding = explain_here(snapshot, options, on_progress)
            else:
                manifest, finding = explain(snapshot, options, on_progress)
        if redact:
            finding = without_text(finding)
        if html is not None or png is not None:
            from gradloc_localizer.html_report import html_report

            _write(html_report(finding, run_id=manifest.run_id, where=snapshot), html, png)
    except (ValueError, OSError) as error:
        line = str(error).split("\n", maxsplit=1)[0]
        click.echo(f"gradloc localize: {line}", err=True)
        sys.exit(EXIT_REJECTED)
    if as_json:
        click.echo(finding.model_dump_json())
    else:
        Console().print(report(finding))


def _write(page: str, html: Path | None, png: Path | None) -> None:
    if html is not None:
        html.write_text(page, encoding="utf-8")
    if png is not None:
        with tempfile.TemporaryDirectory(prefix="gradloc-page-") as folder:
            shown = Path(folder) / "page.html"
            shown.write_text(page, encoding="utf-8")
            picture.take(shown, png)
