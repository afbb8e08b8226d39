"""Numbers of the service for Prometheus, and the small HTTP server that shows them.

The only door to prometheus_client. Knows nothing of what is counted.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

_STALLED_S = 60.0  # a loop that has not turned for so long will not turn again


class Metrics:
    """One registry a service, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"gradloc_detector_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"gradloc_detector_{name}", text, registry=self.registry)

        self.messages = counter("messages", "Messages folded, by stream.", ("stream",))
        self.rejected = counter("rejected", "Messages set aside in dead-letter streams, by stream.", ("stream",))
        self.emitted = counter("emitted", "Messages published, by type.", ("type",))
        self.commits = counter("commits", "Commits, by result.", ("result",))
        self.leases_lost = counter("leases_lost", "Leases that another owner took.")
        self.losses = counter("losses_noticed", "Streams or checkpoints that Redis lost.")
        self.failures = counter("failures", "Unexpected errors while folding one message.")
        self.runs = gauge("runs", "Runs owned by this replica.")
        self.runs_set_aside = gauge("runs_set_aside", "Runs whose keys in Redis cannot be used at the moment.")
        self.lag_s = gauge("lag_seconds", "Age of the newest step when it was folded, the worst of the last turn.")
        self.bus_up = gauge("bus_up", "1 while Redis answers.")
        self.ray_up = gauge("ray_up", "1 while Ray answers (1 when nothing was asked of it).")
        self.jobs_ready = gauge("localizations_ready", "Localizations waiting for a slot or for Ray.")
        self.jobs_in_flight = gauge("localizations_in_flight", "Localization jobs that Ray holds.")
        self.jobs_submitted = gauge("jobs_submitted", "Jobs submitted to Ray since this replica started.")
        self.beat = time.monotonic()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def health(self) -> tuple[int, bytes]:
        """200 while the loop turns, also without Redis: a restart would not bring Redis back."""
        stalled_s = time.monotonic() - self.beat
        is_alive = stalled_s < _STALLED_S
        is_bus_up = self.registry.get_sample_value("gradloc_detector_bus_up") == 1.0
        body = {"status": "ok" if is_alive else "stalled", "bus": "up" if is_bus_up else "down"}
        return (200 if is_alive else 503), json.dumps(body).encode()


class MetricsServer:
    """`/metrics` and `/healthz` on `host`:`port` (0 takes a free one, see `port`). Raises OSError when taken."""

    def __init__(self, metrics: Metrics, *, host: str, port: int) -> None:
        self._server = _Server((host, port), _handler(metrics))
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="gradloc-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def _handler(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # a client that says nothing must not hold a thread

        def do_GET(self) -> None:
            match self.path.split("?", maxsplit=1)[0]:
                case "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, metrics.text())
                case "/healthz":
                    status, body = metrics.health()
                    self._answer(status, "application/json", body)
                case _:
                    self._answer(404, "text/plain", b"known: /metrics, /healthz\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a line each."""

    return Handler
