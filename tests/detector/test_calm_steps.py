"""Steps folded in stretches leave what they leave one by one; a plain step is what the codec reads."""

import json
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradloc_detector import calm_steps
from gradloc_detector.metrics import Metrics
from gradloc_detector.owned_run import OwnedRun
from gradloc_detector.plain_step import Reader, norms_of
from gradloc_detector.policy import DEFAULT_POLICY
from gradloc_detector.state import dump
from gradloc_proto import codec, streams
from gradloc_proto.bus import Entry
from gradloc_proto.codec import MessageRejected
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import (
    OverrideSet,
    RunEnded,
    RunStarted,
    SnapshotCommitted,
    StepObserved,
    Tick,
    TokenRef,
)

RUN = "run-a"
NAMES = [f"layers.{index}.mlp" for index in range(5)]
READER = Reader(tuple(NAMES))


def step_of(dice, number, norm=1.0, **fields):
    norms = {name: norm * math.exp(0.2 * dice.gauss(0.0, 1.0)) for name in NAMES}
    fields = {"reward_mean": dice.gauss(0.0, 1.0), "energy": math.exp(dice.gauss(0.0, 0.1))} | fields
    total = math.sqrt(sum(value * value for value in norms.values()))
    return StepObserved(run_id=RUN, ts=1_000.0 + number, step=number, grad_norm=total, layer_norms=norms, **fields)


def tale_of(seed, num_steps=500):
    """A run with spikes, gaps, NaNs, late steps, wishes and ticks between long calm stretches."""
    dice = random.Random(seed)
    tale = [("steps", RunStarted(run_id=RUN, ts=1.0))]
    number = 0
    while number < num_steps:
        number += 1
        match dice.randrange(150):
            case 0:
                tale.append(("steps", step_of(dice, number, norm=100.0, decision="snapshot", rules_hit=("norm",))))
                path = f"file:///store/{RUN}/0/{number}"
                told = SnapshotCommitted(
                    run_id=RUN, ts=1.0, step=number, path=path, num_bytes=1, manifest_sha256="0" * 64
                )
                tale.append(("steps", told))
            case 1:
                number += dice.choice([1, 3])
            case 2:
                tale.append(("steps", step_of(dice, number, decision="skip")))
            case 3:
                tale.append(("steps", step_of(dice, number).model_copy(update={"grad_norm": math.nan})))
            case 4:
                tale.append(("control", Tick(run_id=RUN, ts=2_000.0 + number)))
                tale.append(("steps", step_of(dice, max(0, number - 2))))
            case 5:
                wish = OverrideSet(
                    run_id=RUN, ts=1.0, name="sensitivity", value=1.5, request_id=f"w{number}", by="a person"
                )
                tale.append(("control", wish))
            case 6:
                tale.append(("steps", step_of(dice, number, num_events_dropped=number)))
            case _:
                tale.append(("steps", step_of(dice, number)))
    return [*tale, ("steps", RunEnded(run_id=RUN, ts=9_000.0, step=number))]


def absorbed(tale, cuts):
    """The run's bus after its messages were read in pieces of `cuts` messages."""
    bus = MemoryBus()
    run = OwnedRun(RUN, DEFAULT_POLICY, Metrics())
    assert run.take(bus, ttl_s=1e9)
    entries = [(name, Entry(f"{place + 1}-0", codec.encode(message))) for place, (name, message) in enumerate(tale)]
    start = 0
    while start < len(entries):
        num = next(cuts)
        found = {}
        for name, entry in entries[start : start + num]:
            found.setdefault(streams.stream(RUN, name), []).append(entry)
        run.absorb(found, now=0.0)
        run.commit(bus)
        start += num
    told = {name: [entry.data for entry in bus.read_last(streams.stream(RUN, name), count=10_000)] for name in
            ("incidents", "limits", "control")}  # fmt: skip
    return dump(run.state), told


def ones():
    while True:
        yield 1


def pieces(dice):
    while True:
        yield dice.choice([5, 40, 256])


@pytest.mark.parametrize("seed", range(4))
def test_a_run_read_in_pieces_of_any_length_ends_in_the_state_and_messages_of_one_read_by_one(seed):
    tale = tale_of(seed)
    assert absorbed(tale, pieces(random.Random(seed))) == absorbed(tale, ones())


def test_calm_steps_are_really_folded_at_once(story):
    # Else the test above would compare a thing with itself.
    dice = random.Random(1)
    story.tell(*(step_of(dice, number) for number in range(100)))
    stretch = calm_steps.Stretch(story.state.baselines.layer_names)
    for number in range(100, 200):
        norm = 100.0 if number == 190 else 1.0
        assert stretch.add(codec.encode(step_of(dice, number, norm=norm)))
    assert calm_steps.is_possible(story.state, DEFAULT_POLICY)
    num, state, _ = calm_steps.folded(story.state, stretch, DEFAULT_POLICY)
    assert (num, state.book.last_step) == (90, 189)


# --- plain steps -----------------------------------------------------------------------------------


def test_an_ordinary_step_is_plain_with_every_field_set():
    place = TokenRef(rank=1, micro_batch=2, sequence=3, token=4)
    message = step_of(
        random.Random(0), 7, coefficient_abs_max=1.0, coefficient_abs_max_at=place, loss_parts={"kl": 0.1},
        num_zero_variance_groups=2, kl=0.1, entropy=1.0, clip_fraction=0.1, lr=1e-6, snapshot="file:///x",
    )  # fmt: skip
    step = READER.read(codec.encode(message))
    assert step is not None
    assert (step.step, step.grad_norm, norms_of(step)) == (7, message.grad_norm, tuple(message.layer_norms.values()))
    others = Reader(tuple(NAMES[:-1])), Reader((*NAMES, "one.more")), Reader(())
    assert [other.read(codec.encode(message)) for other in others] == [None] * 3


ODD_JSON = [
    'null', 'true', '""', '"NaN"', '"Infinity"', 'NaN', '-1', '0', '7.0', '7.5', '1e999', '1e-400', '-0.0', '[]', '{}',
    '9007199254740992', '123456789012345678901234567890', '"\\ud800"', '"x"', '"1.0"', '"2.0"', '"9.9.9"', '[1]',
    '{"a": 1}', '{"a": "NaN"}', '{"a": null}', '["norm"]', '"go"', '"step_observed"', '"run_ended"',
    '"' + "x" * 600 + '"',
]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_taken_as_plain_the_codec_takes_too_with_the_same_values(data):
    fields = json.loads(codec.encode(step_of(random.Random(0), 7)))
    parts = {name: json.dumps(value) for name, value in fields.items()}
    for name in data.draw(st.lists(st.sampled_from([*StepObserved.model_fields, "unknown"]), max_size=3)):
        parts[name] = data.draw(st.sampled_from(ODD_JSON))
    for name in data.draw(st.lists(st.sampled_from(sorted(parts)), max_size=1)):
        del parts[name]
    text = "{" + ",".join(f'"{name}":{value}' for name, value in parts.items()) + "}"
    step = READER.read(text.encode())
    try:
        message = codec.decode(text.encode())
    except MessageRejected:
        assert step is None or step.run_id != RUN
        return
    if step is not None:
        assert dict(zip(NAMES, norms_of(step), strict=True)) == message.layer_norms
        for name in StepObserved.model_fields.keys() - {"layer_norms"}:
            assert repr(getattr(step, name)) == repr(getattr(message, name))


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff", b'{"type":"step_observed"}', b"1", b'{"type":1}'])
def test_what_is_no_step_is_never_plain(data):
    assert READER.read(data) is None
