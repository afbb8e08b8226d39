"""Wall clocks that can be set while a process runs: clock.c, compiled once and preloaded."""

import ctypes
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clocks:
    """One clock for each name. `reason` says why there are none, where there is no C compiler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "clock.so"
        self.reason = ""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            self.reason = "clocks cannot be set: no C compiler; install gcc"
            return
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            try:
                ctypes.CDLL(str(self._library))
            except OSError as error:
                self.reason = f"clocks cannot be set: {error}"
        else:
            self.reason = f"clocks cannot be set: {done.stderr.strip().splitlines()[-1:]}"

    def env(self, name: str) -> dict[str, str]:
        """What a process needs so that its clock can be set."""
        if self.reason:
            return {}
        self.set(name, 0.0)
        return {"LD_PRELOAD": str(self._library), "CLOCK_FILE": str(self._path(name))}

    def set(self, name: str, offset_s: float) -> None:
        path = self._path(name)
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as page:
            page[:8] = struct.pack("q", int(offset_s * 1e9))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.clock"
