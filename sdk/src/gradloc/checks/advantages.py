"""Checks of advantages: finite, centred within groups, within what a group of its size can give.

Part of the policy layer. A normalised group of G bounds |advantage| by sqrt(G - 1).
"""

import math
from collections.abc import Sequence

from gradloc.checks.finding import CheckFinding, Tally, finding

CENTRED = 0.1  # |mean| of a group against its deviation
PEERS_FAR = 50.0  # times the median, where no group size bounds it
SLACK = 1.05
ROWS_MIN = 8


def check_advantages(
    advantages: Sequence[float | None],
    *,
    groups: Sequence[object] | None = None,
    estimator: str = "group",
    group_size: int | None = None,
) -> tuple[CheckFinding, ...]:
    """Check one advantage a row.

    estimator: "group" (centred, over the deviation), "centred" (Dr. GRPO: only centred), "leave-one-out" or
    "any" (GAE and others: only outliers are judged).
    """
    names = list(groups) if groups is not None else _neighbours(len(advantages), group_size)
    if groups is not None and len(groups) != len(advantages):
        raise ValueError(f"{len(groups)} groups for {len(advantages)} advantages; expected one of each row")
    tally = Tally()
    grouped: dict[object, list[tuple[int, float]]] = {}
    for index, given in enumerate(advantages):
        value = math.nan if given is None else float(given)
        name = names[index] if names else 0
        if not math.isfinite(value):
            where: dict[str, int | str] = {"index": index, "group": str(name)}
            tally.add(finding("policy.advantage-non-finite", f"advantage is {value}", where, value=value))
            continue
        grouped.setdefault(name, []).append((index, value))
    if names and estimator in ("group", "centred"):
        for name, members in grouped.items():
            for one in _centred(name, [value for _, value in members]):
                tally.add(one)
    sizes = [abs(value) for members in grouped.values() for _, value in members if value != 0.0]
    usual = sorted(sizes)[len(sizes) // 2] if sizes else 0.0
    for name, members in grouped.items():
        for index, value in members:
            bound = _bound(len(members), usual, estimator if names else "any", len(sizes))
            if abs(value) > bound:
                where = {"index": index, "group": str(name)}
                what = f"advantage {value:.4g}, at most {bound:.3g} is to be expected (median {usual:.3g})"
                tally.add(finding("policy.advantage-outlier", what, where, advantage=value, bound=bound, median=usual))
    return tally.findings()


def _neighbours(num: int, group_size: int | None) -> list[object]:
    if group_size is None:
        return []
    if group_size < 1 or num % group_size:
        raise ValueError(f"{num} advantages are no multiple of the group size {group_size}")
    return [index // group_size for index in range(num)]


def _bound(group_size: int, usual: float, estimator: str, num_sizes: int) -> float:
    if estimator == "group" and group_size > 1:
        return SLACK * math.sqrt(group_size - 1)
    return PEERS_FAR * usual if num_sizes >= ROWS_MIN else math.inf


def _centred(name: object, values: Sequence[float]) -> list[CheckFinding]:
    if len(values) < 2:
        return []
    mean = sum(values) / len(values)
    size = math.sqrt(sum(value * value for value in values) / len(values))
    if size == 0.0 or abs(mean) <= CENTRED * size:
        return []
    what = f"mean {mean:.3g} of a group whose advantages are of size {size:.3g}"
    return [finding("policy.advantage-not-normalised", what, {"group": str(name)}, mean=mean, size=size)]
