"""The reporter's HTTP side as a parser: requests in the raw, over a real socket, to a reporter that runs."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from parsers import Parser

from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import RunStarted, StepObserved
from gradloc_reporter import Reporter, Settings

_TIMEOUT_S = 30.0
_ENDLESS = "text/event-stream"


class NotClear(AssertionError):
    """An answer that no client could act on."""


class Refused(Exception):
    """Answered by an error of 4xx: the text is its title."""


@contextlib.contextmanager
def rest(folder: Path) -> Iterator[Parser]:
    """The parser "REST"; the reporter ends with the block."""
    bus = MemoryBus()
    started = codec.encode(RunStarted(run_id="run", ts=1.0))
    steps = [codec.encode(StepObserved(run_id="run", ts=2.0, step=number, grad_norm=1.0)) for number in range(9)]
    bus.append(streams.REGISTRY, [started], length_max=10)
    bus.append(streams.stream("run", "steps"), [started, *steps], length_max=100)
    settings = Settings(database=f"sqlite:///{folder}/reporter.sqlite", port=0, rate_limit_per_s=None)
    with Reporter(bus, settings) as reporter:
        address = reporter.url.removeprefix("http://").split(":")
        line = _Line(address[0], int(address[1]))
        try:
            yield Parser("REST", line.ask, (Refused,), _seeds(line))
        finally:
            line.close()


class _Line:
    """One connection, made again when the server has closed it, as it does after a request that is none."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send head and body as they are. Raises Refused for 4xx, NotClear for 5xx and what is no answer."""
        head, _, body = request.partition(b"\r\n\r\n")
        head = head.replace(b"\r", b"").replace(b"\n", b"\r\n") if b"\r\n" not in head else head
        data = head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        for is_last in (False, True):
            try:
                return self._exchange(data)
            except (OSError, http.client.BadStatusLine):  # an idle connection may have been closed meanwhile
                self.close()
                if is_last:
                    raise NotClear("the connection ended without an answer") from None
        raise AssertionError

    def _exchange(self, data: bytes) -> tuple[int, bytes]:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=_TIMEOUT_S)
        self._socket.sendall(data)
        method = data.split(b" ", maxsplit=1)[0].decode("latin-1")
        reply = http.client.HTTPResponse(self._socket, method=method)
        reply.begin()
        kind = reply.headers.get_content_type()
        if kind == _ENDLESS:
            self.close()
            return reply.status, b""
        body = reply.read()
        if reply.will_close:
            self.close()
        if reply.status >= 500:
            raise NotClear(f"HTTP {reply.status}: {body[:200]!r}")
        if reply.status >= 400:
            if kind == "application/problem+json":
                raise Refused(str(json.loads(body)["title"]))
            raise Refused(f"HTTP {reply.status} {reply.reason}")
        return reply.status, body


def _seeds(line: _Line) -> Sequence[bytes]:
    """One request of each operation of the OpenAPI document, with plausible arguments, and pages."""
    _, document = line.ask(b"GET /api/v1/openapi.json HTTP/1.1\r\nhost: x")
    found = [b"GET / HTTP/1.1\r\nhost: x", b"GET /metrics HTTP/1.1\r\nhost: x", b"GET /runs/run HTTP/1.1\r\nhost: x"]
    for path, operations in json.loads(document)["paths"].items():
        for method, operation in operations.items():
            address = path
            query = []
            for parameter in operation.get("parameters", ()):
                value = "run" if "run" in parameter["name"] else "inc-1" if "incident" in parameter["name"] else "3"
                if parameter["in"] == "path":
                    address = address.replace("{" + parameter["name"] + "}", value)
                elif parameter["in"] == "query":
                    query.append(f"{parameter['name']}={value}")
            head = f"{method.upper()} {address}?{'&'.join(query)} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
            body = json.dumps({"reason": "x", "seconds": 60, "request_id": "r", "by": "me"}) if method != "get" else ""
            found.append(f"{head}\r\n\r\n{body}".encode())
    return found
