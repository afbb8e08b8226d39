"""/metrics: what Prometheus reads, with few labels."""

import math
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter

Start = Callable[..., Reporter]
ALLOWED_LABELS = {"run", "verdict", "cause", "stream", "state", "outcome"}


def samples(kit: Any, url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = kit.ask(f"{url}/metrics")
    assert answer.status == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.name.startswith("gradloc_") and family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= ALLOWED_LABELS
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def of_run(found: dict[Any, float], name: str, run: str) -> float | None:
    return found.get((name, (("run", run),)))


def test_a_runs_numbers_and_its_incidents(kit: Any, told: Any, bus: MemoryBus, start: Start) -> None:
    url = start().url
    opened, calm = told.opened(5), told.opened(9)
    limits = m.Limits(version=10, norm=1.64, healthy_norm=0.41)
    kit.tell(
        bus,
        told.started(),
        told.step(9, 640.0, num_events_dropped=3),
        m.LimitsChanged(run_id=told.run_id, ts=told.ts, step=9, limits=limits),
        opened,
        calm,
        told.of(m.IncidentResolved, calm.incident_id, step=20, reason="calm"),
        told.finished(opened.incident_id),
    )
    bus.append(streams.stream(told.run_id, "findings"), [b"poison"], length_max=10)
    found = kit.until(lambda: samples(kit, url), lambda f: of_run(f, "gradloc_incidents_total", told.run_id) == 2, "2")
    expected = {
        "gradloc_grad_norm": 640.0,
        "gradloc_grad_norm_limit": 1.64,
        "gradloc_grad_norm_healthy": 0.41,
        "gradloc_step": 9,
        "gradloc_incidents_open": 1,
        "gradloc_spikes_total": 2,
        "gradloc_events_dropped_total": 3,
    }
    assert {name: of_run(found, name, told.run_id) for name in expected} == expected
    assert found["gradloc_findings_total", (("cause", "token-mismatch"), ("verdict", "token"))] == 1
    assert found["gradloc_messages_rejected_total", (("stream", "findings"),)] == 1
    assert found["gradloc_reporter_bus_up", ()] == 1


def test_a_norm_that_is_not_finite_is_exported_as_such(kit: Any, told: Any, bus: MemoryBus, start: Start) -> None:
    url = start().url
    kit.tell(bus, told.started(), told.step(1, math.nan))
    found = kit.until(lambda: samples(kit, url), lambda f: of_run(f, "gradloc_step", told.run_id) == 1, "step 1")
    value = of_run(found, "gradloc_grad_norm", told.run_id)
    assert value is not None and math.isnan(value)


def test_causes_from_outside_never_become_unbounded_labels(kit: Any, told: Any, bus: MemoryBus, start: Start) -> None:
    url = start().url
    kit.tell(bus, told.started())
    for number in range(60):
        opened = told.opened(number)
        name = f"cause-{number}" if number % 2 else f'<th{number}" prompt text'
        cause = m.Cause(name=name, confidence="low", summary="")
        kit.tell(bus, opened, told.finished(opened.incident_id, causes=(cause,)))

    def causes(found: dict[Any, float]) -> dict[str, float]:
        return {
            dict(labels)["cause"]: value for (name, labels), value in found.items() if name == "gradloc_findings_total"
        }

    found = kit.until(lambda: causes(samples(kit, url)), lambda c: sum(c.values()) == 60, "60 findings")
    assert len(found) <= 33 and found["other"] >= 30
    assert not any("prompt" in cause for cause in found)


def test_series_of_runs_that_ended_long_ago_expire(kit: Any, bus: MemoryBus, start: Start) -> None:
    old, new = kit.Told(run_id="old", ts=1000.0), kit.Told(run_id="new")
    kit.tell(bus, old.started(), old.step(1, 0.4), m.RunEnded(run_id="old", ts=2000.0, step=1))
    kit.tell(bus, new.started(), new.step(1, 0.4))
    url = start().url
    found = kit.until(lambda: samples(kit, url), lambda f: of_run(f, "gradloc_step", "new") == 1, "the new run")
    assert of_run(found, "gradloc_step", "old") is None
