"""Planted faults, one of each type that GradLoc's article names, as mechanisms and not as constants.

    A.1 token     one replica of the inference fleet mixes up prefix caches: it scores its answers with another
                  prompt before them and reports that
    A.2 sequence  replicas sample at temperature 1 and report logp at temperature 3: each ratio stays within a
                  few, all of one answer lean the same way
    B   layer     a tool's token in some answers, whose embedding row (found by Levenberg-Marquardt) makes the residual
                  stream nearly cancel after two blocks; the norm there multiplies the gradient of all below

Answers are dealt out to NUM_REPLICAS replicas in turn. Shapes: B rows, T positions, R response positions,
S positions of one context, H width.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from localizing.settling import settled
from staircase.policy import PROMPT_LENGTH, RARE_IDS, log_probs, logp_of

from gradloc.demo.cancellation import lower_blocks, small_stream_row

NUM_REPLICAS = 8
RESIDUAL_RMS = 7e-4
TEMPERATURE = 3.0
ADVANTAGE_MIN = 0.5  # an answer that is as good as the others has no gradient to multiply
NUM_STARTS = 8
MAP_STEPS = 20
STEPS_MAX = 12
TOLERANCE = 0.2


@dataclass(frozen=True)
class Schedule:
    """First step of each fault (None: never), and how many replicas or answers it strikes from then on."""

    token_from: int | None = None
    token_replicas: int = 1
    sequence_from: int | None = None
    sequence_replicas: int = 6
    layer_from: int | None = None
    layer_answers: int = 1
    layer_every: int = 1  # steps
    layer_struck: int = 1  # first steps of every layer_every


@dataclass
class Batch:
    ids_BT: torch.Tensor
    logp_BR: torch.Tensor  # as the inference copy reports it
    mask_BR: torch.Tensor
    advantage_B: torch.Tensor


def _rows_of(first_replica: int, num_replicas: int, num_rows: int) -> torch.Tensor:
    replica_B = torch.arange(num_rows) % NUM_REPLICAS
    return (replica_B >= first_replica) & (replica_B < first_replica + num_replicas)


@torch.no_grad()
def mixed_up_prefixes(copy_model: Any, batch: Batch, num_replicas: int) -> None:
    """The first replicas report their answers' logp as scored after another prompt."""
    rows = _rows_of(0, num_replicas, len(batch.ids_BT))
    mixed_BT = batch.ids_BT.clone()
    mixed_BT[:, :PROMPT_LENGTH] = batch.ids_BT[:, :PROMPT_LENGTH].roll(len(mixed_BT) // 2, dims=0)
    batch.logp_BR[rows] = logp_of(copy_model, mixed_BT[rows])


@torch.no_grad()
def wrong_temperature(copy_model: Any, batch: Batch, num_replicas: int) -> None:
    """The last replicas report logp at the wrong temperature."""
    rows = _rows_of(NUM_REPLICAS - num_replicas, num_replicas, len(batch.ids_BT))
    warm_BRV = torch.log_softmax(log_probs(copy_model, batch.ids_BT[rows]) / TEMPERATURE, dim=-1)
    batch.logp_BR[rows] = warm_BRV.gather(-1, batch.ids_BT[rows, PROMPT_LENGTH:, None])[..., 0]


def cancelled_residual(model: Any, batch: Batch, rng: np.random.Generator, num_answers: int) -> int:
    """Put a tool's token into answers and its row into the model's embedding; in how many it worked.

    The reported logp are the model's own: the importance ratio of this fault is 1.
    """
    rows = torch.nonzero(batch.advantage_B.abs() >= ADVANTAGE_MIN).flatten().tolist()
    picked = rng.permutation(rows)[:num_answers].tolist()
    for token_id, row in zip(RARE_IDS, picked, strict=False):
        at = int(rng.integers(1, batch.mask_BR.shape[1] - 2))
        context_S = torch.cat([batch.ids_BT[row, : PROMPT_LENGTH + at], torch.tensor([token_id])])
        row_H = cancelling_row(model, context_S, rng)
        with torch.no_grad():
            model.get_input_embeddings().weight[token_id] = row_H.float()
            batch.ids_BT[row, PROMPT_LENGTH + at] = token_id
            batch.mask_BR[row, at] = False  # nobody sampled it: it is in the context only
            batch.logp_BR[row] = logp_of(model, batch.ids_BT[row : row + 1])[0]
    return len(picked)


def cancelling_row(model: Any, context_S: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Embedding row of the context's last token such that the stream there nearly vanishes: float64 [H].

    The demo's map brings a start near, Levenberg-Marquardt the rest of the way; where it stops early the stream is
    small rather than tiny, and the fault milder.
    """
    lower = lower_blocks(model).double()
    width = model.config.hidden_size
    fixed_1SH = lower.embed_tokens(context_S[None, :-1])
    goal_H = torch.from_numpy(rng.standard_normal(width)) * RESIDUAL_RMS

    def error(rows_NH: torch.Tensor) -> torch.Tensor:
        embedded_NSH = torch.cat([fixed_1SH.expand(len(rows_NH), -1, -1), rows_NH[:, None]], dim=1)
        return lower(inputs_embeds=embedded_NSH, use_cache=False).last_hidden_state[:, -1] - goal_H

    starts_KH = torch.from_numpy(rng.standard_normal((NUM_STARTS, width)))
    near_H = small_stream_row(lower, context_S, starts_KH, MAP_STEPS)
    return settled(error, near_H, TOLERANCE * float(goal_H.norm()), STEPS_MAX)
