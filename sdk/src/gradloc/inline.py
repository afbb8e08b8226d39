"""Inline mode: the spike explained in the training process, on all ranks, with two forward passes.

    probe = gradloc.watch(model, optimizer, run="my-run", localize="inline")
    probe.observe(...)          # at a spike this takes at most one step longer
    probe.finding               # what the last spike was

The step's gradient lies in `.grad` already. Every rank moves its own parameters (or shards) along it,
runs its own micro-batches forward, and says what it saw; all conclude the same. Parameters, buffers,
gradients, random state and modes are as before afterwards, bit for bit.

Ranks meet in a fixed number of collectives, joined whatever failed before: nobody waits alone. Sharded
models make each forward pass a collective too, so every rank runs equally many.
Shapes: B rows, T positions, R positions with a logp.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from gradloc.attribution import checksum_tolerance, leader, reach_of, shares_of
from gradloc.culprits import NUM_TOKENS_MAX, Scene, is_whole_row, ranked, row_shares
from gradloc.diagnosis import Evidence, diagnose, layer_growth
from gradloc.evidence import evidence_of
from gradloc.exhibits import Exhibits, Shown, Texts
from gradloc.layers import layer_key
from gradloc.localized import summary_of, verdict_of
from gradloc.nonfinite import find_in_batch
from gradloc.perturbation import Perturbation
from gradloc.policy import ActivePart, Meter, PlacedBatch, Policy, active_part, cut, place
from gradloc.replay import Gradient, coefficients_of
from gradloc.snapshot import MicroBatch
from gradloc.testimony import NUM_ROWS_MAX, Conclusion, RowShare, Testimony, conclude, conclude_non_finite
from gradloc.verification import Place
from gradloc_proto.messages import Cause, Certificate, Cost, Fidelity, Finding, Limits

NUM_FORWARDS_MAX = 3  # of the whole batch: with the certificate under one step
SPACING_STEPS = 8  # a storm of spikes must not double the cost of training
NUM_EXPLAINED_MAX = 50  # a run's quota, as for snapshots
NUM_LEADING_ROWS = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class SpikedStep:
    """What the ranks agreed on: the same on all of them."""

    step: int
    norm: float
    layer_norms: Mapping[str, float]
    limits: Limits
    rules_hit: tuple[str, ...]


class InlineLocalizer:
    """Explains steps of one training process. `reason_off` says why it cannot, where it cannot.

    `failure`: what went wrong on this rank at the last explanation, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        texts: Texts | None,
    ) -> None:
        self._module = module
        self._team = _Team(rank, world_size, device)
        self._texts = texts
        self._sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        self._autocast_dtype: torch.dtype | None = None
        self._next_step = 0
        self._num_left = NUM_EXPLAINED_MAX
        self.failure: Exception | None = None
        self.reason_off: str | None = None
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            self.reason_off = "FSDP1's flat parameters cannot be moved alone; use FSDP2 (fully_shard)"
        else:
            module.register_forward_pre_hook(self._remember_autocast)

    def wants(self, step: int) -> bool:
        """Whether a spike at this step would be explained; the same answer on all ranks."""
        return self.reason_off is None and self._num_left > 0 and step >= self._next_step

    def explain(self, spike: SpikedStep, micro_batches: tuple[MicroBatch, ...], grad_factor: float) -> Finding | None:
        """The finding, the same on all ranks; None when any rank failed. Called on all ranks, in step."""
        started = time.perf_counter()
        self._next_step = spike.step + SPACING_STEPS
        self._num_left -= 1
        self.failure = None
        spike, keys = _in_focus(spike)
        work = self._guarded(lambda: self._prepare(spike, micro_batches, grad_factor, keys))
        if not math.isfinite(spike.norm):
            return self._explain_non_finite(spike, work, started)
        opening = [float(work is None), *((0.0, 0.0) if work is None else (len(work.passes), work.coefficient_max))]
        rows = self._team.rows(opening)
        if any(row[0] for row in rows) or not max(row[2] for row in rows) > 0 or not spike.norm > 0:
            return None
        assert work is not None
        num_passes = int(max(row[1] for row in rows)) if self._sharded else len(work.passes)
        with self._quiet(work):
            testimony = self._attribute(work, num_passes, max(row[2] for row in rows))
            testimonies = self._team.testimonies(testimony)
            if any(one.failed for one in testimonies):
                return None
            limit, tolerance = _limit_of(spike), checksum_tolerance(work.policy.grid)
            conclusion, without = self._proved(work, conclude(testimonies, spike.norm, limit, tolerance), limit)
        return self._finding(spike, testimonies, conclusion, without, work, started)

    # --- on this rank ---------------------------------------------------------------------------

    def _remember_autocast(self, *_: Any) -> None:
        kind = self._team.device.type
        if torch.is_grad_enabled():
            self._autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """What fails here is told to the others at the next meeting, never raised past it."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait at the next collective
            self.failure = error
            return None

    def _prepare(
        self, spike: SpikedStep, micro_batches: tuple[MicroBatch, ...], grad_factor: float, keys: frozenset[str] | None
    ) -> "_Work":
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        placed = tuple(replace(one, rank=self._team.rank) for one in place([(_on_host(micro_batches), grad_factor)]))
        coefficients = coefficients_of(placed)
        modes = [(part, part.training) for part in self._module.modules()]
        num_tokens = sum(one.batch.ids_BT.numel() for one in placed)
        try:
            policy = Policy(
                self._module, Meter(num_tokens), autocast_dtype=self._autocast_dtype, grid=_sharded_grid(self._module)
            )
        finally:
            _set_modes(modes)
        passes = [
            (index, part)
            for index, (one, own) in enumerate(zip(placed, coefficients, strict=True))
            if (part := active_part(one.batch, own)) is not None
        ]
        moved = {
            name: parameter
            for name, parameter in policy.parameters.items()
            if parameter.grad is not None and (keys is None or layer_key(name) in keys)
        }
        direction = {name: _local(parameter.grad) for name, parameter in moved.items()}
        local = {name: _local(parameter) for name, parameter in moved.items()}
        return _Work(
            policy=policy,
            placed=placed,
            coefficients=coefficients,
            gradient=Gradient({}, spike.norm, dict(spike.layer_norms)),
            direction=direction,
            keys=keys,
            passes=passes,
            dummy=_dummy(placed, passes),
            perturbation=Perturbation(local, direction, spike.norm, policy.grid),
            modes=modes,
            buffers=[(buffer, buffer.detach().clone()) for buffer in self._module.buffers()],
            coefficient_max=max((float(own.abs().max()) for own in coefficients if own.numel()), default=0.0),
        )

    @contextlib.contextmanager
    def _quiet(self, work: "_Work") -> Iterator[None]:
        """Evaluation mode inside; modes, buffers and random state as before outside."""
        with torch.random.fork_rng(devices=_indices(self._team.device), device_type=_fork_type(self._team.device)):
            self._module.eval()
            try:
                yield
            finally:
                _set_modes(work.modes)
                with torch.no_grad():
                    for buffer, original in work.buffers:
                        buffer.copy_(original)

    def _attribute(self, work: "_Work", num_passes: int, coefficient_max: float) -> Testimony:
        """Shares of this rank's tokens; all ranks use one eps. Meets the others once a forward."""
        reach = reach_of(work.policy.grid)
        eps = reach.first_eps(coefficient_max, work.gradient.norm)
        base = [placed.logp_BR() for placed in work.placed]
        up: list[Tensor] | None = None
        for attempt in range(NUM_FORWARDS_MAX - 1):
            up = self._forward(work, eps, num_passes)
            weight, change = (-1.0, 0.0) if up is None else leader(work.coefficients, up, base)
            rows = self._team.rows([float(self.failure is not None), weight, change])
            if any(row[0] for row in rows):
                return Testimony(failed=self._reason())
            better = reach.next_eps(eps, max(rows, key=lambda row: row[1])[2])
            if better is None or attempt == NUM_FORWARDS_MAX - 2:
                break
            eps = better
        down = self._forward(work, -eps, num_passes)
        found = self._guarded(lambda: self._testify(work, up, down, eps))
        return Testimony(failed=self._reason()) if found is None else found

    def _forward(self, work: "_Work", eps: float, num_passes: int) -> list[Tensor] | None:
        """Logps of this rank's tokens at theta + eps v, float64 [B, R] a batch."""

        def run() -> list[Tensor]:
            logp = [torch.zeros(own.shape, dtype=torch.float64) for own in work.coefficients]
            with work.perturbation.moved(eps), torch.no_grad():
                try:
                    for number in range(num_passes):
                        if number >= len(work.passes):
                            work.policy.log_probs(work.dummy)
                            continue
                        index, part = work.passes[number]
                        moved_BR = work.policy.log_probs(part.batch, to_the_end=part.to_the_end)
                        logp[index][part.rows, : part.num_columns] = moved_BR.double().cpu()
                finally:
                    for module in self._module.modules():
                        if isinstance(module, FSDPModule):
                            module.reshard()  # what was gathered is of the moved weights
            return logp

        return self._guarded(run)

    def _testify(self, work: "_Work", up: list[Tensor] | None, down: list[Tensor] | None, eps: float) -> Testimony:
        if up is None or down is None:
            raise RuntimeError("a forward pass failed")
        shares = shares_of(work.coefficients, up, down, eps, work.gradient.norm)
        scene = Scene(work.policy, work.placed, work.coefficients, work.gradient, up)
        rows = row_shares(shares)
        leading = dict(ranked(shares, NUM_TOKENS_MAX + 1))
        for (batch, row), _ in rows[:NUM_LEADING_ROWS]:
            if shares[batch].shape[1]:
                column = int(shares[batch][row].argmax())
                leading.setdefault(Place(batch, row, column), float(shares[batch][row, column]))
        exhibits = Exhibits(work.placed, work.coefficients, self._texts)
        order = sorted(leading, key=lambda where: -abs(leading[where]))
        first = order[0] if order else None
        evidence = evidence_of(scene, math.nan, "", Shown(leading=first), layer_growth({}, {}), 0)
        start = 0 if first is None else work.placed[first.batch].batch.first_position
        base = [placed.logp_BR() for placed in work.placed]
        norm = work.gradient.norm
        return Testimony(
            share_sum=_total(shares),
            share_sum_up=_total(shares_of(work.coefficients, up, base, eps / 2, norm)),
            share_sum_down=_total(shares_of(work.coefficients, base, down, eps / 2, norm)),
            culprits=tuple(exhibits.culprit(where, leading[where], None, None) for where in order),
            rows=tuple(
                RowShare(
                    rank=self._team.rank,
                    micro_batch=work.placed[batch].index,
                    sequence=row,
                    share=share,
                    is_whole=number == 0 and share > 0 and is_whole_row(scene, (batch, row), shares),
                )
                for number, ((batch, row), share) in enumerate(rows[:NUM_ROWS_MAX])
            ),
            num_rows=sum(int((own != 0).any(dim=1).sum()) for own in work.coefficients),
            evidence={name: value for name, value in vars(evidence).items() if isinstance(value, float | bool)},
            view=None
            if first is None
            else exhibits.view(
                first, {start + at: share for at, share in enumerate(shares[first.batch][first.row].tolist())}
            ),
        )

    def _reason(self) -> str:
        return "failed" if self.failure is None else type(self.failure).__name__

    def _proved(self, work: "_Work", conclusions: Sequence[Conclusion], limit: float) -> tuple[Conclusion, float]:
        """The first conclusion whose norm without its culprits is under the limit, else the first one."""
        for conclusion in conclusions:
            without = self._norm_without(work, conclusion)
            if without <= limit:
                return conclusion, without
        return conclusions[0], math.nan

    def _norm_without(self, work: "_Work", conclusion: Conclusion) -> float:
        """||g - g_S|| where one rank holds all of S and computes g_S in full precision within budget; else NaN."""
        holders = {culprit.rank for culprit in conclusion.culprits}
        mine = conclusion.verdict in ("token", "sequence") and holders == {self._team.rank} and not self._sharded
        value = self._guarded(lambda: _subtracted(work, conclusion)) if mine else None
        values = [row[0] for row in self._team.rows([math.nan if value is None else value])]
        return next((found for found in values if not math.isnan(found)), math.nan)

    # --- on all ranks alike ---------------------------------------------------------------------

    def _finding(
        self,
        spike: SpikedStep,
        testimonies: Sequence[Testimony],
        conclusion: Conclusion,
        without: float,
        work: "_Work",
        started: float,
    ) -> Finding:
        limit = _limit_of(spike)
        growth = layer_growth(dict(spike.layer_norms), spike.limits.healthy_layers)
        culprits = conclusion.culprits
        owner = testimonies[culprits[0].rank] if culprits else Testimony()
        is_first = bool(culprits and owner.culprits and owner.culprits[0] == culprits[0])
        known: dict[str, Any] = dict(owner.evidence) if is_first else {}
        known |= {"limit": limit, "norm": spike.norm, "in_mask": bool(known.get("in_mask", True))}
        known.pop("num_culprits", None)
        evidence = Evidence(kind=conclusion.verdict, num_culprits=conclusion.num_culprits, growth=growth, **known)
        causes = diagnose(evidence)
        certificate = None
        if conclusion.num_culprits and not math.isnan(without) and without <= limit:
            certificate = Certificate(
                grad_norm=spike.norm,
                norm_without=without,
                limit=limit,
                holds=True,
                num_culprits=conclusion.num_culprits,
                num_tokens_lower_bound=conclusion.num_tokens_lower_bound,
                minimal=conclusion.verdict == "token" and conclusion.num_tokens_lower_bound == conclusion.num_culprits,
            )
        fidelity = _fidelity(spike, conclusion.checksum, work.policy.grid)
        verdict = verdict_of(conclusion.verdict, causes[0])
        return Finding(
            verdict=verdict,
            strategy="attribution",
            step=spike.step,
            summary=summary_of(verdict, culprits, conclusion.share, certificate, fidelity),
            culprits=culprits,
            share=conclusion.share,
            checksum=conclusion.checksum,
            rest_share=None if conclusion.verdict == "inconclusive" else 1.0 - conclusion.checksum,
            certificate=certificate,
            fidelity=fidelity,
            causes=causes,
            healthy_norm=spike.limits.healthy_norm,
            layer_growth=growth.by_key,
            layers_exploding=growth.blocks_exploding,
            module_kinds_exploding=growth.kinds_exploding,
            sequence_view=owner.view if is_first else None,
            shares_by_sequence=tuple(
                (row.rank, row.micro_batch, row.sequence, row.share) for one in testimonies for row in one.rows
            ),
            cost=_cost(work, started),
        )

    def _explain_non_finite(self, spike: SpikedStep, work: "_Work | None", started: float) -> Finding | None:
        """Coefficients and logps that are not finite cost nothing to look at; the search for others is a replay's."""
        found = None if work is None else self._guarded(lambda: self._testify_non_finite(work))
        testimonies = self._team.testimonies(Testimony(failed=self._reason()) if found is None else found)
        if work is None or any(one.failed for one in testimonies):
            return None
        conclusion, what = conclude_non_finite(testimonies)
        fidelity = _fidelity(spike, 1.0, work.policy.grid)
        summary = (
            f"{what} not finite before any gradient is computed"
            if what
            else "coefficients and logps are finite: the gradient breaks inside the network; localize its snapshot"
        )
        return Finding(
            verdict=conclusion.verdict,
            strategy="attribution",
            step=spike.step,
            summary=summary_of(conclusion.verdict, conclusion.culprits, None, None, fidelity),
            culprits=conclusion.culprits,
            fidelity=fidelity,
            causes=(Cause(name=f"non-finite-{what or 'network'}", confidence="medium", summary=summary),),
            healthy_norm=spike.limits.healthy_norm,
            cost=_cost(work, started),
        )

    def _testify_non_finite(self, work: "_Work") -> Testimony:
        source = find_in_batch(work.placed, work.coefficients)
        if source is None:
            return Testimony()
        exhibits = Exhibits(work.placed, work.coefficients, self._texts)
        return Testimony(
            culprits=tuple(exhibits.culprit(where, math.nan, None, None) for where in source.places[:NUM_TOKENS_MAX]),
            non_finite=source.what,
            outside_mask=source.outside_mask,
        )


@dataclass(frozen=True)
class _Work:
    """All that one explanation needs on this rank, made before the ranks meet."""

    policy: Policy
    placed: tuple[PlacedBatch, ...]
    coefficients: list[Tensor]
    gradient: Gradient
    direction: dict[str, Tensor]
    keys: frozenset[str] | None
    passes: list[tuple[int, ActivePart]]
    dummy: MicroBatch
    perturbation: Perturbation
    modes: list[tuple[nn.Module, bool]]
    buffers: list[tuple[Tensor, Tensor]]
    coefficient_max: float


class _Team:
    """The ranks' meetings: equally many on every rank, whatever happened before."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """Everybody's values, one row a rank."""
        if self.world_size == 1:
            return [list(values)]
        slots = torch.zeros(self.world_size, len(values), dtype=torch.float64)
        slots[self.rank] = torch.tensor(values, dtype=torch.float64)
        slots = slots.to(self._on)
        dist.all_reduce(slots)
        gathered: list[list[float]] = slots.cpu().tolist()
        return gathered

    def testimonies(self, own: Testimony) -> list[Testimony]:
        """Everybody's testimony, as JSON: nothing is unpickled."""
        if self.world_size == 1:
            return [own]
        data = own.model_dump_json().encode()
        lengths = [int(row[0]) for row in self.rows([float(len(data))])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = mine.to(self._on)
        gathered = [torch.zeros_like(mine) for _ in range(self.world_size)]
        dist.all_gather(gathered, mine)
        return [
            Testimony.model_validate_json(bytes(one[:length].cpu().numpy()))
            for one, length in zip(gathered, lengths, strict=True)
        ]

    @property
    def _on(self) -> torch.device:
        return self.device if "nccl" in dist.get_backend() else torch.device("cpu")


def _total(shares: Sequence[Tensor]) -> float:
    return math.fsum(float(share.sum()) for share in shares)


def _in_focus(spike: SpikedStep) -> tuple[SpikedStep, frozenset[str] | None]:
    """Where the whole norm is harmless and some layers are not: the step of those layers alone."""
    if not math.isfinite(spike.norm) or "norm" in spike.rules_hit:
        return spike, None
    keys = frozenset(key for key, norm in spike.layer_norms.items() if norm > spike.limits.layers.get(key, math.inf))
    if not keys:
        return spike, None
    norm = math.sqrt(math.fsum(spike.layer_norms[key] ** 2 for key in keys))
    limit = math.sqrt(math.fsum(spike.limits.layers[key] ** 2 for key in keys))
    return replace(spike, norm=norm, limits=spike.limits.model_copy(update={"norm": limit})), keys


def _limit_of(spike: SpikedStep) -> float:
    return spike.limits.norm if spike.limits.norm is not None else spike.norm


def _fidelity(spike: SpikedStep, checksum: float, grid: torch.dtype) -> Fidelity:
    """Nothing was replayed: the checksum says how well the forwards explain the trainer's own gradient."""
    error = abs(checksum - 1.0)
    tolerance = checksum_tolerance(grid)
    return Fidelity(
        reported_norm=spike.norm, replayed_norm=spike.norm, rel_error=error, tolerance=tolerance, reproduced=True
    )


def _cost(work: _Work, started: float) -> Cost:
    meter = work.policy.meter
    return Cost(
        steps=round(meter.steps, 4),
        num_forwards=meter.num_forwards,
        num_backwards=meter.num_backwards,
        seconds=round(time.perf_counter() - started, 4),
    )


def _subtracted(work: _Work, conclusion: Conclusion) -> float:
    """||g - g_S|| from a backward pass of the culprits' rows alone; NaN beyond the budget of one step.

    Only in full precision: differences of gradients in 16 bits are noise.
    """
    if work.policy.grid not in (torch.float32, torch.float64):
        return math.nan
    chosen = _coefficients_of(work, conclusion)
    parts = [(index, part) for index, own in chosen.items() if (part := active_part(work.placed[index].batch, own))]
    meter = work.policy.meter
    if meter.steps * meter.num_tokens_step + sum(part.num_tokens for _, part in parts) > meter.num_tokens_step:
        return math.nan
    sums: dict[str, Tensor] = {}
    with torch.enable_grad():
        for index, part in parts:
            logp_BR = work.policy.log_probs(part.batch, to_the_end=part.to_the_end)
            own_BR = chosen[index][part.rows, : part.num_columns]
            gradients = work.policy.backward(logp_BR, own_BR, num_tokens=part.num_tokens)
            for name, gradient in zip(work.policy.parameters, gradients, strict=True):
                if gradient is not None:
                    sums[name] = gradient.detach() if name not in sums else sums[name] + gradient.detach()
    square = 0.0
    for name, whole in work.direction.items():
        left = whole.double() if name not in sums else whole.double() - sums[name].double()
        square += float(left.square().sum())
    return math.sqrt(square)


def _coefficients_of(work: _Work, conclusion: Conclusion) -> dict[int, Tensor]:
    """Coefficients of the culprits alone, by batch: single tokens, or their whole rows."""
    by_index = {placed.index: number for number, placed in enumerate(work.placed)}
    chosen: dict[int, Tensor] = {}
    for culprit in conclusion.culprits:
        number = by_index[culprit.micro_batch]
        own = work.coefficients[number]
        only = chosen.setdefault(number, torch.zeros_like(own))
        if conclusion.verdict == "sequence":
            only[culprit.sequence] = own[culprit.sequence]
        else:
            column = culprit.token - work.placed[number].batch.first_position
            only[culprit.sequence, column] = own[culprit.sequence, column]
    return chosen


def _dummy(placed: Sequence[PlacedBatch], passes: Sequence[tuple[int, ActivePart]]) -> MicroBatch:
    """The smallest thing that can be run forward, for ranks with fewer micro-batches than others."""
    if passes:
        source = passes[0][1].batch
        return cut(source, torch.tensor([0]), source.first_position + 1)
    if placed and placed[0].batch.logp_BR.numel():
        source = placed[0].batch
        return cut(source, torch.tensor([0]), source.first_position + 1)
    ids_BT = torch.zeros(1, 2, dtype=torch.int64)
    blank_BR = torch.zeros(1, 1)
    return MicroBatch(ids_BT=ids_BT, mask_BR=blank_BR.bool(), logp_BR=blank_BR, coefficient_BR=blank_BR)


def _on_host(micro_batches: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    def moved(value: Any) -> Any:
        return value.detach().cpu() if isinstance(value, Tensor) else value

    return tuple(MicroBatch(**{name: moved(value) for name, value in vars(one).items()}) for one in micro_batches)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_grid(module: nn.Module) -> torch.dtype | None:
    """FSDP2's number format for parameters in forward passes, where its mixed precision sets one."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            policy = getattr(part._get_fsdp_state(), "_mp_policy", None)
            dtype: torch.dtype | None = getattr(policy, "param_dtype", None)
            return dtype
    return None


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training


def _indices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type != "cpu" else []


def _fork_type(device: torch.device) -> str:
    return device.type if device.type != "cpu" else "cuda"
