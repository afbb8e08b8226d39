"""TokenClip: what bounds on a token's ratio do, and what they never do."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.clipping import token_clip

BAD = [math.nan, math.inf, -math.inf]


def test_mask_keeps_what_is_inside_and_drops_the_rest() -> None:
    ratio = torch.tensor([[0.49, 0.5, 1.0, 5.0, 5.01, 1e30]], dtype=torch.float64)
    assert token_clip(ratio.log(), 0.5, 5.0 + 1e-9, "mask").tolist() == [[0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]


def test_clip_brings_a_high_ratio_down_to_the_bound_and_leaves_a_low_one_alone() -> None:
    log_ratio = torch.tensor([math.log(1e5), math.log(5.0), 0.0, math.log(1e-30)], dtype=torch.float64)
    factor = token_clip(log_ratio, 0.5, 5.0, "clip")
    assert factor.tolist() == pytest.approx([5e-5, 1.0, 1.0, 1.0])
    assert (factor * log_ratio.exp()).max().item() == pytest.approx(5.0)


@pytest.mark.parametrize("mode", ["clip", "mask"])
def test_a_ratio_that_is_nan_or_infinite_leaves_its_token_out(mode: str) -> None:
    factor = token_clip(torch.tensor(BAD), 0.5, 5.0, mode)  # type: ignore[arg-type]
    assert factor[:2].tolist() == [0.0, 0.0]
    assert factor[2].item() == (1.0 if mode == "clip" else 0.0)  # a ratio of zero weighs nothing already


@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=20),
    st.floats(1e-6, 1.0),
    st.floats(1.0, 1e6),
    st.sampled_from(["clip", "mask"]),
)
def test_no_token_ever_weighs_more_than_before(values: list[float], low: float, high: float, mode: str) -> None:
    factor = token_clip(torch.tensor(values), low, high, mode)  # type: ignore[arg-type]
    assert bool(((factor >= 0) & (factor <= 1)).all())
    assert factor.shape == (len(values),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_type_and_shape_stay_and_empty_is_fine(dtype: torch.dtype) -> None:
    assert token_clip(torch.zeros(3, 0, dtype=dtype)).shape == (3, 0)
    assert token_clip(torch.zeros(2, 2, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(("low", "high"), [(0.0, 5.0), (1.1, 5.0), (0.5, 0.9), (0.5, math.inf), (math.nan, 5.0)])
def test_bounds_that_would_drop_a_healthy_token_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"TokenClip: bounds are .*expected 0 < low <= 1 <= high"):
        token_clip(torch.zeros(1), low, high)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'clip' or 'mask'"):
        token_clip(torch.zeros(1), mode="drop")  # type: ignore[arg-type]
