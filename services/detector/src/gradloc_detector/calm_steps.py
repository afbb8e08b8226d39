"""A stretch of ordinary, calm steps folded at once: what fold does one by one, for a detector that catches up.

Pure. Takes the longest beginning in which nothing happens but learning and publishing limits, and leaves the
rest to fold; state and effects are those of fold to the last bit (tests/detector/test_calm_steps.py).
"""

from array import array
from collections.abc import Sequence

import numpy as np

from gradloc_detector import steps
from gradloc_detector.incidents import open_incident
from gradloc_detector.plain_step import PlainStep, Reader, norms_of
from gradloc_detector.policy import Policy
from gradloc_detector.state import Book, DetectorState, Effects
from gradloc_proto import rules

STRETCH_MAX = 256  # a read brings no more; the arrays of 64 layers stay in the cache
STRETCH_MIN = 8  # under this one at a time is as fast
_LOOK_AHEAD = 8  # renewals between two publications of a steady run


class Stretch:
    """Ordinary steps that follow each other, waiting to be folded at once: let pass, with the layers `names`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.steps: list[PlainStep] = []
        self._reader = Reader(names)
        self._norms = array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, data: bytes) -> bool:
        """Take a step in, or False where it is no ordinary one that follows the last."""
        step = self._reader.read(data)
        if step is None or step.decision != "go" or step.rules_hit:
            return False
        if self.steps:
            last = self.steps[-1]
            if step.step != last.step + 1 or step.attempt != last.attempt or step.run_id != last.run_id:
                return False
        self.steps.append(step)
        self._norms.extend(norms_of(step))
        step.layer_norms = None  # thousands of numbers at a time would not stay in the cache
        return True

    def drop(self, num: int) -> None:
        """Forget the first steps: they are folded."""
        del self.steps[:num]
        del self._norms[: num * len(self.names)]

    def for_rules(self) -> rules.Stretch:
        steps = self.steps
        return rules.Stretch(
            steps=[step.step for step in steps],
            norms=[step.grad_norm for step in steps],
            energies=[step.energy for step in steps],
            ratios=[step.ratio_max for step in steps],
            kls=[step.kl for step in steps],
            rewards=[step.reward_mean for step in steps],
            accuracies=[step.accuracy for step in steps],
            layer_names=self.names,
            layer_norms_KL=np.array(self._norms).reshape(len(steps), len(self.names)),
        )


def is_possible(state: DetectorState, policy: Policy) -> bool:
    """Whether ordinary steps can change nothing but counts, baselines and limits."""
    book = state.book
    return (
        rules.has_settled(state.baselines)
        and not book.ended
        and not book.limits_dirty
        and book.skip_streak == 0
        and book.num_steps >= policy.limits_every_step_until
        and all(gap.told for gap in book.gaps)
        and open_incident(book) is None
    )


def folded(state: DetectorState, stretch: Stretch, policy: Policy) -> tuple[int, DetectorState, Effects]:
    """How many steps of `stretch` were folded, the state after them, and what is to be published.

    Only where `is_possible` says so.
    """
    book, baselines = state.book, state.baselines
    first = stretch.steps[0]
    follows = (first.run_id, first.attempt, first.step) == (book.run_id, book.attempt, (book.last_step or 0) + 1)
    if not follows:
        return 0, state, ()
    with np.errstate(all="ignore"):
        lesson = rules.learn_stretch(baselines, stretch.for_rules())
        if lesson.num == 0:
            return 0, state, ()
        learnt = stretch.steps[: lesson.num]
        book, effects = _published(book, lesson, baselines, learnt, policy)
    return lesson.num, DetectorState(_after(book, learnt, policy), lesson.state), effects


def _published(
    book: Book, lesson: rules.Lesson, before: rules.RunState, stretch: Sequence[PlainStep], policy: Policy
) -> tuple[Book, Effects]:
    """The limits that fold would have published after each of these steps."""
    first = rules.Renewal(-1, before.version, before.series.limit_S, before.series.median_S)
    renewals = [first, *lesson.renewals]
    new_RP = rules.limits_in_time(before, renewals)
    effects: Effects = ()
    is_moved: list[bool] = []  # for the next renewals from `looked_from` on
    looked_from = 0
    at, every = 0, policy.limits_look_every_steps
    for index in range(-(book.num_steps + 1) % every, len(stretch), every):
        while at + 1 < len(renewals) and renewals[at + 1].at_step <= index:
            at += 1
        step, version, num_steps = stretch[index], renewals[at].version, book.num_steps + index + 1
        if version <= book.limits_published_version:
            continue
        if at >= looked_from + len(is_moved):
            looked_from, is_moved = at, _moved(book, new_RP[at : at + _LOOK_AHEAD], policy.limits_change)
        is_due = version - book.limits_published_version >= policy.limits_every_steps
        if not (is_due or is_moved[at - looked_from]):
            continue
        at_step = book.model_copy(update={"num_steps": num_steps, "last_ts": step.ts})
        at_step, more = steps.published(at_step, lesson.state_at(renewals[at]), step.step, policy)
        if more:
            effects += more
            book = at_step.model_copy(update={"num_steps": book.num_steps})
            is_moved = []
    return book, effects


def _moved(book: Book, new_RP: np.ndarray, fraction: float) -> list[bool]:
    """After which renewals some limit may have moved enough to be published; `steps.published` decides."""
    old = book.limits_published
    if len(old) != new_RP.shape[1]:
        return [True] * len(new_RP)
    old_P = np.array(old, dtype=np.float64)  # None becomes NaN
    # A hair less than `fraction`, so that rounding never hides what `steps.published` would tell.
    is_moved_RP = np.abs(new_RP - old_P) > (1.0 - 1e-9) * fraction * np.abs(old_P)
    is_moved_RP |= np.isnan(old_P) != np.isnan(new_RP)
    return [bool(is_moved) for is_moved in np.any(is_moved_RP, axis=1)]


def _after(book: Book, stretch: Sequence[PlainStep], policy: Policy) -> Book:
    num, last = len(stretch), stretch[-1]
    return book.model_copy(
        update={
            "last_step": last.step,
            "last_ts": last.ts,
            "num_steps": book.num_steps + num,
            "distances": (*book.distances, *(1,) * min(num, policy.gap_grace_steps))[-policy.gap_grace_steps :],
            "gaps": tuple(gap.model_copy(update={"later_steps": gap.later_steps + num}) for gap in book.gaps),
            "num_events_dropped": max(book.num_events_dropped, *(step.num_events_dropped for step in stretch)),
            "healthy_streak": book.healthy_streak + num,
        }
    )
