"""A step to explain: small models of several families, and a GRPO-like batch with coefficients.

Independent of the code under test: gradients come from plain autograd. Shapes: B rows, T positions, R
positions with a logp, V vocabulary entries.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from gradloc.layers import layer_key
from gradloc.policy import Meter, PlacedBatch, Policy, place
from gradloc.snapshot import MicroBatch

VOCABULARY = 64
RARE = 1  # an id that no answer holds unless a fault puts it there
PROMPT = 6
FAMILIES = ("qwen3", "qwen3-untied", "llama", "gpt2", "moe", "lora")


def model_of(family: str, seed: int, *, num_layers: int = 3, hidden: int = 32) -> nn.Module:
    """A randomly initialised float32 model; spread enough that tokens differ."""
    torch.manual_seed(seed)
    kind, tied = family.partition("-")[0], family.partition("-")[2] != "untied"
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind in ("qwen3", "lora"):
        kind_hf, shape["head_dim"] = "qwen3", hidden // 4
    elif kind == "moe":
        kind_hf, shape["head_dim"] = "qwen3_moe", hidden // 4
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    elif kind == "gpt2":
        kind_hf = "gpt2"
        shape = {
            "vocab_size": VOCABULARY, "n_embd": hidden, "n_layer": num_layers, "n_head": 4, "n_positions": 512,
            "initializer_range": 0.08, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            "tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
    else:
        kind_hf = kind
    config = AutoConfig.for_model(kind_hf, **shape)
    if kind == "moe":
        config._experts_implementation = "eager"  # the fused kernel knows no float64, which the oracle needs
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if kind == "lora":
        _with_adapters(model, seed)
    return model.eval()


class _Adapted(nn.Module):
    """A frozen linear layer and a trained low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=generator) * 0.1)

    def forward(self, entered: Tensor) -> Tensor:
        return self.base(entered) + entered @ self.down.T @ self.up.T


def _with_adapters(model: nn.Module, seed: int, rank: int = 4) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for block in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(block.self_attn, name, _Adapted(getattr(block.self_attn, name), rank, generator))


@dataclass(frozen=True)
class Step:
    """What the trainer had: its model, micro-batches of each rank, and what it would have reported.

    `autocast`: bf16 forward over float32 weights; None: the weights' own format.
    """

    model: nn.Module
    placed: tuple[PlacedBatch, ...]
    norm: float
    layer_norms: dict[str, float]
    gradients: dict[str, Tensor]
    autocast: torch.dtype | None = None
    healthy_norm: float = math.nan
    healthy_layer_norms: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that a step processes, prompts and padding included."""
        return sum(placed.batch.ids_BT.numel() for placed in self.placed)

    def policy(self) -> Policy:
        return Policy(self.model, Meter(self.num_tokens), autocast_dtype=self.autocast)


def batches_of(
    model: nn.Module,
    seed: int,
    *,
    num_micro_batches: int,
    num_rows: int,
    num_response: int,
    num_ranks: int = 1,
    autocast: torch.dtype | None = None,
) -> tuple[PlacedBatch, ...]:
    """A healthy batch: sampled-looking ids, GRPO-like advantages, ratios near one, means over tokens.

    `num_rows` of each micro-batch; micro-batches are spread over ranks in turn.
    """
    generator = torch.Generator().manual_seed(10_000 + seed)
    length = PROMPT + num_response
    drawn = []
    for _ in range(num_micro_batches):
        ids_BT = torch.randint(2, VOCABULARY, (num_rows, length), generator=generator)
        length_B = torch.randint(max(2, num_response // 2), num_response + 1, (num_rows,), generator=generator)
        mask_BR = torch.arange(num_response) < length_B[:, None]
        advantage_B1 = torch.randn(num_rows, 1, generator=generator).clamp(-2.0, 2.0)
        log_ratio_BR = 0.02 * torch.randn(num_rows, num_response, generator=generator)
        drawn.append((ids_BT, mask_BR, advantage_B1.expand(-1, num_response), log_ratio_BR))
    total = sum(int(mask_BR.sum()) for _, mask_BR, _, _ in drawn)
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for number, (ids_BT, mask_BR, advantage_BR, log_ratio_BR) in enumerate(drawn):
        attention_BT = torch.cat([torch.ones(num_rows, PROMPT, dtype=torch.bool), mask_BR], dim=1)
        with torch.no_grad(), _region(autocast):
            logp_BR = _logp(model, torch.where(attention_BT, ids_BT, 0), attention_BT, num_response)
        ranks[number % num_ranks].append(
            MicroBatch(
                ids_BT=torch.where(attention_BT, ids_BT, 0),
                mask_BR=mask_BR,
                logp_BR=logp_BR,
                coefficient_BR=torch.where(mask_BR, -advantage_BR * log_ratio_BR.exp() / total, 0.0),
                attention_mask_BT=attention_BT,
                rollout_logp_BR=logp_BR - log_ratio_BR,
                advantage_BR=advantage_BR.clone(),
                uids=tuple(f"sample-{number}-{row}" for row in range(num_rows)),
            )
        )
    return place([(batches, 1.0) for batches in ranks])


def _region(autocast: torch.dtype | None) -> Any:
    return contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast, cache_enabled=False)


def _logp(model: nn.Module, ids_BT: Tensor, attention_BT: Tensor, num_response: int) -> Tensor:
    logits = model(input_ids=ids_BT, attention_mask=attention_BT.long()).logits[:, -num_response - 1 : -1]
    logits_BRV = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits_BRV, dim=-1).gather(-1, ids_BT[:, -num_response:, None]).squeeze(-1)


def logp_of(model: nn.Module, batch: MicroBatch, autocast: torch.dtype | None = None) -> Tensor:
    """Logp [B, R] as the trainer computes it, with its graph."""
    assert batch.attention_mask_BT is not None
    with _region(autocast):
        return _logp(model, batch.ids_BT, batch.attention_mask_BT, batch.logp_BR.shape[1])


def run(model: nn.Module, placed: Sequence[PlacedBatch], autocast: torch.dtype | None = None) -> Step:
    """The trainer's step: backward of sum(c * logp) into `.grad`, micro-batch by micro-batch."""
    model.zero_grad(set_to_none=True)
    done = []
    for one in placed:
        logp_BR = logp_of(model, one.batch, autocast)
        # What is outside the mask has c = 0; a NaN coefficient makes the gradient NaN, as it does in training.
        (logp_BR * one.coefficient_BR().to(logp_BR)).sum().backward()
        done.append(replace(one, batch=replace(one.batch, logp_BR=logp_BR.detach())))
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        squares[layer_key(name)] = squares.get(layer_key(name), 0.0) + float(gradient.double().square().sum())
    return Step(
        model=model,
        placed=tuple(done),
        norm=math.sqrt(sum(squares.values())),
        layer_norms={key: math.sqrt(square) for key, square in squares.items()},
        gradients=gradients,
        autocast=autocast,
    )


def with_coefficients(placed: Sequence[PlacedBatch], changed: Sequence[Tensor]) -> tuple[PlacedBatch, ...]:
    """The same batches with these coefficients; rollout logps follow, for c = -advantage * ratio / N."""
    out = []
    for one, coefficient_BR in zip(placed, changed, strict=True):
        batch = one.batch
        scale_BR = coefficient_BR.double() / batch.coefficient_BR.double()
        up_BR = torch.where((scale_BR > 0) & torch.isfinite(scale_BR), scale_BR.log(), 0.0)
        assert batch.rollout_logp_BR is not None
        out.append(
            replace(
                one,
                batch=replace(
                    batch,
                    coefficient_BR=coefficient_BR.to(batch.coefficient_BR.dtype),
                    rollout_logp_BR=batch.rollout_logp_BR - up_BR.to(batch.logp_BR.dtype),
                ),
            )
        )
    return tuple(out)
