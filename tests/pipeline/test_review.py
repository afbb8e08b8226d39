"""What counts as right: verdict, cause and place, each by itself able to make it wrong."""

from types import SimpleNamespace
from typing import Any

import pytest

from gradloc.demo.envelope import ANSWERS
from gradloc.demo.performance import Script
from gradloc.demo.review import in_short, review

TRUTH = {"step": 23, "rank": 1, "micro_batch": 2, "sequence": 3, "token": 14}
CULPRIT = {"rank": 1, "micro_batch": 2, "sequence": 3, "token": 14, "token_id": 7, "token_text": "2", "share": 0.9}
SECOND = {**CULPRIT, "rank": 0, "token": 12, "share": 0.09}


def finding(verdict: str, cause: str, *culprits: dict[str, Any], **evidence: float) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "step": 23,
        "causes": [{"name": cause, "summary": "", "confidence": "high", "evidence": evidence}],
        "culprits": list(culprits),
    }


def judged(fault: str, truth: dict[str, Any] | None, found: dict[str, Any] | None, num_steps: int = 60) -> bool:
    played = SimpleNamespace(
        truth=truth,
        finding=found,
        outcomes=[{"steps": num_steps, "stall_s": 0.1, "num_events_dropped": 0}],
        step_times=[float(step) for step in range(60)],
        slack_texts=[],
        incidents=[] if found is None else [{}],
        alert_at=None,
        culprit_at=None,
        redis_killed=False,
    )
    result = review(Script(fault, 1, 60), played)  # type: ignore[arg-type]
    assert set(in_short(result)) == {"fault", "right", "verdict", "cause", "truth", "found"}
    return bool(result["right"])


RIGHT = {
    "token-mismatch": (TRUTH, finding("token", "token-mismatch", CULPRIT)),
    "sequence-mismatch": (TRUTH, finding("sequence", "sequence-mismatch", {**CULPRIT, "token": 11})),
    "nan": (TRUTH, finding("non-finite", "token-mismatch", CULPRIT)),
    "two": (
        {**TRUTH, "tokens": [{key: one[key] for key in list(TRUTH)[1:]} for one in (CULPRIT, SECOND)]},
        finding("token", "token-mismatch", SECOND, CULPRIT),
    ),
    "hardware": ({"step": 23, "rank": 1}, finding("not-reproduced", "hardware", rank=1.0)),
    "temperature": ({"step": 23}, finding("batch-wide", "systematic-mismatch", CULPRIT)),
    "late": ({"step": 20}, finding("batch-wide", "reward-drop")),
    "accounting": ({"step": 23}, finding("accounting", "unnormalised-loss", CULPRIT)),
}


@pytest.mark.parametrize("fault", RIGHT)
def test_the_right_answer_is_right_and_every_part_of_it_counts(fault: str):
    truth, found = RIGHT[fault]
    assert judged(fault, truth, found)
    assert not judged(fault, truth, {**found, "verdict": "inconclusive"})
    assert not judged(fault, truth, {**found, "causes": [{**found["causes"][0], "name": "unknown"}]})
    assert not judged(fault, truth, None)
    assert not judged(fault, None, found)
    assert not judged(fault, truth, found, num_steps=61), "training must reach its last step"
    assert not judged(fault, {**truth, "step": 24}, found)
    assert not judged("none", truth, found)


@pytest.mark.parametrize("key", ["rank", "micro_batch", "sequence", "token"])
def test_another_place_is_wrong(key: str):
    truth, found = RIGHT["token-mismatch"]
    assert not judged("token-mismatch", {**truth, key: 5}, found)
    assert judged("sequence-mismatch", {**TRUTH, key: 5}, RIGHT["sequence-mismatch"][1]) == (key == "token")


def test_either_of_two_that_pull_alike_is_right():
    _, found = RIGHT["token-mismatch"]
    other = {**TRUTH, "sequence": 6}
    place = {key: TRUTH[key] for key in list(TRUTH)[1:]}
    assert judged("token-mismatch", {**other, "tied": [place]}, found)
    assert not judged("token-mismatch", {**other, "tied": [{**place, "token": 9}]}, found)
    assert not judged("token-mismatch", {**other, "step": 24, "tied": [place]}, found)


def test_one_of_two_culprits_is_not_both():
    truth, _ = RIGHT["two"]
    assert not judged("two", truth, finding("token", "token-mismatch", CULPRIT))
    third = {**CULPRIT, "sequence": 0}
    assert not judged("two", truth, finding("token", "token-mismatch", CULPRIT, SECOND, third))


def test_a_culprit_where_there_is_none_is_wrong():
    truth, found = RIGHT["hardware"]
    assert not judged("hardware", {**truth, "rank": 0}, found)
    assert not judged("temperature", {"step": 23}, finding("token", "systematic-mismatch", CULPRIT))


def test_a_healthy_run_is_right_when_nothing_was_said():
    assert judged("none", None, None)
    assert ANSWERS["none"].verdict is None
