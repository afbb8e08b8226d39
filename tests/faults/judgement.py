"""Whether the promise holds: docs/design.md, "What is promised". Looks at the database, the channel and Redis.

What survived Redis has exactly one incident and one message; what was lost was noticed.
"""

import json
from collections import Counter
from dataclasses import dataclass

from world import World


@dataclass(frozen=True)
class Judgement:
    """missed: spikes that survived and have no incident; unnoticed: lost ones that nobody told of; doubled: spikes in
    two incidents, or incidents with two messages; untold: incidents without a message."""

    num_spikes: int
    num_lost: int
    missed: tuple[str, ...]
    unnoticed: tuple[str, ...]
    doubled: tuple[str, ...]
    untold: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not (self.missed or self.unnoticed or self.doubled or self.untold)

    def __str__(self) -> str:
        parts = [f"{name} {', '.join(getattr(self, name))}" for name in ("missed", "unnoticed", "doubled", "untold")]
        return "; ".join(part for part in parts if not part.endswith(" ")) or "the promise holds"


def judge(world: World) -> Judgement:
    missed, unnoticed, doubled = [], [], []
    num_spikes = num_lost = 0
    for run in world.runs:
        told = Counter((a, s) for a, s in world.rows("SELECT attempt, step FROM spikes WHERE run_id = ?", run))
        gaps = [json.loads(row[0]) for row in world.rows(
            "SELECT detail_json FROM events WHERE run_id = ? AND kind = 'stream_gap_noticed'", run
        )]  # fmt: skip
        survived = world.streamed(run)
        seen = survived | set(world.rows("SELECT attempt, step FROM steps WHERE run_id = ?", run))
        last_seen = {attempt: max(s for a, s in seen if a == attempt) for attempt in {a for a, _ in seen}}
        doubled += [f"{run} {place}" for place, count in told.items() if count > 1]
        for attempt, step, spike in world.truth(run):
            if not spike:
                continue
            if attempt < world.attempts[run] and step > last_seen.get(attempt, -1):
                continue  # died with its trainer, in its queue
            num_spikes += 1
            place = (attempt, step)
            if place in told:
                continue
            if place in survived:
                missed.append(f"{run} {place}")
                continue
            num_lost += 1
            if not any(_covers(gap, attempt, step) for gap in gaps):
                unnoticed.append(f"{run} {place}")
    incidents = [row[0] for row in world.rows("SELECT incident_id FROM incidents")]
    messages = Counter(world.channel.incidents())
    doubled += [f"message of {incident}" for incident, count in messages.items() if count > 1]
    untold = [incident for incident in incidents if incident not in messages]
    return Judgement(num_spikes, num_lost, tuple(missed), tuple(unnoticed), tuple(doubled), tuple(untold))


def _covers(gap: dict[str, object], attempt: int, step: int) -> bool:
    first, last = gap.get("first_step"), gap.get("last_step")
    return (
        gap.get("attempt", attempt) == attempt
        and isinstance(first, int)
        and isinstance(last, int)
        and first <= step <= last
    )
