"""A loop of one's own, DDP and FSDP2: the replayed gradient is the loop's own, in fp32 and bf16; a fault is found."""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gradloc.fidelity import StepFacts
from gradloc.localization import localize
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import open_snapshot
from gradloc_proto import codec
from gradloc_proto.messages import SnapshotCommitted, StepObserved

NUM_STEPS, FAULTY_STEP = 3, 2  # of own_loop.py
FAULT = (1, 2, 6)  # micro-batch, sequence, token
SCRIPT = Path(__file__).with_name("own_loop.py")
PLAIN = ["plain-fp32", "plain-bf16"]
PLAIN_FULL = ["plain-fp16", "plain-fp32-checkpointing", "plain-bf16-checkpointing", "compiled-fp32", "compiled-bf16"]
RANKS = ["ddp-fp32", "ddp-bf16", "ddp-bf16-checkpointing", "fsdp2-fp32", "fsdp2-bf16", "fsdp2-bf16-checkpointing"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of what a kind's ranks wrote; those of one group train one after the other in the same processes."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            group = next(kinds for kinds in (PLAIN, PLAIN_FULL, RANKS) if name in kinds)
            out = tmp_path_factory.mktemp("own-loop")
            run(out, group, num_ranks=2 if group is RANKS else 1)
            folders.update({kind: out / kind for kind in group})
        return folders[name]

    return of


def run(out: Path, kinds: Sequence[str], num_ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GRADLOC_STRICT": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    logs = [out / f"log-{rank}" for rank in range(num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(SCRIPT), "--out", str(out), "--kinds", *kinds]
        with log.open("wb") as stream:
            own = environment | {"RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, stdout=stream, stderr=subprocess.STDOUT))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=280) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(name, marks=pytest.mark.full) for name in PLAIN_FULL + RANKS)])
def test_a_step_is_replayed_exactly_and_a_stale_token_is_found(
    name: str, trained: Callable[[str], Path], tools: Any
) -> None:
    folder = trained(name)
    gradients = [load_file(folder / f"own-{step}.safetensors") for step in range(NUM_STEPS)]
    messages = [codec.decode(line) for line in (folder / "messages.jsonl").read_bytes().splitlines()]
    committed = {one.step: one for one in messages if isinstance(one, SnapshotCommitted)}
    observed = {one.step: one for one in messages if isinstance(one, StepObserved)}
    norms = []
    for step, own in enumerate(gradients):
        policy, batches = tools.policy_of(open_snapshot(committed[step].path))
        replayed = replay(policy, batches, coefficients_of(batches)).gradient
        norms.append(math.sqrt(sum(float(one.double().square().sum()) for one in own.values())))
        cosine = tools.cosine(own, replayed.tensors)
        assert cosine >= 1 - (1e-9 if "fp32" in name else 1e-4), (step, 1 - cosine)
        # The scale of fp16's loss is not in a replay, so other small numbers round to zero.
        assert replayed.norm == pytest.approx(norms[-1], rel=1e-4 if "fp16" in name else 1e-5), step
        assert observed[step].grad_norm == pytest.approx(norms[-1], rel=1e-5), step
    policy, batches = tools.policy_of(open_snapshot(committed[FAULTY_STEP].path))
    facts = StepFacts(FAULTY_STEP, observed[FAULTY_STEP].grad_norm, healthy_norm=max(norms[:FAULTY_STEP]))
    finding = localize(policy, batches, facts)
    assert finding.verdict == "token"
    rank = 1 if name in RANKS else 0
    assert [(one.rank, one.micro_batch, one.sequence, one.token) for one in finding.culprits] == [(rank, *FAULT)]
