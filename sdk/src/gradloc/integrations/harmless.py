"""What an integration does inside a trainer never reaches it."""

import contextlib
import logging
import os
from collections.abc import Iterator

_log = logging.getLogger("gradloc")


class Harmless:
    """What fails inside a `with` of it is one log line a place, unless GRADLOC_STRICT=1."""

    def __init__(self) -> None:
        self._complained: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if os.environ.get("GRADLOC_STRICT") == "1":
                raise
            if where not in self._complained:
                self._complained.add(where)
                _log.warning(
                    "gradloc: %s failed, training goes on: %s: %s", where, type(error).__name__, str(error)[:300]
                )
