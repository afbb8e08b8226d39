"""TRL's GRPOTrainer on a tiny model, watched: one more line in a script that one has already.

    pip install ./proto './sdk[trl]'
    python examples/trl_grpo.py                                   # judged in this process
    python examples/trl_grpo.py --redis redis://127.0.0.1:6379/0 --store file:///data/gradloc

The model is made from a configuration, the prompts are digits, and the reward is the share of even ones. With
--fault the sampler's log-probability of one token is recorded wrongly after step 20, and inline mode names it.
"""

import argparse
import sys
import warnings
from typing import Any

import datasets
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from gradloc.integrations.trl import attach

FAULTY_STEP = 20


def tokenizer() -> PreTrainedTokenizerFast:
    names = [*"0123456789", "<pad>", "<eos>", "<unk>"]
    made = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            pad_token_id=10,
            bos_token_id=11,
            eos_token_id=11,
        )
    )


def even_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(one in "02468" for one in text) / max(len(text), 1) for text in completions]


def plant_fault(trainer: GRPOTrainer) -> None:
    """One token of one batch was eight nats likelier to its sampler than is recorded."""
    prepare = trainer._prepare_inputs
    num_seen = 0
    planted: list[int] = []

    def prepared(batch: Any) -> Any:
        nonlocal num_seen
        inputs = dict(prepare(batch))
        row = int(inputs["advantages"].argmin())
        if num_seen >= FAULTY_STEP and inputs["advantages"][row] < 0 and not planted:
            column = int(inputs["completion_mask"][row].sum()) // 2
            inputs["old_per_token_logps"] = inputs["old_per_token_logps"].clone()
            inputs["old_per_token_logps"][row, column] -= 8.0
            planted.append(num_seen)
        num_seen += 1
        return inputs

    trainer._prepare_inputs = prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--fault", action="store_true", help=f"record one token wrongly after step {FAULTY_STEP}")
    parser.add_argument("--redis", help="URL of the service's Redis; none: judged in this process")
    parser.add_argument("--store", help="where snapshots go, any fsspec URL")
    parser.add_argument("--out", default="trl-out", help="the trainer's own folder")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of TRL and transformers about each other
    arguments = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        max_completion_length=6,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model(),
        reward_funcs=even_digits,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": [str(number) for number in range(10, 74)]}),
        processing_class=tokenizer(),
    )
    if options.fault:
        plant_fault(trainer)
    watched = attach(trainer, run="trl-grpo", redis=options.redis, store=options.store, localize="inline")
    trainer.train()
    finding = watched.finding
    probe = watched.probe
    sys.stdout.write(f"{options.steps} steps; the trainer waited {probe.stall_s if probe else 0:.3f} s for gradloc\n")
    if finding is not None:
        sys.stdout.write(f"step {finding.step}: {finding.summary}\n")
        sys.stdout.writelines(f"{cause.summary}\n" for cause in finding.causes[:1])


if __name__ == "__main__":
    main()
