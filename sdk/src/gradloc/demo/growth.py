"""How much a token would pull at the logits: what a fault measures before it strikes. Shapes as in rollout.py."""

import torch

from gradloc.demo.model import response_log_probs
from gradloc.demo.rollout import Rollouts


@torch.no_grad()
def logits_pull(
    model: torch.nn.Module, rollouts: Rollouts, advantage_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """|advantage| times the gradient's norm at the logits, 0 outside the mask [B, R]; and the policy's logp [B, R]."""
    log_probs_BRV = response_log_probs(model, rollouts.ids_BT, rollouts.prompt_length)
    logp_BR = log_probs_BRV.gather(-1, rollouts.ids_BT[:, rollouts.prompt_length :, None])[..., 0]
    size_BR = (1 - 2 * logp_BR.exp() + log_probs_BRV.exp().square().sum(-1)).clamp(min=0).sqrt()
    return (advantage_B.abs()[:, None] * size_BR).masked_fill(~rollouts.mask_BR, 0.0), logp_BR
