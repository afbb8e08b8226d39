"""A store that can be in trouble: fsspec's `chaos://` keeps files on this disk and looks at CHAOS_STORE, a JSON file,
before each call: {"slow_s": s, "failing": bool, "full": bool, "late_s": s}.

Late: what was written is neither listed nor read before that age. Found by fsspec through the entry point that
localizing.py lays beside it.
"""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem


class ChaosStore(AbstractFileSystem):
    protocol = "chaos"
    root_marker = "/"

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._trouble()
        Path(self._strip_protocol(path)).mkdir(parents=True, exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if self._trouble().get("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_bytes(value)
        part.replace(target)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if "r" in mode:
            return self._visible(path).open(mode)
        if self._trouble().get("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open(mode)

    def rm_file(self, path: str) -> None:
        Path(self._strip_protocol(path)).unlink(missing_ok=True)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._visible(path).read_bytes()[start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": self._visible(path).stat().st_size, "type": "file"}

    def exists(self, path: str, **_: Any) -> bool:
        try:
            return self._visible(path).exists()
        except FileNotFoundError:
            return False

    def _visible(self, path: str) -> Path:
        late_s = float(self._trouble().get("late_s", 0.0))
        target = Path(self._strip_protocol(path))
        if not target.exists() or time.time() - target.stat().st_mtime < late_s:
            raise FileNotFoundError(path)
        return target

    def _trouble(self) -> dict[str, Any]:
        try:
            trouble: dict[str, Any] = json.loads(Path(os.environ["CHAOS_STORE"]).read_text())
        except (KeyError, OSError, ValueError):
            return {}
        time.sleep(float(trouble.get("slow_s", 0.0)))
        if trouble.get("failing"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return trouble
