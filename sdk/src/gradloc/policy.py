"""The trained policy as the localizer uses it: micro-batches in, log-probabilities out, work counted.

Knows no loss and no snapshot. Shapes: B rows, T positions, R positions with a logp (the last R of T),
V vocabulary entries.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradloc.head import NARROW, Head, as_trained, logp_and_entropy
from gradloc.routing import Routing
from gradloc.snapshot import MicroBatch

if TYPE_CHECKING:
    from gradloc.split import Split
    from gradloc.team import Team


@dataclass(frozen=True)
class PlacedBatch:
    """A micro-batch and its place in the step. `grad_factor` takes its coefficients to the step's gradient."""

    rank: int
    index: int
    batch: MicroBatch
    grad_factor: float = 1.0

    def coefficient_BR(self) -> Tensor:
        """c_i with the rank's factor, float64 [B, R]: the step's gradient is sum_i c_i grad logp_i.

        With an entropy term, weights of `Policy.log_probs`'s mixture of logp and entropy.
        """
        return _weight(self.batch) * self.grad_factor

    def logp_BR(self) -> Tensor:
        """As the trainer saw it what `Policy.log_probs` computes, float64 [B, R]."""
        return _mixed(self.batch, self.batch.logp_BR.double(), self.batch.entropy_BR)


def _weight(batch: MicroBatch) -> Tensor:
    """dL/dlogp, or dL/dentropy where that is larger: what a token's term is weighed by, float64 [B, R]."""
    own_BR = batch.coefficient_BR.double()
    if batch.entropy_coefficient_BR is None:
        return own_BR
    other_BR = batch.entropy_coefficient_BR.double()
    # A NaN of either must come through.
    return torch.where((other_BR.abs() > own_BR.abs()) | other_BR.isnan(), other_BR, own_BR)


def _mixed(batch: MicroBatch, logp_BR: Tensor, entropy_BR: Tensor | None) -> Tensor:
    """The token's whole term of the loss over its weight: c logp + d entropy = weight * (this)."""
    if batch.entropy_coefficient_BR is None or entropy_BR is None:
        return logp_BR
    weight_BR = _weight(batch)
    used = weight_BR != 0
    c_BR, d_BR = (
        torch.where(used, part.double() / weight_BR, alone).to(logp_BR)
        for part, alone in ((batch.coefficient_BR, 1.0), (batch.entropy_coefficient_BR, 0.0))
    )
    return c_BR * logp_BR + d_BR * entropy_BR.to(logp_BR)


def place(parts: Sequence[tuple[Sequence[MicroBatch], float]]) -> tuple[PlacedBatch, ...]:
    """Flatten (micro-batches, grad_factor) of each rank. Raises ValueError for rows without a first position."""
    placed = []
    for rank, (batches, grad_factor) in enumerate(parts):
        for index, batch in enumerate(batches):
            if batch.first_position < 1:
                raise ValueError(
                    f"rank {rank}, micro-batch {index}: {batch.logp_BR.shape[1]} log-probabilities for "
                    f"{batch.ids_BT.shape[1]} positions; expected at most one less, for nothing predicts the first"
                )
            if batch.inputs is not None and batch.inputs.unusable is not None:
                raise ValueError(f"rank {rank}, micro-batch {index}: {batch.inputs.unusable}")
            placed.append(PlacedBatch(rank, index, batch, grad_factor))
    return tuple(placed)


@dataclass
class Meter:
    """Work done, in tokens. One step is forward (1/3) and backward (2/3) of `num_tokens_step` tokens.

    `stages`: steps by what they were for.
    """

    num_tokens_step: int
    num_tokens_forward: int = 0
    num_tokens_backward: int = 0
    num_forwards: int = 0
    num_backwards: int = 0
    stages: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts what is done inside under `name`."""
        before = self.steps
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + self.steps - before

    @property
    def steps(self) -> float:
        if self.num_tokens_step == 0:
            return 0.0
        return (self.num_tokens_forward + 2 * self.num_tokens_backward) / (3 * self.num_tokens_step)


class Policy:
    """A causal language model whose call returns logits (Hugging Face's, or any with the same call).

    The model is put into eval mode: dropout is not replayed. `autocast_dtype` is the trainer's; `grid` the format that
    the forward pass reads parameters in, where neither autocast nor the parameters tell it; `head` how it makes
    log-probabilities of hidden states. `team`: others who share the passes over the step's batches. `split`: the
    processes that hold the model together, each its shard of every parameter.
    """

    team: "Team | None" = None
    split: "Split | None" = None

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        *,
        autocast_dtype: torch.dtype | None = None,
        grid: torch.dtype | None = None,
        head: Head = "plain",
    ) -> None:
        self.model = model.eval()
        self.meter = meter
        self.routing = Routing()
        self.autocast_dtype = autocast_dtype
        self._grid = grid
        self._head: Head = head
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no trainable parameter; nothing to localize")
        accepted = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        self._takes = {
            name
            for name in ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
            if name in accepted or (takes_all and name in ("attention_mask", "position_ids"))
        }
        # A model without position_ids cannot know where a row of a pack begins.
        self._can_pack = "position_ids" in self._takes

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def grid(self) -> torch.dtype:
        """Number format that the forward pass reads parameters in."""
        if self._grid is not None:
            return self._grid
        dtype = next(iter(self.parameters.values())).dtype
        return dtype if self.autocast_dtype is None else self.autocast_dtype

    def check_inputs(self, batches: Sequence[PlacedBatch]) -> None:
        """Raises ValueError for pictures and the like that this model's call has no name for."""
        accepted = inspect.signature(self.model.forward).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
            return
        for placed in batches:
            for name in () if placed.batch.inputs is None else placed.batch.inputs.tensors:
                if name not in accepted:
                    raise ValueError(
                        f"{type(self.model).__name__} takes no {name}, which the trainer's model was given"
                    )

    def log_probs(
        self, batch: MicroBatch, *, to_the_end: bool = True, instead: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Log-probability of the last R ids of each row, float32 or wider [B, R]; where the loss has an entropy term,
        the mixture of both that the token's weight multiplies.

        Nothing that counts is computed at the last position; `to_the_end` computes it all the same, as trainers do:
        what is not finite there reaches the others' gradients. `instead` stands in for parameters by name, such as
        dual numbers for a directional derivative.
        """
        num_positions = batch.logp_BR.shape[1]
        ids_BT = batch.ids_BT.to(self.device)
        # A picture at the very end: it needs all of its placeholders.
        to_the_end |= batch.inputs is not None and bool(batch.inputs.stand_in(batch.ids_BT[:, -1:]).any())
        end = None if to_the_end else -1
        fed_BT = ids_BT[:, :end]
        inputs: dict[str, Any] = {}
        if batch.attention_mask_BT is not None and "attention_mask" in self._takes:
            inputs["attention_mask"] = batch.attention_mask_BT[:, :end].to(self.device).long()
        if batch.position_ids_BT is not None and "position_ids" in self._takes:
            inputs["position_ids"] = batch.position_ids_BT[:, :end].to(self.device)
        if batch.inputs is not None:
            inputs |= batch.inputs.fed(fed_BT.shape[1], self.device)
        if "use_cache" in self._takes:
            inputs["use_cache"] = False
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = num_positions + (1 if to_the_end else 0)
        # Without autocast's cache, which outlives a region inside another: a cached cast would hide a moved parameter.
        # Dual numbers go through the model's own head: the other has no derivative of that kind.
        head: Head = self._head if instead is None else "plain"
        with self._autocast(), as_trained(self.model, head, self.grid):
            output = (
                self.model(fed_BT, **inputs)
                if instead is None
                else functional_call(self.model, dict(instead), (fed_BT,), inputs)
            )
            logits = output if isinstance(output, Tensor) else output.logits
        logits_BRV = logits[:, -num_positions - 1 : -1] if to_the_end else logits[:, -num_positions:]
        targets_BR = ids_BT[:, -num_positions:]
        self.meter.num_tokens_forward += fed_BT.numel()
        self.meter.num_forwards += 1
        logp_BR, entropy_BR = logp_and_entropy(
            logits_BRV,
            targets_BR,
            batch.temperature,
            self._head,
            narrow=torch.is_grad_enabled() and instead is None and batch.logp_BR.dtype == logits_BRV.dtype,
            entropy=batch.entropy_coefficient_BR is not None,
        )
        return _mixed(batch, logp_BR, entropy_BR)

    def log_probs_of(
        self, part: "ActivePart", *, hold_routing: bool = False, instead: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """`log_probs` of a part of a micro-batch. Experts are chosen, and the choice remembered; `hold_routing` makes
        the remembered choice again, for weights that were moved."""
        num_positions = part.batch.ids_BT.shape[1] - (0 if part.to_the_end else 1)
        context = self.routing.held if hold_routing else self.routing.recorded
        with context(part.source, part.rows, num_positions):
            return self.log_probs(part.batch, to_the_end=part.to_the_end, instead=instead)

    def replays_packed(self, part: "ActivePart") -> bool:
        """Whether a replay runs the part's micro-batch as the trainer did, its rows as one: a whole one, where that
        rounds otherwise than row by row."""
        batch = part.source
        told = batch.packed and batch.attention_mask_BT is not None and batch.inputs is None
        return told and part.is_whole and self.grid in NARROW and self._can_pack

    def packed_log_probs(self, batch: MicroBatch) -> Tensor:
        """`log_probs` of a whole micro-batch run as one row of what its attention mask shows; 0 elsewhere."""
        assert batch.attention_mask_BT is not None
        shown_BT = batch.attention_mask_BT.to(self.device).bool()
        ids_BT = batch.ids_BT.to(self.device)
        positions_BT = shown_BT.cumsum(dim=1) - 1 if batch.position_ids_BT is None else batch.position_ids_BT
        inputs: dict[str, Any] = {"position_ids": positions_BT.to(self.device)[shown_BT].unsqueeze(0)}
        if "use_cache" in self._takes:
            inputs["use_cache"] = False
        fed_1N = ids_BT[shown_BT].unsqueeze(0)
        all_rows = torch.arange(len(ids_BT))
        with (
            self.routing.recorded(batch, all_rows, ids_BT.shape[1], shown_BT),
            self._autocast(),
            as_trained(self.model, self._head, self.grid),
        ):
            output = self.model(fed_1N, **inputs)
            logits_1NV = output if isinstance(output, Tensor) else output.logits
        self.meter.num_tokens_forward += fed_1N.numel()
        self.meter.num_forwards += 1
        logp_1N, entropy_1N = logp_and_entropy(
            logits_1NV,
            ids_BT.roll(-1, dims=1)[shown_BT].unsqueeze(0),
            batch.temperature,
            self._head,
            narrow=torch.is_grad_enabled() and batch.logp_BR.dtype == logits_1NV.dtype,
            entropy=batch.entropy_coefficient_BR is not None,
        )

        def by_row(values_1N: Tensor) -> Tensor:
            rows_BT = values_1N.new_zeros(shown_BT.shape).masked_scatter(shown_BT, values_1N)
            return rows_BT[:, batch.first_position - 1 : -1]

        return _mixed(batch, by_row(logp_1N), None if entropy_1N is None else by_row(entropy_1N))

    def turns(self, parts: Iterable[tuple[int, "ActivePart"]]) -> Iterator["Turn"]:
        """Parts of batches (by number), as this process has to run them."""
        if self.split is not None:
            return self.split.turns(parts, lambda part: part.source.packed and self.grid in NARROW)
        return (Turn(batch, part, own=True) for batch, part in parts)

    def log_probs_in(self, turn: "Turn", *, hold_routing: bool = False) -> Tensor:
        """`log_probs_of`; of another's part nothing is remembered."""
        if turn.own:
            return self.log_probs_of(turn.part, hold_routing=hold_routing)
        return self.log_probs(turn.part.batch, to_the_end=turn.part.to_the_end)

    def backward(
        self, logp_BR: Tensor, coefficient_BR: Tensor, *, num_tokens: int, keep_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Gradients of sum(c * logp), parameter by parameter; None where a parameter has no part in it. Where the model
        is split, the sum goes over all processes, each with a logp and coefficients of its own."""
        self.meter.num_tokens_backward += num_tokens
        self.meter.num_backwards += 1
        coefficient_BR = coefficient_BR.to(device=logp_BR.device, dtype=logp_BR.dtype)
        if self.split is not None:
            return self._reduced(logp_BR, coefficient_BR, keep_graph=keep_graph, num_processes=self.split.size)
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            logp_BR,
            list(self.parameters.values()),
            grad_outputs=coefficient_BR,
            allow_unused=True,
            retain_graph=keep_graph,
        )
        return gradients

    def _reduced(
        self, logp_BR: Tensor, coefficient_BR: Tensor, *, keep_graph: bool, num_processes: int
    ) -> tuple[Tensor | None, ...]:
        """FSDP2 leaves the mean over processes in `.grad`, each process its shard of it."""
        logp_BR.backward(gradient=coefficient_BR, retain_graph=keep_graph)  # type: ignore[no-untyped-call]
        found = []
        for parameter in self.parameters.values():
            found.append(None if parameter.grad is None else parameter.grad * num_processes)
            parameter.grad = None
        return tuple(found)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        enabled = self.autocast_dtype is not None
        if not enabled and not torch.is_autocast_enabled(self.device.type):
            yield
        else:
            with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=enabled, cache_enabled=False):
                yield


def cut(batch: MicroBatch, rows: Tensor, end: int) -> MicroBatch:
    """The given rows, and only their positions before `end` (exclusive, counted over the whole row).

    Causal models give the same log-probabilities for what is left. Pictures keep all of their placeholders: more
    positions are left then.
    """
    if batch.inputs is not None:
        end = batch.inputs.end_needed(batch.ids_BT[rows], end)
    num_kept = end - batch.first_position
    changed: dict[str, Any] = {}
    for one in fields(MicroBatch):
        value = getattr(batch, one.name)
        if isinstance(value, Tensor):
            changed[one.name] = value[rows][:, : end if one.name.endswith("_BT") else num_kept]
    if batch.inputs is not None:
        changed["inputs"] = batch.inputs.cut(rows, end)
    if batch.uids:
        changed["uids"] = tuple(batch.uids[row] for row in rows.tolist() if row < len(batch.uids))
    return replace(batch, **changed)


@dataclass(frozen=True)
class ActivePart:
    """The rows and columns of a micro-batch that a set of coefficients touches."""

    source: MicroBatch
    batch: MicroBatch
    rows: Tensor  # int64 [b]
    num_columns: int
    to_the_end: bool  # nothing was cut off on the right

    @property
    def is_whole(self) -> bool:
        """Whether every row has a part in it."""
        return len(self.rows) == len(self.source.ids_BT)

    @property
    def num_tokens(self) -> int:
        return self.batch.ids_BT.shape[0] * (self.batch.ids_BT.shape[1] - (0 if self.to_the_end else 1))


@dataclass(frozen=True)
class Turn:
    """A pass through the model: a part of the batch of this number. Not `own`: run because others run, for a model
    that is split needs everybody in each pass."""

    batch: int
    part: ActivePart
    own: bool


def active_part(batch: MicroBatch, coefficient_BR: Tensor) -> ActivePart | None:
    """What has to be computed for these coefficients: rows with one that is not zero, up to the last of them."""
    touched_BR = coefficient_BR != 0  # NaN counts: it is not zero
    if not bool(touched_BR.any()):
        return None
    rows = touched_BR.any(dim=1).nonzero().squeeze(-1)
    num_columns = int(touched_BR.any(dim=0).nonzero().max()) + 1
    part = cut(batch, rows, batch.first_position + num_columns)
    num_columns = part.logp_BR.shape[1]
    return ActivePart(batch, part, rows, num_columns, num_columns == coefficient_BR.shape[1])
