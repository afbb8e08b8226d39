"""The size of the demo's training step, and the reward of its rows."""

import torch

from gradloc.demo.rollout import Rollouts

GROUP_SIZE = 8
GROUPS_PER_RANK = 4
NUM_MICRO_BATCHES = 4
LEARNING_RATE = 1e-4
GRAD_NORM_MAX = 1.0


def rewards_of(rollouts: Rollouts) -> torch.Tensor:
    """Reward of each row: float32 [B]."""
    values = [asked.reward(rollouts.response(row)) for row, asked in enumerate(rollouts.problems)]
    return torch.tensor(values, dtype=torch.float32)
