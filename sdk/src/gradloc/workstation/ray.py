"""A Ray head on this machine with a `spare_gpu` resource, as a process. Ray itself is never imported.

It is ended by its process ids: `ray stop` would end every Ray of the machine.
"""

import json
import os
import secrets
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from gradloc.workstation.processes import Process, StartFailed, free_port

READY_TIMEOUT_S = 120.0
OBJECT_STORE_BYTES = 100_000_000  # localizations pass files, not objects
_SOCKET_PATH_MAX = 107  # of a unix socket on Linux; macOS has 103
_SOCKET_NAME = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"


class RayHead:
    """`address` is the dashboard with the Jobs API; `token` opens it (Authorization: Bearer). Both are new ones unless
    given: whoever replaces a head keeps them. `gcs_address`: what drivers on this machine connect to."""

    def __init__(
        self,
        log: Path,
        *,
        num_cpus: int,
        job_env: Mapping[str, str],
        port: int | None = None,
        token: str | None = None,
        spare_gpus: int = 1,
    ) -> None:
        if find_spec("ray") is None:
            raise StartFailed("Ray is not installed; install gradloc[local]")
        self.token = token or secrets.token_hex(32)
        self._folder = Path(tempfile.mkdtemp(prefix="gl-"))
        if len(str(self._folder) + _SOCKET_NAME) > _SOCKET_PATH_MAX:
            shutil.rmtree(self._folder)
            raise StartFailed(
                f"the folder for temporary files, {self._folder.parent}, has too long a name for Ray's sockets; "
                "set TMPDIR to a shorter one"
            )
        port, own_port = port or free_port(), free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.gcs_address = f"127.0.0.1:{own_port}"
        options = {
            "--node-ip-address": "127.0.0.1",
            "--port": str(own_port),
            "--dashboard-host": "127.0.0.1",
            "--dashboard-port": str(port),
            "--dashboard-agent-listen-port": str(free_port()),
            "--dashboard-agent-grpc-port": str(free_port()),
            "--metrics-export-port": str(free_port()),
            "--runtime-env-agent-port": str(free_port()),
            "--ray-client-server-port": str(free_port()),
            "--num-cpus": str(num_cpus),
            "--num-gpus": "0",
            "--resources": json.dumps({"spare_gpu": spare_gpus}),
            "--object-store-memory": str(OBJECT_STORE_BYTES),
            "--temp-dir": str(self._folder),
        }
        words = [word for option in options.items() for word in option]
        env = {
            **job_env,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Jobs run what the head's PATH calls python.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        self.process = Process("ray", [*command, *words], log, env)

    def wait_ready(self) -> None:
        self.process.wait_ready(self.answers, timeout_s=READY_TIMEOUT_S)

    def answers(self) -> bool:
        """Whether the Jobs API lists its jobs."""
        request = urllib.request.Request(f"{self.address}/api/jobs/", headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def end(self) -> None:
        self.process.end()
        shutil.rmtree(self._folder, ignore_errors=True)
