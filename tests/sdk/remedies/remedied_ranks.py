"""A training process of test_remedied_ranks.py: alone, or one of two over gloo, as DDP or as FSDP2."""

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradloc
from gradloc.clipping import LayerClip, SeqClip, TokenClip
from gradloc_proto.memory_bus import MemoryBus

NUM_ROWS = 4


class Amplify(torch.autograd.Function):
    """The stream as it is; on the way back one position's gradient a hundred thousand times."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        ctx.place = place
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        grad[ctx.place] *= 1e5
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)
        self.amplified: tuple[int, int] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.amplified is not None:
            hidden = Amplify.apply(hidden, self.amplified)
        return hidden + torch.tanh(self.mlp(torch.cumsum(hidden, dim=1) / 6))


class Language(nn.Module):
    """Log-probabilities of all tokens but the first, inside forward so that DDP and FSDP see it all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids_BT)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden)[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["alone", "ddp", "fsdp2"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = 0, 1
    if arguments.mode != "alone":
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
    train(arguments, rank, world_size)
    if dist.is_initialized():
        gc.collect()  # a group that DDP still holds outlives its destruction, and its threads the interpreter
        dist.destroy_process_group()


def train(arguments: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Language()
    trained: nn.Module = model
    if arguments.mode == "ddp":
        trained = DistributedDataParallel(model)
    elif arguments.mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clip = LayerClip()
    bus = MemoryBus()
    probe = gradloc.watch(trained, optimizer, run="ranks", bus=bus, remedies=[TokenClip(), SeqClip(), clip])
    generator = torch.Generator().manual_seed(10)
    own = slice(rank * NUM_ROWS // world_size, (rank + 1) * NUM_ROWS // world_size)
    steps = []
    for step in range(16):
        ids_BT = torch.randint(0, 11, (NUM_ROWS, 6), generator=generator)[own]
        weight_BR = torch.randn((NUM_ROWS, 5), generator=generator)[own]
        off_BR = torch.zeros(NUM_ROWS, 5)
        if step % 3 == 0:
            off_BR[3, 1] = 9.0  # a token of the last rank
            off_BR[0] = 0.4  # an answer of the first
        top = model.layers[2]
        is_mine = own.start <= 3 < own.stop
        top.amplified = (3 - own.start, 2) if step == 13 and is_mine else None  # type: ignore[assignment]
        logp_BR = trained(ids_BT)
        probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=logp_BR.detach() - off_BR[own])
        (weight_BR * logp_BR).mean().backward()
        if step in (12, 14):
            for parameter in model.layers[1].parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1e4 if step == 12 else float("nan"))
        probe.observe()
        acted = [(one.name, one.scale, one.num_positions) for one in clip.last]
        steps.append({"gradients": gradients(model), "acted": acted, "limits": clip.entering_limits()})
        optimizer.step()
        optimizer.zero_grad()
    probe.close()
    entries = [entry.data.decode() for entry in bus.read_last("gradloc:{ranks}:steps", count=100)]
    state = clip.state_dict()
    (arguments.out / f"rank-{rank}.json").write_text(json.dumps({"steps": steps, "entries": entries, "state": state}))


def gradients(model: nn.Module) -> dict[str, list[float] | None]:
    whole: dict[str, list[float] | None] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None and hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        whole[name] = None if grad is None else grad.flatten().tolist()
    return whole


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
