"""What a step would have been had LayerClip held positions back, by replay.

A snapshot knows no history of what enters the layers: the step without its culprits stands in for a healthy one.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradloc.clipping.stream import RESIDUAL_FLOOR, ResidualStream, norms_from
from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import Gradient, masked, replay
from gradloc.verification import Place


@dataclass(frozen=True)
class Hold:
    """entering_norms: of a healthy step, by the layer that is entered. under: the gradient of the step whose cancelled
    positions, and those above these limits, are held back, and whether any was; costs a forward and a backward."""

    entering_norms: Mapping[str, float]
    under: Callable[[Mapping[str, float]], tuple[Gradient, bool]]


def without_culprits(
    policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], places: Sequence[Place]
) -> tuple[Gradient, Hold | None]:
    """The step without these tokens, and what it takes to hold positions back with that for a healthy step.

    None where other processes share the passes, for nobody adds up what enters there, or where no block is known.
    """
    healthy = masked(coefficients, places)
    if policy.team is not None or policy.split is not None:
        return replay(policy, batches, healthy).gradient, None
    with _stream_of(policy, residual_floor=0.0) as stream:  # measured only
        gradient = replay(policy, batches, healthy).gradient
        norms = dict(zip(stream.names, norms_from(stream.take()[0].tolist()), strict=True))

    def under(limits: Mapping[str, float]) -> tuple[Gradient, bool]:
        with _stream_of(policy) as stream:
            stream.set_limits([limits.get(name, float("nan")) for name in stream.names])
            gradient = replay(policy, batches, coefficients).gradient
            return gradient, bool(stream.take()[1].any())

    return gradient, Hold(norms, under) if norms else None


@contextlib.contextmanager
def _stream_of(policy: Policy, residual_floor: float = RESIDUAL_FLOOR) -> Iterator[ResidualStream]:
    def fail(error: Exception) -> None:
        raise error

    stream = ResidualStream(policy.model, lambda: 1.0, fail, residual_floor)
    stream.start()
    try:
        yield stream
    finally:
        stream.remove()
