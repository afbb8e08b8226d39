"""A tiny causal language model from a configuration, its tokenizer, and what a replay of a snapshot gives.

Real trainers on the CPU, offline: nothing is loaded from a hub.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradloc.localization import localize
from gradloc.policy import Meter, Policy, place
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import Snapshot, open_snapshot
from gradloc_localizer.model_source import build_model
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import Finding, Limits, LimitsChanged, SnapshotCommitted, StepObserved

RUN = "trainer-run"
CHARACTERS = "0123456789"


@pytest.fixture
def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    names = [*CHARACTERS, "<pad>", "<eos>", "<unk>"]
    made = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture
def policy_path(tmp_path: Path, tokenizer: Any) -> Path:
    """A checkpoint: trainers that need a second copy (a reference) load it from its path."""
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
        pad_token_id=10,
        eos_token_id=11,
        bos_token_id=11,
    )
    path = tmp_path / "policy"
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def load(policy_path: Path) -> Callable[[], nn.Module]:
    def loaded() -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
        return model

    return loaded


class EveryStep(MemoryBus):
    """A bus whose detector wants every step explained: its limit is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        limits = LimitsChanged(run_id=RUN, ts=0.0, step=0, limits=Limits(version=10**6, norm=1e-12, healthy_norm=1e-12))
        self.append(streams.stream(RUN, "limits"), [codec.encode(limits)], length_max=10)

    def found(self, kind: type) -> list[Any]:
        entries = self.read_last(streams.stream(RUN, "steps"), count=10_000)
        return [one for one in (codec.decode(entry.data) for entry in entries) if isinstance(one, kind)]


@dataclass
class Recorder:
    """The trainer's own gradients and norms, step by step, as its clipping got and gave them."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def watch(self, trainer: Any) -> None:
        clip = trainer.accelerator.clip_grad_norm_

        def recorded(*args: Any, **kwargs: Any) -> Any:
            named = trainer.model.named_parameters()
            self.gradients.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})
            norm = clip(*args, **kwargs)
            self.norms.append(float(norm))
            return norm

        trainer.accelerator.clip_grad_norm_ = recorded


def policy_of(snapshot: Snapshot) -> tuple[Policy, tuple[Any, ...]]:
    manifest = snapshot.manifest
    batches = place([(snapshot.micro_batches(part.rank), part.grad_factor) for part in manifest.parts])
    autocast = None if manifest.autocast_dtype is None else getattr(torch, manifest.autocast_dtype)
    tokens = sum(one.batch.ids_BT.numel() for one in batches)
    return Policy(build_model(snapshot), Meter(tokens), autocast_dtype=autocast, head=manifest.head), batches


def cosine(own: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    dot = sum(float((own[name].double() * other[name].double()).sum()) for name in own)
    squares = [sum(float(one[name].double().square().sum()) for name in own) for one in (own, other)]
    return dot / math.sqrt(squares[0] * squares[1])


@dataclass(frozen=True)
class Compared:
    """Replayed against own: cosine of the gradients, relative error of the norms."""

    cosine: float
    norm_error: float
    reported_error: float  # of the norm that was published


@pytest.fixture
def compared() -> Callable[[EveryStep, Recorder, int], Compared]:
    def compare(bus: EveryStep, recorder: Recorder, step: int) -> Compared:
        (committed,) = [one for one in bus.found(SnapshotCommitted) if one.step == step]
        (observed,) = [one for one in bus.found(StepObserved) if one.step == step]
        policy, batches = policy_of(open_snapshot(committed.path))
        gradient = replay(policy, batches, coefficients_of(batches)).gradient
        own = recorder.gradients[step]
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in own.values()))
        return Compared(
            cosine(own, gradient.tensors), abs(gradient.norm / norm - 1), abs(observed.grad_norm / norm - 1)
        )

    return compare


@pytest.fixture
def explained() -> Callable[[EveryStep, int, float], Finding]:
    def explain(bus: EveryStep, step: int, healthy_norm: float) -> Finding:
        from gradloc.fidelity import StepFacts

        (committed,) = [one for one in bus.found(SnapshotCommitted) if one.step == step]
        snapshot = open_snapshot(committed.path)
        policy, batches = policy_of(snapshot)
        manifest = snapshot.manifest
        facts = StepFacts(step, manifest.grad_norm, manifest.layer_norms, healthy_norm=healthy_norm)
        return localize(policy, batches, facts)

    return explain


@pytest.fixture
def bus() -> EveryStep:
    return EveryStep()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def every_snapshot() -> Callable[[Any, Any], None]:
    """One snapshot is in flight at a time; tests that want every step's let the next one wait."""
    from transformers import TrainerCallback

    class Wait(TrainerCallback):
        def __init__(self, attachment: Any) -> None:
            self.attachment = attachment

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            deadline = time.monotonic() + 20
            while self.attachment.probe._publisher.limits is None:
                assert time.monotonic() < deadline, "waited in vain"
                time.sleep(0.01)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.attachment.probe._writer.close()

    return lambda attachment, trainer: trainer.add_callback(Wait(attachment))


@pytest.fixture
def tools() -> Any:
    """`policy_of` and `cosine`, for tests that bring a loop of their own."""
    return SimpleNamespace(policy_of=policy_of, cosine=cosine)
