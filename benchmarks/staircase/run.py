"""One GRPO run under one remedy: rewards, norms, spikes, and when it collapsed. Watched by gradloc itself.

Shapes: B rows, T positions, R response positions, G rows of one group.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from staircase import faults, published
from staircase.policy import (
    NUM_PROMPTS,
    PROMPT_LENGTH,
    CopyKind,
    InferenceCopy,
    logp_of,
    new_model,
    pretrained,
    reward_of,
)

import gradloc
from gradloc.clipping import LayerClip, Remedy, SeqClip, TokenClip
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import StepObserved

GROUP_SIZE = 8
PPO_CLIP = 0.2
SPIKE_FACTOR, SPIKE_WINDOW = 4.0, 32
COLLAPSE_WINDOW, COLLAPSE_FRACTION, HEALTHY_STEPS = 10, 0.5, 20


@dataclass(frozen=True)
class Setting:
    """What all remedies of one comparison share."""

    name: str
    num_steps: int
    learning_rate: float
    copy: CopyKind = field(default_factory=CopyKind)
    schedule: faults.Schedule = field(default_factory=faults.Schedule)
    num_groups: int = 8
    pretraining_steps: int = 260
    swap: float = 0.15  # noise of the demonstrations
    warmup_steps: int = 1  # of the learning rate, linear


@dataclass(frozen=True)
class Variant:
    """One way to train: gradloc's remedies, then a clipper of gradients."""

    name: str
    remedies: Callable[[], list[Remedy]] = list
    clipper: Callable[[torch.nn.Module, Any], published.Clipper] = published.global_clip


PLANTED = Setting(
    "planted",
    300,
    1e-3,
    schedule=faults.Schedule(
        token_from=25,
        token_replicas=1,
        sequence_from=45,
        sequence_replicas=6,
        layer_from=135,
        layer_answers=2,
        layer_every=5,
        layer_struck=4,
    ),
    num_groups=16,
    warmup_steps=20,
)
NATURAL = Setting(
    "natural",
    300,
    3e-4,
    copy=CopyKind(bits=4, stale_steps=8),
    num_groups=32,
    pretraining_steps=95,
    swap=0,
)
HARSH = Setting(
    "harsh",
    250,
    1e-4,
    copy=CopyKind(bits=3, stale_steps=8, top_p=0.999),
    num_groups=12,
    pretraining_steps=220,
    swap=0,
)
STAIRCASE = (
    Variant("none"),
    Variant("TokenClip", lambda: [TokenClip()]),
    Variant("+ SeqClip", lambda: [TokenClip(), SeqClip()]),
    Variant("+ LayerClip", lambda: [TokenClip(), SeqClip(), LayerClip()]),
)
OTHERS = (
    Variant("unclipped", clipper=published.unclipped),
    Variant("ZClip", clipper=published.zclip),
    Variant("AdaGC", clipper=published.adagc),
    Variant("AGGC-like", clipper=published.aggc),
    Variant("SPAM-like", clipper=published.spam),
)


@dataclass
class Outcome:
    setting: str
    variant: str
    seed: int
    rewards: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # before LayerClip and clipper
    planted: list[int] = field(default_factory=list)  # steps with a layer fault
    remedied: dict[str, float] = field(default_factory=dict)  # mean fraction acted on
    layer_clip_steps: int = 0
    collapsed_at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        rounded = {name: [float(f"{value:.4g}") for value in getattr(self, name)] for name in ("rewards", "norms")}
        return asdict(self) | rounded

    @property
    def num_spikes(self) -> int:
        return len(spikes(self.norms[: self.collapsed_at]))


def spikes(norms: Sequence[float]) -> list[int]:
    """Steps whose norm is not finite or exceeds SPIKE_FACTOR times the median of the last SPIKE_WINDOW calm ones."""
    found, kept = [], []
    for step, norm in enumerate(norms):
        if not math.isfinite(norm) or (
            len(kept) >= 8 and norm > SPIKE_FACTOR * statistics.median(kept[-SPIKE_WINDOW:])
        ):
            found.append(step)
        elif norm > 0:
            kept.append(norm)
    return found


def collapse(rewards: Sequence[float]) -> int | None:
    """First step whose trailing mean reward is under COLLAPSE_FRACTION of the first HEALTHY_STEPS' mean, or None."""
    healthy = statistics.fmean(rewards[:HEALTHY_STEPS])
    for step in range(HEALTHY_STEPS, len(rewards)):
        trailing = statistics.fmean(rewards[step + 1 - COLLAPSE_WINDOW : step + 1])
        if trailing < COLLAPSE_FRACTION * healthy:
            return step
    return None


def token_losses(
    logp_BR: torch.Tensor, rollout_logp_BR: torch.Tensor, advantage_B: torch.Tensor, mask_BR: torch.Tensor
) -> torch.Tensor:
    """GRPO with PPO's clip on the ratio to the inference copy: [B, R]."""
    ratio_BR = torch.exp(logp_BR - rollout_logp_BR)
    advantage_B1 = advantage_B[:, None]
    surrogate_BR = torch.minimum(ratio_BR * advantage_B1, ratio_BR.clamp(1 - PPO_CLIP, 1 + PPO_CLIP) * advantage_B1)
    return torch.where(mask_BR, -surrogate_BR, 0.0)


def advantages(rewards_B: torch.Tensor) -> torch.Tensor:
    rewards_NG = rewards_B.view(-1, GROUP_SIZE)
    centred_NG = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    return (centred_NG / (rewards_NG.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def train(setting: Setting, variant: Variant, seed: int, weights: dict[str, torch.Tensor] | None = None) -> Outcome:
    """The run; stops at collapse. `weights`: of the pretrained model, when made before."""
    torch.manual_seed(seed)
    if weights is None:
        model = pretrained(seed, setting.pretraining_steps, setting.swap)
    else:
        model = new_model(seed)
        model.load_state_dict(weights)
    copy = InferenceCopy(model, setting.copy, seed=1_000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    bus = MemoryBus()
    remedies = variant.remedies()
    probe = gradloc.watch(model, optimizer, run="staircase", bus=bus, remedies=remedies)
    clip = variant.clipper(model, optimizer)
    rng, fault_rng = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 3])
    outcome = Outcome(setting.name, variant.name, seed)
    for step in range(setting.num_steps):
        batch, reward, planted = _rollout(setting, model, copy, step, rng, fault_rng)
        outcome.rewards.append(reward)
        if planted:
            outcome.planted.append(step)
        logp_BR = logp_of(model, batch.ids_BT)
        probe.tokens(logp_BR, batch.ids_BT, batch.mask_BR, rollout_logp=batch.logp_BR, advantage=batch.advantage_B)
        losses_BR = token_losses(logp_BR, batch.logp_BR, batch.advantage_B, batch.mask_BR)
        (losses_BR.sum() / batch.mask_BR.sum()).backward()
        probe.observe(reward_mean=reward)
        clip(step)
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * min(1.0, (step + 1) / setting.warmup_steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        outcome.layer_clip_steps += any(isinstance(one, LayerClip) and one.last for one in remedies)
        outcome.collapsed_at = collapse(outcome.rewards) if step >= HEALTHY_STEPS else None
        if outcome.collapsed_at is None and not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            outcome.collapsed_at = step
        if outcome.collapsed_at is not None:
            break
    probe.close()
    for entry in bus.read_last(streams.stream("staircase", "steps"), count=100_000):
        message = codec.decode(entry.data)
        if isinstance(message, StepObserved):
            outcome.norms.append(message.grad_norm)
    outcome.remedied = {type(one).__name__: one.num_acted / max(one.num_seen, 1) for one in remedies}
    return outcome


def _rollout(
    setting: Setting,
    model: Any,
    copy: InferenceCopy,
    step: int,
    rng: np.random.Generator,
    fault_rng: np.random.Generator,
) -> tuple[faults.Batch, float, bool]:
    """A batch, its mean reward, and whether a layer fault struck it."""
    copy.sync(model, step)
    picked = rng.choice(NUM_PROMPTS, setting.num_groups, replace=False)
    indices = [int(index) for index in picked for _ in range(GROUP_SIZE)]
    ids_BT, logp_BR = copy.sample(indices)
    responses = ids_BT[:, PROMPT_LENGTH:].tolist()
    rewards_B = torch.tensor([reward_of(index, row) for index, row in zip(indices, responses, strict=True)])
    batch = faults.Batch(ids_BT, logp_BR, torch.ones_like(logp_BR, dtype=torch.bool), advantages(rewards_B))
    schedule, planted = setting.schedule, False
    # Drawn in any case, so that the same seed plants alike under every remedy.
    place_rng = np.random.default_rng(fault_rng.integers(2**63))
    if schedule.token_from is not None and step >= schedule.token_from:
        faults.mixed_up_prefixes(copy.model, batch, schedule.token_replicas)
    if schedule.sequence_from is not None and step >= schedule.sequence_from:
        faults.wrong_temperature(copy.model, batch, schedule.sequence_replicas)
    since = -1 if schedule.layer_from is None else step - schedule.layer_from
    if since >= 0 and since % schedule.layer_every < schedule.layer_struck:
        planted = faults.cancelled_residual(model, batch, place_rng, schedule.layer_answers) > 0
    return batch, float(rewards_B.mean()), planted
