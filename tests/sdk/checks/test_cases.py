"""Cases distilled from public bug reports give the expected answer."""

import json
import math

import pytest

from gradloc.checks.documents import check_document

EXPECTED = {
    "stale-token-overflow": ("policy.token-mismatch", {"row": 0, "token": 1}),
    "masked-nan": ("policy.masked-non-finite", {"row": 0, "token": 1}),
    "leave-one-out-advantage": ("reward.advantage-outlier", {"index": 0, "group": "0"}),
    "drift-adds-up": ("policy.sequence-mismatch", {"row": 0}),
    "none-reward": ("reward.not-a-number", {"index": 1, "group": "0"}),
    "retokenized-turn": ("data.retokenized", {"first_token": 0}),
    "temperature-not-applied": ("policy.temperature", {}),
    "ratio-before-any-update": ("policy.ratio-before-update", {}),
    "head-takes-over": ("gradient.layer-growth", {"layer": "lm_head"}),
    "zero-token-count": ("policy.token-count", {}),
}


@pytest.fixture(scope="module")
def cases(cases_file):
    return {case["id"]: case for case in json.loads(cases_file.read_text())}


def found_in(case, **more):
    report = check_document(case["layer"], {**case["input"], **more})
    json.dumps(report.to_json(), allow_nan=False)
    return report.findings


@pytest.mark.parametrize("name", EXPECTED)
def test_the_case_has_one_answer(name, cases):
    (found,) = found_in(cases[name])
    assert (found.code, dict(found.where)) == EXPECTED[name]


def test_all_cases_are_expected(cases):
    assert cases.keys() == EXPECTED.keys()


def test_a_stale_token_behind_the_mask_is_blamed_only_where_the_norm_is_not_finite(cases):
    case = cases["stale-token-overflow"]
    masked = {"label_mask": [1, 0, 1]}
    assert found_in(case, **masked) == ()
    assert found_in(case, **masked, grad_norm=0.4) == ()
    (found,) = found_in(case, **masked, grad_norm=math.nan)
    assert (found.code, found.where["token"]) == ("policy.mask-fault", 1)


def test_a_masked_nan_is_a_fault_only_where_the_norm_is_nan(cases):
    case = cases["masked-nan"]
    (found,) = found_in(case, grad_norm=math.nan)
    assert (found.code, found.where["token"]) == ("policy.mask-fault", 1)
    (found,) = found_in(case, grad_norm=0.4)
    assert found.severity == "warning"


def test_drift_names_the_sequence_ratio(cases):
    (found,) = found_in(cases["drift-adds-up"])
    assert found.numbers["ratio"] == pytest.approx(3.32, abs=0.005)


def test_the_leave_one_out_outlier_is_thousands_of_times_its_peers(cases):
    (found,) = found_in(cases["leave-one-out-advantage"])
    assert abs(found.numbers["advantage"]) > 1_000
    assert found_in(cases["leave-one-out-advantage"], estimator="group") == ()


def test_binary_rewards_are_no_residue():
    healthy = {"rewards": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
    assert check_document("reward", healthy).findings == ()
    (found,) = check_document("reward", {**healthy, "estimator": "leave-one-out"}).findings
    assert found.code == "reward.advantage-outlier"
