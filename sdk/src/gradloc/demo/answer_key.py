"""Answers judged by another row's solution.

The data set is shuffled anew, its solutions are not: from one step on every answer is compared with
the solution of another problem. Rewards fall at once; gradients keep their size, since advantages are
normalised.
"""

import torch

from gradloc.demo.moment import CommonFault
from gradloc.demo.rollout import Rollouts
from gradloc.demo.settings import GROUP_SIZE


class ShuffledKey(CommonFault):
    """Rewards compare with the solution of the next group's problem."""

    def rewards(self, step: int, rollouts: Rollouts) -> torch.Tensor:
        if self.struck_at is None:
            return super().rewards(step, rollouts)
        problems = rollouts.problems[GROUP_SIZE:] + rollouts.problems[:GROUP_SIZE]
        values = [asked.reward(rollouts.response(row)) for row, asked in enumerate(problems)]
        return torch.tensor(values, dtype=torch.float32)
