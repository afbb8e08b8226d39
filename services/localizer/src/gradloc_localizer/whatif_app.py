"""What-if over HTTP, by Ray Serve: a door that is always there, replicas with the model that scale to zero.

    serve run gradloc_localizer.whatif_app:application      # an address that answers at /whatif

The door costs a small process and no GPU; it says what is waited for while a replica starts. A replica keeps the
last step it was asked about, so a second question costs a replay a change. Requests name a step, never a place:
snapshots are opened under GRADLOC_WHATIF_STORE alone.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gradloc_localizer import waiting
from gradloc_localizer.admission import admitted
from gradloc_localizer.app_settings import AppSettings
from gradloc_localizer.asked import read
from gradloc_proto.whatif import MEDIA_TYPE, WhatIfProblem, WhatIfRequest

NUM_WAITING_MAX = 16  # further askers are told to come back
REPLICA = "Replica"


class Replica:
    """Holds one step's model at a time."""

    def __init__(self, settings: AppSettings) -> None:
        self._settings = settings
        self._store = os.environ.get("GRADLOC_WHATIF_STORE", "")
        self._factories = tuple(filter(None, os.environ.get("GRADLOC_ALLOWED_FACTORIES", "").split(",")))
        self._checkpoints = tuple(filter(None, os.environ.get("GRADLOC_CHECKPOINTS", "").split(",")))
        self._lock = threading.Lock()  # an asker who left may have left work behind
        self._known: tuple[object, Any] | None = None
        self._is_new = True

    async def told(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Fields of lines: that it begins, stages, and last the answer or the problem."""
        started, self._is_new = self._is_new, False
        yield {"stage": "opening", "fraction": 0.0, "started": started}
        loop, queue, left = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]](), threading.Event()

        def put(fields: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, fields)

        def progressed(stage: str, fraction: float) -> None:
            if left.is_set():
                raise _Left
            put({"stage": stage, "fraction": fraction})

        work = asyncio.ensure_future(asyncio.to_thread(self._work, WhatIfRequest(**request), progressed, put))
        try:
            while True:
                fields = await queue.get()
                yield fields
                if "answer" in fields or "problem" in fields:
                    await work
                    return
        finally:
            left.set()

    def _work(
        self,
        request: WhatIfRequest,
        progressed: Callable[[str, float], None],
        put: Callable[[dict[str, Any]], None],
    ) -> None:
        with self._lock:
            try:
                put({"answer": self._foreteller(request, progressed).tell(read(request), progressed).as_dict()})
            except _Left:
                return
            except Exception as error:  # noqa: BLE001 - whatever went wrong must reach the asker
                self._known = None
                put({"problem": waiting.problem_of(error).model_dump()})

    def _foreteller(self, request: WhatIfRequest, progressed: Callable[[str, float], None]) -> Any:
        from gradloc.store import Store
        from gradloc_localizer.driver import Options
        from gradloc_localizer.foretelling import Foreteller

        key = (request.run, request.attempt, request.step, request.limit)
        if self._known is not None and self._known[0] == key:
            return self._known[1]
        if not self._store:
            raise OSError("GRADLOC_WHATIF_STORE is not set where the what-if app runs; set it to the snapshots' store")
        self._known = None  # the model before makes room first
        options = Options(
            limit=request.limit,
            allowed_factories=self._factories,
            checkpoints=self._checkpoints,
            device=self._settings.device,
            num_threads=self._settings.threads,
        )
        url = Store(self._store).child(request.run, request.attempt, request.step).url
        found = Foreteller(url, options, progressed)
        self._known = (key, found)
        return found


class _Left(Exception):
    """Nobody waits for the answer any more."""


class Door:
    """Reads requests, shows who waits what is waited for, and passes the replica's lines on."""

    def __init__(self, replica: DeploymentHandle[Any], settings: AppSettings) -> None:
        self._replica = replica.options(method_name="told", stream=True)
        self._start_timeout_s = settings.start_timeout_s
        self._token = os.environ.get("GRADLOC_WHATIF_TOKEN", "")

    async def __call__(self, request: Request) -> Response:
        asked = await admitted(request, self._token)
        if isinstance(asked, Response):
            return asked
        told: Any = self._replica.remote(asked.model_dump())  # a generator, for stream=True
        merged = waiting.lines(told, _stage, _problem_of, start_timeout_s=self._start_timeout_s)

        async def written() -> AsyncIterator[bytes]:
            ended = False
            try:
                async for line in merged:
                    ended = line.is_last
                    yield line.model_dump_json(exclude_none=True).encode() + b"\n"
            finally:
                if not ended:
                    told.cancel()

        return StreamingResponse(written(), media_type=MEDIA_TYPE)


def _problem_of(error: Exception) -> WhatIfProblem:
    if isinstance(error, BackPressureError):
        return waiting.problem(503, f"{NUM_WAITING_MAX} askers wait already; ask again later")
    return waiting.problem_of(error)


async def _stage() -> str:
    """What is waited for."""
    states = await asyncio.to_thread(_states)
    return "waiting for a replica" if states.get("RUNNING") else "starting a replica"


def _states() -> dict[str, int]:
    for application in serve.status().applications.values():
        if REPLICA in application.deployments:
            states = application.deployments[REPLICA].replica_states
            return {str(getattr(name, "value", name)): count for name, count in states.items()}
    return {}


def application(args: AppSettings) -> serve.Application:
    """For Serve's `import_path`; `args` in its configuration."""
    resources = {"spare_gpu": args.spare_gpus} if args.spare_gpus else {}
    deployment: Any = serve.deployment  # its types know the decorator only
    replica = deployment(
        Replica,
        name=REPLICA,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus, "resources": resources},
        max_ongoing_requests=1,
        max_queued_requests=NUM_WAITING_MAX,
        autoscaling_config={
            "min_replicas": 0,
            "initial_replicas": 0,
            "max_replicas": args.replicas_max,
            "target_ongoing_requests": 1,
            "downscale_delay_s": args.idle_s,
            "downscale_to_zero_delay_s": args.idle_s,
            "upscale_delay_s": 0,
        },
        graceful_shutdown_timeout_s=5,
    )
    door = deployment(
        Door,
        name="Door",
        # On the head, which stays: a worker with the door on it would not go when it idles.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=4 * NUM_WAITING_MAX,
    )
    bound: serve.Application = door.bind(replica.bind(args), args)
    return bound
