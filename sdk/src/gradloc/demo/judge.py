"""The judge: who did it, by brute force.

For every token of the step that was struck, the gradient of its own term of the loss by plain
autograd, and its inner product with the gradient of the whole step. Shares none of gradloc's code:
no capture, no finite differences, no snapshot.
"""

from dataclasses import dataclass

import torch

from gradloc.demo.grpo import token_losses
from gradloc.demo.model import load_weights, new_model, response_logp
from gradloc.demo.testimony import Testimony

Place = tuple[int, int, int, int]  # rank, micro-batch, sequence, position in the row


@dataclass(frozen=True)
class Truth:
    """The token with the largest exact share, and how far ahead of the next it is."""

    place: Place
    share: float
    runner_up_share: float
    grad_norm: float
    sum_of_shares: float


def truth_of(testimony: Testimony) -> Truth:
    """The truth of a struck step. Takes some seconds: one backward a token."""
    model = new_model(0)
    load_weights(model, testimony.weights)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_tokens = sum(int(part["mask_BR"].sum()) for rank in testimony.ranks for part in rank)
    gradients: list[torch.Tensor] = []
    places: list[Place] = []
    for rank, micro_batches in enumerate(testimony.ranks):
        for index, part in enumerate(micro_batches):
            for row in range(len(part["ids_BT"])):
                losses_R = _losses_of_row(model, part, row) / num_tokens
                for at in torch.nonzero(part["mask_BR"][row]).flatten().tolist():
                    pieces = torch.autograd.grad(losses_R[at], parameters, retain_graph=True)
                    gradients.append(torch.cat([piece.flatten() for piece in pieces]))
                    prompt_length = part["ids_BT"].shape[1] - part["mask_BR"].shape[1]
                    places.append((rank, index, row, prompt_length + at))
    whole = torch.stack(gradients).double().sum(dim=0) if gradients else torch.zeros(1)
    square = float(whole @ whole)
    shares = [float(gradient.double() @ whole) / square for gradient in gradients]
    order = sorted(range(len(shares)), key=lambda index: -shares[index])
    return Truth(places[order[0]], shares[order[0]], shares[order[1]], square**0.5, sum(shares))


def _losses_of_row(model: torch.nn.Module, part: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """Each token's term of the loss in one row, alone in its batch: [R]."""
    one = slice(row, row + 1)
    logp_1R = response_logp(model, part["ids_BT"][one])
    return token_losses(
        logp_1R, part["old_logp_BR"][one], part["rollout_logp_BR"][one], part["advantage_B"][one], part["mask_BR"][one]
    )[0]
