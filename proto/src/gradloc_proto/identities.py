"""Derived identities: the same fact has the same id wherever and however often it is told.

Knows only hashing. Redis entry ids are never identities: after a failover the same fact returns
under another one (docs/design.md, "Identity").
"""

import hashlib
import json
import re

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"  # a Redis key, a path, a label and a URL at once
_RUN_ID = re.compile(RUN_ID_PATTERN)
_ID_HEX_DIGITS = 16  # 64 bits: a collision needs about 2^32 incidents


def _digest(*parts: str | int) -> str:
    # JSON keeps the parts apart: no separator inside a part can make two facts look like one.
    joined = json.dumps(parts, separators=(",", ":"))
    return hashlib.sha256(joined.encode()).hexdigest()[:_ID_HEX_DIGITS]


def check_run_id(run_id: str) -> str:
    """Return `run_id`, or raise ValueError when it could not be a key, a path and a label at once."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"run id {run_id[:80]!r} is not usable: expected 1 to 128 letters, digits, '.', '_' or '-', "
            "starting with a letter or digit; rename the run"
        )
    return run_id


def spike_id(run_id: str, attempt: int, step: int, rule: str) -> str:
    """Id of one spike: run, attempt, step and the rule that flagged it."""
    return "spk-" + _digest("spike", run_id, attempt, step, rule)


def incident_id(run_id: str, attempt: int, first_spike_id: str) -> str:
    """Id of an incident: run, attempt and its first spike."""
    return "inc-" + _digest("incident", run_id, attempt, first_spike_id)


def submission_id(incident: str, localization_attempt: int) -> str:
    """Id of a Ray job. Ray never frees a used id, so each localization attempt gets a new one."""
    return f"{incident}-{localization_attempt}"


def message_key(kind: str, run_id: str, attempt: int, *parts: str | int) -> str:
    """Key by which a receiver drops what it knows already."""
    return kind + "-" + _digest(kind, run_id, attempt, *parts)
