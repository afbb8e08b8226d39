"""`gradloc verify-step` and `gradloc check` on snapshots: a struck step does not pass, the same step mended does."""

import json
import math

import pytest
from click.testing import CliRunner

from gradloc.checks.sources import check_source
from gradloc.command import gradloc as command

USUAL = {"reward_mean": 0.4, "reward_std": 0.3, "lr": 1e-6, "loss": 0.01, "kl": 0.001, "entropy": 0.5}


@pytest.fixture
def steps(trainer, tmp_path):
    """URLs of a healthy step, of one with a stale token, and of the latter after the token was put right."""

    def written(name, fault, **metrics):
        step = trainer.faulty(trainer.model(), fault)
        return step.write(f"file://{tmp_path / name}", metrics=USUAL | metrics, metrics_usual=USUAL)

    def write(name, log_ratio=0.0, **metrics):
        return written(name, trainer.stale(log_ratio), **metrics)

    return write


def verified(*arguments):
    result = CliRunner().invoke(command, ["verify-step", *arguments, "--json"])
    assert result.exit_code in (0, 1), result.output
    document = json.loads(result.stdout)
    assert document["passed"] is (result.exit_code == 0)
    return [one["name"] for one in document["comparisons"] if not one["is_back"]], document


def test_a_mended_step_passes_and_a_struck_one_does_not(steps):
    healthy, struck, mended = steps("healthy"), steps("struck", 9.0), steps("mended", 0.02)
    outside, _ = verified(struck, "--against", healthy)
    assert {"grad_norm", "largest |log ratio|", "loss"} <= set(outside)
    outside, document = verified(mended, "--against", healthy)
    assert outside == []
    compared = {one["name"] for one in document["comparisons"]}
    assert {"loss", "reward_mean", "reward_std", "grad_norm", "difference of two replays"} <= compared


def test_without_a_healthy_snapshot_the_runs_usual_numbers_count(steps):
    outside, document = verified(steps("mended", 0.02))
    assert outside == [] and [one["what"] for one in document["skipped"]] == ["loss"]
    outside, _ = verified(steps("struck", 9.0))
    assert "grad_norm" in outside


def test_one_number_that_is_not_back_is_enough(steps):
    healthy = steps("healthy")
    assert verified(steps("poor", reward_mean=-5.0), "--against", healthy)[0] == ["reward_mean"]
    assert verified(steps("lost", reward_mean=math.nan), "--against", healthy)[0] == ["reward_mean"]


@pytest.mark.parametrize(
    ("metrics", "layer", "code"),
    [
        ({"reward_mean": math.nan}, "reward", "reward.not-a-number"),
        ({"reward_std": 0.0}, "reward", "reward.constant"),
        ({"lr": 0.0}, "optimizer", "optimizer.lr"),
        ({"lr": 1e-3}, "optimizer", "optimizer.lr-jump"),
        ({"kl": -3.0}, "policy", "policy.kl-sign"),
        ({"entropy": 0.0}, "policy", "policy.entropy-collapse"),
        ({"loss": math.inf}, "policy", "policy.loss-non-finite"),
    ],
)
def test_what_the_trainer_said_of_the_step_is_checked(metrics, layer, code, steps):
    url = steps("odd", **metrics)
    assert check_source(layer, url).codes == (code,)
    others = {"reward", "optimizer", "gradient", "data"} - {layer}
    assert [check_source(other, url).codes for other in others] == [()] * len(others)
