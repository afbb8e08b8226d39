"""The life of an incident: opened by a spike, joined or worsened by more, resolved by calm or by the end.

Pure. Depends on the order of steps alone, never on ticks or findings, so that an owner who was killed
and one who was not tell the same story. Resolving forgets nothing: a localization may end later.
"""

import math

from gradloc_detector.policy import INCIDENTS_KEPT_MAX, SPIKES_KEPT_MAX, Policy
from gradloc_detector.state import (
    IN_FLIGHT,
    SETTLED,
    Book,
    Effects,
    Emit,
    Incident,
    KeptSpike,
    Localization,
)
from gradloc_proto import identities
from gradloc_proto.messages import (
    IncidentJoined,
    IncidentOpened,
    IncidentResolved,
    IncidentWorsened,
    Spike,
)
from gradloc_proto.rules import is_about_gradient


def open_incident(book: Book) -> Incident | None:
    return next((incident for incident in reversed(book.incidents) if not incident.resolved), None)


def with_incident(book: Book, incident: Incident) -> Book:
    """`book` with the incident of that id replaced."""
    kept = tuple(incident if item.incident_id == incident.incident_id else item for item in book.incidents)
    return book.model_copy(update={"incidents": kept})


def struck(book: Book, spike: Spike, policy: Policy, *, score: float, is_alert: bool = False) -> tuple[Book, Effects]:
    """`book` after a spike. `is_alert` tells it as worse whatever its score."""
    book = book.model_copy(update={"healthy_streak": 0})
    early = next(
        (item for item in book.early_snapshots if (item.attempt, item.step) == (book.attempt, spike.step)), None
    )
    kept = KeptSpike(
        spike_id=spike.spike_id,
        step=spike.step,
        score=score,
        path=early.path if early else None,
        has_gradient=is_about_gradient(spike.flags),
    )
    incident = open_incident(book)
    if incident is None:
        return _opened(book, spike, kept, policy)
    # Not by "more than": a second non-finite step is no worse than the first.
    worsened = is_alert or (score >= policy.worsened_factor * incident.worst_score and score != incident.worst_score)
    incident = incident.model_copy(
        update={
            "worst_score": max(incident.worst_score, score),
            "num_spikes": incident.num_spikes + 1,
            "spikes": _kept_spikes((*incident.spikes, kept)),
        }
    )
    if kept.has_gradient and incident.localization.phase == "unneeded":
        waiting = incident.localization.model_copy(update={"phase": "snapshot", "since": None})
        incident = incident.model_copy(update={"localization": waiting})
    message_type = IncidentWorsened if worsened else IncidentJoined
    message = message_type(
        run_id=book.run_id,
        attempt=incident.attempt,
        ts=book.last_ts,
        incident_id=incident.incident_id,
        spike=spike,
    )
    return with_incident(book, incident), (Emit("incidents", message),)


def calmed(book: Book, policy: Policy) -> tuple[Book, Effects]:
    """`book` after a healthy step."""
    book = book.model_copy(update={"healthy_streak": book.healthy_streak + 1})
    incident = open_incident(book)
    if incident is None:
        return book, ()
    needed = policy.resolve_after_steps
    if is_storm(book, policy):
        needed *= policy.storm_resolve_factor
    if book.healthy_streak < needed:
        return book, ()
    return resolved(book, f"{needed} healthy steps in a row")


def resolved(book: Book, reason: str) -> tuple[Book, Effects]:
    """`book` with its open incident, if any, resolved."""
    incident = open_incident(book)
    if incident is None:
        return book, ()
    message = IncidentResolved(
        run_id=book.run_id,
        attempt=incident.attempt,
        ts=book.last_ts,
        incident_id=incident.incident_id,
        step=book.last_step or 0,
        reason=reason,
    )
    book = with_incident(book, incident.model_copy(update={"resolved": True}))
    return book, (Emit("incidents", message),)


def is_storm(book: Book, policy: Policy) -> bool:
    """Whether incidents come so often that they are one trouble."""
    steps = book.opened_steps
    return len(steps) >= policy.storm_incidents and steps[-1] - steps[0] <= policy.storm_window_steps


def _opened(book: Book, spike: Spike, kept: KeptSpike, policy: Policy) -> tuple[Book, Effects]:
    incident = Incident(
        incident_id=identities.incident_id(book.run_id, book.attempt, spike.spike_id),
        attempt=book.attempt,
        opened_step=spike.step,
        worst_score=kept.score,
        spikes=(kept,),
        localization=Localization(phase="snapshot" if kept.has_gradient else "unneeded"),
    )
    message = IncidentOpened(
        run_id=book.run_id,
        attempt=book.attempt,
        ts=book.last_ts,
        incident_id=incident.incident_id,
        spike=spike,
        labels=book.labels,
    )
    book = book.model_copy(
        update={
            "incidents": _kept_incidents((*book.incidents, incident)),
            "num_incidents": book.num_incidents + 1,
            "opened_steps": (*book.opened_steps, spike.step)[-policy.storm_incidents :],
        }
    )
    effects: Effects = (Emit("incidents", message),)
    if book.ended:  # a late step of a run that is over: nothing healthy will follow
        book, more = resolved(book, "run ended")
        effects += more
    return book, effects


def _kept_incidents(incidents: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """At most INCIDENTS_KEPT_MAX: what is settled goes first, then the mildest; the newest stays."""
    if len(incidents) <= INCIDENTS_KEPT_MAX:
        return incidents

    def worth(incident: Incident) -> tuple[bool, bool, float]:
        phase = incident.localization.phase
        return (phase not in SETTLED, phase in IN_FLIGHT, _order(incident.worst_score))

    least = min(incidents[:-1], key=worth)
    return tuple(incident for incident in incidents if incident is not least)


def _kept_spikes(spikes: tuple[KeptSpike, ...]) -> tuple[KeptSpike, ...]:
    """The first spike and the worst others; one whose snapshot exists is worth more than one without."""
    if len(spikes) <= SPIKES_KEPT_MAX:
        return spikes
    least = min(spikes[1:], key=lambda spike: (spike.has_gradient, spike.path is not None, _order(spike.score)))
    return tuple(spike for spike in spikes if spike is not least)


def _order(score: float) -> float:
    return -math.inf if math.isnan(score) else score
