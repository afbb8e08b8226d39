"""A replay that does not match the step is never explained away by a token."""

import math
from dataclasses import replace

import pytest

from gradloc.fidelity import StepFacts, fidelity_of
from gradloc.held import without_culprits
from gradloc.localization import localize
from gradloc.replay import coefficients_of, replay
from gradloc.verification import Place


def explained(step, **changes):
    return localize(step.policy(), step.placed, step.facts(**changes))


def test_a_calm_replay_of_a_reported_spike_is_not_reproduced(trainer):
    step = trainer.faulty(trainer.model(), None)
    layers = {key: norm * (300 if key == "layers.1.mlp" else 2) for key, norm in step.layer_norms.items()}
    finding = explained(step, grad_norm=100 * step.grad_norm, layer_norms=layers)
    assert finding.verdict == "not-reproduced"
    assert finding.culprits == ()
    assert finding.fidelity.rel_error == pytest.approx(0.99)


def test_one_common_factor_is_an_accounting_fault(trainer):
    step = trainer.faulty(trainer.model(), None)
    layers = {key: 50 * norm for key, norm in step.layer_norms.items()}
    finding = explained(step, grad_norm=50 * step.grad_norm, layer_norms=layers)
    assert finding.verdict == "accounting"
    assert finding.culprits == ()


def test_a_spike_that_replays_differently_is_inconclusive(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    layers = {key: norm * (2 if key == "layers.1.mlp" else 1) for key, norm in step.layer_norms.items()}
    finding = explained(step, grad_norm=1.3 * step.grad_norm, layer_norms=layers)
    assert finding.verdict == "inconclusive"
    assert finding.culprits[0].token == 9  # a suspect all the same


def test_weights_from_after_the_update_cannot_match_and_do_not_accuse_the_hardware(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    finding = explained(step, grad_norm=1.3 * step.grad_norm, weights="after-update")
    assert finding.verdict == "token"
    assert not finding.fidelity.reproduced
    assert finding.approximate and "approximate" in finding.summary
    assert not explained(step).approximate


def test_a_norm_that_overflowed_in_the_sum_of_squares_is_named(trainer):
    step = trainer.faulty(trainer.model(), trainer.extra(1e22))
    finding = explained(step, grad_norm=math.inf, layer_norms={})
    assert finding.verdict == "norm-overflow"
    assert finding.culprits[0].token == 9


@pytest.mark.parametrize(
    ("reported", "reproduced"), [(1.0, True), (1.0005, True), (1.01, False), (0.0, False), (math.nan, False)]
)
def test_the_norm_must_match_within_the_tolerance(trainer, reported, reproduced):
    step = trainer.step(trainer.model())
    policy = step.policy()
    gradient = replay(policy, step.placed, coefficients_of(step.placed)).gradient
    found = fidelity_of(StepFacts(0, reported * gradient.norm), gradient, policy.grid)
    assert found.reproduced is reproduced


def test_one_layer_that_does_not_match_is_enough(trainer):
    step = trainer.step(trainer.model())
    policy = step.policy()
    gradient = replay(policy, step.placed, coefficients_of(step.placed)).gradient
    layers = {**gradient.layer_norms, "layers.1.mlp": 1.05 * gradient.layer_norms["layers.1.mlp"]}
    found = fidelity_of(StepFacts(0, gradient.norm, layers), gradient, policy.grid)
    assert not found.reproduced
    assert found.layer_rel_error_max == pytest.approx(0.05 / 1.05)


class TestHealthyReference:
    """What a healthy step's replay misses by is what this run's replays may miss by."""

    def off_by(self, trainer, rel_error, healthy, **changes):
        step = trainer.faulty(trainer.model(), trainer.stale(9.0))
        asked = []

        def healthy_error():
            asked.append(1)
            return healthy

        layers = {key: norm * (1 + rel_error * (key == "layers.1.mlp")) for key, norm in step.layer_norms.items()}
        facts = step.facts(grad_norm=(1 + rel_error) * step.grad_norm, layer_norms=layers, **changes)
        return localize(step.policy(), step.placed, facts, healthy_error=healthy_error), len(asked)

    def test_a_run_that_always_replays_a_little_off_is_believed(self, trainer):
        finding, num_asked = self.off_by(trainer, 0.02, healthy=0.01)
        assert finding.verdict == "token"
        assert finding.fidelity.reproduced
        assert finding.fidelity.tolerance == pytest.approx(0.04)
        assert (finding.fidelity.healthy_rel_error, num_asked) == (0.01, 1)

    @pytest.mark.parametrize("healthy", [None, 1e-7, math.nan])
    def test_one_whose_healthy_steps_match_is_not(self, trainer, healthy):
        finding, _ = self.off_by(trainer, 0.02, healthy)
        assert finding.verdict == "inconclusive"
        assert finding.fidelity.tolerance == pytest.approx(1e-3)

    def test_a_step_that_matches_asks_for_no_second_replay(self, trainer):
        finding, num_asked = self.off_by(trainer, 0.0, healthy=0.5)
        assert (finding.verdict, num_asked) == ("token", 0)

    @pytest.mark.parametrize(
        ("healthy", "verdict"), [(1e-6, "not-reproduced"), (0.3, "inconclusive"), (math.inf, "inconclusive")]
    )
    def test_the_machine_is_accused_only_where_healthy_steps_replay(self, trainer, healthy, verdict):
        step = trainer.faulty(trainer.model(), None)
        layers = {key: norm * (300 if key == "layers.1.mlp" else 2) for key, norm in step.layer_norms.items()}
        facts = step.facts(grad_norm=100 * step.grad_norm, layer_norms=layers)
        finding = localize(step.policy(), step.placed, facts, healthy_error=lambda: healthy)
        assert finding.verdict == verdict
        assert finding.fidelity.tolerance <= 0.1


class TestHeldBack:
    """A trainer's LayerClip held positions back: the norm it reports is healthy, the replay shows what was not."""

    def step(self, trainer, **changes):
        """A struck step and the facts of a trainer that held the culprit back."""
        step = trainer.faulty(trainer.model(tied=False), trainer.stale(9.0))
        policy, coefficients = step.policy(), coefficients_of(step.placed)
        healthy, hold = without_culprits(policy, step.placed, coefficients, [Place(2, 2, 3)])
        held, is_struck = hold.under({name: 6 * norm for name, norm in hold.entering_norms.items()})
        assert is_struck
        top = list(hold.entering_norms)[-1]
        facts = step.facts(grad_norm=held.norm, layer_norms=held.layer_norms, held_at=top)
        assert held.norm < 0.5 * step.grad_norm
        return step, replace(facts, **changes), healthy

    def test_the_culprit_is_found_and_proved_all_the_same(self, trainer):
        step, facts, healthy = self.step(trainer)
        finding = localize(step.policy(), step.placed, facts)
        (culprit,) = finding.culprits
        assert (finding.verdict, culprit.rank, culprit.sequence, culprit.token) == ("token", 1, 2, 9)
        assert finding.certificate.holds
        assert finding.certificate.norm_without == pytest.approx(healthy.norm, rel=1e-4)
        fidelity = finding.fidelity
        assert (fidelity.reproduced, fidelity.held_at) == (True, facts.held_at)
        assert fidelity.rel_error < 1e-4
        assert fidelity.reported_norm == facts.grad_norm
        assert fidelity.replayed_norm == pytest.approx(step.grad_norm, rel=1e-4)
        assert f"held to {facts.grad_norm:.4g} by LayerClip" in finding.summary

    def test_who_does_not_know_that_something_was_held_would_blame_the_replay(self, trainer):
        step, facts, _ = self.step(trainer, held_at=None)
        assert not localize(step.policy(), step.placed, facts).fidelity.reproduced

    def test_a_layer_above_that_does_not_match_is_noticed(self, trainer):
        step, facts, _ = self.step(trainer)
        wrong = {key: norm * (1.5 if key == "head" else 1.0) for key, norm in facts.layer_norms.items()}
        finding = localize(step.policy(), step.placed, replace(facts, layer_norms=wrong))
        assert not finding.fidelity.reproduced
        assert finding.verdict == "inconclusive"

    def test_where_nothing_above_can_be_compared_nothing_is_called_reproduced(self, trainer):
        step, facts, _ = self.step(trainer)
        blocks = {key: norm for key, norm in facts.layer_norms.items() if key.startswith("layers.")}
        finding = localize(step.policy(), step.placed, replace(facts, layer_norms=blocks))
        assert not finding.fidelity.reproduced
        assert finding.culprits[0].token == 9
