"""The numbers of one step that the rules look at. Knows nothing of what is normal."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradloc_proto.messages import StepObserved
from gradloc_proto.rules.baseline import Floats, units_of


@dataclass(frozen=True)
class Observation:
    """One step. None and, in `layer_norms_L`, NaN mean "not logged"."""

    step: int
    norm: float
    energy: float | None
    layer_names: tuple[str, ...]
    layer_norms_L: Floats
    ratio_max: float | None = None
    kl: float | None = None
    reward: float | None = None
    accuracy: float | None = None

    @property
    def gain(self) -> float | None:
        """norm² / energy, or None where it has no meaning."""
        if self.energy is None or not self.energy > 0 or not math.isfinite(self.energy):
            return None
        return self.norm * self.norm / self.energy if math.isfinite(self.norm) else None

    @cached_property
    def amplitude_units_A(self) -> Floats:
        """Norm, sqrt(energy), sqrt(gain), ratio and KL in units of log2. [5]

        Energy and gain are squares of norms; their roots share the norm's factors.
        """
        gain = self.gain
        values = (self.norm, self.energy, gain, self.ratio_max, self.kl)
        units_A = units_of(np.array([math.nan if value is None else value for value in values]))
        units_A[1:3] *= 0.5
        return units_A

    @cached_property
    def layer_units_L(self) -> Floats:
        """Layer norms in units of log2, in this step's order. [L]"""
        return units_of(self.layer_norms_L)


def observation_of(message: StepObserved) -> Observation:
    """The rules' view of a step message."""
    return Observation(
        step=message.step,
        norm=message.grad_norm,
        energy=message.energy,
        layer_names=tuple(message.layer_norms),
        layer_norms_L=np.fromiter(message.layer_norms.values(), dtype=np.float64, count=len(message.layer_norms)),
        ratio_max=message.ratio_max,
        kl=message.kl,
        reward=message.reward_mean,
        accuracy=message.accuracy,
    )
