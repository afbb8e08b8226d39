"""`gradloc tail RUN`: what a run's streams say, as lines, while it goes on. No torch."""

import json
import math
import time
from collections.abc import Iterator

import click
from rich.console import Console
from rich.text import Text

from gradloc_proto import codec, streams
from gradloc_proto.bus import START, Bus, BusUnavailable
from gradloc_proto.identities import check_run_id
from gradloc_proto.messages import (
    IncidentMessage,
    IncidentResolved,
    LocalizationFailed,
    LocalizationFinished,
    LocalizationProgressed,
    LocalizationStarted,
    Message,
    RunEnded,
    RunStarted,
    StepObserved,
)
from gradloc_proto.plain_text import visible
from gradloc_proto.redis_bus import RedisBus

_READ = ("steps", "incidents", "findings")
_BLOCK_S = 0.2
_LOOKED_AT = 256
LINE_LENGTH_MAX = 600  # characters: what is longer is not read in a terminal


def known_runs(bus: Bus) -> list[str]:
    """Run ids in the registry, oldest first."""
    runs: dict[str, None] = {}
    for entry in bus.read_last(streams.REGISTRY, count=streams.REGISTRY_LENGTH_MAX):
        try:
            runs[codec.decode(entry.data).run_id] = None
        except codec.MessageRejected:
            continue
    return list(runs)


def messages(bus: Bus, run_id: str, *, num_past: int, wait: bool) -> Iterator[Message | None]:
    """Messages of a run: the last `num_past` of each stream, then new ones until the run ends.

    None stands for an entry that does not parse.
    """
    cursors: dict[str, str] = {}
    ended = False
    for name in _READ:
        key = streams.stream(run_id, name)  # type: ignore[arg-type]
        past = bus.read_last(key, count=num_past) if num_past else []
        cursors[key] = past[-1].id if past else (bus.last_id(key) if not num_past else START)
        for entry in past:
            message = _decoded(entry.data)
            ended = ended or isinstance(message, RunEnded)
            yield message
    while wait and not ended:
        found = bus.read(cursors, count=_LOOKED_AT)
        for key, entries in found.items():
            cursors[key] = entries[-1].id
            for entry in entries:
                message = _decoded(entry.data)
                ended = ended or isinstance(message, RunEnded)
                yield message
        if not found:
            time.sleep(_BLOCK_S)


def _decoded(data: bytes) -> Message | None:
    try:
        return codec.decode(data)
    except codec.MessageRejected:
        return None


def line_of(message: Message) -> Text:
    """One line a message, for people."""
    if isinstance(message, RunStarted):
        return _line(
            f"run {message.run_id} attempt {message.attempt} started on {message.world_size} ranks", style="bold"
        )
    if isinstance(message, StepObserved):
        norm = f"{message.grad_norm:.4g}" if math.isfinite(message.grad_norm) else str(message.grad_norm)
        limit = "-" if message.limit is None else f"{message.limit:.4g}"
        style = "bold red" if message.rules_hit else ""
        rules = f"  {', '.join(message.rules_hit)} -> {message.decision}" if message.rules_hit else ""
        return _line(f"step {message.step:>6}  norm {norm:>9}  limit {limit:>9}{rules}", style=style)
    if isinstance(message, IncidentMessage):
        return _line(f"{message.type} {message.incident_id} at step {message.spike.step}", style="red")  # type: ignore[attr-defined]
    if isinstance(message, IncidentResolved):
        return _line(f"incident {message.incident_id} resolved at step {message.step}: {message.reason}", style="green")
    if isinstance(message, LocalizationStarted):
        return _line(f"localizing {message.incident_id}, attempt {message.localization_attempt}", style="yellow")
    if isinstance(message, LocalizationProgressed):
        return _line(f"localizing {message.incident_id}: {message.stage} {message.fraction:.0%}", style="yellow")
    if isinstance(message, LocalizationFinished):
        return _line(
            f"finding {message.incident_id}: {message.finding.verdict}: {message.finding.summary}", style="bold"
        )
    if isinstance(message, LocalizationFailed):
        return _line(f"localizing {message.incident_id} failed: {message.reason}", style="red")
    if isinstance(message, RunEnded):
        return _line(f"run ended at step {message.step}: {message.reason}", style="bold")
    return _line(type(message).__name__)


def _line(text: str, style: str = "") -> Text:
    # Reasons, summaries and rules are other people's words: an escape sequence in them must not reach the terminal.
    return Text(visible(text, LINE_LENGTH_MAX), style=style)


@click.command(name="tail")
@click.argument("run")
@click.option("--redis", "redis_url", envvar="GRADLOC_REDIS_URL", required=True, help="URL of the service's Redis.")
@click.option("-n", "--lines", default=20, show_default=True, help="Past messages of each stream to begin with.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Go on until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="One JSON message a line.")
def tail(run: str, redis_url: str, lines: int, follow: bool, as_json: bool) -> None:
    """Show what happens in RUN: steps, incidents, findings."""
    console = Console(highlight=False)
    try:
        check_run_id(run)
        bus = RedisBus(redis_url)
        runs = known_runs(bus)
        if run not in runs:
            known = ", ".join(runs[-5:]) or "none"
            raise click.UsageError(f"no run {run!r} at this Redis; the newest it knows: {known}")
        num_unreadable = 0
        for message in messages(bus, run, num_past=lines, wait=follow):
            if message is None:
                num_unreadable += 1
            elif as_json:
                click.echo(json.dumps(json.loads(codec.encode(message))))
            else:
                console.print(line_of(message), soft_wrap=True)
        if num_unreadable:
            click.echo(f"{num_unreadable} messages did not parse and were left out", err=True)
    except (BusUnavailable, ValueError) as error:
        raise click.UsageError(str(error)) from None
    except KeyboardInterrupt:
        return
