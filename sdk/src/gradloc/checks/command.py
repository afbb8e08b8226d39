"""`gradloc check LAYER`, `gradloc triage`, `gradloc verify-step`, `gradloc doctor`: the checks from a shell.

Exit code 0: nothing found; 1: findings; 2: misuse or input that cannot be read. torch is imported only
where a check needs it.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from gradloc.checks.finding import CheckFinding, Report, joined

EXIT_FINDINGS = 1
EXIT_MISUSE = 2
_FIRST_LINE_BYTES_MAX = 1 << 20
_HELP = {"help_option_names": ["-h", "--help"]}
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")


@contextlib.contextmanager
def _one_clear_line(name: str) -> Iterator[None]:
    """Input that cannot be used ends in one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        click.echo(f"gradloc {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}", err=True)
        sys.exit(EXIT_MISUSE)


def _finish(document: dict[str, Any], lines: Callable[[], RenderableType], *, as_json: bool, well: bool) -> None:
    if as_json:
        click.echo(json.dumps(document, allow_nan=False))
    else:
        Console().print(lines(), soft_wrap=True)
    sys.exit(0 if well else EXIT_FINDINGS)


def _finish_report(report: Report, title: str, *, as_json: bool) -> None:
    from gradloc.checks.printing import report_lines

    well = not report.findings
    _finish({"check": title, **report.to_json()}, lambda: report_lines(report, title), as_json=as_json, well=well)


@click.group(context_settings=_HELP, invoke_without_command=True)
@click.option("--self-test", "wants_self_test", is_flag=True, help="The same as `gradloc check self-test`.")
@_json_option
@click.pass_context
def check(ctx: click.Context, wants_self_test: bool, as_json: bool) -> None:
    """Check one layer of an RL run, from the signal's source on: data, reward, policy, gradient, optimizer."""
    if wants_self_test:
        ctx.invoke(self_test, as_json=as_json)
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        sys.exit(EXIT_MISUSE)


@check.command(context_settings=_HELP)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json, or a model's folder that holds one."
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="What prompt and response may be together.")
@click.option("--reward-range", type=float, nargs=2, help="Lowest and highest reward.")
@click.option("--require", multiple=True, metavar="FIELD", help="A field that every row must fill; repeatable.")
@click.option("--field", "fields", multiple=True, metavar="MEANING=FIELD", help="Such as prompt=question; repeatable.")
@click.option("--show-text", is_flag=True, help="Show short excerpts of prompts and responses.")
@_json_option
def data(
    file: Path,
    tokenizer: Path | None,
    max_tokens: int | None,
    reward_range: tuple[float, float] | None,
    require: tuple[str, ...],
    fields: tuple[str, ...],
    show_text: bool,
    as_json: bool,
) -> None:
    """Check all rows of FILE: JSONL (also .gz), Parquet, or a folder of datasets.save_to_disk. A snapshot or bundle is
    checked as a batch."""
    from gradloc.checks.data_rows import DataSettings, check_rows
    from gradloc.checks.rows import open_rows
    from gradloc.checks.vocabulary import read_vocabulary

    if reward_range is not None and not reward_range[0] < reward_range[1]:
        raise click.UsageError("--reward-range: expected two numbers, the smaller first")
    with _one_clear_line("check data"):
        if _is_source(file):
            report = _source("data", str(file))
        else:
            rows = open_rows(file)
            settings = DataSettings(
                fields=_mapping(fields),
                required=frozenset(require),
                reward_range=reward_range,
                tokens_max=max_tokens,
                show_text=show_text,
            )
            vocabulary = None if tokenizer is None else read_vocabulary(tokenizer)
            with _progress(quiet=as_json) as show:
                report = check_rows(rows, settings, vocabulary, lambda num: show(f"{num:,} rows", rows.fraction))
            if not report.counts["rows"]:
                raise ValueError(f"{file} holds no row; expected at least one")
    _finish_report(report, "data", as_json=as_json)


def _is_source(path: Path) -> bool:
    """Whether a path is a document, bundle or snapshot; a .json whose first line is whole is a file of rows."""
    if path.suffix == ".json" and path.is_file():
        with path.open("rb") as lines:
            first, second = lines.readline(_FIRST_LINE_BYTES_MAX), lines.readline(_FIRST_LINE_BYTES_MAX)
        return not (first.lstrip().startswith(b"{") and first.rstrip().endswith(b"}") and second.strip())
    return path.suffix == ".json" or (path / "bundle.json").is_file() or (path / "manifest.json").is_file()


def _mapping(fields: tuple[str, ...]) -> dict[str, str]:
    from gradloc.checks.row_text import NAMES

    made = {}
    for one in fields:
        meaning, separator, name = one.partition("=")
        if not separator or meaning not in NAMES or not name:
            raise click.UsageError(f"--field {one}: expected MEANING=FIELD with a meaning of {', '.join(NAMES)}")
        made[meaning] = name
    return made


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float | None], None]]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _text, _fraction: None
        return
    columns = (TextColumn("{task.description:>24}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, fraction: bar.update(task, description=text, completed=fraction or 0.0)


def _source(layer: str, source: str) -> Report:
    from gradloc.checks.sources import check_source

    return check_source(layer, source)


@check.command(context_settings=_HELP)
@click.argument("source", required=False)
@click.option("--policy-tokenizer", type=click.Path(path_type=Path), help="The policy's tokenizer.json or folder.")
@click.option("--reward-tokenizer", type=click.Path(path_type=Path), help="The reward model's.")
@click.option("--texts", is_flag=True, help="The reward model gets text, not the policy's ids.")
@click.option("--reward-range", type=float, nargs=2, help="Lowest and highest reward.")
@_json_option
def reward(
    source: str | None,
    policy_tokenizer: Path | None,
    reward_tokenizer: Path | None,
    texts: bool,
    reward_range: tuple[float, float] | None,
    as_json: bool,
) -> None:
    """Check rewards in SOURCE (JSON document, bundle, or JSONL with one reward a row), and two tokenizers."""
    from gradloc.checks.tokenizer_pair import check_tokenizers
    from gradloc.checks.vocabulary import read_vocabulary

    if (policy_tokenizer is None) != (reward_tokenizer is None):
        raise click.UsageError("give --policy-tokenizer and --reward-tokenizer together")
    if source is None and policy_tokenizer is None:
        raise click.UsageError("nothing to check: give SOURCE or two tokenizers")
    reports: list[Report] = []
    with _one_clear_line("check reward"):
        if source is not None:
            reports.append(_rewards(source, reward_range))
        if policy_tokenizer is not None and reward_tokenizer is not None:
            mine, theirs = read_vocabulary(policy_tokenizer), read_vocabulary(reward_tokenizer)
            reports.append(Report(check_tokenizers(mine, theirs, shares_ids=not texts)))
    _finish_report(joined(reports), "reward", as_json=as_json)


def _rewards(source: str, bounds: tuple[float, float] | None) -> Report:
    path = Path(source)
    if "://" in source or _is_source(path):
        return _source("reward", source)
    from gradloc.checks.reward_rows import check_reward_rows

    return check_reward_rows(path, bounds)


def _layer_command(layer: str, about: str) -> None:
    @check.command(name=layer, context_settings=_HELP, help=about)
    @click.argument("source")
    @_json_option
    def run(source: str, as_json: bool) -> None:
        with _one_clear_line(f"check {layer}"):
            report = _source(layer, source)
        _finish_report(report, layer, as_json=as_json)


_layer_command("policy", "Check loss, ratios, advantages in SOURCE: JSON document, debug bundle or snapshot.")
_layer_command("gradient", "Check norms by layer and coefficients in SOURCE: JSON document, debug bundle or snapshot.")
_layer_command("optimizer", "Check learning rates in SOURCE (JSON document or debug bundle); its state: in the loop.")


@check.command(name="self-test", context_settings=_HELP)
@_json_option
def self_test(as_json: bool) -> None:
    """Plant every known fault and look whether the checks find it, and nothing in healthy set-ups."""
    with _one_clear_line("check self-test"):
        import torch

        from gradloc.checks.printing import self_test_lines
        from gradloc.checks.self_test import self_test as run_self_test

        torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
        with _progress(quiet=as_json) as show:
            result = run_self_test(lambda done, total: show(f"{done} of {total}", done / total))
    _finish(result.to_json(), lambda: self_test_lines(result), as_json=as_json, well=result.passed)


@click.command(context_settings=_HELP)
@click.argument("log", type=click.Path(path_type=Path))
@_json_option
def triage(log: Path, as_json: bool) -> None:
    """Say from a training LOG what went wrong, where to look next and which check to run.

    Understands console logs of TRL, verl, OpenRLHF, torchrun and Ray, trainer_state.json, JSON lines and CSV."""
    with _one_clear_line("triage"):
        from gradloc.checks.log_series import read_log
        from gradloc.checks.printing import triage_lines
        from gradloc.checks.triage import triage as decide

        if not log.is_file():
            raise ValueError(f"no file {log}; give a training log, trainer_state.json or a CSV of metrics")
        found = decide(read_log(log))
    well = found.branch == "healthy"
    _finish({"log": log.name, **found.to_json()}, lambda: triage_lines(found, log.name), as_json=as_json, well=well)


@click.command(name="verify-step", context_settings=_HELP)
@click.argument("snapshot")
@click.option("--against", metavar="HEALTHY", help="A healthy snapshot or document; else what SNAPSHOT says itself.")
@_json_option
def verify_step(snapshot: str, against: str | None, as_json: bool) -> None:
    """Replay the step in SNAPSHOT with a fixed seed and compare loss, rewards and norms with a healthy step.

    SNAPSHOT is a snapshot's folder or URL, or a JSON document with loss, rewards, grad_norm, layer_norms.
    Passes only if all numbers are back in range."""
    with _one_clear_line("verify-step"):
        from gradloc.checks.healthy_step import compare, not_compared, numbers_at
        from gradloc.checks.printing import comparison_lines

        now, own = numbers_at(snapshot)
        healthy = numbers_at(against)[0] if against is not None else own
        if healthy is None:
            raise ValueError(f"{snapshot} says nothing of a healthy step; give one with --against")
        made = compare(now, healthy)
        skipped = not_compared(now, healthy)
    well = all(one.is_back for one in made)
    document = {
        "passed": well,
        "comparisons": [one.to_json() for one in made],
        "skipped": [{"what": one.what, "why": one.why} for one in skipped],
    }
    _finish(document, lambda: comparison_lines(made, skipped), as_json=as_json, well=well)


@click.command(context_settings=_HELP)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--data", "data_files", multiple=True, type=click.Path(path_type=Path), help="A data file; repeatable.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json, or a folder that holds one.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="What prompt and response may be together.")
@click.option("--budget-s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Time for all of it.")
@_json_option
def doctor(
    folder: Path,
    data_files: tuple[Path, ...],
    tokenizer: Path | None,
    max_tokens: int | None,
    budget_s: float,
    as_json: bool,
) -> None:
    """Check all layers of a run by what lies in its FOLDER (logs, snapshots, bundles, data), within five minutes."""
    with _one_clear_line("doctor"):
        from gradloc.checks.data_rows import DataSettings
        from gradloc.checks.doctor import examine
        from gradloc.checks.printing import diagnosis_lines
        from gradloc.checks.vocabulary import read_vocabulary

        with _progress(quiet=as_json) as show:
            found = examine(
                folder,
                data=data_files,
                settings=DataSettings(tokens_max=max_tokens),
                vocabulary=None if tokenizer is None else read_vocabulary(tokenizer),
                budget_s=budget_s,
                on_progress=lambda name: show(name[-24:], None),
            )
    _finish(found.to_json(), lambda: diagnosis_lines(found), as_json=as_json, well=found.is_well)


for _command in (triage, verify_step, doctor):
    check.add_command(_command)
__all__ = ["CheckFinding", "check", "doctor", "triage", "verify_step"]
