"""The calls to Slack: post, edit, look back, and the webhook. Each says what came of it.

Knows no database and no incident rows. Never retries by itself: a post whose answer was lost may
have happened, and only the caller can find out.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError, SlackClientError
from slack_sdk.models.metadata import Metadata
from slack_sdk.webhook import WebhookClient

from gradloc_reporter.notices.door import Notice, RateLimited, Refused, Stage, Unreachable
from gradloc_reporter.settings import SLACK_URL
from gradloc_reporter.slack.blocks import blocks_of, text_of

EVENT_TYPE = "gradloc_incident"
THREAD_TYPE = "gradloc_detail"  # a reply in the thread of an incident's message
TIMEOUT_S = 10
RETRY_AFTER_DEFAULT_S, RETRY_AFTER_MAX_S = 5.0, 300.0
HISTORY_PAGES_MAX = 20  # 20 x 200 messages: a busy channel's hour

_ADVICE = {
    "invalid_auth": "check GRADLOC_SLACK_TOKEN",
    "not_authed": "set GRADLOC_SLACK_TOKEN",
    "account_inactive": "the bot was removed; install it again and set GRADLOC_SLACK_TOKEN",
    "token_revoked": "install the bot again and set GRADLOC_SLACK_TOKEN",
    "channel_not_found": "give --slack-channel the channel's id (it begins with C) and invite the bot",
    "not_in_channel": "invite the bot to the channel",
    "is_archived": "choose a channel that is not archived",
    "missing_scope": "the bot needs chat:write, channels:history and groups:history",
}
_OF_THE_MESSAGE = ("invalid_blocks", "invalid_blocks_format", "msg_too_long", "no_text", "metadata_too_large")
_GONE = ("message_not_found", "cant_update_message", "edit_window_closed")


class SlackRateLimited(RateLimited):
    """Slack asks to wait `retry_after_s`; nothing was posted."""


class SlackRefused(Refused):
    """Slack said no; trying the same again soon does not help. The text says what to do."""


class SlackMessageRefused(SlackRefused):
    """Slack takes calls, but not this message."""


class SlackMessageGone(Exception):
    """The message to edit is not there any more: somebody deleted it."""


class SlackUnreachable(Unreachable):
    """No answer, or one that says nothing: a post may or may not have happened."""


@dataclass(frozen=True, slots=True)
class SlackMessage:
    text: str
    blocks: list[dict[str, Any]]


class SlackChannel:
    """One channel by bot token. `base_url` ends with a slash."""

    def __init__(self, *, token: str, channel: str, base_url: str = SLACK_URL) -> None:
        self.channel = self.name = channel
        self.counts: Counter[str] = Counter()
        # slack_sdk's default handler repeats a call after a broken connection: that would post twice.
        self._client = WebClient(token, base_url=base_url, timeout=TIMEOUT_S, retry_handlers=[], logger=_quiet_logger())
        self._channel_id = channel  # history and updates need the id, which the first post tells

    def post(self, incident_id: str, message: SlackMessage) -> str:
        """Post a new message and return its ts, Slack's name for it."""
        answer = self._call(
            "chat.postMessage",
            channel=self.channel,
            text=message.text,
            blocks=message.blocks,
            metadata=Metadata(EVENT_TYPE, {"incident_id": incident_id}).to_dict(),
            unfurl_links=False,
            unfurl_media=False,
        )
        self._channel_id = str(answer.get("channel") or self._channel_id)
        ts = answer.get("ts")
        if not isinstance(ts, str):
            raise SlackUnreachable("Slack's answer to a post holds no ts")
        return ts

    def reply(self, incident_id: str, ts: str, text: str, *, what: str) -> None:
        """Add `text` to the thread of the message `ts`; `what` names it for `replied`."""
        self._call(
            "chat.postMessage",
            channel=self._channel_id,
            thread_ts=ts,
            text=text,
            metadata=Metadata(THREAD_TYPE, {"incident_id": incident_id, "what": what}).to_dict(),
            unfurl_links=False,
            unfurl_media=False,
        )

    def replied(self, ts: str) -> set[str]:
        """What our replies in the thread of `ts` are named."""
        found: set[str] = set()
        cursor = ""
        for _ in range(HISTORY_PAGES_MAX):
            more = {"cursor": cursor} if cursor else {}
            answer = self._call(
                "conversations.replies",
                channel=self._channel_id,
                ts=ts,
                limit=200,
                include_all_metadata=True,
                **more,
            )
            messages = answer.get("messages")
            for message in messages if isinstance(messages, list) else []:
                metadata = message.get("metadata") or {}
                if metadata.get("event_type") == THREAD_TYPE:
                    found.add(str((metadata.get("event_payload") or {}).get("what")))
            cursor = str((answer.get("response_metadata") or {}).get("next_cursor") or "")
            if not cursor:
                break
        return found

    def update(self, incident_id: str, ts: str, message: SlackMessage) -> None:
        self._call(
            "chat.update",
            channel=self._channel_id,
            ts=ts,
            text=message.text,
            blocks=message.blocks,
            metadata=Metadata(EVENT_TYPE, {"incident_id": incident_id}).to_dict(),
        )

    def delete(self, ts: str) -> None:
        self._call("chat.delete", channel=self._channel_id, ts=ts)

    def find(self, incident_id: str, *, oldest: float) -> list[str]:
        """ts of our messages on this incident since `oldest` (epoch seconds), the first one first."""
        found: list[str] = []
        cursor = ""
        for _ in range(HISTORY_PAGES_MAX):
            answer = self._call(
                "conversations.history",
                channel=self._channel_id,
                oldest=f"{oldest:.6f}",
                limit=200,
                include_all_metadata=True,
                **({"cursor": cursor} if cursor else {}),
            )
            messages = answer.get("messages")
            for message in messages if isinstance(messages, list) else []:
                metadata = message.get("metadata") or {}
                payload = metadata.get("event_payload") or {}
                if metadata.get("event_type") == EVENT_TYPE and payload.get("incident_id") == incident_id:
                    found.append(str(message["ts"]))
            cursor = str((answer.get("response_metadata") or {}).get("next_cursor") or "")
            if not cursor:
                break
        return sorted(found, key=float)

    def _call(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        try:
            answer = (
                self._client.api_call(method, json=arguments)
                if not method.startswith("conversations.")
                else (self._client.api_call(method, http_verb="GET", params=arguments))
            )
        except SlackApiError as error:
            self._raise(method, error)
        except (SlackClientError, OSError, ValueError) as error:
            self.counts["unreachable"] += 1
            raise SlackUnreachable(f"{method}: {type(error).__name__}") from None
        self.counts["ok"] += 1
        data = answer.data
        return data if isinstance(data, dict) else {}

    def _raise(self, method: str, error: SlackApiError) -> None:
        status = getattr(error.response, "status_code", 0)
        data = getattr(error.response, "data", None)
        code = str(data.get("error", "")) if isinstance(data, dict) else ""
        if status == 429 or code in ("ratelimited", "rate_limited"):
            self.counts["rate_limited"] += 1
            raise SlackRateLimited(_retry_after(error.response.headers)) from None
        if status >= 500 or not code or code in ("internal_error", "fatal_error", "service_unavailable"):
            self.counts["unreachable"] += 1
            raise SlackUnreachable(f"{method}: status {status}") from None
        if code in _GONE:
            self.counts["gone"] += 1
            raise SlackMessageGone(code) from None
        self.counts["refused"] += 1
        if code in _OF_THE_MESSAGE:
            raise SlackMessageRefused(f"{method}: {code}") from None
        raise SlackRefused(f"{method}: {code[:60]}; {_ADVICE.get(code, 'see Slack’s list of errors of this method')}")


class SlackWebhook:
    """An incoming webhook: posts only; what was said stays said."""

    stages: tuple[Stage, ...] = ("opened", "located")  # without edits, more would be noise

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self._client = WebhookClient(url, timeout=TIMEOUT_S, retry_handlers=[], logger=_quiet_logger())

    def post(self, notice: Notice) -> None:
        message = SlackMessage(text_of(notice.telling), blocks_of(notice.telling))
        try:
            answer = self._client.send(text=message.text, blocks=message.blocks, unfurl_links=False, unfurl_media=False)
        except (SlackClientError, OSError, ValueError) as error:
            self.counts["unreachable"] += 1
            raise SlackUnreachable(f"webhook: {type(error).__name__}") from None
        if answer.status_code == 429:
            self.counts["rate_limited"] += 1
            raise SlackRateLimited(_retry_after(answer.headers))
        if answer.status_code >= 500:
            self.counts["unreachable"] += 1
            raise SlackUnreachable(f"webhook: status {answer.status_code}")
        if answer.status_code != 200:
            self.counts["refused"] += 1
            raise SlackRefused(f"webhook: status {answer.status_code}; check GRADLOC_SLACK_WEBHOOK")
        self.counts["ok"] += 1


def _retry_after(headers: Mapping[str, Any]) -> float:
    """Seconds to wait; headers' names come in any case, values as text or list of texts."""
    for name, value in headers.items():
        if name.lower() == "retry-after":
            text = value[0] if isinstance(value, list) and value else value
            try:
                seconds = float(str(text))
            except ValueError:
                break
            if seconds >= 0:
                return min(seconds, RETRY_AFTER_MAX_S)
    return RETRY_AFTER_DEFAULT_S


def _quiet_logger() -> logging.Logger:
    # slack_sdk logs whole requests at debug level: they hold token texts.
    logger = logging.getLogger("gradloc_reporter.slack.sdk")
    logger.setLevel(logging.CRITICAL)
    return logger
