"""The doctor: the quick check of all layers of a run's folder, one report, within a time budget.

Looks at what it finds there: data files, logs, snapshots, debug bundles. Knows no trainer.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradloc.checks.bundle import is_bundle
from gradloc.checks.data_rows import DataSettings, check_rows
from gradloc.checks.documents import DocumentRejected
from gradloc.checks.finding import Report, Skipped, joined
from gradloc.checks.kinds import LAYERS
from gradloc.checks.log_series import LogSeries, read_log
from gradloc.checks.optimizer_state import check_lr_history
from gradloc.checks.rewards import check_history
from gradloc.checks.rows import SourceRejected, open_rows
from gradloc.checks.sources import SNAPSHOT_LAYERS, check_source
from gradloc.checks.triage import Triage, triage
from gradloc.checks.vocabulary import Vocabulary
from gradloc.snapshot import MANIFEST

BUDGET_S = 300.0
FILES_MAX = 2_000  # looked at in the folder
SNAPSHOTS_MAX = 3  # the latest ones
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".csv", ".jsonl", ".json")
ROWS_SAMPLED = 100_000


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, what was found. logs: by file name; reports: by what was checked."""

    reports: dict[str, Report]
    logs: dict[str, Triage]
    skipped: tuple[Skipped, ...]
    seconds: float

    @property
    def num_findings(self) -> int:
        return sum(len(report.findings) for report in self.reports.values())

    @property
    def failed_logs(self) -> tuple[str, ...]:
        """Logs that tell of a failure; one that tells nothing, or was stopped from outside, is no failure here."""
        return tuple(name for name, one in self.logs.items() if one.branch not in ("healthy", "unknown", "stopped"))

    @property
    def is_well(self) -> bool:
        return not self.num_findings and not self.failed_logs

    def to_json(self) -> dict[str, Any]:
        return {
            "well": self.is_well,
            "reports": {name: report.to_json() for name, report in self.reports.items()},
            "logs": {name: one.to_json() for name, one in self.logs.items()},
            "skipped": [{"what": one.what, "why": one.why} for one in self.skipped],
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class _Files:
    data: tuple[Path, ...]
    logs: tuple[Path, ...]
    snapshots: tuple[Path, ...]
    bundles: tuple[Path, ...]
    num_left_out: int


def examine(
    folder: Path,
    *,
    data: tuple[Path, ...] = (),
    settings: DataSettings | None = None,
    vocabulary: Vocabulary | None = None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
    on_progress: Callable[[str], None] = lambda _name: None,
) -> Diagnosis:
    """Examine a run's folder. Stops starting new checks when the budget is spent, and says which were left out.

    Raises NotADirectoryError for something that is no folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder; give the run's folder, with its logs and snapshots")
    started = clock()
    files = _files(folder)
    reports: dict[str, Report] = {}
    logs: dict[str, Triage] = {}
    skipped: list[Skipped] = []
    for name, job in _jobs(folder, files, data, settings or DataSettings(), vocabulary):
        if clock() - started > budget_s:
            skipped.append(Skipped(name, f"the budget of {budget_s:.0f} s was spent"))
            continue
        on_progress(name)
        try:
            result = job()
        except (ValueError, OSError) as error:
            skipped.append(Skipped(name, str(error).split("\n", maxsplit=1)[0][:200]))
            continue
        if isinstance(result, Triage):
            logs[name] = result
        elif result is not None:
            reports[name] = result
    if files.num_left_out:
        skipped.append(Skipped(f"{files.num_left_out} files", f"only {FILES_MAX} are looked at"))
    skipped += _not_seen(reports, logs)
    return Diagnosis(reports, logs, tuple(skipped), clock() - started)


def _jobs(
    folder: Path,
    files: _Files,
    data: tuple[Path, ...],
    settings: DataSettings,
    vocabulary: Vocabulary | None,
) -> Iterator[tuple[str, Callable[[], Report | Triage | None]]]:
    """Cheap and telling ones first."""
    for path in files.logs:
        yield _name(folder, path), lambda path=path: _log(path)  # type: ignore[misc]
        yield f"reward of {_name(folder, path)}", lambda path=path: _history(path)  # type: ignore[misc]
        yield f"optimizer of {_name(folder, path)}", lambda path=path: _rates(path)  # type: ignore[misc]
    for path in files.bundles:
        for layer in LAYERS:
            yield f"{layer} of {_name(folder, path)}", lambda layer=layer, path=path: _source(layer, path)  # type: ignore[misc]
    for path in files.snapshots:
        for known in SNAPSHOT_LAYERS:
            yield f"{known} of {_name(folder, path)}", lambda layer=known, path=path: _source(layer, path)  # type: ignore[misc]
    for path in (*data, *files.data):
        yield f"data of {_name(folder, path)}", lambda path=path: _rows(path, settings, vocabulary)  # type: ignore[misc]


def _name(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def _log(path: Path) -> Triage | None:
    log: LogSeries = read_log(path)
    # A text that holds neither steps nor errors is not a log.
    return triage(log) if log.num_steps or log.signals else None


def _history(path: Path) -> Report | None:
    log = read_log(path)
    means = log.numbers("reward")
    accuracies = log.numbers("accuracy")
    whole = accuracies if len(accuracies) == len(means) else None
    return Report(check_history(means, log.numbers("reward_std"), whole), (), {"steps": len(means)}) if means else None


def _rates(path: Path) -> Report | None:
    rates = read_log(path).numbers("lr")
    return Report(check_lr_history(rates), (), {"steps": len(rates)}) if rates else None


def _source(layer: str, path: Path) -> Report | None:
    try:
        return check_source(layer, str(path))
    except DocumentRejected:
        return None


def _rows(path: Path, settings: DataSettings, vocabulary: Vocabulary | None) -> Report:
    from itertools import islice

    report = check_rows(islice(open_rows(path), ROWS_SAMPLED), settings, vocabulary)
    if report.counts.get("rows", 0) < ROWS_SAMPLED:
        return report
    left = Skipped("later rows", f"the doctor looks at the first {ROWS_SAMPLED:,}; `gradloc check data` at all")
    return joined([report, Report(skipped=(left,))])


def _files(folder: Path) -> _Files:
    data: list[Path] = []
    logs: list[Path] = []
    snapshots: list[Path] = []
    bundles: list[Path] = []
    num = 0
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        num += 1
        if num > FILES_MAX:
            continue
        if path.is_dir():
            if is_bundle(path):
                bundles.append(path)
            elif (path / MANIFEST).is_file():
                snapshots.append(path)
        elif any(parent in (*snapshots, *bundles) for parent in path.parents):
            continue
        elif path.suffix == ".parquet" or (path.name.endswith((".jsonl", ".jsonl.gz")) and _holds_prompts(path)):
            data.append(path)
        elif path.suffix in LOG_SUFFIXES and path.stat().st_size:
            logs.append(path)
    snapshots.sort(key=lambda one: (one / MANIFEST).stat().st_mtime)
    return _Files(tuple(data), tuple(logs), tuple(snapshots[-SNAPSHOTS_MAX:]), tuple(bundles), max(0, num - FILES_MAX))


def _holds_prompts(path: Path) -> bool:
    """Whether a JSONL file's first row has a prompt: else it is a log of metrics."""
    try:
        first = next(iter(open_rows(path)), None)
    except SourceRejected:
        return False
    return first is not None and any(name in first.values for name in ("prompt", "question", "problem", "messages"))


def _not_seen(reports: dict[str, Report], logs: dict[str, Triage]) -> list[Skipped]:
    """Layers that nothing in the folder says anything of."""
    seen = {name.split(" of ", maxsplit=1)[0] for name in reports}
    why = {
        "data": "no data file in the folder (--data FILE) and no snapshot",
        "reward": "no snapshot with metrics and no debug bundle with rewards (gradloc.checks.watcher.Watcher)",
        "policy": "no snapshot and no debug bundle",
        "gradient": "no snapshot and no debug bundle",
        "optimizer": "no log or snapshot with a learning rate, no debug bundle (gradloc.checks.watcher.Watcher)",
    }
    missing = [Skipped(layer, why[layer]) for layer in LAYERS if layer not in seen]
    return missing if logs else [*missing, Skipped("logs", "no log with steps or errors in the folder")]
