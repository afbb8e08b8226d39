"""What becomes of old steps: thinned, so that a year of runs fits; never what people look for.

Of a run's steps older than the limit a tenth is kept: the extremes of each stretch, every step that a
rule flagged, the first and the last. Incidents, findings and the log are kept for ever.
"""

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from gradloc_reporter.downsampling import MAX_POINTS_MIN, kept
from gradloc_reporter.store.tables import RunRow, SpikeRow, StepRow

KEPT_OF = 10  # one step of so many
STRETCH_MAX = 20_000  # steps of one run thinned in one transaction
DELETE_MAX = 500  # names in one IN list that every database takes


def runs_with_old_steps(session: Session, *, before: float, limit: int) -> list[str]:
    """Runs that have a stretch worth thinning."""
    query = (
        select(StepRow.run_id)
        .join(RunRow, RunRow.run_id == StepRow.run_id)
        .where(StepRow.ts < before, StepRow.step >= RunRow.thinned_to)
        .group_by(StepRow.run_id)
        .having(func.count() >= KEPT_OF * MAX_POINTS_MIN)
        .order_by(StepRow.run_id)
        .limit(limit)
    )
    return list(session.scalars(query))


def thin(session: Session, run_id: str, *, before: float) -> int:
    """Thin one stretch of the run's old steps; says how many went."""
    run = session.get(RunRow, run_id, with_for_update=True)
    if run is None:
        return 0
    query = (
        select(StepRow.attempt, StepRow.step, StepRow.grad_norm, StepRow.rules_hit)
        .where(StepRow.run_id == run_id, StepRow.ts < before, StepRow.step >= run.thinned_to)
        .order_by(StepRow.step, StepRow.attempt)
        .limit(STRETCH_MAX)
    )
    rows = session.execute(query).all()
    if len(rows) < KEPT_OF * MAX_POINTS_MIN:
        return 0
    spikes = select(SpikeRow.attempt, SpikeRow.step).where(SpikeRow.run_id == run_id)
    staying = {(attempt, step) for attempt, step in session.execute(spikes)}
    staying |= {(row[0], row[1]) for row in rows if row[3]}
    chosen = kept([row[2] for row in rows], max(MAX_POINTS_MIN, len(rows) // KEPT_OF))
    staying |= {(rows[index][0], rows[index][1]) for index in chosen}
    going: dict[int, list[int]] = {}
    for attempt, step, _, _ in rows:
        if (attempt, step) not in staying:
            going.setdefault(attempt, []).append(step)
    for attempt, steps in going.items():
        _delete(session, run_id, attempt, steps)
    run.thinned_to = rows[-1][1] + 1
    return sum(len(steps) for steps in going.values())


def _delete(session: Session, run_id: str, attempt: int, steps: Sequence[int]) -> None:
    for start in range(0, len(steps), DELETE_MAX):
        chunk = StepRow.step.in_(steps[start : start + DELETE_MAX])
        session.execute(delete(StepRow).where(StepRow.run_id == run_id, StepRow.attempt == attempt, chunk))
