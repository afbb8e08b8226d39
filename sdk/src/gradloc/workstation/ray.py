"""A Ray head on this machine, with a `spare_gpu` resource for the localizer's jobs.

Own ports, own short folder (Unix sockets allow 107 characters), a token of its own. Ended by pid:
`ray stop` would end every Ray of the machine.
"""

import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gradloc.workstation.processes import Child, Processes, answers_http, free_ports, wait_until_ready

READY_TIMEOUT_S = 120.0  # 10 to 21 s were measured on an idle machine
OBJECT_STORE_BYTES = 100_000_000  # the job needs no object store; Ray would take a third of the memory


@dataclass(frozen=True)
class RayHead:
    """Address of the Jobs API and the token it asks for."""

    child: Child
    address: str
    token: str
    folder: Path

    def wait(self) -> None:
        """Wait until jobs can be submitted. Raises StartFailed."""
        wait_until_ready(
            self.child, lambda: answers_http(f"{self.address}/api/version", self.token), timeout_s=READY_TIMEOUT_S
        )

    def forget(self) -> None:
        """Remove its folder, after it has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)


def start_ray(processes: Processes, redis_url: str, *, num_cpus: int, num_spare_gpus: int = 1) -> RayHead:
    """Start a head; not ready yet (`wait`). Jobs find the Redis URL in their environment, not in arguments."""
    gcs, dashboard, client, agent_grpc, agent_http = free_ports(5)
    folder = Path(tempfile.mkdtemp(prefix="glr"))
    token = secrets.token_hex(32)
    bin_dir = str(Path(sys.executable).parent)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--node-ip-address", "127.0.0.1", "--port", str(gcs), "--ray-client-server-port", str(client)]
    command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)]
    command += ["--dashboard-agent-grpc-port", str(agent_grpc), "--dashboard-agent-listen-port", str(agent_http)]
    command += ["--temp-dir", str(folder), "--num-cpus", str(num_cpus), "--num-gpus", "0"]
    command += ["--resources", f'{{"spare_gpu": {num_spare_gpus}}}', "--object-store-memory", str(OBJECT_STORE_BYTES)]
    command += ["--disable-usage-stats"]
    env = {
        "GRADLOC_REDIS_URL": redis_url,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "PATH": bin_dir + os.pathsep + os.environ.get("PATH", ""),  # the jobs' `python` is ours
    }
    child = processes.start("ray", command, env=env)
    return RayHead(child, f"http://127.0.0.1:{dashboard}", token, folder)
