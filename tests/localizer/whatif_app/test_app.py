"""The what-if app under a real Ray Serve: a cold start that shows, one answer with the command's own, back to zero."""

import json
import os
import secrets
import socket
import time
import urllib.request

import pytest
from click.testing import CliRunner

from gradloc.workstation.ray import RayHead
from gradloc_localizer import whatif_client
from gradloc_localizer.whatif_command import whatif
from gradloc_proto.whatif import WhatIfOptions, WhatIfRequest

pytestmark = pytest.mark.full
TOKEN = secrets.token_hex(16)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(answers, what, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := answers()):
        assert time.monotonic() < deadline, what
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory, trainer):
    folder = tmp_path_factory.mktemp("store")
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    step.write(f"file://{folder}/my-run/0/7", run_id="my-run")
    return folder


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory, store):
    known = {name: value for name, value in os.environ.items() if not name.startswith(("GRADLOC_", "RAY_"))}
    env = known | {"GRADLOC_WHATIF_STORE": f"file://{store}", "GRADLOC_WHATIF_TOKEN": TOKEN}
    head = RayHead(tmp_path_factory.mktemp("ray") / "ray.log", num_cpus=2, job_env=env)
    head.wait_ready()
    yield head
    head.end()


@pytest.fixture(scope="module")
def app(ray_head, tmp_path_factory):
    """The app's address, as a cluster would deploy it: by Serve's configuration over the dashboard."""
    port = free_port()
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "whatif",
                "route_prefix": "/whatif",
                "import_path": "gradloc_localizer.whatif_app:application",
                "args": {"device": "cpu", "threads": 1, "idle_s": 5.0},
            }
        ],
    }
    dashboard(ray_head, "PUT", config)
    until(lambda: status(ray_head) == "RUNNING", "the app runs")
    return f"http://127.0.0.1:{port}/whatif"


def dashboard(ray_head, method, body=None):
    headers = {"Authorization": f"Bearer {ray_head.token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    url = f"{ray_head.address}/api/serve/applications/"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as reply:
        return json.loads(reply.read() or b"{}")


def status(ray_head):
    return dashboard(ray_head, "GET")["applications"].get("whatif", {}).get("status")


def replicas(ray_head):
    deployments = dashboard(ray_head, "GET")["applications"]["whatif"]["deployments"]
    return [one["state"] for one in deployments["Replica"]["replicas"]]


def command(monkeypatch, *arguments):
    monkeypatch.setenv("GRADLOC_WHATIF_TOKEN", TOKEN)
    done = CliRunner().invoke(whatif, arguments, terminal_width=200)
    assert done.exit_code == 0, done.output
    return done


def test_the_app_starts_on_demand_answers_as_the_command_does_and_sleeps_again(app, ray_head, store, monkeypatch):
    assert replicas(ray_head) == []  # nothing holds a GPU
    seen = []
    request = WhatIfRequest(run="my-run", step=7, drop=("1:0:2:9",), token_clip="0.5:5")
    told = whatif_client.ask(app, request, lambda stage, _fraction: seen.append(stage), TOKEN)
    assert seen[0].startswith("starting a replica") and "opening" in seen
    assert told.pop("replica")["started"] is True
    words = ("--drop", "1:0:2:9", "--token-clip", "0.5:5", "--json", "--device", "cpu", "--threads", "1")
    here = json.loads(command(monkeypatch, f"{store}/my-run/0/7", *words).stdout)
    assert told == here

    again = json.loads(command(monkeypatch, "my-run/0/7", "--serve", app, "--json").stdout)
    assert again.pop("replica")["started"] is False
    assert again == json.loads(command(monkeypatch, f"{store}/my-run/0/7", *words[4:]).stdout)
    text = command(monkeypatch, "my-run/0/7", "--serve", app).stdout
    assert "TokenClip [0.5, 5]" in text and "a replica was ready" in text

    for wrong, reason in (({"run": "other"}, "no snapshot at"), ({"drop": ("9:0:0",)}, "the step has ranks 0 to 1")):
        with pytest.raises(ValueError, match=reason):
            whatif_client.ask(app, WhatIfRequest(**({"run": "my-run", "step": 7} | wrong)), token=TOKEN)
    with pytest.raises(ValueError, match="401"):
        whatif_client.ask(app, request, token="wrong")
    until(lambda: replicas(ray_head) == [], "the last replica went")


def test_what_does_not_answer_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv("GRADLOC_WHATIF_TOKEN", TOKEN)
    options = WhatIfOptions()
    with pytest.raises(OSError, match="does not answer"):
        whatif_client.ask(f"http://127.0.0.1:{free_port()}/", whatif_client.request_of("a/0/1", options))
    with pytest.raises(ValueError, match="is not an address"):
        whatif_client.ask("localhost", whatif_client.request_of("a/0/1", options))
    with pytest.raises(ValueError, match="RUN/ATTEMPT/STEP"):
        whatif_client.request_of("nowhere/x", options)
