"""The RayService's pods, started as rendered: what Serve is told makes an app that answers, with its token alone."""

import importlib.util
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradloc_localizer import whatif_client
from gradloc_proto.whatif import WhatIfRequest

OPERATORS_TOKEN = "t" * 40  # of conftest.py
STEPS = Path(__file__).parents[2] / "localizer/conftest.py"


def write_snapshot(url: str) -> None:
    spec = importlib.util.spec_from_file_location("steps", STEPS)
    assert spec is not None and spec.loader is not None
    steps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    steps.healthy_and(steps.tiny_model(), steps.stale(9.0)).write(url, run_id="my-run")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_rayservice_starts_and_answers(cluster: Callable[..., Any], tmp_path: Path) -> None:
    here = cluster("whatif-values.yaml")
    (service,) = here.of_kind("RayService")
    head = here.start("RayService/release-gradloc-whatif/head")
    head.wait_ready(seconds=240)
    snapshots = tmp_path / "RayService-release-gradloc-whatif-spare-0/volume-snapshots"
    snapshots.mkdir(parents=True)
    write_snapshot(f"file://{snapshots}/my-run/0/7")
    body = json.dumps(yaml.safe_load(service["spec"]["serveConfigV2"])).encode()
    headers = {"Authorization": f"Bearer {OPERATORS_TOKEN}", "Content-Type": "application/json"}
    address = f"http://{head.address}:8265/api/serve/applications/"

    def told(method: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(address, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")

    told("PUT", body)
    here.until(lambda: told("GET")["applications"]["whatif"]["status"] == "RUNNING", "the app runs", seconds=240)
    app, request = f"http://{head.address}:8000/whatif", WhatIfRequest(run="my-run", step=7)
    with pytest.raises(ValueError, match="401"):
        whatif_client.ask(app, request, token="wrong")
    here.start("RayService/release-gradloc-whatif/spare")  # what the autoscaler does when a replica is wanted
    stages: list[str] = []
    token = here.secret("release-gradloc-whatif")["token"]
    answer = whatif_client.ask(app, request, lambda stage, _fraction: stages.append(stage), token)
    assert stages[0].startswith("starting a replica") and answer["replica"]["started"] is True
    assert answer["verdict"] == "token" and len(answer["rows"]) >= 5
    for container in here.started.values():
        container.wait_ready(seconds=120)  # the worker's proxy is there now
        container.end()
