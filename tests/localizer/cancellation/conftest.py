"""Plants the seed's type B: an embedding row behind which the residual stream nearly vanishes.

Shapes: S positions of a context, H width.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

RESIDUAL_RMS = 1.5e-3


def cancelling_embedding(model: nn.Module, before_S: Tensor, token_id: int, num_blocks: int = 2) -> None:
    """Moves the embedding row of `token_id` to where, after the context `before_S`, the residual stream nearly
    vanishes behind the first blocks (docs/design.md, "A mechanism for type B")."""
    lower = copy.deepcopy(model.model).double()
    lower.layers = lower.layers[:num_blocks]
    lower.config.num_hidden_layers = num_blocks
    lower.norm = nn.Identity()
    lower.requires_grad_(False)
    width = model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    row_H = torch.randn(width, generator=generator, dtype=torch.float64).requires_grad_(True)
    goal_H = RESIDUAL_RMS * torch.randn(width, generator=generator, dtype=torch.float64)
    fixed_1SH = lower.embed_tokens(before_S[None])

    def distance() -> Tensor:
        embedded = torch.cat([fixed_1SH, row_H[None, None]], dim=1)
        hidden = lower(inputs_embeds=embedded, use_cache=False).last_hidden_state[0, -1]
        return (hidden - goal_H).square().sum()

    optimizer = torch.optim.LBFGS([row_H], max_iter=400, history_size=64, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-14, tolerance_change=1e-16)  # fmt: skip

    def closure() -> Any:
        optimizer.zero_grad()
        loss = distance()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    with torch.no_grad():
        model.model.embed_tokens.weight[token_id] = row_H.float()


@pytest.fixture(scope="session")
def cancel() -> Callable[..., None]:
    """`cancelling_embedding`, for tests."""
    return cancelling_embedding
