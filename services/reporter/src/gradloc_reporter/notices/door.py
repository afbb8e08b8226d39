"""What a receiver is to whoever tells it: one call that says what came of it. Never retries by itself."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol

from gradloc_reporter.text import Telling

OUTCOMES = ("ok", "rate_limited", "refused", "unreachable", "gone")  # of a call, in its door's counts
Stage = Literal["opened", "located", "resolved"]


class RateLimited(Exception):
    """The receiver asks to wait `retry_after_s`; nothing was taken."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"asked to wait {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Refused(Exception):
    """The receiver said no; trying the same again soon does not help. The text says what to do."""


class Unreachable(Exception):
    """No answer, or one that says nothing: what was sent may or may not have arrived."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What is told: words for people, and the incident as REST gives it for programs."""

    incident_id: str
    stage: Stage
    telling: Telling
    incident_json: bytes
    run_id: str = ""
    at: float | None = None  # when the incident opened, by the trainer's clock


class Door(Protocol):
    """A receiver that cannot edit: it hears once of each stage, at least once after a crash."""

    name: str
    counts: Counter[str]
    stages: tuple[Stage, ...]

    def post(self, notice: Notice) -> None: ...
