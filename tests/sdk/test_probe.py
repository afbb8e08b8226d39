"""The probe in one process: what it captures, measures, decides, publishes and saves."""

import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gradloc
from gradloc.snapshot import open_snapshot
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import (
    Limits,
    LimitsChanged,
    Message,
    RunEnded,
    RunStarted,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotRequested,
    StepObserved,
)

LogpOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]
RUN = "run-1"


def published(bus: MemoryBus) -> list[Message]:
    return [codec.decode(entry.data) for entry in bus.read_last(streams.stream(RUN, "steps"), count=10_000)]


def steps_of(bus: MemoryBus) -> list[StepObserved]:
    return [message for message in published(bus) if isinstance(message, StepObserved)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Loop:
    """A training loop as a user would write it."""

    def __init__(self, model: nn.Module, logp: LogpOf, probe_arguments: dict[str, object]) -> None:
        self.model = model
        self.logp = logp
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.probe = gradloc.watch(model, self.optimizer, run=RUN, **probe_arguments)  # type: ignore[arg-type]
        self.generator = torch.Generator().manual_seed(3)

    def step(self, *, scale: float = 1.0, num_micro_batches: int = 2, observe: bool = True, **metrics: float) -> str:
        decision = "go"
        for _ in range(num_micro_batches):
            ids_BT = torch.randint(0, 11, (3, 6), generator=self.generator)
            logp_BR = self.logp(self.model, ids_BT)
            mask_BR = torch.ones_like(logp_BR)
            mask_BR[0, 0] = 0
            weight_BR = torch.linspace(-1, 1, logp_BR.numel()).reshape(logp_BR.shape) * mask_BR
            weight_BR[1, 3] = weight_BR[1, 3] * scale
            self.probe.tokens(
                logp_BR,
                ids_BT,
                mask_BR,
                rollout_logp=logp_BR.detach() - 0.1,
                advantage=torch.tensor([1.0, -1.0, 0.5]),
                uid=["a", "b", "c"],
            )
            (-(weight_BR * logp_BR).sum() / 30).backward()
        if observe:
            decision = self.probe.observe(**metrics)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return decision


def test_a_healthy_run_is_published_step_by_step(tiny_model: nn.Module, logp: LogpOf) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus, "labels": {"team": "a"}})
    for _ in range(4):
        assert loop.step(loss=1.5, lr=1e-3) == "go"
    loop.probe.close()
    messages = published(bus)
    assert isinstance(messages[0], RunStarted)
    assert messages[0].layer_names == (
        "embedding",
        "layers.0.mlp",
        "layers.0.norm",
        "layers.1.mlp",
        "layers.1.norm",
        "head",
    )
    assert isinstance(messages[-1], RunEnded)
    steps = steps_of(bus)
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert all(step.num_tokens == 2 * 14 and step.loss == 1.5 for step in steps)
    assert steps[0].ratio_max == pytest.approx(math.exp(0.1), rel=1e-5)
    assert steps[0].sequence_ratio_max == pytest.approx(math.exp(0.5), rel=1e-5)
    registry = bus.read_last(streams.REGISTRY, count=10)
    assert [codec.decode(entry.data).run_id for entry in registry] == [RUN]


def test_norms_are_those_of_the_gradient_before_clipping(tiny_model: nn.Module, logp: LogpOf) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus})
    ids_BT = torch.tensor([[1, 2, 3, 4]])
    logp_BR = logp(tiny_model, ids_BT)
    loop.probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR))
    (logp_BR.sum() * 50).backward()
    expected = torch.cat([p.grad.flatten() for p in tiny_model.parameters() if p.grad is not None]).norm().item()
    loop.probe.observe()
    nn.utils.clip_grad_norm_(tiny_model.parameters(), 1.0)
    loop.optimizer.step()
    loop.probe.close()
    (step,) = steps_of(bus)
    assert step.grad_norm == pytest.approx(expected, rel=1e-6)
    assert math.hypot(*step.layer_norms.values()) == pytest.approx(expected, rel=1e-6)
    assert step.coefficient_abs_max == pytest.approx(50.0)


def test_a_spike_is_snapshotted_before_the_update(tiny_model: nn.Module, logp: LogpOf, tmp_path: Path) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus, "store": f"file://{tmp_path}"})
    for _ in range(16):
        assert loop.step() == "go"
    before = {name: value.clone() for name, value in tiny_model.state_dict().items()}
    assert loop.step(scale=1e4) == "snapshot"
    loop.probe.close()
    (committed,) = [message for message in published(bus) if isinstance(message, SnapshotCommitted)]
    assert committed.step == 16
    assert committed.path == steps_of(bus)[16].snapshot
    snapshot = open_snapshot(committed.path)
    for name, value in snapshot.weights().items():
        assert torch.equal(value, before[name]), name
    first, second = snapshot.micro_batches(0)
    assert first.uids == ("a", "b", "c")
    assert first.first_position == 1
    # c is what the loss says, to the bit: -weight / 30.
    assert second.coefficient_BR[0, 1].item() == pytest.approx(-torch.linspace(-1, 1, 15)[1].item() / 30)
    place = steps_of(bus)[16].coefficient_abs_max_at
    assert place is not None
    assert (place.rank, place.sequence, place.token) == (0, 1, 4)
    assert snapshot.manifest.grad_norm == steps_of(bus)[16].grad_norm
    assert snapshot.manifest.healthy_norm is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_a_spike_at_once(
    tiny_model: nn.Module, logp: LogpOf, tmp_path: Path, bad: float
) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus, "store": str(tmp_path)})
    assert loop.step(scale=bad) == "snapshot"
    loop.probe.close()
    (step,) = steps_of(bus)
    assert not math.isfinite(step.grad_norm)
    assert step.rules_hit == ("non-finite",)
    assert any(isinstance(message, SnapshotCommitted) for message in published(bus))


def test_a_nan_coefficient_outside_the_mask_is_kept_and_named(tiny_model: nn.Module, logp: LogpOf) -> None:
    bus = MemoryBus()
    probe = gradloc.watch(tiny_model, run=RUN, bus=bus)
    ids_BT = torch.tensor([[1, 2, 3, 4]])
    logp_BR = logp(tiny_model, ids_BT)
    mask_BR = torch.tensor([[1.0, 1.0, 0.0]])
    probe.tokens(logp_BR, ids_BT, mask_BR)
    old = torch.tensor([[-1.0, -1.0, math.nan]])
    ((logp_BR - old).exp() * mask_BR).nan_to_num(0.0).sum().backward()  # finite loss, NaN gradient
    probe.observe()
    probe.close()
    (step,) = steps_of(bus)
    assert step.coefficient_abs_max is not None and math.isnan(step.coefficient_abs_max)
    assert step.coefficient_abs_max_at is not None and step.coefficient_abs_max_at.token == 3


def test_skip_above_leaves_parameters_and_optimizer_untouched(tiny_model: nn.Module, logp: LogpOf) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus, "skip_above": 10.0})
    for _ in range(16):
        loop.step()
    before = {name: value.clone() for name, value in tiny_model.state_dict().items()}
    assert loop.step(scale=1e4) == "skip"
    assert all(torch.equal(value, before[name]) for name, value in tiny_model.state_dict().items())
    loop.probe.close()
    assert steps_of(bus)[16].decision == "skip"


def test_limits_of_the_detector_are_obeyed(tiny_model: nn.Module, logp: LogpOf) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus})
    limits = LimitsChanged(run_id=RUN, ts=0.0, step=0, limits=Limits(version=7, norm=1e-9, healthy_norm=1e-9))
    bus.append(streams.stream(RUN, "limits"), [codec.encode(limits)], length_max=10)
    wait_for(lambda: loop.probe._publisher is not None and loop.probe._publisher.limits is not None)
    loop.step()
    loop.probe.close()
    (step,) = steps_of(bus)
    assert (step.limits_version, step.limit, step.rules_hit) == (7, 1e-9, ("norm",))


def test_a_late_request_gets_the_batch_with_current_weights(
    tiny_model: nn.Module, logp: LogpOf, tmp_path: Path
) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus, "store": str(tmp_path)})
    for _ in range(3):
        loop.step()
    wish = SnapshotRequested(run_id=RUN, ts=0.0, step=2, by="test")
    bus.append(streams.stream(RUN, "control"), [codec.encode(wish)], length_max=10)
    wait_for(lambda: loop.probe._publisher is not None and loop.probe._publisher.wish is not None)
    loop.step()
    loop.step()
    loop.probe.close()
    (committed,) = [message for message in published(bus) if isinstance(message, SnapshotCommitted)]
    assert (committed.step, committed.weights) == (2, "after-update")


@pytest.mark.parametrize(
    ("asked", "or_newest", "kept"),
    [(1, True, (7, 1)), (1, False, None), (5, True, (5, None)), (99, True, None)],
    ids=["gone", "gone and no other will do", "still there", "of the future"],
)
def test_a_request_for_a_step_that_is_gone_gets_the_newest_where_that_will_do(
    tiny_model: nn.Module, logp: LogpOf, tmp_path: Path, asked: int, or_newest: bool, kept: tuple[int, int] | None
) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus, "store": str(tmp_path)})
    for _ in range(7):
        loop.step()
    wish = SnapshotRequested(run_id=RUN, ts=0.0, step=asked, by="test", or_newest=or_newest)
    bus.append(streams.stream(RUN, "control"), [codec.encode(wish)], length_max=10)
    wait_for(lambda: loop.probe._publisher is not None and loop.probe._publisher.wish is not None)
    loop.step()
    loop.step()
    loop.probe.close()
    committed = [message for message in published(bus) if isinstance(message, SnapshotCommitted)]
    assert [(one.step, one.asked_step) for one in committed] == ([] if kept is None else [kept])
    if kept is not None:
        (only,) = committed
        assert only.weights == "after-update" and only.path.endswith(f"/{kept[0]}")
        assert open_snapshot(only.path).manifest.step == kept[0]


def test_a_store_that_cannot_be_written_costs_a_message_only(
    tiny_model: nn.Module, logp: LogpOf, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus, "store": str(blocked)})
    loop.step(scale=math.nan)
    loop.step()
    loop.probe.close()
    assert any(isinstance(message, SnapshotFailed) for message in published(bus))
    assert len(steps_of(bus)) == 2


def test_forgetting_observe_is_said_once_and_measured_anyway(
    tiny_model: nn.Module, logp: LogpOf, caplog: pytest.LogCaptureFixture
) -> None:
    bus = MemoryBus()
    loop = Loop(tiny_model, logp, {"bus": bus})
    with caplog.at_level(logging.WARNING, logger="gradloc"):
        for _ in range(3):
            loop.step(observe=False)
    loop.probe.close()
    assert len(steps_of(bus)) == 3
    assert len([record for record in caplog.records if "observe() was not called" in record.message]) == 1


def test_wrong_arguments_never_raise_into_the_loop(
    tiny_model: nn.Module, logp: LogpOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GRADLOC_STRICT")
    bus = MemoryBus()
    probe = gradloc.watch(tiny_model, run=RUN, bus=bus)
    ids_BT = torch.tensor([[1, 2, 3, 4]])
    logp_BR = logp(tiny_model, ids_BT)
    with caplog.at_level(logging.WARNING, logger="gradloc"):
        for _ in range(3):
            probe.tokens(logp_BR, ids_BT, torch.ones(7, 7))
    logp_BR.sum().backward()
    assert probe.observe(no_such_metric=1.0) == "go"
    probe.close()
    assert len([record for record in caplog.records if "mask has shape (7, 7)" in record.message]) == 1


def test_evaluation_passes_and_empty_steps_are_fine(tiny_model: nn.Module, logp: LogpOf) -> None:
    bus = MemoryBus()
    probe = gradloc.watch(tiny_model, run=RUN, bus=bus)
    ids_BT = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        logp_BR = logp(tiny_model, ids_BT)
    probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR))
    assert probe.observe() == "go"
    unused = logp(tiny_model, ids_BT)
    probe.tokens(unused, ids_BT, torch.zeros_like(unused))
    assert probe.observe() == "go"
    probe.close()
    assert [step.grad_norm for step in steps_of(bus)] == [0.0, 0.0]
    assert [step.num_tokens for step in steps_of(bus)] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"run": "a b"}, "run id"),
        ({"run": RUN, "reduction": "max"}, "reduction"),
        ({"run": RUN, "skip_above": 0.5}, "skip_above"),
        ({"run": RUN, "tokenizer": 3}, "tokenizer"),
        ({"run": RUN, "redis": "http://x"}, "Redis URL"),
        ({"run": RUN, "store": "nosuch://x"}, "store"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_before_training(
    tiny_model: nn.Module, arguments: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        gradloc.watch(tiny_model, **arguments)  # type: ignore[arg-type]


FORGETFUL = """
import sys, torch, gradloc
from gradloc_proto.memory_bus import MemoryBus

model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(400_000, 64), "head": torch.nn.Linear(64, 11)})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
probe = gradloc.watch(model, optimizer, run="forgetful", bus=MemoryBus(), store=sys.argv[1])
ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
for step in range(14):
    logits = model["head"](model["embed_tokens"](ids))[:, :-1]
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    probe.tokens(logp, ids, torch.ones_like(logp))
    (logp * (1e4 if step == 13 else 1.0)).mean().backward()
    decision = probe.observe()
    optimizer.zero_grad()
assert decision == "snapshot", decision
"""


def test_a_loop_that_forgets_to_close_ends_cleanly_with_its_last_snapshot(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    (manifest,) = tmp_path.rglob("manifest.json")
    assert open_snapshot(str(manifest.parent)).manifest.step == 13
