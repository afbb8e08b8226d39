"""verl's actor update on a tiny model, watched: no line of verl changes, environment variables do it.

    make verl
    .venv-verl/bin/python examples/verl_actor.py            # judged in this process
    .venv-verl/bin/python examples/verl_actor.py --fault    # one token is recorded wrongly; inline mode names it

One rank trains by verl's own FSDP2 engine and PPO loss, on the CPU (verl_platform_cpu.py), on batches as verl's workers
get them. What a rollout would bring is random here.
"""

import argparse
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
PROMPT, RESPONSE, NUM_ROWS = 4, 6, 4
FAULTY_STEP, STALE = 20, 9.0
CLIP_RATIO_C = 1e6  # verl's dual clip, at its default of 3, would silence the fault


def set_environment() -> None:
    """What a user exports; before verl is imported."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_platform_cpu,gradloc.integrations.verl",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_ENGINE_VENDOR": "gradloc",
        "GRADLOC_RUN": "verl-actor",
        "GRADLOC_LOCALIZE": "inline",
        "HF_HUB_OFFLINE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        os.environ.setdefault(name, value)


def checkpoint(folder: Path) -> str:
    """A tiny policy in a folder of this rank's."""
    import torch
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


def engine_of(path: str, *, packed: bool = True, narrow: bool = False) -> Any:
    """verl's engine for an actor; narrow: bf16."""
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
        mixed_precision={"param_dtype": "bf16" if narrow else "fp32", "reduce_dtype": "fp32"},
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


def loss_of() -> Any:
    """verl's PPO loss with an entropy term."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=NUM_ROWS,
        entropy_coeff=0.01,
        use_dynamic_bsz=False,
        clip_ratio_c=CLIP_RATIO_C,
    )
    return partial(ppo_loss, actor)


def batch_of(
    step: int, rank: int, *, packed: bool = True, stale: tuple[int, int] | None = None, num_ranks: int = 1
) -> Any:
    """Two micro-batches of rows with prompts and responses of unlike lengths, as verl's workers get them.

    stale: row and column of the response whose log-probability is recorded wrongly.
    """
    import torch
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
    if stale is not None:
        advantages[stale[0]] = -1.0
        old_log_probs[stale] -= STALE
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
        global_batch_size=num_ranks * num_rows,
        calculate_entropy=True,
        pad_token_id=0,
    )
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--fault", action="store_true", help=f"record one token wrongly at step {FAULTY_STEP}")
    options = parser.parse_args()
    set_environment()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        engine, loss = engine_of(checkpoint(Path(folder))), loss_of()
    for step in range(options.steps):
        stale = (2, 3) if options.fault and step == FAULTY_STEP else None
        with engine.train_mode():
            engine.train_batch(batch_of(step, 0, stale=stale), loss)
    engine.probe.close()
    sys.stdout.write(f"{options.steps} steps; the engine waited {engine.probe.stall_s:.3f} s for gradloc\n")
    for finding in engine.probe.findings:
        sys.stdout.write(f"step {finding.step}: {finding.summary}\n")
        sys.stdout.writelines(f"{cause.summary}\n" for cause in finding.causes[:1])
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
