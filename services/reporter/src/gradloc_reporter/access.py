"""Who may see and do what: bearer tokens with a scope and, where wanted, teams. Pure.

Only a token's SHA-256 is kept: the tokens have 256 random bits, so that a plain digest cannot be
guessed back. A team is the label `team` of a run (`gradloc.watch(..., labels={"team": ...})`).
"""

import json
import re
import secrets
import tomllib
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, get_args

Scope = Literal["read", "operate"]
TOKEN_PREFIX = "gradloc_"
TOKEN_LENGTH_MAX = 256
_DIGEST = re.compile(r"^[0-9a-f]{64}$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
_KEYS = {"name", "sha256", "scope", "teams"}


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who asks. `teams` None sees every run; otherwise only runs whose label `team` is one of them."""

    name: str | None
    scope: Scope
    teams: frozenset[str] | None = None

    @property
    def operates(self) -> bool:
        return self.scope == "operate"

    def signed(self, by: str) -> str:
        """The name that the log keeps: what a person says, and the token it was said with."""
        return by if self.name is None else f"{by} (token {self.name})"


ANYBODY = Viewer(None, "operate")  # where no tokens are configured


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that are known, by digest."""

    viewers: dict[str, Viewer]

    def viewer(self, token: str) -> Viewer | None:
        """Who holds the token; None for an unknown one."""
        if len(token) > TOKEN_LENGTH_MAX:
            return None
        return self.viewers.get(digest(token))


def digest(token: str) -> str:
    return sha256(token.encode(errors="surrogatepass")).hexdigest()


def new_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def token_entry(token: str, *, name: str, scope: Scope, teams: tuple[str, ...]) -> str:
    """The token's entry in the tokens file (TOML). Raises ValueError for a name that cannot be one."""
    entry: dict[str, Any] = {"name": name, "sha256": digest(token), "scope": scope}
    if teams:
        entry["teams"] = list(teams)
    _viewer(entry)
    return "[[tokens]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())


def read_tokens(text: str) -> Tokens:
    """Tokens of a TOML file: [[tokens]] with name, sha256, scope and, if wanted, teams. Raises ValueError."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None
    entries = found.pop("tokens", None)
    if found or not isinstance(entries, list) or not entries:
        raise ValueError("expected one [[tokens]] entry or more and nothing else; make one with gradloc reporter-token")
    viewers: dict[str, Viewer] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            key, viewer = _viewer(entry)
            if key in viewers or any(viewer.name == other.name for other in viewers.values()):
                raise ValueError("its name or sha256 is that of an entry before; each must be unique")
        except ValueError as error:
            raise ValueError(f"[[tokens]] number {number}: {error}") from None
        viewers[key] = viewer
    return Tokens(viewers)


def _viewer(entry: Any) -> tuple[str, Viewer]:
    if not isinstance(entry, dict) or not {"name", "sha256", "scope"} <= set(entry) <= _KEYS:
        raise ValueError("expected the keys name, sha256, scope and, if wanted, teams")
    name, key, scope, teams = entry["name"], entry["sha256"], entry["scope"], entry.get("teams")
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError("name must be 1 to 64 letters, digits, '.', '_' or '-'")
    if not isinstance(key, str) or not _DIGEST.match(key):
        raise ValueError("sha256 must be the 64 lower-case hex digits that gradloc reporter-token prints")
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be one of {', '.join(get_args(Scope))}")
    if teams is not None:
        fits = isinstance(teams, list) and bool(teams) and all(isinstance(t, str) and _NAME.match(t) for t in teams)
        if not fits:
            raise ValueError("teams must be a list of one name or more; leave it out for all runs")
    return key, Viewer(name, scope, None if teams is None else frozenset(teams))
