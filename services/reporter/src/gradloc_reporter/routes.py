"""Who is told of what: receivers and the incidents they want, from a TOML file. Pure but for the secrets' names.

    [[receivers]]
    name = "oncall"              # shown in logs and by gradloc notify-test
    kind = "slack"               # slack, slack-webhook, webhook, email, alertmanager, grafana
    channel = "C0123456789"      # slack: its bot's token is in GRADLOC_SLACK_TOKEN
    when = { severity = "critical", team = "rl*" }    # all must fit; left out: everything

Secrets never stand in the file: `url_env`, `password_env` and `token_env` name environment variables.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gradloc_reporter.answers import Matcher

Kind = Literal["slack", "slack-webhook", "webhook", "email", "alertmanager", "grafana"]
RECEIVERS_MAX = 50  # each has a thread of its own
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
_CHANNEL = re.compile(r"^[CGD][A-Z0-9]{2,20}$")
_ADDRESS = re.compile(r"^[^@\s<>,\"]+@[^@\s<>,\"]+$")
_KEYS: dict[str, tuple[set[str], set[str]]] = {  # needed, allowed besides
    "slack": ({"channel"}, set()),
    "slack-webhook": ({"url_env"}, set()),
    "webhook": ({"url_env"}, set()),
    "email": ({"host", "from", "to"}, {"port", "starttls", "user", "password_env"}),
    "alertmanager": ({"url"}, set()),
    "grafana": ({"url", "token_env"}, set()),
}


@dataclass(frozen=True, slots=True)
class Receiver:
    """One receiver, checked. `secret` is a URL or a password and stays out of reprs."""

    name: str
    kind: Kind
    when: tuple[Matcher, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    secret: str | None = field(default=None, repr=False)


def read_receivers(text: str, environment: Mapping[str, str]) -> tuple[Receiver, ...]:
    """Raises ValueError that says which entry and what was expected."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None
    entries = found.pop("receivers", None)
    if found or not isinstance(entries, list) or not 0 < len(entries) <= RECEIVERS_MAX:
        raise ValueError(f"expected 1 to {RECEIVERS_MAX} [[receivers]] and nothing else")
    receivers: list[Receiver] = []
    for number, entry in enumerate(entries, start=1):
        try:
            receiver = _receiver(entry, environment)
            if any(receiver.name == other.name for other in receivers):
                raise ValueError("its name is that of one before; each must be unique")
            if receiver.kind == "slack" and any(_same_channel(receiver, other) for other in receivers):
                raise ValueError("its channel is that of one before; one message an incident and channel")
        except ValueError as error:
            raise ValueError(f"[[receivers]] number {number}: {error}") from None
        receivers.append(receiver)
    return tuple(receivers)


def _same_channel(receiver: Receiver, other: Receiver) -> bool:
    return other.kind == "slack" and other.options["channel"] == receiver.options["channel"]


def _receiver(entry: Any, environment: Mapping[str, str]) -> Receiver:
    if not isinstance(entry, dict):
        raise ValueError("expected a table")
    entry = dict(entry)
    name, kind, when = entry.pop("name", None), entry.pop("kind", None), entry.pop("when", {})
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError("name must be 1 to 64 letters, digits, '.', '_' or '-'")
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}")
    needed, allowed = _KEYS[kind]
    if not needed <= set(entry) <= needed | allowed:
        more = f" and, if wanted, {', '.join(sorted(allowed))}" if allowed else ""
        raise ValueError(f"a receiver of kind {kind} has the keys {', '.join(sorted(needed))}{more}")
    _check(kind, entry)
    return Receiver(name, kind, _matchers(when), entry, _secret(entry, environment))


def _check(kind: Kind, entry: dict[str, Any]) -> None:
    if kind == "slack" and not (isinstance(entry["channel"], str) and _CHANNEL.match(entry["channel"])):
        raise ValueError("channel must be a channel's id such as C0123456789")
    if kind in ("alertmanager", "grafana") and not str(entry["url"]).startswith(("http://", "https://")):
        raise ValueError("url must begin with http:// or https://")
    if kind == "email":
        to = entry["to"]
        addresses = [entry["from"], *(to if isinstance(to, list) else [to])]
        if not to or not all(isinstance(each, str) and _ADDRESS.match(each) for each in addresses):
            raise ValueError("from and to must be plain e-mail addresses, to a list of them")
        port = entry.get("port", 587)
        if not isinstance(entry["host"], str) or not isinstance(port, int) or not 0 < port <= 65_535:
            raise ValueError("host must be a name and port 1 to 65535")
        if not isinstance(entry.get("starttls", True), bool):
            raise ValueError("starttls must be true or false")


def _matchers(when: Any) -> tuple[Matcher, ...]:
    if not isinstance(when, dict) or not all(isinstance(value, str) for value in when.values()):
        raise ValueError('when must be a table of names and values, such as { severity = "critical" }')
    try:
        # "!rl" stands for anything but rl.
        return tuple(
            Matcher(name=name, op="!=" if value.startswith("!") else "=", value=value.removeprefix("!"))
            for name, value in when.items()
        )
    except ValueError:
        raise ValueError("a name of when is a letter and then letters, digits, '_', '.' or '-'") from None


def _secret(entry: dict[str, Any], environment: Mapping[str, str]) -> str | None:
    for key in ("url_env", "password_env", "token_env"):
        variable = entry.get(key)
        if variable is None:
            continue
        value = environment.get(str(variable))
        if not value:
            raise ValueError(f"{key} names {str(variable)[:60]!r}, which is not set in the environment")
        if key == "url_env" and not value.startswith(("http://", "https://")):
            raise ValueError(f"{key}: what {str(variable)[:60]!r} holds is not a URL")
        return value
    return None
