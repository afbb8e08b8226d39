"""The faults by name, and how the demo's command hands one to the trainer: by the environment alone."""

import os
from collections.abc import Callable
from pathlib import Path

from gradloc.demo.answer_key import ShuffledKey
from gradloc.demo.bit_flip import FlippedBit
from gradloc.demo.cancellation import LayerExplosion
from gradloc.demo.envelope import FAULT_NAMES, FAULT_VARIABLE, JUDGE_VARIABLE
from gradloc.demo.leave_one_out import RewardOutlier
from gradloc.demo.moment import Fault
from gradloc.demo.nucleus import ZeroProbability
from gradloc.demo.older_policy import SequenceMismatch
from gradloc.demo.recycled_buffer import MaskedNan
from gradloc.demo.retokenization import Retokenized
from gradloc.demo.stale_cache import TokenMismatch, TwoMismatches
from gradloc.demo.supervised_rate import SupervisedRate
from gradloc.demo.temperature import OtherTemperature
from gradloc.demo.token_count import EmptyWindow
from gradloc.demo.weak_copy import NaturalSpike

_MECHANISMS: dict[str, Callable[[int, int, Path], Fault]] = {
    "token-mismatch": TokenMismatch,
    "layer": LayerExplosion,
    "sequence-mismatch": SequenceMismatch,
    "reward-outlier": RewardOutlier,
    "nan": ZeroProbability,
    "mask": MaskedNan,
    "retokenized": Retokenized,
    "temperature": OtherTemperature,
    "accounting": EmptyWindow,
    "batch-wide": SupervisedRate,
    "hardware": FlippedBit,
    "two": TwoMismatches,
    "late": ShuffledKey,
    "natural": NaturalSpike,
}


def named(name: str, seed: int, world_size: int, judge_dir: Path, first_steps: tuple[int, int] | None = None) -> Fault:
    """The fault `name`; `first_steps`: when it may strike, if not as usual. Raises ValueError for an unknown one."""
    if name not in FAULT_NAMES:
        raise ValueError(f"unknown fault {name!r}; expected one of {', '.join(FAULT_NAMES)}")
    assert {*_MECHANISMS, "none"} == {*FAULT_NAMES}
    if name == "token-mismatch" and first_steps is not None:
        return TokenMismatch(seed, world_size, judge_dir, first_steps)
    return _MECHANISMS[name](seed, world_size, judge_dir) if name in _MECHANISMS else Fault()


def from_environment(seed: int, world_size: int, first_steps: tuple[int, int] | None = None) -> Fault:
    """The fault that the environment names, none without one."""
    judge_dir = Path(os.environ.get(JUDGE_VARIABLE, "."))
    return named(os.environ.get(FAULT_VARIABLE, "none"), seed, world_size, judge_dir, first_steps)
