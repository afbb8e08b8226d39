"""`gradloc reporter`: options, signals and exit codes around `Reporter`."""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import click

from gradloc_proto.bus import BusUnavailable
from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter.access import Scope, Tokens, new_token, read_tokens, token_entry
from gradloc_reporter.reporter import Reporter, notified
from gradloc_reporter.routes import Receiver, read_receivers
from gradloc_reporter.settings import (
    DEFAULT_DATABASE,
    DEFAULT_PORT,
    SLACK_URL,
    Settings,
    SnapshotSettings,
    slack_settings,
)

Found = TypeVar("Found")
log = logging.getLogger("gradloc_reporter")
BAD_INPUT = 2


@click.command("reporter")
@click.option(
    "--redis", "redis_url", envvar="GRADLOC_REDIS_URL", metavar="URL", help="Redis, e.g. redis://host:6379/0."
)
@click.option(
    "--database", default=DEFAULT_DATABASE, show_default=True, metavar="URL", help="sqlite:// or postgresql://."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65_535), help="0: any free one."
)
@click.option("--slack-channel", metavar="ID", help="Channel for the bot whose token is in GRADLOC_SLACK_TOKEN.")
@click.option("--slack-base-url", default=SLACK_URL, show_default=True, metavar="URL", help="Where Slack's API is.")
@click.option("--public-url", metavar="URL", help="What links in messages begin with.")
@click.option(
    "--tokens", "tokens_file", envvar="GRADLOC_TOKENS_FILE", metavar="FILE", help="Bearer tokens that may ask (TOML)."
)
@click.option(
    "--receivers",
    "receivers_file",
    envvar="GRADLOC_RECEIVERS_FILE",
    metavar="FILE",
    help="Who is told of what: Slack channels, webhooks, e-mail, Alertmanager (TOML).",
)
@click.option(
    "--keep-steps-days",
    default=0.0,
    show_default=True,
    metavar="DAYS",
    help="Thin older steps to a tenth, extremes and spikes kept; 0: never.",
)
@click.option(
    "--snapshots",
    "snapshots_url",
    envvar="GRADLOC_SNAPSHOTS_URL",
    metavar="URL",
    help="The trainers' store: remove snapshots that nobody needs; without it none.",
)
@click.option(
    "--keep-snapshots-days",
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="With --snapshots: how long after their incident was over.",
)
@click.option(
    "--snapshots-quota-gb",
    default=0.0,
    show_default=True,
    metavar="GB",
    help="With --snapshots: remove earlier what takes more, but nothing that is open or pinned; 0: no quota.",
)
@click.option(
    "--rate-limit",
    default=50.0,
    show_default=True,
    metavar="N",
    help="REST requests a second of one token or address; 0: as many as come.",
)
@click.option(
    "--whatif-url",
    metavar="URL",
    help="The what-if app, e.g. http://host:8000/whatif; its token: GRADLOC_WHATIF_TOKEN.",
)
@click.option("--redact-tokens", is_flag=True, help="Show no text of prompts and answers, here or in Slack.")
def reporter(
    redis_url: str | None,
    database: str,
    host: str,
    port: int,
    slack_channel: str | None,
    slack_base_url: str,
    public_url: str | None,
    tokens_file: str | None,
    receivers_file: str | None,
    keep_steps_days: float,
    snapshots_url: str | None,
    keep_snapshots_days: float,
    snapshots_quota_gb: float,
    rate_limit: float,
    whatif_url: str | None,
    redact_tokens: bool,
) -> None:
    """Keep incidents and findings; serve REST, a web page, Prometheus and Slack.

    A Slack bot's token comes from GRADLOC_SLACK_TOKEN, an incoming webhook from GRADLOC_SLACK_WEBHOOK.
    """
    try:
        receivers = () if receivers_file is None else _receivers(Path(receivers_file))
        slack = slack_settings(
            routed=any(each.kind == "slack" for each in receivers),
            token=os.environ.get("GRADLOC_SLACK_TOKEN") or None,
            channel=slack_channel,
            webhook=os.environ.get("GRADLOC_SLACK_WEBHOOK") or None,
            base_url=slack_base_url,
        )
        settings = Settings(
            database=database,
            host=host,
            port=port,
            public_url=public_url,
            redact_tokens=redact_tokens,
            slack=slack,
            receivers=receivers,
            keep_steps_days=keep_steps_days,
            snapshots=_snapshots(snapshots_url, keep_snapshots_days, snapshots_quota_gb),
            rate_limit_per_s=rate_limit or None,
            whatif_url=whatif_url,
            whatif_token=os.environ.get("GRADLOC_WHATIF_TOKEN") or None,
            tokens=None if tokens_file is None else _tokens(Path(tokens_file)),
        )
        if not redis_url:
            raise ValueError("no Redis is given; expected --redis redis://host:port/0 or GRADLOC_REDIS_URL")
        bus = RedisBus(redis_url)
        bus.ping()
        service = Reporter(bus, settings)
    except (ValueError, BusUnavailable) as error:
        click.echo(f"gradloc reporter: {error}", err=True)
        sys.exit(BAD_INPUT)
    sys.exit(_serve(service, bus))


def _snapshots(url: str | None, keep_days: float, quota_gb: float) -> SnapshotSettings | None:
    if not 0 <= quota_gb < 1e9:
        raise ValueError("--snapshots-quota-gb must be 0 (no quota) or a number of gigabytes")
    return None if not url else SnapshotSettings(url, keep_days, round(quota_gb * 1e9) or None)


def _tokens(file: Path) -> Tokens:
    return _read("--tokens", file, read_tokens)


def _receivers(file: Path) -> tuple[Receiver, ...]:
    return _read("--receivers", file, lambda text: read_receivers(text, os.environ))


def _read(option: str, file: Path, read: Callable[[str], Found]) -> Found:
    try:
        return read(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{option} {file}: {getattr(error, 'strerror', None) or error}; expected a TOML file"
        ) from None
    except ValueError as error:
        raise ValueError(f"{option} {file}: {error}") from None


@click.command("notify-test")
@click.option("--receivers", "receivers_file", envvar="GRADLOC_RECEIVERS_FILE", metavar="FILE", required=True)
@click.option("--only", "only", multiple=True, metavar="NAME", help="This receiver; may be given again.")
@click.option("--slack-base-url", default=SLACK_URL, show_default=True, metavar="URL", help="Where Slack's API is.")
def notify_test(receivers_file: str, only: tuple[str, ...], slack_base_url: str) -> None:
    """Send one test notice to every receiver and say what came of it. Exit code 1 when one did not take it.

    Alertmanager gets an alert GradlocTest that ends after a minute.
    """
    try:
        receivers = _receivers(Path(receivers_file))
        unknown = set(only) - {each.name for each in receivers}
        if unknown:
            raise ValueError(f"--only {sorted(unknown)[0]!r} is no receiver of {receivers_file}")
        token = os.environ.get("GRADLOC_SLACK_TOKEN") or None
        if token is None and any(each.kind == "slack" for each in receivers):
            raise ValueError("a receiver is a Slack channel but GRADLOC_SLACK_TOKEN is not set; set the bot's token")
        slack = slack_settings(token=token, channel=None, webhook=None, base_url=slack_base_url, routed=True)
    except ValueError as error:
        click.echo(f"gradloc notify-test: {error}", err=True)
        sys.exit(BAD_INPUT)
    failed = False
    for receiver in receivers:
        if only and receiver.name not in only:
            continue
        said = notified(receiver, slack)
        failed = failed or said is not None
        click.echo(f"{receiver.name} ({receiver.kind}): {'told' if said is None else said}")
    sys.exit(1 if failed else 0)


@click.command("reporter-token")
@click.option("--name", required=True, help="Who holds it: a person, a dashboard, a script.")
@click.option("--scope", type=click.Choice(["read", "operate"]), default="read", show_default=True)
@click.option("--team", "teams", multiple=True, help="See only runs with this label team; may be given again.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead.")
def reporter_token(name: str, scope: Scope, teams: tuple[str, ...], as_json: bool) -> None:
    """Make a token for REST and the page, and its entry for the file that --tokens reads.

    The token is shown once and kept nowhere; the entry holds its SHA-256 only.
    """
    token = new_token()
    try:
        entry = token_entry(token, name=name, scope=scope, teams=teams)
    except ValueError as error:
        click.echo(f"gradloc reporter-token: {error}", err=True)
        sys.exit(BAD_INPUT)
    if as_json:
        click.echo(json.dumps({"token": token, "entry": entry}))
        return
    click.echo(f"Give this to {name}; it is shown only now:\n", err=True)
    click.echo(token)
    click.echo("\nAdd this to the file of --tokens, and restart the reporter:\n", err=True)
    click.echo(entry, err=True)


def _serve(service: Reporter, bus: RedisBus) -> int:
    """Run until SIGTERM or SIGINT (exit code 0) or until a part fails (1)."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    ending = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with service:
        log.info("reporter at %s", service.url)
        failed = False
        while not ending.is_set() and not failed:
            failed = service.wait_failed(0.2)
    bus.close()
    log.info("reporter ended")
    return 1 if failed else 0
