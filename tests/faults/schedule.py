"""One schedule: its faults at seeded moments, then healing, then judgement. Knows the world, not the command line."""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault import NoTarget, Unavailable
from faults import ALL, EXCLUSIVE, FAULTS, RAY_FAULTS, STORE_FAULTS
from judgement import Judgement, judge
from localizing import LocalizingWorld
from world import World

RECOVERY_MAX_S = 60.0
FIRST_FAULT_S, LAST_FAULT_S = 6.0, 24.0
FIRST_RAY_FAULT_S, LAST_RAY_FAULT_S = 10.0, 42.0  # jobs must be there to be struck
PATIENCE_S = 25.0  # after the last moment, for a fault that finds nothing to strike
CALM_S = 8.0  # trainers go on for a while after the last fault is healed
WELL_TIMEOUT_S, TRAINER_TIMEOUT_S = 120.0, 120.0


def plan(
    seed: int, num_faults: int, only: list[str] | None = None, *, with_ray: bool = False
) -> list[tuple[float, str]]:
    """Moments and names, in order of time. With Ray: two of its faults at least, one of the store's, others."""
    dice = random.Random(f"plan {seed}")
    if only or not with_ray:
        names = [dice.choice(only or sorted(FAULTS)) for _ in range(num_faults)]
    else:
        others = {name: fault for name, fault in ALL.items() if name != "cut-detector"}  # Ray is on the loopback only
        kinds = [RAY_FAULTS, RAY_FAULTS, STORE_FAULTS, *[others] * (num_faults - 3)]
        names = [dice.choice(sorted(kind)) for kind in kinds]
    first_s, last_s = (FIRST_RAY_FAULT_S, LAST_RAY_FAULT_S) if with_ray else (FIRST_FAULT_S, LAST_FAULT_S)
    return sorted((dice.uniform(first_s, last_s), name) for name in names)


@dataclass
class Striking:
    """Strikes what is due and heals what is over, one fault of a kind at a time."""

    world: World
    dice: random.Random
    due: list[tuple[float, str]]
    last_s: float
    struck: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _healing: list[tuple[float, str, Any]] = field(default_factory=list)

    def turn(self, now: float) -> bool:
        """False when all is struck and healed."""
        for entry in [one for one in self._healing if one[0] <= now]:
            self._healing.remove(entry)
            entry[2]()
        for moment, name in [one for one in self.due if one[0] <= now]:
            if EXCLUSIVE[name] not in {EXCLUSIVE[other] for _, other, _ in self._healing}:
                self._strike(moment, name, now)
        return bool(self.due or self._healing)

    def _strike(self, moment: float, name: str, now: float) -> None:
        try:
            seconds, heal = ALL[name](self.world, self.dice)
        except NoTarget:
            if now > self.last_s + PATIENCE_S:
                self.due.remove((moment, name))
                self.left_out.append(f"{name}: nothing to strike")
            return
        except Unavailable as error:
            self.due.remove((moment, name))
            self.left_out.append(f"{name}: {error}")
            return
        self.due.remove((moment, name))
        self.struck.append(f"{name}@{now:.1f}+{seconds:.1f}")
        self._healing.append((now + seconds, name, heal))


def run_schedule(
    seed: int, folder: Path, num_faults: int, only: list[str] | None = None, *, with_ray: bool = False
) -> dict[str, Any]:
    """One schedule from start to judgement."""
    due = plan(seed, num_faults, only, with_ray=with_ray)
    kind = LocalizingWorld if with_ray else World
    with kind(folder, seed) as world:
        striking = Striking(world, random.Random(f"faults {seed}"), due, LAST_RAY_FAULT_S if with_ray else LAST_FAULT_S)
        began = time.monotonic()
        _supervised(world, lambda: time.monotonic() - began < due[0][0] - 0.5, due[0][0])
        usual = world.usage()
        _supervised(world, lambda: striking.turn(time.monotonic() - began), 600.0)
        _supervised(world, lambda: not world.is_well(), WELL_TIMEOUT_S)
        _supervised(world, lambda: True, CALM_S)
        world.stop_trainers()
        _supervised(world, lambda: any(child.alive for child in world.trainers.values()), TRAINER_TIMEOUT_S)
        hanging = [run for run, child in world.trainers.items() if child.alive]
        healed = time.monotonic()
        judgement = judge(world, usual)
        while not judgement.holds and time.monotonic() - healed < RECOVERY_MAX_S:
            world.supervise()
            time.sleep(1.0)
            judgement = judge(world, usual)
        recovery_s = time.monotonic() - healed
        dead = [child.name for child in (*world.services(), world.redis) if not child.alive]
        usage = world.usage()
    if world.leaked:
        judgement.leaks.append(f"processes {world.leaked} outlived the world")
    return {
        "seed": seed,
        "world": "ray" if with_ray else "plain",
        "faults": striking.struck,
        "left_out": striking.left_out,
        **_counts(judgement),
        **judgement.faults(),
        "dead": dead,
        "trainers_hanging": hanging,
        "restarts": world.num_restarts,
        "recovery_s": round(recovery_s, 1),
        "open_files_max": max((num_files for num_files, _ in usage.values()), default=0),
        "holds": judgement.holds and not dead and not hanging,
    }


def _counts(judgement: Judgement) -> dict[str, int]:
    return {
        "spikes": judgement.num_spikes,
        "lost": judgement.num_lost,
        "findings": judgement.num_findings,
        "given_up": judgement.num_given_up,
    }


def _supervised(world: World, goes_on: Any, timeout_s: float) -> None:
    """While `goes_on()`, and no longer than `timeout_s`, start again what ends by itself."""
    ended = time.monotonic() + timeout_s
    while time.monotonic() < ended and goes_on():
        world.supervise()
        time.sleep(0.05)
