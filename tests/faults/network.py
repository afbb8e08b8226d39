"""Namespaces of Linux, one wire each to this machine: a wire that is cut swallows packets, as a dead switch does.

Needs root. Knows nothing of what runs in them.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence

_WIRES_MAX = 4


class Network:
    """`with Network(names) as network:`; without the right to make namespaces `reason` says so and all are at home."""

    def __init__(self, names: Sequence[str]) -> None:
        assert len(names) <= _WIRES_MAX
        self._names = tuple(names)
        self._tag = f"gl{os.getpid() % 1_000_000}"
        self.reason = ""

    def __enter__(self) -> "Network":
        if shutil.which("ip") is None:
            self.reason = "networks cannot be cut: no `ip`; install iproute2"
            return self
        try:
            for number, name in enumerate(self._names):
                self._lay(number, name)
        except subprocess.CalledProcessError as error:
            self._remove()
            self.reason = f"networks cannot be cut here: {error.stderr.strip()[:100]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @property
    def addresses(self) -> list[str]:
        """Of this machine, one on each wire: what servers listen on."""
        return [] if self.reason else [self._address(number, 1) for number in range(len(self._names))]

    def address(self, name: str) -> str:
        """Where the process in `name` finds this machine."""
        if not self.has(name):
            return "127.0.0.1"
        return self._address(self._names.index(name), 1)

    def prefix(self, name: str) -> tuple[str, ...]:
        """Put before a command: it runs in the namespace."""
        if not self.has(name):
            return ()
        return ("ip", "netns", "exec", self._space(name))

    def has(self, name: str) -> bool:
        return not self.reason and name in self._names

    def cut(self, name: str) -> None:
        _ip("link", "set", self._wire(self._names.index(name)), "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self._wire(self._names.index(name)), "up")

    def _lay(self, number: int, name: str) -> None:
        space, wire, far = self._space(name), self._wire(number), f"{self._tag}f{number}"
        _ip("netns", "add", space)
        _ip("link", "add", wire, "type", "veth", "peer", "name", far, "netns", space)
        _ip("addr", "add", f"{self._address(number, 1)}/30", "dev", wire)
        _ip("link", "set", wire, "up")
        _ip("-n", space, "addr", "add", f"{self._address(number, 2)}/30", "dev", far)
        _ip("-n", space, "link", "set", far, "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def _remove(self) -> None:
        # Its end of the wire goes with the namespace, and takes the other end along.
        for number, name in enumerate(self._names):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "del", self._wire(number))
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._space(name))

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _wire(self, number: int) -> str:
        return f"{self._tag}n{number}"

    def _address(self, number: int, end: int) -> str:
        # 198.18.0.0/15 is set aside for tests of networks; each process has four wires of its own in it.
        block = os.getpid() % (131_072 // (4 * _WIRES_MAX)) * 4 * _WIRES_MAX + 4 * number + end
        return f"198.{18 + (block >> 16)}.{(block >> 8) & 255}.{block & 255}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
