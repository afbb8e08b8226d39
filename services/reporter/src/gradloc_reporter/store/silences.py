"""Silences: incidents that match are not told while one lasts. A person's fact, like an acknowledgement.

A silence made with a token of some teams is about those teams' runs only, and only they see it.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from gradloc_proto.messages import Spike
from gradloc_reporter import answers as a
from gradloc_reporter.matching import in_words, matches, names_of, severity_of
from gradloc_reporter.store.run_facts import add_event
from gradloc_reporter.store.tables import IncidentRow, RunRow, SilenceRow

SILENCES_MAX = 1_000  # that have not ended; each costs every notification a comparison
OLD_S = 30 * 86_400.0  # silences that ended longer ago are not listed


@dataclass(frozen=True, slots=True)
class Silence:
    silence_id: str
    matchers: tuple[a.Matcher, ...]
    teams: frozenset[str] | None
    starts_at: float
    ends_at: float
    created_by: str
    reason: str

    def covers(self, names: dict[str, str], team: str | None, now: float) -> bool:
        mine = self.teams is None or team in self.teams
        return mine and self.starts_at <= now < self.ends_at and matches(self.matchers, names)


class TooManySilences(ValueError):
    """There are SILENCES_MAX of them."""


def create(
    session: Session, wish: a.SilenceWish, *, by: str, teams: frozenset[str] | None, ts: float
) -> a.SilenceAnswer:
    if len(active(session, ts)) >= SILENCES_MAX:
        raise TooManySilences(f"there are {SILENCES_MAX} silences; end one first")
    row = SilenceRow(
        silence_id=secrets.token_hex(8),
        matchers_json=json.dumps([each.model_dump() for each in wish.matchers]),
        teams_json=None if teams is None else json.dumps(sorted(teams)),
        starts_at=ts,
        ends_at=ts + 3600 * wish.hours,
        created_at=ts,
        created_by=by,
        reason=wish.reason,
    )
    session.add(row)
    _log(session, row, "silence_created", by, ts)
    session.flush()
    return answer(_silence(row), ts)


def end(
    session: Session, silence_id: str, *, by: str, teams: frozenset[str] | None, ts: float
) -> a.SilenceAnswer | None:
    """End it now; None where this viewer has none of that name."""
    row = session.get(SilenceRow, silence_id)
    if row is None or not _seen(_silence(row), teams):
        return None
    if row.ends_at > ts:
        row.ends_at = ts
        _log(session, row, "silence_ended", by, ts)
    return answer(_silence(row), ts)


def listed(session: Session, *, teams: frozenset[str] | None, now: float) -> tuple[a.SilenceAnswer, ...]:
    query = select(SilenceRow).where(SilenceRow.ends_at > now - OLD_S).order_by(SilenceRow.created_at.desc())
    found = [_silence(row) for row in session.scalars(query.limit(SILENCES_MAX))]
    return tuple(answer(each, now) for each in found if _seen(each, teams))


def active(session: Session, now: float) -> list[Silence]:
    query = select(SilenceRow).where(SilenceRow.ends_at > now, SilenceRow.starts_at <= now)
    return [_silence(row) for row in session.scalars(query.limit(SILENCES_MAX))]


def names_of_incident(incident: IncidentRow, run: RunRow | None) -> dict[str, str]:
    """What matchers and routes compare."""
    spike = None if incident.worst_spike_json is None else Spike.model_validate_json(incident.worst_spike_json)
    severity = severity_of(None if spike is None else spike.grad_norm, None if spike is None else spike.healthy_norm)
    labels = {} if run is None else json.loads(run.labels_json)
    return names_of(
        run_id=incident.run_id, labels=labels, verdict=incident.verdict, cause=incident.cause, severity=severity
    )


def covering(silences: Sequence[Silence], incident: IncidentRow, run: RunRow | None, now: float) -> Silence | None:
    """The silence that lasts longest of those about this incident."""
    if not silences:
        return None
    names, team = names_of_incident(incident, run), None if run is None else run.team
    return max(
        (each for each in silences if each.covers(names, team, now)), key=lambda each: each.ends_at, default=None
    )


def of_incident(session: Session, incident_id: str, now: float) -> a.SilenceAnswer | None:
    incident = session.scalars(select(IncidentRow).where(IncidentRow.incident_id == incident_id)).one_or_none()
    if incident is None:
        return None
    found = covering(active(session, now), incident, session.get(RunRow, incident.run_id), now)
    return None if found is None else answer(found, now)


def answer(silence: Silence, now: float) -> a.SilenceAnswer:
    return a.SilenceAnswer(
        silence_id=silence.silence_id,
        matchers=silence.matchers,
        starts_at=silence.starts_at,
        ends_at=silence.ends_at,
        created_by=silence.created_by,
        reason=silence.reason,
        active=silence.starts_at <= now < silence.ends_at,
    )


def _seen(silence: Silence, teams: frozenset[str] | None) -> bool:
    return teams is None or (silence.teams is not None and silence.teams <= teams)


def _silence(row: SilenceRow) -> Silence:
    return Silence(
        silence_id=row.silence_id,
        matchers=tuple(a.Matcher.model_validate(each) for each in json.loads(row.matchers_json)),
        teams=None if row.teams_json is None else frozenset(json.loads(row.teams_json)),
        starts_at=row.starts_at,
        ends_at=row.ends_at,
        created_by=row.created_by,
        reason=row.reason,
    )


def _log(session: Session, row: SilenceRow, kind: str, by: str, ts: float) -> None:
    detail = {"by": by, "matchers": in_words(_silence(row).matchers)}
    add_event(session, f"{kind}-{row.silence_id}", "", None, ts, kind, detail)
