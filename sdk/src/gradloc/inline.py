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

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from gradloc.attribution import checksum_tolerance, leader, reach_of, shares_of
from gradloc.culprits import NUM_TOKENS_MAX, Scene, is_whole_row, ranked, row_shares
from gradloc.diagnosis import diagnose
from gradloc.evidence import evidence_of
from gradloc.exhibits import Exhibits, Shown, Texts
from gradloc.inline_work import SpikedStep, Work, in_focus
from gradloc.layer_growth import layer_growth
from gradloc.localized import summary_of, verdict_of
from gradloc.measured import Evidence
from gradloc.nonfinite import find_in_batch
from gradloc.nonfinite_causes import nonfinite_cause
from gradloc.ranks import Ranks
from gradloc.snapshot import MicroBatch
from gradloc.testimony import NUM_ROWS_MAX, Conclusion, RowShare, Testimony, conclude, conclude_non_finite
from gradloc.verification import Place
from gradloc_proto.messages import Cause, Certificate, Cost, Fidelity, Finding

NUM_FORWARDS_MAX = 3  # of the whole batch: with the certificate under one step
SPACING_STEPS = 8  # a storm of spikes must not double the cost of training
NUM_EXPLAINED_MAX = 50  # a run's quota, as for snapshots
NUM_LEADING_ROWS = 8
_T = TypeVar("_T")


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
        self._ranks = Ranks(rank, world_size, device)
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
        spike, keys = in_focus(spike)
        work = self._guarded(
            lambda: Work.prepared(
                self._module,
                spike,
                micro_batches,
                rank=self._ranks.rank,
                grad_factor=grad_factor,
                autocast_dtype=self._autocast_dtype,
                keys=keys,
            )
        )
        if not math.isfinite(spike.norm):
            return self._explain_non_finite(spike, work, started)
        opening = [float(work is None), *((0.0, 0.0) if work is None else (len(work.passes), work.coefficient_max))]
        rows = self._ranks.rows(opening)
        if any(row[0] for row in rows) or not max(row[2] for row in rows) > 0 or not spike.norm > 0:
            return None
        assert work is not None
        num_passes = int(max(row[1] for row in rows)) if self._sharded else len(work.passes)
        with work.quiet(self._ranks.device):
            testimony = self._attribute(work, num_passes, max(row[2] for row in rows))
            testimonies = self._ranks.testimonies(testimony)
            if any(one.failed for one in testimonies):
                return None
            limit, tolerance = spike.limit, checksum_tolerance(work.policy.grid)
            conclusion, without = self._proved(work, conclude(testimonies, spike.norm, limit, tolerance), limit)
        return self._finding(spike, testimonies, conclusion, without, work, started)

    # --- on this rank ---------------------------------------------------------------------------

    def _remember_autocast(self, *_: Any) -> None:
        kind = self._ranks.device.type
        if torch.is_grad_enabled():
            self._autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """What fails here is told to the others at the next meeting, never raised past it."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait at the next collective
            self.failure = error
            return None

    def _attribute(self, work: Work, num_passes: int, coefficient_max: float) -> Testimony:
        """Shares of this rank's tokens; all ranks use one eps. Meets the others once a forward."""
        reach = reach_of(work.policy.grid)
        eps = reach.first_eps(coefficient_max, work.gradient.norm)
        base = [placed.logp_BR() for placed in work.placed]
        up: list[Tensor] | None = None
        for attempt in range(NUM_FORWARDS_MAX - 1):
            up = self._forward(work, eps, num_passes)
            weight, change = (-1.0, 0.0) if up is None else leader(work.coefficients, up, base)
            rows = self._ranks.rows([float(self.failure is not None), weight, change])
            if any(row[0] for row in rows):
                return Testimony(failed=self._reason())
            better = reach.next_eps(eps, max(rows, key=lambda row: row[1])[2])
            if better is None or attempt == NUM_FORWARDS_MAX - 2:
                break
            eps = better
        down = self._forward(work, -eps, num_passes)
        found = self._guarded(lambda: self._testify(work, up, down, eps))
        return Testimony(failed=self._reason()) if found is None else found

    def _forward(self, work: Work, eps: float, num_passes: int) -> list[Tensor] | None:
        return self._guarded(lambda: work.moved_logp(eps, num_passes))

    def _testify(self, work: Work, up: list[Tensor] | None, down: list[Tensor] | None, eps: float) -> Testimony:
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
                    rank=self._ranks.rank,
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

    def _proved(self, work: Work, conclusions: Sequence[Conclusion], limit: float) -> tuple[Conclusion, float]:
        """The first conclusion whose norm without its culprits is under the limit, else the first one."""
        for conclusion in conclusions:
            without = self._norm_without(work, conclusion)
            if without <= limit:
                return conclusion, without
        return conclusions[0], math.nan

    def _norm_without(self, work: Work, conclusion: Conclusion) -> float:
        """||g - g_S|| where one rank holds all of S and computes g_S in full precision within budget; else NaN."""
        holders = {culprit.rank for culprit in conclusion.culprits}
        mine = conclusion.verdict in ("token", "sequence") and holders == {self._ranks.rank} and not self._sharded
        value = self._guarded(lambda: _norm_without(work, conclusion)) if mine else None
        values = [row[0] for row in self._ranks.rows([math.nan if value is None else value])]
        return next((found for found in values if not math.isnan(found)), math.nan)

    # --- on all ranks alike ---------------------------------------------------------------------

    def _finding(
        self,
        spike: SpikedStep,
        testimonies: Sequence[Testimony],
        conclusion: Conclusion,
        without: float,
        work: Work,
        started: float,
    ) -> Finding:
        limit = spike.limit
        growth = layer_growth(dict(spike.layer_norms), spike.limits.healthy_layers)
        culprits = conclusion.culprits
        owner = testimonies[culprits[0].rank] if culprits else Testimony()
        is_first = bool(culprits and owner.culprits and owner.culprits[0] == culprits[0])
        known: dict[str, Any] = dict(owner.evidence) if is_first else {}
        known |= {"limit": limit, "norm": spike.norm, "in_mask": bool(known.get("in_mask", True))}
        known.pop("num_culprits", None)
        rest_share = None if conclusion.verdict == "inconclusive" else 1.0 - conclusion.checksum
        evidence = Evidence(
            kind=conclusion.verdict, num_culprits=conclusion.num_culprits, growth=growth, rest_share=rest_share, **known
        )
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
            rest_share=rest_share,
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

    def _explain_non_finite(self, spike: SpikedStep, work: Work | None, started: float) -> Finding | None:
        """Coefficients and logps that are not finite cost nothing to look at; the search for others is a replay's."""
        found = None if work is None else self._guarded(lambda: self._testify_non_finite(work))
        testimonies = self._ranks.testimonies(Testimony(failed=self._reason()) if found is None else found)
        if work is None or any(one.failed for one in testimonies):
            return None
        conclusion, what = conclude_non_finite(testimonies)
        fidelity = _fidelity(spike, 1.0, work.policy.grid)
        cause = Cause(
            name="non-finite-network",
            confidence="medium",
            summary="coefficients and logps are finite: the gradient breaks inside the network; localize its snapshot",
        )
        if what:
            is_mask = conclusion.verdict == "mask"
            cause = nonfinite_cause(what, conclusion.culprits, outside_mask=is_mask, num_tokens=conclusion.num_culprits)
        return Finding(
            verdict=conclusion.verdict,
            strategy="attribution",
            step=spike.step,
            summary=summary_of(conclusion.verdict, conclusion.culprits, None, None, fidelity),
            culprits=conclusion.culprits,
            fidelity=fidelity,
            causes=(cause,),
            healthy_norm=spike.limits.healthy_norm,
            cost=_cost(work, started),
        )

    def _testify_non_finite(self, work: Work) -> Testimony:
        source = find_in_batch(work.placed, work.coefficients)
        if source is None:
            return Testimony()
        exhibits = Exhibits(work.placed, work.coefficients, self._texts)
        return Testimony(
            culprits=tuple(exhibits.culprit(where, math.nan, None, None) for where in source.places[:NUM_TOKENS_MAX]),
            non_finite=source.what,
            outside_mask=source.outside_mask,
        )


def _total(shares: Sequence[Tensor]) -> float:
    return math.fsum(float(share.sum()) for share in shares)


def _fidelity(spike: SpikedStep, checksum: float, grid: torch.dtype) -> Fidelity:
    """Nothing was replayed: the checksum says how well the forwards explain the trainer's own gradient."""
    error = abs(checksum - 1.0)
    tolerance = checksum_tolerance(grid)
    return Fidelity(
        reported_norm=spike.norm, replayed_norm=spike.norm, rel_error=error, tolerance=tolerance, reproduced=True
    )


def _cost(work: Work, started: float) -> Cost:
    meter = work.policy.meter
    return Cost(
        steps=round(meter.steps, 4),
        num_forwards=meter.num_forwards,
        num_backwards=meter.num_backwards,
        seconds=round(time.perf_counter() - started, 4),
    )


def _norm_without(work: Work, conclusion: Conclusion) -> float:
    """Of this rank's culprits."""
    numbers = {placed.index: number for number, placed in enumerate(work.placed)}
    places = [
        Place(number, culprit.sequence, culprit.token - work.placed[number].batch.first_position)
        for culprit in conclusion.culprits
        for number in (numbers[culprit.micro_batch],)
    ]
    return work.norm_without(places, whole_rows=conclusion.verdict == "sequence")
