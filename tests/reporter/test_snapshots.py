"""Snapshots that nobody needs go; those of open and pinned incidents never do, and nothing else in the store does."""

import math
import os
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.command import reporter
from gradloc_reporter.keeper import SnapshotKeeper
from gradloc_reporter.settings import SnapshotSettings
from gradloc_reporter.snapshot_rules import FRESH_S, ORPHAN_S, Found, Known, Place, plan
from gradloc_reporter.snapshot_store import SnapshotStore, StoreUnavailable, place_of
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.fold import Fold
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.store.wishes import pin

DAY_S = 86_400.0
NOW = 100 * DAY_S
PLACES = st.builds(Place, st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(0, 5))
TIMES = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, NOW)


def gone(found: list[Found], known: dict[Place, Known], quota: int | None = None) -> dict[Place, str]:
    going = plan(found, known, known_runs={"r"}, now=NOW, keep_s=30 * DAY_S, quota_bytes=quota)
    return {each.place: each.reason for each in going}


# --- the rule ----------------------------------------------------------------------------------


@given(
    st.lists(st.builds(Found, PLACES, st.integers(0, 10**12), TIMES), unique_by=lambda each: each.place),
    st.dictionaries(PLACES, st.builds(Known, st.booleans(), st.none() | TIMES)),
    st.none() | st.integers(0, 10**13),
)
def test_what_is_held_or_fresh_stays_and_the_quota_takes_no_more_than_it_needs(
    found: list[Found], known: dict[Place, Known], quota: int | None
) -> None:
    asked = partial(plan, known=known, known_runs={"a"}, now=NOW, keep_s=30 * DAY_S, quota_bytes=quota)
    going = asked(found)
    by_place = {each.place: each for each in found}
    assert len({each.place for each in going}) == len(going) and {each.place for each in going} <= set(by_place)
    for each in going:
        assert each.place not in known or not known[each.place].held
        assert by_place[each.place].newest_at < NOW - FRESH_S
    for_quota = [each for each in going if each.reason == "quota"]
    left = sum(each.num_bytes for each in found) - sum(each.num_bytes for each in going)
    if for_quota:
        assert quota is not None and left + for_quota[-1].num_bytes > quota, "the last one was needed"
    assert asked(found[::-1]) == going


def test_age_counts_from_the_end_of_the_incident_and_an_orphans_from_its_newest_file() -> None:
    places = [Place("r", 0, step) for step in range(5)]
    found = [Found(place, 10, NOW - 90 * DAY_S) for place in places]
    known = {
        places[0]: Known(held=False, over_at=NOW - 31 * DAY_S),
        places[1]: Known(held=False, over_at=NOW - 29 * DAY_S),
        places[2]: Known(held=True, over_at=NOW - 31 * DAY_S),
        places[3]: Known(held=False, over_at=None),
    }
    assert gone(found, known) == {places[0]: "age", places[3]: "orphan", places[4]: "orphan"}
    young = [Found(places[4], 10, NOW - ORPHAN_S + 1), Found(places[3], 10, math.inf)]
    assert gone(young, {}) == {}
    unknown = [Found(Place("of-another-database", 0, step), 10, NOW - age * DAY_S) for step, age in enumerate((29, 31))]
    assert gone(unknown, {}) == {unknown[1].place: "orphan"}


def test_the_quota_takes_what_has_been_over_for_longest_and_stops_when_it_fits() -> None:
    places = [Place("r", 0, step) for step in range(4)]
    found = [Found(place, 100, NOW - 2 * DAY_S) for place in places]
    known = {place: Known(held=step == 0, over_at=NOW - step * DAY_S) for step, place in enumerate(places)}
    assert gone(found, known, quota=250) == {places[3]: "quota", places[2]: "quota"}
    assert gone(found, known, quota=400) == {}
    assert gone(found, known, quota=0) == dict.fromkeys(places[1:], "quota"), "what is held stays, whatever it is"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("file:///data/gradloc/run-1/0/1204", Place("run-1", 0, 1204)),
        ("s3://bucket/run-1/0/1204/", Place("run-1", 0, 1204)),
        ("file:///data/run-2/0/1204", None),
        ("file:///data/run-1/1/1204", None),
        ("file:///data/run-1/0/..", None),
        ("file:///data/run-1/0/01204", None),
        ("file:///", None),
        ("", None),
    ],
)
def test_a_path_that_a_trainer_told_names_a_place_of_its_own_run_or_none(path: str, place: Place | None) -> None:
    assert place_of(path, run_id="run-1", attempt=0) == place


# --- the store ---------------------------------------------------------------------------------


def snapshot(root: Path, place: str, *, age_s: float, whole: bool = True) -> Path:
    folder = root / place
    (folder / "batch").mkdir(parents=True)
    (folder / "batch/rank-0.safetensors").write_bytes(b"x" * 100)
    if whole:
        (folder / "manifest.json").write_bytes(b"{}")
    at = time.time() - age_s
    for file in folder.rglob("*.*"):
        os.utime(file, (at, at))
    return folder


class BrokenFileSystem(MemoryFileSystem):
    """A store whose rights were taken away."""

    protocol = "broken"

    def find(self, *_: Any, **__: Any) -> Any:
        raise PermissionError

    def rm(self, *_: Any, **__: Any) -> None:
        raise PermissionError


def test_the_store_shows_snapshots_and_removes_nothing_else(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    snapshot(root, "run-1/0/7", age_s=0)
    half = snapshot(root, "run-1/0/8", age_s=50, whole=False)
    outside.mkdir()
    (outside / "precious").write_text("x")
    (root / "run-1/0/7/link").symlink_to(outside)
    for other in ("README", "run-1/notes/x", "run-1/0/notes.txt", "models/a/b/c", "run-1/0/007/file"):
        (root / other).parent.mkdir(parents=True, exist_ok=True)
        (root / other).write_text("x")
    store = SnapshotStore(str(root))
    found = {each.place: each for each in store.found()}
    assert set(found) == {Place("run-1", 0, 7), Place("run-1", 0, 8)}
    assert found[Place("run-1", 0, 8)].num_bytes == 100
    assert found[Place("run-1", 0, 8)].newest_at == pytest.approx(time.time() - 50, abs=30)
    store.remove(Place("run-1", 0, 7))
    store.remove(Place("run-1", 0, 7))  # twice is once
    assert not (root / "run-1/0/7").exists() and half.exists() and (root / "run-1/0/notes.txt").exists()
    assert (outside / "precious").read_text() == "x", "a link is not followed"


def test_a_store_that_is_not_there_is_empty_and_one_that_fails_says_why(tmp_path: Path) -> None:
    assert SnapshotStore(f"file://{tmp_path}/nowhere").found() == []
    with pytest.raises(ValueError, match="is the root of a file system"):
        SnapshotStore("file:///")
    with pytest.raises(ValueError, match=r"--snapshots s9:.*expected a URL"):
        SnapshotStore("s9://bucket")
    fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)
    store = SnapshotStore("broken://store")
    with pytest.raises(StoreUnavailable, match="cannot list the snapshots: PermissionError"):
        store.found()
    with pytest.raises(StoreUnavailable, match="cannot remove r/0/1: PermissionError"):
        store.remove(Place("r", 0, 1))


# --- the whole ---------------------------------------------------------------------------------


@pytest.fixture
def database(database_url: str) -> Any:
    database = Database(database_url)
    yield database
    database.close()


def committed(told: Any, step: int, **values: Any) -> m.SnapshotCommitted:
    """The trainer's own path to the store is not the reporter's."""
    path = f"file:///trainer/side/{told.run_id}/0/{step}"
    known: dict[str, Any] = {"ts": told.ts, "step": step, "path": path, "num_bytes": 102, "manifest_sha256": "0" * 64}
    return m.SnapshotCommitted(run_id=told.run_id, attempt=0, **(known | values))


def fold(database: Database, *messages: Any) -> None:
    with database.writing() as session:
        folding = Fold(session)
        folding.apply_all(messages)
        folding.finish()


def over(told: Any, incident: str, ago_s: float) -> Any:
    return told.of(m.IncidentResolved, incident, step=9, reason="calm", ts=time.time() - ago_s)


def test_snapshots_go_with_their_incidents_and_the_log_says_so(kit: Any, database: Database, tmp_path: Path) -> None:
    told = kit.Told(ts=time.time() - 90 * DAY_S)
    old, open_, pinned, late = (told.opened(step) for step in (1, 2, 3, 4))
    fold(database, told.started(), old, open_, pinned, late)
    fold(database, *(committed(told, step) for step in (1, 2, 3)))
    # A wish for step 4 that a later step's batch answered; two references, the run goes on.
    fold(database, committed(told, 5, asked_step=4))
    fold(database, *(committed(told, step, weights="reference", ts=told.ts + step) for step in (20, 40)))
    fold(database, *(over(told, each.incident_id, 40 * DAY_S) for each in (old, pinned)))
    fold(database, over(told, late.incident_id, 2 * DAY_S))
    with database.writing() as session:
        assert pin(session, pinned.incident_id, by="ada", signed="ada", ts=time.time())
    for step in (1, 2, 3, 5, 20, 40, 77):  # nobody told of 77
        snapshot(tmp_path, f"{told.run_id}/0/{step}", age_s=80 * DAY_S)
    snapshot(tmp_path, f"{told.run_id}/0/78", age_s=0, whole=False)  # is being written
    keeper = SnapshotKeeper(database, SnapshotSettings(f"file://{tmp_path}"), clock=time.time)
    assert keeper.sweep_once() == 3

    def left() -> set[int]:
        return {int(folder.name) for folder in (tmp_path / told.run_id / "0").iterdir()}

    assert left() == {2, 3, 5, 40, 78}
    assert dict(keeper.counts.removed) == {"age": 2, "orphan": 1} and keeper.counts.num_bytes == 4 * 102 + 100
    with database.reading() as session:
        detail = Queries().incident(session, old.incident_id)
        assert detail is not None and detail.snapshots[0].removed_at is not None
        assert detail.events[-1].text.startswith("Snapshot of step 1 removed: its incident was over for longer")
        kept = Queries().incident(session, pinned.incident_id)
        assert kept is not None and kept.snapshots[0].removed_at is None
        entries, _ = Queries().audit(session, before=None, limit=50)
        assert [entry.kind for entry in entries] == ["snapshot_removed"] * 2 + ["pinned"]
    assert keeper.sweep_once() == 0
    with database.writing() as session:
        assert pin(session, pinned.incident_id, by=None, signed="ada", ts=time.time())
    tight = SnapshotKeeper(database, SnapshotSettings(f"file://{tmp_path}", quota_bytes=320), clock=time.time)
    assert tight.sweep_once() == 2 and left() == {2, 40, 78}, "unpinned, over for long; then over for two days"


def test_a_removal_that_was_cut_short_is_finished_by_the_next_pass(
    kit: Any, database: Database, database_url: str, tmp_path: Path
) -> None:
    told = kit.Told(ts=time.time() - 90 * DAY_S)
    opened = told.opened(1)
    fold(database, told.started(), opened, committed(told, 1), over(told, opened.incident_id, 40 * DAY_S))
    folder = snapshot(tmp_path, f"{told.run_id}/0/1", age_s=80 * DAY_S)
    (folder / "manifest.json").unlink()  # as a crash right after the first call leaves it
    keeper = SnapshotKeeper(database, SnapshotSettings(f"file://{tmp_path}"), clock=time.time)
    assert keeper.sweep_once() == 1 and not folder.exists()
    connection = sqlite3.connect(database_url.removeprefix("sqlite:///"))
    assert connection.execute("SELECT count(*) FROM snapshots WHERE removed_at IS NOT NULL").fetchone() == (1,)
    connection.close()


def test_a_running_reporter_sweeps_and_shows_what_the_store_holds(
    kit: Any, told: Any, bus: MemoryBus, start: Callable[..., Reporter], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    snapshot(store, "forgotten/0/1", age_s=40 * DAY_S)
    snapshot(store, "forgotten/0/2", age_s=0)
    url = start(snapshots=SnapshotSettings(f"file://{store}", quota_bytes=10**9)).url
    wanted = 'gradloc_snapshots_removed_total{reason="orphan"} 1.0'
    shown = kit.until(lambda: kit.ask(f"{url}/metrics").text, lambda text: wanted in text, "swept")
    assert "gradloc_snapshots_bytes 102.0" in shown and "gradloc_snapshots_quota_bytes 1e+09" in shown
    assert 'gradloc_snapshots_removed_total{reason="quota"} 0.0' in shown
    assert sorted(folder.name for folder in (store / "forgotten/0").iterdir()) == ["2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--snapshots", "file:///"], "root of a file system"),
        (["--snapshots", "file:///x", "--keep-snapshots-days", "0"], "days above 0"),
        (["--snapshots", "file:///x", "--keep-snapshots-days", "nan"], "days above 0"),
        (["--snapshots", "file:///x", "--snapshots-quota-gb", "-1"], "number of gigabytes"),
        (["--snapshots", "file:///x", "--snapshots-quota-gb", "nan"], "number of gigabytes"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    redis_server: Any, database_url: str, arguments: list[str], says: str
) -> None:
    common = ["--redis", redis_server.url, "--database", database_url, "--port", "0"]
    done = CliRunner().invoke(reporter, [*common, *arguments])
    assert done.exit_code == 2 and says in done.stderr and len(done.stderr.strip().splitlines()) == 1
