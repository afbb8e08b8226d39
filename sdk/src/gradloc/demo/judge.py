"""The judge: who did it, exactly.

For every token of the step that was struck, the inner product of its own term's gradient with the
gradient of the whole step, by plain autograd (twice backward; a test holds it against one backward a
token). Shares none of gradloc's code: no capture, no finite differences, no snapshot. Shapes: B rows,
R response positions.

    python -m gradloc.demo.judge --folder DIR --world-size 2     # writes DIR/truth.json: null where nothing struck
"""

import json
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from gradloc.demo import testimony as kept
from gradloc.demo.envelope import TRUTH
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
    """The truth of a struck step; takes a few seconds."""
    model = new_model(0)
    load_weights(model, testimony.weights)
    parameters = list(model.parameters())
    parts = {(rank, index): part for rank, parts in enumerate(testimony.ranks) for index, part in enumerate(parts)}
    num_tokens = sum(int(part["mask_BR"].sum()) for part in parts.values())
    whole = [torch.zeros_like(parameter) for parameter in parameters]
    for part in parts.values():
        for total, piece in zip(
            whole, torch.autograd.grad(_losses(model, part).sum() / num_tokens, parameters), strict=True
        ):
            total += piece
    square = float(sum(piece.double().square().sum() for piece in whole))
    shares: list[tuple[float, Place]] = []
    for (rank, index), part in parts.items():
        products_BR = products(model, _losses(model, part) / num_tokens, whole)
        prompt_length = part["ids_BT"].shape[1] - part["mask_BR"].shape[1]
        for row, at in torch.nonzero(part["mask_BR"]).tolist():
            shares.append((float(products_BR[row, at]) / square, (rank, index, row, prompt_length + at)))
    shares.sort(reverse=True)
    (best, place), (second, _) = shares[:2]
    return Truth(place, best, second, square**0.5, sum(share for share, _ in shares))


def products(model: torch.nn.Module, losses_BR: torch.Tensor, direction: list[torch.Tensor]) -> torch.Tensor:
    """Inner product of the gradient of each loss with `direction` (one tensor a parameter): [B, R].

    <sum_i u_i grad l_i, v> is linear in u; its derivative by u_i is <grad l_i, v>.
    """
    weights_BR = torch.ones_like(losses_BR, requires_grad=True)
    gradients = torch.autograd.grad((weights_BR * losses_BR).sum(), list(model.parameters()), create_graph=True)
    product = sum((gradient * along).sum() for gradient, along in zip(gradients, direction, strict=True))
    assert isinstance(product, torch.Tensor)
    return torch.autograd.grad(product, weights_BR)[0]


def _losses(model: torch.nn.Module, part: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each token's term of the loss: [B, R]."""
    logp_BR = response_logp(model, part["ids_BT"])
    return token_losses(logp_BR, part["old_logp_BR"], part["rollout_logp_BR"], part["advantage_B"], part["mask_BR"])


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--world-size", type=click.IntRange(1), required=True)
def main(folder: Path, world_size: int) -> None:
    """Judge the testimony in FOLDER."""
    torch.set_num_threads(1)
    testimony = kept.read(folder, world_size)
    document: dict[str, object] | None = None
    if testimony is not None:
        truth = truth_of(testimony)
        rank, micro_batch, sequence, token = truth.place
        document = {
            "step": int(testimony.planted["step"]),
            "rank": rank,
            "micro_batch": micro_batch,
            "sequence": sequence,
            "token": token,
            "share": truth.share,
            "runner_up_share": truth.runner_up_share,
        }
        document |= {key: testimony.planted[key] for key in ("position", "layers") if key in testimony.planted}
    part = folder / f"{TRUTH}.part"
    part.write_text(json.dumps(document))
    part.rename(folder / TRUTH)


if __name__ == "__main__":
    main()
