"""Shares from two forward passes equal the shares of a brute-force oracle, and leave nothing behind."""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradloc.attribution import attribute
from gradloc.perturbation import Perturbation, stochastic_round
from gradloc.policy import Meter, Policy, place
from gradloc.replay import coefficients_of, replay


def attributed(step, policy=None):
    policy = step.policy() if policy is None else policy
    coefficients = coefficients_of(step.placed)
    replayed = replay(policy, step.placed, coefficients)
    return replayed, attribute(policy, step.placed, coefficients, replayed.gradient, replayed.logp)


def furthest(shares, expected):
    return max(float((one - other).abs().max()) for one, other in zip(shares, expected, strict=True))


@pytest.mark.parametrize("fault", ["none", "spike", "outside-mask"])
@pytest.mark.parametrize("padding", ["right", "left", "none"])
def test_shares_equal_the_oracle(trainer, fault, padding):
    faults = {"none": None, "spike": trainer.stale(6.0), "outside-mask": trainer.extra(40.0, row=1, column=11)}
    step = trainer.step(trainer.model(), padding=padding, fault=faults[fault])
    shares, _ = trainer.oracle(step)
    replayed, found = attributed(step)
    assert replayed.gradient.norm == pytest.approx(step.grad_norm, rel=1e-6)
    assert furthest(found.shares, shares) <= 1e-3
    assert abs(found.checksum - 1) <= 1e-3


@pytest.mark.parametrize(("model_type", "tied"), [("qwen3", False), ("llama", True), ("gpt2", True)])
def test_shares_equal_the_oracle_in_other_architectures(trainer, model_type, tied):
    step = trainer.step(trainer.model(model_type=model_type, tied=tied), fault=trainer.stale(5.0))
    shares, _ = trainer.oracle(step)
    _, found = attributed(step)
    assert furthest(found.shares, shares) <= 2e-3
    assert abs(found.checksum - 1) <= 2e-3


def test_temperature_belongs_to_the_logp(trainer):
    step = trainer.step(trainer.model(), temperature=0.6, fault=trainer.stale(5.0))
    shares, _ = trainer.oracle(step)
    replayed, found = attributed(step)
    assert replayed.gradient.norm == pytest.approx(step.grad_norm, rel=1e-6)
    assert furthest(found.shares, shares) <= 1e-3


@pytest.mark.parametrize("size", [3e1, 3e3, 3e6, 3e10])
def test_eps_adapts_to_any_size_of_gradient(trainer, size):
    step = trainer.step(trainer.model(), fault=trainer.extra(size))
    _, found = attributed(step)
    assert found.is_sound
    assert abs(found.checksum - 1) <= 1e-3


def test_parameters_gradients_and_random_state_are_restored_bit_for_bit(trainer):
    step = trainer.step(trainer.model(), fault=trainer.stale(6.0))
    step.model.get_input_embeddings().weight.grad = torch.full((trainer.vocabulary, 32), 7.0)
    before = copy.deepcopy(step.model.state_dict())
    random_state = torch.get_rng_state()
    attributed(step)
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert bool((step.model.get_input_embeddings().weight.grad == 7.0).all())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_parameters_are_restored_when_the_forward_pass_fails(trainer):
    model = trainer.model()
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    direction = {name: torch.ones_like(p) for name, p in parameters.items()}
    perturbation = Perturbation(parameters, direction, 1.0, torch.float32)
    with pytest.raises(ZeroDivisionError), perturbation.moved(0.1):
        assert not torch.equal(model.state_dict()["model.norm.weight"], before["model.norm.weight"])
        raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("change", [0.0, math.nan, math.inf])
def test_a_gradient_without_a_direction_is_refused(trainer, change):
    step = trainer.step(trainer.model())
    coefficients = [coefficient * 0 + change for coefficient in coefficients_of(step.placed)]
    policy = step.policy()
    replayed = replay(policy, step.placed, coefficients)
    with pytest.raises(ValueError, match="no meaning"):
        attribute(policy, step.placed, coefficients, replayed.gradient, replayed.logp)


def test_bfloat16_finds_the_token_although_small_moves_round_away(trainer):
    step = trainer.step(trainer.model(dtype=torch.bfloat16), fault=trainer.stale(7.0))
    _, found = attributed(step)
    assert abs(found.checksum - 1) <= 0.15
    leader = max(range(4), key=lambda index: float(found.shares[index].max()))
    assert divmod(int(found.shares[leader].argmax()), 12) == (2, 3)
    assert leader == 2


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=st.integers(1, 3), order=st.permutations(range(4)), seed=st.integers(0, 3))
def test_shares_do_not_depend_on_how_rows_are_spread(trainer, split, order, seed):
    """Splitting a micro-batch over ranks and permuting its rows permutes the shares and changes nothing else."""
    step = trainer.step(trainer.model(seed), seed=seed, num_ranks=1, num_micro_batches=1, fault=None)
    (whole,) = step.ranks[0]
    _, found = attributed(step)

    from gradloc.policy import cut

    rows = torch.tensor(order)
    parts = [cut(whole, piece, whole.ids_BT.shape[1]) for piece in (rows[:split], rows[split:])]
    spread = place([([part], 1.0) for part in parts])
    policy = Policy(step.model, Meter(1))
    coefficients = coefficients_of(spread)
    replayed = replay(policy, spread, coefficients)
    again = attribute(policy, spread, coefficients, replayed.gradient, replayed.logp)
    assert replayed.gradient.norm == pytest.approx(step.grad_norm, rel=1e-5)
    assert furthest([torch.cat(again.shares)], [found.shares[0][rows]]) <= 1e-3
    assert abs(again.checksum - 1) <= 2e-3


@settings(max_examples=20, deadline=None)
@given(
    value=st.floats(-100, 100, allow_nan=False, allow_subnormal=False),
    grid=st.sampled_from([torch.bfloat16, torch.float32]),
)
@example(value=-2.00390625, grid=torch.bfloat16)
def test_stochastic_rounding_keeps_the_mean_and_stays_between_neighbours(value, grid):
    values = torch.full((20_000,), value, dtype=torch.float64)
    rounded = stochastic_round(values, grid, torch.Generator().manual_seed(0)).double()
    nearest = values[0].to(grid)
    # At a power of two the two neighbours are not equally far.
    neighbours = [torch.nextafter(nearest, torch.tensor(end, dtype=grid)) for end in (-torch.inf, torch.inf)]
    ulp = max(float((neighbour.double() - nearest.double()).abs()) for neighbour in neighbours)
    assert len(set(rounded.tolist())) <= 2
    assert float((rounded - values).abs().max()) <= ulp
    assert abs(float(rounded.mean()) - value) <= 0.02 * ulp


def test_what_the_grid_can_hold_is_not_rounded():
    values = torch.tensor([0.0, 1.0, -2.5, torch.inf, -torch.inf], dtype=torch.float64)
    for grid in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert torch.equal(stochastic_round(values, grid, torch.Generator().manual_seed(0)).double(), values)
