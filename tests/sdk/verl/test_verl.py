"""verl's own FSDP2 engine on two ranks, watched: the replayed gradient is the engine's, a stale token is found.

Needs an environment of its own (`make verl`): verl's pins clash with those of current TRL.
"""

import json
import os
import re
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
    pytest.mark.timeout(900),  # verl alone takes a minute to import
    pytest.mark.skipif(not PYTHON.exists(), reason="verl's environment is not there; make verl"),
]


KINDS = ["padded", "packed", "padded-bf16", "packed-bf16"]
REMEDIED = ["padded-remedied", "packed-remedied"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what two ranks wrote that trained every kind, one after the other."""
    out = tmp_path_factory.mktemp("verl")
    for kind in KINDS + REMEDIED:
        (out / kind).mkdir()
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
        "PYTHONPATH": str(REPOSITORY / "examples"),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_platform_cpu,gradloc.integrations.verl",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_ENGINE_VENDOR": "gradloc",
        "GRADLOC_RUN": "verl",
        "GRADLOC_STRICT": "1",
    }
    logs = [out / f"log-{rank}" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [str(PYTHON), str(SCRIPT), "--out", str(out), "--kinds", *KINDS, *REMEDIED]
        with log.open("wb") as stream:
            processes.append(subprocess.Popen(command, env=own, stdout=stream, stderr=subprocess.STDOUT))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=900) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_verl_is_replayed_exactly_and_a_stale_token_is_found(trained: Path, kind: str) -> None:
    found: dict[str, Any] = json.loads((trained / kind / "found.json").read_text())
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    for step in found["steps"]:
        assert step["cosine"] >= 1 - (1e-4 if "bf16" in kind else 1e-9), step
        assert step["norm_error"] <= 1e-5, step
        assert step["reported_error"] <= 1e-5, step
    assert found["norms"][2] > 4 * max(found["norms"][:2])
    assert found["verdict"] == "token"
    assert found["culprits"] == [found["planted"]]


@pytest.mark.parametrize("kind", REMEDIED)
def test_token_clip_keeps_a_stale_token_out_of_the_update(trained: Path, kind: str) -> None:
    found: dict[str, Any] = json.loads((trained / kind / "found.json").read_text())
    assert found["norms"][2] < 4 * max(found["norms"][:2]), "not so without it: the test above"
    for step in found["steps"]:
        assert step["cosine"] >= 1 - 1e-9 and step["norm_error"] <= 1e-5, step


def test_the_example_names_the_token_that_was_recorded_wrongly() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADLOC")}
    command = [str(PYTHON), str(REPOSITORY / "examples" / "verl_actor.py"), "--fault"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "24 steps" in done.stdout
    assert re.search(r"step 20: token: .* of the squared norm", done.stdout), done.stdout
    assert "token-level train/inference mismatch" in done.stdout
