"""Where finite differences fail, exact derivatives step in."""

from gradloc.attribution import attribute
from gradloc.replay import coefficients_of, replay


def test_where_no_eps_is_sound_exact_derivatives_are(trainer, cancel):
    """Behind a residual stream that nearly cancels, the logp bends within any eps that rounding allows."""
    model = trainer.model(0, num_layers=6, hidden_size=64, tied=False)
    shape = {"seed": 5, "num_micro_batches": 3}
    calm = trainer.step(model, **shape)
    cancel(model, calm.ranks[1][1].ids_BT[2, :9], token_id=1)

    def tool_token(inputs):
        inputs[1][1]["ids"][2, 9] = 1

    step = trainer.step(model, fault=tool_token, **shape)
    shares, _ = trainer.oracle(step)
    policy = step.policy()
    coefficients = coefficients_of(step.placed)
    replayed = replay(policy, step.placed, coefficients)
    found = attribute(policy, step.placed, coefficients, replayed.gradient, replayed.logp)
    assert found.eps == 0.0
    assert abs(found.checksum - 1) <= 1e-4
    differences = [float((one - other).abs().max()) for one, other in zip(found.shares, shares, strict=True)]
    assert max(differences) <= 1e-3
