"""A training process of test_ranks.py: two of these train together over gloo, as DDP or as FSDP2."""

import argparse
import gc
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradloc
from gradloc_proto.memory_bus import MemoryBus


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fail-rank", type=int, default=-1)
    parser.add_argument("--spike-rank", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(arguments)
    gc.collect()  # a group that DDP still holds outlives its destruction, and its threads the interpreter: SIGABRT
    dist.destroy_process_group()


def train(arguments: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.ModuleDict({"embed_tokens": nn.Embedding(11, 8), "lm_head": nn.Linear(8, 11, bias=False)})
    wrapped = _Language(model)
    if arguments.mode == "ddp":
        trained: nn.Module = DistributedDataParallel(wrapped)
    else:
        from torch.distributed.fsdp import fully_shard

        trained = fully_shard(wrapped)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    bus = MemoryBus()
    probe = gradloc.watch(trained, optimizer, run="ranks", bus=bus, store=str(arguments.out / "store"))
    generator = torch.Generator().manual_seed(10 + rank)
    rows = []
    for step in range(14):
        ids_BT = torch.randint(0, 11, (4, 6), generator=generator)
        logp_BR = trained(ids_BT)
        weight_BR = torch.randn(logp_BR.shape, generator=generator)
        if step == 12 and rank == arguments.spike_rank:
            weight_BR[2, 3] = 1e4
        if step == 5 and rank == arguments.fail_rank:
            probe.tokens(logp_BR, ids_BT, torch.ones(1, 1))  # a mistake of one rank only
            probe._norms._groups_P = torch.tensor([99])  # and a failure of ours, deep inside
        probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=logp_BR.detach())
        (-(weight_BR * logp_BR).mean()).backward()
        norm = nn.utils.get_total_norm([p.grad for p in trained.parameters()])
        full = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        decision = probe.observe(loss=float(rank))
        rows.append({"step": step, "norm": full, "decision": decision})
        optimizer.step()
        optimizer.zero_grad()
    probe.close()
    entries = [entry.data.decode() for entry in bus.read_last("gradloc:{ranks}:steps", count=100)]
    (arguments.out / f"rank-{rank}.json").write_text(json.dumps({"rows": rows, "entries": entries}))


class _Language(nn.Module):
    """Log-probabilities of all tokens but the first, inside forward so that DDP and FSDP see it all."""

    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        logits = self.parts["lm_head"](self.parts["embed_tokens"](ids_BT))[:, :-1]  # type: ignore[index]
        return torch.log_softmax(logits, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
