"""verl's own FSDP2 engine on two ranks, watched: the replayed gradient is the engine's, a stale token is found.

Needs an environment of its own (`make verl`): verl's pins clash with those of current TRL.
"""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("GRADLOC_VERL_PYTHON", REPOSITORY / ".venv-verl" / "bin" / "python"))
SCRIPT = Path(__file__).with_name("two_ranks.py")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="verl's environment is not there; make verl"),
]


def trained(out: Path, *arguments: str) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(SCRIPT.parent),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "platform_cpu,gradloc.integrations.verl",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_ENGINE_VENDOR": "gradloc",
        "GRADLOC_RUN": "verl",
        "GRADLOC_STORE": str(out / "store"),
        "GRADLOC_STRICT": "1",
    }
    logs = [out / f"log-{rank}" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [str(PYTHON), str(SCRIPT), "--out", str(out), *arguments]
        with log.open("wb") as stream:
            processes.append(subprocess.Popen(command, env=own, stdout=stream, stderr=subprocess.STDOUT))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=280) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    return found


@pytest.mark.parametrize("arguments", [(), ("--packed",)], ids=["padded", "packed"])
def test_verl_is_replayed_exactly_and_a_stale_token_is_found(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    found = trained(tmp_path, *arguments)
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    for step in found["steps"]:
        assert step["cosine"] >= 1 - 1e-9, step
        assert step["norm_error"] <= 1e-5, step
        assert step["reported_error"] <= 1e-5, step
    assert found["norms"][2] > 4 * max(found["norms"][:2])
    assert found["verdict"] == "token"
    assert found["culprits"] == [found["planted"]]
