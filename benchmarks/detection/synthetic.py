"""Made-up runs: healthy regimes with planted spikes, and collapses whose onset is known.

Healthy values are log-normal with a deviation of 0.25, as wide as the widest smooth real runs (0.12 to
0.28). A spike is `magnitude` times the healthy value of its step; where the run alternates between a
floor and an active level, times the active level; among exact zeros, at a step that has a gradient.
"""

import math
from collections.abc import Callable

import numpy as np
from detection.traces import Series

NOISE = 0.25
NUM_STEPS = 2_000
SPIKE_EVERY = 97  # planted from row 60 on
COLLAPSE_STEPS = 120
COLLAPSE_ONSET = 70

Values = np.ndarray
REGIMES = ("iid", "drift", "regime change", "tenfold change", "heavy tail", "bimodal", "many zeros")


def regime(name: str, magnitude: float, seed: int) -> Series:
    """One run. A lasting change is news once: its own row and the row after are not scored."""
    generator = np.random.default_rng((REGIMES.index(name), round(magnitude), seed))
    values = np.exp(NOISE * generator.normal(size=NUM_STEPS))
    places = np.arange(60, NUM_STEPS - 5, SPIKE_EVERY)
    ignored: set[int] = set()
    if name == "drift":
        values *= 10 ** np.linspace(0, generator.choice([-1, 1]), NUM_STEPS)
    elif name in ("regime change", "tenfold change"):
        factor = 3.0 if name == "regime change" else 10.0
        change = int(generator.integers(NUM_STEPS // 3, 2 * NUM_STEPS // 3))
        values[change:] *= factor ** generator.choice([-1, 1])
        ignored = {change, change + 1}
        places = places[(places < change - 2) | (places > change + 2)]
    elif name == "heavy tail":
        values = np.exp(0.2 * generator.standard_t(4, NUM_STEPS))
    elif name == "bimodal":
        is_active = generator.random(NUM_STEPS) < 0.5
        values *= np.where(is_active, 1.0, 0.1)
        places = places[is_active[places]]
    elif name == "many zeros":
        is_zero = generator.random(NUM_STEPS) < 0.59
        values[is_zero] = 0.0
        places = places[~is_zero[places]]
    values[places] *= magnitude
    spikes = frozenset(places.tolist())
    return Series(
        f"{name} {seed}", name, tuple(values.tolist()), (None,) * NUM_STEPS, spikes, spikes, frozenset(ignored)
    )


def collapses(seed: int = 0) -> list[Series]:
    """Runs that go wrong for good at a known row, in fourteen ways, two of them inside every warm-up."""
    made = [_collapse(name, index, seed, COLLAPSE_ONSET, bend) for index, (name, bend) in enumerate(_BENDS.items())]
    early = {"explosion inside the warm-up": "explosion", "growth inside the warm-up": "growth x2"}
    made += [_collapse(name, 50 + index, seed, 12, _BENDS[bend]) for index, (name, bend) in enumerate(early.items())]
    return made


Bend = Callable[[Values, Values, Values], None]


def _collapse(name: str, index: int, seed: int, onset: int, bend: Bend) -> Series:
    generator = np.random.default_rng((1000 + index, seed))
    values = np.exp(NOISE * generator.normal(size=COLLAPSE_STEPS))
    rewards = 0.5 + 0.08 * generator.normal(size=COLLAPSE_STEPS)
    bend(values[onset:], rewards[onset:], np.arange(1.0, COLLAPSE_STEPS - onset + 1))
    return Series(name, "collapse", tuple(values.tolist()), tuple(rewards.tolist()), collapse=onset)


def _explosion(norm: Values, reward: Values, age: Values) -> None:
    norm *= 100


def _jump(norm: Values, reward: Values, age: Values) -> None:
    norm *= 8


def _spike_then_nothing(norm: Values, reward: Values, age: Values) -> None:
    norm *= np.where(age == 1, 30.0, 1e-4)


def _growth(rate: float) -> Bend:
    def bend(norm: Values, reward: Values, age: Values) -> None:
        norm *= np.minimum(rate**age, 1e12)

    return bend


def _vanishing(norm: Values, reward: Values, age: Values) -> None:
    norm *= 1e-4


def _fading(norm: Values, reward: Values, age: Values) -> None:
    norm *= np.maximum(0.2**age, 1e-9)


def _death(norm: Values, reward: Values, age: Values) -> None:
    norm[:] = 0.0


def _not_a_number(norm: Values, reward: Values, age: Values) -> None:
    norm[:] = math.nan


def _infinity(norm: Values, reward: Values, age: Values) -> None:
    norm[::2] = math.inf


def _ringing(norm: Values, reward: Values, age: Values) -> None:
    norm *= np.where(age % 2 == 0, np.minimum(1.8**age, 1e6), 1.0)


def _reward_cliff(norm: Values, reward: Values, age: Values) -> None:
    reward -= 0.6


def _reward_slide(norm: Values, reward: Values, age: Values) -> None:
    reward -= np.minimum(0.2 * age, 1.0)


_BENDS: dict[str, Bend] = {
    "explosion": _explosion,
    "jump to 8x": _jump,
    "spike, then nothing": _spike_then_nothing,
    "growth x1.3": _growth(1.3),
    "growth x2": _growth(2.0),
    "vanishing": _vanishing,
    "fading": _fading,
    "death": _death,
    "not a number": _not_a_number,
    "infinity": _infinity,
    "ringing": _ringing,
    "reward cliff": _reward_cliff,
    "reward slide": _reward_slide,
}
