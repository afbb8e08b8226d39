"""Messages to bytes and back: nothing is lost, nothing foreign gets in, nothing secret gets out."""

import json
import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradloc_proto.codec import MessageRejected, decode, encode
from gradloc_proto.identities import RUN_ID_PATTERN
from gradloc_proto.messages import MESSAGE_TYPES, SCHEMA_VERSION, OverrideSet, StepObserved, Tick, type_name
from gradloc_proto.schema.samples import fill, sample
from gradloc_proto.streams import MESSAGE_BYTES_MAX

SECRET = "geheim"


class Drawn:
    """Random values for every field of a message, edges included."""

    def __init__(self, draw):
        self.draw = draw

    def integer(self, low, high):
        return self.draw(st.integers(low, high))

    def number(self, low, high, *, finite):
        if not finite:
            return self.draw(st.floats())
        return self.draw(st.floats(max(low, -1e300), min(high, 1e300), allow_nan=False))

    def text(self, pattern, length_max):
        if pattern == RUN_ID_PATTERN:
            return self.draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True))
        assert pattern is None
        return self.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=min(length_max, 20)))

    def boolean(self):
        return self.draw(st.booleans())

    def one_of(self, options):
        return self.draw(st.sampled_from(options))

    def size(self):
        return self.draw(st.integers(0, 3))


@st.composite
def messages(draw):
    return fill(draw(st.sampled_from(MESSAGE_TYPES)), Drawn(draw))


def as_data(message):
    """The message as plain data in which NaN equals itself."""

    def comparable(value):
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, dict):
            return {key: comparable(item) for key, item in value.items()}
        return tuple(map(comparable, value)) if isinstance(value, tuple | list) else value

    return comparable(message.model_dump())


def rejection(data):
    with pytest.raises(MessageRejected) as caught:
        decode(data)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700
    assert SECRET not in text
    return text


@settings(max_examples=400, deadline=None)
@given(messages())
def test_every_message_comes_back_as_it_was(message):
    back = decode(encode(message))
    assert type(back) is type(message)
    assert as_data(back) == as_data(message)
    assert back.key() == message.key()
    assert encode(back) == encode(message)


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=type_name)
def test_every_message_with_every_field_set_comes_back(message_type):
    message = sample(message_type)
    assert as_data(decode(encode(message))) == as_data(message)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7976931348623157e308])
def test_extreme_numbers_survive_wherever_a_number_may_stand(value):
    step = StepObserved(run_id="r", ts=1.0, step=0, grad_norm=value, layer_norms={"a": value}, loss=value)
    back = decode(encode(step))
    assert isinstance(back, StepObserved)
    assert [repr(number) for number in (back.grad_norm, back.layer_norms["a"], back.loss)] == [repr(value)] * 3


def test_an_override_taken_back_comes_back():
    wish = OverrideSet(run_id="r", ts=1.0, name="sensitivity", value=None, request_id="q", by="me")
    assert decode(encode(wish)) == wish


def test_bytes_are_valid_json_for_strict_readers():
    text = encode(StepObserved(run_id="r", ts=1.0, step=0, grad_norm=math.nan)).decode()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse)["grad_norm"] == "NaN"


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=type_name)
def test_fields_of_a_later_minor_version_are_ignored(message_type):
    message = sample(message_type)
    data = json.loads(encode(message))

    def with_extra(value):
        if isinstance(value, dict):
            return {key: with_extra(item) for key, item in value.items()}
        return [with_extra(item) for item in value] if isinstance(value, list) else value

    later = {**with_extra(data), "schema_version": "1.7", "of_a_later_version": {"deep": [1, {"x": None}]}}
    back = decode(json.dumps(later).encode())
    assert as_data(back) == {**as_data(message), "schema_version": "1.7"}


@pytest.mark.parametrize("version", ["2.0", "0.9", "10.0", "99.99"])
@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=type_name)
def test_another_major_version_is_refused_by_number(message_type, version):
    data = {**json.loads(encode(sample(message_type))), "schema_version": version}
    assert f"schema version {version}, expected 1.x" in rejection(json.dumps(data).encode())


def test_another_major_version_is_named_even_where_its_fields_do_not_fit():
    data = json.dumps({"type": "a_type_of_tomorrow", "schema_version": "2.0", "run": SECRET}).encode()
    assert "schema version 2.0, expected 1.x" in rejection(data)


@pytest.mark.parametrize("version", ["", "1", "one", "1.x", "1.0\n", " 1.0", "1.0.0", SECRET, "١.٠", "9" * 100])
def test_what_is_no_version_is_refused(version):
    assert "MAJOR.MINOR" in rejection(
        json.dumps({"type": "tick", "run_id": "r", "ts": 1, "schema_version": version}).encode()
    )


def step_with(**fields):
    return json.dumps({"type": "step_observed", "run_id": "r", "ts": 1, "step": 1, "grad_norm": 1, **fields}).encode()


POISON = {
    "nothing": b"",
    "not UTF-8": b"\xff\xfe\x00" + SECRET.encode(),
    "not JSON": SECRET.encode(),
    "cut off": encode(sample(StepObserved))[:-7],
    "a list": json.dumps([SECRET]).encode(),
    "a text": json.dumps(SECRET).encode(),
    "null": b"null",
    "no type": json.dumps({"run_id": SECRET}).encode(),
    "unknown type": json.dumps({"type": SECRET}).encode(),
    "a type that is a list": json.dumps({"type": [SECRET]}).encode(),
    "a run id that is none": step_with(run_id=f"{SECRET}/.."),
    "a run id with a line end": step_with(run_id="r\n"),
    "text for a number": step_with(grad_norm=SECRET),
    "text for a number under a made-up key": step_with(layer_norms={SECRET: SECRET}),
    "an unknown decision": step_with(decision=SECRET),
    "text that is too long": step_with(snapshot=SECRET * 1_000),
    "a negative step": step_with(step=-1),
    "a step beyond every integer": step_with(step=2**53),
    "a step of thousands of digits": step_with().replace(b'"step": 1', b'"step": ' + b"9" * 6_000),
    "a fraction of a step": step_with(step=1.5),
    "a time that is not finite": step_with(ts="NaN"),
    "a time beyond every calendar": step_with(ts=1e300),
    "a missing field": json.dumps({"type": "step_observed", "run_id": "r", "ts": 1}).encode(),
    "half a surrogate pair": step_with().replace(b'"r"', b'"\\ud800"'),
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a deep unknown field": step_with(x=0).replace(b'"x": 0', b'"x": ' + b"[" * 50_000 + b"]" * 50_000),
}


@pytest.mark.parametrize("name", POISON)
def test_poison_is_rejected_in_one_line_that_repeats_none_of_it(name):
    rejection(POISON[name])


def test_a_rejection_names_the_field_and_what_was_expected():
    assert "grad_norm" in rejection(step_with(grad_norm=SECRET))
    assert "valid number" in rejection(step_with(grad_norm=SECRET))
    assert "step_observed" in rejection(json.dumps({"type": SECRET}).encode())  # the known types


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_rejected_and_nothing_else(data):
    with pytest.raises(MessageRejected):
        decode(data)


@settings(max_examples=300, deadline=None)
@given(messages(), st.data())
def test_a_damaged_message_is_read_or_rejected_and_nothing_else(message, data):
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MessageRejected):
        decode(bytes(damaged))


class TestSize:
    def message_of(self, num_bytes):
        empty = len(encode(StepObserved(run_id="r", ts=1.0, step=0, grad_norm=1.0, layer_norms={"": 1.0})))
        return StepObserved(run_id="r", ts=1.0, step=0, grad_norm=1.0, layer_norms={"x" * (num_bytes - empty): 1.0})

    def test_a_message_of_exactly_the_limit_passes(self):
        data = encode(self.message_of(MESSAGE_BYTES_MAX))
        assert len(data) == MESSAGE_BYTES_MAX
        decode(data)

    def test_one_byte_more_is_refused_by_the_sender_and_by_the_reader(self):
        with pytest.raises(ValueError, match="over the limit"):
            encode(self.message_of(MESSAGE_BYTES_MAX + 1))
        assert "over the limit" in rejection(encode(self.message_of(MESSAGE_BYTES_MAX)) + b" ")


def test_messages_cannot_be_changed():
    tick = Tick(run_id="r", ts=1.0)
    with pytest.raises(ValueError, match="frozen"):
        tick.ts = 2.0


def test_a_message_carries_the_version_it_was_made_with():
    assert json.loads(encode(Tick(run_id="r", ts=1.0)))["schema_version"] == SCHEMA_VERSION
