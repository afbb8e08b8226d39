"""Remedies on two ranks: the same gradients as on one, whether replicated (DDP) or sharded (FSDP2)."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("remedied_ranks.py")


def train(out: Path, mode: str, world_size: int) -> list[dict[str, Any]]:
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GRADLOC_STRICT": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "--mode", mode, "--out", str(out)],
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
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_give_the_gradients_of_one(tmp_path: Path, mode: str) -> None:
    (alone,) = train(tmp_path / "alone", "alone", 1)
    first, second = train(tmp_path / mode, mode, 2)
    assert first["state"] == second["state"]
    assert first["steps"] == second["steps"]
    for step, (one, two) in enumerate(zip(alone["steps"], first["steps"], strict=True)):
        assert [(name, number) for name, _, number in one["acted"]] == [
            (name, number) for name, _, number in two["acted"]
        ], step
        assert two["limits"] == pytest.approx(one["limits"], rel=1e-4), step
        for name, gradient in one["gradients"].items():
            other = two["gradients"][name]
            assert (gradient is None) == (other is None), (step, name)
            if gradient is not None:
                assert other == pytest.approx(gradient, rel=1e-4, abs=1e-7), (step, name)
    assert [(name, number) for name, _, number in alone["steps"][12]["acted"]] == [("layers.1", 0)]
    assert alone["steps"][13]["acted"] == [["layers.1", 0.0, 1]]  # entered by one position too large
    assert alone["steps"][14]["acted"] == [["layers.1", 0.0, 0]]
    published = json.loads(first["entries"][13])  # after RunStarted: step 12
    assert published["tokens_remedied"] == pytest.approx(1 / 20)
    assert published["sequences_remedied"] == pytest.approx(0.5)
    assert published["layers_remedied"] == pytest.approx(1 / 5)
    held = json.loads(first["entries"][14])
    assert held["layers_remedied"] == pytest.approx(3 / 5)  # embedding and two blocks
    assert held["rules_hit"] == ["held"]
