"""Publishing: the localizer's facts onto the run's findings stream. Knows no torch."""

import time
from collections.abc import Callable

from gradloc_proto import codec, streams
from gradloc_proto.bus import Bus, BusUnavailable
from gradloc_proto.messages import (
    Finding,
    LocalizationFailed,
    LocalizationFinished,
    LocalizationProgressed,
    LocalizationStarted,
    Message,
)

NUM_TRIES = 4
FIRST_WAIT_S = 0.5  # doubled each time: a failover of Redis takes a few seconds
REASON_LENGTH_MAX = 512


class Findings:
    """Writes messages about one localization attempt of one incident."""

    def __init__(
        self,
        bus: Bus,
        *,
        run_id: str,
        attempt: int,
        incident_id: str,
        localization_attempt: int,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bus = bus
        self._run_id = run_id
        self._attempt = attempt
        self._incident_id = incident_id
        self._localization_attempt = localization_attempt
        self._clock = clock
        self._sleep = sleep

    def started(self, step: int, snapshot: str) -> None:
        self._append(LocalizationStarted(**self._head(), step=step, snapshot=snapshot))

    def progressed(self, stage: str, fraction: float) -> None:
        """Progress is a courtesy: a bus that is away must not end the work."""
        try:
            self._append(LocalizationProgressed(**self._head(), stage=stage, fraction=fraction), num_tries=1)
        except BusUnavailable:
            return

    def finished(self, finding: Finding) -> None:
        self._append(LocalizationFinished(**self._head(), finding=finding))

    def failed(self, reason: str, *, retryable: bool) -> None:
        self._append(LocalizationFailed(**self._head(), reason=reason[:REASON_LENGTH_MAX], retryable=retryable))

    def _head(self) -> dict[str, object]:
        return {
            "run_id": self._run_id,
            "attempt": self._attempt,
            "ts": self._clock(),
            "incident_id": self._incident_id,
            "localization_attempt": self._localization_attempt,
        }

    def _append(self, message: Message, *, num_tries: int = NUM_TRIES) -> None:
        data = codec.encode(message)
        for number in range(num_tries):
            try:
                self._bus.append(
                    streams.stream(self._run_id, "findings"),
                    [data],
                    length_max=streams.STREAM_LENGTH_MAX["findings"],
                )
                return
            except BusUnavailable:
                if number == num_tries - 1:
                    raise
                self._sleep(FIRST_WAIT_S * 2**number)
