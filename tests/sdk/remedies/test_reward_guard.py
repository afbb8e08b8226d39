"""RewardGuard: rewards that are no number or out of range, before advantages are made of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.clipping import RewardGuard, group_advantages, guard_rewards

REWARDS = torch.tensor([0.5, math.nan, math.inf, -math.inf, 1e5, -3.0])


def test_clamp_brings_into_range_and_rejects_only_what_is_no_number() -> None:
    rewards, keep = guard_rewards(REWARDS, 0.0, 1.0, "clamp")
    assert rewards.tolist() == [0.5, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert keep.tolist() == [True, False, True, True, True, True]


def test_reject_keeps_only_what_is_in_range() -> None:
    rewards, keep = guard_rewards(REWARDS, 0.0, 1.0, "reject")
    assert keep.tolist() == [True, False, False, False, False, False]
    assert bool(torch.isfinite(rewards).all())


def test_a_rejected_row_teaches_nothing_and_does_not_move_its_group() -> None:
    rewards, keep = guard_rewards(torch.tensor([0.0, 1.0, 0.5, 1e5]), 0.0, 1.0, "reject")
    guarded = group_advantages(rewards, keep, 4)
    alone = group_advantages(torch.tensor([0.0, 1.0, 0.5]), torch.ones(3, dtype=torch.bool), 3)
    assert guarded.tolist() == pytest.approx([*alone.tolist(), 0.0])


def test_one_absurd_reward_no_longer_silences_its_group() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 1e5])
    unguarded = group_advantages(rewards, torch.ones(4, dtype=torch.bool), 4)
    guarded, keep = guard_rewards(rewards, 0.0, 1.0)
    spread = group_advantages(guarded, keep, 4)
    assert abs(unguarded[0] - unguarded[1]).item() < 1e-4
    assert abs(spread[0] - spread[1]).item() > 1.0


@given(st.lists(st.floats(width=32), min_size=0, max_size=5).map(lambda row: row * 4))
def test_advantages_are_always_finite(values: list[float]) -> None:
    rewards, keep = guard_rewards(torch.tensor(values), -1.0, 1.0, "reject")
    assert bool(torch.isfinite(group_advantages(rewards, keep, 4)).all())


def test_a_group_that_is_alike_alone_or_rejected_teaches_nothing() -> None:
    keep = torch.tensor([True, True, True, False, False, False])
    assert group_advantages(torch.tensor([0.3, 0.3, 0.9, 0.0, 0.0, 0.0]), keep, 2).tolist() == [0.0] * 6


def test_the_guard_counts_what_it_did() -> None:
    guard = RewardGuard(0.0, 1.0)
    guard(REWARDS)
    guard(torch.tensor([0.1, 0.9]))
    assert guard.tally.take() == pytest.approx(5 / 8)
    assert guard.tally.take() is None
    assert (guard.num_seen, guard.num_acted) == (8, 5)


def test_integer_rewards_and_none_at_all_are_fine() -> None:
    assert guard_rewards(torch.tensor([0, 1, 7]), 0.0, 1.0)[0].tolist() == [0.0, 1.0, 1.0]
    assert guard_rewards(torch.zeros(0), 0.0, 1.0)[0].shape == (0,)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="expected two finite numbers"):
        RewardGuard(1.0, 0.0)
    with pytest.raises(ValueError, match="expected two finite numbers"):
        RewardGuard(0.0, math.inf)
    with pytest.raises(ValueError, match="expected 'clamp' or 'reject'"):
        RewardGuard(0.0, 1.0, "drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no multiple of the group size"):
        group_advantages(torch.zeros(3), torch.ones(3, dtype=torch.bool), 2)
