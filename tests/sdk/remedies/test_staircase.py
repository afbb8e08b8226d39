"""benchmarks/remedies.py: collapse and spikes as its docstring defines them, and the published clippers."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def staircase(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("staircase.run")


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("staircase.published")


def test_a_run_collapses_when_ten_steps_mean_half_of_the_first_twenty(staircase: ModuleType) -> None:
    assert staircase.collapse([0.8] * 60) is None
    assert staircase.collapse([0.8] * 40 + [0.41] * 40) is None
    assert staircase.collapse([0.8] * 40 + [0.0] * 40) == 45  # six zeros and four of .8 are less than .4
    assert staircase.collapse([0.8] * 30 + [0.0] * 4 + [0.8] * 30) is None


def test_spikes_are_not_finite_or_above_four_times_what_was_calm(staircase: ModuleType) -> None:
    norms = [1.0] * 10 + [4.0, 4.1, math.nan, 1.0, 100.0, 4.1]
    assert staircase.spikes(norms) == [11, 12, 14, 15]
    assert staircase.spikes([1.0, 100.0, 1.0]) == []  # too early to say
    assert staircase.spikes([]) == []


def norms_after(name: str, published: ModuleType, norms: list[float]) -> list[float]:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95))
    clip = getattr(published, name)(model, optimizer)
    after = []
    for step, norm in enumerate(norms):
        model.weight.grad = torch.full((4, 4), norm / 4)
        clip(step)
        after.append(float(model.weight.grad.norm()))
        optimizer.step()
    return after


def test_each_published_clipper_lowers_a_spike_as_its_paper_says(published: ModuleType) -> None:
    calm = [1.0, 1.1] * 20
    assert norms_after("unclipped", published, [7.0]) == [7.0]
    assert norms_after("global_clip", published, [7.0, 0.5]) == pytest.approx([1.0, 0.5], rel=1e-4)
    assert norms_after("zclip", published, [*calm, 100.0])[-1] == pytest.approx(1.05, abs=0.05)
    assert norms_after("adagc", published, [*calm, 100.0])[-1] == pytest.approx(1.05, abs=0.1)
    assert norms_after("aggc", published, [*calm, 100.0])[-1] == pytest.approx(1.5 * 5.99, rel=0.05)  # its EMA sees it
    assert norms_after("spam", published, [1.0] * 40 + [100.0])[-1] == pytest.approx(math.sqrt(50), rel=0.01)


def test_the_picture_shows_every_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    picture = importlib.import_module("staircase.picture")
    rows = [
        {"name": name, "natural": natural, "num_steps": 20, "survival_curve": [[0, 1.0], [10, 0.5], [20, 0.0]]}
        for name in ("none", "TokenClip")
        for natural in (False, True)
    ]
    svg = picture.survival_svg(rows)
    assert svg.count("<polyline") == 4 and svg.count(">TokenClip<") == 2


@pytest.mark.full
def test_quick_prints_what_is_promised() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "remedies.py"), "--json", "--quick"],
        capture_output=True,
        text=True,
        timeout=290,
        check=True,
    )
    result = json.loads(run.stdout.splitlines()[-1])
    assert {(row["name"], row["natural"]) for row in result["remedies"]} >= {("none", False), ("+ LayerClip", True)}
    promised = {"steps_to_collapse_median", "survival", "reward_final_median", "spikes", "seeds"}
    assert promised <= set(result["remedies"][0])
    assert {"layerclip_cosine", "global_clip_cosine"} <= set(result)
