"""`gradloc reporter`: options, signals and exit codes around `Reporter`."""

import logging
import os
import signal
import sys
import threading
from types import FrameType

import click

from gradloc_proto.bus import BusUnavailable
from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter.reporter import Reporter
from gradloc_reporter.settings import DEFAULT_DATABASE, DEFAULT_PORT, SLACK_URL, Settings, slack_settings

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
@click.option("--redact-tokens", is_flag=True, help="Show no text of prompts and answers, here or in Slack.")
def reporter(
    redis_url: str | None,
    database: str,
    host: str,
    port: int,
    slack_channel: str | None,
    slack_base_url: str,
    public_url: str | None,
    redact_tokens: bool,
) -> None:
    """Keep incidents and findings; serve REST, a web page, Prometheus and Slack.

    A Slack bot's token comes from GRADLOC_SLACK_TOKEN, an incoming webhook from GRADLOC_SLACK_WEBHOOK.
    """
    try:
        slack = slack_settings(
            token=os.environ.get("GRADLOC_SLACK_TOKEN") or None,
            channel=slack_channel,
            webhook=os.environ.get("GRADLOC_SLACK_WEBHOOK") or None,
            base_url=slack_base_url,
        )
        settings = Settings(
            database=database, host=host, port=port, public_url=public_url, redact_tokens=redact_tokens, slack=slack
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
