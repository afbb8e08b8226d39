"""Ray's Jobs REST API, and the thread that brings about what the plan says. The only door to httpx.

Knows nothing of incidents: it gets a Plan and answers with JobReported on the run's control stream.
Ray being down loses nothing, since the plan is read off the states again and again; a job's id is
derived, so posting one twice makes one job. Facts about Ray 2.60: docs/design.md, "Dispatch".
"""

import logging
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from gradloc_detector.plan import Plan, Submission
from gradloc_proto import codec, streams
from gradloc_proto.bus import Bus, BusUnavailable
from gradloc_proto.identities import check_run_id
from gradloc_proto.messages import JobReported

log = logging.getLogger("gradloc.detector.dispatch")

JobStatus = Literal["submitted", "running", "succeeded", "failed", "stopped", "lost", "refused"]
_STATUS_OF_RAY: dict[str, JobStatus] = {
    "PENDING": "submitted",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "stopped",
}
_JOB_ID = re.compile(r"^[A-Za-z0-9._-]{1,128}$")
_SERVER_ERRORS_MAX = 6  # of one job, with Ray otherwise well, before it counts as refused: 31 s
_TELL_AGAIN_S = 60.0  # a report that the states do not show by then was lost on its way
_BACKOFF_S = (1.0, 60.0)
_REPORTS_WAITING_MAX = 1_000
_SUBMITTING_TTL_S = 60.0  # longer than one request to Ray may take, twice


class RayUnavailable(ConnectionError):
    """Ray did not answer, or not as its Jobs API does; nothing is known about what was asked."""


class JobRefused(ValueError):
    """Ray read the request and will never accept it."""


class JobServerError(RuntimeError):
    """Ray failed at this one job and does not know it; worth a few more tries."""


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """What all jobs have in common. `resources` are Ray's custom resources of the entrypoint."""

    python: str = "python"
    strategy: str = "attribution"
    resources: dict[str, float] = field(default_factory=lambda: {"spare_gpu": 1})

    def body(self, submission: Submission) -> dict[str, Any]:
        """The request for one job. Raises ValueError for ids that could not be ours."""
        job = submission.submission_id
        if not _JOB_ID.match(job):
            raise ValueError(f"submission id {job[:80]!r} is not usable as a job id")
        arguments = {
            "--run": check_run_id(submission.run_id),
            "--attempt": str(submission.attempt),
            "--incident": submission.incident_id,
            "--localization-attempt": str(submission.localization_attempt),
            "--snapshot": submission.snapshot,
            "--strategy": self.strategy,
        }
        words = [self.python, "-m", "gradloc_localizer"]
        for name, value in arguments.items():
            words += [name, value]
        return {
            "entrypoint": " ".join(shlex.quote(word) for word in words),
            "submission_id": job,
            "entrypoint_resources": self.resources,
            # By the environment, which a localizer that knows nothing of it may ignore.
            "runtime_env": {"env_vars": {"GRADLOC_REFERENCE": submission.reference}} if submission.reference else {},
            "metadata": {
                "gradloc_run": submission.run_id,
                "gradloc_incident": submission.incident_id,
                "gradloc_localization_attempt": str(submission.localization_attempt),
            },
        }


class RayJobs:
    """Client of one Ray cluster. Every call may raise RayUnavailable. `token` is never logged."""

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = 10.0) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"Ray address {address[:100]!r}: expected http://host:8265, the address of Ray's dashboard"
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # trust_env off: Ray is inside the cluster, a proxy from the environment is not the way to it.
        self._http = httpx.Client(base_url=address, headers=headers, timeout=timeout_s, trust_env=False)
        self._where = f"Ray at {parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    def submit(self, body: dict[str, Any]) -> None:
        """Make the job exist. Raises JobRefused, JobServerError."""
        reply = self._request("POST", "/api/jobs/", json=body)
        if reply.status_code == 200:
            return
        text = _first_line(reply)
        if reply.status_code >= 500:
            # A used id answers 500 as well, and so may a gateway: only a look tells.
            try:
                found = self.status(str(body["submission_id"]))
            except JobServerError as error:
                raise RayUnavailable(f"{self._where}: {error}") from None
            if found is not None:
                return
            raise JobServerError(f"HTTP {reply.status_code}: {text}")
        raise JobRefused(f"HTTP {reply.status_code}: {text}")

    def status(self, job: str) -> tuple[JobStatus, str] | None:
        """Status and Ray's message; None when Ray does not know the job. Raises JobServerError."""
        reply = self._request("GET", f"/api/jobs/{job}")
        if reply.status_code == 404:
            return None
        if reply.status_code != 200:
            raise JobServerError(f"HTTP {reply.status_code}: {_first_line(reply)}")
        try:
            document = reply.json()
            status = _STATUS_OF_RAY[document["status"]]
            # Ray adds the end of the job's log, which may hold prompts; the log itself stays with Ray.
            return status, str(document.get("message") or "").split(", last available logs")[0]
        except (ValueError, KeyError, TypeError):
            raise JobServerError("the answer about a job is not one of Ray's Jobs API") from None

    def active(self) -> frozenset[str]:
        """Ids of our jobs that wait or run, whoever submitted them."""
        reply = self._request("GET", "/api/jobs/")
        try:
            if reply.status_code != 200:
                raise ValueError(f"HTTP {reply.status_code}: {_first_line(reply)}")
            return frozenset(
                str(job["submission_id"])
                for job in reply.json()
                if _STATUS_OF_RAY.get(job["status"]) in ("submitted", "running")
                and "gradloc_incident" in (job.get("metadata") or {})
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RayUnavailable(f"{self._where} does not list its jobs: {str(error)[:120]}") from None

    def stop(self, job: str) -> None:
        self._request("POST", f"/api/jobs/{job}/stop")

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, path: str, json: dict[str, Any] | None = None) -> httpx.Response:
        try:
            reply = self._http.request(method, path, json=json)
        except httpx.HTTPError as error:
            raise RayUnavailable(f"{self._where}: {type(error).__name__} {str(error)[:120]}".rstrip()) from None
        if reply.status_code in (401, 403):
            raise RayUnavailable(f"{self._where} refuses our token (HTTP {reply.status_code}); set RAY_AUTH_TOKEN")
        if method == "POST" and path == "/api/jobs/" and reply.status_code in (404, 405):
            raise RayUnavailable(f"{self._where} has no Jobs API (HTTP {reply.status_code}); is this the dashboard?")
        return reply


class Dispatcher:
    """A thread of its own, so that Ray's slowness never holds up the folding of steps."""

    def __init__(
        self,
        bus: Bus,
        jobs: RayJobs,
        template: JobTemplate,
        *,
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._jobs, self._template = bus, jobs, template
        self._poll_s, self._clock = poll_s, clock
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._plan = Plan()
        self._nonce = secrets.token_hex(16)
        # By job: when it was posted, what was last reported and when, failures and when to try again.
        self._posted: dict[str, float] = {}
        self._reported: dict[str, tuple[JobStatus, float]] = {}
        self._server_errors: dict[str, tuple[int, float]] = {}
        self._reports: list[tuple[str, bytes]] = []
        self._backoff_s = 0.0
        self.num_submitted = 0
        self.num_errors = 0
        self.is_ray_up = True
        self._thread = threading.Thread(target=self._run, name="gradloc-dispatch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, plan: Plan) -> None:
        """Replace the plan; never blocks."""
        with self._lock:
            self._plan = plan
        self._wake.set()

    def close(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=15.0)
        self._jobs.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(timeout=self._poll_s)
            self._wake.clear()
            try:
                self._turn()
            except RayUnavailable as error:
                self._rest(error)
            except Exception:
                self.num_errors += 1
                log.exception("dispatch failed unexpectedly; going on")
                self._stopping.wait(_BACKOFF_S[0])

    def _rest(self, error: RayUnavailable) -> None:
        self.num_errors += 1
        if self.is_ray_up:
            log.warning("%s; localizations wait, trying again with backoff", error)
        self.is_ray_up = False
        self._backoff_s = min(max(_BACKOFF_S[0], 2 * self._backoff_s), _BACKOFF_S[1])
        self._stopping.wait(self._backoff_s)

    def _turn(self) -> None:
        with self._lock:
            plan = self._plan
        self._flush()
        ready = {submission.submission_id for submission in plan.ready}
        watched = {submission.submission_id for submission in plan.watch}
        now = time.monotonic()
        self._posted = {job: at for job, at in self._posted.items() if job in ready and now < at + _TELL_AGAIN_S}
        self._reported = {job: said for job, said in self._reported.items() if job in ready | watched}
        self._server_errors = {job: count for job, count in self._server_errors.items() if job in ready}
        self._submit_within_cap(plan, now)
        for submission in plan.stop:
            self._jobs.stop(submission.submission_id)
            self._report(submission, "stopped", "ran too long", now)
        for submission in plan.watch:
            self._watch(submission, now)
        self._flush()
        if not self.is_ray_up and (plan.ready or plan.watch or plan.stop):
            log.info("Ray answers again")
            self.is_ray_up, self._backoff_s = True, 0.0

    def _submit_within_cap(self, plan: Plan, now: float) -> None:
        """The cap holds for the pool: one replica at a time asks Ray how many jobs there are, and submits."""
        wanted = [
            item
            for item in plan.to_submit(self._posted)
            if now >= self._server_errors.get(item.submission_id, (0, 0.0))[1]
        ]
        if not wanted:
            return
        try:
            if not self._bus.acquire_lease(streams.JOB_POOL, self._nonce, ttl_s=_SUBMITTING_TTL_S):
                return  # another replica's turn; the next look is soon
            active = self._jobs.active()
            num_free = plan.jobs_max - len(active)
            for submission in wanted:
                is_new = submission.submission_id not in active
                if is_new and num_free <= 0:
                    break
                # Renewed before each post, so that nobody else counts while one is on its way.
                if not self._bus.acquire_lease(streams.JOB_POOL, self._nonce, ttl_s=_SUBMITTING_TTL_S):
                    break
                self._submit(submission, now)
                num_free -= is_new
        except BusUnavailable:
            return  # the service's own loop says so; the plan waits
        finally:
            with suppress(BusUnavailable):
                self._bus.release_lease(streams.JOB_POOL, self._nonce)

    def _submit(self, submission: Submission, now: float) -> None:
        job = submission.submission_id
        num_errors, _ = self._server_errors.get(job, (0, 0.0))
        try:
            self._jobs.submit(self._template.body(submission))
        except (JobRefused, ValueError) as error:
            self._report(submission, "refused", str(error), now)
        except JobServerError as error:
            num_errors += 1
            self._server_errors[job] = (num_errors, now + 2.0 ** (num_errors - 1))
            if num_errors < _SERVER_ERRORS_MAX:
                log.warning("Ray failed at job %s (%s); will try again", job, error)
                return
            self._report(submission, "refused", str(error), now)
        else:
            self.num_submitted += 1
            log.info("submitted %s (run %s)", job, submission.run_id)
            self._report(submission, "submitted", "", now)
        self._posted[job] = now

    def _watch(self, submission: Submission, now: float) -> None:
        job = submission.submission_id
        try:
            found = self._jobs.status(job)
        except JobServerError as error:
            self.num_errors += 1
            log.warning("Ray does not say how job %s is doing (%s)", job, error)
            return
        status, detail = found if found is not None else ("lost", "Ray does not know this job any more")
        said, said_at = self._reported.get(job, (None, 0.0))
        if status != said or (status not in ("submitted", "running") and now > said_at + _TELL_AGAIN_S):
            self._report(submission, status, detail, now)

    def _report(self, submission: Submission, status: JobStatus, detail: str, now: float) -> None:
        message = JobReported(
            run_id=submission.run_id,
            attempt=submission.attempt,
            ts=self._clock(),
            incident_id=submission.incident_id,
            localization_attempt=submission.localization_attempt,
            status=status,
            detail=" ".join(detail.split())[:400],
        )
        self._reported[submission.submission_id] = (status, now)
        self._reports.append((streams.stream(submission.run_id, "control"), codec.encode(message)))
        # What falls off here is found again: states that are not told of a job ask for it anew.
        del self._reports[:-_REPORTS_WAITING_MAX]

    def _flush(self) -> None:
        while self._reports:
            key, data = self._reports[0]
            try:
                self._bus.append(key, [data], length_max=streams.STREAM_LENGTH_MAX["control"])
            except BusUnavailable:
                return  # the service's own loop says so; the report waits
            del self._reports[0]


def _first_line(reply: httpx.Response) -> str:
    lines = [line.strip() for line in reply.text[:4_000].splitlines() if line.strip()]
    # Ray answers errors with a traceback whose last line says what happened.
    return (lines[-1] if lines else "no text")[:200]
