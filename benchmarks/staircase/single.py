"""Single steps: what LayerClip leaves of the healthy gradient, how often it touches healthy steps, what it costs.

The struck steps are those of `gradloc demo`: its model, task, loss and faults, on one rank.
Shapes: B rows, R response positions.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from staircase.run import SPIKE_FACTOR, Setting, Variant, spikes, train

import gradloc
from gradloc.clipping import LayerClip, SeqClip, TokenClip, layer
from gradloc.demo import task
from gradloc.demo.cancellation import LayerExplosion
from gradloc.demo.grpo import advantages, token_losses
from gradloc.demo.model import response_logp
from gradloc.demo.moment import Moment, PlannedFault
from gradloc.demo.pretraining import pretrained
from gradloc.demo.rollout import InferenceCopy, Rollouts
from gradloc.demo.settings import GROUP_SIZE, LEARNING_RATE, rewards_of
from gradloc.demo.stale_cache import TokenMismatch
from gradloc.layers import block_of, layer_key

WARMUP_STEPS = 20
NUM_GROUPS = 8
FAULTS: dict[str, type[PlannedFault]] = {"layer": LayerExplosion, "token": TokenMismatch}


@dataclass(frozen=True)
class Event:
    """One struck step. Cosines are to the gradient of the same step without the struck answer."""

    fault: str
    seed: int
    growth: float
    cosine_layer_clip: float
    cosine_layers_only: float  # by LayerClip(positions=False): layers scaled after the backward pass
    cosine_global_clip: float  # of the gradient as it is: scaling all of it turns nothing
    bound: float  # sqrt(1 - the healthy share of the squared norm of the layers that explode)
    best: float  # that any scaling of whole layers reaches, chosen by who knows the healthy gradient
    layers: Sequence[str]  # that explode: above their limit with nothing held back
    num_changed: int  # layers that got another gradient than without LayerClip


_Row = tuple[int, torch.Tensor]  # of the embedding: a token's id, and its vector [H]


class _Scene:
    """A healthy run of the demo up to the step that is struck."""

    def __init__(self, seed: int) -> None:
        self.model = pretrained(seed)
        self.copy = InferenceCopy(self.model, 1_000 * seed)
        self.rng = np.random.default_rng([seed, 4])
        self.clip = LayerClip()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.probe = gradloc.watch(self.model, optimizer, run="single", remedies=[self.clip])
        norms = []
        for _ in range(WARMUP_STEPS):
            norms.append(_norm(self.backward(self.sample())))
            self.probe.observe()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.healthy_norm = statistics.median(norms)

    def sample(self) -> Rollouts:
        self.copy.sync(self.model)
        picked = self.rng.choice(task.NUM_PROMPTS, NUM_GROUPS, replace=False)
        return self.copy.sample(tuple(task.problem(int(index)) for index in picked for _ in range(GROUP_SIZE)))

    def backward(self, rollouts: Rollouts, without: int | None = None) -> list[torch.Tensor]:
        """Gradient of the step, or of the step without one answer (its row)."""
        self.model.zero_grad()
        advantage_B = advantages(rewards_of(rollouts), GROUP_SIZE)
        logp_BR = response_logp(self.model, rollouts.ids_BT)
        losses_BR = token_losses(logp_BR, logp_BR.detach(), rollouts.logp_BR, advantage_B, rollouts.mask_BR)
        if without is not None:
            losses_BR = losses_BR.clone()
            losses_BR[without] = 0.0
        (losses_BR.sum() / rollouts.mask_BR.sum()).backward()
        return _gradients(self.model)

    def scaled(self, gradient: list[torch.Tensor]) -> tuple[tuple[str, ...], list[torch.Tensor]]:
        """The layers of a finished gradient that are above their limit, by what LayerClip has learned of them, and what
        it would make of the gradient."""
        settings = self.clip.settings
        layers = [block_of(layer_key(name)) for name, _ in self.model.named_parameters()]
        names = tuple(dict.fromkeys(layers))
        history = layer.load_history(self.clip.state_dict(), names, settings)
        norms_L = np.array([_norm([g for g, one in zip(gradient, layers, strict=True) if one == n]) for n in names])
        limits_L, medians_L = layer.limits_from(history, settings), layer.medians_from(history)
        exploding = tuple(name for name, is_over in zip(names, norms_L > limits_L, strict=True) if is_over)
        if exploding:
            limits_L = layer.strict_limits_from(history, settings)
        scale = dict(zip(names, layer.layer_clip(norms_L, limits_L, medians_L, settings.power).tolist(), strict=True))
        return exploding, [part * scale[one] for part, one in zip(gradient, layers, strict=True)]

    def strike(self, fault: str, number: int) -> tuple[Rollouts, int, _Row | None] | None:
        """A step with the fault in it, the struck answer's row and what the embedding was before; None where this step
        offers no place."""
        previous, rollouts = self.sample(), self.sample()
        planned = FAULTS[fault](number, 1, Path())
        deed = planned.attempt(Moment(0, 0, rollouts, previous, self.copy, self.model, self.healthy_norm))
        if deed is None:
            return None
        before = None
        if deed.embedding is not None:
            before = deed.embedding[0], self.model.get_input_embeddings().weight[deed.embedding[0]].detach().clone()
            self.set_embedding(deed.embedding)
        planted = deed.planted
        num_rows = len(rollouts.problems) // 4  # of a micro-batch of the demo
        return deed.rollouts, planted["micro_batch"] * num_rows + planted["sequence"], before

    @torch.no_grad()
    def set_embedding(self, row: _Row | None) -> None:
        if row is not None:
            table_VH = self.model.get_input_embeddings().weight
            table_VH[row[0]] = row[1].to(table_VH.dtype)


def events(seed: int, num_events: int) -> list[Event]:
    """Layer and token faults, each in a step of its own, after a healthy warm-up in which LayerClip learns."""
    scene = _Scene(seed)
    found: list[Event] = []
    for fault in FAULTS:
        for number in range(8 * num_events):
            if sum(event.fault == fault for event in found) == num_events:
                break
            struck = scene.strike(fault, 1_000 * seed + number)
            if struck is None:
                continue
            rollouts, culprit, before = struck
            with scene.clip.suspended():
                calm = scene.backward(rollouts, culprit)
                if _norm(calm) > SPIKE_FACTOR * scene.healthy_norm:
                    scene.set_embedding(before)
                    continue  # another answer has the token in the same place: two culprits
                whole = scene.backward(rollouts)
            layers, scaled = scene.scaled(whole)
            scene.backward(rollouts)
            scene.probe.observe()
            clipped = _gradients(scene.model)
            scene.set_embedding(before)  # one culprit a step: the next step must not meet this one's token again
            found.append(
                Event(
                    fault,
                    seed,
                    _norm(whole) / _norm(calm),
                    _cosine(clipped, calm),
                    _cosine(scaled, calm),
                    _cosine(whole, calm),
                    math.sqrt(max(0.0, 1 - _share(scene.model, calm, layers))),
                    _best(scene.model, whole, calm),
                    layers,
                    len(scene.clip.changed),
                )
            )
    scene.probe.close()
    return found


def _gradients(model: Any) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def _norm(gradient: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in gradient))


def _cosine(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))
    return dot / max(_norm(one) * _norm(other), 1e-300)


def _best(model: Any, struck: list[torch.Tensor], healthy: list[torch.Tensor]) -> float:
    """Largest cosine to `healthy` over all scalings of the layers: of each take what points the healthy way."""
    square, dots, squares = 0.0, dict[str, float](), dict[str, float]()
    for (name, _), mine, theirs in zip(model.named_parameters(), struck, healthy, strict=True):
        layer = block_of(layer_key(name))
        square += float(theirs.double().square().sum())
        dots[layer] = dots.get(layer, 0.0) + float((mine.double() * theirs.double()).sum())
        squares[layer] = squares.get(layer, 0.0) + float(mine.double().square().sum())
    reached = sum(max(dots[layer], 0.0) ** 2 / max(squares[layer], 1e-300) for layer in dots)
    return math.sqrt(reached / max(square, 1e-300))


def _share(model: Any, gradient: list[torch.Tensor], layers: tuple[str, ...]) -> float:
    """Share of the squared norm that lies in these layers."""
    inside = [block_of(layer_key(name)) in layers for name, _ in model.named_parameters()]
    squares = [float(part.double().square().sum()) for part in gradient]
    return sum(square for square, here in zip(squares, inside, strict=True) if here) / max(sum(squares), 1e-300)


@dataclass(frozen=True)
class Healthy:
    """An exact, fault-free run under all three remedies."""

    num_steps: int
    num_touched: int  # steps in which LayerClip acted
    num_others: int  # tokens and sequences that TokenClip and SeqClip acted on
    num_spikes: int


def healthy(seed: int, num_steps: int, pretraining_steps: int) -> Healthy:
    others = [TokenClip(), SeqClip()]
    setting = Setting("healthy", num_steps, 3e-4, pretraining_steps=pretraining_steps)
    outcome = train(setting, Variant("all", lambda: [*others, LayerClip()]), seed)
    num_others = sum(one.num_acted for one in others)
    return Healthy(len(outcome.norms), outcome.layer_clip_steps, num_others, len(spikes(outcome.norms)))


def overhead(num_steps: int = 30) -> dict[str, float]:
    """CPU time of all three remedies in one step's share, measured inside the same steps; 20 M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8_192,
        hidden_size=384,
        intermediate_size=1_024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    meter = _Meter()
    tokens, sequences, layers = TokenClip(), SeqClip(), LayerClip()
    probe = gradloc.watch(model, optimizer, run="overhead", remedies=[tokens, sequences, layers])
    assert layers.stream is not None
    for timed, methods in ((tokens, ["factor"]), (sequences, ["factor"]), (layers, ["clip"])):
        _measure(timed, methods, meter)
    _measure(layers.stream, ["watch", "held_back", "take"], meter)
    shares = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        meter.spent = 0.0
        started = time.process_time()
        ids_BT = torch.randint(0, 8_192, (4, 128), generator=generator)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        logp_BR = torch.log_softmax(logits, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        off_BR = 0.05 * torch.randn(logp_BR.shape, generator=generator)
        probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=logp_BR.detach() - off_BR)
        (logp_BR * torch.randn(logp_BR.shape, generator=generator)).mean().backward()
        probe.observe()
        optimizer.step()
        optimizer.zero_grad()
        hook = time.process_time()
        torch.where(off_BR == 0, torch.zeros_like(logp_BR), logp_BR.detach() * off_BR)  # what the hook computes
        hook = time.process_time() - hook
        shares.append((meter.spent + hook) / (time.process_time() - started))
    probe.close()
    return {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "share_median": statistics.median(shares),
        "share_p90": sorted(shares)[int(0.9 * len(shares))],
        "steps": float(num_steps),
    }


class _Meter:
    spent = 0.0


def _measure(what: Any, methods: Sequence[str], meter: _Meter) -> None:
    """Measures methods of an object from outside."""

    def timed(inner: Any) -> Any:
        def call(*args: Any) -> Any:
            started = time.process_time()
            try:
                return inner(*args)
            finally:
                meter.spent += time.process_time() - started

        return call

    for method in methods:
        setattr(what, method, timed(getattr(what, method)))
