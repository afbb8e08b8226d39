"""What the detector knows of one run, as frozen data, and its bytes for a checkpoint.

Bounded for any length of run. Pure: no I/O, no clock; `clock` is the time of the last Tick read.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from gradloc_proto import rules
from gradloc_proto.messages import Message, Part
from gradloc_proto.streams import StreamName

STATE_VERSION = 1

Phase = Literal[
    "snapshot",  # waiting for a snapshot to be committed, or for the time-out
    "ready",  # may be submitted as soon as `not_before` has passed and a slot is free
    "submitted",  # a Ray job exists; it may wait for a spare GPU as long as Ray lets it
    "running",
    "finished",
    "failed",  # given up after the last attempt
    "no-snapshot",
    "unneeded",  # nothing of it is about one step's gradient; a person may ask all the same
]
IN_FLIGHT: tuple[Phase, ...] = ("submitted", "running")
SETTLED: tuple[Phase, ...] = ("finished", "failed", "no-snapshot", "unneeded")


class KeptSpike(Part):
    """A spike that a localization may still be about. `path` is None until its snapshot is committed."""

    spike_id: str
    step: int
    score: float
    path: str | None = None
    failure: str | None = None
    has_gradient: bool = True  # False: a fault of the run, which no replay of this step explains


class Localization(Part):
    """Where the search for an incident's culprit stands; the newest attempt only."""

    phase: Phase = "snapshot"
    attempt: int = 0  # of the localization; 0 before the first, then never reused
    snapshot: str | None = None
    step: int = 0
    num_failures: int = 0  # since the last wish
    wish_waiting: bool = False  # a person asked again while a job was under way
    not_before: float = -math.inf
    since: float | None = None  # first tick seen in this phase
    ended: str | None = None  # how the job ended, while its finding is awaited


class Incident(Part):
    incident_id: str
    attempt: int
    opened_step: int
    worst_score: float
    num_spikes: int = 1
    resolved: bool = False
    spikes: tuple[KeptSpike, ...]
    localization: Localization = Localization()


class Gap(Part):
    """Steps that have not arrived. `told` once noticed; kept so that a late step is still accepted."""

    first: int
    last: int
    later_steps: int = 0
    since: float | None = None
    told: bool = False
    dropped: int = 0  # events the trainer's queue had lost meanwhile


class EarlySnapshot(Part):
    """A snapshot of a step that is no spike, or not yet."""

    attempt: int
    step: int
    path: str


class Stop(Part):
    """A job whose end nobody awaits any more."""

    attempt: int
    incident_id: str
    localization_attempt: int
    snapshot: str


class Place(Part):
    attempt: int
    step: int


class Book(Part):
    """Everything but the baselines."""

    run_id: str
    attempt: int = 0
    labels: dict[str, str] = Field(default_factory=dict)
    ended: bool = False
    clock: float | None = None
    last_ts: float = 0.0

    first_step: int | None = None  # of this attempt, where the trainer has said so
    last_step: int | None = None
    distances: tuple[int, ...] = ()  # of the last neighbouring steps: subsampled logging is no gap
    num_steps: int = 0
    gaps: tuple[Gap, ...] = ()
    lost_at: Place | None = None  # last step that a lost state knew (-1: none), until the next step comes
    num_repeated: int = 0
    num_old_attempt: int = 0
    num_rejected: int = 0
    num_events_dropped: int = 0

    healthy_streak: int = 0
    skip_streak: int = 0
    opened_steps: tuple[int, ...] = ()
    incidents: tuple[Incident, ...] = ()
    num_incidents: int = 0
    early_snapshots: tuple[EarlySnapshot, ...] = ()
    reference: EarlySnapshot | None = None  # the newest healthy step that was kept for comparison
    requests: tuple[str, ...] = ()
    stops: tuple[Stop, ...] = ()

    limits_published_version: int = 0
    limits_published: tuple[float | None, ...] = ()
    limits_dirty: bool = False


@dataclass(frozen=True, slots=True)
class DetectorState:
    book: Book
    baselines: rules.RunState = field(default_factory=rules.RunState)


@dataclass(frozen=True, slots=True)
class Emit:
    """A message to append to one of the run's streams."""

    stream: StreamName
    message: Message


@dataclass(frozen=True, slots=True)
class Rejection:
    """A message that could be read but not believed, with the reason."""

    reason: str


Effect = Emit | Rejection
Effects = tuple[Effect, ...]


class StateRejected(ValueError):
    """Bytes that are not a checkpoint of this version; the text says why."""


def initial_state(run_id: str, sensitivity: float = 1.0) -> DetectorState:
    return DetectorState(Book(run_id=run_id), rules.RunState(sensitivity=rules.Sensitivity(scale=sensitivity)))


def dump(state: DetectorState) -> bytes:
    """The state as JSON: at most 64 KiB for 64 layers."""
    document = {
        "version": STATE_VERSION,
        "book": state.book.model_dump(mode="json"),
        "rules": rules.dump_state(state.baselines),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def load(data: bytes) -> DetectorState:
    """Inverse of `dump`. Raises StateRejected."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("version") != STATE_VERSION:
            found = document.get("version") if isinstance(document, dict) else type(document).__name__
            raise StateRejected(f"checkpoint of version {str(found)[:20]}, expected {STATE_VERSION}")
        book = Book.model_validate(document["book"])
        return DetectorState(book, rules.load_state(document["rules"]))
    except StateRejected:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # pydantic's and json's errors are ValueErrors; their first line never holds more than field names.
        reason = str(error).split("\n", maxsplit=1)[0][:200]
        raise StateRejected(f"not a checkpoint of the detector: {reason}; expected what it wrote itself") from None
