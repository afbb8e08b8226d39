"""Faults of Ray and of the snapshot store. They need the world of localizing.py."""

import contextlib
import os
import random
import signal

from fault import Heal, NoTarget, nothing
from localizing import LocalizingWorld


def kill_ray(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    """The head with its workers, drivers and all that it knew of jobs."""
    world.kill_ray()
    return dice.uniform(0, 5), world.start_ray


def kill_job_driver(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    """The localizer itself, at work."""
    return _killed(world.jobs("gradloc_localizer --run"), dice)


def kill_job_worker(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    """Ray's worker that looks after a job."""
    return _killed(world.jobs("ray::JobSupervisor"), dice)


def pause_job(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    pids = world.jobs("gradloc_localizer --run")
    if not pids:
        raise NoTarget
    pid = dice.choice(pids)
    os.kill(pid, signal.SIGSTOP)

    def wake() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return dice.uniform(2, 8), wake


def _killed(pids: list[int], dice: random.Random) -> tuple[float, Heal]:
    if not pids:
        raise NoTarget
    with contextlib.suppress(ProcessLookupError):
        os.kill(dice.choice(pids), signal.SIGKILL)
    return 0.0, nothing


def slow_store(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    world.trouble(slow_s=dice.uniform(0.5, 3.0))
    return dice.uniform(4, 15), world.trouble


def failing_store(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    world.trouble(failing=True)
    return dice.uniform(4, 15), world.trouble


def full_store(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    world.trouble(full=True)
    return dice.uniform(4, 15), world.trouble


def late_store(world: LocalizingWorld, dice: random.Random) -> tuple[float, Heal]:
    """What is written is listed some seconds later."""
    world.trouble(late_s=dice.uniform(2.0, 10.0))
    return dice.uniform(8, 20), world.trouble
