"""Remedies switched on in `gradloc.watch`: what reaches the optimizer, what is published, what is refused."""

import logging
import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import gradloc
from gradloc.clipping import LayerClip, Remedy, RewardGuard, SeqClip, TokenClip
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import StepObserved

LogpOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]
RUN = "remedied"


class Loop:
    """A training loop; `off` [3, 5] is what the sampler's logp are off by."""

    def __init__(self, model: nn.Module, logp: LogpOf, remedies: Sequence[Remedy], **arguments: object) -> None:
        self.model, self.logp = model, logp
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.bus = MemoryBus()
        self.probe = gradloc.watch(
            model,
            self.optimizer,
            run=RUN,
            bus=self.bus,
            remedies=remedies,
            **arguments,  # type: ignore[arg-type]
        )
        self.generator = torch.Generator().manual_seed(5)

    def backward(
        self, off: torch.Tensor | None = None, weight: torch.Tensor | None = None, *, rollout: bool = True
    ) -> torch.Tensor:
        """One micro-batch; the coefficients' gradient before any remedy, [3, 5]."""
        ids = torch.randint(0, 11, (3, 6), generator=self.generator)
        logp = self.logp(self.model, ids)
        rollout_logp = logp.detach() - (torch.zeros(3, 5) if off is None else off)
        weight = torch.ones(3, 5) if weight is None else weight
        self.probe.tokens(logp, ids, torch.ones(3, 5), rollout_logp=rollout_logp if rollout else None)
        (weight * logp).sum().backward()
        return weight

    def gradient(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def finish(self) -> str:
        decision = self.probe.observe()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return decision

    def steps(self) -> list[StepObserved]:
        self.probe.close()
        entries = self.bus.read_last(streams.stream(RUN, "steps"), count=1_000)
        messages = [codec.decode(entry.data) for entry in entries]
        return [message for message in messages if isinstance(message, StepObserved)]


def plain_gradient(model: nn.Module, logp: LogpOf, weight: torch.Tensor) -> torch.Tensor:
    ids = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(5))
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad((weight * logp(model, ids)).sum(), parameters)])


@pytest.mark.parametrize("bad", [math.log(1e5), math.log(1e-30), math.nan, math.inf])
def test_token_clip_removes_exactly_the_token(tiny_model: nn.Module, logp: LogpOf, bad: float) -> None:
    off = torch.zeros(3, 5)
    off[1, 2] = bad
    weight = torch.ones(3, 5)
    weight[1, 2] = 1e5
    without = weight.clone()
    without[1, 2] = 0.0
    expected = plain_gradient(tiny_model, logp, without)
    loop = Loop(tiny_model, logp, [TokenClip()])
    loop.backward(off, weight)
    assert torch.allclose(loop.gradient(), expected, rtol=1e-5, atol=1e-6)
    loop.finish()
    (step,) = loop.steps()
    assert step.tokens_remedied == pytest.approx(1 / 15)
    assert (step.sequences_remedied, step.layers_remedied, step.rewards_remedied) == (None, None, None)
    assert step.coefficient_abs_max == 1.0  # the snapshot and the summary are of the step as it was taken


def test_a_nan_coefficient_goes_with_its_token(tiny_model: nn.Module, logp: LogpOf) -> None:
    off, weight = torch.zeros(3, 5), torch.ones(3, 5)
    off[0, 0], weight[0, 0] = math.nan, math.nan
    loop = Loop(tiny_model, logp, [TokenClip()])
    loop.backward(off, weight)
    assert bool(torch.isfinite(loop.gradient()).all())


def test_seq_clip_removes_exactly_the_answer(tiny_model: nn.Module, logp: LogpOf) -> None:
    off = torch.zeros(3, 5)
    off[2] = math.log(1.5)
    without = torch.ones(3, 5)
    without[2] = 0.0
    expected = plain_gradient(tiny_model, logp, without)
    loop = Loop(tiny_model, logp, [TokenClip(), SeqClip()])
    loop.backward(off)
    assert torch.allclose(loop.gradient(), expected, rtol=1e-5, atol=1e-6)
    loop.backward()
    loop.finish()
    (step,) = loop.steps()
    assert step.tokens_remedied == 0.0
    assert step.sequences_remedied == pytest.approx(1 / 6)


def test_healthy_steps_are_the_same_to_the_bit(tiny_model: nn.Module, logp: LogpOf) -> None:
    expected = plain_gradient(tiny_model, logp, torch.ones(3, 5))
    loop = Loop(tiny_model, logp, [TokenClip(), SeqClip(), LayerClip()])
    loop.backward()
    assert loop.probe.observe() == "go"
    assert torch.equal(loop.gradient(), expected)


def exploded(loop: Loop, factor: float) -> dict[str, torch.Tensor]:
    """A step whose first block's gradient is `factor` times what it should be; gradients by name before observe."""
    loop.backward()
    for name, parameter in loop.model.named_parameters():
        if "layers.0" in name and parameter.grad is not None:
            parameter.grad.mul_(factor)
    return {name: p.grad.clone() for name, p in loop.model.named_parameters() if p.grad is not None}


def test_layer_clip_scales_the_exploded_layer_and_leaves_the_others_to_the_bit(
    tiny_model: nn.Module, logp: LogpOf
) -> None:
    clip = LayerClip()
    loop = Loop(tiny_model, logp, [clip])
    for _ in range(12):
        loop.backward()
        loop.finish()
    limit = clip.limits()["layers.0"]
    usual = statistics.median(value for value in clip.state_dict()["accepted"][1] if value is not None)
    before = exploded(loop, 1e4)
    loop.probe.observe()
    (action,) = clip.last
    assert (action.name, action.limit) == ("layers.0", limit)
    assert action.scale == pytest.approx((usual / action.norm) ** 2)
    for name, parameter in tiny_model.named_parameters():
        assert parameter.grad is not None
        expected = before[name] * (action.scale if "layers.0" in name else 1.0)
        assert torch.allclose(parameter.grad, expected) if "layers.0" in name else torch.equal(parameter.grad, expected)
    loop.optimizer.step()
    step = loop.steps()[-1]
    assert step.layers_remedied == pytest.approx(1 / 4)  # embedding, two blocks, head
    assert step.grad_norm > 1e3 * limit  # what is published is the norm before the remedy


def test_a_layer_that_is_not_finite_gets_no_gradient_and_the_rest_goes_on(tiny_model: nn.Module, logp: LogpOf) -> None:
    loop = Loop(tiny_model, logp, [LayerClip()])
    exploded(loop, math.nan)
    loop.probe.observe()
    for name, parameter in tiny_model.named_parameters():
        assert (parameter.grad is None) == ("layers.0" in name), name
    before = tiny_model.layers[0]["mlp"].weight.clone()  # type: ignore[index,union-attr,operator]
    loop.optimizer.step()
    assert torch.equal(before, tiny_model.layers[0]["mlp"].weight)  # type: ignore[index,union-attr,operator]


def test_layers_can_be_kinds_of_modules(tiny_model: nn.Module, logp: LogpOf) -> None:
    clip = LayerClip(by="kind")
    Loop(tiny_model, logp, [clip])
    assert set(clip.state_dict()["names"]) == {
        "embedding",
        "layers.0.mlp",
        "layers.0.norm",
        "layers.1.mlp",
        "layers.1.norm",
        "head",
    }


def test_the_history_survives_a_restart_from_a_checkpoint(tiny_model: nn.Module, logp: LogpOf) -> None:
    first = LayerClip()
    loop = Loop(tiny_model, logp, [first])
    for _ in range(10):
        loop.backward()
        loop.finish()
    state = first.state_dict()
    again = LayerClip()
    again.load_state_dict(state)  # before the model is known
    Loop(tiny_model, logp, [again])
    assert again.limits() == first.limits() != {}
    late = LayerClip()
    Loop(tiny_model, logp, [late])
    late.load_state_dict(state)
    assert late.limits() == first.limits()


def test_a_skipped_step_is_not_clipped_nor_learnt(tiny_model: nn.Module, logp: LogpOf) -> None:
    clip = LayerClip()
    loop = Loop(tiny_model, logp, [clip], skip_above=1.0)
    for _ in range(12):
        loop.backward()
        loop.finish()
    state = clip.state_dict()
    exploded(loop, 1e6)
    assert loop.finish() == "skip"
    assert clip.state_dict() == state


def test_the_reward_guard_is_published_with_its_step(tiny_model: nn.Module, logp: LogpOf) -> None:
    guard = RewardGuard(0.0, 1.0)
    loop = Loop(tiny_model, logp, [guard])
    guard(torch.tensor([0.0, 1.0, math.nan, 9.0]))
    loop.backward()
    loop.finish()
    assert loop.steps()[0].rewards_remedied == 0.5


def test_clips_without_rollout_logp_say_so_once_and_training_goes_on(
    tiny_model: nn.Module, logp: LogpOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GRADLOC_STRICT")
    loop = Loop(tiny_model, logp, [TokenClip(), SeqClip()])
    with caplog.at_level(logging.WARNING, logger="gradloc"):
        for _ in range(3):
            loop.backward(rollout=False)
            loop.finish()
    said = [record.message for record in caplog.records if "TokenClip and SeqClip need rollout_logp=" in record.message]
    assert len(said) == 1
    steps = loop.steps()
    assert [step.num_tokens for step in steps] == [15, 15, 15]  # the capture is none the worse
    assert steps[0].tokens_remedied is None


class FullyShardedDataParallel(nn.Module):
    """Stands for FSDP1 by its name, which is what is looked at."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_what_conflicts_is_refused_by_name(tiny_model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"LayerClip cannot work with FullyShardedDataParallel: .*use FSDP2"):
        gradloc.watch(FullyShardedDataParallel(tiny_model), run=RUN, remedies=[LayerClip()])
    with pytest.raises(ValueError, match="TokenClip is given twice"):
        gradloc.watch(tiny_model, run=RUN, remedies=[TokenClip(), TokenClip(0.1, 10)])
    with pytest.raises(ValueError, match="remedies: str is none"):
        gradloc.watch(tiny_model, run=RUN, remedies=["LayerClip"])  # type: ignore[list-item]
    clip = LayerClip()
    gradloc.watch(tiny_model, run=RUN, remedies=[clip]).close()
    with pytest.raises(ValueError, match="watches a model already"):
        gradloc.watch(tiny_model, run=RUN, remedies=[clip])
    with pytest.raises(ValueError, match="watches no model yet"):
        LayerClip().limits()


def test_removing_one_of_two_cancelling_tokens_can_raise_the_norm(tiny_model: nn.Module, logp: LogpOf) -> None:
    """Why the law is about coefficients and layers, not about the norm of the sum (docs/remedies.md)."""
    ids = torch.tensor([[1, 2, 3, 4]])
    logps = [logp(tiny_model, ids) for _ in range(2)]
    pair = 1e3 * logps[0][0, 1] - 0.999e3 * logps[1][0, 1]
    alone = 1e3 * logp(tiny_model, ids)[0, 1]
    parameters = list(tiny_model.parameters())
    norms = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).norm().item() for loss in (pair, alone)
    ]
    assert norms[1] > 100 * norms[0]
