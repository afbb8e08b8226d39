"""The vector that ranks add up: what one rank says, all hear, however odd the numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.agreement import CommonView, Layout, LocalView, from_vector, to_vector
from gradloc.capture import SUMMARY_FIELDS
from gradloc_proto.messages import Limits

NAMES = ("embedding", "layers.0.mlp", "head")
BOUNDARIES = ("layers.0", "layers.1", "layers.2")
floats = st.floats(allow_nan=True, allow_infinity=True, width=64)
maybe = st.none() | st.floats(min_value=1e-12, max_value=1e12)


def blank(**changes: object) -> LocalView:
    values: dict[str, object] = {
        "layer_squares_L": torch.zeros(3, dtype=torch.float64),
        "summary": torch.zeros(len(SUMMARY_FIELDS), dtype=torch.float64),
        "metrics": {},
        "failed": False,
        "ready": True,
    }
    return LocalView(**(values | changes))  # type: ignore[arg-type]


def summed(*views: LocalView) -> CommonView:
    layout = Layout(NAMES, BOUNDARIES, len(views))
    vectors = [to_vector(view, layout, rank) for rank, view in enumerate(views)]
    return from_vector(torch.stack(vectors).sum(0), layout)


@given(norm=maybe, healthy=maybe, layer=maybe, version=st.integers(0, 2**50))
def test_rank_0s_limits_reach_all_ranks_unchanged(
    norm: float | None, healthy: float | None, layer: float | None, version: int
) -> None:
    layers = {} if layer is None else {"layers.0.mlp": layer}
    limits = Limits(version=version, norm=norm, healthy_norm=healthy, layers=layers, healthy_layers=layers)
    assert summed(blank(limits=limits), blank(), blank()).limits == limits


@given(values=st.lists(floats, min_size=2, max_size=4))
def test_a_number_that_is_not_finite_stays_in_its_rank(values: list[float]) -> None:
    views = []
    for value in values:
        summary = torch.zeros(len(SUMMARY_FIELDS), dtype=torch.float64)
        summary[SUMMARY_FIELDS.index("coefficient_abs_max")] = value
        views.append(blank(summary=summary))
    heard = [rank["coefficient_abs_max"] for rank in summed(*views).ranks]
    assert torch.equal(torch.tensor(heard).nan_to_num(nan=123.0), torch.tensor(values).nan_to_num(nan=123.0))


def test_metrics_are_averaged_over_the_ranks_that_gave_them() -> None:
    view = summed(blank(metrics={"loss": 1.0}), blank(metrics={"loss": 3.0, "lr": 0.5}), blank())
    assert view.mean("loss") == 2.0
    assert view.mean("lr") == 0.5
    assert view.mean("kl") is None


def test_a_nan_metric_is_told_apart_from_none_given() -> None:
    loss = summed(blank(metrics={"loss": math.nan}), blank()).mean("loss")
    assert loss is not None and math.isnan(loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_makes_the_norm_so_and_no_other_layer(bad: float) -> None:
    squares = torch.tensor([4.0, bad, 9.0], dtype=torch.float64)
    view = summed(blank(layer_squares_L=squares), blank())
    assert not math.isfinite(view.norm)
    assert (view.layer_norms["embedding"], view.layer_norms["head"]) == (2.0, 3.0)


def test_one_rank_that_failed_or_is_busy_speaks_for_all() -> None:
    assert summed(blank(), blank(failed=True)).failed
    assert not summed(blank(), blank(ready=False)).ready
    assert summed(blank(), blank()).ready


def test_the_worst_rank_is_the_one_with_nan_else_the_largest() -> None:
    def rank(value: float) -> LocalView:
        summary = torch.zeros(len(SUMMARY_FIELDS), dtype=torch.float64)
        summary[SUMMARY_FIELDS.index("num_tokens")] = 5
        summary[SUMMARY_FIELDS.index("coefficient_abs_max")] = value
        return blank(summary=summary)

    assert summed(rank(1.0), rank(3.0), rank(2.0)).worst_rank() == 1
    assert summed(rank(1.0), rank(math.inf), rank(math.nan)).worst_rank() == 2


def test_what_entered_the_layers_adds_up_over_ranks() -> None:
    view = summed(
        blank(entering={"layers.0": (4.0, 0.0), "layers.1": (9.0, 2.0), "layers.2": (1.0, 0.0)}),
        blank(entering={"layers.0": (0.0, 0.0), "layers.1": (16.0, 1.0), "layers.2": (math.inf, 0.0)}),
        blank(),  # a rank without LayerClip says nothing, in as many numbers
    )
    assert view.entering_norms == {"layers.0": 2.0, "layers.1": 5.0, "layers.2": math.inf}
    assert view.num_held == {"layers.0": 0, "layers.1": 3, "layers.2": 0}
    assert (view.num_positions_held, view.held_at) == (3, "layers.1")
    assert summed(blank()).held_at is None


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=12), st.integers(1, 4))
def test_however_positions_are_spread_over_ranks_what_enters_is_the_same(norms: list[float], num_ranks: int) -> None:
    def entering(*squares: float) -> float:
        return summed(*(blank(entering={"layers.0": (square, 0.0)}) for square in squares)).entering_norms["layers.0"]

    parts = [sum(norm**2 for norm in norms[rank::num_ranks]) for rank in range(num_ranks)]
    assert entering(*parts) == pytest.approx(math.hypot(*norms), rel=1e-9)
