"""A localization's passes through the model, cut by rows so that several replicas may share them.

Four questions carry all the work: the gradient under some coefficients, logps at moved weights, their exact
derivatives, single tokens' exact shares. Each is cut into the same shards whoever answers them, and answers are added
up in the shards' order: the result depends neither on the number of replicas nor on which of them died. An answer is
plain tensors, and has a key that says what was asked, so it can be kept and found again. Knows no store and no Ray.
Shapes: B rows, R positions with a logp.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gradloc.policy import Meter, PlacedBatch, Policy
from gradloc.shards import like, local

if TYPE_CHECKING:
    from gradloc.replay import Gradient, Replay
    from gradloc.verification import ExactToken, Place

NUM_SHARDS_MAX = 8  # each costs a gradient's worth of memory on its way; more replicas than that have nothing to do
Row = tuple[int, int]
Kind = Literal["replay", "moved", "derivatives", "exact"]


@dataclass(frozen=True)
class Question:
    """One shard of a question. `coefficients` are zero outside of it; `gradient` names the one to move along."""

    kind: Kind
    coefficients: tuple[Tensor, ...]
    rows: tuple[Row, ...] = ()
    eps: float = 0.0
    places: tuple[tuple[int, int, int], ...] = ()
    by_row: bool = False
    gradient: tuple[float, ...] = ()

    def key(self, step: str) -> str:
        """The same for the same question about the same step, to the last bit."""
        head = [step, self.kind, self.rows, self.places, self.by_row, [tuple(c.shape) for c in self.coefficients]]
        found = hashlib.sha256(json.dumps(head).encode())
        found.update(struct.pack(f"<{1 + len(self.gradient)}d", self.eps, *self.gradient))
        for coefficient in self.coefficients:
            found.update(coefficient.double().contiguous().numpy().tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Answer:
    """`work`: tokens forward and backward, passes forward and backward. `exists`: the model has such derivatives."""

    tensors: dict[str, Tensor]
    work: tuple[int, int, int, int] = (0, 0, 0, 0)
    exists: bool = True


Ask = Callable[[Sequence[Question], "Gradient | None"], list[Answer]]


def shards_of(batches: Sequence[PlacedBatch]) -> tuple[frozenset[Row], ...]:
    """All rows, in order, cut into parts of about as many tokens."""
    rows = [(index, row) for index, placed in enumerate(batches) for row in range(placed.batch.ids_BT.shape[0])]
    widths = [batches[index].batch.ids_BT.shape[1] for index, _ in rows]
    total, seen = sum(widths), 0
    parts: dict[int, list[Row]] = {}
    for row, width in zip(rows, widths, strict=True):
        parts.setdefault(seen * NUM_SHARDS_MAX // max(total, 1), []).append(row)
        seen += width
    return tuple(frozenset(part) for part in parts.values())


def answer(policy: Policy, batches: Sequence[PlacedBatch], question: Question, gradient: "Gradient | None") -> Answer:
    """The answer of a replica; `policy` has no team."""
    assert policy.team is None
    kept, policy.meter = policy.meter, Meter(policy.meter.num_tokens_step)
    try:
        tensors = _answered(policy, batches, question, gradient)
        done = policy.meter
    finally:
        policy.meter = kept
    work = (done.num_tokens_forward, done.num_tokens_backward, done.num_forwards, done.num_backwards)
    if tensors is None:
        return Answer({}, work, exists=False)
    return Answer({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, work)


def _answered(
    policy: Policy, batches: Sequence[PlacedBatch], question: Question, gradient: "Gradient | None"
) -> dict[str, Tensor] | None:
    from gradloc.replay import replay
    from gradloc.row_probe import RowProbe
    from gradloc.verification import Place, exact_tokens

    if question.kind == "replay":
        done = replay(policy, batches, question.coefficients, by_row=question.by_row)
        logp = {f"logp.{index}": logp_BR for index, logp_BR in enumerate(done.logp)}
        return {f"gradient.{name}": local(tensor) for name, tensor in done.gradient.tensors.items()} | logp
    assert gradient is not None
    if question.kind == "exact":
        places = [Place(*place) for place in question.places]
        exact = exact_tokens(policy, batches, question.coefficients, gradient, places)
        values = [[exact[place].share, exact[place].norm] for place in places]
        return {"exact": torch.tensor(values, dtype=torch.float64).view(-1, 2)}
    probe = RowProbe(policy, batches, question.coefficients, gradient)
    probe.record_routing(question.rows)
    found = probe.moved(question.rows, question.eps) if question.kind == "moved" else probe.derivatives(question.rows)
    return None if found is None else {f"row.{batch}.{row}": value_R for (batch, row), value_R in found.items()}


class Team:
    """Stands in for a policy's passes over its step's batches. `ask` answers shards, in their order."""

    def __init__(self, policy: Policy, batches: Sequence[PlacedBatch], ask: Ask) -> None:
        self._policy = policy
        self._shards = shards_of(batches)
        self._ask = ask

    def replay(self, coefficients: Sequence[Tensor], *, by_row: bool) -> "Replay":
        from gradloc.replay import Replay, gradient_of

        parts = [self._within(coefficients, shard) for shard in self._shards]
        parts = [part for part in parts if any(bool((one != 0).any()) for one in part)]
        logp = [torch.full(one.shape, torch.nan, dtype=torch.float64) for one in coefficients]
        parameters = self._policy.parameters
        tensors = {name: _zeros(local(parameter)) for name, parameter in parameters.items()}
        for told in self._answers([Question("replay", part, by_row=by_row) for part in parts], None):
            for name, total in tensors.items():
                total.add_(told.tensors[f"gradient.{name}"])
            for index, known_BR in enumerate(logp):
                own_BR = told.tensors[f"logp.{index}"]
                logp[index] = torch.where(own_BR.isnan(), known_BR, own_BR)
        device = self._policy.device
        whole = {name: like(tensor.to(device), parameters[name]) for name, tensor in tensors.items()}
        return Replay(gradient_of(whole), tuple(logp))

    def moved(
        self, coefficients: Sequence[Tensor], gradient: "Gradient", rows: Collection[Row], eps: float
    ) -> dict[Row, Tensor]:
        return self._rows(Question("moved", tuple(coefficients), eps=eps), gradient, rows) or {}

    def derivatives(
        self, coefficients: Sequence[Tensor], gradient: "Gradient", rows: Collection[Row]
    ) -> dict[Row, Tensor] | None:
        return self._rows(Question("derivatives", tuple(coefficients)), gradient, rows)

    def exact(
        self, coefficients: Sequence[Tensor], gradient: "Gradient", places: Sequence["Place"]
    ) -> "dict[Place, ExactToken]":
        from gradloc.verification import ExactToken

        own = [tuple(place for place in places if place[:2] in shard) for shard in self._shards]
        questions = [
            Question(
                "exact",
                self._within(coefficients, shard),
                places=tuple((place.batch, place.row, place.column) for place in chosen),
                gradient=_print(gradient),
            )
            for shard, chosen in zip(self._shards, own, strict=True)
            if chosen
        ]
        found: dict[Place, ExactToken] = {}
        told = self._answers(questions, gradient)
        for chosen, one in zip([chosen for chosen in own if chosen], told, strict=True):
            for place, (share, norm) in zip(chosen, one.tensors["exact"].tolist(), strict=True):
                found[place] = ExactToken(place=place, share=share, norm=norm)
        return found

    def _rows(self, question: Question, gradient: "Gradient", rows: Collection[Row]) -> dict[Row, Tensor] | None:
        questions = []
        for shard in self._shards:
            own = tuple(row for row in sorted(rows) if row in shard)
            if own:
                coefficients = self._within(question.coefficients, frozenset(own))
                questions.append(replace(question, coefficients=coefficients, rows=own, gradient=_print(gradient)))
        found: dict[Row, Tensor] = {}
        for asked, told in zip(questions, self._answers(questions, gradient), strict=True):
            if not told.exists:
                return None
            found |= {row: told.tensors[f"row.{row[0]}.{row[1]}"] for row in asked.rows}
        return found

    def _answers(self, questions: Sequence[Question], gradient: "Gradient | None") -> list[Answer]:
        told = self._ask(questions, gradient)
        meter = self._policy.meter
        for one in told:
            forward, backward, num_forwards, num_backwards = one.work
            meter.num_tokens_forward += forward
            meter.num_tokens_backward += backward
            meter.num_forwards += num_forwards
            meter.num_backwards += num_backwards
        return told

    def _within(self, coefficients: Sequence[Tensor], shard: frozenset[Row]) -> tuple[Tensor, ...]:
        parts = [torch.zeros_like(coefficient) for coefficient in coefficients]
        for batch, row in shard:
            parts[batch][row] = coefficients[batch][row]
        return tuple(parts)


def fits(policy: Policy, question: Question, told: Answer) -> bool:
    """Whether a kept answer has the form of one to this question."""
    shapes: dict[str, tuple[int, ...]]
    if not told.exists:
        return question.kind == "derivatives"
    if question.kind == "replay":
        shapes = {f"gradient.{name}": tuple(local(own).shape) for name, own in policy.parameters.items()}
        shapes |= {f"logp.{index}": tuple(own.shape) for index, own in enumerate(question.coefficients)}
    elif question.kind == "exact":
        shapes = {"exact": (len(question.places), 2)}
    else:
        width = [own.shape[1] for own in question.coefficients]
        shapes = {f"row.{batch}.{row}": (width[batch],) for batch, row in question.rows}
    return {name: tuple(tensor.shape) for name, tensor in told.tensors.items()} == shapes


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _print(gradient: "Gradient") -> tuple[float, ...]:
    """Which gradient it is, by its norms to the last bit: hashing all of it would cost more than a pass."""
    return (gradient.norm, *gradient.layer_norms.values())
