"""A token's exact share and norm from its own row, and where in the network it arises."""

import pytest
import torch

from gradloc.gradient_profile import profile_row
from gradloc.policy import cut
from gradloc.replay import coefficients_of, replay
from gradloc.verification import Place, exact_tokens


@pytest.mark.parametrize("padding", ["right", "left", "none"])
def test_exact_shares_and_norms_equal_the_oracle(trainer, padding):
    step = trainer.step(trainer.model(), padding=padding, fault=trainer.stale(5.0))
    shares, norms = trainer.oracle(step)
    coefficients = coefficients_of(step.placed)
    policy = step.policy()
    gradient = replay(policy, step.placed, coefficients).gradient
    places = [Place(2, 2, 3), Place(2, 2, 0), Place(0, 1, 4), Place(3, 0, 5), Place(2, 1, 1)]
    found = exact_tokens(policy, step.placed, coefficients, gradient, places)
    assert set(found) == set(places)
    for place in places:
        assert found[place].share == pytest.approx(float(shares[place.batch][place.row, place.column]), abs=2e-5)
        assert found[place].norm == pytest.approx(float(norms[place.batch][place.row, place.column]), rel=1e-3)


def test_a_token_without_a_coefficient_has_no_share(trainer):
    step = trainer.step(trainer.model())
    coefficients = coefficients_of(step.placed)
    coefficients[0][0, 2] = 0.0
    policy = step.policy()
    gradient = replay(policy, step.placed, coefficients).gradient
    (found,) = exact_tokens(policy, step.placed, coefficients, gradient, [Place(0, 0, 2)]).values()
    assert (found.share, found.norm) == (0.0, 0.0)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_profile_splits_the_exact_share_over_layers_and_positions(trainer, model_type, tied):
    step = trainer.step(trainer.model(model_type=model_type, tied=tied), fault=trainer.stale(5.0))
    coefficients = coefficients_of(step.placed)
    policy = step.policy()
    gradient = replay(policy, step.placed, coefficients).gradient
    place = Place(2, 2, 3)
    (exact,) = exact_tokens(policy, step.placed, coefficients, gradient, [place]).values()
    source = step.placed[2].batch
    row = cut(source, torch.tensor([2]), source.first_position + 4)
    coefficient_R = torch.zeros(4, dtype=torch.float64)
    coefficient_R[3] = coefficients[2][2, 3]
    profile = profile_row(policy, row, coefficient_R, gradient)
    assert float(profile.share_LT.sum()) == pytest.approx(exact.share, rel=1e-4)
    assert profile.layers[0] == "embedding"
    assert {"layers.0.attention", "layers.2.mlp", "layers.1.norm"} <= set(profile.layers)
    assert profile.residual_rms_KT.shape == (3, row.ids_BT.shape[1])
    # The token's logp is predicted one position earlier: nothing reaches its own position.
    assert float(profile.share_LT[:, -1].abs().max()) == 0.0
