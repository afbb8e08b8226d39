"""By what incidents are known again across runs: token, data source, layer, cause.

A token is its id and, where the text is known, a digest of it: the same id of two tokenizers is not
the same token. The strongest kind that an incident has names what keeps coming back.
"""

from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.orm import Session, aliased

from gradloc_proto.messages import Finding
from gradloc_reporter.store.rows import insert_new
from gradloc_reporter.store.tables import FingerprintRow, IncidentRow

KINDS = ("token", "source", "layer", "cause")  # the strongest first
VALUES_MAX = 8  # of one kind and incident
_SOURCES = ("data_source", "source", "dataset")  # evidence and uid parts that name where data came from


@dataclass(frozen=True, slots=True)
class Return:
    """One fingerprint of an incident and how often it was seen, this incident included."""

    kind: str
    value: str
    num_incidents: int
    num_runs: int
    first_seen: float | None


def of_finding(finding: Finding) -> list[tuple[str, str]]:
    """(kind, value) of a finding."""
    found: dict[str, dict[str, None]] = {kind: {} for kind in KINDS}
    for culprit in finding.culprits if finding.verdict not in ("batch-wide", "accounting") else ():
        if culprit.token_id is not None and finding.verdict != "sequence":
            found["token"][token_value(culprit.token_id, culprit.token_text)] = None
        if culprit.layer:
            found["layer"][culprit.layer] = None
    for cause in finding.causes:
        found["cause"][cause.name] = None
        for key in _SOURCES:
            value = cause.evidence.get(key)
            if isinstance(value, str) and value:
                found["source"][value] = None
    for layer in finding.layers_exploding:
        found["layer"][layer] = None
    return [(kind, value) for kind in KINDS for value in list(found[kind])[:VALUES_MAX]]


def token_value(token_id: int, text: str | None) -> str:
    return str(token_id) if text is None else f"{token_id}:{sha256(text.encode(errors='replace')).hexdigest()[:12]}"


def of_token(token_id: int) -> ColumnElement[bool]:
    """Fingerprints of this token id, whatever its text."""
    value = FingerprintRow.value
    return (FingerprintRow.kind == "token") & or_(
        value == str(token_id), (value >= f"{token_id}:") & (value < f"{token_id};")
    )


def renew(session: Session, incident: IncidentRow) -> None:
    """Write the incident's fingerprints from its present finding."""
    wanted = (
        set() if incident.finding_json is None else set(of_finding(Finding.model_validate_json(incident.finding_json)))
    )
    mine = FingerprintRow.incident_id == incident.incident_id
    known = {
        (kind, value) for kind, value in session.execute(select(FingerprintRow.kind, FingerprintRow.value).where(mine))
    }
    if known == wanted:
        return
    session.execute(delete(FingerprintRow).where(mine))
    insert_new(
        session,
        FingerprintRow,
        [
            {"kind": kind, "value": value, "incident_id": incident.incident_id, "run_id": incident.run_id}
            for kind, value in sorted(wanted)
        ],
    )


def returns(session: Session, incident_id: str, seen: ColumnElement[bool]) -> list[Return]:
    """How often each fingerprint of the incident was seen among the incidents that `seen` allows."""
    mine, other = aliased(FingerprintRow), aliased(FingerprintRow)
    query = (
        select(
            mine.kind,
            mine.value,
            func.count(),
            func.count(IncidentRow.run_id.distinct()),
            func.min(func.coalesce(IncidentRow.opened_at, IncidentRow.updated_at)),
        )
        .join(other, (other.kind == mine.kind) & (other.value == mine.value))
        .join(IncidentRow, IncidentRow.incident_id == other.incident_id)
        .where(mine.incident_id == incident_id, seen)
        .group_by(mine.kind, mine.value)
    )
    found = [Return(kind, value, count, runs, first) for kind, value, count, runs, first in session.execute(query)]
    return sorted(found, key=lambda each: (KINDS.index(each.kind), -each.num_incidents, each.value))


def similar(session: Session, incident_id: str, seen: ColumnElement[bool], *, limit: int) -> list[tuple[int, str]]:
    """(number, kinds shared) of other incidents, those that share the strongest kind first, then the newest."""
    mine, other = aliased(FingerprintRow), aliased(FingerprintRow)
    found: dict[int, list[str]] = {}
    for kind in KINDS:
        query = (
            select(IncidentRow.number)
            .join(other, other.incident_id == IncidentRow.incident_id)
            .join(mine, (other.kind == mine.kind) & (other.value == mine.value))
            .where(mine.incident_id == incident_id, mine.kind == kind, IncidentRow.incident_id != incident_id, seen)
            .order_by(IncidentRow.number.desc())
            .distinct()
            .limit(limit)
        )
        for number in session.scalars(query):
            found.setdefault(number, []).append(kind)
    order = sorted(found, key=lambda number: (KINDS.index(found[number][0]), -number))
    return [(number, ", ".join(found[number])) for number in order[:limit]]


def came_back_after(session: Session, incident: IncidentRow, seen: ColumnElement[bool]) -> str | None:
    """A regression: the newest incident of the same token, source or layer that was over when this one opened."""
    if incident.opened_at is None:
        return None
    mine, other = aliased(FingerprintRow), aliased(FingerprintRow)
    over_at = func.coalesce(IncidentRow.closed_at, IncidentRow.resolved_at)
    query = (
        select(IncidentRow.incident_id)
        .join(other, other.incident_id == IncidentRow.incident_id)
        .join(mine, (other.kind == mine.kind) & (other.value == mine.value))
        .where(
            mine.incident_id == incident.incident_id,
            mine.kind != "cause",
            IncidentRow.incident_id != incident.incident_id,
            IncidentRow.status == "resolved",
            over_at < incident.opened_at,
            seen,
        )
        .order_by(over_at.desc(), IncidentRow.number.desc())
        .limit(1)
    )
    return session.scalar(query)
