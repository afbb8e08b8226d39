"""Replays that do not match are compared with each other before anybody is accused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.localization import localize
from gradloc.three_runs import ThreeRuns, cause_of, with_runs
from gradloc_localizer.driver import other_device
from gradloc_proto.messages import Cause

norms = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize(
    ("runs", "outcome"),
    [
        (ThreeRuns(1.0, 1.0), "training-machine"),
        (ThreeRuns(1.0, 1.0, 1.0005), "training-machine"),
        (ThreeRuns(1.0, 1.0, 1.1), "device-disagreement"),
        (ThreeRuns(1.0, 1.1, 1.0), "nondeterminism"),
        (ThreeRuns(1.0, 1.1), "nondeterminism"),
        (ThreeRuns(math.nan, math.nan, math.nan), "training-machine"),
        (ThreeRuns(1.0, math.nan, 1.0), "nondeterminism"),
        (ThreeRuns(1.0, 1.0, math.inf), "device-disagreement"),
        (ThreeRuns(0.0, 0.0, 0.0), "training-machine"),
    ],
)
def test_the_outcome_follows_from_who_agrees_with_whom(runs, outcome):
    assert runs.outcome(1e-3) == outcome
    cause = cause_of(runs, 640.0, 1e-3)
    assert cause.name == outcome
    assert cause.evidence["reported_norm"] == 640.0


@given(first=norms, again=norms, elsewhere=st.none() | norms, reported=norms)
def test_every_outcome_can_be_told(first, again, elsewhere, reported):
    assert len(cause_of(ThreeRuns(first, again, elsewhere), reported, 1e-3).summary) <= 512


def test_a_rank_unlike_its_peers_comes_first_unless_the_pool_disagrees_with_itself():
    def cause(name):
        return Cause(name=name, confidence="high", summary=name)

    known = (cause("hardware"), cause("not-reproduced"), cause("rare-token"))
    names = [one.name for one in with_runs(known, cause("training-machine"))]
    assert names == ["hardware", "training-machine", "rare-token"]
    names = [one.name for one in with_runs(known, cause("nondeterminism"))]
    assert names == ["nondeterminism", "hardware", "rare-token"]


class TestInALocalization:
    """A calm step that was reported as a spike."""

    def finding(self, trainer, model=None, **arguments):
        step = trainer.faulty(model or trainer.model(), None)
        layers = {key: norm * (300 if key == "layers.1.mlp" else 2) for key, norm in step.layer_norms.items()}
        facts = step.facts(grad_norm=100 * step.grad_norm, layer_norms=layers)
        return step, localize(step.policy(), step.placed, facts, **arguments)

    def test_replays_that_agree_everywhere_leave_the_training_machine(self, trainer):
        step, _ = self.finding(trainer)
        _, finding = self.finding(trainer, elsewhere=lambda: 1.00001 * step.grad_norm)
        assert finding.verdict == "not-reproduced"
        assert finding.causes[0].name == "training-machine"
        assert "two devices" in finding.causes[0].summary
        assert finding.fidelity.again_norm == finding.fidelity.replayed_norm
        assert finding.fidelity.elsewhere_norm == pytest.approx(step.grad_norm, rel=1e-4)

    def test_without_another_device_that_is_said(self, trainer):
        _, finding = self.finding(trainer)
        assert (finding.verdict, finding.fidelity.elsewhere_norm) == ("not-reproduced", None)
        assert "one device" in finding.causes[0].summary

    def test_devices_that_disagree_accuse_nobody(self, trainer):
        _, finding = self.finding(trainer, elsewhere=lambda: 77.0)
        assert (finding.verdict, finding.causes[0].name) == ("inconclusive", "device-disagreement")

    def test_a_replay_that_differs_from_itself_accuses_nobody(self, trainer):
        model = trainer.model()
        factors = iter([1.0] * 4 + [1.3] * 400)  # the second replay's forward passes see another network
        model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: output * self.factor)
        self.factor = 1.0
        step = trainer.faulty(model, None)
        calls = []

        def count(_module, _inputs):
            calls.append(1)
            self.factor = next(factors)

        model.register_forward_pre_hook(count)
        layers = {key: norm * (300 if key == "layers.1.mlp" else 2) for key, norm in step.layer_norms.items()}
        facts = step.facts(grad_norm=100 * step.grad_norm, layer_norms=layers)
        finding = localize(step.policy(), step.placed, facts)
        assert len(step.placed) == 4
        assert (finding.verdict, finding.causes[0].name) == ("inconclusive", "nondeterminism")

    def test_a_step_that_matches_is_replayed_once(self, trainer):
        step = trainer.faulty(trainer.model(), trainer.stale(9.0))
        finding = localize(step.policy(), step.placed, step.facts(), elsewhere=lambda: pytest.fail("asked"))
        assert (finding.verdict, finding.fidelity.again_norm) == ("token", None)


def test_there_is_no_other_device_beside_a_cpu():
    assert other_device("cpu") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_beside_one_gpu_it_is_another_or_the_cpu():
    assert other_device("cuda") in ("cpu", "cuda:1")
