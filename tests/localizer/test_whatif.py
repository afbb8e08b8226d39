"""Remedies change exactly the coefficients that they would have changed in training."""

import math

import pytest
import torch

from gradloc import whatif
from gradloc.policy import place
from gradloc.replay import coefficients_of
from gradloc.snapshot import MicroBatch


def batches(ratio, coefficient=None, advantage=None, mask=None):
    """One row of tokens with these importance ratios."""
    ratio_BR = torch.tensor([ratio], dtype=torch.float64)
    coefficient_BR = ratio_BR.clone() if coefficient is None else torch.tensor([coefficient], dtype=torch.float64)
    num_tokens = ratio_BR.shape[1]
    batch = MicroBatch(
        ids_BT=torch.zeros(1, num_tokens + 1, dtype=torch.int64),
        mask_BR=torch.ones(1, num_tokens, dtype=torch.bool) if mask is None else torch.tensor([mask]),
        logp_BR=torch.full((1, num_tokens), -1.0, dtype=torch.float64),
        coefficient_BR=coefficient_BR,
        rollout_logp_BR=-1.0 - ratio_BR.log(),
        advantage_BR=None if advantage is None else torch.tensor([advantage]),
    )
    return place([([batch], 0.5)])


def test_token_clip_clips_the_ratio_inside_the_coefficient():
    placed = batches([1.0, 2e5, 0.01, 5.0])
    (changed,) = whatif.token_clip(placed, coefficients_of(placed), 0.5, 5.0)
    assert changed.tolist()[0] == pytest.approx([0.5, 2.5, 0.25, 2.5])


@pytest.mark.parametrize("coefficient", [math.inf, math.nan])
def test_a_ratio_beyond_floats_loses_its_token(coefficient):
    placed = batches([1.0, math.inf], coefficient=[1.0, coefficient])
    (changed,) = whatif.token_clip(placed, coefficients_of(placed), 0.5, 5.0)
    assert changed.tolist() == [[0.5, 0.0]]


def test_sequence_clip_drops_rows_whose_tokens_add_up():
    placed = (*batches([1.012] * 100), *batches([1.001] * 100))
    dropped, kept = whatif.sequence_clip(placed, coefficients_of(placed), 0.5, 2.0)
    assert float(dropped.abs().max()) == 0.0
    assert torch.equal(kept, coefficients_of(placed)[1])


def test_masked_tokens_do_not_count_in_the_sequence():
    placed = batches([1.0, 50.0, math.nan], coefficient=[1.0, 0.0, 0.0], mask=[True, False, False])
    (kept,) = whatif.sequence_clip(placed, coefficients_of(placed), 0.5, 2.0)
    assert kept.tolist() == [[0.5, 0.0, 0.0]]


def test_advantage_clip_scales_with_the_advantage():
    placed = batches([1.0, 1.0, 1.0], advantage=[1.0, -50.0, 0.0])
    (changed,) = whatif.advantage_clip(placed, coefficients_of(placed), 5.0)
    assert changed.tolist()[0] == pytest.approx([0.5, 0.05, 0.5])


@pytest.mark.parametrize("remedy", [whatif.token_clip, whatif.sequence_clip])
def test_without_rollout_logps_a_ratio_cannot_be_clipped(remedy):
    batch = MicroBatch(
        torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 1).bool(), torch.zeros(1, 1), torch.ones(1, 1)
    )
    placed = place([([batch], 1.0)])
    assert remedy(placed, coefficients_of(placed), 0.5, 2.0) is None
    assert whatif.advantage_clip(placed, coefficients_of(placed), 5.0) is None


def test_layer_clip_clips_each_layer_to_its_own_limit():
    assert whatif.layer_clip_norm({"a": 300.0, "b": 3.0, "c": 4.0}, {"a": 12.0, "b": 30.0}) == pytest.approx(13.0)


def test_rows_without_anything_before_their_first_logp_are_refused():
    batch = MicroBatch(
        torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2).bool(), torch.zeros(1, 2), torch.ones(1, 2)
    )
    with pytest.raises(ValueError, match="nothing predicts the first"):
        place([([batch], 1.0)])
