"""The faults by name, and how the demo's command hands one to the trainer: by the environment alone."""

import os
from pathlib import Path

from gradloc.demo.cancellation import LayerExplosion
from gradloc.demo.envelope import FAULT_NAMES, FAULT_VARIABLE, JUDGE_VARIABLE
from gradloc.demo.moment import Fault, PlannedFault
from gradloc.demo.stale_cache import TokenMismatch

_PLANNED: dict[str, type[PlannedFault]] = {"token-mismatch": TokenMismatch, "layer": LayerExplosion}


def named(name: str, seed: int, world_size: int, judge_dir: Path) -> Fault:
    """The fault `name`. Raises ValueError for an unknown one."""
    if name not in FAULT_NAMES:
        raise ValueError(f"unknown fault {name!r}; expected one of {', '.join(FAULT_NAMES)}")
    assert (*_PLANNED, "none") == FAULT_NAMES
    return _PLANNED[name](seed, world_size, judge_dir) if name in _PLANNED else Fault()


def from_environment(seed: int, world_size: int) -> Fault:
    """The fault that the environment names, none without one."""
    return named(os.environ.get(FAULT_VARIABLE, "none"), seed, world_size, Path(os.environ.get(JUDGE_VARIABLE, ".")))
