"""SeqClip: the ratio of a whole answer by its three means."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.clipping import seq_clip, sequence_log_ratio

ROWS = torch.tensor([[0.1, 0.1, 0.1, 0.1], [2.0, -2.0, 0.0, 9.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])


def test_the_three_means_are_what_their_names_say() -> None:
    assert sequence_log_ratio(ROWS, MASK, "product").tolist() == pytest.approx([0.4, 0.0, 0.0])
    assert sequence_log_ratio(ROWS, MASK, "geometric").tolist() == pytest.approx([0.1, 0.0, 0.0])
    arithmetic = sequence_log_ratio(ROWS, MASK, "arithmetic").exp()
    expected = [math.exp(0.1), (math.exp(2) + math.exp(-2) + 1) / 3, 1.0]
    assert arithmetic.tolist() == pytest.approx(expected)


def test_an_answer_off_as_a_whole_is_left_out_though_each_token_is_harmless() -> None:
    log_ratio = torch.full((1, 30), math.log(1.3))
    mask = torch.ones(1, 30)
    assert seq_clip(log_ratio, mask, mean="geometric").tolist() == [0.0]
    assert seq_clip(log_ratio, mask, 0.5, 2.0, mean="product").tolist() == [0.0]
    assert seq_clip(log_ratio / 2, mask).tolist() == [1.0]


def test_opposite_ratios_cancel_in_the_product_but_not_in_the_mean_of_ratios() -> None:
    mask = torch.ones(1, 4)
    log_ratio = torch.tensor([[3.0, -3.0, 3.0, -3.0]])
    assert seq_clip(log_ratio, mask, 0.5, 2.0, "product").item() == 1.0
    assert seq_clip(log_ratio, mask, 0.5, 2.0, "arithmetic").item() == 0.0


def test_a_rare_token_hides_a_lean_from_the_geometric_mean_but_not_from_both() -> None:
    log_ratio = torch.tensor([[0.9, 0.9, 0.9, 0.9, 0.9, 0.9, -2.5, -2.5]])
    mask = torch.ones(1, 8)
    assert seq_clip(log_ratio, mask, mean="geometric").item() == 1.0
    assert seq_clip(log_ratio, mask, mean="both").item() == 0.0
    assert seq_clip(-log_ratio, mask, mean="both").item() == 0.0


@pytest.mark.parametrize("mean", ["product", "geometric", "arithmetic", "both"])
def test_what_is_not_finite_counts_only_inside_the_mask(mean: str) -> None:
    log_ratio = torch.tensor([[0.0, math.nan], [math.nan, 0.0], [math.inf, 0.0], [1e4, 0.0]])
    mask = torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1]])
    assert seq_clip(log_ratio, mask, 0.5, 2.0, mean).tolist() == [1.0, 0.0, 0.0, 0.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("mean", ["product", "geometric", "arithmetic", "both"])
def test_answers_without_tokens_are_kept_and_no_answers_are_fine(mean: str) -> None:
    assert seq_clip(torch.zeros(2, 0), torch.zeros(2, 0), mean=mean).tolist() == [1.0, 1.0]  # type: ignore[arg-type]
    assert seq_clip(torch.zeros(0, 3), torch.zeros(0, 3), mean=mean).shape == (0,)  # type: ignore[arg-type]
    assert seq_clip(torch.full((1, 2), math.nan), torch.zeros(1, 2), mean=mean).item() == 1.0  # type: ignore[arg-type]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.integers(0, 11))
def test_the_order_of_tokens_does_not_matter(values: list[float], shift: int) -> None:
    row = torch.tensor([values], dtype=torch.float64)
    for mean in ("product", "geometric", "arithmetic"):
        turned = sequence_log_ratio(row.roll(shift, dims=1), torch.ones_like(row), mean)
        assert turned.item() == pytest.approx(sequence_log_ratio(row, torch.ones_like(row), mean).item(), abs=1e-9)


def test_bounds_and_means_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="SeqClip: bounds"):
        seq_clip(torch.zeros(1, 1), torch.ones(1, 1), 2.0, 3.0)
    with pytest.raises(ValueError, match="SeqClip: mean is 'median'"):
        seq_clip(torch.zeros(1, 1), torch.ones(1, 1), mean="median")  # type: ignore[arg-type]
