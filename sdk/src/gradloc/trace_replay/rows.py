"""Rows of a log, whatever wrote it, as the numbers that the rules look at. Knows no file format."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Last part of a column's name, lower case, without what differs between trainers, in order of preference.
_NAMES = {
    "step": ("global_step", "training/global_step", "step", "_step", "trainer/global_step"),
    "norm": ("grad_norm", "gradient_norm", "global_grad_norm", "total_grad_norm"),
    "loss": ("loss", "pg_loss", "policy_loss"),
    "reward": ("reward", "rewards/mean", "score/mean", "reward_mean", "mean_reward"),
    "accuracy": ("accuracy", "acc/mean", "train_accuracy"),
    "kl": ("kl", "ppo_kl", "kl_loss", "mean_kl"),
    "ratio_max": ("ratio_max", "max_ratio", "importance_ratio_max"),
}
_NUMBER = re.compile(r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
_WRAPPED = re.compile(r"^(?:np\.|numpy\.)?(?:float|int)\d*\((.*)\)$")


@dataclass(frozen=True, slots=True)
class Row:
    """One logged step. None: not logged."""

    step: int
    norm: float
    loss: float | None = None
    reward: float | None = None
    accuracy: float | None = None
    kl: float | None = None
    ratio_max: float | None = None


def number(value: object) -> float | None:
    """A value of a log as a number; None where there is none. NaN and infinities are numbers."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer of hundreds of digits
            return math.inf if value > 0 else -math.inf
    text = str(value).strip()
    if wrapped := _WRAPPED.match(text):
        text = wrapped.group(1).strip()
    return float(text) if _NUMBER.fullmatch(text) else None


def columns_of(names: Iterable[str]) -> dict[str, str]:
    """Which column holds which number; only what is there."""
    known = list(names)
    return {field: found for field, wanted in _NAMES.items() if (found := _best(known, wanted)) is not None}


def _best(names: list[str], wanted: tuple[str, ...]) -> str | None:
    for want in wanted:
        exact = [name for name in names if _plain(name) == want]
        ending = [name for name in names if _plain(name).endswith(f"/{want}") and "val" not in _plain(name)]
        if exact or ending:
            return (exact + ending)[0]
    return None


def _plain(name: str) -> str:
    # W&B exports name a column "RUN - train/grad_norm", and its bounds with __MIN and __MAX.
    return name.strip().split(" - ")[-1].strip().lower().replace(" ", "_")


def rows_of(records: Iterable[Mapping[str, object]], columns: Mapping[str, str]) -> list[Row]:
    """Rows that have a norm; without a step column they are counted from 0."""
    rows = []
    for index, record in enumerate(records):
        values = {field: number(record.get(column)) for field, column in columns.items()}
        norm = values.pop("norm", None)
        if norm is None:
            continue
        step = values.pop("step", None)
        if step is None or not math.isfinite(step) or step < 0:
            step = float(index)
        rows.append(Row(step=int(step), norm=norm, **values))
    return rows
