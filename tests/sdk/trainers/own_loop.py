"""A loop of one's own around a tiny language model, watched: alone, or as one of two ranks over gloo.

Two micro-batches a step, gradients reduced after the second only; at the last step the sampler's log-probability of one
token is recorded wrongly. A program of test_own_loop.py; rank 0 writes each step's own gradient, before clipping.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradloc
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import Limits, LimitsChanged

RUN = "own-loop"
NUM_STEPS, FAULTY_STEP = 3, 2
NUM_ROWS, WIDTH, PROMPT = 4, 10, 3
FAULT = (1, 2, 6)  # micro-batch, sequence, token; on the last rank


@dataclass(frozen=True)
class Kind:
    """What trains how."""

    wrapped: str = "plain"  # plain, ddp, fsdp2, compiled
    number_format: str = "fp32"  # fp32, bf16, fp16
    checkpointing: bool = False

    @classmethod
    def of(cls, name: str) -> "Kind":
        parts = name.split("-")
        return cls(parts[0], parts[1], "checkpointing" in parts)


@dataclass
class Trained:
    """Own gradients before clipping, and their norms; the bus that heard of every step."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    bus: MemoryBus = field(default_factory=MemoryBus)


def language_model() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model: nn.Module = Qwen3ForCausalLM(config)
    return model.train()


def wrapped(model: nn.Module, kind: Kind) -> nn.Module:
    if kind.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if kind.wrapped == "ddp":
        return DistributedDataParallel(model)
    if kind.wrapped == "compiled":
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
    if kind.wrapped == "fsdp2":
        narrow = torch.bfloat16 if kind.number_format == "bf16" else None
        precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mp_policy=precision)  # type: ignore[arg-type]
        fully_shard(model, mp_policy=precision)
    return model


@contextlib.contextmanager
def accumulating(trained: nn.Module, is_last: bool) -> Iterator[None]:
    """Gradients are reduced over ranks after the last micro-batch."""
    if isinstance(trained, FSDPModule):
        trained.set_requires_gradient_sync(is_last)
    if isinstance(trained, DistributedDataParallel) and not is_last:
        with trained.no_sync():
            yield
    else:
        yield


def log_probs(trained: nn.Module, ids_BT: Tensor, kind: Kind) -> Tensor:
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind.number_format)
    with torch.autocast("cpu", dtype=narrow, enabled=narrow is not None and kind.wrapped != "fsdp2"):
        logits_BTV = trained(input_ids=ids_BT).logits
    logp_BRV = torch.log_softmax(logits_BTV[:, PROMPT - 1 : -1].float() / 0.9, -1)
    return logp_BRV.gather(-1, ids_BT[:, PROMPT:, None])[..., 0]


def train(kind: Kind, store: str, rank: int, world_size: int) -> Trained:
    found = Trained()
    limits = LimitsChanged(run_id=RUN, ts=0.0, step=0, limits=Limits(version=10**6, norm=1e-12, healthy_norm=1e-12))
    found.bus.append(streams.stream(RUN, "limits"), [codec.encode(limits)], length_max=10)
    model = language_model()
    trained = wrapped(model, kind)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind.number_format == "fp16")
    probe = gradloc.watch(trained, optimizer, run=RUN, bus=found.bus, store=store, reference_after=None, scaler=scaler)
    while rank == 0 and probe._publisher.limits is None:  # type: ignore[union-attr]
        pass
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(NUM_STEPS):
        for micro_batch in range(2):
            ids_BT = torch.randint(0, 16, (NUM_ROWS, WIDTH), generator=generator)
            advantage_B = torch.randn(NUM_ROWS, generator=generator)
            noise_BR = 0.1 * torch.randn(NUM_ROWS, WIDTH - PROMPT, generator=generator)
            with accumulating(trained, is_last=micro_batch == 1):
                logp_BR = log_probs(trained, ids_BT, kind)
                told_BR = logp_BR.detach() + noise_BR
                if (step, rank, micro_batch) == (FAULTY_STEP, world_size - 1, FAULT[0]):
                    advantage_B[FAULT[1]] = -1.0
                    told_BR[FAULT[1], FAULT[2] - PROMPT] -= 9.0
                probe.tokens(
                    logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=told_BR, advantage=advantage_B,
                    temperature=0.9,
                )  # fmt: skip
                ratio_BR = torch.exp(logp_BR - told_BR)
                gain_BR = torch.minimum(
                    ratio_BR * advantage_B[:, None], ratio_BR.clamp(0.8, 1.2) * advantage_B[:, None]
                )
                scaler.scale(-gain_BR.mean() / 2).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        own = {name: _whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}
        found.gradients.append(own)
        found.norms.append(float(torch.stack([one.double().norm() for one in own.values()]).norm()))
        probe.observe()
        nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        probe._writer.close()  # type: ignore[union-attr]  # every step's snapshot is wanted
        if world_size > 1:
            dist.barrier()
    probe.close()
    return found


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    for name in arguments.kinds:
        found = train(Kind.of(name), str(arguments.out / name / "store"), rank, world_size)
        if rank == 0:
            for step, own in enumerate(found.gradients):
                save_file(own, arguments.out / name / f"own-{step}.safetensors")
            entries = found.bus.read_last(streams.stream(RUN, "steps"), count=1000)
            (arguments.out / name / "messages.jsonl").write_bytes(b"\n".join(entry.data for entry in entries))
    # What gloo's threads still do must not decide how this process ends.
    os._exit(0)


if __name__ == "__main__":
    main()
