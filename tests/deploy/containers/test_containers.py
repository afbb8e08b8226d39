"""The rendered containers, started: probes answer, nothing but volumes can be written, SIGTERM drains in time."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gradloc.demo.slack import TOKEN, SlackEndpoint
from gradloc_reporter.access import new_token, token_entry

TRAINER = Path(__file__).parent / "trainer.py"
PARTS = ("detector", "reporter")


def asked(url: str, token: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_the_services_of_one_node_start_answer_and_drain(cluster: Callable[..., Any]) -> None:
    here = cluster("small-values.yaml")
    redis = here.start("StatefulSet/release-gradloc-redis").wait_ready()
    detector, reporter = here.start("release-gradloc-detector"), here.start("Deployment/release-gradloc-reporter")
    for container in (detector, reporter):
        container.wait_ready()
    for container in (redis, detector, reporter):
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{container.pid}/status").read_text().splitlines())
        assert status["Uid"].split() == ["65532"] * 4 and status["NoNewPrivs"] == "1", container.name
        assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}, container.name
        for place in ("/written", "/etc/written", "/opt/gradloc/written", "/usr/written"):
            assert "Read-only file system" in container.run("touch", place).stderr, (container.name, place)
    with urllib.request.urlopen(f"http://{detector.address}:9471/healthz", timeout=20) as answer:
        assert json.load(answer) == {"status": "ok", "bus": "up"}
    hook = here.start("Pod/release-gradloc-test-services")
    assert hook.wait(seconds=120) == 0, hook.logs()
    assert "ready" in hook.logs()
    for container in (detector, reporter, redis):
        assert container.end() == 0, container.logs()
    assert "leases released" in detector.logs() and "reporter ended" in reporter.logs()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_compose_file_starts_on_one_machine(cluster: Callable[..., Any]) -> None:
    here = cluster("compose.yaml", GRADLOC_RAY_TOKEN="t" * 40, GRADLOC_REDIS_PASSWORD="p" * 40)
    started = {"redis": here.start("Pod/redis")}

    def answers(name: str, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{started[name].address}{path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    here.until(lambda: started["redis"].run("redis-cli", "ping").stdout == "PONG\n", "Redis answers")
    started |= {name: here.start(f"Pod/{name}") for name in ("ray", "detector", "reporter")}
    here.until(lambda: answers("ray", ":8265/api/gcs_healthz"), "Ray answers")
    here.until(lambda: answers("detector", ":9471/healthz"), "the detector answers")
    here.until(lambda: answers("reporter", ":8321/readyz"), "the reporter is ready")
    # Ray answers some seconds before it knows its own nodes.
    here.until(lambda: "spare_gpu" in started["ray"].run("ray", "status").stdout, "Ray has a spare GPU")
    for name in ("detector", "reporter"):
        assert started[name].end() == 0, started[name].logs()
    for name in ("ray", "redis"):
        started[name].end()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_spike_goes_through_all_rendered_containers(
    cluster: Callable[..., Any], postgres: str, s3: Any, certificate: dict[str, str]
) -> None:
    """Redis over TLS with a user for each role, PostgreSQL, S3, Ray; trainer to REST and Slack; then SIGTERM."""
    token = new_token()
    store = {"AWS_ACCESS_KEY_ID": s3.key, "AWS_SECRET_ACCESS_KEY": s3.secret, "AWS_ENDPOINT_URL": "http://s3.test:8333"}
    secrets = {
        "gradloc-database": {"url": "postgresql+psycopg://postgres@database.test:5432/postgres"},
        "gradloc-tokens": {"tokens.toml": token_entry(token, name="tests", scope="read", teams=())},
        "gradloc-slack": {"token": TOKEN},
        "snapshot-store": store,
        "redis-tls": certificate,
    }
    with SlackEndpoint() as slack:
        here = cluster("whole-values.yaml", secrets)
        here.outside("database.test", 5432, postgres)
        here.outside("s3.test", 8333, s3.address)
        here.outside("slack.test", 8000, ("127.0.0.1", urlsplit(slack.base_url).port))
        migration = here.start("Job/release-gradloc-migration")
        assert migration.wait(seconds=120) == 0, migration.logs()
        redis = here.start("StatefulSet/release-gradloc-redis").wait_ready()
        head = here.start("RayCluster/release-gradloc-localizer/head")
        services = [here.start(f"Deployment/release-gradloc-{part}", n) for part in PARTS for n in (0, 1)]
        head.wait_ready()
        worker = here.start("RayCluster/release-gradloc-localizer/spare").wait_ready()
        for container in services:
            container.wait_ready()
        hook = here.start("Pod/release-gradloc-test-services")
        assert hook.wait(seconds=120) == 0, hook.logs()

        user = {"GRADLOC_REDIS_URL": here.secret("release-gradloc-trainer-one")["url"]}
        words = ["python", str(TRAINER), "one-run", "s3://snapshots/runs", "60", "40"]
        trainer = here.start_beside("trainer", words, store | user, redis_tls="/etc/gradloc-redis")
        assert trainer.wait(seconds=120) == 0, trainer.logs()
        assert json.loads(trainer.logs().splitlines()[-1]) == {"step": 40, "sequence": 5, "token": 17, "dropped": 0}

        def findings() -> list[Any]:
            url = f"http://{here.address_of('release-gradloc-reporter')}/api/v1/incidents"
            return [one for one in asked(url, token)["incidents"] if one["verdict"] is not None]

        (incident,) = here.until(findings, "a finding", seconds=180)
        assert (incident["run_id"], incident["verdict"]) == ("one-run", "token"), incident
        where = "rank 0 · micro-batch 0 · sequence 5 · token 17"
        (text,) = here.until(lambda: [text for text in slack.texts() if where in text], "the culprit in Slack")
        assert text.startswith("*Spike · run one-run · step 40*")
        assert len(slack.texts()) == 1, "two reporters, one message"
        for container in (*services, worker, head, redis):
            for place in ("/written", "/opt/gradloc/written"):
                assert "Read-only file system" in container.run("touch", place).stderr, container.name
            assert "65532" in container.run("id", "--user").stdout
        for container in (*services, redis):
            assert container.end() == 0, container.logs()
        for container in (worker, head):
            container.end()  # within the grace period; `ray start --block` says 1 of a SIGTERM
            assert "finished draining" in container.logs()
