"""Retokenization: an answer is decoded to text and encoded again.

The template puts a blank before the answer, and the blank becomes a token of its own: same text but
for the blank, other ids. The log-probabilities that the copy reported still stand where they stood and
belong to the tokens next to theirs. Shapes: B rows, T positions, R response positions.
"""

from dataclasses import replace

import torch

from gradloc.demo import task
from gradloc.demo.growth import logits_pull
from gradloc.demo.moment import Deed, Moment, PlannedFault, place_of
from gradloc.demo.rollout import Rollouts
from gradloc.demo.settings import rewards_of
from gradloc.demo.task import PAD, PROMPT_LENGTH, RESPONSE_LENGTH

GROWTH_MIN = 20.0  # of the gradient at the logits over that of the rest of the rank


def encoded_again(ids: list[int]) -> list[int]:
    """The ids of the text of `ids` as an answer in the template."""
    tokenizer = task.tokenizer()
    text = "".join(str(tokenizer.id_to_token(token)) for token in ids)
    return list(tokenizer.encode(f" {text}").ids)


class Retokenized(PlannedFault):
    """One answer's ids were made from its text again; rewards are of the text."""

    _sampled: Rollouts | None = None

    def attempt(self, moment: Moment) -> Deed | None:
        advantage_B = self.advantages(moment.step, rewards_of(moment.rollouts))
        found: list[tuple[float, Rollouts, int, int]] = []
        for row in range(len(moment.rollouts.problems)):
            rollouts = _with_row_again(moment.rollouts, row)
            if rollouts is None:
                continue
            pull_BR, logp_BR = logits_pull(moment.model, rollouts, advantage_B)
            size_BR = pull_BR * (logp_BR - rollouts.logp_BR).exp()
            others = size_BR.square().sum() - size_BR[row].square().sum()
            growth = float(size_BR[row].max() / others.sqrt().clamp(min=1e-30))
            if growth >= GROWTH_MIN:
                found.append((growth, rollouts, row, int(size_BR[row].argmax())))
        if not found:
            return None
        growth, rollouts, row, at = found[int(self._rng.integers(len(found)))]
        self._sampled = moment.rollouts
        return Deed(rollouts, {**place_of(row, len(rollouts.problems), at), "growth": growth})

    def rewards(self, step: int, rollouts: Rollouts) -> torch.Tensor:
        if step == self.struck_at and self._sampled is not None:
            return rewards_of(self._sampled)
        return rewards_of(rollouts)


def _with_row_again(rollouts: Rollouts, row: int) -> Rollouts | None:
    """The rollouts with `row` encoded again; None where it does not fit."""
    num_sampled = int(rollouts.mask_BR[row].sum())
    again = encoded_again(rollouts.response(row)[:num_sampled])
    if len(again) > RESPONSE_LENGTH:
        return None
    ids_BT, mask_BR = rollouts.ids_BT.clone(), rollouts.mask_BR.clone()
    ids_BT[row, PROMPT_LENGTH:] = torch.tensor([*again, *[PAD] * (RESPONSE_LENGTH - len(again))])
    mask_BR[row] = torch.arange(RESPONSE_LENGTH) < len(again)
    return replace(rollouts, ids_BT=ids_BT, mask_BR=mask_BR, sampled_BR=rollouts.sampled)
