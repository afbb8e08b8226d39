"""Faults of processes and of what they lean on: kill -9, pause, a clock that jumps, a wire that is cut."""

import contextlib
import random
import signal
import sqlite3

from child import Child
from fault import Heal, Unavailable
from world import World


def _paused(child: Child, seconds: float) -> tuple[float, Heal]:
    child.send(signal.SIGSTOP)
    return seconds, lambda: child.send(signal.SIGCONT)


def _killed(child: Child, seconds: float) -> tuple[float, Heal]:
    child.kill()
    return seconds, child.start


def kill_detector(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _killed(dice.choice(world.detectors), dice.uniform(0, 3))


def kill_both_detectors(world: World, dice: random.Random) -> tuple[float, Heal]:
    for child in world.detectors:
        child.kill()
    return dice.uniform(0, 6), lambda: [child.start() for child in world.detectors if not child.alive] and None


def pause_detector(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _paused(dice.choice(world.detectors), dice.uniform(3, 20))


def kill_reporter(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _killed(world.reporter, dice.uniform(0, 3))


def pause_reporter(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _paused(world.reporter, dice.uniform(3, 15))


def kill_trainer(world: World, dice: random.Random) -> tuple[float, Heal]:
    run = dice.choice(world.runs)
    world.trainers[run].kill()
    return dice.uniform(0, 3), lambda: world.restart_trainer(run)


def pause_trainer(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _paused(world.trainers[dice.choice(world.runs)], dice.uniform(2, 10))


def break_slack(world: World, dice: random.Random) -> tuple[float, Heal]:
    world.channel.broken = True
    return dice.uniform(2, 10), lambda: setattr(world.channel, "broken", False)


def lock_database(world: World, dice: random.Random) -> tuple[float, Heal]:
    """Somebody else holds the database's write lock."""
    connection = sqlite3.connect(world.database, timeout=5, isolation_level=None, check_same_thread=False)
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("BEGIN IMMEDIATE")
    return dice.uniform(2, 8), connection.close


def jump_clock(world: World, dice: random.Random) -> tuple[float, Heal]:
    """The wall clock of one process is set ahead or back, and set right later."""
    if world.clocks.reason:
        raise Unavailable(world.clocks.reason)
    name = dice.choice(["detector-0", "detector-1", "reporter", "trainer", "redis"])
    world.clocks.set(name, dice.choice([-7_200.0, -90.0, 90.0, 7_200.0]))
    return dice.uniform(3, 15), lambda: world.clocks.set(name, 0.0)


def _cut(world: World, place: str, seconds: float) -> tuple[float, Heal]:
    if not world.network.has(place):
        raise Unavailable(world.network.reason or f"no {place} lives behind a wire here")
    world.network.cut(place)
    return seconds, lambda: world.network.mend(place)


def cut_detector(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _cut(world, "detector", dice.uniform(3, 20))


def cut_trainer(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _cut(world, "trainer", dice.uniform(3, 20))
