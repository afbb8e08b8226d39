"""The residual stream between blocks, position by position: what goes down through it, and what is held back.

Where the stream nearly cancels at one position, the next norm multiplies the gradient of everything below by one over
what is left of it (docs/algorithm.md, "Type B"). Once that has reached the parameters it is in all of their entries;
between two blocks it is still apart from what the other positions send. Two kinds of positions are held back:

- cancelled: the forward pass left less of the stream than a fraction of the median position's. It sends nothing into
  any block, for the blocks between two cancellations pass too large a gradient on to other positions;
- too large: its gradient alone is above the limit of what all positions together may send into a block. It sends
  nothing into that block and those below.

Every other position, and every layer above, gets to the bit what it would have got. A boundary is named after the block
that is entered through it from above: "layers.0", ... Below the lowest block there is none: of what enters the
embedding, positions of padding would be the largest, and no row learns from them. Knows no history and no other rank:
limits are given, norms and counts taken. Hooks raise nothing into a pass.
Shapes: B rows, T positions (or one axis of both), H width, K boundaries, L blocks, N positions of all rows.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradloc.layers import VISION, block_index, block_of, is_block, is_vision, layer_key

# Of what is left at a position a norm makes 30 times as much. Trained models leave .3 to .6 of the median at the least
# (SmolLM2-135M on text, code and random tokens: .40), cancellations a thousandth.
RESIDUAL_FLOOR = 1 / 30
_SORTED_AT_ONCE = 1 << 22  # sizes, to bound memory
HEARD_MIN = 8  # positions; of fewer a median says little


@dataclass
class _Passage:
    """One forward pass through the blocks: what each left of the stream. Complete when its backward begins."""

    last: int
    sizes: list[Tensor] = field(default_factory=list)  # of blocks, [B, T] each
    cancelled_BT: Tensor | None = None

    def judge(self, norms_BT: Tensor, floor: float) -> Tensor | None:
        """Where some block left less than `floor` of the median position's stream, judged once: by the positions that
        the topmost boundary gets a gradient from, for padding may have any stream at all."""
        if self.cancelled_BT is None and self.sizes:
            is_heard_BT = norms_BT != 0.0
            # Not torch.median: on a GPU it has no deterministic kernel, which some trainers insist on.
            num_heard = is_heard_BT.sum()
            middle = ((num_heard - 1) // 2).clamp(min=0).reshape(1)
            cancelled_BT = torch.zeros_like(is_heard_BT)
            at_once = max(1, _SORTED_AT_ONCE // max(1, is_heard_BT.numel()))
            for first in range(0, len(self.sizes), at_once):
                sizes_LN = torch.stack(self.sizes[first : first + at_once]).flatten(1)
                sorted_LN = torch.where(is_heard_BT.flatten(), sizes_LN, math.inf).sort(dim=1).values
                medians_L1 = sorted_LN.index_select(1, middle)
                cancelled_BT |= (sizes_LN < floor * medians_L1).any(dim=0).view_as(cancelled_BT)
            self.cancelled_BT, self.sizes = cancelled_BT & (num_heard >= HEARD_MIN), []
        return self.cancelled_BT


class _Leaving:
    """Forward hook of a block. A copy of the model, by deepcopy or pickle, has one that does nothing: its passes are
    none of ours."""

    def __init__(self, stream: "ResidualStream | None" = None, number: int = 0, own: nn.Module | None = None) -> None:
        self._stream, self._number, self._own = stream, number, own

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self._stream is not None and module is self._own:
            self._stream.leaves(self._number, output)

    def __reduce__(self) -> "tuple[type[_Leaving], tuple[()]]":
        return _Leaving, ()


class ResidualStream:
    """Hooks a model's blocks, from `start` to `remove`. `names`: its boundaries from below, empty where there is none.

    factor: what takes a gradient of this rank's backward pass to the step's (the mean over ranks, the loss scale);
    asked once a step. on_error: told what went wrong in a hook, which then changes nothing. residual_floor: fraction of
    the median position's stream under which one is cancelled; 0: none is. passes_overflow: what is not finite goes on,
    for whoever scales the loss has to see that it overflowed.
    """

    def __init__(
        self,
        model: nn.Module,
        factor: Callable[[], float],
        on_error: Callable[[Exception], None],
        residual_floor: float = RESIDUAL_FLOOR,
        *,
        passes_overflow: bool = False,
    ) -> None:
        self._blocks = _blocks(model)
        self.names = boundaries_of(model)
        self._passes_overflow = passes_overflow
        self._factor, self._on_error, self._residual_floor = factor, on_error, residual_floor
        self._scale: float | None = None  # the factor of the step in progress
        self._limits_K = [math.nan] * len(self.names)
        self._is_suspended = False
        self._passage: _Passage | None = None
        self._squares_K: list[list[Tensor]] = []
        self._held_K: list[list[Tensor]] = []
        self._forget()
        self._handles: list[Any] = []

    def start(self) -> None:
        """Hook the blocks; the last thing to do, so that nothing is left behind where something else fails."""
        self._handles = [
            block.register_forward_hook(_Leaving(self, number, block))
            for number, block in enumerate(self._blocks.values())
        ]

    def remove(self) -> None:
        """Leave the model as it was, and passes that are under way alone."""
        self._is_suspended = True
        for handle in self._handles:
            handle.remove()

    def set_limits(self, limits_K: Sequence[float]) -> None:
        """Largest norm that one position may have at each boundary, in the step's units; NaN: not known, none is too
        large."""
        self._limits_K = list(limits_K)

    def take(self) -> Tensor:
        """Of the step's micro-batches on this rank: squared norm of what enters each layer, and how many positions were
        held back from it: float64 [2, K] on the host. Starts the next step."""
        squares = [own[0] if own else torch.zeros(()) for own in self._squares_K]
        held = [own[0] if own else torch.zeros(()) for own in self._held_K]
        self._forget()
        if not squares:
            return torch.zeros(2, 0, dtype=torch.float64)
        if len({value.device for value in (*squares, *held)}) > 1:  # a model spread over devices, or a boundary unseen
            squares, held = [value.cpu() for value in squares], [value.cpu() for value in held]
        # One transfer for all, so that a GPU is waited for once.
        return torch.stack([torch.stack(squares).double(), torch.stack(held).double()]).cpu()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Passes inside are none of the step's: neither measured nor held back."""
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before

    def _forget(self) -> None:
        self._scale = self._passage = None
        self._squares_K = [[] for _ in self.names]
        self._held_K = [[] for _ in self.names]

    def leaves(self, number: int, output: Any) -> None:
        """What a block gave."""
        hidden = output[0] if isinstance(output, tuple) and output else output
        # Without gradients nothing will come back; a checkpointed block is called again with them.
        if self._is_suspended or not isinstance(hidden, Tensor) or not hidden.requires_grad:
            return
        if hidden.dim() < 2 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        try:
            self.watch(number, hidden)
        except Exception as error:  # noqa: BLE001 - a forward pass is no place to fail in
            self._on_error(error)

    def watch(self, number: int, hidden_BTH: Tensor) -> None:
        """Look at what leaves a block (by the number of its boundary), and be told when its gradient is back."""
        if self._passage is None or number <= self._passage.last:
            self._passage = _Passage(number)  # a block that is recomputed alone has one of its own
        passage, self._passage.last = self._passage, number
        if self._residual_floor > 0:
            with torch.no_grad():
                sizes_BT = torch.linalg.vector_norm(hidden_BTH, dim=-1, dtype=_wide(hidden_BTH.dtype))
            passage.sizes.append(sizes_BT)
        hidden_BTH.register_hook(lambda grad_BTH: self.held_back(number, grad_BTH, passage))  # type: ignore[no-untyped-call]

    def held_back(self, number: int, grad_BTH: Tensor, passage: _Passage) -> Tensor | None:
        """What goes on of a gradient that enters a layer (by the number of its boundary); None: all of it."""
        if self._is_suspended:
            return None
        try:
            over_BT: Tensor | None = self._over(number, grad_BTH.detach(), passage)
            return None if over_BT is None else grad_BTH.masked_fill(over_BT.unsqueeze(-1), 0.0)
        except Exception as error:  # noqa: BLE001 - a backward pass is no place to fail in
            self._on_error(error)
            return None

    @torch.no_grad()
    def _over(self, number: int, grad_BTH: Tensor, passage: _Passage) -> Tensor | None:
        """Measure, and say which positions are held back; None where it is known that none is."""
        if self._scale is None:
            self._scale = abs(self._factor())
        norms_BT = torch.linalg.vector_norm(grad_BTH, dim=-1, dtype=_wide(grad_BTH.dtype))
        if self._scale != 1.0:
            norms_BT = norms_BT * self._scale
        precise_BT = norms_BT.double() if norms_BT.device.type != "mps" else norms_BT.cpu().double()
        self._add(self._squares_K[number], precise_BT.square().sum())
        limit = self._limits_K[number]
        over_BT: Tensor | None = passage.judge(norms_BT, self._residual_floor)
        if over_BT is not None:
            over_BT = over_BT & (norms_BT != 0.0)  # padding sends nothing, cancelled or not
        if not math.isnan(limit):
            too_large_BT = ~(norms_BT <= limit)  # a NaN too
            over_BT = too_large_BT if over_BT is None else over_BT | too_large_BT
        if over_BT is not None and self._passes_overflow:
            over_BT = over_BT & torch.isfinite(norms_BT)
        if over_BT is None or (over_BT.device.type == "cpu" and not bool(over_BT.any())):
            return None  # a GPU is not waited for to know that
        self._add(self._held_K[number], over_BT.sum())
        return over_BT

    @staticmethod
    def _add(own: list[Tensor], value: Tensor) -> None:
        """One number a step, however many micro-batches it has."""
        own[:] = [own[0] + value if own else value]


def boundaries_of(model: nn.Module) -> tuple[str, ...]:
    """The blocks of a model, from below, through whose top a gradient enters; empty where none is known."""
    return tuple(_blocks(model))


def norms_from(squares_K: Sequence[float]) -> list[float]:
    """The boundaries' norms, over all positions of all ranks, from the sums of their squares."""
    return [math.sqrt(square) if square >= 0 else math.nan for square in squares_K]


def is_below(layer: str, boundary: str) -> bool:
    """Whether a layer (or layer key) may get its gradient through this boundary: all but the blocks above, the last
    norm and the head; what makes vectors of pictures does."""
    index, top = (None if layer.startswith(VISION) else block_index(layer)), block_index(boundary)
    if index is not None and top is not None:
        return index <= top
    return block_of(layer) not in ("norm", "head")


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """By layer; none where there are two stacks of them (encoder and decoder), for what enters one leaves the other."""
    blocks: dict[str, nn.Module] = {}
    outer = "\0"
    for name, module in model.named_modules():
        if not is_block(name) or is_vision(name) or name.startswith(outer):
            continue
        outer = f"{name}."  # blocks inside a block are its own affair
        key = block_of(layer_key(f"{name}.weight"))
        if key in blocks:
            return {}
        blocks[key] = module
    return blocks


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
