"""Who may do what in Redis, as rules of its access control lists (Redis 7.0 or newer). Pure.

A trainer's user is that of one run, or of the runs whose ids begin alike ("team-a-*"). It appends facts
and reads what it is told; it can neither read nor write anything of another run. What appending alone
still allows, and how that is noticed: docs/protocol.md, "Rights".
"""

import re
from typing import Literal

from gradloc_proto import streams

Role = Literal["detector", "reporter", "localizer", "trainer"]
ROLES: tuple[Role, ...] = ("detector", "reporter", "localizer", "trainer")

_RUNS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\*?|\*")
_READS = ("+xread", "+xrevrange", "+xinfo|stream", "+xlen")
_LEASES_AND_COMMITS = ("+get", "+set", "+mget", "+del", "+exists", "+type", "+persist", "+pexpire", "+pttl")
_SCRIPTS = ("+eval", "+evalsha", "+script|load")
_NOTHING = ("resetchannels", "-@all", "+ping")


def rules(role: Role, *, runs: str = "*") -> tuple[str, ...]:
    """Rules of ACL SETUSER, without name and password. Raises ValueError for `runs` that name no runs."""
    if not _RUNS.fullmatch(runs):
        raise ValueError(
            f"{runs[:40]!r} names no runs; expected a run id, or the beginning of some with a * at its end"
        )
    return (*_NOTHING, *_of(role, runs))


def _of(role: Role, runs: str) -> tuple[str, ...]:
    match role:
        case "detector":
            return ("+xadd", "+xtrim", *_READS, *_LEASES_AND_COMMITS, *_SCRIPTS, "~gradloc:*")
        case "reporter":
            return ("+xadd", *_READS, "%R~gradloc:*", f"%W~{streams.stream('*', 'control')}")
        case "localizer":
            return ("+xadd", f"%W~{streams.stream('*', 'findings')}")
        case "trainer":
            told = (f"%R~{streams.stream(runs, 'limits')}", f"%R~{streams.stream(runs, 'control')}")
            return ("+xadd", *_READS, f"%W~{streams.REGISTRY}", f"%W~{streams.stream(runs, 'steps')}", *told)
