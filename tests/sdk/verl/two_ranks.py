"""A training process of test_verl.py: two of these train one actor by verl's engine, FSDP2 over gloo on the CPU.

Runs in verl's own environment, one kind of run after the other; engine, loss and batches are those of
examples/verl_actor.py. Rank 0 writes what it found: per step the cosine and the norms of the replayed gradient against
the engine's own, and who holds the planted token.
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from verl_actor import NUM_ROWS, PROMPT, RESPONSE, batch_of, checkpoint, engine_of, loss_of

NUM_STEPS, FAULTY_STEP = 3, 2
FAULT = (1, 0, 2, 3)  # rank, micro-batch, sequence, column of the response


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in options.kinds:
        train(options.out / kind, packed=kind.startswith("packed"), narrow=kind.endswith("bf16"))
    dist.barrier()
    dist.destroy_process_group()


def train(out: Path, packed: bool, narrow: bool) -> None:
    from gradloc_proto import codec, streams
    from gradloc_proto.memory_bus import MemoryBus
    from gradloc_proto.messages import Limits, LimitsChanged, SnapshotCommitted

    rank = dist.get_rank()
    os.environ["GRADLOC_STORE"] = str(out / "store")
    os.environ["GRADLOC_REMEDIES"] = "TokenClip,LayerClip" if out.name.endswith("remedied") else ""
    engine = engine_of(checkpoint(out), packed=packed, narrow=narrow)
    assert type(engine).__name__ == "WatchedFSDPEngine", type(engine)
    bus = MemoryBus()  # a detector that wants every step explained, in place of Redis
    limits = LimitsChanged(run_id="verl", ts=0.0, step=0, limits=Limits(version=10**6, norm=1e-12))
    bus.append(streams.stream("verl", "limits"), [codec.encode(limits)], length_max=10)
    from gradloc.publisher import Publisher

    if rank == 0:
        engine.probe._publisher = Publisher(bus, "verl")
        while engine.probe._publisher.limits is None:
            pass
    loss = loss_of()
    own, norms = [], []
    clip_and_step = type(engine).__mro__[1]  # verl's own engine: what it does comes after ours
    step_optimizer = clip_and_step.optimizer_step

    def recorded(self):
        own.append({name: p.grad.full_tensor().clone() for name, p in self.module.named_parameters()})
        norms.append(step_optimizer(self))
        return norms[-1]

    clip_and_step.optimizer_step = recorded
    for step in range(NUM_STEPS):
        with engine.train_mode():
            engine.train_batch(batch_of(step, rank, packed=packed, stale=stale(step, rank), num_ranks=2), loss)
        engine.probe._writer.close()
        dist.barrier()
    engine.probe.close()
    clip_and_step.optimizer_step = step_optimizer
    if rank != 0:
        return
    messages = [codec.decode(entry.data) for entry in bus.read_last(streams.stream("verl", "steps"), count=1000)]
    committed = [message for message in messages if isinstance(message, SnapshotCommitted)]
    found = [compared(one.path, own[one.step], norms[one.step]) for one in committed]
    finding = explained(committed[FAULTY_STEP].path, max(norms[:FAULTY_STEP]))
    culprits = [[one.rank, one.micro_batch, one.sequence, one.token] for one in finding.culprits]
    (out / "found.json").write_text(
        json.dumps(
            {"steps": found, "verdict": finding.verdict, "culprits": culprits, "norms": norms, "planted": planted()}
        )
    )


def stale(step: int, rank: int) -> tuple[int, int] | None:
    return (FAULT[1] * NUM_ROWS + FAULT[2], FAULT[3]) if (step, rank) == (FAULTY_STEP, FAULT[0]) else None


def planted() -> list[int]:
    """Place of the fault in right-padded rows: what is left of its prompt, then its column."""
    generator = torch.Generator().manual_seed(100 * FAULTY_STEP + FAULT[0])
    num_rows = 2 * NUM_ROWS
    for width in (PROMPT, RESPONSE):
        torch.randint(2, 16, (num_rows, width), generator=generator)
    dropped = torch.randint(0, 3, (num_rows, 1), generator=generator)[FAULT[1] * NUM_ROWS + FAULT[2]]
    return [*FAULT[:3], PROMPT - int(dropped) + FAULT[3]]


def policy_of(path: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    from gradloc.policy import Meter, Policy, place
    from gradloc.snapshot import open_snapshot

    snapshot = open_snapshot(path)
    manifest = snapshot.manifest
    assert manifest.architecture == "Qwen3ForCausalLM", manifest.architecture
    kept = {k: v for k, v in manifest.model_config_hf.items() if k not in ("dtype", "torch_dtype", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **kept), torch_dtype=torch.float32)
    model.load_state_dict(snapshot.weights())
    if manifest.compute_dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, manifest.compute_dtype))
    autocast = None if manifest.autocast_dtype is None else getattr(torch, manifest.autocast_dtype)
    batches = place([(snapshot.micro_batches(part.rank), part.grad_factor) for part in manifest.parts])
    return manifest, Policy(model, Meter(1000), autocast_dtype=autocast, head=manifest.head), batches


def compared(path: str, own: dict, norm: float) -> dict:
    from gradloc.replay import coefficients_of, replay

    manifest, policy, batches = policy_of(path)
    gradient = replay(policy, batches, coefficients_of(batches)).gradient
    dot = sum(float((own[name].double() * gradient.tensors[name].double()).sum()) for name in own)
    square = sum(float(one.double().square().sum()) for one in own.values())
    return {
        "step": manifest.step,
        "cosine": dot / math.sqrt(square) / gradient.norm,
        "norm_error": abs(gradient.norm / math.sqrt(square) - 1),
        "reported_error": abs(manifest.grad_norm / norm - 1),
    }


def explained(path: str, healthy_norm: float):
    from gradloc.fidelity import StepFacts
    from gradloc.localization import localize

    manifest, policy, batches = policy_of(path)
    facts = StepFacts(manifest.step, manifest.grad_norm, manifest.layer_norms, healthy_norm=healthy_norm)
    return localize(policy, batches, facts)


if __name__ == "__main__":
    main()
