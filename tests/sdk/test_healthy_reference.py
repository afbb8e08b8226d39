"""Healthy steps kept to compare with: few, ordinary, and never in a spike's way."""

import math
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradloc
from gradloc.healthy_reference import ReferencePlan
from gradloc.snapshot import open_snapshot
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import Limits, SnapshotCommitted

USUAL = Limits(version=1, norm=4.0, healthy_norm=1.0)


def kept(plan: ReferencePlan, norms: list[float], limits: Limits = USUAL) -> list[int]:
    steps = []
    for step, norm in enumerate(norms):
        if plan.is_due(norm, limits, ("norm",) if not norm <= 4.0 else ()):
            steps.append(step)
            plan.taken()
    return steps


def test_one_after_warm_up_then_whenever_their_number_has_doubled() -> None:
    assert kept(ReferencePlan(8), [1.0] * 100) == [7, 15, 31, 63]


@given(st.lists(st.sampled_from([1.0, 1.4, 1.6, 3.9, 0.0, math.nan, math.inf, -math.inf, 1e9]), max_size=300))
def test_only_ordinary_steps_are_kept_and_few_of_them(norms: list[float]) -> None:
    steps = kept(ReferencePlan(4), norms)
    assert all(norms[step] in (1.0, 1.4) for step in steps)
    assert len(steps) <= 1 + math.log2(max(1, len(norms)))


def test_without_a_baseline_nothing_is_known_to_be_healthy() -> None:
    assert kept(ReferencePlan(1), [1.0] * 50, Limits()) == []


def test_a_step_that_could_not_be_taken_is_made_up_for_by_the_next() -> None:
    plan = ReferencePlan(3)
    assert [plan.is_due(1.0, USUAL, ()) for _ in range(5)] == [False, False, True, True, True]
    plan.taken()
    assert [plan.is_due(1.0, USUAL, ()) for _ in range(5)] == [False, False, False, False, True]


class Run:
    """A loop with a store; `spike` scales one coefficient of the step."""

    def __init__(self, store: str, **arguments: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.bus = MemoryBus()
        self.probe = gradloc.watch(
            self.model,
            self.optimizer,
            run="run",
            bus=self.bus,
            store=store,
            model_factory="tests:nothing",
            **arguments,  # type: ignore[arg-type]
        )
        self.generator = torch.Generator().manual_seed(1)

    def step(self, spike: float = 1.0) -> str:
        ids_BT = torch.randint(0, 3, (2, 5), generator=self.generator)
        logp_BV = torch.log_softmax(self.model(torch.ones(2, 4)), dim=-1)
        logp_BR = logp_BV.gather(-1, ids_BT[:, 1:])
        self.probe.tokens(logp_BR, ids_BT, torch.ones(2, 4))
        weight_BR = torch.ones(2, 4)
        weight_BR[0, 0] = spike
        (weight_BR * logp_BR).mean().backward()
        decision = self.probe.observe()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return decision

    def committed(self) -> list[tuple[int, str]]:
        entries = self.bus.read_last(streams.stream("run", "steps"), count=1000)
        messages = [codec.decode(entry.data) for entry in entries]
        return [(m.step, m.weights) for m in messages if isinstance(m, SnapshotCommitted)]


def test_a_run_keeps_a_healthy_step_with_its_weights(tmp_path: Path) -> None:
    run = Run(f"file://{tmp_path}", reference_after=20)
    for _ in range(100):
        run.step()
        if run.probe._writer is not None:
            run.probe._writer.close()  # so that the second is not missed because of the first
    run.probe.close()
    found = run.committed()
    assert [weights for _, weights in found] == ["reference"] * len(found)
    assert 2 <= len(found) <= 3
    step = found[0][0]
    assert step >= 20
    manifest = open_snapshot(f"file://{tmp_path}/run/0/{step}").manifest
    assert (manifest.weights, manifest.step) == ("reference", step)
    assert manifest.healthy_norm is not None and manifest.grad_norm <= 1.5 * manifest.healthy_norm


def test_none_is_kept_where_none_is_wanted(tmp_path: Path) -> None:
    run = Run(f"file://{tmp_path}", reference_after=None)
    for _ in range(90):
        run.step()
    run.probe.close()
    assert run.committed() == []


class GatedFileSystem(MemoryFileSystem):
    """A store that takes nothing until its gate opens."""

    protocol = "gated"
    gate = threading.Event()

    def pipe_file(self, *arguments: object, **changes: object) -> None:
        assert self.gate.wait(30)
        super().pipe_file(*arguments, **changes)

    def _open(self, *arguments: object, **changes: object) -> object:
        assert self.gate.wait(30)
        return super()._open(*arguments, **changes)


def test_a_spike_need_not_wait_for_the_reference_that_is_being_written() -> None:
    fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
    run = Run("gated://store", reference_after=20)
    assert {run.step() for _ in range(60)} == {"go"}
    assert run.step(spike=1e4) == "snapshot"
    assert run.step(spike=1e5) == "go"  # one spike at a time
    GatedFileSystem.gate.set()
    run.probe.close()
    (reference, spike) = run.committed()
    assert (reference[1], spike) == ("reference", (60, "before-update"))


def test_a_number_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="reference_after is 0"):
        gradloc.watch(nn.Linear(2, 2), run="run", reference_after=0)
