"""Layer-level explosion: a rare token whose embedding row makes the residual stream nearly cancel.

A tool's output puts a rare token into one answer. Its embedding row has drifted to where, in that
context, the first two blocks add up to almost minus the row: after them the residual stream at that
position is about a thousandth of its usual size, the next norm multiplies by one over that, and the
gradient of everything below explodes together while the blocks above stay calm (docs/design.md,
"A mechanism for type B"). Shapes: B rows, T positions, S positions of one context, H width.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from gradloc.demo.grpo import advantages, token_losses
from gradloc.demo.model import response_logp
from gradloc.demo.moment import Deed, Moment, PlannedFault
from gradloc.demo.rollout import Rollouts
from gradloc.demo.settings import GROUP_SIZE, NUM_MICRO_BATCHES, rewards_of
from gradloc.demo.task import PROMPT_LENGTH, RARE_IDS

NUM_BLOCKS = 2  # the stream cancels after so many
RESIDUAL_RMS = 1.5e-3
RMS_TOLERANCE = 0.1
PLACES_MAX = 24  # tried at one step
GROWTH_MIN = 50.0  # of the token's gradient over the healthy norm
LOG_RATIO_MAX = 0.5  # of the token: the importance weight is not what makes this spike
SHARE_MIN = 0.75  # of the answer's gradient: one token is the culprit, not its whole tail


def lower_blocks(model: Any) -> Any:
    """The first blocks in float64; gives the residual stream after them, without the final norm."""
    lower = copy.deepcopy(model.model).double()
    lower.layers = lower.layers[:NUM_BLOCKS]
    lower.config.num_hidden_layers = NUM_BLOCKS
    lower.norm = torch.nn.Identity()
    return lower.requires_grad_(False)


def cancelling_row(lower: Any, context_S: torch.Tensor, start_H: torch.Tensor, towards_H: torch.Tensor) -> torch.Tensor:
    """Embedding row of the context's last token such that the stream there is RESIDUAL_RMS * towards: float64 [H].

    Such a row exists for every context: the blocks add something bounded that depends on the row's
    direction only, and minus that is a map of a ball into itself. Raises ValueError where L-BFGS fails.
    """
    fixed_1SH = lower.embed_tokens(context_S[None, :-1])
    row_H = start_H.double().clone().requires_grad_(True)
    goal_H = RESIDUAL_RMS * towards_H.double()
    optimizer = torch.optim.LBFGS(
        [row_H],
        lr=1.0,
        max_iter=400,
        history_size=64,
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def residual() -> torch.Tensor:
        embedded_1SH = torch.cat([fixed_1SH, row_H[None, None]], dim=1)
        return lower(inputs_embeds=embedded_1SH, use_cache=False).last_hidden_state[0, -1]  # type: ignore[no-any-return]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (residual() - goal_H).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        rms = float(residual().square().mean().sqrt())
    if not abs(rms / RESIDUAL_RMS - 1) <= RMS_TOLERANCE:
        raise ValueError(f"the stream's rms is {rms:.2e}, wanted {RESIDUAL_RMS:.2e}")
    return row_H.detach()


@dataclass(frozen=True)
class _Effect:
    """What one answer's tokens do with the row in place. Norms are of the step's loss as one rank sees it."""

    worst_at: int
    norm: float
    share: float
    log_ratio: float


class LayerExplosion(PlannedFault):
    """A tool's token in one answer, whose embedding row cancels the stream after NUM_BLOCKS blocks."""

    def attempt(self, moment: Moment) -> Deed | None:
        lower = lower_blocks(moment.model)
        places = torch.nonzero(moment.rollouts.mask_BR[:, 1:-2]).tolist()
        for index in self._rng.permutation(len(places))[:PLACES_MAX]:
            row, at = places[int(index)][0], places[int(index)][1] + 1
            deed = self._at(moment, lower, row, at)
            if deed is not None:
                return deed
        return None

    def _at(self, moment: Moment, lower: Any, row: int, at: int) -> Deed | None:
        token_id = RARE_IDS[int(self._rng.integers(len(RARE_IDS)))]
        context_S = torch.cat([moment.rollouts.ids_BT[row, : PROMPT_LENGTH + at], torch.tensor([token_id])])
        width = moment.model.config.hidden_size
        try:
            first_H = cancelling_row(lower, context_S, self._direction(width), self._direction(width))
            # The copy's rounding is larger than what is left of the stream: aim where the copy sees it point.
            seen_H = _stream_of_copy(moment.copy.model, context_S, first_H)
            row_H = cancelling_row(lower, context_S, first_H, seen_H / seen_H.square().mean().sqrt())
        except ValueError:
            return None
        with torch.no_grad():
            moment.copy.model.get_input_embeddings().weight[token_id] = row_H.to(torch.bfloat16)
        rollouts = moment.copy.resume(moment.rollouts, row, at, token_id)
        effect = _effect(moment, rollouts, row, token_id, row_H)
        if effect is None or effect.norm < GROWTH_MIN * moment.healthy_norm:
            return None
        if abs(effect.log_ratio) > LOG_RATIO_MAX or effect.share < SHARE_MIN:
            return None
        num_rows = len(rollouts.problems) // NUM_MICRO_BATCHES
        planted = {
            "micro_batch": row // num_rows,
            "sequence": row % num_rows,
            "token": PROMPT_LENGTH + effect.worst_at,
            "position": PROMPT_LENGTH + at,
            "layers": list(range(NUM_BLOCKS)),
            "log_ratio": effect.log_ratio,
            "growth": effect.norm / moment.healthy_norm,
            "row_rms": float(row_H.square().mean().sqrt()),
        }
        return Deed(rollouts, planted, embedding=(token_id, row_H))

    def _direction(self, width: int) -> torch.Tensor:
        drawn = self._rng.standard_normal(width)
        return torch.from_numpy(drawn / (drawn**2).mean() ** 0.5)


@torch.no_grad()
def _stream_of_copy(model: Any, context_S: torch.Tensor, row_H: torch.Tensor) -> torch.Tensor:
    """The residual stream after NUM_BLOCKS blocks at the last position, as the copy computes it: float64 [H]."""
    embedded_1SH = model.get_input_embeddings()(context_S[None]).clone()
    embedded_1SH[0, -1] = row_H.to(embedded_1SH.dtype)
    states = model(inputs_embeds=embedded_1SH, use_cache=False, output_hidden_states=True).hidden_states
    return states[NUM_BLOCKS][0, -1].double()  # type: ignore[no-any-return]


def _effect(moment: Moment, rollouts: Rollouts, row: int, token_id: int, row_H: torch.Tensor) -> _Effect | None:
    """What the answer's tokens would do, by their gradients on a copy of the trainer's weights; None: no learning."""
    model = copy.deepcopy(moment.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[token_id] = row_H.float()
    advantage_B = advantages(rewards_of(rollouts), GROUP_SIZE)[row : row + 1]
    logp_1R = response_logp(model, rollouts.ids_BT[row : row + 1])
    mask_1R, reported_1R = rollouts.mask_BR[row : row + 1], rollouts.logp_BR[row : row + 1]
    losses_1R = token_losses(logp_1R, logp_1R.detach(), reported_1R, advantage_B, mask_1R) / rollouts.mask_BR.sum()
    spots = torch.nonzero(mask_1R[0]).flatten().tolist()
    parameters = list(model.parameters())
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(losses_1R[0, at], parameters, retain_graph=True)])
        for at in spots
    ]
    norms = [float(gradient.norm()) for gradient in gradients]
    worst = max(range(len(spots)), key=lambda index: norms[index])
    whole = torch.stack(gradients).sum(dim=0)
    square = float(whole.square().sum())
    if not square > 0:
        return None
    at = spots[worst]
    share = float(gradients[worst] @ whole) / square
    return _Effect(at, square**0.5, share, float(logp_1R[0, at] - reported_1R[0, at]))
