"""The faults by name, and how the demo's command hands one to the trainer: by the environment alone."""

import os
from pathlib import Path

from gradloc.demo.cancellation import LayerExplosion
from gradloc.demo.moment import Fault, PlannedFault
from gradloc.demo.stale_cache import TokenMismatch

FAULT_VARIABLE = "GRADLOC_DEMO_FAULT"
JUDGE_VARIABLE = "GRADLOC_DEMO_JUDGE"
_PLANNED: dict[str, type[PlannedFault]] = {"token-mismatch": TokenMismatch, "layer": LayerExplosion}
NAMES = (*_PLANNED, "none")


def named(name: str, seed: int, world_size: int, judge_dir: Path) -> Fault:
    """The fault `name`. Raises ValueError for an unknown one."""
    if name not in NAMES:
        raise ValueError(f"unknown fault {name!r}; expected one of {', '.join(NAMES)}")
    return _PLANNED[name](seed, world_size, judge_dir) if name in _PLANNED else Fault()


def from_environment(seed: int, world_size: int) -> Fault:
    """The fault that the environment names, none without one."""
    return named(os.environ.get(FAULT_VARIABLE, "none"), seed, world_size, Path(os.environ.get(JUDGE_VARIABLE, ".")))
