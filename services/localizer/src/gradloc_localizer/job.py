"""The Ray job as a library: one localization, told to the run's findings stream from start to end.

Says that it started before it imports torch, so that people see it at once. Knows no signals and no
arguments: __main__ owns those.
"""

import logging
import traceback
from dataclasses import dataclass, field
from typing import Any

from gradloc_localizer.publishing import Findings
from gradloc_proto.bus import Bus, BusUnavailable
from gradloc_proto.messages import Finding

EXIT_DONE, EXIT_FAILED, EXIT_REJECTED = 0, 1, 2
_log = logging.getLogger("gradloc.localizer")


class Stopped(BaseException):
    """The pool asked the job to end; raised by the owner of signals wherever the work is."""


@dataclass(frozen=True)
class Job:
    """One localization attempt, as the detector ordered it."""

    run_id: str
    attempt: int
    incident_id: str
    localization_attempt: int
    snapshot: str
    strategy: str = "attribution"
    device: str = "auto"
    num_threads: int = 2
    allowed_factories: tuple[str, ...] = field(default=())
    reference: str | None = None
    checkpoints: tuple[str, ...] = field(default=())
    num_replicas: int = 1
    probes: str | None = None
    num_processes: int = 1

    @property
    def step(self) -> int:
        """Step by the snapshot's URL, which ends in it."""
        last = self.snapshot.rstrip("/").rsplit("/", maxsplit=1)[-1]
        return int(last) if last.isdigit() else 0


def perform(job: Job, bus: Bus) -> int:
    """Localize and publish; returns the process's exit code. Raises BusUnavailable when nothing can be told."""
    findings = Findings(
        bus,
        run_id=job.run_id,
        attempt=job.attempt,
        incident_id=job.incident_id,
        localization_attempt=job.localization_attempt,
    )
    try:
        findings.started(job.step, job.snapshot)  # inside: the pool may ask to stop as soon as it is told
        finding = _localize(job, findings)
        findings.finished(finding)
        _forget(job)
    except BusUnavailable:
        raise
    except Stopped:
        findings.failed("stopped by the pool", retryable=True)
        raise
    except Exception as error:  # noqa: BLE001 - whatever went wrong must reach the incident
        reason, retryable, code = judged(error)
        if code == EXIT_FAILED:
            _log.error("%s", traceback.format_exc())
        findings.failed(reason, retryable=retryable)
        _log.error("localization of %s failed: %s", job.incident_id, reason)
        return code
    _log.info("localized %s: %s", job.incident_id, finding.summary)
    return EXIT_DONE


def _localize(job: Job, findings: Findings) -> Finding:
    from gradloc.snapshot import SnapshotRejected
    from gradloc_localizer.driver import Options, explain

    options = Options(
        strategy="bisect" if job.strategy == "bisect" else "attribution",
        allowed_factories=job.allowed_factories,
        device=job.device,
        num_threads=job.num_threads,
        reference=job.reference,
        checkpoints=job.checkpoints,
        num_replicas=job.num_replicas,
        probes=job.probes,
        num_processes=job.num_processes,
    )
    if job.num_processes > 1:
        from gradloc_localizer.ray_processes import explain_on_ray

        manifest, finding = explain_on_ray(job.snapshot, options, findings.progressed)
    else:
        more: dict[str, Any] = {}
        if job.num_replicas > 1:
            from gradloc_localizer.ray_replicas import ray_replicas

            more["replicas"] = ray_replicas
        manifest, finding = explain(job.snapshot, options, findings.progressed, **more)
    if (manifest.run_id, manifest.attempt) != (job.run_id, job.attempt):
        raise SnapshotRejected(
            f"the snapshot is of run {manifest.run_id}, attempt {manifest.attempt}; "
            f"expected run {job.run_id}, attempt {job.attempt}"
        )
    return finding


def _forget(job: Job) -> None:
    """What was kept for a next attempt is not needed any more; that it stays would harm nobody."""
    if job.probes is None:
        return
    from gradloc.snapshot import open_snapshot
    from gradloc_localizer.driver import forget_probes

    try:
        forget_probes(job.probes, open_snapshot(job.snapshot).manifest)
    except (OSError, ValueError) as error:
        _log.warning("kept probes stay: %s", str(error)[:200])


def judged(error: Exception) -> tuple[str, bool, int]:
    """Reason in one line, whether trying again may help, and the exit code."""
    line = str(error).split("\n", maxsplit=1)[0][:400] or type(error).__name__
    if isinstance(error, ValueError):  # SnapshotRejected and ModelRejected are ValueErrors: the input is to blame
        return line, False, EXIT_REJECTED
    if isinstance(error, OSError):
        return line, True, EXIT_FAILED
    return f"{type(error).__name__}: {line}"[:400], True, EXIT_FAILED
