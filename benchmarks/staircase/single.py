"""Single steps: what LayerClip leaves of the healthy gradient, how often it touches healthy steps, what it costs."""

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from staircase import faults
from staircase.policy import NUM_PROMPTS, CopyKind, InferenceCopy, logp_of, pretrained, reward_of
from staircase.run import GROUP_SIZE, PROMPT_LENGTH, Setting, Variant, advantages, spikes, token_losses, train

import gradloc
from gradloc.clipping import LayerClip, SeqClip, TokenClip
from gradloc.layers import block_of, layer_key

WARMUP_STEPS = 20


@dataclass(frozen=True)
class Event:
    """One struck step. Cosines are to the gradient of the same step without the struck answers."""

    fault: str
    seed: int
    growth: float
    cosine_layer_clip: float
    cosine_global_clip: float  # of the gradient as it is: scaling all of it turns nothing
    bound: float  # sqrt(1 - the clipped layers' healthy share of the squared norm)
    layers: tuple[str, ...]


def events(seed: int, num_events: int, pretraining_steps: int) -> list[Event]:
    """Layer and token faults, each on its own, after a healthy warm-up in which LayerClip learns."""
    torch.manual_seed(seed)
    model = pretrained(seed, pretraining_steps)
    copy = InferenceCopy(model, CopyKind(), 1_000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    clip = LayerClip()
    probe = gradloc.watch(model, optimizer, run="single", remedies=[clip])
    rng = np.random.default_rng([seed, 4])
    for step in range(WARMUP_STEPS):
        _backward(model, _sample(copy, model, step, rng))
        probe.observe()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for number in range(num_events):
        for fault in ("layer", "token"):
            batch = _sample(copy, model, 0, rng)
            struck_B = _strike(fault, model, batch, rng)
            calm = _backward(model, batch, ~struck_B)
            optimizer.zero_grad()
            whole = _backward(model, batch)
            probe.observe(step=WARMUP_STEPS + number)
            clipped = _gradients(model)
            optimizer.zero_grad()
            layers = tuple(action.name for action in clip.last)
            share = _share(model, calm, layers)
            found.append(
                Event(
                    fault,
                    seed,
                    float(_norm(whole) / _norm(calm)),
                    _cosine(clipped, calm),
                    _cosine(whole, calm),
                    math.sqrt(max(0.0, 1 - share)),
                    layers,
                )
            )
    probe.close()
    return found


def _sample(copy: InferenceCopy, model: Any, step: int, rng: np.random.Generator) -> faults.Batch:
    copy.sync(model, step)
    picked = rng.choice(NUM_PROMPTS, 8, replace=False)
    indices = [int(index) for index in picked for _ in range(GROUP_SIZE)]
    ids_BT, logp_BR = copy.sample(indices)
    responses = ids_BT[:, PROMPT_LENGTH:].tolist()
    rewards_B = torch.tensor([reward_of(index, row) for index, row in zip(indices, responses, strict=True)])
    return faults.Batch(ids_BT, logp_BR, torch.ones_like(logp_BR, dtype=torch.bool), advantages(rewards_B))


def _strike(fault: str, model: Any, batch: faults.Batch, rng: np.random.Generator) -> torch.Tensor:
    """Plant the fault in one answer (layer) or one replica's (token); which answers, bool [B]."""
    before_BT, before_BR = batch.ids_BT.clone(), batch.logp_BR.clone()
    if fault == "layer":
        faults.cancelled_residual(model, batch, rng, 1)
    else:
        faults.mixed_up_prefixes(model, batch, 1)
    return (batch.ids_BT != before_BT).any(dim=1) | (batch.logp_BR != before_BR).any(dim=1)


def _backward(model: Any, batch: faults.Batch, rows_B: torch.Tensor | None = None) -> list[torch.Tensor]:
    logp_BR = logp_of(model, batch.ids_BT)
    mask_BR = batch.mask_BR if rows_B is None else batch.mask_BR & rows_B[:, None]
    losses_BR = token_losses(logp_BR, batch.logp_BR, batch.advantage_B, mask_BR)
    (losses_BR.sum() / batch.mask_BR.sum()).backward()
    return _gradients(model)


def _gradients(model: Any) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def _norm(gradient: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.cat([part.flatten().double() for part in gradient]))


def _cosine(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))
    return dot / max(float(_norm(one) * _norm(other)), 1e-300)


def _share(model: Any, gradient: list[torch.Tensor], layers: tuple[str, ...]) -> float:
    """Share of the squared norm that lies in these layers."""
    inside = [block_of(layer_key(name)) in layers for name, _ in model.named_parameters()]
    squares = [float(part.double().square().sum()) for part in gradient]
    return sum(square for square, here in zip(squares, inside, strict=True) if here) / max(sum(squares), 1e-300)


def healthy(seed: int, num_steps: int, pretraining_steps: int) -> tuple[int, int, int, int]:
    """(steps after warm-up, of these touched by LayerClip, by any remedy, spikes) of an exact, fault-free run."""
    clip = LayerClip()
    clips = [TokenClip(), SeqClip(), clip]
    setting = Setting("healthy", num_steps, 3e-4, pretraining_steps=pretraining_steps)
    outcome = train(setting, Variant("all", lambda: list(clips)), seed)
    touched = outcome.layer_clip_steps
    any_acted = touched + sum(one.num_acted for one in clips[:2])
    return len(outcome.norms), touched, any_acted, len(spikes(outcome.norms))


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
    clips = [
        _Timed(TokenClip(), meter, "factor"),
        _Timed(SeqClip(), meter, "factor"),
        _Timed(LayerClip(), meter, "clip"),
    ]
    probe = gradloc.watch(model, optimizer, run="overhead", remedies=[one.remedy for one in clips])
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


class _Timed:
    """Measures one method of a remedy from outside."""

    def __init__(self, remedy: Any, meter: _Meter, method: str) -> None:
        self.remedy = remedy
        inner = getattr(remedy, method)

        def timed(*args: Any) -> Any:
            started = time.process_time()
            try:
                return inner(*args)
            finally:
                meter.spent += time.process_time() - started

        setattr(remedy, method, timed)
