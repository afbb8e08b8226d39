"""One fault of the demo, from the trainer to the finding: real ranks over gloo, watched by a real detector.

What the demo has and this has not: Ray, the reporter, Slack. The finding comes from the code of the Ray job, in a
process of this one; training ends soon after its first spike instead of after all its steps. Processes are forked
from one that has loaded torch.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from gradloc.demo.envelope import ANSWERS, CHECKPOINT, TRUTH, WEIGHTS
from gradloc.demo.faults import named
from gradloc.demo.judge import verdict_on
from gradloc.demo.model import save_weights
from gradloc.demo.performance import Script
from gradloc.demo.pretraining import CHECKPOINT_STEP, pretrained
from gradloc.demo.review import review
from gradloc.demo.testimony import read
from gradloc.demo.trainer import Settings, train
from gradloc.workstation.processes import Process, free_port
from gradloc.workstation.redis import EmbeddedRedis
from gradloc_localizer.driver import Options, explain
from gradloc_proto import codec, streams
from gradloc_proto.messages import IncidentOpened
from gradloc_proto.redis_bus import RedisBus

OF_TWO_RANKS = ("hardware", "two")  # what they are about needs a second one
STEPS_AFTER = 2  # the spike
STEPS_UNSEEN_MAX = 25  # after the fault: by then its spike has come, or none will
PLAY_TIMEOUT_S = 1_800.0
FOLDED_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Services:
    """What the runs share."""

    redis_url: str
    folder: Path


@contextlib.contextmanager
def services(folder: Path) -> Iterator[Services]:
    """A Redis and a detector without a pool; ended by their ids."""
    with contextlib.ExitStack() as stack:
        redis = EmbeddedRedis(folder / "redis", folder / "redis.log")
        stack.callback(redis.end)
        redis.wait_ready()
        port = free_port()
        command = [sys.executable, "-m", "gradloc_detector", "--port", str(port)]
        detector = Process("detector", command, folder / "detector.log", {"GRADLOC_REDIS_URL": redis.url})
        stack.callback(detector.end)
        yield Services(redis.url, folder)


class Brief:
    """A fault in a run that ends soon after the watcher's first spike, or when none has come for long."""

    def __init__(self, fault: Any) -> None:
        self._fault = fault
        self._spiked_at: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fault, name)

    def observed(self, step: int, decision: str, *rest: Any) -> None:
        if decision != "go" and self._spiked_at is None:
            self._spiked_at = step
        self._fault.observed(step, decision, *rest)

    def is_over(self, step: int) -> bool:
        struck_at = self._fault.struck_at
        waited = struck_at is not None and step >= struck_at + STEPS_UNSEEN_MAX
        return waited or (self._spiked_at is not None and step >= self._spiked_at + STEPS_AFTER)


def policy_of(seed: int, folder: Path) -> Path:
    """Weights that GRPO starts with, and the earlier state beside them; made once a seed."""
    if not (folder / WEIGHTS).exists():
        _done([_fork(_pretrain, seed, folder)])
    return folder


def played(
    services: Services, fault: str, seed: int, policy: Path, *, num_ranks: int, is_judged: bool
) -> dict[str, Any]:
    """Verdict and causes of its first spike; `in_full`, where the judge is asked: place and all are right."""
    started = time.time()
    world_size = 2 if fault in OF_TWO_RANKS else num_ranks
    script = Script(fault, seed, ANSWERS[fault].num_steps)
    run_id = f"{script.run_id}-{list(ANSWERS).index(fault)}"
    work = services.folder / run_id
    shutil.rmtree(work, ignore_errors=True)
    (work / "judge").mkdir(parents=True)
    for name in (WEIGHTS, CHECKPOINT):
        shutil.copy(policy / name, work / name)
    settings = {
        "work": work, "run": run_id, "seed": seed, "steps": script.num_steps, "world_size": world_size,
        "redis": services.redis_url, "store": (work / "store").as_uri(),
    }  # fmt: skip
    _done([_fork(_rank, fault, {**settings, "rank": rank}) for rank in range(world_size)])
    snapshot, reference = _snapshots(work / "store")
    jobs = [_fork(_judge, work / "judge", world_size)] if is_judged else []
    if snapshot is not None:
        jobs.append(_fork(_localize, snapshot, reference, work / "finding.json"))
    _done(jobs)
    finding = json.loads((work / "finding.json").read_text()) if snapshot is not None else {}
    causes = finding.get("causes") or [{}]
    num_incidents = _num_incidents(services.redis_url, run_id)
    result = {
        "fault": fault,
        "seed": seed,
        "verdict": finding.get("verdict"),
        "cause": causes[0].get("name"),
        "confidence": causes[0].get("confidence"),
        "summary": causes[0].get("summary"),
        "others": [[one["name"], one["confidence"]] for one in causes[1:]],
        "incidents": num_incidents,
        "ranks": world_size,
        "in_full": _is_right(script, work, finding, num_incidents, world_size) if is_judged else None,
        "seconds": round(time.time() - started, 1),
    }
    shutil.rmtree(work)
    return result


def _is_right(script: Script, work: Path, finding: dict[str, Any], num_incidents: int, world_size: int) -> bool:
    """Whether the demo's review would call it right: verdict, cause, and the place by the judge."""
    rows = [json.loads(line) for line in (work / "progress.jsonl").read_text().splitlines()]
    seen = SimpleNamespace(
        truth=json.loads((work / "judge" / TRUTH).read_text()),
        finding=finding or None,
        outcomes=[json.loads((work / f"outcome-{rank}.json").read_text()) for rank in range(world_size)],
        step_times=[row["ts"] for row in rows],
        slack_texts=[],
        incidents=[{}] * num_incidents,
        alert_at=None,
        culprit_at=None,
        redis_killed=False,
    )
    return bool(review(script, seen)["right"])  # type: ignore[arg-type]  # of a performance only what it reads


def _snapshots(store: Path) -> tuple[str | None, str | None]:
    """The first step that was kept for a spike, and the newest healthy one before it."""
    kept = sorted(store.glob("*/0/*/manifest.json"), key=lambda path: int(path.parent.name))
    weights = {path: json.loads(path.read_text())["weights"] for path in kept}
    of_spikes = [path for path in kept if weights[path] != "reference"]
    if not of_spikes:
        return None, None
    step = int(of_spikes[0].parent.name)
    healthy = [path for path in kept if weights[path] == "reference" and int(path.parent.name) < step]
    return of_spikes[0].parent.as_uri(), healthy[-1].parent.as_uri() if healthy else None


def _num_incidents(redis_url: str, run_id: str) -> int:
    """Incidents of the run, once the detector has folded it."""
    bus = RedisBus(redis_url)
    try:
        last, deadline = bus.last_id(streams.stream(run_id, "steps")), time.monotonic() + FOLDED_TIMEOUT_S
        while time.monotonic() < deadline:
            checkpoint = bus.load_checkpoint(run_id)
            if checkpoint is not None and last in checkpoint.cursor:
                break
            time.sleep(0.1)
        entries = bus.read_last(streams.stream(run_id, "incidents"), count=100)
        return sum(isinstance(codec.decode(entry.data), IncidentOpened) for entry in entries)
    finally:
        bus.close()


# --- in processes of their own ------------------------------------------------------------------


def _pretrain(seed: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def keep(step: int, model: Any) -> None:
        if step == CHECKPOINT_STEP:
            save_weights(model, folder / CHECKPOINT)

    save_weights(pretrained(seed, keep), folder / "part.safetensors")
    (folder / "part.safetensors").rename(folder / WEIGHTS)


def _rank(fault: str, settings: dict[str, Any]) -> None:
    own = Settings(**settings)
    if own.world_size > 1:
        place = f"file://{own.work / 'rendezvous'}"
        dist.init_process_group("gloo", init_method=place, rank=own.rank, world_size=own.world_size)
    train(own, Brief(named(fault, own.seed, own.world_size, own.work / "judge")))  # type: ignore[arg-type]
    os._exit(0)  # the groups' threads would outlive the interpreter


def _judge(folder: Path, world_size: int) -> None:
    torch.set_num_threads(1)
    testimony = read(folder, world_size)
    (folder / TRUTH).write_text(json.dumps(None if testimony is None else verdict_on(testimony)))


def _localize(snapshot: str, reference: str | None, out: Path) -> None:
    _, finding = explain(snapshot, Options(num_threads=1, device="cpu", reference=reference))
    out.write_text(finding.model_dump_json())


def _fork(target: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    return process


def _done(processes: list[Any]) -> None:
    """Wait for all. Raises RuntimeError where one fails."""
    deadline = time.monotonic() + PLAY_TIMEOUT_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            break  # its peers would only time out in a collective
        time.sleep(0.05)
    failed = [process.exitcode for process in processes if process.exitcode != 0]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    if failed:
        raise RuntimeError(f"a process of the play did not end well (exit codes {failed}); see above")
