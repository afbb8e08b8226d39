"""The three-run verdict: what a replay that does not match is evidence of. Pure; knows no tensor.

The step is replayed again on the same device and once elsewhere (Megatron-LM's rerun state machine asks the same
of a suspicious result, in the trainer itself). Replays that differ on one device: nondeterminism, or a device of the
pool that fails now and then. That agree there and differ elsewhere: one of the two devices computes something else.
That agree everywhere, and with nothing the trainer reported: the trainer's machine in that step, or something that
is not in the snapshot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradloc_proto.messages import Cause

Outcome = Literal["nondeterminism", "device-disagreement", "training-machine"]
ROUNDING = 1e-5  # relative: sums in another order on the same device may differ by so much


@dataclass(frozen=True)
class ThreeRuns:
    """Norms of the replays. elsewhere: None where the pool offers no other device."""

    first: float
    again: float
    elsewhere: float | None = None

    def outcome(self, tolerance: float) -> Outcome:
        """tolerance: relative, of replays on different devices."""
        if not _alike(self.first, self.again, ROUNDING):
            return "nondeterminism"
        if self.elsewhere is not None and not _alike(self.first, self.elsewhere, tolerance):
            return "device-disagreement"
        return "training-machine"


def cause_of(runs: ThreeRuns, reported: float, tolerance: float) -> Cause:
    """The outcome as a cause, with the norms it rests on."""
    outcome = runs.outcome(tolerance)
    places = "one device" if runs.elsewhere is None else "two devices"
    summary, confidence = {
        "nondeterminism": (
            f"two replays on one device give norms {runs.first:.4g} and {runs.again:.4g}: dropout, kernels "
            "that are not deterministic, or a device of the pool that fails; nothing is said about the trainer",
            "high",
        ),
        "device-disagreement": (
            f"replays give norm {runs.first:.4g} on one device, twice, and {_told(runs.elsewhere)} on another: one of "
            "the two computes something else each time; test both before believing either",
            "high",
        ),
        "training-machine": (
            f"replays on {places} agree (norm {runs.first:.4g}) and the trainer reported {reported:.4g}: its machine "
            "failed in that step, or what made it spike is not in the snapshot (a loss term of no token, data)",
            "medium",
        ),
    }[outcome]
    return Cause(
        name=outcome,
        confidence=confidence,
        summary=summary[:512],
        evidence={
            "reported_norm": reported,
            "replayed_norm": runs.first,
            "again_norm": runs.again,
            "elsewhere_norm": runs.elsewhere,
        },
    )


def with_runs(causes: Sequence[Cause], told: Cause) -> tuple[Cause, ...]:
    """Causes with the outcome of the runs in its place: before all others where the pool does not agree with itself,
    else after a rank that holds another gradient than its peers; instead of what only says that nothing matched."""
    others = tuple(cause for cause in causes if cause.name not in ("not-reproduced", "inconclusive"))
    if told.name != "training-machine":
        return (told, *others)
    sure = tuple(cause for cause in others if cause.name == "hardware")
    return (*sure, told, *(cause for cause in others if cause not in sure))


def _told(norm: float | None) -> str:
    return "unknown" if norm is None else f"{norm:.4g}"


def _alike(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
