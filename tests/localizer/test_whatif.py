"""Remedies change exactly the coefficients that they would have changed in training."""

import math

import pytest
import torch

from gradloc import whatif
from gradloc.clipping import LayerClip, SeqClip, TokenClip
from gradloc.clipping.applied import AppliedRemedies
from gradloc.held import without_culprits
from gradloc.layers import block_of, layer_key
from gradloc.policy import place
from gradloc.replay import coefficients_of, gradient_of, replay
from gradloc.snapshot import MicroBatch
from gradloc.verification import Place


def batches(ratio, coefficient=None, advantage=None, mask=None):
    """One row of tokens with these importance ratios."""
    ratio_BR = torch.tensor([ratio], dtype=torch.float64)
    coefficient_BR = ratio_BR.clone() if coefficient is None else torch.tensor([coefficient], dtype=torch.float64)
    num_tokens = ratio_BR.shape[1]
    batch = MicroBatch(
        ids_BT=torch.zeros(1, num_tokens + 1, dtype=torch.int64),
        mask_BR=torch.ones(1, num_tokens, dtype=torch.bool) if mask is None else torch.tensor([mask]),
        logp_BR=torch.full((1, num_tokens), -1.0, dtype=torch.float64),
        coefficient_BR=coefficient_BR,
        rollout_logp_BR=-1.0 - ratio_BR.log(),
        advantage_BR=None if advantage is None else torch.tensor([advantage]),
    )
    return place([([batch], 0.5)])


def under(change, placed):
    return change.apply(placed, coefficients_of(placed))


def test_token_clip_leaves_out_tokens_outside_its_bounds():
    (changed,) = under(whatif.token_clip(), batches([1.0, 2e5, 0.01, 4.9]))
    assert changed.tolist()[0] == pytest.approx([0.5, 0.0, 0.0, 2.45])


def test_token_clip_may_lower_the_weight_of_those_above_instead():
    change = whatif.token_clip(0.5, 5.0, "clip")
    assert change.name == "TokenClip [0.5, 5], clip"
    (changed,) = under(change, batches([1.0, 2e5, 0.01, 5.0]))
    assert changed.tolist()[0] == pytest.approx([0.5, 2.5, 0.005, 2.5])


@pytest.mark.parametrize("coefficient", [math.inf, math.nan])
def test_a_ratio_beyond_floats_loses_its_token(coefficient):
    (changed,) = under(whatif.token_clip(), batches([1.0, math.inf], coefficient=[1.0, coefficient]))
    assert changed.tolist() == [[0.5, 0.0]]


def test_sequence_clip_drops_rows_whose_tokens_add_up():
    placed = (*batches([1.3] * 100), *batches([1.1] * 100))
    dropped, kept = under(whatif.seq_clip(), placed)
    assert float(dropped.abs().max()) == 0.0
    assert torch.equal(kept, coefficients_of(placed)[1])


def test_masked_tokens_do_not_count_in_the_sequence():
    placed = batches([1.0, 50.0, math.nan], coefficient=[1.0, 0.0, 0.0], mask=[True, False, False])
    (kept,) = under(whatif.seq_clip(), placed)
    assert kept.tolist() == [[0.5, 0.0, 0.0]]


def test_advantage_clip_scales_with_the_advantage():
    placed = batches([1.0, 1.0, 1.0], advantage=[1.0, -50.0, 0.0])
    (changed,) = under(whatif.advantage_clip(5.0), placed)
    assert changed.tolist()[0] == pytest.approx([0.5, 0.05, 0.5])


@pytest.mark.parametrize("remedy", [whatif.token_clip, whatif.seq_clip])
def test_without_rollout_logps_a_ratio_cannot_be_clipped(remedy):
    batch = MicroBatch(
        torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 1).bool(), torch.zeros(1, 1), torch.ones(1, 1)
    )
    placed = place([([batch], 1.0)])
    assert under(remedy(), placed) is None
    assert under(whatif.advantage_clip(), placed) is None


def gradient(**values):
    return gradient_of({name.replace("_", "."): torch.tensor([value]) for name, value in values.items()})


def test_layer_clip_brings_what_explodes_below_its_healthy_norm_and_leaves_the_rest():
    change = whatif.layer_clip({"layers.0.mlp": 3.0, "layers.0.norm": 4.0, "head": 1.0, "other": 0.0})
    found = change.apply(gradient(layers_0_mlp=300.0, layers_0_norm=400.0, x_head=1.9, unknown=7.0))
    # power 2: a block at 100 times its healthy norm keeps a hundredth of that
    assert found.layer_norms["layers.0.mlp"] == pytest.approx(0.03)
    assert found.layer_norms["layers.0.norm"] == pytest.approx(0.04)
    assert (found.layer_norms["head"], found.layer_norms["other"]) == pytest.approx((1.9, 7.0))


def test_beside_an_explosion_a_layer_above_twice_its_healthy_norm_is_scaled_too():
    change = whatif.layer_clip({"layers.0.mlp": 1.0, "layers.1.mlp": 1.0, "head": 1.0})
    found = change.apply(gradient(layers_0_mlp=3.0, layers_1_mlp=100.0, x_head=1.9))
    assert found.layer_norms["layers.0.mlp"] == pytest.approx(1 / 3)
    assert found.layer_norms["head"] == pytest.approx(1.9)
    calm = gradient(layers_0_mlp=3.0, layers_1_mlp=1.0, x_head=1.9)
    assert change.apply(calm).layer_norms["layers.0.mlp"] == pytest.approx(3.0)
    assert change.apply(calm, True).layer_norms["layers.0.mlp"] == pytest.approx(1 / 3)  # something was held back


def test_a_layer_that_is_not_finite_gets_no_gradient():
    change = whatif.layer_clip({"layers.0.mlp": 3.0})
    found = change.apply(gradient(layers_0_mlp=math.nan, layers_1_mlp=2.0))
    assert found.norm == 2.0


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, 1.0), (50.0, 5.0), (5.0, 5.0)])
def test_the_norm_is_clipped_to_its_limit_and_never_raised(max_norm, expected):
    found = whatif.norm_clip(max_norm).apply(gradient(layers_0_mlp=3.0, layers_1_mlp=4.0))
    assert found.norm == pytest.approx(expected)


def test_a_norm_that_is_not_finite_stays_so_under_norm_clipping():
    assert math.isnan(whatif.norm_clip(1.0).apply(gradient(layers_0_mlp=math.nan)).norm)


def test_cosines_are_of_directions_and_unknown_where_there_is_none():
    one, other = gradient(a=3.0, b=4.0), gradient(a=4.0, b=-3.0)
    assert whatif.cosine(one, one) == pytest.approx(1.0)
    assert whatif.cosine(one, other) == pytest.approx(0.0)
    assert whatif.cosine(one, None) is None
    assert whatif.cosine(one, gradient(a=0.0, b=0.0)) is None
    assert whatif.cosine(gradient(a=math.inf, b=1.0), one) is None


class TestForetold:
    """What is foretold is what a real step with the remedy gives, for each remedy, in float32."""

    def real(self, trainer, fault, remedies=(), healthy=None, hook=None, after=None, entering=None):
        """Norm of a real step of a loop: `remedies` switched on, `hook(batch)` changes dL/dlogp, `after(model)` the
        gradients."""
        step = trainer.faulty(trainer.model(), fault)
        model, factor = step.model, step.grad_factor
        errors = []
        applied = AppliedRemedies(list(remedies), model, model, lambda: 1.0, errors.append)
        applied.start()
        for remedy in remedies if healthy is not None else ():
            remedy.load_state_dict(history_of(remedy, healthy, entering or {}))
        model.zero_grad()
        for placed in step.placed:
            batch = placed.batch
            logp_BR = step.policy().log_probs(batch, to_the_end=True)
            applied.before_backward(logp_BR, batch.mask_BR, batch.rollout_logp_BR)
            if hook is not None:
                logp_BR.register_hook(hook(placed))
            (batch.coefficient_BR * factor * logp_BR).sum().backward()
        went_in = applied.entering()
        applied.after_agreement(layer_norms_of(model), {}, {name: int(number) for name, (_, number) in went_in.items()})
        applied.close()
        assert not errors
        if after is not None:
            after(model)
        norm = math.sqrt(sum(norm**2 for norm in layer_norms_of(model).values()))
        model.zero_grad()
        return norm

    def foretold(self, trainer, change, fault, culprits=()):
        step = trainer.faulty(trainer.model(), fault)
        policy, coefficients = step.policy(), coefficients_of(step.placed)
        healthy, hold = without_culprits(policy, step.placed, coefficients, culprits) if culprits else (None, None)

        def replayed(others):
            return replay(policy, step.placed, others).gradient

        return whatif.foretell(change, step.placed, coefficients, replayed(coefficients), replayed, healthy, hold)

    def as_it_is(self, trainer, fault):
        return self.foretold(trainer, whatif.norm_clip(1e30), fault).norm

    @pytest.mark.parametrize("columns", [[3], list(range(12))], ids=["a token", "a sequence"])
    def test_dropped_tokens(self, trainer, columns):
        fault = trainer.stale(9.0)
        told = self.foretold(trainer, whatif.leave_out([(2, 2, column) for column in columns]), fault)

        def hook(placed):
            factor_BR = torch.ones_like(placed.batch.logp_BR)
            if (placed.rank, placed.index) == (1, 0):
                factor_BR[2, columns] = 0.0
            return lambda grad_BR: grad_BR * factor_BR

        assert told.norm == pytest.approx(self.real(trainer, fault, hook=hook), rel=1e-3)
        assert told.norm < 0.2 * self.as_it_is(trainer, fault)

    @pytest.mark.parametrize("mode", ["mask", "clip"])
    def test_token_clip(self, trainer, mode):
        fault = trainer.stale(9.0)
        told = self.foretold(trainer, whatif.token_clip(mode=mode), fault)
        assert told.norm == pytest.approx(self.real(trainer, fault, [TokenClip(mode=mode)]), rel=1e-3)
        assert told.norm < 0.2 * self.as_it_is(trainer, fault)
        assert told.num_changed == 1

    @pytest.mark.parametrize("mean", ["both", "geometric", "arithmetic", "product"])
    def test_seq_clip(self, trainer, mean):
        def fault(inputs):  # 0 for the geometric mean, 3.6 for the arithmetic one; and a row off as a whole
            inputs[1][0]["log_ratio"][2, :2] = torch.tensor([3.0, -3.0])
            inputs[0][1]["log_ratio"][1] = 1.5

        told = self.foretold(trainer, whatif.seq_clip(mean=mean), fault)
        assert told.norm == pytest.approx(self.real(trainer, fault, [SeqClip(mean=mean)]), rel=1e-3)
        assert told.norm != pytest.approx(self.as_it_is(trainer, fault), rel=5e-3)

    def test_layer_clip(self, trainer):
        healthy = trainer.faulty(trainer.model(), None).layer_norms
        fault = trainer.stale(9.0)
        told = self.foretold(trainer, whatif.layer_clip(healthy), fault)
        assert told.norm == pytest.approx(self.real(trainer, fault, [LayerClip()], healthy), rel=1e-3)

    def test_layer_clip_with_positions_held_back(self, trainer):
        """Where it is known what enters the layers without the culprit, blocks get what they would have got then."""
        fault, culprit = trainer.stale(9.0), Place(2, 2, 3)
        step = trainer.faulty(trainer.model(), fault)
        healthy, hold = without_culprits(step.policy(), step.placed, coefficients_of(step.placed), [culprit])
        told = self.foretold(trainer, whatif.layer_clip(healthy.layer_norms), fault, [culprit])
        clip = LayerClip()
        real = self.real(trainer, fault, [clip], healthy.layer_norms, entering=hold.entering_norms)
        assert clip.last[0].num_positions > 0
        assert told.norm == pytest.approx(real, rel=1e-3)
        scaled = self.foretold(trainer, whatif.layer_clip(healthy.layer_norms), fault)
        assert told.cosine is not None
        blocks = [key for key in healthy.layer_norms if key.startswith("layers.")]
        assert blocks
        for key in blocks:
            assert told.layer_norms[key] == pytest.approx(healthy.layer_norms[key], rel=0.3)
            assert scaled.layer_norms[key] < 0.3 * healthy.layer_norms[key]

    def test_a_clipped_norm(self, trainer):
        fault = trainer.stale(9.0)
        told = self.foretold(trainer, whatif.norm_clip(0.25), fault)
        clip = self.real(trainer, fault, after=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25))
        assert told.norm == pytest.approx(clip, rel=1e-3)

    def test_clipped_advantages(self, trainer):
        """The loss computed anew with the advantage that is left."""
        told = self.foretold(trainer, whatif.advantage_clip(5.0), trainer.advantage(-50.0))
        again = trainer.faulty(trainer.model(), trainer.advantage(-5.0))
        assert told.norm == pytest.approx(again.grad_norm, rel=1e-3)
        assert told.norm < 0.2 * self.as_it_is(trainer, trainer.advantage(-50.0))

    def test_a_mask_that_holds(self, trainer):
        """The loss computed anew with the mask applied to its second term too."""
        beyond = trainer.together(trainer.extra(300.0), unmask)
        told = self.foretold(trainer, whatif.inside_mask(), beyond)
        again = trainer.faulty(trainer.model(), unmask)
        assert told.norm == pytest.approx(again.grad_norm, rel=1e-3)
        assert told.norm < 0.2 * self.as_it_is(trainer, beyond)

    @pytest.mark.parametrize("log_ratio", [9.0, 89.0], ids=["large", "not finite"])
    def test_a_skipped_update(self, trainer, log_ratio):
        fault = trainer.stale(log_ratio)
        told = self.foretold(trainer, whatif.skip_above(1.0), fault)

        def skip(model):
            for parameter in model.parameters():
                parameter.grad = None

        assert told.norm == self.real(trainer, fault, after=skip) == 0.0
        calm = self.foretold(trainer, whatif.skip_above(1e9), trainer.stale(2.0))
        assert calm.norm == self.as_it_is(trainer, trainer.stale(2.0))


def unmask(inputs):
    inputs[1][0]["mask"][2, 3] = False


def layer_norms_of(model):
    squares = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            key = layer_key(name)
            squares[key] = squares.get(key, 0.0) + float(parameter.grad.double().square().sum())
    return {key: math.sqrt(square) for key, square in squares.items()}


def history_of(remedy, healthy, entering):
    """State of a LayerClip that saw steps just as healthy, with a largest that does not raise the limit."""
    squares = {}
    for key, norm in healthy.items():
        squares[block_of(key)] = squares.get(block_of(key), 0.0) + norm**2
    state = remedy.state_dict()
    window = remedy.settings.window

    def filled(part, usual):
        known = [name for name in part["names"] if name in usual]
        accepted = [[usual.get(name)] * window for name in part["names"]]
        return part | {"accepted": accepted, "num_accepted": [window * (name in known) for name in part["names"]]}

    usual = {name: math.sqrt(square) for name, square in squares.items()}
    return filled(state, usual) | {"entering": filled(state["entering"], entering)}


def test_rows_without_anything_before_their_first_logp_are_refused():
    batch = MicroBatch(
        torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2).bool(), torch.zeros(1, 2), torch.ones(1, 2)
    )
    with pytest.raises(ValueError, match="nothing predicts the first"):
        place([([batch], 1.0)])
