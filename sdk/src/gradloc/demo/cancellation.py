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
import torch.distributed as dist

from gradloc.demo.grpo import advantages, token_losses
from gradloc.demo.model import response_logp
from gradloc.demo.moment import Deed, Moment, PlannedFault, place_of
from gradloc.demo.rollout import Rollouts
from gradloc.demo.settings import GROUP_SIZE, rewards_of
from gradloc.demo.task import PROMPT_LENGTH, RARE_IDS

NUM_BLOCKS = 2  # the stream cancels after so many
RESIDUAL_RMS = 7e-4
RMS_TOLERANCE = 0.05
NUM_STARTS = 32  # side by side
MAP_STEPS = 60
ITERATIONS_MAX = 18  # where it converges, it has by then
ADVANTAGE_MIN = 0.5
PLACES_MAX = 12  # tried at one step; the next step offers others
CONTINUATIONS = 24  # of one place, sampled side by side
EARLY_POSITIONS = 3  # further on, the model is too sure of the rest to learn from it
GROWTH_MIN = 20.0  # of the answer's gradient over the healthy norm
LOG_RATIO_MAX = 0.5  # of the token: the importance weight is not what makes this spike
SHARE_MIN, SHARE_MAX = 0.75, 1.3  # of the answer's gradient: one token is the culprit, not its whole tail


def lower_blocks(model: Any) -> Any:
    """The first blocks; gives the residual stream after them, without the final norm."""
    lower = copy.deepcopy(model.model)
    lower.layers = lower.layers[:NUM_BLOCKS]
    lower.config.num_hidden_layers = NUM_BLOCKS
    lower.norm = torch.nn.Identity()
    return lower.requires_grad_(False)


def small_stream_row(
    lower: Any, context_S: torch.Tensor, starts_KH: torch.Tensor, num_steps: int = MAP_STEPS
) -> torch.Tensor:
    """Of K embedding rows of the context's last token, brought towards cancellation, the best: [H].

    A row that cancels exists for every context: the blocks add something bounded that depends on the
    row's direction only, and minus that is a map of a ball into itself. These are steps of that map.
    """
    before_SH = lower.embed_tokens(context_S[:-1])
    rows_KH = starts_KH
    for _ in range(num_steps):
        rows_KH = rows_KH - 0.5 * _streams(lower, before_SH, rows_KH)
    return rows_KH[int(_streams(lower, before_SH, rows_KH).norm(dim=1).argmin())]


def cancelling_row(
    lower: Any, context_S: torch.Tensor, start_H: torch.Tensor, towards_H: torch.Tensor
) -> torch.Tensor | None:
    """Embedding row of the context's last token such that the stream there is RESIDUAL_RMS * towards: [H].

    Levenberg-Marquardt from `start`; None where it ends elsewhere.
    """
    before_SH = lower.embed_tokens(context_S[:-1])
    goal_H = RESIDUAL_RMS * towards_H
    row_H, damping = start_H, 1e-2
    stream_H, jacobian_HH = _stream_and_jacobian(lower, before_SH, row_H)
    miss_H = stream_H - goal_H
    for _ in range(ITERATIONS_MAX):
        if float(miss_H.square().mean().sqrt()) <= RMS_TOLERANCE * RESIDUAL_RMS:
            return row_H
        wide_HH = jacobian_HH.double()
        normal_HH = wide_HH.T @ wide_HH
        normal_HH.diagonal().add_(damping)
        tried_H = row_H - torch.linalg.solve(normal_HH, wide_HH.T @ miss_H.double()).to(row_H.dtype)
        stream_H, tried_jacobian_HH = _stream_and_jacobian(lower, before_SH, tried_H)
        tried_miss_H = stream_H - goal_H
        if float(tried_miss_H.norm()) < float(miss_H.norm()):
            row_H, miss_H, jacobian_HH, damping = tried_H, tried_miss_H, tried_jacobian_HH, damping * 0.2
        else:
            damping *= 5.0
    return None


@torch.no_grad()
def _streams(lower: Any, before_SH: torch.Tensor, rows_KH: torch.Tensor) -> torch.Tensor:
    """The residual stream at the last position for each row: [K, H]."""
    embedded_KSH = torch.cat([before_SH.expand(len(rows_KH), -1, -1), rows_KH[:, None]], dim=1)
    return lower(inputs_embeds=embedded_KSH, use_cache=False).last_hidden_state[:, -1]  # type: ignore[no-any-return]


def _stream_and_jacobian(lower: Any, before_SH: torch.Tensor, row_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream at the last position [H] and its derivative by the row [H, H], in one backward."""
    width = len(row_H)
    rows_HH = row_H.expand(width, width).clone().requires_grad_(True)  # one copy for each output
    embedded_HSH = torch.cat([before_SH.expand(width, -1, -1), rows_HH[:, None]], dim=1)
    streams_HH = lower(inputs_embeds=embedded_HSH, use_cache=False).last_hidden_state[:, -1]
    (jacobian_HH,) = torch.autograd.grad(streams_HH.diagonal().sum(), rows_HH)
    return streams_HH[0].detach(), jacobian_HH


@dataclass(frozen=True)
class _Effect:
    """What one answer's tokens do with the row in place: their gradient's norm, and the worst one's part in it."""

    worst_at: int
    norm: float
    share: float
    log_ratio: float


class LayerExplosion(PlannedFault):
    """A tool's token in one answer, whose embedding row cancels the stream after NUM_BLOCKS blocks."""

    def attempt(self, moment: Moment) -> Deed | None:
        lower = lower_blocks(moment.model)
        advantage_B = advantages(rewards_of(moment.rollouts), GROUP_SIZE)
        rows = [row for row in range(len(advantage_B)) if abs(float(advantage_B[row])) >= ADVANTAGE_MIN]
        places = [(row, at) for row in rows for at in range(1, 1 + EARLY_POSITIONS)]
        for index in self._rng.permutation(len(places))[:PLACES_MAX]:
            deed = self._at(moment, lower, *places[int(index)])
            if deed is not None:
                return deed
        return None

    def _at(self, moment: Moment, lower: Any, row: int, at: int) -> Deed | None:
        token_id = RARE_IDS[int(self._rng.integers(len(RARE_IDS)))]
        context_S = torch.cat([moment.rollouts.ids_BT[row, : PROMPT_LENGTH + at], torch.tensor([token_id])])
        row_H = self._row(moment, lower, context_S)
        if row_H is None:
            return None
        scratch = copy.deepcopy(moment.model)
        with torch.no_grad():
            scratch.get_input_embeddings().weight[token_id] = row_H
            moment.copy.model.get_input_embeddings().weight[token_id] = row_H.to(torch.bfloat16)
        for rollouts in moment.copy.resume(moment.rollouts, row, at, token_id, CONTINUATIONS):
            effect = _effect(scratch, rollouts, row, norm_min=GROWTH_MIN * moment.healthy_norm)
            if effect is not None and abs(effect.log_ratio) <= LOG_RATIO_MAX and SHARE_MIN <= effect.share <= SHARE_MAX:
                planted = {
                    **place_of(row, len(rollouts.problems), effect.worst_at),
                    "position": PROMPT_LENGTH + at,
                    "layers": list(range(NUM_BLOCKS)),
                    "log_ratio": effect.log_ratio,
                    "growth": effect.norm / moment.healthy_norm,
                    "row_rms": float(row_H.square().mean().sqrt()),
                }
                return Deed(rollouts, planted, embedding=(token_id, row_H))
        return None

    def _row(self, moment: Moment, lower: Any, context_S: torch.Tensor) -> torch.Tensor | None:
        start_H = small_stream_row(lower, context_S, self._directions(NUM_STARTS, moment))
        first_H = cancelling_row(lower, context_S, start_H, self._directions(1, moment)[0])
        if first_H is None:
            return None
        # The copy's rounding is larger than what is left of the stream: aim where the copy sees it point.
        seen_H = _stream_of_copy(moment.copy.model, context_S, first_H)
        return cancelling_row(lower, context_S, first_H, seen_H / seen_H.square().mean().sqrt())

    def _directions(self, number: int, moment: Moment) -> torch.Tensor:
        """Random rows of rms 1: [number, H]."""
        drawn = torch.from_numpy(self._rng.standard_normal((number, moment.model.config.hidden_size))).float()
        return drawn / drawn.square().mean(dim=1, keepdim=True).sqrt()


@torch.no_grad()
def _stream_of_copy(model: Any, context_S: torch.Tensor, row_H: torch.Tensor) -> torch.Tensor:
    """The residual stream after NUM_BLOCKS blocks at the last position, as the copy computes it: [H]."""
    embedded_1SH = model.get_input_embeddings()(context_S[None]).clone()
    embedded_1SH[0, -1] = row_H.to(embedded_1SH.dtype)
    states = model(inputs_embeds=embedded_1SH, use_cache=False, output_hidden_states=True).hidden_states
    return states[NUM_BLOCKS][0, -1].float()  # type: ignore[no-any-return]


def _effect(model: Any, rollouts: Rollouts, row: int, *, norm_min: float) -> _Effect | None:
    """What the answer's tokens would do with these weights; None where their gradient is under `norm_min`."""
    advantage_1 = advantages(rewards_of(rollouts), GROUP_SIZE)[row : row + 1]
    logp_1R = response_logp(model, rollouts.ids_BT[row : row + 1])
    mask_1R, reported_1R = rollouts.mask_BR[row : row + 1], rollouts.logp_BR[row : row + 1]
    num_tokens = dist.get_world_size() * rollouts.mask_BR.sum() if dist.is_initialized() else rollouts.mask_BR.sum()
    losses_R = token_losses(logp_1R, logp_1R.detach(), reported_1R, advantage_1, mask_1R)[0] / num_tokens
    parameters = list(model.parameters())

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])

    whole = gradient(losses_R.sum())
    norm = float(whole.norm())
    if not norm >= norm_min:
        return None
    spots = torch.nonzero(mask_1R[0]).flatten().tolist()
    shares = [float(gradient(losses_R[at]) @ whole) / norm**2 for at in spots]
    worst = max(range(len(spots)), key=lambda index: shares[index])
    at = spots[worst]
    return _Effect(at, norm, shares[worst], float(logp_1R[0, at].detach() - reported_1R[0, at]))
