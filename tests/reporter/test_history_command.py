"""`gradloc history --reporter`: a run's findings out of a running reporter, in order."""

import json

import pytest
from click.testing import CliRunner

from gradloc_localizer.history_command import history


@pytest.fixture
def ask(kit, bus, told, start):
    """Runs the command on a reporter that was told of two incidents of one run and none of another."""
    later = kit.a_finding().causes[0].model_copy(update={"name": "layer-heterogeneity"})
    kit.tell(bus, told.started(), kit.Told(run_id="quiet").started(), *(told.step(n, 0.4) for n in (1, 2)))
    for step, more in ((1204, {}), (1300, {"step": 1300, "causes": (later,)})):
        kit.tell(bus, told.opened(step), told.finished(told.incident(step), **more))
    reporter = start()

    def num_found():
        return [one["verdict"] for one in kit.ask(f"{reporter.url}/api/v1/incidents").json["incidents"]]

    kit.until(num_found, lambda verdicts: verdicts == ["token", "token"], "both findings are there")

    def asking(*arguments):
        return CliRunner().invoke(history, [*arguments, "--reporter", reporter.url])

    return asking


def test_a_runs_findings_come_in_order_with_how_far_it_came(ask, told):
    result = ask(told.run_id, "quiet", "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["runs"]
    assert [(one["cause"], one["first"]) for one in first["episodes"]] == [
        ("token-mismatch", [0, 1204]),
        ("layer-heterogeneity", [0, 1300]),
    ]
    assert (first["labels"], first["last_step"]) == ({"team": "rl"}, 2)
    assert (second["run_id"], second["episodes"]) == ("quiet", [])


def test_an_unknown_run_is_one_line(ask):
    result = ask("nobody")
    assert result.exit_code == 2
    assert "knows nothing at /api/v1/runs/nobody" in result.stderr and len(result.stderr.splitlines()) == 1
