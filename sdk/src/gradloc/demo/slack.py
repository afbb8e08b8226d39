"""A Slack-compatible endpoint on loopback that keeps what it receives: the demo's channel.

Speaks the four methods that the reporter uses (auth.test, chat.postMessage, chat.update,
conversations.history) as Slack documents them. Knows nothing of incidents.
"""

import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

CHANNEL = "C0DEMO"
TOKEN = "xoxb-demo"
_BODY_BYTES_MAX = 1_000_000


class SlackEndpoint:
    """`base_url` is what `slack_sdk.WebClient(base_url=...)` takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(dict(parse_qsl(urlsplit(self.path).query)))

            def do_POST(self) -> None:
                length = min(int(self.headers.get("Content-Length") or 0), _BODY_BYTES_MAX)
                body = self.rfile.read(length).decode(errors="replace")
                if "json" in (self.headers.get("Content-Type") or ""):
                    self._reply(json.loads(body or "{}"))
                else:
                    self._reply(dict(parse_qsl(body)))

            def _reply(self, arguments: dict[str, Any]) -> None:
                answer = json.dumps(endpoint.answer(urlsplit(self.path).path.rsplit("/", 1)[-1], arguments)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="demo-slack", daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/api/"

    def __enter__(self) -> "SlackEndpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What Slack would answer; a method it does not know is `unknown_method`."""
        with self._lock:
            if method == "auth.test":
                return {"ok": True, "user_id": "U0DEMO", "bot_id": "B0DEMO", "team": "demo"}
            if method == "chat.postMessage":
                ts = f"{time.time():.0f}.{next(self._numbers):06d}"
                self._messages[ts] = {**arguments, "ts": ts, "type": "message", "user": "U0DEMO", "bot_id": "B0DEMO"}
                return {"ok": True, "channel": arguments.get("channel"), "ts": ts, "message": self._messages[ts]}
            if method == "chat.update":
                ts = str(arguments.get("ts"))
                if ts not in self._messages:
                    return {"ok": False, "error": "message_not_found"}
                self._messages[ts] = {**self._messages[ts], **arguments}
                return {"ok": True, "channel": arguments.get("channel"), "ts": ts, "text": arguments.get("text", "")}
            if method == "conversations.history":
                newest_first = [one for one in reversed(self._messages.values()) if not one.get("thread_ts")]
                return {"ok": True, "messages": newest_first, "has_more": False}
            return {"ok": False, "error": "unknown_method"}

    def texts(self) -> list[str]:
        """Texts of the channel's messages as they read now, oldest first; replies in threads are left out."""
        with self._lock:
            return [str(one.get("text", "")) for one in self._messages.values() if not one.get("thread_ts")]
