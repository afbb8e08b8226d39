"""Routing of a mixture of experts, recorded and held: a moved weight must not send a token to another expert.

The choice of experts is constant but for jumps, and a difference across a jump is no derivative. Every call of
`topk` inside a forward pass counts as such a choice. Causal models choose alike for a row that is cut on the
right, so what was recorded for a micro-batch holds for its rows and their beginnings. Knows no share.
Shapes: B rows, T positions, K choices.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradloc.snapshot import MicroBatch

_TOPK = (torch.topk, Tensor.topk)


@dataclass(frozen=True)
class _Record:
    """Choices [b, T, K], one tensor a call, of these rows of a micro-batch."""

    of: MicroBatch  # kept alive: its identity is the key
    rows: list[int]
    num_positions: int
    choices: tuple[Tensor, ...]


class Routing:
    """What was chosen under the weights as they are."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._chooses = True  # until a whole forward pass went by without a choice

    @property
    def chooses(self) -> bool:
        """Whether the model chooses at all, as far as is known."""
        return self._chooses

    @contextlib.contextmanager
    def recorded(
        self, of: MicroBatch, rows: Tensor, num_positions: int, packed_bT: Tensor | None = None
    ) -> Iterator[None]:
        """Keeps the choices of the forward pass inside, which runs these rows of `of` up to `num_positions`;
        `packed_bT`: only where this is true, as one row."""
        if not self._chooses:
            yield
            return
        found: list[Tensor] = []
        with _Recording(found):
            yield
        self._chooses = bool(found)
        by_row = [_by_row(choice, len(rows), num_positions, packed_bT) for choice in found]
        known = self._records.get(id(of))
        if all(choice is not None for choice in by_row) and (known is None or len(known.rows) <= len(rows)):
            self._records[id(of)] = _Record(of, rows.tolist(), num_positions, tuple(c for c in by_row if c is not None))

    @contextlib.contextmanager
    def held(self, of: MicroBatch, rows: Tensor, num_positions: int) -> Iterator[None]:
        """Inside, the recorded choices are made again; where they are not known, or there are none, nothing is held."""
        record = self._records.get(id(of))
        wanted = rows.tolist()
        if (
            record is None
            or not record.choices
            or num_positions > record.num_positions
            or not set(wanted) <= set(record.rows)
        ):
            yield
            return
        order = [record.rows.index(row) for row in wanted]
        with _Holding([choice[order, :num_positions] for choice in record.choices]):
            yield


def _by_row(choice: Tensor, num_rows: int, num_positions: int, packed_bT: Tensor | None) -> Tensor | None:
    """[b, T, K] from [b * T, K] or itself, or from one choice for each that is true in `packed_bT`; None for another
    shape."""
    if choice.dim() not in (2, 3):
        return None
    num_choices = choice.shape[-1]
    if packed_bT is not None and choice.numel() == int(packed_bT.sum()) * num_choices:
        found = torch.zeros(num_rows, num_positions, num_choices, dtype=torch.int16, device=choice.device)
        found[packed_bT] = choice.view(-1, num_choices).to(torch.int16)
        return found
    if choice.numel() == num_rows * num_positions * num_choices:
        return choice.view(num_rows, num_positions, num_choices).to(torch.int16)
    return None


class _Recording(TorchFunctionMode):
    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self._found.append(out[1].detach())
        return out


class _Holding(TorchFunctionMode):
    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self._choices = choices
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK or self._next >= len(self._choices):
            return out
        choice = self._choices[self._next]
        self._next += 1
        if choice.numel() != out[1].numel():
            return out
        chosen = choice.to(out[1]).view_as(out[1])
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
