"""What the reporter is compared with: the driver alone, the same rows, orjson."""

from typing import Any, Protocol

import orjson

LIST_COLUMNS = (
    "number, incident_id, run_id, attempt, status, opened_at, updated_at, first_step, last_step, num_spikes, "
    "worst_spike_json, resolved_at, resolved_step, resolved_reason, localization_attempt, verdict, cause, "
    "acknowledged_by, revision"
)


class Bare(Protocol):
    """One open connection of a driver; `mark` stands for a parameter."""

    mark: str

    def rows(self, query: str, parameters: tuple[Any, ...]) -> list[dict[str, Any]]: ...


class BareSqlite:
    mark = "?"

    def __init__(self, path: str) -> None:
        import sqlite3

        self._connection = sqlite3.connect(path)
        self._connection.execute("PRAGMA journal_mode=WAL")

    def rows(self, query: str, parameters: tuple[Any, ...]) -> list[dict[str, Any]]:
        cursor = self._connection.execute(query, parameters)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def pairs(self, query: str, parameters: tuple[Any, ...]) -> list[Any]:
        return self._connection.execute(query, parameters).fetchall()

    def close(self) -> None:
        self._connection.close()


class BarePostgres:
    mark = "%s"

    def __init__(self, url: str) -> None:
        import psycopg
        from psycopg.rows import dict_row

        self._connection = psycopg.connect(url, autocommit=True)
        self._dict_row = dict_row

    def rows(self, query: str, parameters: tuple[Any, ...]) -> list[dict[str, Any]]:
        with self._connection.cursor(row_factory=self._dict_row) as cursor:
            return cursor.execute(query, parameters).fetchall()

    def pairs(self, query: str, parameters: tuple[Any, ...]) -> list[Any]:
        return self._connection.execute(query, parameters).fetchall()

    def close(self) -> None:
        self._connection.close()


def incidents(bare: Bare, before: int, limit: int) -> bytes:
    """A page of the list, without findings: less than the answer holds, which names the culprit."""
    query = f"SELECT {LIST_COLUMNS} FROM incidents WHERE number < {bare.mark} ORDER BY number DESC LIMIT {limit + 1}"
    return orjson.dumps(bare.rows(query, (before,)))


def incident(bare: Bare, name: str) -> bytes:
    """Everything of one incident: its row, attempts, spikes, snapshots, log."""
    mark = bare.mark
    snapshots = (
        "SELECT DISTINCT snapshots.* FROM snapshots JOIN spikes ON spikes.run_id = snapshots.run_id AND "
        f"spikes.attempt = snapshots.attempt AND spikes.step = snapshots.step WHERE spikes.incident_id = {mark}"
    )
    parts = {
        "incident": bare.rows(f"SELECT * FROM incidents WHERE incident_id = {mark}", (name,)),
        "findings": bare.rows(f"SELECT * FROM findings WHERE incident_id = {mark}", (name,)),
        "spikes": bare.rows(f"SELECT * FROM spikes WHERE incident_id = {mark} ORDER BY step", (name,)),
        "snapshots": bare.rows(snapshots, (name,)),
        "events": bare.rows(f"SELECT * FROM events WHERE incident_id = {mark} ORDER BY ts, number", (name,)),
    }
    return orjson.dumps(parts)


def series(bare: Any, run_id: str) -> bytes:
    """Every step of a run, step and norm only."""
    query = f"SELECT step, grad_norm FROM steps WHERE run_id = {bare.mark} ORDER BY attempt, step"
    return orjson.dumps(bare.pairs(query, (run_id,)))
