"""Which jobs should exist, read off the states of the runs: caps, worst first, waits. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gradloc_detector.policy import Policy
from gradloc_detector.state import IN_FLIGHT, Book, Incident, Localization
from gradloc_proto.identities import submission_id


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that should exist."""

    run_id: str
    attempt: int
    incident_id: str
    localization_attempt: int
    snapshot: str
    score: float
    reference: str | None = None  # a healthy step's snapshot, to compare with

    @property
    def submission_id(self) -> str:
        return submission_id(self.incident_id, self.localization_attempt)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the dispatcher should bring about: jobs to submit (worst first), to watch, to stop."""

    ready: tuple[Submission, ...] = ()
    watch: tuple[Submission, ...] = ()
    stop: tuple[Submission, ...] = ()
    jobs_max: int = 0

    def to_submit(self, posted: Collection[str]) -> tuple[Submission, ...]:
        """What to post now, where `posted` ids went out but have not come back in the states yet."""
        slots = self.jobs_max - len(self.watch) - len(posted)
        return tuple(item for item in self.ready if item.submission_id not in posted)[: max(0, slots)]


def plan(books: Iterable[Book], *, jobs_max: int, policy: Policy) -> Plan:
    """One job a run, `jobs_max` altogether; free slots go to the worst incidents."""
    ready: list[Submission] = []
    watch: list[Submission] = []
    stop: list[Submission] = []
    for book in books:
        flying = [_submission(book, item) for item in book.incidents if item.localization.phase in IN_FLIGHT]
        watch += flying
        stop += [
            Submission(book.run_id, item.attempt, item.incident_id, item.localization_attempt, item.snapshot, 0.0)
            for item in book.stops
        ]
        waiting = [item for item in book.incidents if _is_due(book, item.localization, policy)]
        if waiting and not flying:
            ready.append(_submission(book, max(waiting, key=lambda item: item.worst_score)))
    ready.sort(key=lambda item: (-item.score, item.submission_id))
    return Plan(tuple(ready), tuple(watch), tuple(stop), jobs_max)


def needs_clock(book: Book) -> bool:
    """Whether a Tick could change anything: runs at rest need none."""
    if any(not gap.told for gap in book.gaps):
        return True
    for incident in book.incidents:
        localization = incident.localization
        if localization.phase in ("snapshot", "running"):
            return True
        if localization.phase == "ready" and (book.clock is None or localization.not_before > book.clock):
            return True
    return False


def _is_due(book: Book, localization: Localization, policy: Policy) -> bool:
    if localization.phase != "ready":
        return False
    if book.clock is None:
        return localization.num_failures == 0
    # A clock that was set back must not stretch the wait.
    return localization.not_before <= book.clock or localization.not_before > book.clock + policy.retry_backoff_max_s


def _submission(book: Book, incident: Incident) -> Submission:
    localization = incident.localization
    assert localization.snapshot is not None, "a localization past the phase snapshot names one"
    return Submission(
        run_id=book.run_id,
        attempt=incident.attempt,
        incident_id=incident.incident_id,
        localization_attempt=localization.attempt,
        snapshot=localization.snapshot,
        score=incident.worst_score,
        reference=book.reference.path if book.reference is not None else None,
    )
