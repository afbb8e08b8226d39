"""Derived ids are stable for ever, apart for different facts, and fit everywhere they go."""

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc_proto import streams
from gradloc_proto.identities import check_run_id, incident_id, message_key, spike_id, submission_id
from gradloc_proto.messages import MESSAGE_TYPES, OverrideSet, StepObserved, Tick, type_name
from gradloc_proto.schema.samples import sample

# Kept for ever: a reader of today must recognise the facts of yesterday.
GOLDEN = {
    "spike": ("spk-2c53cdda0798ce15", spike_id("qwen3-4b-grpo", 0, 1204, "norm")),
    "incident": ("inc-f4f374bea0829979", incident_id("qwen3-4b-grpo", 0, spike_id("qwen3-4b-grpo", 0, 1204, "norm"))),
    "step": ("step-5577e99c9342435c", StepObserved(run_id="qwen3-4b-grpo", ts=1.0, step=1204, grad_norm=640.0).key()),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_never_change(name):
    expected, found = GOLDEN[name]
    assert found == expected


def test_an_id_does_not_depend_on_when_or_how_the_fact_was_told():
    early = StepObserved(run_id="r", ts=1.0, step=7, grad_norm=1.0)
    late = StepObserved(run_id="r", ts=99.0, step=7, grad_norm=1.0, num_events_dropped=3)
    assert early.key() == late.key()


def test_each_part_of_an_identity_counts():
    ids = {
        spike_id("r", 0, 1, "norm"),
        spike_id("s", 0, 1, "norm"),
        spike_id("r", 1, 1, "norm"),
        spike_id("r", 0, 2, "norm"),
        spike_id("r", 0, 1, "layer"),
        spike_id("r", 1, 0, "norm"),
    }
    assert len(ids) == 6


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=type_name)
def test_a_key_depends_on_run_and_attempt(message_type):
    message = sample(message_type)
    copies = [message, message.model_copy(update={"run_id": "other"}), message.model_copy(update={"attempt": 99})]
    assert len({copy.key() for copy in copies}) == 3


def test_keys_of_different_kinds_of_message_differ():
    keys = [sample(message_type).key() for message_type in MESSAGE_TYPES]
    assert all(one != other for one, other in combinations(keys, 2))


def test_two_wishes_are_two_even_with_the_same_value():
    wish = OverrideSet(run_id="r", ts=1.0, name="sensitivity", value=2.0, request_id="a", by="me")
    assert wish.key() != wish.model_copy(update={"request_id": "b"}).key()


def test_ticks_differ_by_their_time():
    assert Tick(run_id="r", ts=1.0).key() != Tick(run_id="r", ts=1.0000001).key()


parts = st.lists(
    st.one_of(st.text(max_size=5), st.integers(0, 99), st.sampled_from(["\x1f", ",", '"', "1"])), max_size=4
)


@given(parts, parts)
def test_different_parts_give_different_keys(one, other):
    same = len(one) == len(other) and all(type(a) is type(b) and a == b for a, b in zip(one, other, strict=True))
    assert (message_key("kind", "r", 0, *one) == message_key("kind", "r", 0, *other)) == same


def test_a_separator_inside_a_part_joins_nothing():
    assert message_key("k", "r", 0, "a\x1fb", "c") != message_key("k", "r", 0, "a", "b\x1fc")
    assert message_key("k", "r", 0, "a,b") != message_key("k", "r", 0, "a", "b")


def test_a_submission_id_is_new_for_each_attempt_and_fit_for_a_url():
    incident = incident_id("r", 0, "spk")
    ids = {submission_id(incident, attempt) for attempt in range(1, 30)}
    assert len(ids) == 29
    assert all(re.fullmatch(r"[a-z0-9-]{1,60}", one) for one in ids)


@pytest.mark.parametrize("run_id", ["a", "0", "qwen3-4b-grpo", "A.b_c-9", "x" * 128])
def test_usable_run_ids_pass(run_id):
    assert check_run_id(run_id) == run_id
    assert Tick(run_id=run_id, ts=0.0).run_id == run_id


@pytest.mark.parametrize(
    "run_id",
    ["", "x" * 129, "a b", "a/b", "..", ".a", "-a", "_a", "a\n", "\na", "a}b", "{a}", "ä", "a\x00", "a:b", "a%2F"],
)
def test_other_run_ids_are_refused_with_what_to_do(run_id):
    with pytest.raises(ValueError, match="rename the run"):
        check_run_id(run_id)
    with pytest.raises(ValueError, match="pattern"):
        Tick(run_id=run_id, ts=0.0)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True))
def test_all_keys_of_a_run_share_one_hash_slot(run_id):
    keys = [
        *(streams.stream(run_id, name) for name in streams.STREAM_NAMES),
        streams.lease(run_id),
        streams.state(run_id),
        streams.cursor(run_id),
        streams.dead_letters(run_id),
    ]
    assert len(set(keys)) == len(keys)
    # Redis hashes what stands between the first "{" and the next "}".
    assert {key[key.index("{") + 1 : key.index("}")] for key in keys} == {run_id}
