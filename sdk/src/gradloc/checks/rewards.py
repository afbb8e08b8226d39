"""Checks of reward values: finite, bounded, informative within groups, not a function of length, not drifting.

Part of the reward layer. The guide's absolute bounds on the standard deviation (.3 healthy, .8 not) are
refused: they depend on the scale; and 0/1 rewards span .5. Shapes: N rewards, G of one group.
"""

import math
import statistics
from collections.abc import Sequence

import torch

from gradloc.checks.finding import CheckFinding, Report, Skipped, Tally, finding
from gradloc.checks.rank_correlation import rank_correlation
from gradloc.checks.row_text import number_of

GROUPS_MIN = 4
ZERO_VARIANCE_SHARE = 0.75
CONSTANT_MIN = 16
NOISE = 1e-5  # a group's deviation against the size of rewards: below it is rounding, not preference
ADVANTAGE_FAR = 50.0  # a group of 2,500 could not give it
EPSILON = 1e-4  # what GRPO implementations add to the deviation
LENGTH_RHO = 0.6
LENGTH_PAIRS_MIN = 32
FROZEN_STEPS = 20
HISTORY_MIN = 20


def check_rewards(
    rewards: Sequence[object],
    *,
    groups: Sequence[object] | None = None,
    group_size: int | None = None,
    bounds: tuple[float, float] | None = None,
    lengths: Sequence[float] | None = None,
    estimator: str | None = None,
) -> Report:
    """Check one batch. groups: a name for each reward's group; group_size: or neighbours, so many each.

    lengths: tokens of each response. estimator: "group" (deviation of the whole group) or
    "leave-one-out" (of the others); None: not known. Raises ValueError for arguments that do not fit.
    """
    if estimator not in (None, "group", "leave-one-out"):
        raise ValueError(f"estimator is {estimator!r}; expected 'group' or 'leave-one-out'")
    names = _names(len(rewards), groups, group_size)
    tally = Tally()
    values = [_valid(index, given, names, bounds, tally) for index, given in enumerate(rewards)]
    grouped: dict[object, list[tuple[int, float]]] = {}
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if value is not None:
            grouped.setdefault(name, []).append((index, value))
    usable = [value for value in values if value is not None]
    for one in _informative(usable, grouped):
        tally.add(one)
    for name, members in grouped.items():
        for one in _advantages(name, members, estimator):
            tally.add(one)
    skipped = []
    if not rewards:
        skipped.append(Skipped("all checks of rewards", "there is none"))
    if bounds is None:
        skipped.append(Skipped("bounds of rewards", "none were declared"))
    if lengths is None:
        skipped.append(Skipped("reward against length", "no lengths were given"))
    else:
        if len(lengths) != len(rewards):
            raise ValueError(f"{len(lengths)} lengths for {len(rewards)} rewards; expected one each")
        for one in _length(grouped, lengths):
            tally.add(one)
    return Report(tally.findings(), tuple(skipped), {"rewards": len(rewards), "groups": len(grouped)})


def _names(num: int, groups: Sequence[object] | None, group_size: int | None) -> list[object]:
    if groups is not None:
        if len(groups) != num:
            raise ValueError(f"{len(groups)} groups for {num} rewards; expected one each")
        return list(groups)
    if group_size is None:
        return [0] * num
    if group_size < 1 or num % group_size:
        raise ValueError(f"{num} rewards are no multiple of the group size {group_size}")
    return [index // group_size for index in range(num)]


def _valid(
    index: int, given: object, names: Sequence[object], bounds: tuple[float, float] | None, tally: Tally
) -> float | None:
    """The reward if it can be used; a reward that cannot must not reach its group's mean."""
    value = number_of(given)
    where: dict[str, int | str] = {"index": index, "group": str(names[index])}
    if value is None or math.isnan(value):
        kind = "null" if given is None else "NaN" if value is not None else f"a {type(given).__name__}"
        tally.add(finding("reward.not-a-number", f"reward is {kind}; its group's advantages would all be NaN", where))
        return None
    if math.isinf(value):
        tally.add(finding("reward.infinite", f"reward is {value}", where, value=value))
        return None
    if bounds is not None and not bounds[0] <= value <= bounds[1]:
        what = f"reward {value:.6g} outside [{bounds[0]:.6g}, {bounds[1]:.6g}]"
        tally.add(finding("reward.out-of-bounds", what, where, value=value, low=bounds[0], high=bounds[1]))
    return value


def _informative(usable: Sequence[float], grouped: dict[object, list[tuple[int, float]]]) -> list[CheckFinding]:
    if len(usable) >= CONSTANT_MIN and len(set(usable)) == 1:
        return [finding("reward.constant", f"all {len(usable)} rewards are {usable[0]:.6g}", value=usable[0])]
    found = []
    sizable = {name: [v for _, v in members] for name, members in grouped.items() if len(members) >= 2}
    flat = [name for name, values in sizable.items() if max(values) == min(values)]
    if len(sizable) >= GROUPS_MIN and len(flat) > ZERO_VARIANCE_SHARE * len(sizable):
        what = f"{len(flat)} of {len(sizable)} groups have one reward only: they teach nothing"
        numbers = {"groups": float(len(sizable)), "flat": float(len(flat))}
        found.append(finding("reward.zero-variance-groups", what, {"group": str(flat[0])}, None, **numbers))
    if len(usable) >= 2:
        usual = statistics.median(abs(v) for v in usable)  # one absurd reward must not make noise of all others
        for name, values in sizable.items():
            spread = statistics.pstdev(values)
            scale = max(usual, max(abs(v) for v in values))
            if 0.0 < spread < NOISE * scale:
                what = f"deviation {spread:.2g} in a group, rewards are of size {scale:.2g}: normalising makes it 1"
                found.append(finding("reward.noise-normalised", what, {"group": str(name)}, std=spread, scale=scale))
    return found


def _advantages(name: object, members: Sequence[tuple[int, float]], estimator: str | None) -> list[CheckFinding]:
    """Outliers among leave-one-out advantages: the others agree, so their deviation is 0 or a rounding residue.

    Where the estimator is not known only a residue is reported, such as float32 leaves of 0.95 seven times:
    it slips past the guards that catch an exact 0.
    """
    if estimator == "group" or len(members) < 3:
        return []
    values_G = torch.tensor([value for _, value in members], dtype=torch.float32)
    found = []
    for at, (index, value) in enumerate(members):
        others = torch.cat([values_G[:at], values_G[at + 1 :]])
        mean = float(others.double().mean())
        scale = max(abs(mean), abs(value), 1e-12)
        if float(others.double().std(unbiased=False)) > NOISE * scale or abs(value - mean) <= 1e-3 * scale:
            continue
        squares = (others.square().mean() - others.mean().square()).clamp(min=0)
        residue = max(float(others.std()), float(squares.sqrt()))
        advantage = (value - mean) / (min(residue, NOISE) + EPSILON)
        if (estimator is None and residue == 0.0) or abs(advantage) < ADVANTAGE_FAR:
            continue
        what = (
            f"leave-one-out advantage {advantage:.4g}: the others' deviation is a rounding residue ({residue:.2g}); "
            "not a token's fault"
        )
        where: dict[str, int | str] = {"index": index, "group": str(name)}
        found.append(finding("reward.advantage-outlier", what, where, advantage=advantage, residue=residue))
    return found


def _length(grouped: dict[object, list[tuple[int, float]]], lengths: Sequence[float]) -> list[CheckFinding]:
    """Within groups: between prompts, hard ones have long answers and low rewards without any bias."""
    rewards: list[float] = []
    sizes: list[float] = []
    for members in grouped.values():
        if len(members) >= 2:
            mean_reward = statistics.fmean(value for _, value in members)
            mean_length = statistics.fmean(lengths[index] for index, _ in members)
            rewards += [value - mean_reward for _, value in members]
            sizes += [lengths[index] - mean_length for index, _ in members]
    if len(rewards) < LENGTH_PAIRS_MIN:
        return []
    found = rank_correlation(rewards, sizes)
    if found is None or abs(found.rho) < LENGTH_RHO:
        return []
    what = f"Spearman {found.rho:.2f} between reward and length within groups ({found.num} answers)"
    return [finding("reward.length-correlation", what, rho=found.rho, p_value=found.p_value, num=found.num)]


def check_history(
    means: Sequence[float], stds: Sequence[float] | None = None, accuracies: Sequence[float] | None = None
) -> tuple[CheckFinding, ...]:
    """Check a run's mean rewards, step by step: frozen, or rising while accuracy falls.

    A rising reward alone is what training is for, so it is no finding.
    """
    found = []
    known = [(at, one) for at, one in enumerate(means) if math.isfinite(one)]
    tail = known[-FROZEN_STEPS:]
    still = len(tail) == FROZEN_STEPS and len({one for _, one in tail}) == 1
    if still and (stds is None or all(not one > 0 for one in stds[-FROZEN_STEPS:])):
        what = f"mean reward is {tail[0][1]:.6g} at {FROZEN_STEPS} steps in a row"
        found.append(finding("reward.frozen", what, {"step": tail[0][0]}, value=tail[0][1]))
    if accuracies is not None and len(accuracies) == len(means) >= HISTORY_MIN:
        reward = rank_correlation(range(len(means)), means)
        accuracy = rank_correlation(range(len(accuracies)), accuracies)
        if reward is not None and accuracy is not None and reward.rho > 0.6 and accuracy.rho < -0.6:
            what = (
                f"over {len(means)} steps the reward rises (rank {reward.rho:.2f}), accuracy falls ({accuracy.rho:.2f})"
            )
            found.append(finding("reward.hacked", what, reward_rho=reward.rho, accuracy_rho=accuracy.rho))
    return tuple(found)


def check_fixed_scores(
    before: Sequence[float], now: Sequence[float], tolerance: float = 1e-3
) -> tuple[CheckFinding, ...]:
    """Scores of the same texts at two times must agree: a reward model that is not trained does not drift.

    tolerance: of the spread of the first scores. Raises ValueError for lists of different lengths.
    """
    if len(before) != len(now):
        raise ValueError(f"{len(before)} scores before, {len(now)} now; expected the same texts")
    if not before:
        return ()
    spread = max(statistics.pstdev(before), 1e-12)
    moved = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(before, now, strict=True)]
    worst = max(range(len(moved)), key=moved.__getitem__)
    if moved[worst] <= tolerance * spread:
        return ()
    what = f"a score moved by {moved[worst]:.3g} where scores spread {spread:.3g}"
    return (finding("reward.drift", what, {"index": worst}, moved=moved[worst], spread=spread),)
