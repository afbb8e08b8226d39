"""The seed's type B: where the residual stream nearly cancels, the layers below explode and those above stay calm."""

import pytest

from gradloc.localization import localize


@pytest.fixture(scope="module")
def struck(trainer, cancel):
    """Steps (seeds 1 and 3 of the trainer) in which a tool's token cancels the stream after the second block."""
    steps = {}
    for seed, row in ((1, 2), (3, 0)):
        model = trainer.model(seed, num_layers=6, hidden_size=64, tied=False)
        shape = {"seed": seed + 5, "num_micro_batches": 3}
        healthy = trainer.step(model, **shape)
        cancel(model, healthy.ranks[1][1].ids_BT[row, :9], token_id=1)

        def tool_token(inputs, row=row):
            inputs[1][1]["ids"][row, 9] = 1

        step = trainer.step(model, fault=tool_token, **shape)
        step.healthy_norm = healthy.grad_norm
        step.healthy_layer_norms = healthy.layer_norms
        step.limit = 4 * healthy.grad_norm
        assert step.grad_norm > 8 * healthy.grad_norm, "the planted fault has no effect; choose another seed"
        steps[seed] = (step, row, trainer.oracle(step)[0])
    return steps


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
@pytest.mark.parametrize("seed", [1, 3])
def test_layers_below_the_cancellation_are_named(struck, strategy, seed):
    step, row, shares = struck[seed]
    finding = localize(step.policy(), step.placed, step.facts(), strategy=strategy)
    leading = finding.culprits[0]
    assert finding.verdict == "layer"
    assert (leading.rank, leading.micro_batch, leading.sequence) == (1, 1, row)
    assert leading.token == 6 + int(shares[4][row].argmax())
    assert set(finding.layers_exploding) == {"embedding", "layers.0", "layers.1"}
    assert {"attention", "mlp", "norm"} <= set(finding.module_kinds_exploding)
    assert leading.layer.startswith(("layers.0", "layers.1"))
    assert max(value for key, value in finding.layer_growth.items() if key.startswith(("layers.4", "layers.5"))) < 2
    assert finding.certificate.holds
    assert finding.certificate.norm_without <= finding.certificate.limit


@pytest.mark.parametrize("seed", [1, 3])
def test_the_cause_rests_on_the_residual_streams_size(struck, seed):
    step, _, _ = struck[seed]
    finding = localize(step.policy(), step.placed, step.facts())
    cause = finding.causes[0]
    assert (cause.name, cause.confidence) == ("layer-heterogeneity", "high")
    assert cause.evidence["residual_block"] == "layers.1"
    assert cause.evidence["residual_rms_ratio"] < 0.01
    profile = finding.profile
    assert profile.residual_rms[1] < 0.01 * profile.residual_rms_median[1]
    by_position = [sum(abs(row[t]) for row in profile.values) for t in range(len(profile.values[0]))]
    assert profile.first_position + by_position.index(max(by_position)) == 9  # where the tool's token stands
    assert finding.fix.name.startswith("LayerClip")
    assert finding.fix.holds


def test_layers_over_their_limit_are_explained_although_the_norm_is_not(struck):
    """A layer's spike under a calm global norm: the search looks at the exploding layers alone."""
    step, row, _ = struck[1]
    finding = localize(step.policy(), step.placed, step.facts(limit=10 * step.grad_norm))
    assert finding.culprits[0].sequence == row
    assert finding.certificate.holds
    assert finding.certificate.grad_norm < step.grad_norm


def test_all_layers_alike_is_not_a_layers_fault(trainer):
    step = trainer.faulty(trainer.model(), trainer.extra(3000.0))
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.verdict == "token"
    assert "layer-heterogeneity" not in {cause.name for cause in finding.causes}
