"""A tiny trainer to explain: real models, real backward passes, faults planted in its inputs.

Independent of the code under test: losses and norms come from plain autograd on `.grad`.
Shapes: B rows, T positions, R positions with a logp.
"""

import copy
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from gradloc.fidelity import StepFacts
from gradloc.layers import layer_key
from gradloc.manifest import Manifest
from gradloc.policy import Meter, PlacedBatch, Policy, place
from gradloc.snapshot import MicroBatch, collect_parts, write_manifest, write_part, write_tokenizer, write_weights
from gradloc.store import Store

VOCABULARY = 48


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_model(
    seed: int = 0,
    *,
    model_type: str = "qwen3",
    num_layers: int = 3,
    hidden_size: int = 32,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A randomly initialised model of the given family, with enough spread that tokens differ."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.08,
        "tie_word_embeddings": tied,
    }
    if model_type == "qwen3":
        shape["head_dim"] = hidden_size // 4
    if model_type == "gpt2":
        shape = {
            "vocab_size": VOCABULARY, "n_embd": hidden_size, "n_layer": num_layers, "n_head": 4, "n_positions": 128,
            "initializer_range": 0.08, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip
    config = AutoConfig.for_model(model_type, **shape)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(dtype)


@dataclass
class TrainerStep:
    """One step as a trainer ran it: what it would have put into a snapshot and reported."""

    model: nn.Module
    ranks: list[tuple[MicroBatch, ...]]
    grad_factor: float
    grad_norm: float
    layer_norms: dict[str, float]
    gradients: dict[str, Tensor]
    healthy_norm: float | None = None
    healthy_layer_norms: dict[str, float] = field(default_factory=dict)
    limit: float | None = None

    @property
    def placed(self) -> tuple[PlacedBatch, ...]:
        return place([(batches, self.grad_factor) for batches in self.ranks])

    def policy(self, dtype: torch.dtype | None = None) -> Policy:
        model = self.model if dtype is None else self.model.to(dtype)
        num_tokens = sum(batch.ids_BT.numel() for batches in self.ranks for batch in batches)
        return Policy(model, Meter(num_tokens))

    def facts(self, **changes: Any) -> StepFacts:
        known = StepFacts(
            step=7,
            grad_norm=self.grad_norm,
            layer_norms=self.layer_norms,
            limit=self.limit,
            healthy_norm=self.healthy_norm,
            healthy_layer_norms=self.healthy_layer_norms,
        )
        return replace(known, **changes)

    def write(self, url: str, *, tokenizer_json: str | None = None, **changes: Any) -> str:
        """Write the step as a snapshot; returns its URL."""
        store = Store(url)
        for rank, batches in enumerate(self.ranks):
            write_part(store, rank, batches, self.grad_factor)
        names = {id(p): name for name, p in reversed(list(self.model.named_parameters(remove_duplicate=False)))}
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        tied = {
            name: names[id(p)]
            for name, p in self.model.named_parameters(remove_duplicate=False)
            if names[id(p)] != name
        }
        files = write_weights(store, {name: value for name, value in state.items() if name not in tied})
        if tokenizer_json is not None:
            files |= write_tokenizer(store, tokenizer_json)
        manifest = Manifest(
            **{
                "run_id": "run",
                "attempt": 0,
                "step": 7,
                "created_at": 0.0,
                "world_size": len(self.ranks),
                "grad_norm": self.grad_norm,
                "layer_norms": self.layer_norms,
                "limit": self.limit,
                "healthy_norm": self.healthy_norm,
                "healthy_layer_norms": self.healthy_layer_norms,
                "model_config_hf": self.model.config.to_dict(),
                "architecture": type(self.model).__name__,
                "tied_weights": tied,
                "attention": "sdpa",
                "parts": collect_parts(store, len(self.ranks)),
                "files": files,
            }
            | changes
        )
        write_manifest(store, manifest)
        return store.url


Inputs = list[list[dict[str, Any]]]
Fault = Callable[[Inputs], None]


def train_step(
    model: nn.Module,
    *,
    seed: int = 1,
    num_ranks: int = 2,
    num_micro_batches: int = 2,
    num_rows: int = 4,
    num_prompt: int = 6,
    num_response: int = 12,
    padding: str = "right",
    temperature: float = 1.0,
    fault: Fault | None = None,
    advantage_scale: float = 1.0,
) -> TrainerStep:
    """A GRPO-like step: loss = -mean over tokens of advantage * exp(logp - rollout_logp), token by token.

    `fault` changes the inputs, a list of ranks of micro-batches of named tensors, before the loss is computed.
    """
    generator = torch.Generator().manual_seed(seed)
    num_positions = num_prompt + num_response
    inputs: list[list[dict[str, Any]]] = []
    for _ in range(num_ranks):
        batches = []
        for _ in range(num_micro_batches):
            ids_BT = torch.randint(2, VOCABULARY, (num_rows, num_positions), generator=generator)
            length_B = torch.randint(num_response // 2, num_response + 1, (num_rows,), generator=generator)
            skip_B = torch.randint(0, num_prompt // 2, (num_rows,), generator=generator)
            position_T = torch.arange(num_positions)
            attention_BT = torch.ones(num_rows, num_positions, dtype=torch.bool)
            mask_BT = (position_T >= num_prompt) & (position_T < num_prompt + length_B[:, None])
            if padding == "right":
                attention_BT = position_T < num_prompt + length_B[:, None]
            elif padding == "left":
                attention_BT = position_T >= skip_B[:, None]
                mask_BT = (position_T >= num_prompt).expand(num_rows, -1)
            ids_BT = torch.where(attention_BT, ids_BT, 0)
            batches.append(
                {
                    "ids": ids_BT,
                    "attention": attention_BT,
                    "mask": mask_BT[:, num_prompt:].clone(),
                    "positions": (attention_BT.long().cumsum(dim=1) - 1).clamp(min=0),
                    "advantage": torch.randn(num_rows, 1, generator=generator).expand(-1, num_response).clone()
                    * advantage_scale,
                    "log_ratio": 0.02 * torch.randn(num_rows, num_response, generator=generator),
                    "extra": torch.zeros(num_rows, num_response),
                }
            )
        inputs.append(batches)
    if fault is not None:
        fault(inputs)
    num_tokens = sum(int(batch["mask"].sum()) for batches in inputs for batch in batches)
    model.zero_grad(set_to_none=True)
    ranks = []
    for rank, batches in enumerate(inputs):
        done = []
        for index, batch in enumerate(batches):
            done.append(_run(model, batch, f"r{rank}m{index}", num_tokens, num_ranks, temperature))
        ranks.append(tuple(done))
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() / num_ranks
        for name, p in model.named_parameters()
    }
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        squares[layer_key(name)] = squares.get(layer_key(name), 0.0) + float(gradient.double().square().sum())
    model.zero_grad(set_to_none=True)
    return TrainerStep(
        model=model,
        ranks=ranks,
        grad_factor=1.0 / num_ranks,
        grad_norm=math.sqrt(sum(squares.values())),
        layer_norms={key: math.sqrt(square) for key, square in squares.items()},
        gradients=gradients,
    )


def _run(
    model: nn.Module, batch: dict[str, Any], uid: str, num_tokens: int, num_ranks: int, temperature: float
) -> MicroBatch:
    num_response = batch["mask"].shape[1]
    logits = model(
        input_ids=batch["ids"], attention_mask=batch["attention"].long(), position_ids=batch["positions"]
    ).logits[:, -num_response - 1 : -1]
    logp_BR = (
        torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
        .gather(-1, batch["ids"][:, -num_response:, None])
        .squeeze(-1)
    )
    rollout_BR = logp_BR.detach() - batch["log_ratio"]
    captured: list[Tensor] = []
    logp_BR.register_hook(lambda gradient: captured.append(gradient.detach().clone()))
    ratio_BR = torch.exp(logp_BR - rollout_BR)
    loss_BR = -batch["advantage"] * ratio_BR * batch["mask"] + batch["extra"] * logp_BR
    (loss_BR.sum() * num_ranks / num_tokens).backward()
    return MicroBatch(
        ids_BT=batch["ids"],
        mask_BR=batch["mask"],
        logp_BR=logp_BR.detach(),
        coefficient_BR=captured[0],
        attention_mask_BT=batch["attention"],
        position_ids_BT=batch["positions"],
        rollout_logp_BR=rollout_BR,
        advantage_BR=batch["advantage"],
        uids=tuple(f"{uid}s{row}" for row in range(len(batch["ids"]))),
        temperature=temperature,
    )


def healthy_and(model: nn.Module, fault: Fault | None, **shape: Any) -> TrainerStep:
    """The faulty step, knowing the norms of the same step without the fault, and the detector's usual limit."""
    healthy = train_step(model, **shape)
    faulty = train_step(model, fault=fault, **shape)
    faulty.healthy_norm = healthy.grad_norm
    faulty.healthy_layer_norms = healthy.layer_norms
    faulty.limit = 4 * healthy.grad_norm
    return faulty


def brute_force(step: TrainerStep) -> tuple[list[Tensor], list[Tensor]]:
    """Shares and norms of all tokens by one float64 backward pass each: the oracle."""
    model = _double(step.model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows: list[tuple[int, int, int, float, Tensor]] = []
    for index, placed in enumerate(step.placed):
        batch = placed.batch
        num_response = batch.logp_BR.shape[1]
        logits = model(
            input_ids=batch.ids_BT,
            attention_mask=batch.attention_mask_BT.long(),
            position_ids=batch.position_ids_BT,
        ).logits[:, -num_response - 1 : -1]
        logp_BR = torch.log_softmax(logits.double() / batch.temperature, dim=-1)
        logp_BR = logp_BR.gather(-1, batch.ids_BT[:, -num_response:, None]).squeeze(-1)
        for row, column in (batch.coefficient_BR != 0).nonzero().tolist():
            gradients = torch.autograd.grad(logp_BR[row, column], parameters, retain_graph=True, allow_unused=True)
            flat = torch.cat(
                [
                    torch.zeros(p.numel()) if g is None else g.flatten()
                    for p, g in zip(parameters, gradients, strict=True)
                ]
            )
            coefficient = float(batch.coefficient_BR[row, column]) * placed.grad_factor
            rows.append((index, row, column, coefficient, flat * coefficient))
    whole = torch.stack([entry[-1] for entry in rows]).sum(dim=0)
    shares = [torch.zeros(placed.batch.logp_BR.shape, dtype=torch.float64) for placed in step.placed]
    norms = [torch.zeros(placed.batch.logp_BR.shape, dtype=torch.float64) for placed in step.placed]
    for index, row, column, _, flat in rows:
        shares[index][row, column] = torch.dot(flat, whole) / whole.square().sum()
        norms[index][row, column] = flat.norm()
    return shares, norms


def _double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


# --- faults ------------------------------------------------------------------------------------


def extra(size: float, rank: int = 1, micro_batch: int = 0, row: int = 2, column: int = 3) -> Fault:
    """A term size * logp of one token in the loss, whatever its mask."""

    def change(inputs: Inputs) -> None:
        inputs[rank][micro_batch]["extra"][row, column] = size

    return change


def stale(log_ratio: float, rank: int = 1, micro_batch: int = 0, row: int = 2, column: int = 3) -> Fault:
    """The inference copy reported one token's logp too low by `log_ratio`."""

    def change(inputs: Inputs) -> None:
        inputs[rank][micro_batch]["log_ratio"][row, column] = log_ratio

    return change


def advantage(size: float, rank: int = 1, micro_batch: int = 0, row: int = 2) -> Fault:
    """One sequence's advantage."""

    def change(inputs: Inputs) -> None:
        inputs[rank][micro_batch]["advantage"][row] = size

    return change


def all_advantages(factor: float) -> Fault:
    """Everybody's advantage, alike."""

    def change(inputs: Inputs) -> None:
        for batch in (batch for batches in inputs for batch in batches):
            batch["advantage"] *= factor

    return change


def near_cancelling_pair(size: float, left_over: float = 0.05) -> Fault:
    """Two tokens on two ranks, the same in the same context, whose gradients nearly cancel."""

    def change(inputs: Inputs) -> None:
        one, other = inputs[1][0], inputs[0][0]
        for name in ("ids", "attention", "positions", "mask"):
            other[name][0] = one[name][2]
        one["extra"][2, 3] = size
        other["extra"][0, 3] = -size * (1 - left_over)

    return change


def together(*faults: Fault) -> Fault:
    def change(inputs: Inputs) -> None:
        for fault in faults:
            fault(inputs)

    return change


@pytest.fixture(scope="session")
def trainer() -> Any:
    """The functions above, for tests: importlib mode gives a conftest no importable name."""
    return types.SimpleNamespace(
        model=tiny_model,
        step=train_step,
        faulty=healthy_and,
        oracle=brute_force,
        extra=extra,
        stale=stale,
        advantage=advantage,
        all_advantages=all_advantages,
        pair=near_cancelling_pair,
        together=together,
        vocabulary=VOCABULARY,
    )


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A word-level tokenizer that writes token 7 as "w7"."""
    return Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")).to_str()
