"""schemathesis, every check, against a running reporter: what the document says is what is answered."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.access import Tokens, Viewer, digest

Start = Callable[..., Reporter]
OPERATOR = "operator-token"
TOKENS = Tokens({digest(OPERATOR): Viewer("oncall", "operate")})


def attack(url: str, folder: Path, *, examples: int, token: str | None, more: tuple[str, ...] = ()) -> None:
    """Run schemathesis; fails with what it found."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/api/v1/openapi.json"]
    command += ["--checks", "all", "--max-examples", str(examples), "--seed", "1", "--no-color", *more]
    if token is not None:
        command += ["--header", f"Authorization: Bearer {token}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=1_500)
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]


@pytest.fixture
def reporter(kit: Any, bus: MemoryBus, start: Start) -> Callable[..., str]:
    """The address of a reporter that knows a run with an incident; its names are the document's examples."""

    def starting(**values: Any) -> str:
        told = kit.Told(run_id="qwen3-4b-grpo")
        opened = told.opened()
        known = opened.model_copy(update={"incident_id": "inc-7c1e0b7a5d1f2a33"})
        finished = told.of(m.LocalizationFinished, known.incident_id, localization_attempt=1, finding=kit.a_finding())
        url = start(rate_limit_per_s=None, **values).url
        kit.tell(bus, told.started(), *(told.step(step, 0.4) for step in range(20)), known, finished)
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        address = f"{url}/api/v1/incidents/{known.incident_id}"
        kit.until(lambda: kit.ask(address, headers=headers), lambda answer: b'"finding":{' in answer.body, "there")
        return url

    return starting


def test_a_few_requests_of_every_kind_find_nothing(reporter: Callable[..., str], tmp_path: Path) -> None:
    attack(reporter(tokens=TOKENS), tmp_path, examples=3, token=OPERATOR, more=("--phases", "examples,fuzzing"))


@pytest.mark.full
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("token", [None, OPERATOR])
def test_many_requests_of_every_kind_find_nothing(
    reporter: Callable[..., str], tmp_path: Path, token: str | None
) -> None:
    attack(reporter(tokens=None if token is None else TOKENS), tmp_path, examples=100, token=token)


@pytest.mark.full
def test_without_a_token_no_request_gets_in(reporter: Callable[..., str], kit: Any, tmp_path: Path) -> None:
    """The document itself wants a token, so it is handed over as a file; every answer must be 401."""
    url = reporter(tokens=TOKENS)
    document = kit.ask(f"{url}/api/v1/openapi.json", headers={"Authorization": f"Bearer {OPERATOR}"}).json
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", str(tmp_path / "openapi.json"), "-u", url]
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance", "--no-color"]
    report = tmp_path / "calls.ndjson"
    command += ["--max-examples", "20", "--report", "ndjson", "--report-ndjson-path", str(report)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-6_000:]
    codes = {int(part[:3]) for part in report.read_text().split('"status_code":')[1:] for part in [part.strip()]}
    assert codes == {401}
