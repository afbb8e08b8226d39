"""A reporter's database with the history of many runs, written in bulk beside the reporter's own way in.

A few incidents are told to the reporter's fold as messages; their rows are then copied under other
names, so that what is read back is what the reporter wrote, many times. Steps go in as plain rows.
"""

import math
import random
from collections.abc import Iterator
from typing import Any

from sqlalchemy import insert, select, text

from gradloc_proto import messages as m
from gradloc_proto.identities import incident_id, spike_id
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.fold import Fold
from gradloc_reporter.store.tables import (
    Base,
    EventRow,
    FindingRow,
    FingerprintRow,
    IncidentRow,
    RunRow,
    SpikeRow,
    SummaryRow,
)

TEMPLATES = 24
NUM_TOKENS, NUM_LAYERS, NUM_COLUMNS = 96, 24, 24  # of a finding's picture: about 10 kB
LONG_RUN = "run-long"
START = 1_700_000_000.0
ROWS_AT_ONCE = 20_000


def run_name(number: int) -> str:
    return f"run-{number:04d}"


def a_finding(dice: random.Random, step: int) -> m.Finding:
    token = dice.randrange(NUM_TOKENS)
    rows = tuple(tuple(round(dice.random() / 1e3, 7) for _ in range(NUM_COLUMNS)) for _ in range(NUM_LAYERS))
    texts = tuple(dice.choice((" the", " so", "<th", "ink", "\n", " 7", " is")) for _ in range(NUM_TOKENS))
    token_id = dice.randrange(50_000)
    return m.Finding(
        verdict=dice.choice(("token", "token", "sequence", "layer")),
        strategy="attribution",
        step=step,
        summary="one token",
        culprits=(
            m.Culprit(
                rank=dice.randrange(8),
                micro_batch=0,
                sequence=2,
                token=token,
                token_id=token_id,
                token_text=texts[token],
                share=0.99,
                ratio=2.1e5,
                logp=-0.2,
                advantage=-1.1,
            ),
        ),
        share=0.99,
        checksum=0.998,
        certificate=m.Certificate(grad_norm=640.0, norm_without=0.43, limit=1.64, holds=True, num_culprits=1),
        fidelity=m.Fidelity(reported_norm=640.0, replayed_norm=640.1, rel_error=1e-4, tolerance=5e-3, reproduced=True),
        causes=(
            m.Cause(
                name=dice.choice(("token-mismatch", "stale-policy", "advantage-outlier")),
                confidence="high",
                summary="token-level train/inference mismatch",
                evidence={"ratio": 2.1e5},
            ),
        ),
        fix=m.Fix(name="TokenClip [0.5, 5]", norm_after=0.44, holds=True),
        healthy_norm=0.41,
        profile=m.Profile(layers=tuple(f"layers.{n}.mlp" for n in range(NUM_LAYERS)), first_position=0, values=rows),
        sequence_view=m.SequenceView(
            rank=3,
            micro_batch=0,
            sequence=2,
            first_position=0,
            token_ids=tuple(dice.randrange(50_000) for _ in range(NUM_TOKENS)),
            token_texts=texts,
            shares=tuple(round(dice.random() / 1e4, 8) for _ in range(NUM_TOKENS)),
        ),
        shares_by_sequence=((3, 0, 2, 0.99), (3, 0, 1, 0.003)),
        cost=m.Cost(steps=1.7, num_forwards=3, num_backwards=2, seconds=14.2),
    )


def an_incident(run_id: str, step: int, ts: float, dice: random.Random) -> list[m.Message]:
    """Opened, joined twice, localized, resolved."""
    rule = "norm"

    def spike(at: int, norm: float) -> m.Spike:
        flag = m.Flag(rule=rule, series="norm", value=norm, score=norm / 0.41, baseline=0.41, limit=1.64)
        identity = spike_id(run_id, 0, at, rule)
        return m.Spike(
            spike_id=identity,
            step=at,
            grad_norm=norm,
            healthy_norm=0.41,
            limit=1.64,
            flags=(flag,),
            snapshot="file:///s",
        )

    first = spike(step, 640.0)
    known: dict[str, Any] = {"run_id": run_id, "attempt": 0, "incident_id": incident_id(run_id, 0, first.spike_id)}
    return [
        m.IncidentOpened(**known, ts=ts, spike=first),
        m.IncidentJoined(**known, ts=ts + 1, spike=spike(step + 1, 9.0)),
        m.IncidentJoined(**known, ts=ts + 2, spike=spike(step + 2, 12.0)),
        m.JobReported(**known, ts=ts + 3, localization_attempt=1, status="submitted"),
        m.LocalizationStarted(**known, ts=ts + 4, localization_attempt=1, step=step, snapshot="file:///s"),
        m.LocalizationFinished(**known, ts=ts + 20, localization_attempt=1, finding=a_finding(dice, step)),
        m.IncidentResolved(**known, ts=ts + 60, step=step + 50, reason="calm"),
    ]


class History:
    """Grows a database; `incident_ids` are those in it."""

    def __init__(self, database: Database, *, seed: int) -> None:
        self._database = database
        self._dice = random.Random(seed)
        self.incident_ids: list[str] = []
        self._num_steps: dict[str, int] = {}
        self._templates = self._told()

    def _told(self) -> list[tuple[str, dict[str, list[dict[str, Any]]]]]:
        """Rows of a few incidents as the reporter's own fold writes them, then taken out again."""
        found = []
        with self._database.writing() as session:
            fold = Fold(session, clock=lambda: START)
            for number in range(TEMPLATES):
                for message in an_incident("template", 1_000 + 100 * number, START, self._dice):
                    fold.apply(message)
            fold.finish()
        with self._database.reading() as session:
            for name in session.scalars(select(IncidentRow.incident_id)).all():
                rows: dict[str, list[dict[str, Any]]] = {}
                for table in (IncidentRow, SpikeRow, FindingRow, EventRow, SummaryRow, FingerprintRow):
                    columns = Base.metadata.tables[table.__tablename__].columns
                    query = select(*columns).where(columns["incident_id"] == name)
                    rows[table.__tablename__] = [dict(row._mapping) for row in session.execute(query)]
                found.append((name, rows))
        with self._database.writing() as session:
            for table in reversed(Base.metadata.sorted_tables):
                session.execute(table.delete())
        return found

    def add_runs(self, names: list[str]) -> None:
        rows = [
            {
                "run_id": name,
                "attempt": 0,
                "labels_json": '{"team": "rl"}',
                "team": "rl",
                "started_at": START,
                "last_attempt": 0,
                "last_step": 0,
                "last_step_at": START,
                "last_norm": 0.4,
                "limits_attempt": 0,
                "limits_version": -1,
                "num_events_dropped": 0,
            }
            for name in names
        ]
        with self._database.writing() as session:
            session.execute(insert(RunRow), rows)

    def add_steps(self, run_id: str, count: int) -> None:
        first = self._num_steps.get(run_id, 0)
        self._num_steps[run_id] = first + count
        with self._database.writing() as session:
            for chunk in _chunks(range(first, first + count)):
                self._insert_steps(session, run_id, chunk)

    def _insert_steps(self, session: Any, run_id: str, steps: range) -> None:
        rows = [
            (run_id, 0, step, START + step, math.exp(self._dice.gauss(-0.9, 0.2)), 1.64, 0.1, 0.5, 1.2, 0.01, 0.0, 640)
            for step in steps
        ]
        columns = 'run_id, attempt, step, ts, grad_norm, "limit", loss, reward_mean, ratio_max, kl, stall_s, num_tokens'
        connection = session.connection().connection.driver_connection
        if self._database.dialect == "postgresql":
            copy = f"COPY steps ({columns}, decision, rules_hit) FROM STDIN"
            with connection.cursor() as cursor, cursor.copy(copy) as copying:
                for row in rows:
                    copying.write_row((*row, "go", ""))
        else:
            marks = ", ".join("?" * 12)
            connection.executemany(
                f"INSERT INTO steps ({columns}, decision, rules_hit) VALUES ({marks}, 'go', '')", rows
            )

    def add_incidents(self, run_ids: list[str], count: int) -> None:
        """In the order in which they happened, over all runs alike."""
        for start in range(0, count, 500):
            rows: dict[str, list[dict[str, Any]]] = {}
            for _ in range(min(500, count - start)):
                self._copy(rows, self._dice.choice(run_ids))
            with self._database.writing() as session:
                for name, values in rows.items():
                    session.execute(insert(Base.metadata.tables[name]), values)

    def _copy(self, rows: dict[str, list[dict[str, Any]]], run_id: str) -> None:
        name, template = self._dice.choice(self._templates)
        number = len(self.incident_ids) + 1
        new = f"inc-{number:016x}"
        self.incident_ids.append(new)

        def renamed(value: Any) -> Any:
            return value.replace(name, new).replace("template", run_id) if isinstance(value, str) else value

        for table, known in template.items():
            for index, row in enumerate(known):
                copy = {key: renamed(value) for key, value in row.items()}
                if table == "incidents":
                    copy["number"] = number
                elif table == "summaries":
                    copy |= {"number": number, "made_at": START + number}
                elif table == "events":
                    copy |= {"number": None, "message_key": f"{new}-{index}"}
                    copy.pop("number")
                elif table == "spikes":
                    copy["spike_id"] = f"{new}-{index}"
                rows.setdefault(table, []).append(copy)

    def settle(self) -> None:
        """What a database does by itself in time: old rows swept, statistics, a checkpoint, the next number."""
        if self._database.dialect == "postgresql":
            with self._database.rows() as connection:  # no transaction around it
                connection.execute(text("SELECT setval('incidents_number_seq', (SELECT max(number) FROM incidents))"))
                for word in ("VACUUM (ANALYZE)", "CHECKPOINT"):
                    connection.exec_driver_sql(word)
            return
        with self._database.writing() as session:
            session.execute(text("ANALYZE"))
        with self._database.reading() as session:
            session.connection().connection.driver_connection.execute("COMMIT")  # type: ignore[union-attr]
            session.connection().connection.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[union-attr]


def _chunks(steps: range) -> Iterator[range]:
    for start in range(0, len(steps), ROWS_AT_ONCE):
        yield steps[start : start + ROWS_AT_ONCE]
