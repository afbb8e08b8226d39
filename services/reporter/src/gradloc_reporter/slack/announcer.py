"""Tells one receiver of incidents, beside the consumer and never in its way.

    due incidents -> intend (committed) -> post -> told (committed); afterwards edits in place

Slack with a bot's token: one message an incident. A crash between post and told leaves an intention;
the next start looks for the message by its metadata in the channel's history, adopts it and removes
doubles, so that exactly one survives; replies in its thread alike. Other receivers cannot look or
edit: they hear of opening, finding and end, each at least once.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from gradloc_reporter.notices.door import Door, Notice, RateLimited, Refused, Stage, Unreachable
from gradloc_reporter.slack.blocks import blocks_of, text_of, thread_text
from gradloc_reporter.slack.client import (
    SlackChannel,
    SlackMessage,
    SlackMessageGone,
    SlackMessageRefused,
    SlackRefused,
)
from gradloc_reporter.store import DBAPIError
from gradloc_reporter.store import deliveries as ledger
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.text import tell

log = logging.getLogger(__name__)

BATCH_MAX = 20  # incidents looked up at once; newer states of the same incident replace older ones
LOOK_S = 5.0  # looks for work this often even when nobody says that there is some
REFUSED_WAIT_S = 60.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 1.0, 60.0
UNTOLD = -1  # revision of a message that is there and still to be brought up to date
CLOCK_SKEW_S = 600.0  # Slack's clock may differ from ours: history is searched from this much before


class Announcer:
    """`run` until `stop`; `notice` says that something may have changed."""

    def __init__(
        self,
        database: Database,
        queries: Queries,
        door: SlackChannel | Door,
        *,
        wanted: Callable[[dict[str, str]], bool] = lambda names: True,
        clock: Callable[[], float],
        interval_s: float = 1.05,  # Slack allows about one message a second and channel
    ) -> None:
        self._database = database
        self._queries = queries
        self._door = door
        self._wanted = wanted
        self._clock = clock
        self._interval_s = interval_s
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._called_at = -interval_s
        self._complained: str | None = None

    @property
    def channel(self) -> str:
        return self._door.name

    @property
    def _who(self) -> str:
        return "Slack" if isinstance(self._door, SlackChannel) else self._door.name

    @property
    def counts(self) -> Counter[str]:
        return self._door.counts

    def notice(self) -> None:
        self._news.set()

    def stop(self) -> None:
        self._stopping.set()
        self._news.set()

    def run(self) -> None:
        backoff_s = 0.0
        while not self._stopping.is_set():
            self._news.clear()
            try:
                busy = self.announce_once()
            except RateLimited as error:
                self._stopping.wait(error.retry_after_s)
            except Refused as error:
                self._complain(f"{self._who} refuses: {error}")
                self._stopping.wait(REFUSED_WAIT_S)
            except (Unreachable, DBAPIError) as error:
                reason = str(error) if isinstance(error, Unreachable) else "the database does not answer"
                self._complain(f"{self._who} was not told: {reason}; trying again")
                backoff_s = min(max(2 * backoff_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
                self._stopping.wait(backoff_s)
            else:
                backoff_s = 0.0
                self._complained = None
                if not busy:
                    self._news.wait(LOOK_S)

    def _complain(self, text: str) -> None:
        if text != self._complained:
            log.warning(text)
        self._complained = text

    def announce_once(self) -> bool:
        """Tell everything that is due now; says whether there was anything to do.

        One reporter at a time: two that saw the same incident untold would both post it.
        """
        with self._database.alone(f"receiver {self.channel}") as is_alone:
            return is_alone and self._announce()

    def _announce(self) -> bool:
        with self._database.reading() as session:
            batch = ledger.due(session, receiver=self.channel, now=self._clock(), limit=BATCH_MAX, wanted=self._wanted)
        for item in batch:
            if self._stopping.is_set():
                return False
            try:
                self._tell(item)
            except SlackMessageRefused as error:
                log.error("Slack does not take the message of incident %s: %s", item.incident_id, error)
                with self._database.writing() as session:
                    ledger.gone(session, item.incident_id, receiver=self.channel)
        return bool(batch)

    def _tell(self, due: ledger.Due) -> None:
        if isinstance(self._door, SlackChannel):
            self._tell_channel(self._door, due)
        else:
            self._tell_stage(self._door, due)

    def _tell_channel(self, door: SlackChannel, due: ledger.Due) -> None:
        if due.state == "posted" and due.reference is not None:
            self._edit(door, due, due.reference)
            return
        if due.state is None:
            with self._database.writing() as session:
                ledger.intend(session, due.incident_id, receiver=self.channel, now=self._clock())
        else:
            known = self._reconcile(door, due)
            if known is not None:
                self._edit(door, due, known)
                return
        message = self._message(due)
        self._pace()
        ts = door.post(due.incident_id, message)
        self._told(due, ts, revision=UNTOLD)  # first of all, whose message it is
        self._reply(door, due, ts)
        self._told(due, ts, revision=due.revision)

    def _told(self, due: ledger.Due, ts: str | None, *, revision: int, status: str | None = None) -> None:
        with self._database.writing() as session:
            ledger.told(
                session,
                due.incident_id,
                receiver=self.channel,
                reference=ts,
                revision=revision,
                status=due.status if status is None else status,
            )

    def _reconcile(self, door: SlackChannel, due: ledger.Due) -> str | None:
        """The message of an earlier try, if there is one; doubles are removed."""
        assert due.intended_at is not None
        self._pace()
        try:
            found = door.find(due.incident_id, oldest=due.intended_at - CLOCK_SKEW_S)
        except SlackRefused as error:  # at least once: rather a second message than none
            self._complain(f"Slack's history cannot be read, a message may come twice: {error}")
            return None
        for double in found[1:]:
            self._pace()
            try:
                door.delete(double)
            except SlackMessageGone:
                log.info("a doubled Slack message was gone already")
        return found[0] if found else None

    def _edit(self, door: SlackChannel, due: ledger.Due, ts: str) -> None:
        message = self._message(due)
        self._pace()
        try:
            door.update(due.incident_id, ts, message)
        except SlackMessageGone:
            log.info("the Slack message of incident %s was deleted; saying no more of it", due.incident_id)
            with self._database.writing() as session:
                ledger.gone(session, due.incident_id, receiver=self.channel)
            return
        if due.reference is None:  # adopted after a crash
            self._told(due, ts, revision=UNTOLD)
        self._reply(door, due, ts)
        self._told(due, ts, revision=due.revision)

    def _tell_stage(self, door: Door, due: ledger.Due) -> None:
        notice = self._notice(due)
        if due.state is None:
            with self._database.writing() as session:
                ledger.intend(session, due.incident_id, receiver=self.channel, now=self._clock())
        if notice.stage in door.stages and (due.state != "posted" or notice.stage != due.told_status):
            self._pace()
            door.post(notice)
        self._told(due, None, revision=due.revision, status=notice.stage)

    def _notice(self, due: ledger.Due) -> Notice:
        with self._database.reading() as session:
            story = self._queries.story(session, due.incident_id)
            answers = self._queries.summaries_of(session, [due.incident_id])
        assert story is not None, "incidents are never deleted"
        stage: Stage = "opened" if story.finding is None else "located"
        if story.status == "resolved" and "resolved" in getattr(self._door, "stages", ()):
            stage = "resolved"
        answer = answers.get(due.incident_id, b"null")
        return Notice(due.incident_id, stage, tell(story), answer, run_id=story.run_id, at=story.opened_at)

    def _reply(self, door: SlackChannel, due: ledger.Due, ts: str) -> None:
        """Put the numbers of each finding into the thread, once."""
        with self._database.reading() as session:
            story = self._queries.story(session, due.incident_id)
        assert story is not None, "incidents are never deleted"
        told = set(filter(None, due.thread_told.split(",")))
        what = f"finding-{story.finding_attempt}"
        if story.finding is None or what in told:
            return
        try:
            self._pace()
            if f"{what}?" not in told or what not in door.replied(ts):  # "?": a crash came between
                self._remember(due, f"{what}?")
                self._pace()
                door.reply(due.incident_id, ts, thread_text(story.finding), what=what)
        except SlackRefused as error:  # the message itself is there: a detail holds nothing up
            self._complain(f"Slack takes no reply in a thread: {error}")
        self._remember(due, what)

    def _remember(self, due: ledger.Due, what: str) -> None:
        with self._database.writing() as session:
            ledger.told_in_thread(session, due.incident_id, receiver=self.channel, what=what)

    def _message(self, due: ledger.Due) -> SlackMessage:
        """What to say now. May be newer than `due`: that costs one more edit."""
        with self._database.reading() as session:
            story = self._queries.story(session, due.incident_id)
        assert story is not None, "incidents are never deleted"
        telling = tell(story)
        return SlackMessage(text_of(telling), blocks_of(telling))

    def _pace(self) -> None:
        """Wait until the channel takes another call."""
        wait_s = self._called_at + self._interval_s - time.monotonic()
        if wait_s > 0:
            self._stopping.wait(wait_s)
        self._called_at = time.monotonic()
