"""Replicas as Ray actors on the spare pool, each with the snapshot's model and batches. One of the doors to Ray.

They are asked for and not waited for: a pool without room leaves the work to the driver, which works anyway. One that
dies is replaced a few times.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray

from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import Gradient
from gradloc.snapshot import open_snapshot
from gradloc.team import Answer, Question, answer
from gradloc_localizer.driver import Options, rebuilt

_log = logging.getLogger("gradloc.localizer")
NUM_DEATHS_MAX = 8  # of one localization; then the driver goes on alone with whoever is left
# A worker's GPU belongs to the slot, not to Ray's accounting: an actor sees what a job's driver sees.
ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
POLL_S = 1.0


class ReplayReplica:
    """The actor."""

    def __init__(self, url: str, options: Options) -> None:
        import torch

        torch.set_num_threads(options.num_threads)
        self._policy: Policy
        self._batches: tuple[PlacedBatch, ...]
        self._policy, self._batches = rebuilt(open_snapshot(url), options)

    def ready(self) -> bool:
        return True

    def answer(self, question: Question, gradient: Gradient | None) -> Answer:
        return answer(self._policy, self._batches, question, gradient)


@contextlib.contextmanager
def ray_replicas(url: str, options: Options) -> Iterator["RayReplicas"]:
    """All but the driver's own."""
    made = RayReplicas(url, options, options.num_replicas - 1)
    try:
        yield made
    finally:
        made.close()


def connect() -> None:
    """To the pool that this job runs on."""
    if not ray.is_initialized():
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "auto"),
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
        )


class RayReplicas:
    """`num` actors. Close it: actors hold GPUs."""

    def __init__(self, url: str, options: Options, num: int, *, spare_gpus: float = 1.0) -> None:
        connect()
        self._url = url
        self._options = replace(options, num_replicas=1, probes=None)
        remote: Any = ray.remote(ReplayReplica)
        resources = {"spare_gpu": spare_gpus} if spare_gpus else {}
        self._class = remote.options(
            num_cpus=1, resources=resources, max_restarts=0, max_task_retries=0, runtime_env={"env_vars": ENVIRONMENT}
        )
        self._num_deaths = 0
        self._starting: dict[Any, Any] = {}  # by what says that it is ready
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, int]] = {}  # by what it will answer
        self._gradient: tuple[int, Any] | None = None
        for _ in range(num):
            self._start()

    def offer(self, number: int, question: Question, gradient: Gradient | None) -> bool:
        self._see_started()
        if not self._idle:
            return False
        actor = self._idle.pop()
        self._busy[actor.answer.remote(question, self._put(gradient))] = (actor, number)
        return True

    def collect(self, *, wait: bool) -> list[tuple[int, Answer | None]]:
        found: list[tuple[int, Answer | None]] = []
        while self._busy:
            done, _ = ray.wait(list(self._busy), num_returns=1, timeout=POLL_S if wait and not found else 0)
            if not done and (found or not wait):
                break
            for reference in done:
                actor, number = self._busy.pop(reference)
                try:
                    found.append((number, ray.get(reference)))
                    self._idle.append(actor)
                except ray.exceptions.RayError as error:
                    self._bury(actor, error)
                    found.append((number, None))
        return found

    def until_started(self) -> None:
        """Wait for replicas that are still starting: nobody who localizes has to."""
        while self._starting:
            ray.wait(list(self._starting), num_returns=1, timeout=POLL_S)
            self._see_started()

    def close(self) -> None:
        for actor in [*self._starting.values(), *self._idle, *(actor for actor, _ in self._busy.values())]:
            ray.kill(actor, no_restart=True)
        self._starting, self._idle, self._busy = {}, [], {}

    def _start(self) -> None:
        actor = self._class.remote(self._url, self._options)
        self._starting[actor.ready.remote()] = actor

    def _see_started(self) -> None:
        while self._starting:
            done, _ = ray.wait(list(self._starting), num_returns=1, timeout=0)
            if not done:
                return
            for reference in done:
                actor = self._starting.pop(reference)
                try:
                    ray.get(reference)
                    self._idle.append(actor)
                except ray.exceptions.RayError as error:
                    self._bury(actor, error)

    def _bury(self, actor: Any, error: Exception) -> None:
        self._num_deaths += 1
        _log.warning("a replica is gone (%s); %d so far", type(error).__name__, self._num_deaths)
        ray.kill(actor, no_restart=True)
        if self._num_deaths < NUM_DEATHS_MAX:
            self._start()

    def _put(self, gradient: Gradient | None) -> Any:
        """The gradient's place in the object store: it goes there once, not with each question."""
        if gradient is None:
            return None
        if self._gradient is None or self._gradient[0] != id(gradient):
            self._gradient = (id(gradient), (ray.put(gradient), gradient))
        return self._gradient[1][0]
