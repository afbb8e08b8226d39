"""The demo's loss: GRPO with group-normalised advantages and a clipped ratio. Pure functions of tensors.

Shapes: B rows, R response positions, G rows of one group.
"""

import torch

CLIP = 0.2


def advantages(rewards_B: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rewards less their group's mean, over its standard deviation: [B]; 0 where all of a group are alike."""
    rewards_NG = rewards_B.view(-1, group_size)
    centred_NG = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    return (centred_NG / (rewards_NG.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def token_losses(
    logp_BR: torch.Tensor,
    old_logp_BR: torch.Tensor,
    rollout_logp_BR: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    by_sequence: bool = False,
) -> torch.Tensor:
    """Loss of each token, 0 outside the mask: [B, R].

    PPO's clipped surrogate against `old_logp`, which the trainer computed itself, times the weight
    old/rollout that corrects for the inference copy's other precision. That weight is not truncated,
    as in many trainers: what the copy reports wrongly goes straight into the gradient. `by_sequence`: the
    weight is that of the whole sequence, the product over its tokens.
    """
    ratio_BR = torch.exp(logp_BR - old_logp_BR)
    log_weight_BR = old_logp_BR - rollout_logp_BR
    if by_sequence:
        log_weight_BR = torch.where(mask_BR, log_weight_BR, 0.0).sum(dim=1, keepdim=True)
    weight_BR = torch.exp(log_weight_BR)
    advantage_B1 = advantage_B[:, None]
    surrogate_BR = torch.minimum(ratio_BR * advantage_B1, ratio_BR.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
    return torch.where(mask_BR, -weight_BR * surrogate_BR, torch.zeros_like(surrogate_BR))
