"""The processes of a split model as Ray actors: the first beside the driver, on its slot, each other on one more slot.

All must have a slot before anything begins, and for as long as it lasts: a pool that has too few free ones fails the
attempt after a while, and gives back those it had. The other doors to Ray: ray_replicas, whatif_app.
"""

import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gradloc.localization import Progress
from gradloc.manifest import Manifest
from gradloc.snapshot import open_snapshot
from gradloc_localizer.driver import Options
from gradloc_localizer.ray_replicas import ENVIRONMENT, POLL_S, connect
from gradloc_localizer.split_processes import (
    GRACE_S,
    WAITING,
    SplitFailed,
    Told,
    concluded,
    device_of,
    free_port,
    take_part,
)
from gradloc_proto.messages import Finding

_log = logging.getLogger("gradloc.localizer")
START_S = 600.0  # for all slots together, with a node and an image on their way; then others may have them


class SplitProcess:
    """The actor."""

    def __init__(self) -> None:
        self._stages: list[tuple[str, float]] = []

    def place(self) -> tuple[str, str, int, int]:
        """Node, its address, a free port there, its GPUs."""
        import torch

        address: Any = ray.util.get_node_ip_address  # without types
        return ray.get_runtime_context().get_node_id(), address(), free_port(), torch.cuda.device_count()

    def explain(self, url: str, options: Options, rank: int, address: str) -> Told:
        return take_part(url, options, rank, address, lambda stage, fraction: self._stages.append((stage, fraction)))

    def stages(self, known: int) -> list[tuple[str, float]]:
        """Those after the first `known`."""
        return self._stages[known:]


def explain_on_ray(url: str, options: Options, on_progress: Progress) -> tuple[Manifest, Finding]:
    """`explain` by `options.num_processes` actors. Raises as it does, and SplitFailed."""
    on_progress("opening", 0.0)
    open_snapshot(url)  # what is no snapshot is refused before anybody waits for slots
    connect()
    actors = [_actor(rank) for rank in range(options.num_processes)]
    try:
        places = _places(actors)
        host, port = places[0][1:3]
        seen: dict[str, int] = {}
        running: dict[Any, int] = {}
        for rank, (actor, (node, _, _, num_cuda)) in enumerate(zip(actors, places, strict=True)):
            local_rank = seen[node] = seen.get(node, -1) + 1
            own = replace(options, device=device_of(options.device, local_rank, num_cuda))
            running[actor.explain.remote(url, own, rank, f"{host}:{port}")] = rank
        return concluded(url, _watched(actors[0], running, on_progress))
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


def _actor(rank: int) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    beside: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
    elsewhere: dict[str, Any] = {"num_cpus": 1, "resources": {"spare_gpu": 1.0}}
    remote: Any = ray.remote(SplitProcess)
    # Two at a time: who works is asked how far it is.
    return remote.options(
        **(elsewhere if rank else beside), max_concurrency=2, max_restarts=0, runtime_env={"env_vars": ENVIRONMENT}
    ).remote()


def _places(actors: list[Any]) -> list[tuple[str, str, int, int]]:
    asked = [actor.place.remote() for actor in actors]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=START_S)
    if len(ready) < len(asked):
        raise SplitFailed(
            f"{len(ready)} of {len(asked)} processes of a split model found a slot of the pool within {START_S:.0f} s; "
            "expected all at once"
        )
    try:
        return list(ray.get(asked))
    except ray.exceptions.RayError as error:
        raise SplitFailed(f"a process of a split model did not start ({type(error).__name__})") from None


def _watched(first: Any, running: dict[Any, int], on_progress: Progress) -> list[Told | None]:
    """How each ended. The others of one that failed are waited for a little: they may know better why."""
    ended: dict[int, Told | None] = {}
    num_processes, num_stages, until = len(running), 0, float("inf")
    while running and time.monotonic() < until:
        done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
        for reference in done:
            rank = running.pop(reference)
            try:
                ended[rank] = ray.get(reference)
            except ray.exceptions.RayError as error:
                _log.warning("process %d of a split model is gone (%s)", rank + 1, type(error).__name__)
                ended[rank] = None
            told = ended[rank]
            if told is None or told.finding is None:
                until = min(until, time.monotonic() + GRACE_S)
        for stage, fraction in _stages(first, num_stages):
            on_progress(stage, fraction)
            num_stages += 1
    return [ended.get(rank, WAITING) for rank in range(num_processes)]


def _stages(first: Any, known: int) -> list[tuple[str, float]]:
    asked = first.stages.remote(known)
    done, _ = ray.wait([asked], timeout=POLL_S)
    try:
        return list(ray.get(asked)) if done else []
    except ray.exceptions.RayError:
        return []
