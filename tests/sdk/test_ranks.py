"""Two ranks over gloo: one decision, the norm of the whole gradient, and no rank that hangs alone."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradloc.snapshot import open_snapshot
from gradloc_proto import codec
from gradloc_proto.messages import SnapshotCommitted, StepObserved

SCRIPT = Path(__file__).with_name("two_ranks.py")


def train(out: Path, *arguments: str, strict: str = "1") -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GRADLOC_STRICT": strict,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "--out", str(out), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output.decode()[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_both_ranks_measure_and_decide_alike(tmp_path: Path, mode: str) -> None:
    ranks = train(tmp_path, "--mode", mode)
    assert [row["decision"] for row in ranks[0]["rows"]] == [row["decision"] for row in ranks[1]["rows"]]
    messages = [codec.decode(entry.encode()) for entry in ranks[0]["entries"]]
    assert ranks[1]["entries"] == []  # rank 0 alone publishes
    steps = [message for message in messages if isinstance(message, StepObserved)]
    for step, row in zip(steps, ranks[0]["rows"], strict=True):
        assert step.grad_norm == pytest.approx(row["norm"], rel=1e-5)
        assert step.loss == pytest.approx(0.5)
        assert step.num_tokens == 2 * 20
    place = steps[12].coefficient_abs_max_at
    assert place is not None
    assert (place.rank, place.micro_batch, place.sequence, place.token) == (1, 0, 2, 4)
    assert steps[12].coefficient_abs_max == pytest.approx(1e4 / 20 / 2)
    (committed,) = [message for message in messages if isinstance(message, SnapshotCommitted)]
    snapshot = open_snapshot(committed.path)
    assert [part.grad_factor for part in snapshot.manifest.parts] == [0.5, 0.5]
    assert snapshot.micro_batches(1)[0].coefficient_BR[2, 3].item() == pytest.approx(-1e4 / 20)
    assert {name: tuple(value.shape) for name, value in snapshot.weights().items()} == {
        "parts.embed_tokens.weight": (11, 8),
        "parts.lm_head.weight": (11, 8),
    }


def test_a_rank_that_fails_inside_does_not_hang_the_others(tmp_path: Path) -> None:
    ranks = train(tmp_path, "--mode", "ddp", "--fail-rank", "1", strict="0")
    assert len(ranks[0]["rows"]) == len(ranks[1]["rows"]) == 14
    assert math.isfinite(ranks[0]["rows"][-1]["norm"])
