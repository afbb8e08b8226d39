"""A guard in front of the advantages: rewards that are no number or out of range. Pure.

    clamp   into [low, high]; infinities too. A NaN cannot be clamped: rejected
    reject  whatever is not in [low, high]

A rejected reward must not teach: `group_advantages` gives its row advantage 0 and leaves it out of its
group's mean and deviation. Shapes: B rows, G rows of one group (B = groups * G).
"""

import math
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["clamp", "reject"]


def guard_rewards(rewards_B: Tensor, low: float, high: float, mode: Mode = "clamp") -> tuple[Tensor, Tensor]:
    """(rewards, keep): rewards float [B], all within [low, high]; keep bool [B], False where rejected.

    A rejected reward reads as `low`, so that nothing downstream is NaN even if `keep` is forgotten.
    Raises ValueError for a range or a mode that cannot be meant.
    """
    check_range(low, high)
    if mode not in ("clamp", "reject"):
        raise ValueError(f"RewardGuard: mode is {mode!r}; expected 'clamp' or 'reject'")
    rewards_B = rewards_B if rewards_B.is_floating_point() else rewards_B.float()
    known_B = ~torch.isnan(rewards_B)
    keep_B = known_B if mode == "clamp" else known_B & (rewards_B >= low) & (rewards_B <= high)
    return torch.where(keep_B, rewards_B, low).clamp(low, high), keep_B


def check_range(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"RewardGuard: range is [{low}, {high}]; expected two finite numbers, the smaller first")


def group_advantages(rewards_B: Tensor, keep_B: Tensor, group_size: int, epsilon: float = 1e-4) -> Tensor:
    """GRPO's advantages over the kept rows of each group: [B]; 0 where rejected or alone.

    (reward - mean) / (std + epsilon), std with n - 1 (Shao et al. 2024). Raises ValueError when B is no
    multiple of `group_size`.
    """
    if group_size < 1 or rewards_B.numel() % group_size:
        raise ValueError(f"{rewards_B.numel()} rewards are no multiple of the group size {group_size}")
    rewards_NG, keep_NG = rewards_B.view(-1, group_size), keep_B.view(-1, group_size)
    num_N1 = keep_NG.sum(dim=1, keepdim=True)
    kept_NG = torch.where(keep_NG, rewards_NG, 0.0)
    mean_N1 = kept_NG.sum(dim=1, keepdim=True) / num_N1.clamp(min=1)
    centred_NG = torch.where(keep_NG, rewards_NG - mean_N1, 0.0)
    std_N1 = (centred_NG.square().sum(dim=1, keepdim=True) / (num_N1 - 1).clamp(min=1)).sqrt()
    return (centred_NG / (std_N1 + epsilon)).reshape(-1)
