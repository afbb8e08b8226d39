"""Every kind of finding has a planted fault that gives it, and a healthy counterpart that gives nothing."""

import json

import pytest

from gradloc.checks.finding import CheckFinding, Tally, finding
from gradloc.checks.kinds import KINDS, LAYERS
from gradloc.checks.planted import Plant, all_plants
from gradloc.checks.planted.setups import SETUPS
from gradloc.checks.self_test import SelfTest, self_test
from gradloc_proto.codec import plain_number

PLANTS = all_plants()
IDS = [f"{plant.code}-{plant.name}".replace(" ", "_") for plant in PLANTS]


@pytest.mark.parametrize("plant", PLANTS, ids=IDS)
def test_a_planted_fault_is_found(plant):
    found = list(plant.run(True))
    assert plant.code in {one.code for one in found}
    for one in found:
        json.dumps(one.to_json(), allow_nan=False)


@pytest.mark.parametrize("plant", PLANTS, ids=IDS)
def test_its_healthy_counterpart_is_silent(plant):
    assert [(one.code, dict(one.where), one.what) for one in plant.run(False)] == []


@pytest.mark.parametrize("name", SETUPS)
def test_a_healthy_setup_is_silent(name):
    assert [(one.code, dict(one.where), one.what) for one in SETUPS[name]()] == []


def test_every_kind_has_a_planted_fault():
    assert KINDS.keys() - {plant.code for plant in PLANTS} == set()
    assert len(PLANTS) >= 60


def test_the_self_test_counts_what_was_missed_and_what_was_found_in_health():
    def found(code):
        return [finding(code, "x")]

    blind = Plant("policy.kl-range", "nothing is seen", lambda _planted: [])
    nervous = Plant("policy.kl-sign", "always seen", lambda _planted: found("policy.kl-sign"))
    right = Plant("policy.clip-range", "seen when there", lambda planted: found("policy.clip-range") if planted else [])
    seen = []
    result = self_test(
        lambda done, total: seen.append((done, total)),
        plants=[blind, nervous, right],
        setups={"calm": list, "odd": lambda: found("data.empty-prompt")},
    )
    assert (result.num_planted, result.num_caught, result.num_clean) == (3, 2, 2)
    assert result.missed == ("policy.kl-range: nothing is seen",)
    assert [one.split(" ")[0] for one in result.false_findings] == ["healthy", "set-up"]
    assert not result.passed and seen[-1] == (5, 5)


def test_every_layer_has_kinds_and_every_kind_says_what_to_do():
    assert {kind.layer for kind in KINDS.values()} == set(LAYERS)
    assert [kind.code for kind in KINDS.values() if not (kind.meaning and kind.todo)] == []


def test_a_code_that_is_not_registered_cannot_be_found():
    with pytest.raises(KeyError):
        finding("data.nonsense", "x")


def test_a_missed_fault_or_a_kind_without_one_fails_the_self_test():
    passing = SelfTest(2, 2, (), (), (), 3)
    assert passing.passed
    assert not SelfTest(2, 1, ("a",), (), (), 3).passed
    assert not SelfTest(2, 2, (), ("a",), (), 3).passed
    assert not SelfTest(2, 2, (), (), ("a",), 3).passed


def test_a_tally_keeps_few_places_and_counts_all():
    tally = Tally()
    for row in range(1_000):
        tally.add(finding("data.empty-prompt", "x", {"row": row}))
    (one,) = tally.findings()
    assert (one.num_places, one.where, len(one.also)) == (1_000, {"row": 0}, 8)


@pytest.mark.parametrize(
    ("value", "plain"), [(float("nan"), "NaN"), (float("inf"), "Infinity"), (float("-inf"), "-Infinity"), (1.5, 1.5)]
)
def test_numbers_survive_json(value, plain):
    assert plain_number(value) == plain
    made: CheckFinding = finding("policy.kl-range", "x", kl=value)
    assert made.to_json()["numbers"] == {"kl": plain}
