"""Names, lengths and times of everything kept in Redis, each with its reason.

All keys of one run share the hash tag {run_id}, so that one Lua script may touch them together.
"""

from typing import Literal

StreamName = Literal["steps", "incidents", "limits", "control", "findings"]
STREAM_NAMES: tuple[StreamName, ...] = ("steps", "incidents", "limits", "control", "findings")

REGISTRY = "gradloc:runs"  # stream of RunStarted: how services learn that a run exists

# A finding with a 4,096-token window is about 150 kB; a step with 500 layers 20 kB.
MESSAGE_BYTES_MAX = 1_048_576
# A stream takes no more memory than the bytes of so many entries. Steps: a day at one step a second.
STREAM_LENGTH_MAX: dict[StreamName, int] = {
    "steps": 86_400,
    "incidents": 10_000,
    "limits": 64,  # only the newest version matters; a few more for late readers
    "control": 10_000,
    "findings": 10_000,
}
REGISTRY_LENGTH_MAX = 100_000
DEAD_LETTERS_LENGTH_MAX = 1_000  # enough to see what went wrong, never a leak
# A run that is over, or silent for so long, keeps its keys for so long: the weekend, and people on leave.
REST_AFTER_SILENCE_S = 7 * 86_400.0
REST_TTL_S = 7 * 86_400.0
# Stands where a run id does in the lease of who may submit jobs; no run id begins with "_".
JOB_POOL = "_job-pool"
LEASE_TTL_S = 15.0  # a dead owner is replaced within a quarter of the promised minute


def keys_of(run_id: str) -> tuple[str, ...]:
    """All that is kept of a run, but for its lease."""
    return (*(stream(run_id, name) for name in STREAM_NAMES), dead_letters(run_id), state(run_id), cursor(run_id))


def stream(run_id: str, name: StreamName) -> str:
    return f"gradloc:{{{run_id}}}:{name}"


def dead_letters(run_id: str) -> str:
    return f"gradloc:{{{run_id}}}:dead-letters"


def lease(run_id: str) -> str:
    return f"gradloc:{{{run_id}}}:detector:lease"


def state(run_id: str) -> str:
    return f"gradloc:{{{run_id}}}:detector:state"


def cursor(run_id: str) -> str:
    return f"gradloc:{{{run_id}}}:detector:cursor"
