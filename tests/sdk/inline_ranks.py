"""A training process of test_inline.py: two of these train over gloo, with inline mode and without, and compare."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradloc

SPIKE = 12
VOCABULARY = 23


class Language(nn.Module):
    """Logits [B, T, V]; counts its calls in a buffer and draws random numbers, as awkward models do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Linear(width, width)}) for _ in range(2))
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("num_calls", torch.zeros(1))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        torch.rand(3)
        hidden = self.embed_tokens(ids_BT)
        hidden = hidden + torch.cumsum(hidden, dim=1) * 0.1
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer["mlp"](hidden))  # type: ignore[index]
        return self.lm_head(hidden)


def train(mode: str, localize: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    failing = mode == "ddp-failing"
    os.environ["GRADLOC_STRICT"] = "0" if failing else "1"
    torch.manual_seed(0)
    model = Language()
    if mode.startswith("ddp"):
        trained: nn.Module = DistributedDataParallel(model)
    else:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mode == "fsdp2-bf16" else None)
        for layer in model.layers:
            fully_shard(layer["mlp"], mp_policy=precision)  # type: ignore[index]
        trained = fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    probe = gradloc.watch(trained, optimizer, run="ranks", localize=localize)
    if failing and rank == 1 and localize:
        probe._inline._module = None  # type: ignore[union-attr, assignment]  # a failure of ours, on one rank only
    generator = torch.Generator().manual_seed(10 + rank)
    at_spike: dict[str, Any] = {}
    batches: list[Any] = []
    weights: dict[str, Any] = {}
    for step in range(SPIKE + 2):
        for micro_batch in range(2):
            ids_BT = torch.randint(0, VOCABULARY, (4, 9), generator=generator)
            logp_BTV = torch.log_softmax(trained(ids_BT)[:, :-1].float(), -1)
            logp_BR = logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
            weight_BR = torch.randn(logp_BR.shape, generator=generator)
            if step == SPIKE and micro_batch == 1:
                weight_BR = weight_BR * rank  # a micro-batch of rank 0 without any gradient
                weight_BR[2, 3] = 3e3 * rank
            if step == SPIKE:
                batches.append((ids_BT.tolist(), (-weight_BR / weight_BR.numel()).tolist()))
            probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=logp_BR.detach())
            (-(weight_BR * logp_BR).mean()).backward()
        probe.observe()
        if step == SPIKE:
            weights = {name: _whole(parameter).tolist() for name, parameter in model.named_parameters()}
            at_spike = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
            at_spike["random"] = torch.get_rng_state()
        optimizer.step()
        optimizer.zero_grad()
    state = {name: _whole(value) for name, value in model.state_dict().items()}
    return {
        "state": state | {f"spike.{name}": value for name, value in at_spike.items()},
        "findings": [json.loads(one.model_dump_json()) for one in probe.findings],
        "training": model.training,
        "batches": batches,  # at the spike: ids and dL/dlogp, with the weights of then
        "weights": weights,
    }


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = {}
    for mode in arguments.modes:
        without, inline = (train(mode, localize) for localize in (None, "inline"))
        report[mode] = {
            "findings": inline["findings"],
            "training": inline["training"],
            "batches": inline["batches"],
            "weights": inline["weights"],
            "differing": [
                name for name, value in without["state"].items() if not torch.equal(value, inline["state"][name])
            ],
            "num_compared": len(without["state"]),
        }
    (arguments.out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
