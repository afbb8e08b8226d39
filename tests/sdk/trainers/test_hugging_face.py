"""Hugging Face's Trainer (SFT) and TRL's SFT and DPO: the replayed gradient is the trainer's own, a fault is found."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed; pip install 'gradloc[trl]'")

import datasets
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from gradloc.integrations import hugging_face, trl

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:trl"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
]
NUM_STEPS, FAULTY_STEP = 3, 2
TEXTS = ["1234", "24680", "135", "98765", "11223", "2468", "8642", "555", "90909", "3141", "27182", "16180"]


def arguments(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out / "out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }


def plain_trainer(model: Any, tokenizer: Any, out: Path, **changed: Any) -> Trainer:
    rows = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        padding = 6 - len(ids)
        rows.append(
            {
                "input_ids": [10] * padding + ids,
                "attention_mask": [0] * padding + [1] * len(ids),
                "labels": [-100] * (padding + 1) + ids[1:],
            }
        )
    given = arguments(out) | {"remove_unused_columns": False} | changed
    return Trainer(
        model=model,
        args=TrainingArguments(**given),
        train_dataset=datasets.Dataset.from_list(rows),
        data_collator=lambda batch: {name: torch.tensor([row[name] for row in batch]) for name in batch[0]},
        processing_class=tokenizer,
    )


def sft_trainer(model: Any, tokenizer: Any, out: Path) -> SFTTrainer:
    return SFTTrainer(
        model=model,
        args=SFTConfig(**arguments(out)),
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
    )


def dpo_trainer(model: Any, tokenizer: Any, out: Path) -> DPOTrainer:
    rows = [{"prompt": text[:2], "chosen": text[2:], "rejected": text[:0:-1]} for text in TEXTS]
    return DPOTrainer(
        model=model,
        args=DPOConfig(**arguments(out), beta=0.5),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def plain_trainer_bf16(model: Any, tokenizer: Any, out: Path) -> Trainer:
    return plain_trainer(model, tokenizer, out, bf16=True)


MAKERS = {
    "plain bf16": (plain_trainer_bf16, hugging_face.attach),
    "plain": (plain_trainer, hugging_face.attach),
    "sft": (sft_trainer, trl.attach),
    "dpo": (dpo_trainer, trl.attach),
}


def scale_one_row(module: Any, step: int) -> tuple[int, int]:
    """A real fault of the loss: at one micro-batch one row counts a thousand times. Returns micro-batch and row."""
    micro_batch, row = 1, 1
    seen = -1

    def hook(module: Any, args: Any, output: Any) -> None:
        nonlocal seen
        if not torch.is_grad_enabled():
            return
        seen += 1
        if seen != step * 2 + micro_batch:
            return
        tensor = output if isinstance(output, torch.Tensor) else output.log_probs
        factors = torch.ones(tensor.shape[0], *[1] * (tensor.dim() - 1))
        factors[row] = 1000.0
        tensor.register_hook(lambda grad: grad * factors.to(grad.dtype))

    module.register_forward_hook(hook)
    return micro_batch, row


@pytest.mark.parametrize("kind", MAKERS)
def test_the_step_is_replayed_exactly_and_a_row_that_counts_too_much_is_found(
    kind: str,
    load: Callable[[], Any],
    tokenizer: Any,
    bus: Any,
    recorder: Any,
    compared: Any,
    explained: Any,
    every_snapshot: Any,
    tmp_path: Path,
) -> None:
    make, attach = MAKERS[kind]
    trainer = make(load(), tokenizer, tmp_path)
    recorder.watch(trainer)
    part = trainer.model.lm_head if kind.startswith("plain") else trainer.model
    place = scale_one_row(part, FAULTY_STEP)  # its hook comes first: the loss has it as well
    attachment = attach(trainer, run="trainer-run", bus=bus, store=str(tmp_path / "store"))
    every_snapshot(attachment, trainer)
    trainer.train()
    for step in range(NUM_STEPS):
        found = compared(bus, recorder, step)
        exact = kind != "plain bf16"
        assert found.cosine >= 1 - (1e-9 if exact else 1e-4), (step, found)
        assert found.norm_error <= (1e-5 if exact else 1e-2), (step, found)
        assert found.reported_error <= 1e-5, (step, found)
    finding = explained(bus, FAULTY_STEP, max(recorder.norms[:FAULTY_STEP]))
    assert finding.verdict in ("sequence", "token")
    assert {(one.micro_batch, one.sequence) for one in finding.culprits} == {place}
    logged = [row for row in trainer.state.log_history if "gradloc/grad_norm" in row]
    assert [row["gradloc/grad_norm"] for row in logged] == pytest.approx(recorder.norms, rel=1e-5)


def test_what_fails_in_here_never_reaches_the_trainer(
    load: Callable[[], Any],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("GRADLOC_STRICT")
    losses = []
    for watched in (False, True):
        trainer = plain_trainer(load(), tokenizer, tmp_path)
        if watched:
            attachment = hugging_face.attach(trainer, run="trainer-run")
            attachment.row_facts = lambda *_: 1 / 0  # type: ignore[method-assign]
            attachment.metrics = lambda: 1 / 0  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING, logger="gradloc"):
            trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == losses[1]
    assert len([record for record in caplog.records if "ZeroDivisionError" in record.message]) == 2


@pytest.mark.parametrize(
    ("changed", "said"), [({"run": "a b"}, "run id"), ({"run": "x", "redis": "http://x"}, "Redis URL")]
)
def test_arguments_that_cannot_be_meant_are_refused_before_the_first_step(
    load: Callable[[], Any], tokenizer: Any, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    trainer = plain_trainer(load(), tokenizer, tmp_path)
    with pytest.raises(ValueError, match=said):
        hugging_face.attach(trainer, **changed)
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_trainer_without_a_logger_of_ours_is_left_as_it_was(
    load: Callable[[], Any], tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"expected a transformers\.Trainer"):
        hugging_face.attach(object(), run="x")
    trainer = plain_trainer(load(), tokenizer, tmp_path, use_liger_kernel=False)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="DeepSpeed"):
        hugging_face.attach(trainer, run="x")
    assert "compute_loss" not in vars(trainer)


def test_limits_and_findings_are_where_the_trainer_reports_to(
    load: Callable[[], Any],
    tokenizer: Any,
    bus: Any,
    every_snapshot: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = plain_trainer(load(), tokenizer, tmp_path, report_to="tensorboard")
    attachment = hugging_face.attach(
        trainer, run="trainer-run", bus=bus, store=str(tmp_path / "store"), localize="inline", tokenizer=None
    )
    every_snapshot(attachment, trainer)
    trainer.train()
    assert attachment.finding is not None
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("events*"))
    assert b"gradloc/finding" in written
    assert f"step {attachment.finding.step}: ".encode() in written
    assert b"gradloc/num_spikes" in written
