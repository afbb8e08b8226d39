"""Laws of the fold: repeats change nothing, a checkpoint changes nothing, nothing crashes it."""

import math

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gradloc_detector.fold import fold
from gradloc_detector.state import Emit, StateRejected, dump, initial_state, load
from gradloc_proto import codec
from gradloc_proto.messages import (
    JobReported,
    LocalizationFailed,
    Message,
    OverrideSet,
    RelocalizeRequested,
    RunEnded,
    RunStarted,
    SnapshotCommitted,
    SnapshotFailed,
    StepObserved,
    Tick,
)

RUN = "run-law"
NORMS = st.one_of(
    st.floats(0.3, 0.5), st.sampled_from([5.0, 50.0, 640.0, 0.0, math.nan, math.inf, 1e300]), st.floats(0.3, 0.5)
)


@st.composite
def tales(draw: st.DrawFn) -> list[Message]:
    """A run's messages as they could be read: mostly healthy steps, some spikes, wishes, reports, a restart."""
    messages: list[Message] = [RunStarted(run_id=RUN, ts=1.0)]
    step, attempt, now = 0, 0, 10.0
    incidents: list[str] = []
    state = initial_state(RUN)
    for _ in range(draw(st.integers(10, 60))):
        now += 1.0
        kind = draw(st.sampled_from(["step"] * 12 + ["skip", "snapshot", "tick", "job", "wish", "override", "restart"]))
        step += draw(st.sampled_from([1, 1, 1, 1, 1, 2, 5]))
        common = {"run_id": RUN, "attempt": attempt, "ts": now}
        known = draw(st.sampled_from(incidents)) if incidents else "inc-unknown"
        message: Message
        if kind in ("step", "skip"):
            norm = draw(NORMS)
            decision = "skip" if kind == "skip" else "snapshot" if norm > 4 else "go"
            layers = {"a": norm / 2, "b": draw(NORMS)}
            message = StepObserved(**common, step=step, grad_norm=norm, layer_norms=layers, decision=decision)
        elif kind == "snapshot":
            at = max(0, step - draw(st.integers(0, 6)))
            path = f"file:///store/{RUN}/{attempt}/{at}"
            message = SnapshotCommitted(**common, step=at, path=path, num_bytes=1, manifest_sha256="0" * 64)
            if draw(st.integers(0, 4)) == 0:
                message = SnapshotFailed(**common, step=at, reason="quota")
        elif kind == "tick":
            now += draw(st.sampled_from([1.0, 20.0, 400.0]))
            message = Tick(run_id=RUN, ts=now)
        elif kind == "job":
            status = draw(st.sampled_from(["submitted", "running", "succeeded", "failed", "lost", "refused"]))
            number = draw(st.integers(1, 3))
            message = JobReported(**common, incident_id=known, localization_attempt=number, status=status)
            if draw(st.integers(0, 4)) == 0:
                message = LocalizationFailed(**common, incident_id=known, localization_attempt=number, reason="oom")
        elif kind == "wish":
            message = RelocalizeRequested(**common, incident_id=known, request_id=f"w{step}", by="a person")
        elif kind == "override":
            value = draw(st.sampled_from([None, 2.0, 0.5, math.nan]))
            message = OverrideSet(**common, name="sensitivity", value=value, request_id=f"o{step}", by="a person")
        else:
            attempt, step = attempt + 1, max(0, step - 10)
            message = RunStarted(run_id=RUN, attempt=attempt, ts=now)
        messages.append(message)
        state, effects = fold(state, message)
        incidents += [e.message.incident_id for e in effects if isinstance(e, Emit) and hasattr(e.message, "spike")]
    messages.append(RunEnded(run_id=RUN, attempt=attempt, ts=now, step=step))
    return messages


def told(messages: list[Message], *, checkpoint_at: frozenset[int] = frozenset()) -> tuple[list[bytes], bytes]:
    state, out = initial_state(RUN), []
    for index, message in enumerate(messages):
        if index in checkpoint_at:
            state = load(dump(state))
        state, effects = fold(state, message)
        out += [codec.encode(effect.message) for effect in effects if isinstance(effect, Emit)]
    return out, dump(state)


def incidents_of(messages: list[Message]) -> list[bytes]:
    return [line for line in told(messages)[0] if b'"type":"incident_' in line]


# Without shrinking: a tale is long, and a failing one is shrunk for minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
LAW = settings(max_examples=60, deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])


@LAW
@given(tales(), st.frozensets(st.integers(0, 60), max_size=8))
def test_folding_with_checkpoints_at_any_point_equals_folding_in_one_go(messages, points):
    assert told(messages, checkpoint_at=points) == told(messages)


@LAW
@given(tales())
def test_each_message_read_twice_tells_nothing_new(messages):
    once = told(messages)[0]
    twice = told([message for message in messages for _ in range(2)])[0]
    assert twice == once


@LAW
@given(tales(), st.data())
def test_reading_a_stretch_again_tells_no_incident_anew(messages, data):
    """Redis was read again from an earlier place: the same incidents come out, byte for byte."""
    stop = data.draw(st.integers(1, len(messages)))
    start = data.draw(st.integers(0, stop - 1))
    again = [*messages[:stop], *messages[start:]]
    # Wishes and reports may be about ticks gone by, so only what depends on steps alone must be equal.
    assert incidents_of(again) == incidents_of(messages)


@LAW
@given(tales())
def test_a_key_is_told_once(messages):
    keys = [codec.decode(line).key() for line in told(messages)[0]]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a checkpoint"),
        (b"\xff\xfe", "not a checkpoint"),
        (b"[]", "version list"),
        (b'{"version": 99}', "version 99"),
        (b'{"version": 1}', "not a checkpoint"),
        (b'{"version": 1, "book": {"run_id": "r"}, "rules": {}}', "not a"),
        (b'{"version": 1, "book": {"run_id": "r"}, "rules": []}', "not a"),
        (b'{"version": 1, "book": {"run_id": "../r", "attempt": "x"}, "rules": {}}', "not a"),
        (b"[" * 100_000, "not a checkpoint"),
    ],
)
def test_bytes_that_are_no_checkpoint_are_refused_in_one_line(data, reason):
    with pytest.raises(StateRejected, match=reason) as caught:
        load(data)
    assert "\n" not in str(caught.value)
