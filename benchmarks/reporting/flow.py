"""Events into the database from a real Redis, and out of it to many live views."""

import asyncio
import itertools
import random
import time
from typing import Any
from urllib.parse import urlsplit

from reporting.history import an_incident

from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.codec import encode
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter import Reporter, Settings
from gradloc_reporter.consumer import Consumer
from gradloc_reporter.store.engine import Database

NUM_RUNS = 50
LAYERS = tuple(f"layers.{layer}.{kind}" for layer in range(32) for kind in ("attention", "mlp"))
STEPS_PER_INCIDENT = 500  # a run that spikes once in five hundred steps is a sick one


def events(num_events: int, seed: int) -> dict[str, list[bytes]]:
    """By stream: steps of 64 layers, and one whole incident in STEPS_PER_INCIDENT of them."""
    dice = random.Random(seed)
    found: dict[str, list[bytes]] = {streams.REGISTRY: []}
    now = time.time()
    count = 0
    for number in itertools.count():
        for run in (f"flow-{index:03d}" for index in range(NUM_RUNS)):
            if count >= num_events:
                return found
            if number == 0:
                found[streams.REGISTRY].append(encode(m.RunStarted(run_id=run, attempt=0, ts=now)))
            norms = {layer: round(dice.random(), 6) for layer in LAYERS}
            step = m.StepObserved(
                run_id=run, attempt=0, ts=now + number, step=number, grad_norm=0.4, layer_norms=norms, limit=1.6
            )
            found.setdefault(streams.stream(run, "steps"), []).append(encode(step))
            count += 1
            if dice.random() < 1 / STEPS_PER_INCIDENT:
                for message in an_incident(run, number, now + number, dice):
                    name = "findings" if isinstance(message, m.LocalizationMessage) else "incidents"
                    name = "control" if isinstance(message, m.JobReported) else name
                    found.setdefault(streams.stream(run, name), []).append(encode(message))  # type: ignore[arg-type]
                    count += 1
    raise AssertionError


def ingest(redis_url: str, database: Database, *, num_events: int, seed: int) -> dict[str, Any]:
    """Everything waits in Redis; then the consumer reads, decodes, folds and commits until nothing is left."""
    waiting = events(num_events, seed)
    bus = RedisBus(redis_url)
    for key, data in waiting.items():
        for start in range(0, len(data), 500):
            bus.append(key, data[start : start + 500], length_max=1_000_000)
    total = sum(len(data) for data in waiting.values())
    consumer = Consumer(bus, database)
    begin, cpu = time.perf_counter(), time.process_time()
    while consumer.consume_once():
        pass
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    told = consumer.consumption
    assert told.consumed.total() >= total and not told.rejected.total(), (told, total)
    bus.close()
    total = told.consumed.total()
    # Of processor time of the reporter alone: what a machine with an idle core would take in.
    return {"ingest_per_s": total / seconds, "ingest_per_cpu_s": total / cpu_s, "ingest_events": total}


def listen(database_url: str, *, clients: int) -> dict[str, Any]:
    """`clients` live views of one reporter; an incident opens; how many hear of it, and how soon."""
    bus = MemoryBus()
    now = time.time()
    told = an_incident("live-run", 7, now, random.Random(0))[0]
    with Reporter(bus, Settings(database=database_url, port=0, rate_limit_per_s=None)) as reporter:
        bus.append(streams.REGISTRY, [encode(m.RunStarted(run_id="live-run", attempt=0, ts=now))], length_max=10)

        def publish() -> None:
            bus.append(streams.stream("live-run", "incidents"), [encode(told)], length_max=10)

        delays = asyncio.run(_listen(reporter.url, clients, told.incident_id, publish))
    return {
        "sse_clients": len(delays),
        "sse_p50_s": delays[len(delays) // 2] if delays else None,
        "sse_max_s": delays[-1] if delays else None,
    }


async def _listen(url: str, clients: int, incident_id: str, publish: Any) -> list[float]:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    ready = asyncio.Semaphore(0)
    published_at = 0.0

    async def one() -> float:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /api/v1/live HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n\r\n".encode())
        await writer.drain()
        await _until(reader, b"event: hello")
        ready.release()
        await _until(reader, incident_id.encode())
        delay = time.perf_counter() - published_at
        writer.close()
        return delay

    tasks = [asyncio.create_task(one()) for _ in range(clients)]
    for _ in range(clients):
        await asyncio.wait_for(ready.acquire(), 60)
    published_at = time.perf_counter()
    publish()
    done, pending = await asyncio.wait(tasks, timeout=60)
    for task in pending:
        task.cancel()
    return sorted(task.result() for task in done if task.exception() is None)


async def _until(reader: asyncio.StreamReader, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        chunk = await reader.read(65_536)
        if not chunk:
            raise ConnectionError("the stream ended")
        seen = seen[-len(wanted) :] + chunk
