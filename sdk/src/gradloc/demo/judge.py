"""The judge: who did it, exactly.

For every token of the step that was struck, the inner product of its own term's gradient with the
gradient of the whole step, by plain autograd (twice backward; a test holds it against one backward a
token); of sequences the sum; of several culprits the largest, then the largest of what is left without
it; of a gradient that is not finite the tokens whose own derivative of the loss is not. Shares none of
gradloc's code: no capture, no finite differences, no snapshot. Shapes: B rows, R response positions.

    python -m gradloc.demo.judge --folder DIR --world-size 2     # writes DIR/truth.json: null where nothing struck
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from gradloc.demo import courses
from gradloc.demo import testimony as kept
from gradloc.demo.envelope import MODELS, TINY, TRUTH
from gradloc.demo.grpo import token_losses
from gradloc.demo.model import load_weights, response_logp
from gradloc.demo.testimony import Testimony

Place = tuple[int, int, int, int]  # rank, micro-batch, sequence, position in the row
TIED = 1e-4  # relative; shares of one answer's copies differ by rounding alone
_PLACE_KEYS = ("rank", "micro_batch", "sequence", "token")


@dataclass(frozen=True)
class Truth:
    """The token with the largest exact share, and how far ahead of the next it is."""

    place: Place
    share: float
    runner_up_share: float
    grad_norm: float
    sum_of_shares: float


@dataclass(frozen=True)
class Shares:
    """Exact shares of a step's tokens."""

    by_place: dict[Place, float]
    grad_norm: float

    def largest(self) -> list[tuple[float, Place]]:
        return sorted(((share, place) for place, share in self.by_place.items()), reverse=True)

    def by_sequence(self) -> list[tuple[float, tuple[int, int, int]]]:
        """Sums over sequences, largest first."""
        sums: dict[tuple[int, int, int], float] = {}
        for (rank, index, row, _), share in self.by_place.items():
            sums[rank, index, row] = sums.get((rank, index, row), 0.0) + share
        return sorted(((share, row) for row, share in sums.items()), reverse=True)


def truth_of(testimony: Testimony) -> Truth:
    """The token of the largest share; takes a few seconds."""
    shares = shares_of(testimony)
    (best, place), (second, _) = shares.largest()[:2]
    return Truth(place, best, second, shares.grad_norm, sum(shares.by_place.values()))


def shares_of(testimony: Testimony, without: Collection[Place] = ()) -> Shares:
    """Exact shares in the gradient of the struck step, some tokens left out of its loss."""
    model = _policy(testimony)
    parameters = list(model.parameters())
    parts = {(rank, index): part for rank, parts in enumerate(testimony.ranks) for index, part in enumerate(parts)}
    num_tokens = sum(int(part["mask_BR"].sum()) for part in parts.values())

    def losses(rank: int, index: int, part: dict[str, torch.Tensor]) -> torch.Tensor:
        kept_BR = part["mask_BR"].clone()
        prompt_length = part["ids_BT"].shape[1] - kept_BR.shape[1]
        for place in without:
            if place[:2] == (rank, index):
                kept_BR[place[2], place[3] - prompt_length] = False
        losses_BR = _losses(testimony, _response_logp(model, part), part)
        return torch.where(kept_BR, losses_BR, 0.0) / num_tokens

    whole = [torch.zeros_like(parameter) for parameter in parameters]
    for (rank, index), part in parts.items():
        pieces = torch.autograd.grad(losses(rank, index, part).sum(), parameters)
        for total, piece in zip(whole, pieces, strict=True):
            total += piece
    square = float(sum(piece.double().square().sum() for piece in whole))
    found: dict[Place, float] = {}
    for (rank, index), part in parts.items():
        products_BR = products(model, losses(rank, index, part), whole)
        prompt_length = part["ids_BT"].shape[1] - part["mask_BR"].shape[1]
        for row, at in torch.nonzero(part["mask_BR"]).tolist():
            found[rank, index, row, prompt_length + at] = float(products_BR[row, at]) / square
    return Shares(found, square**0.5)


def products(model: torch.nn.Module, losses_BR: torch.Tensor, direction: list[torch.Tensor]) -> torch.Tensor:
    """Inner product of the gradient of each loss with `direction` (one tensor a parameter): [B, R].

    <sum_i u_i grad l_i, v> is linear in u; its derivative by u_i is <grad l_i, v>.
    """
    weights_BR = torch.ones_like(losses_BR, requires_grad=True)
    gradients = torch.autograd.grad((weights_BR * losses_BR).sum(), list(model.parameters()), create_graph=True)
    product = sum((gradient * along).sum() for gradient, along in zip(gradients, direction, strict=True))
    assert isinstance(product, torch.Tensor)
    return torch.autograd.grad(product, weights_BR)[0]


def not_finite(testimony: Testimony) -> list[Place]:
    """Tokens at which the loss's derivative by their own log-probability is not finite."""
    model = _policy(testimony)
    found: list[Place] = []
    for rank, parts in enumerate(testimony.ranks):
        for index, part in enumerate(parts):
            with torch.no_grad():
                logp_BR = _response_logp(model, part)
            logp_BR.requires_grad_(True)
            (derivative_BR,) = torch.autograd.grad(_losses(testimony, logp_BR, part).sum(), logp_BR)
            prompt_length = part["ids_BT"].shape[1] - part["mask_BR"].shape[1]
            spots = torch.nonzero(~torch.isfinite(derivative_BR)).tolist()
            found += [(rank, index, row, prompt_length + at) for row, at in spots]
    return found


def verdict_on(testimony: Testimony) -> dict[str, Any]:
    """The truth as a document."""
    planted = testimony.planted
    document: dict[str, Any] = {"step": int(planted["step"])}
    kind = planted.get("kind", "token")
    if kind == "no token":
        return document
    if kind == "rank":
        return {**document, "rank": planted["rank"]}
    if kind == "non-finite":
        places = not_finite(testimony)
        assert len(places) == 1, places
        return document | _named(places[0])
    shares = shares_of(testimony)
    if kind == "sequence":
        (best, row), (second, _) = shares.by_sequence()[:2]
        return document | _named(row) | {"share": best, "runner_up_share": second}
    largest = shares.largest()
    (best, place), (second, _) = largest[:2]
    document |= _named(place) | {"share": best, "runner_up_share": second}
    # One answer sampled twice: its tokens pull alike, and no oracle can say which of two is the larger.
    document["tied"] = [_named(other) for share, other in largest[1:] if share >= best * (1 - TIED)]
    if kind == "tokens":
        left = shares_of(testimony, without=[place]).largest()[0][1]
        document["tokens"] = [_named(place), _named(left)]
    return document | {key: planted[key] for key in ("position", "layers") if key in planted}


def _named(place: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(_PLACE_KEYS, place, strict=False))


def _policy(testimony: Testimony) -> torch.nn.Module:
    model: torch.nn.Module = courses.named(testimony.model).new_model(0)
    load_weights(model, testimony.weights)
    return model


def _response_logp(model: torch.nn.Module, part: dict[str, torch.Tensor]) -> torch.Tensor:
    return response_logp(model, part["ids_BT"], part["ids_BT"].shape[1] - part["mask_BR"].shape[1])


def _losses(testimony: Testimony, logp_BR: torch.Tensor, part: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each token's term of the loss: [B, R]."""
    return token_losses(
        logp_BR,
        part["old_logp_BR"],
        part["rollout_logp_BR"],
        part["advantage_B"],
        part["mask_BR"],
        by_sequence=bool(testimony.planted.get("by_sequence")),
    )


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--world-size", type=click.IntRange(1), required=True)
@click.option("--model", type=click.Choice(list(MODELS)), default=TINY)
def main(folder: Path, world_size: int, model: str) -> None:
    """Judge the testimony in FOLDER."""
    torch.set_num_threads(MODELS[model].num_threads)
    testimony = kept.read(folder, world_size, model)
    part = folder / f"{TRUTH}.part"
    part.write_text(json.dumps(None if testimony is None else verdict_on(testimony)))
    part.rename(folder / TRUTH)


if __name__ == "__main__":
    main()
