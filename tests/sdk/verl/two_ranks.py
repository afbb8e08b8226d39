"""A training process of test_verl.py: two of these train one actor by verl's engine, FSDP2 over gloo on the CPU.

Runs in verl's own environment. Rank 0 writes what it found: per step the cosine and the norms of the replayed gradient
against the engine's own, and who holds the planted token.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
NUM_STEPS, FAULTY_STEP = 3, 2
PROMPT, RESPONSE, NUM_ROWS = 4, 6, 4
FAULT = (1, 0, 2, 3)  # rank, micro-batch, sequence, column of the response


def checkpoint(folder: Path) -> str:
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
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    path = folder / f"policy-{os.environ['RANK']}"
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def engine_of(path: str, packed: bool):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    model = HFModelConfig(
        path=path,
        load_tokenizer=False,
        use_remove_padding=packed,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_torch_compile=False,
        use_remove_padding=packed,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=NUM_ROWS,
    )
    made = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model,
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, clip_grad=0.1, total_training_steps=10, weight_decay=0.0),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def batch_of(step: int, rank: int, packed: bool):
    """Two micro-batches of rows with prompts and responses of unlike lengths, as verl's workers get them."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(100 * step + rank)
    num_rows = 2 * NUM_ROWS
    prompts = torch.randint(2, 16, (num_rows, PROMPT), generator=generator)
    responses = torch.randint(2, 16, (num_rows, RESPONSE), generator=generator)
    prompt_mask = torch.arange(PROMPT) >= torch.randint(0, 3, (num_rows, 1), generator=generator)
    response_mask = torch.arange(RESPONSE) < torch.randint(4, RESPONSE + 1, (num_rows, 1), generator=generator)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    old_log_probs = -2.77 + 0.1 * torch.randn(num_rows, RESPONSE, generator=generator)
    advantages = torch.randn(num_rows, 1, generator=generator).expand(-1, RESPONSE).clone()
    if step == FAULTY_STEP and rank == FAULT[0]:
        row = FAULT[1] * NUM_ROWS + FAULT[2]
        advantages[row] = -1.0
        old_log_probs[row, FAULT[3]] -= 9.0
    data = TensorDict(
        {
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask.long(),
            "old_log_probs": old_log_probs,
            "advantages": advantages,
        },
        batch_size=num_rows,
    )
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(
        data,
        temperature=0.9,
        use_remove_padding=packed,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=NUM_ROWS,
        global_batch_size=2 * num_rows,
        calculate_entropy=True,
        pad_token_id=0,
    )
    return data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options.out, options.packed)
    dist.barrier()
    dist.destroy_process_group()


def train(out: Path, packed: bool) -> None:
    from functools import partial

    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    from gradloc_proto import codec, streams
    from gradloc_proto.memory_bus import MemoryBus
    from gradloc_proto.messages import Limits, LimitsChanged, SnapshotCommitted

    rank = dist.get_rank()
    engine = engine_of(checkpoint(out), packed)
    assert type(engine).__name__ == "WatchedFSDPEngine", type(engine)
    bus = MemoryBus()  # a detector that wants every step explained, in place of Redis
    limits = LimitsChanged(run_id="verl", ts=0.0, step=0, limits=Limits(version=10**6, norm=1e-12))
    bus.append(streams.stream("verl", "limits"), [codec.encode(limits)], length_max=10)
    from gradloc.publisher import Publisher

    if rank == 0:
        engine.probe._publisher = Publisher(bus, "verl")
        while engine.probe._publisher.limits is None:
            pass
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=NUM_ROWS,
        entropy_coeff=0.01,
        use_dynamic_bsz=False,
        clip_ratio_c=1e6,  # verl's dual clip would silence the fault
    )
    loss = partial(ppo_loss, actor)
    own, norms = [], []
    step_optimizer = type(engine).__mro__[1].optimizer_step

    def recorded(self):
        own.append({name: p.grad.full_tensor().clone() for name, p in self.module.named_parameters()})
        norms.append(step_optimizer(self))
        return norms[-1]

    type(engine).__mro__[1].optimizer_step = recorded
    for step in range(NUM_STEPS):
        with engine.train_mode():
            engine.train_batch(batch_of(step, rank, packed), loss)
        engine.probe._writer.close()
        dist.barrier()
    engine.probe.close()
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
    batches = place([(snapshot.micro_batches(part.rank), part.grad_factor) for part in manifest.parts])
    return manifest, Policy(model, Meter(1000)), batches


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
