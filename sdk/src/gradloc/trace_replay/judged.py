"""The detector's rules on the rows of a finished run, causally, as they would have judged it live. Pure."""

from dataclasses import dataclass

import numpy as np

from gradloc.trace_replay.rows import Row
from gradloc_proto import rules
from gradloc_proto.messages import Flag


@dataclass(frozen=True, slots=True)
class Judged:
    """One row with the limit it was compared with and the flags it got."""

    row: Row
    limit: float | None
    healthy: float | None
    flags: tuple[Flag, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    rows: tuple[Judged, ...]
    num_restarts: int
    num_repeated: int

    @property
    def flagged(self) -> list[tuple[int, Judged]]:
        """(index, row) of the flagged rows."""
        return [(index, judged) for index, judged in enumerate(self.rows) if judged.flags]


def judged(rows: list[Row], sensitivity: rules.Sensitivity) -> Verdict:
    """Judge every row. A step that goes back is a restart, which learns anew; a repeated one is left out."""
    state = rules.RunState(sensitivity=sensitivity)
    found: list[Judged] = []
    num_restarts = num_repeated = 0
    for row in rows:
        if found and row.step == found[-1].row.step:
            num_repeated += 1
            continue
        if found and row.step < found[-1].row.step:
            num_restarts += 1
            state = rules.RunState(sensitivity=sensitivity)
        observation = rules.Observation(
            row.step,
            row.norm,
            energy=None,
            layer_names=(),
            layer_norms_L=np.zeros(0),
            ratio_max=row.ratio_max,
            kl=row.kl,
            reward=row.reward,
            accuracy=row.accuracy,
        )
        limits = rules.limits_of(state)
        flags = rules.judge(state, observation)
        state = rules.learn(state, observation, flags)
        found.append(Judged(row, limits.norm, limits.healthy_norm, flags))
    return Verdict(tuple(found), num_restarts, num_repeated)
