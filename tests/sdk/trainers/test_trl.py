"""TRL's GRPOTrainer, DPOTrainer and SFTTrainer as they are: the replayed gradient is the trainer's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed; pip install 'gradloc[trl]'")

import datasets
from trl import GRPOConfig, GRPOTrainer

from gradloc.clipping import LayerClip, SeqClip, TokenClip
from gradloc.integrations.trl import attach
from gradloc_proto.messages import StepObserved

# TRL and transformers warn of each other's names; ours stay errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:trl"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
]
NUM_STEPS, FAULTY_STEP = 4, 3
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "kl": {"loss_type": "grpo", "beta": 0.04},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.02},
    "two iterations": {"loss_type": "grpo", "num_iterations": 2},
    "bfloat16": {"loss_type": "dapo", "bf16": True},
    "checkpointing": {
        "loss_type": "grpo",
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
}


def reward_even(completions: list[str], **_: Any) -> list[float]:
    return [sum(one in "02468" for one in text) / 8 + len(text) / 100 for text in completions]


def grpo_trainer(path: Path, model: Any, tokenizer: Any, out: Path, **changed: Any) -> GRPOTrainer:
    prompts = ["12", "345", "6", "789", "2468", "13", "57", "90"]
    arguments: dict[str, Any] = {
        "output_dir": str(out / "out"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "temperature": 0.9,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=reward_even,
        args=GRPOConfig(**(arguments | changed)),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )


class StaleToken:
    """A real fault in the data: at one micro-batch the sampler's log-probability of one token is recorded wrongly."""

    def __init__(self, trainer: Any, step: int, micro_batch: int) -> None:
        self.place: tuple[int, int, int] | None = None
        prepare = trainer._prepare_inputs
        seen = -1

        def prepared(batch: Any) -> Any:
            nonlocal seen
            inputs = prepare(batch)
            seen += 1
            if seen == step * 2 + micro_batch:
                inputs = dict(inputs)
                row = int(inputs["advantages"].argmin())  # a negative advantage: no clip silences it
                column = int(inputs["completion_mask"][row].sum()) // 2
                old = inputs["old_per_token_logps"].clone()
                old[row, column] -= 9.0
                inputs["old_per_token_logps"] = old
                self.place = (micro_batch, row, inputs["prompt_ids"].shape[1] + column)
            return inputs

        trainer._prepare_inputs = prepared


@pytest.mark.parametrize("case", CASES)
def test_grpo_is_replayed_exactly_and_a_stale_token_is_found(
    case: str,
    policy_path: Path,
    load: Callable[[], Any],
    tokenizer: Any,
    bus: Any,
    recorder: Any,
    compared: Any,
    explained: Any,
    every_snapshot: Any,
    tmp_path: Path,
) -> None:
    trainer = grpo_trainer(policy_path, load(), tokenizer, tmp_path, **CASES[case])
    recorder.watch(trainer)
    attachment = attach(trainer, run="trainer-run", bus=bus, store=str(tmp_path / "store"))
    fault = StaleToken(trainer, FAULTY_STEP, 1)
    every_snapshot(attachment, trainer)
    trainer.train()
    assert len(recorder.norms) == NUM_STEPS
    for step in range(NUM_STEPS):
        found = compared(bus, recorder, step)
        assert found.cosine >= 1 - (1e-4 if case == "bfloat16" else 1e-9), (step, found)
        assert found.norm_error <= 1e-5, (step, found)
        assert found.reported_error <= 1e-5, (step, found)
    finding = explained(bus, FAULTY_STEP, max(recorder.norms[:FAULTY_STEP]))
    assert finding.verdict == "token"
    (culprit,) = finding.culprits
    assert (culprit.micro_batch, culprit.sequence, culprit.token) == fault.place
    assert culprit.uid.startswith("prompt-")
    assert finding.certificate is not None
    assert finding.certificate.norm_without < 4 * max(recorder.norms[:FAULTY_STEP])


def test_token_clip_keeps_a_stale_token_out_of_the_update(
    policy_path: Path,
    load: Callable[[], Any],
    tokenizer: Any,
    bus: Any,
    recorder: Any,
    compared: Any,
    every_snapshot: Any,
    tmp_path: Path,
) -> None:
    trainer = grpo_trainer(policy_path, load(), tokenizer, tmp_path)
    recorder.watch(trainer)
    remedies = [TokenClip(), SeqClip(low=1e-9, high=1e9), LayerClip()]
    attachment = attach(trainer, run="trainer-run", bus=bus, store=str(tmp_path / "store"), remedies=remedies)
    StaleToken(trainer, FAULTY_STEP, 1)
    every_snapshot(attachment, trainer)
    trainer.train()
    assert recorder.norms[FAULTY_STEP] < 4 * max(recorder.norms[:FAULTY_STEP]), "not so without it: the test above"
    found = compared(bus, recorder, FAULTY_STEP)
    assert found.cosine >= 1 - 1e-9 and found.norm_error <= 1e-5, "what is replayed is the step as it was taken"
    told = {message.step: message.tokens_remedied for message in bus.found(StepObserved)}
    assert told[FAULTY_STEP] is not None and told[FAULTY_STEP] > 0 == told[0]


def test_what_is_not_trls_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of TRL's"):
        attach(torch.nn.Linear(1, 1), run="x")
