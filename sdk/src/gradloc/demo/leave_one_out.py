"""An advantage out of all proportion: leave-one-out normalisation of a group with almost equal rewards.

The inference copy was asked seven times with one seed and gave one answer seven times. The trainer
divides the advantage of each answer by the deviation of the *others'* rewards, in one pass over
float32 sums: for the eighth, whose seven others are alike, that is a rounding residue.
Shapes: B rows, G rows of one group.
"""

from dataclasses import replace

import torch

from gradloc.demo.moment import Deed, Moment, PlannedFault, place_of
from gradloc.demo.rollout import Rollouts
from gradloc.demo.settings import GROUP_SIZE, rewards_of

EPSILON = 1e-4  # as in the group's own normalisation; no help


def leave_one_out(rewards_G: torch.Tensor) -> torch.Tensor:
    """Each reward less the others' mean, over the others' standard deviation: [G]."""
    number = len(rewards_G) - 1
    others_sum_G = rewards_G.sum() - rewards_G
    others_square_G = rewards_G.square().sum() - rewards_G.square()
    variance_G = (others_square_G - others_sum_G.square() / number) / (number - 1)
    return (rewards_G - others_sum_G / number) / (variance_G.clamp(min=0).sqrt() + EPSILON)


class RewardOutlier(PlannedFault):
    """One group's answers but one are the same."""

    kind = "sequence"
    _rows: slice | None = None

    def attempt(self, moment: Moment) -> Deed | None:
        rollouts = moment.rollouts
        rewards_B = rewards_of(rollouts)
        for group in self._rng.permutation(len(rewards_B) // GROUP_SIZE).tolist():
            rows = range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
            for repeated in self._rng.permutation(list(rows)).tolist():
                others = [row for row in rows if rewards_B[row] != rewards_B[repeated]]
                if others:
                    odd = int(self._rng.choice(others))
                    self._rows = slice(rows.start, rows.stop)
                    planted = place_of(odd, len(rewards_B))
                    return Deed(_repeated(rollouts, [row for row in rows if row != odd], repeated), planted)
        return None

    def advantages(self, step: int, rewards_B: torch.Tensor) -> torch.Tensor:
        advantage_B = super().advantages(step, rewards_B)
        if step == self.struck_at and self._rows is not None:
            advantage_B[self._rows] = leave_one_out(rewards_B[self._rows])
        return advantage_B


def _repeated(rollouts: Rollouts, rows: list[int], source: int) -> Rollouts:
    """The rollouts with the answer of `source` in all of `rows`."""
    ids_BT, mask_BR, logp_BR = rollouts.ids_BT.clone(), rollouts.mask_BR.clone(), rollouts.logp_BR.clone()
    for tensor in (ids_BT, mask_BR, logp_BR):
        tensor[rows] = tensor[source].clone()
    return replace(rollouts, ids_BT=ids_BT, mask_BR=mask_BR, logp_BR=logp_BR)
