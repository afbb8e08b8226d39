"""LayerClip between blocks: a position that explodes sends nothing further down, and nobody else notices."""

import copy
import json
import logging
import math
import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradloc
from gradloc.clipping import LayerClip, TokenClip
from gradloc.clipping.stream import ResidualStream, boundaries_of, is_below
from gradloc_proto import codec, rules, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import StepObserved

RUN, ROWS, LENGTH, WIDTH = "held", 3, 6, 8
Place = tuple[int, int]


class Amplify(torch.autograd.Function):
    """The stream as it is; on the way back some positions' gradients times a factor: a norm over a tiny stream."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, places: dict[Place, float]) -> torch.Tensor:
        ctx.places = places
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        for place, factor in ctx.places.items():
            grad[place] = grad[place] * factor
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.amplified: dict[Place, float] = {}
        self.left: dict[Place, float] = {}  # of the stream

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        entered = Amplify.apply(hidden, self.amplified)
        mixed = torch.cumsum(entered, dim=1) / LENGTH  # positions see those before them
        leaving = entered + torch.tanh(self.mlp(mixed))
        if self.left:
            part = torch.ones_like(leaving[..., :1])
            for place, fraction in self.left.items():
                part[place] = fraction
            leaving = leaving * part
        return (leaving,)


class Language(nn.Module):
    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)
        self.checkpointing = checkpointing  # None, or use_reentrant

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids_BT)
        for layer in self.layers:
            if self.checkpointing is None:
                (hidden,) = layer(hidden)
            else:
                (hidden,) = checkpoint(layer, hidden, use_reentrant=self.checkpointing)  # type: ignore[no-untyped-call]
        logits = self.lm_head(hidden)[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]


@dataclass
class Loop:
    """Training of a model that does not move, so that steps with the same number are the same."""

    model: Language
    clip: LayerClip
    scale: float = 1.0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bus = MemoryBus()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.probe = gradloc.watch(
            self.model, self.optimizer, run=RUN, bus=self.bus, remedies=[self.clip], **self.arguments
        )

    def backward(self, number: int, *, num_micro_batches: int = 1) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(num_micro_batches):
            ids_BT = torch.randint(0, 11, (ROWS, LENGTH), generator=generator)
            weight_BR = torch.randn(ROWS, LENGTH - 1, generator=generator)
            logp_BR = self.model(ids_BT)
            self.probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR))
            (self.scale * weight_BR * logp_BR).mean().backward()

    def step(self, number: int) -> str:
        self.backward(number)
        decision = self.probe.observe()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return decision

    def warm_up(self) -> None:
        for number in range(12):
            self.step(number)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def told(self) -> list[StepObserved]:
        self.probe.close()
        entries = self.bus.read_last(streams.stream(RUN, "steps"), count=1_000)
        return [m for m in (codec.decode(entry.data) for entry in entries) if isinstance(m, StepObserved)]


def struck(loop: Loop, places: dict[Place, float], number: int = 50, **arguments: Any) -> dict[str, torch.Tensor]:
    """Gradients of a step whose second block amplifies what it sends down at some places."""
    loop.model.layers[1].amplified = places  # type: ignore[assignment]
    loop.model.zero_grad()
    loop.backward(number, **arguments)
    loop.model.layers[1].amplified = {}  # type: ignore[assignment]
    return loop.gradients()


@pytest.fixture
def loop() -> Loop:
    made = Loop(Language(), LayerClip())
    made.warm_up()
    return made


@pytest.mark.parametrize("factor", [1e3, 1e12, 1e30, math.inf, math.nan])
def test_an_exploding_position_sends_nothing_down_and_all_others_what_they_would_have(
    loop: Loop, factor: float
) -> None:
    found = struck(loop, {(1, 2): factor})
    expected = struck(loop, {(1, 2): 0.0})
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    plain = copy.deepcopy(loop.model)  # carries the hooks, and is not held by them
    plain.layers[1].amplified = {(1, 2): 1e3}  # type: ignore[assignment]
    plain.zero_grad()
    generator = torch.Generator().manual_seed(50)
    ids_BT = torch.randint(0, 11, (ROWS, LENGTH), generator=generator)
    (torch.randn(ROWS, LENGTH - 1, generator=generator) * plain(ids_BT)).mean().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        above = "layers.1" in name or "layers.2" in name or "head" in name
        assert torch.equal(parameter.grad, found[name]) == above, name
    exploded = plain.layers[0].mlp.weight.grad  # type: ignore[union-attr]
    assert exploded is not None
    assert float(exploded.norm()) > 20 * float(found["layers.0.mlp.weight"].norm())  # type: ignore[arg-type]


def test_what_was_held_back_is_told_and_counted_and_asks_for_an_explanation(loop: Loop, tmp_path: Any) -> None:
    limit = loop.clip.entering_limits()["layers.0"]
    struck(loop, {(1, 2): 1e4, (0, 3): 1e4})
    loop.probe.observe()
    (action,) = loop.clip.last
    assert (action.name, action.num_positions, action.limit, action.scale) == ("layers.0", 2, limit, 0.0)
    assert action.norm > 100 * limit
    assert loop.clip.changed == ("embedding", "layers.0")
    step = loop.told()[-1]
    assert step.layers_remedied == pytest.approx(2 / 5)
    assert step.rules_hit == (rules.HELD,)
    assert loop.clip.num_acted == 2


def test_a_held_step_is_kept_with_the_layer_that_was_entered(tmp_path: Any) -> None:
    loop = Loop(Language(), LayerClip(), arguments={"store": tmp_path.as_uri(), "reference_after": None})
    loop.warm_up()
    struck(loop, {(1, 2): 1e4})
    assert loop.probe.observe() == "snapshot"
    loop.probe.close()
    (manifest,) = tmp_path.rglob("manifest.json")
    document = json.loads(manifest.read_text())
    assert document["held_at"] == "layers.0"
    assert document["rank_norms"] == []


@given(st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=3), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_what_is_not_above_any_limit_is_the_same_to_the_bit(powers: list[float], num_micro_batches: int) -> None:
    with_clip, without = Loop(Language(), LayerClip()), Loop(Language(), LayerClip(positions=False))
    without.model.load_state_dict(with_clip.model.state_dict())
    with_clip.warm_up()
    limit = with_clip.clip.entering_limits()["layers.0"]
    places = {(0, at): 2.0**power for at, power in enumerate(powers)}
    found = struck(with_clip, places, num_micro_batches=num_micro_batches)
    expected = struck(without, places, num_micro_batches=num_micro_batches)
    with_clip.probe.observe()
    held = [one for one in with_clip.clip.last if one.num_positions]
    if not held:
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())
    else:
        assert held[0].norm > limit


def test_nothing_is_held_back_before_enough_steps_were_seen() -> None:
    loop = Loop(Language(), LayerClip())
    for number in range(7):
        loop.step(number)
    found, expected = struck(loop, {(1, 2): 1e9}), struck(loop, {(1, 2): 1e9})
    assert float(found["layers.0.mlp.weight"].norm()) > 1e3  # type: ignore[arg-type]
    assert torch.equal(found["layers.0.mlp.weight"], expected["layers.0.mlp.weight"])
    assert loop.clip.entering_limits() == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_hold_back_the_same(loop: Loop, reentrant: bool) -> None:
    model = Language(checkpointing=reentrant)
    model.load_state_dict(loop.model.state_dict())
    again = Loop(model, LayerClip())
    # A reentrant checkpoint gives gradients only to what entered with a gradient; the embedding's output does.
    again.warm_up()
    assert again.clip.entering_limits() == pytest.approx(loop.clip.entering_limits())
    found, expected = struck(again, {(1, 2): 1e6}), struck(loop, {(1, 2): 1e6})
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-9), name
    for one in (again, loop):
        one.probe.observe()
        assert one.clip.last[0].num_positions == 1


def test_limits_are_in_units_of_the_step_whatever_the_loss_is_scaled_by(loop: Loop) -> None:
    class Scaler:
        value = 1_024.0

        def get_scale(self) -> float:
            return self.value

    scaler = Scaler()
    scaled = Loop(Language(), LayerClip(), scale=scaler.value, arguments={"scaler": scaler})
    scaled.model.load_state_dict(loop.model.state_dict())
    for number in range(12):
        scaled.backward(number)
        for parameter in scaled.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scaler.value
        scaled.probe.observe()
        scaled.model.zero_grad()
        scaler.value = scaled.scale = scaler.value * 2  # it grows while training goes on
    assert scaled.clip.entering_limits() == pytest.approx(loop.clip.entering_limits(), rel=1e-4)


def test_the_history_of_what_enters_survives_a_restart(loop: Loop) -> None:
    state = json.loads(json.dumps(loop.clip.state_dict()))
    again = LayerClip()
    again.load_state_dict(state)
    resumed = Loop(Language(), again)
    assert again.entering_limits() == loop.clip.entering_limits() != {}
    resumed.model.load_state_dict(loop.model.state_dict())
    found, expected = struck(resumed, {(1, 2): 1e6}), struck(loop, {(1, 2): 0.0})
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_a_state_of_before_is_taken_and_what_enters_learned_anew(loop: Loop) -> None:
    state = {name: value for name, value in loop.clip.state_dict().items() if name != "entering"}
    again = LayerClip()
    Loop(Language(), again)
    again.load_state_dict(state)
    assert again.limits() == loop.clip.limits()
    assert again.entering_limits() == {}


def test_positions_false_hooks_nothing() -> None:
    loop = Loop(Language(), LayerClip(positions=False))
    loop.warm_up()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loop.model.layers)
    assert loop.clip.entering_limits() == {}
    assert float(struck(loop, {(1, 2): 1e6})["layers.0.mlp.weight"].norm()) > 1e2  # type: ignore[arg-type]
    loop.probe.observe()
    assert {one.num_positions for one in loop.clip.last} == {0}


def test_a_level_that_lasts_becomes_the_history(loop: Loop) -> None:
    for _ in range(12):
        struck(loop, {(1, 2): 1e4})
        loop.probe.observe()
        assert loop.clip.last[0].num_positions == 1
    struck(loop, {(1, 2): 1e4})
    loop.probe.observe()
    assert [one.name for one in loop.clip.last if one.num_positions] == []


def test_gradlocs_own_backward_passes_are_none_of_the_steps(loop: Loop) -> None:
    with loop.clip.suspended():
        found = struck(loop, {(1, 2): 1e6})
    assert float(found["layers.0.mlp.weight"].norm()) > 1e2  # type: ignore[arg-type]
    before = loop.clip.entering_limits()
    loop.model.zero_grad()
    loop.step(0)
    assert loop.clip.entering_limits() == pytest.approx(before, rel=0.5)


def test_a_failure_in_the_backward_pass_changes_nothing_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADLOC_STRICT", "0")

    class Broken:
        def get_scale(self) -> float:
            raise RuntimeError("no scale")

    loop = Loop(Language(), LayerClip(), arguments={"scaler": Broken()})
    with caplog.at_level(logging.WARNING, "gradloc"):
        found = struck(loop, {})
        loop.backward(51)
    assert found["layers.0.mlp.weight"].isfinite().all()
    assert sum("backward failed" in record.getMessage() for record in caplog.records) == 1


def test_a_frozen_or_evaluated_model_is_left_alone(loop: Loop) -> None:
    with torch.no_grad():
        loop.model(torch.zeros(1, LENGTH, dtype=torch.int64))
    loop.model.embed_tokens.requires_grad_(False)
    loop.model.layers[0].requires_grad_(False)
    loop.model.zero_grad()
    loop.backward(50)
    loop.probe.observe()
    assert loop.clip.last == ()


def test_boundaries_are_named_after_the_layers_that_are_entered() -> None:
    assert boundaries_of(Language()) == ("layers.0", "layers.1", "layers.2")
    assert boundaries_of(nn.Linear(2, 2)) == ()
    stream = ResidualStream(nn.Linear(2, 2), lambda: 1.0, lambda error: None)
    stream.start()
    assert stream.take().shape == (2, 0)


def test_a_model_without_known_blocks_is_clipped_by_layers_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    clip = LayerClip()
    probe = gradloc.watch(model, run=RUN, bus=MemoryBus(), remedies=[clip, TokenClip()])
    model(torch.ones(1, 2)).sum().backward()
    assert probe.observe() == "go"
    assert "entering" not in clip.state_dict()


class TestCancelled:
    """Where next to nothing is left of the stream, the forward pass shows it before any gradient is large."""

    def step(
        self, loop: Loop, left: dict[Place, float], zeroed: tuple[Place, ...] = (), number: int = 50
    ) -> dict[str, Any]:
        """Gradients of a step whose second block leaves so much of the stream; `zeroed`: by hooks of the test's own."""

        def hook(_module: nn.Module, _args: Any, output: tuple[torch.Tensor]) -> None:
            keep = torch.ones_like(output[0][..., :1])
            for place in zeroed:
                keep[place] = 0.0
            output[0].register_hook(lambda grad: grad * keep)  # type: ignore[no-untyped-call]

        handles = [layer.register_forward_hook(hook) for layer in loop.model.layers] if zeroed else []
        loop.model.layers[1].left = left  # type: ignore[assignment]
        loop.model.zero_grad()
        loop.backward(number)
        loop.model.layers[1].left = {}  # type: ignore[assignment]
        for handle in handles:
            handle.remove()
        return loop.gradients()

    def test_it_sends_nothing_into_any_block_from_the_first_step_on(self) -> None:
        loop = Loop(Language(), LayerClip())
        found = self.step(loop, {(1, 2): 1e-4})
        with loop.clip.suspended():
            expected = self.step(loop, {(1, 2): 1e-4}, zeroed=((1, 2),))
            plain = self.step(loop, {(1, 2): 1e-4})
        for name, gradient in found.items():
            assert torch.allclose(gradient, expected[name], rtol=1e-6, atol=1e-9), name
            assert torch.equal(gradient, plain[name]) == ("head" in name), name

    def test_it_is_told(self, loop: Loop) -> None:
        self.step(loop, {(1, 2): 1e-4})
        loop.probe.observe()
        assert loop.clip.changed == ("embedding", "layers.0", "layers.1", "layers.2")
        assert {(one.name, one.num_positions, one.scale) for one in loop.clip.last} >= {("layers.2", 1, 0.0)}
        assert loop.told()[-1].rules_hit[-1] == rules.HELD

    @pytest.mark.parametrize(("fraction", "is_held"), [(0.0, True), (0.01, True), (0.2, False), (30.0, False)])
    def test_a_stream_that_is_merely_small_or_large_is_none(self, fraction: float, is_held: bool) -> None:
        loop = Loop(Language(), LayerClip())
        self.step(loop, {(1, 2): fraction})
        loop.probe.observe()
        assert bool(loop.clip.last) == is_held

    def test_padding_counts_as_nobody(self) -> None:
        """A position that no loss depends on, with nothing in its stream."""
        loop = Loop(Language(), LayerClip())
        self.step(loop, {(1, LENGTH - 1): 0.0})  # the last position predicts nothing
        loop.probe.observe()
        assert loop.clip.last == ()

    def test_padding_with_a_huge_stream_does_not_make_the_others_small(self) -> None:
        """The first position of a row, and padding in front of it, may have a thousand times the usual stream."""
        loop = Loop(Language(), LayerClip())
        most = {(row, at): 1e3 for row in range(ROWS) for at in range(LENGTH) if at >= 2}

        def padded(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            ids_BT = torch.randint(0, 11, (ROWS, LENGTH), generator=generator)
            logp_BR = loop.model(ids_BT)
            loop.probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR))
            logp_BR[:, :2].mean().backward()  # nothing depends on positions from the third on

        loop.model.layers[1].left = most  # type: ignore[assignment]
        padded(50)
        loop.model.layers[1].left = {}  # type: ignore[assignment]
        loop.probe.observe()
        assert loop.clip.last == ()

    def test_a_packed_batch_has_one_axis_for_all(self) -> None:
        model = Language()
        clip = LayerClip()
        probe = gradloc.watch(model, run=RUN, bus=MemoryBus(), remedies=[clip])
        flat_NH = model.embed_tokens(torch.arange(9))
        model.layers[1].left = {(4,): 1e-5}  # type: ignore[assignment,dict-item]
        for layer in model.layers:
            (flat_NH,) = layer(flat_NH)
        flat_NH.square().sum().backward()
        probe.observe()
        assert clip.last[0].num_positions == 1

    def test_a_floor_of_0_switches_it_off_and_others_than_fractions_are_refused(self) -> None:
        loop = Loop(Language(), LayerClip(residual_floor=0.0))
        self.step(loop, {(1, 2): 1e-6})
        loop.probe.observe()
        assert loop.clip.last == ()
        for wrong in (-0.1, 1.0, math.nan):
            with pytest.raises(ValueError, match=r"residual_floor is .* expected a fraction"):
                LayerClip(residual_floor=wrong)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_recomputed_blocks_hold_back_from_where_they_know(self, reentrant: bool) -> None:
        """A block that is recomputed alone knows what left it, not what leaves those above."""
        plain, again = Loop(Language(), LayerClip()), Loop(Language(checkpointing=reentrant), LayerClip())
        again.model.load_state_dict(plain.model.state_dict())
        expected, found = (self.step(one, {(1, 2): 1e-4}) for one in (plain, again))
        for name, gradient in found.items():
            if not reentrant or "layers.2" in name or "head" in name:
                above = "layers.2" in name and reentrant
                assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-9) != above, name
        again.probe.observe()
        assert "layers.1" in {one.name for one in again.clip.last}
        assert ("layers.2" in {one.name for one in again.clip.last}) != reentrant


class TestOutsideOfSteps:
    """What is nobody's step, and what else people do with a model that is watched."""

    def test_after_close_the_model_is_as_it_was(self, loop: Loop) -> None:
        loop.probe.close()
        assert not any(layer._forward_hooks for layer in loop.model.layers)
        assert float(struck(loop, {(1, 2): 1e6})["layers.0.mlp.weight"].norm()) > 1e2  # type: ignore[arg-type]

    def test_a_pass_that_is_under_way_at_close_is_left_alone(self, loop: Loop) -> None:
        loop.model.layers[1].amplified = {(1, 2): 1e6}  # type: ignore[assignment]
        loop.model.zero_grad()
        value = loop.model(torch.zeros(ROWS, LENGTH, dtype=torch.int64)).sum()
        loop.probe.close()
        value.backward()
        assert float(loop.gradients()["layers.0.mlp.weight"].norm()) > 1e2

    def test_the_model_can_be_pickled_and_copied_and_the_copies_are_free(self, loop: Loop) -> None:
        pickled = pickle.loads(pickle.dumps(loop.model))  # noqa: S301 - our own bytes
        for twin in (pickled, copy.deepcopy(loop.model)):
            twin.layers[1].amplified = {(1, 2): 1e6}
            twin.zero_grad()
            twin(torch.zeros(ROWS, LENGTH, dtype=torch.int64)).sum().backward()
            assert float(twin.layers[0].mlp.weight.grad.norm()) > 1e2

    def test_a_watch_that_is_refused_leaves_no_hook(self) -> None:
        model, clip = Language(), LayerClip()
        clip.load_state_dict({"version": 1, "names": ["of another model"]})
        with pytest.raises(ValueError, match="the saved state is of another model"):
            gradloc.watch(model, run=RUN, bus=MemoryBus(), remedies=[clip])
        assert not any(layer._forward_hooks for layer in model.layers)

    def test_a_step_that_could_not_be_measured_leaves_nothing_to_the_next(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRADLOC_STRICT", "0")
        before = loop.clip.state_dict()
        struck(loop, {(1, 2): 1e4})
        loop.probe.observe(nosuch=1.0)
        assert loop.clip.state_dict() == before
        loop.model.zero_grad()
        loop.step(0)
        assert loop.clip.last == ()

    def test_an_overflow_of_a_scaled_loss_is_seen_by_who_scales_it(self) -> None:
        class Scaler:
            def get_scale(self) -> float:
                return 1.0

        loop = Loop(Language(), LayerClip(), arguments={"scaler": Scaler()})
        loop.warm_up()
        assert not struck(loop, {(1, 2): math.inf})["layers.0.mlp.weight"].isfinite().all()
        found, expected = struck(loop, {(1, 2): 1e6}), struck(loop, {(1, 2): 0.0})
        assert torch.equal(found["layers.0.mlp.weight"], expected["layers.0.mlp.weight"])

    def test_graphs_of_second_derivatives_are_not_kept(self, loop: Loop) -> None:
        logp_BR = loop.model(torch.zeros(ROWS, LENGTH, dtype=torch.int64))
        torch.autograd.grad(logp_BR.sum(), list(loop.model.parameters()), create_graph=True)
        assert loop.clip.stream is not None
        assert not loop.clip.stream.take().requires_grad

    def test_ever_fewer_of_many_held_steps_are_kept(self, tmp_path: Any) -> None:
        loop = Loop(Language(), LayerClip(), arguments={"store": tmp_path.as_uri(), "reference_after": None})
        kept = []
        for number in range(60):
            loop.model.layers[1].left = {(1, 2): 1e-5}  # type: ignore[assignment]
            if loop.step(number) == "snapshot":
                kept.append(number)
            assert loop.clip.last
            writer = loop.probe._writer
            assert writer is not None
            while not writer.ready:
                time.sleep(0.01)
        assert kept == [0, 8, 24, 56]
        assert all(step.rules_hit[-1] == rules.HELD for step in loop.told())


def test_two_stacks_of_blocks_and_blocks_within_blocks_have_no_boundaries_of_their_own() -> None:
    both = nn.ModuleDict({"encoder": Language(), "decoder": Language()})
    assert boundaries_of(both) == ()
    nested = Language()
    nested.layers[0].layer = nn.ModuleList([nn.Linear(2, 2)])
    assert boundaries_of(nested) == ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize(
    ("layer", "is_entered"),
    [
        ("embedding", True), ("layers.0.mlp", True), ("layers.1", True), ("layers.2.norm", False), ("norm", False),
        ("head", False), ("other", True), ("vision.layers.7.attention", True), ("vision.other", True),
    ],
)  # fmt: skip
def test_all_but_what_lies_above_may_get_another_gradient(layer: str, is_entered: bool) -> None:
    assert is_below(layer, "layers.1") is is_entered


def test_of_few_positions_none_counts_as_cancelled() -> None:
    loop = Loop(Language(), LayerClip())
    loop.model.layers[1].left = {(0, 1): 1e-5}  # type: ignore[assignment]
    logp_BR = loop.model(torch.zeros(1, LENGTH, dtype=torch.int64))
    loop.probe.tokens(logp_BR, torch.zeros(1, LENGTH, dtype=torch.int64), torch.ones(1, LENGTH - 1))
    logp_BR.mean().backward()
    loop.probe.observe()
    assert loop.clip.last == ()
