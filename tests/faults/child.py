"""One process of the world: started, struck, started again with the same command, and looked at through /proc."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

MARK = "CHAOS_WORLD"  # in the environment of all that a world started: whoever still carries it afterwards has leaked


@dataclass
class Child:
    """`prefix` is put before the command: `ip netns exec NAME` replaces itself by it, so the pid is the command's."""

    name: str
    command: list[str]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    process: "subprocess.Popen[bytes] | None" = None
    is_down: bool = False  # a fault wants it so

    def start(self) -> None:
        self.is_down = False
        with self.log.open("ab") as log:
            variables = {name: value for name, value in os.environ.items() if not name.startswith(("GRADLOC_", "RAY_"))}
            self.process = subprocess.Popen(
                [*self.prefix, *self.command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=variables | {MARK: str(self.folder)} | self.env,
            )  # fmt: skip

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: int) -> None:
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.is_down = True
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.process.kill()
            self.process.wait(timeout=30)

    def num_files(self) -> int:
        """Open descriptors; 0 of a process that has ended."""
        with contextlib.suppress(OSError):
            if self.process is not None:
                return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
        return 0

    def num_threads(self) -> int:
        with contextlib.suppress(OSError):
            if self.process is not None:
                return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))
        return 0

    def memory_bytes(self) -> int:
        """Of its own (anonymous) pages in memory; files that it maps are shared and come and go."""
        with contextlib.suppress(OSError, StopIteration):
            if self.process is not None:
                lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
                return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024
        return 0


def marked(folder: Path) -> list[int]:
    """Processes of the world in `folder` that are still there."""
    needle = f"{MARK}={folder}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found
