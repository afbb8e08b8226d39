"""Metrics of a training log, step by step, whatever program wrote it.

Understood: dicts (TRL, Hugging Face Trainer, ms-swift, OpenRLHF), `step:1 - key:value` (verl), JSON lines,
trainer_state.json, CSV, tables with bars, progress bars with `key=value`, and `loss: value` in plain text,
each also behind Ray's and torchrun's prefixes. Streaming and bounded; no line's text is kept.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gradloc.checks.log_signals import Signal, signal_of

LINE_CHARACTERS_MAX = 20_000
STEPS_MAX = 200_000
STATE_BYTES_MAX = 256 << 20
_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_WRAP = r"(?:np\.float\d+\(|tensor\()?"
_IN_DICT = re.compile(rf"""["']([\w/@. -]+)["']\s*:\s*["']?{_WRAP}({_NUMBER})\b""", re.IGNORECASE)
_IN_VERL = re.compile(rf"(?:^|\s-\s)([\w/@.()-]+):\s?{_WRAP}({_NUMBER})(?=\)|\s|$)", re.IGNORECASE)
_IN_BAR = re.compile(rf"[\[,\s]([A-Za-z_][\w/]*)=({_NUMBER})(?=[,\]\s]|$)", re.IGNORECASE)
_IN_TEXT = re.compile(
    r"\b((?:policy |actor |avg |mean |total )?(?:loss|grad(?:ient)?[_ ]?norm|reward|kl|entropy))"
    rf"\s*[:=]\s*({_NUMBER})\b",
    re.IGNORECASE,
)
_IN_TEXT_STEP = re.compile(r"\b(?:global[_ ]?)?(?:step|iter(?:ation)?)\s*[:=#]?\s*(\d+)", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^(?:\([\w.]+(?: pid=\d+)?(?:, ip=[\d.]+)?\)\s*|\[(?:default|rank)?\d+\]:?\s*|\w+-\d+: )+")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
_NAMES: dict[str, tuple[str, ...]] = {
    "step": ("step", "global_step", "train/global_step", "trainer/global_step", "iteration", "iter",
             "global_step/max_steps"),
    "loss": ("loss", "actor/pg_loss", "policy_loss", "pg_loss", "train/loss", "actor/loss", "training loss",
             "train_loss", "policy loss", "actor loss", "total loss", "loss/policy_avg", "actor_loss", "act_loss",
             "pg"),
    "grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm", "gradient_norm", "actor_grad_norm", "grad norm",
                  "gradient norm", "gradnorm"),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean", "train/reward", "rewards/mean", "reward/mean",
               "return", "env/reward/total", "reward_mean", "avg reward", "mean reward", "objective/scores", "rm"),
    "reward_std": ("reward_std", "train/reward_std", "critic/score/std"),
    "kl": ("kl", "actor/kl_loss", "actor/ppo_kl", "ppo_kl", "kl_loss", "train/kl", "objective/kl", "approx_kl"),
    "entropy": ("entropy", "actor/entropy_loss", "actor/entropy", "entropy_loss", "train/entropy", "objective/entropy"),
    "lr": ("learning_rate", "actor/lr", "lr", "train/learning_rate", "actor_lr", "act_lr"),
    "length_cut": ("response_length/clip_ratio", "completions/clipped_ratio", "clip_ratio/response"),
    "value_loss": ("critic/vf_loss", "value_loss", "critic_loss", "loss/value_avg"),
    "memory": ("perf/max_memory_allocated_gb", "memory(gib)", "memory_gb", "gpu_memory_gb"),
    "zero_std": ("frac_reward_zero_std", "num_zero_variance_groups"),
    "accuracy": ("accuracy", "val_accuracy", "eval_accuracy"),
}  # fmt: skip
_MEANING = {name: meaning for meaning, names in _NAMES.items() for name in names}
_RANK = {name: rank for names in _NAMES.values() for rank, name in enumerate(names)}
SERIES = tuple(name for name in _NAMES if name != "step")


@dataclass
class LogSeries:
    """values: meaning to one number a step (NaN kept); lines: the log's line of each step; signals: by name, the
    first line of each. num_lines, num_steps_lost: bounds reached. seconds: (first, last step, last line)."""

    values: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    signals: dict[str, Signal] = field(default_factory=dict)
    step_lines: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    last_second: float | None = None
    num_lines: int = 0
    num_exceptions: int = 0
    last_exception: Signal | None = None

    @property
    def num_steps(self) -> int:
        return len(self.step_lines)

    def numbers(self, meaning: str) -> list[float]:
        return [value for _, value in self.values.get(meaning, ())]

    def add_step(self, found: dict[str, float], line: int) -> None:
        if self.num_steps >= STEPS_MAX:
            return
        step = found.get("step", float(self.num_steps))
        number = int(step) if math.isfinite(step) else self.num_steps
        self.step_lines.append(line)
        for meaning, value in found.items():
            if meaning != "step":
                self.values.setdefault(meaning, []).append((number, value))


def read_log(path: Path) -> LogSeries:
    """Read a log of any known format. Raises OSError, or ValueError for a trainer_state.json that is too large or a
    table that is none."""
    with path.open("rb") as raw:
        start = raw.read(2)
    if start[:1] in (b"{", b"[") and path.suffix == ".json":
        whole = _trainer_state(path)
        if whole is not None:
            return whole
    # Shells of Windows write UTF-16, with its mark.
    encoding = "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    with path.open(encoding=encoding, errors="replace", newline=None) as lines:
        if path.suffix == ".csv":
            return _csv(lines)
        return read_lines(_parts(lines))


def _parts(lines: Iterable[str]) -> Iterator[str]:
    """Progress bars rewrite a line by carriage returns: each part counts as a line."""
    for line in lines:
        yield from line.split("\r")


def read_lines(lines: Iterable[str]) -> LogSeries:
    """The same for lines of text."""
    series = LogSeries()
    columns: list[str] | None = None
    for number, raw in enumerate(lines, 1):
        series.num_lines = number
        line = _PREFIX.sub("", _ANSI.sub("", raw[:LINE_CHARACTERS_MAX].rstrip("\r\n")))
        seconds = _seconds(line)
        if seconds is not None:
            series.last_second = seconds
        found = _metrics(line)
        if not found and " | " in line:
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if any(_MEANING.get(cell.lower()) for cell in cells):
                columns = cells
            elif columns is not None and len(cells) == len(columns):
                found = _named(dict(zip(columns, cells, strict=True)))
        if found and found.keys() - {"step"}:
            series.add_step(found, number)
            if series.last_second is not None:
                series.step_seconds.append(series.last_second)
            continue
        signal = signal_of(line, number)
        if signal is not None:
            series.signals.setdefault(signal.name, signal)
            if signal.name == "exception":
                series.num_exceptions += 1
                series.last_exception = signal
    return series


def _metrics(line: str) -> dict[str, float]:
    """Metrics of one line by meaning; empty where it has none."""
    if "{" in line and ":" in line:
        pairs = _IN_DICT.findall(line)
        named = _named(dict(pairs)) if pairs else {}
        if named:
            step = _IN_TEXT_STEP.search(line.split("{", maxsplit=1)[0])
            return named if step is None or "step" in named else named | {"step": float(step.group(1))}
    if " - " in line and ":" in line:
        named = _named(dict(_IN_VERL.findall(line)))
        if len(named) >= 2:
            return named
    if "=" in line:
        named = _named(dict(_IN_BAR.findall(line)))
        if named.keys() - {"step", "lr"}:
            return named
    pairs = _IN_TEXT.findall(line)
    if pairs:
        named = _named(dict(pairs))
        step = _IN_TEXT_STEP.search(line)
        return named if step is None else named | {"step": float(step.group(1))}
    return {}


def _named(pairs: dict[str, str]) -> dict[str, float]:
    """Known names by meaning; of several for one meaning the more specific wins."""
    found: dict[str, tuple[int, float]] = {}
    for given, text in pairs.items():
        name = given.strip().lower()
        meaning = _MEANING.get(name)
        if meaning is None:
            continue
        try:
            value = float(text)
        except ValueError:
            continue
        rank = _RANK[name]
        # A NaN must not hide behind a finite synonym.
        if (
            meaning not in found
            or math.isnan(value)
            or (rank < found[meaning][0] and not math.isnan(found[meaning][1]))
        ):
            found[meaning] = (rank, value)
    return {meaning: value for meaning, (_, value) in found.items()}


def _seconds(line: str) -> float | None:
    match = _TIME.search(line[:80])
    if match is None:
        return None
    try:
        return datetime.fromisoformat(f"{match.group(1)} {match.group(2)}").timestamp()
    except (ValueError, OverflowError):  # no such day, or none that a clock has
        return None


def _csv(lines: Iterable[str]) -> LogSeries:
    try:
        return _table(csv.DictReader(lines))
    except csv.Error as error:
        raise ValueError(f"not a table ({error}); expected columns such as step,loss,grad_norm") from None


def _table(rows: Iterable[dict[str | Any, Any]]) -> LogSeries:
    series = LogSeries()
    for number, row in enumerate(rows, 2):
        series.num_lines = number
        found = _named({name: value for name, value in row.items() if name and isinstance(value, str) and value})
        if found.keys() - {"step"}:
            series.add_step(found, number)
    return series


def _trainer_state(path: Path) -> LogSeries | None:
    """Hugging Face's trainer_state.json or a list of such rows; None where it is another kind of JSON."""
    if path.stat().st_size > STATE_BYTES_MAX:
        raise ValueError(f"{path.name} is larger than {STATE_BYTES_MAX >> 20} MiB; give the console's log instead")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    history = document.get("log_history") if isinstance(document, dict) else document
    if not isinstance(history, list):
        return None
    series = LogSeries()
    for number, row in enumerate(history, 1):
        series.num_lines = number
        if isinstance(row, dict):
            found = _named({str(name): str(value) for name, value in row.items() if not isinstance(value, dict | list)})
            if found.keys() - {"step"}:
                series.add_step(found, number)
    return series
