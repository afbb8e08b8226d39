"""`python -m gradloc_reporter`: one clear line and exit code 2, or a service that ends when told."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter.command import reporter

NO_REDIS = "redis://:secret@127.0.0.1:1/0"


def run(folder: Path, *arguments: str, **environment: str) -> Result:
    """The command in this process: a fresh interpreter for each case would only cost time."""
    known = ("--database", f"sqlite:///{folder}/reporter.sqlite")
    return CliRunner().invoke(reporter, [*known, *arguments], env=environment)


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ([], {}, "expected --redis redis://host:port/0 or GRADLOC_REDIS_URL"),
        (["--redis", NO_REDIS], {}, "Redis at redis://127.0.0.1:1/0"),
        (["--redis", "http://x"], {}, "expected redis://"),
        (["--port", "70000"], {}, "--port"),
        (["--redis", NO_REDIS, "--slack-channel", "C0123"], {}, "GRADLOC_SLACK_TOKEN is not set"),
        (["--redis", NO_REDIS, "--slack-channel", "#alerts"], {"GRADLOC_SLACK_TOKEN": "secret"}, "not a channel id"),
        (["--redis", NO_REDIS], {"GRADLOC_SLACK_TOKEN": "secret"}, "--slack-channel is not given"),
        (["--redis", NO_REDIS], {"GRADLOC_SLACK_WEBHOOK": "secret"}, "GRADLOC_SLACK_WEBHOOK is not a URL"),
        (["--redis", NO_REDIS, "--public-url", "gradloc.example"], {}, "--public-url"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    done = run(tmp_path, *arguments, **environment)
    assert done.exit_code == 2
    assert says in done.stderr and "secret" not in done.stderr
    if "Usage" not in done.stderr:
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_database_that_cannot_be_opened_or_a_port_that_is_taken(tmp_path: Path, redis_server: Any) -> None:
    done = run(tmp_path, "--redis", redis_server.url, "--database", "sqlite:///no/such/folder/x")
    assert done.exit_code == 2 and "does not exist; create it first" in done.stderr
    done = run(tmp_path, "--redis", redis_server.url, "--port", str(redis_server.port))
    assert done.exit_code == 2 and "choose another --host or --port" in done.stderr


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(
    kit: Any, told: Any, tmp_path: Path, redis_server: Any, ending: signal.Signals
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "gradloc_reporter", "--port", "0", "--database", f"sqlite:///{tmp_path}/r.sqlite"],
            env=os.environ | {"GRADLOC_REDIS_URL": redis_server.url},
            stderr=sink,
        )
    try:
        said = kit.until(
            lambda: re.search(r"reporter at (http://\S+)", log.read_text()),
            lambda found: found is not None,
            "its address",
        )
        url = said.group(1)
        bus = RedisBus(redis_server.url)
        opened = told.opened()
        kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
        bus.close()
        answer = kit.until(
            lambda: kit.ask(f"{url}/api/v1/incidents").json["incidents"],
            lambda incidents: bool(incidents) and incidents[0]["verdict"] == "token",
            "the finding over HTTP",
        )
        assert "token 358" in answer[0]["culprit"]
        process.send_signal(ending)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text() and "<th" not in log.read_text()
