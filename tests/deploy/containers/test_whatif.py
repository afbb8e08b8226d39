"""The RayService's head, started as rendered: what Serve is told makes an app that wants its token and says what is
waited for. What its replicas answer: tests/localizer/whatif_app."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from gradloc_localizer import whatif_client
from gradloc_proto.whatif import WhatIfRequest

OPERATORS_TOKEN = "t" * 40  # of conftest.py


class Seen(Exception):
    pass


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_rayservices_head_serves_the_app_to_those_with_its_token(cluster: Callable[..., Any]) -> None:
    here = cluster("whatif-values.yaml")
    (service,) = here.of_kind("RayService")
    head = here.start("RayService/release-gradloc-whatif/head")
    head.wait_ready(seconds=240)
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

    def progressed(stage: str, _fraction: float) -> None:
        raise Seen(stage)

    with pytest.raises(Seen, match="starting a replica"):  # for which no worker is there
        whatif_client.ask(app, request, progressed, here.secret("release-gradloc-whatif")["token"])
