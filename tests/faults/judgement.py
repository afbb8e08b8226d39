"""Whether the promise holds: docs/design.md, "Streams and messages". Looks at the database, the channel and Redis.

What survived Redis has exactly one incident, one message and, where spikes are localized, one finding; what was lost
was noticed; and nothing has grown.
"""

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field, fields

from localizing import LocalizingWorld
from world import World

from gradloc_proto import codec, streams
from gradloc_proto.messages import IncidentOpened, SnapshotCommitted

FILES_MORE_MAX, THREADS_MORE_MAX = 16, 16  # than in calm: pools of connections and of threads fill on demand
CONNECTIONS_MAX = 12  # to Redis once trainers and jobs are gone: three services, each with threads that share a pool


@dataclass
class Judgement:
    """missed: spikes that survived and have no incident; unnoticed: lost ones that nobody told of; doubled: spikes in
    two incidents, incidents with two messages or two findings; untold: incidents without a message; unsettled:
    incidents whose localization neither ended nor was given up; unlocalized: those with a snapshot and no finding,
    although no attempt too many had failed; leaks: what has grown."""

    num_spikes: int = 0
    num_lost: int = 0
    num_findings: int = 0
    num_given_up: int = 0  # after as many attempts as the detector's policy allows
    missed: list[str] = field(default_factory=list)
    unnoticed: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)
    unlocalized: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    def faults(self) -> dict[str, list[str]]:
        """What breaks the promise, by its name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if not one.name.startswith("num_")}

    @property
    def holds(self) -> bool:
        return not any(self.faults().values())


def judge(world: World, usual: dict[str, tuple[int, int]]) -> Judgement:
    """`usual`: descriptors and threads of each service before the first fault."""
    found = Judgement()
    for run in world.runs:
        _judge_run(world, run, found)
    incidents = [row[0] for row in world.rows("SELECT incident_id FROM incidents")]
    messages = Counter(world.channel.incidents())
    found.doubled += [f"message of {incident}" for incident, count in messages.items() if count > 1]
    found.untold += [incident for incident in incidents if incident not in messages]
    if isinstance(world, LocalizingWorld):
        for run in world.runs:
            _judge_localizations(world, run, found)
    _judge_growth(world, usual, found)
    return found


def _judge_run(world: World, run: str, found: Judgement) -> None:
    told = Counter((a, s) for a, s in world.rows("SELECT attempt, step FROM spikes WHERE run_id = ?", run))
    gaps = [json.loads(row[0]) for row in world.rows(
        "SELECT detail_json FROM events WHERE run_id = ? AND kind = 'stream_gap_noticed'", run
    )]  # fmt: skip
    survived = world.streamed(run)
    seen = survived | set(world.rows("SELECT attempt, step FROM steps WHERE run_id = ?", run))
    last_seen = {attempt: max(s for a, s in seen if a == attempt) for attempt in {a for a, _ in seen}}
    found.doubled += [f"{run} {place}" for place, count in told.items() if count > 1]
    for attempt, step, spike in world.truth(run):
        if not spike:
            continue
        if attempt < world.attempts[run] and step > last_seen.get(attempt, -1):
            continue  # died with its trainer, in its queue
        found.num_spikes += 1
        place = (attempt, step)
        if place in told:
            continue
        if place in survived:
            found.missed.append(f"{run} {place}")
            continue
        found.num_lost += 1
        if not any(_covers(gap, attempt, step) for gap in gaps):
            found.unnoticed.append(f"{run} {place}")


def _judge_localizations(world: World, run: str, found: Judgement) -> None:
    opened, committed = set(), set()
    with world.client() as client:
        for name in ("incidents", "steps"):
            for _, parts in client.xrange(streams.stream(run, name)):
                with contextlib.suppress(codec.MessageRejected, KeyError):
                    message = codec.decode(parts[b"m"])
                    if isinstance(message, IncidentOpened):
                        opened.add(message.incident_id)
                    if isinstance(message, SnapshotCommitted):
                        committed.add((message.attempt, message.step))
    for (incident,) in world.rows("SELECT incident_id FROM incidents WHERE run_id = ?", run):
        if incident not in opened:
            continue  # Redis lost it, and with it what the detector knew
        attempts = world.rows("SELECT state, retryable, reason FROM findings WHERE incident_id = ?", incident)
        places = set(world.rows("SELECT attempt, step FROM spikes WHERE incident_id = ?", incident))
        num_finished = sum(state == "finished" for state, _, _ in attempts)
        is_given_up = any(str(reason).startswith("given up after") for _, _, reason in attempts)
        found.num_findings += num_finished > 0
        found.num_given_up += is_given_up and not num_finished
        if num_finished > 1:
            found.doubled.append(f"{run} finding of {incident}")
        if not num_finished and not any(state == "failed" and not retryable for state, retryable, _ in attempts):
            found.unsettled.append(f"{run} {incident} {attempts}")
        elif not num_finished and not is_given_up and places & committed:
            found.unlocalized.append(f"{run} {incident} {attempts}")


def _judge_growth(world: World, usual: dict[str, tuple[int, int]], found: Judgement) -> None:
    num_connections = world.num_connections()
    if num_connections > CONNECTIONS_MAX:
        found.leaks.append(f"{num_connections} connections to Redis, {CONNECTIONS_MAX} expected at most")
    for name, (num_files, num_threads) in world.usage().items():
        files_before, threads_before = usual.get(name, (num_files, num_threads))
        if num_files > files_before + FILES_MORE_MAX:
            found.leaks.append(f"{name}: {num_files} descriptors, {files_before} before")
        if num_threads > threads_before + THREADS_MORE_MAX:
            found.leaks.append(f"{name}: {num_threads} threads, {threads_before} before")


def _covers(gap: dict[str, object], attempt: int, step: int) -> bool:
    first, last = gap.get("first_step"), gap.get("last_step")
    return (
        gap.get("attempt", attempt) == attempt
        and isinstance(first, int)
        and isinstance(last, int)
        and first <= step <= last
    )
