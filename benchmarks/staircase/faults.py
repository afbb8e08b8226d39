"""Planted faults, one of each type that GradLoc's article names, as mechanisms and not as constants.

    A.1 token     one answer's logp is scored with another prompt's cache before it; one token of it is reported so
    A.2 sequence  some replicas of the inference fleet sample at temperature 1 and report logp at temperature 2.5:
                  each ratio stays within a few, all of one answer lean the same way
    B   layer     a tool's token in one answer, whose embedding row (found by L-BFGS) makes the residual stream
                  nearly cancel after two blocks; the norm there multiplies the gradient of all below

Shapes: B rows, T positions, R response positions, S positions of one context, H width.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from staircase.policy import PROMPT_LENGTH, RARE_IDS, log_probs, logp_of

NUM_BLOCKS = 2
RESIDUAL_RMS = 1.5e-3
LOG_RATIO_MIN = 3.0  # of the mismatched token: below, the mix-up had no effect to speak of
TEMPERATURE = 2.5


@dataclass(frozen=True)
class Schedule:
    """First step and rate (per step, or fraction of replicas for the sequence fault) of each fault; None: never."""

    token_from: int | None = None
    token_rate: float = 0.5
    sequence_from: int | None = None
    sequence_fraction: float = 0.5
    layer_from: int | None = None
    layer_rate: float = 0.25


@dataclass
class Batch:
    ids_BT: torch.Tensor
    logp_BR: torch.Tensor  # as the inference copy reports it
    mask_BR: torch.Tensor
    advantage_B: torch.Tensor


@torch.no_grad()
def mismatched_token(copy_model: Any, batch: Batch, rng: np.random.Generator) -> tuple[int, int] | None:
    """Report one token of an answer with a negative advantage from a wrong prefix; where, or None."""
    mixed_BT = batch.ids_BT.clone()
    mixed_BT[:, :PROMPT_LENGTH] = batch.ids_BT[:, :PROMPT_LENGTH].roll(len(mixed_BT) // 2, dims=0)
    stale_BR = logp_of(copy_model, mixed_BT)
    hit_BR = (batch.logp_BR - stale_BR > LOG_RATIO_MIN) & (batch.advantage_B < 0)[:, None] & batch.mask_BR
    places = torch.nonzero(hit_BR).tolist()
    if not places:
        return None
    row, at = places[int(rng.integers(len(places)))]
    batch.logp_BR[row, at] = stale_BR[row, at]
    return row, at


@torch.no_grad()
def wrong_temperature(copy_model: Any, batch: Batch, fraction: float) -> None:
    """The last replicas' rows (rows are dealt out in turn) report logp at the wrong temperature."""
    num_replicas = 8
    rows = torch.arange(len(batch.ids_BT)) % num_replicas >= round((1 - fraction) * num_replicas)
    warm_BRV = torch.log_softmax(log_probs(copy_model, batch.ids_BT[rows]) / TEMPERATURE, dim=-1)
    batch.logp_BR[rows] = warm_BRV.gather(-1, batch.ids_BT[rows, PROMPT_LENGTH:, None])[..., 0]


def cancelled_residual(model: Any, batch: Batch, rng: np.random.Generator) -> tuple[int, int] | None:
    """Put a tool's token into one answer and its row into the model's embedding; where, or None if L-BFGS fails.

    The reported logp are the model's own: the importance ratio of this fault is 1.
    """
    rows = torch.nonzero(batch.advantage_B != 0).flatten().tolist()
    if not rows:
        return None
    row = rows[int(rng.integers(len(rows)))]
    at = int(rng.integers(1, batch.mask_BR.shape[1] - 2))
    token_id = RARE_IDS[int(rng.integers(len(RARE_IDS)))]
    context_S = torch.cat([batch.ids_BT[row, : PROMPT_LENGTH + at], torch.tensor([token_id])])
    row_H = _cancelling_row(model, context_S, rng)
    if row_H is None:
        return None
    with torch.no_grad():
        model.get_input_embeddings().weight[token_id] = row_H.float()
        batch.ids_BT[row, PROMPT_LENGTH + at] = token_id
        batch.mask_BR[row, at] = False  # nobody sampled it: it is in the context only
        batch.logp_BR[row] = logp_of(model, batch.ids_BT[row : row + 1])[0]
    return row, at


def _cancelling_row(model: Any, context_S: torch.Tensor, rng: np.random.Generator) -> torch.Tensor | None:
    """Embedding row of the context's last token such that the stream there nearly vanishes: float64 [H]."""
    lower = copy.deepcopy(model.model).double()
    lower.layers = lower.layers[:NUM_BLOCKS]
    lower.config.num_hidden_layers = NUM_BLOCKS
    lower.norm = torch.nn.Identity()
    lower.requires_grad_(False)
    width = model.config.hidden_size
    fixed_1SH = lower.embed_tokens(context_S[None, :-1])
    row_H = torch.from_numpy(rng.standard_normal(width)).requires_grad_(True)
    goal_H = torch.from_numpy(rng.standard_normal(width)) * RESIDUAL_RMS
    optimizer = torch.optim.LBFGS(
        [row_H],
        max_iter=200,
        history_size=64,
        tolerance_grad=1e-13,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def stream() -> torch.Tensor:
        embedded_1SH = torch.cat([fixed_1SH, row_H[None, None]], dim=1)
        return lower(inputs_embeds=embedded_1SH, use_cache=False).last_hidden_state[0, -1]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (stream() - goal_H).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        rms = float(stream().square().mean().sqrt())
    return row_H.detach() if 0.5 < rms / RESIDUAL_RMS < 2.0 else None
