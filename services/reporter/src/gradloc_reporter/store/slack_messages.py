"""What Slack was told of each incident, and what it is still to be told."""

from dataclasses import dataclass

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from gradloc_reporter.store.rows import insert_new
from gradloc_reporter.store.tables import IncidentRow, SlackRow

# An incident older than this when Slack first hears of it is history: no flood after a change of settings.
NEWS_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Due:
    """An incident that has changed since Slack was told. `state` is None, "intended", "posted" or "gone"."""

    incident_id: str
    revision: int
    status: str
    state: str | None
    channel: str | None
    slack_ts: str | None
    told_status: str | None
    intended_at: float | None


def due(session: Session, *, channel: str, now: float, limit: int) -> list[Due]:
    """Incidents to tell `channel` of, those longest unheard of first."""
    told = and_(SlackRow.incident_id == IncidentRow.incident_id)
    news = func.coalesce(IncidentRow.opened_at, IncidentRow.updated_at) > now - NEWS_S
    query = (
        select(IncidentRow, SlackRow)
        .outerjoin(SlackRow, told)
        .where(
            or_(
                and_(SlackRow.incident_id.is_(None), news),
                and_(SlackRow.channel == channel, SlackRow.state == "intended"),
                and_(
                    SlackRow.channel == channel,
                    SlackRow.state == "posted",
                    SlackRow.told_revision < IncidentRow.revision,
                ),
            )
        )
        .order_by(SlackRow.incident_id.is_not(None), IncidentRow.number)
        .limit(limit)
    )
    return [
        Due(
            incident_id=incident.incident_id,
            revision=incident.revision,
            status=incident.status,
            state=None if slack is None else slack.state,
            channel=None if slack is None else slack.channel,
            slack_ts=None if slack is None else slack.slack_ts,
            told_status=None if slack is None else slack.told_status,
            intended_at=None if slack is None else slack.intended_at,
        )
        for incident, slack in session.execute(query)
    ]


def intend(session: Session, incident_id: str, *, channel: str, now: float) -> None:
    """Say, before posting, that a post may happen: a crash in between leaves this to look up."""
    values = {"incident_id": incident_id, "channel": channel, "state": "intended", "intended_at": now}
    insert_new(session, SlackRow, [values])


def told(session: Session, incident_id: str, *, slack_ts: str | None, revision: int, status: str) -> None:
    row = session.get(SlackRow, incident_id)
    assert row is not None, "told without intend"
    row.state, row.told_revision, row.told_status = "posted", revision, status
    row.slack_ts = slack_ts if slack_ts is not None else row.slack_ts


def gone(session: Session, incident_id: str) -> None:
    """Somebody deleted the message: respect it, say no more of this incident."""
    row = session.get(SlackRow, incident_id)
    assert row is not None, "gone without intend"
    row.state = "gone"
