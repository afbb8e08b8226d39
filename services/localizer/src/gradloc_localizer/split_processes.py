"""A localization by processes that hold the model together: each runs `explain` in step with the others.

The first one's finding counts, all have the same. Whoever starts them (this module on this machine, `ray_processes` on
a pool) waits outside: a process that dies ends the attempt with one line, and the next attempt goes on from kept
probes. What they exchange is tensors and JSON; nothing is unpickled that comes from a snapshot.
"""

import contextlib
import datetime
import logging
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from gradloc.localization import Progress
from gradloc.manifest import Manifest
from gradloc.snapshot import SnapshotRejected, open_snapshot
from gradloc_localizer.driver import Options, explain, place_of
from gradloc_localizer.model_source import ModelRejected
from gradloc_proto.messages import Finding

_log = logging.getLogger("gradloc.localizer")
NUM_PROCESSES_MAX = 64  # a bound: more GPUs than a pool spares for one incident
MEETING_S = 600.0  # the longest that a process waits for another one in a pass; then it fails
GRACE_S = 10.0  # after one failed, until all have told why or are ended
_KINDS = {"rejected": SnapshotRejected, "model": ModelRejected}


class SplitFailed(OSError):
    """A process of a split died or failed; another attempt may do."""


@dataclass(frozen=True)
class Told:
    """How a process ended: with a finding (JSON), or why not."""

    finding: str | None = None
    kind: Literal["", "rejected", "model", "failed", "waiting"] = ""
    reason: str = ""


WAITING = Told(kind="waiting", reason="it waited for the others")


def take_part(url: str, options: Options, rank: int, address: str, on_progress: Progress) -> Told:
    """One process's work. address: host:port where the first one listens."""
    import torch
    import torch.distributed as dist

    try:
        device = torch.device(place_of(options.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=options.num_processes,
            timeout=datetime.timedelta(seconds=MEETING_S),
        )
        try:
            _, finding = explain(url, options, on_progress)
        finally:
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told by who started this process
        line = str(error).split("\n", maxsplit=1)[0][:300] or type(error).__name__
        if isinstance(error, ModelRejected):
            return Told(kind="model", reason=line)
        if isinstance(error, ValueError):
            return Told(kind="rejected", reason=line)
        _log.error("%s", traceback.format_exc())
        return Told(kind="failed", reason=f"{type(error).__name__}: {line}")
    return Told(finding=finding.model_dump_json())


def concluded(url: str, ended: Sequence[Told | None]) -> tuple[Manifest, Finding]:
    """What processes, by rank, ended with; None: it died. Raises SnapshotRejected, ModelRejected or SplitFailed."""
    for kind, error in _KINDS.items():
        for told in ended:
            if told is not None and told.kind == kind:
                raise error(told.reason)
    dead = [rank for rank, told in enumerate(ended) if told is None]
    if dead:
        raise SplitFailed(
            f"process {dead[0] + 1} of {len(ended)} that hold the model died; another attempt goes on from what was "
            "kept (--probes)"
        )
    for rank, told in sorted(enumerate(ended), key=lambda one: one[1] is not None and one[1].kind == WAITING.kind):
        if told is not None and told.finding is None:
            raise SplitFailed(f"process {rank + 1} of {len(ended)} that hold the model failed: {told.reason}")
    first = ended[0]
    assert first is not None and first.finding is not None
    return open_snapshot(url).manifest, Finding.model_validate_json(first.finding)


def explain_here(url: str, options: Options, on_progress: Progress) -> tuple[Manifest, Finding]:
    """`explain` by processes on this machine, each on a GPU of its own where there are GPUs. Raises as `explain`, and
    SplitFailed."""
    on_progress("opening", 0.0)
    open_snapshot(url)  # what is no snapshot is refused before anything is started
    address = f"127.0.0.1:{free_port()}"
    with _started(url, options, address) as processes:
        return concluded(url, _watched(processes, on_progress))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        port: int = listening.getsockname()[1]
        return port


def device_of(name: str, local_rank: int, num_cuda: int) -> str:
    """The device of a process that is this one of those on its machine. Raises SplitFailed."""
    if name not in ("auto", "cuda") or num_cuda == 0:
        return name
    if local_rank >= num_cuda:
        raise SplitFailed(
            f"{local_rank + 1} processes of a split model met on a machine with {num_cuda} GPUs; expected one each"
        )
    return f"cuda:{local_rank}"


@contextlib.contextmanager
def _started(url: str, options: Options, address: str) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    fresh = multiprocessing.get_context("spawn")  # a fork inherits locks, and no GPU
    processes: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(options.num_processes):
            mine, theirs = fresh.Pipe()
            process: BaseProcess = fresh.Process(target=_work, args=(url, options, rank, address, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append((process, mine))
        yield processes
    finally:
        for process, pipe in processes:
            process.kill()
            process.join()
            pipe.close()


def _work(url: str, options: Options, rank: int, address: str, pipe: Connection) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the first one ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        own = replace(options, device=device_of(options.device, rank, torch.cuda.device_count()))
    except SplitFailed as error:
        pipe.send(Told(kind="failed", reason=str(error)))
        return

    def progressed(stage: str, fraction: float) -> None:
        if rank == 0:
            pipe.send((stage, fraction))

    pipe.send(take_part(url, own, rank, address, progressed))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _watched(processes: Sequence[tuple[BaseProcess, Connection]], on_progress: Progress) -> list[Told | None]:
    """How each ended. The others of one that failed are waited for a little: they may know better why."""
    ended: dict[int, Told | None] = {}
    rank_of: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(processes)}
    while rank_of:
        failed = any(told is None or told.finding is None for told in ended.values())
        ready = wait(list(rank_of), timeout=GRACE_S if failed else None)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                said: Any = pipe.recv()
            except (EOFError, OSError):
                said = None
            if isinstance(said, tuple):
                on_progress(*said)
            else:
                ended[rank_of.pop(pipe)] = said
    return [ended.get(rank, WAITING) for rank in range(len(processes))]
