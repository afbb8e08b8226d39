"""What a reporter is told at start. Checked here once; no other module reads the environment."""

import math
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gradloc_reporter.access import Tokens
from gradloc_reporter.routes import Receiver

DEFAULT_DATABASE = "sqlite:///gradloc.sqlite"
DEFAULT_PORT = 8321
SLACK_URL = "https://slack.com/api/"
_CHANNEL = re.compile(r"^[CGD][A-Z0-9]{2,20}$")


@dataclass(frozen=True, slots=True)
class SlackSettings:
    """Bot token and channel, or a webhook. Secrets stay out of reprs."""

    token: str | None = field(default=None, repr=False)
    channel: str | None = None
    webhook: str | None = field(default=None, repr=False)
    base_url: str = SLACK_URL
    interval_s: float = 1.05  # Slack allows about one message a second and channel


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """The store that the reporter keeps small. `quota_bytes` None: no bound but age."""

    url: str
    keep_days: float = 30.0  # after their incident was over
    quota_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """`port` 0 takes any free one. `public_url` is what links in messages begin with. Raises ValueError."""

    database: str = DEFAULT_DATABASE
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    public_url: str | None = None
    redact_tokens: bool = False
    slack: SlackSettings | None = None
    receivers: tuple[Receiver, ...] = ()
    tokens: Tokens | None = None  # None: everybody may read and operate
    keep_steps_days: float = 0.0  # older steps are thinned to a tenth; 0: never
    snapshots: SnapshotSettings | None = None  # None: the reporter removes none
    rate_limit_per_s: float | None = 50.0  # REST requests a second of one token or address; None: as many as come
    whatif_url: str | None = None  # of the what-if app
    whatif_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port {self.port} is not a port; expected 0 to 65535")
        if self.rate_limit_per_s is not None and not 0 < self.rate_limit_per_s < math.inf:
            raise ValueError("--rate-limit must be a number above 0; leave it out for no limit")
        if not 0 <= self.keep_steps_days < math.inf:
            raise ValueError("--keep-steps-days must be 0 (for ever) or a number of days")
        if self.snapshots is not None:
            _check_snapshots(self.snapshots)
        if self.public_url is not None:
            _check_url("--public-url", self.public_url)
        if self.whatif_url is not None:
            _check_url("--whatif-url", self.whatif_url)
        if self.slack is not None:
            _check_slack(self.slack)
        if any(each.kind == "slack" for each in self.receivers) and (self.slack is None or not self.slack.token):
            raise ValueError(
                "--receivers names a Slack channel but GRADLOC_SLACK_TOKEN is not set; set the bot's token"
            )
        channels = [each.options["channel"] for each in self.receivers if each.kind == "slack"]
        if self.slack is not None and self.slack.channel in channels:
            raise ValueError("--slack-channel and --receivers name the same channel; expected it in one of them")


def slack_settings(
    *, token: str | None, channel: str | None, webhook: str | None, base_url: str, routed: bool = False
) -> SlackSettings | None:
    """None when Slack is not asked for; `routed`: receivers name channels. Raises ValueError when half is missing."""
    if channel is not None and not token:
        raise ValueError("--slack-channel is given but GRADLOC_SLACK_TOKEN is not set; set it to the bot's token")
    if channel is None and not webhook:
        if token and routed:
            return SlackSettings(token=token, base_url=base_url if base_url.endswith("/") else base_url + "/")
        if token:
            raise ValueError("GRADLOC_SLACK_TOKEN is set but --slack-channel is not given; name the channel's id")
        return None
    if not base_url.endswith("/"):
        base_url += "/"
    return SlackSettings(token=token, channel=channel, webhook=webhook, base_url=base_url)


def _check_slack(slack: SlackSettings) -> None:
    _check_url("--slack-base-url", slack.base_url)
    if slack.channel is not None:
        # Edits and history take ids only; a name would work for the first post and then fail.
        if not _CHANNEL.match(slack.channel):
            raise ValueError(
                f"--slack-channel {slack.channel[:40]!r} is not a channel id; expected one such as C0123456789 "
                "(in Slack: open the channel's details, at the bottom)"
            )
        if not slack.token:
            raise ValueError("a Slack channel needs a bot token; set GRADLOC_SLACK_TOKEN")
    elif slack.webhook:
        if urlsplit(slack.webhook).scheme not in ("http", "https"):
            raise ValueError("GRADLOC_SLACK_WEBHOOK is not a URL; expected https://hooks.slack.com/services/...")
    elif not slack.token:
        raise ValueError("Slack needs a channel and a bot token, or a webhook")


def _check_snapshots(snapshots: SnapshotSettings) -> None:
    if not 0 < snapshots.keep_days < math.inf:
        raise ValueError("--keep-snapshots-days must be a number of days above 0")
    if snapshots.quota_bytes is not None and snapshots.quota_bytes <= 0:
        raise ValueError("--snapshots-quota-gb must be a number above 0; leave it out for no quota")


def _check_url(option: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{option} {url[:80]!r} is not an address; expected http://host:port or https://host")
