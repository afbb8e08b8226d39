"""One decision on all ranks: the vector that ranks add up, and what it says afterwards.

The squared layer norms are all-reduced anyway; everything else a common decision needs rides along:
each rank's summary in its own slot, and rank 0's limits themselves (not only their version: a rank
whose reader lags could not judge a version it has not read). Pure but for torch tensors; one sum
over ranks, nothing that can hang alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gradloc.capture import SUMMARY_FIELDS
from gradloc.clipping.stream import norms_from
from gradloc_proto.messages import Limits

METRICS = (
    "loss",
    "reward_mean",
    "reward_std",
    "accuracy",
    "num_zero_variance_groups",
    "kl",
    "entropy",
    "clip_fraction",
    "lr",
    "tokens_remedied",
    "sequences_remedied",
    "rewards_remedied",
)
_RANK_FIELDS = ("failed", "ready", "idle", "kept", "square", *SUMMARY_FIELDS, *METRICS)
_SHARED = ("version", "norm", "healthy_norm", "late_step", "late_or_newest")


@dataclass(frozen=True)
class LocalView:
    """What one rank brings. `layer_squares_L` float64 [L]; `wish` counts on rank 0 only."""

    layer_squares_L: torch.Tensor
    summary: torch.Tensor  # float64 [len(SUMMARY_FIELDS)]
    metrics: dict[str, float]
    failed: bool
    ready: bool  # a spike's snapshot could be taken now
    idle: bool = False  # so could one that is less urgent: nothing is being written
    limits: Limits | None = None
    wish: tuple[int, bool] | None = None  # for a snapshot: of which step, and whether the newest will do as well
    kept_step: int | None = None  # whose batch this rank holds and would keep for rank 0's wish of the step before
    entering: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by layer, as ResidualStream.take


@dataclass(frozen=True)
class CommonView:
    """What all ranks know after the sum, bit for bit alike."""

    norm: float
    layer_norms: dict[str, float]
    limits: Limits
    ranks: tuple[dict[str, float], ...]
    wish: tuple[int, bool] | None
    entering_norms: dict[str, float] = field(default_factory=dict)  # of what goes into a layer from above
    num_held: dict[str, int] = field(default_factory=dict)  # positions of it that LayerClip held back

    @property
    def failed(self) -> bool:
        return any(rank["failed"] > 0 for rank in self.ranks)

    @property
    def ready(self) -> bool:
        return all(rank["ready"] > 0 for rank in self.ranks)

    @property
    def idle(self) -> bool:
        return all(rank["idle"] > 0 for rank in self.ranks)

    @property
    def kept_step(self) -> int | None:
        """The step that all ranks would keep for the wish of the step before; None where they do not agree."""
        steps = {rank["kept"] for rank in self.ranks}
        return int(steps.pop()) if len(steps) == 1 and min(steps) >= 0 else None

    @property
    def num_tokens(self) -> int:
        return int(sum(rank["num_tokens"] for rank in self.ranks))

    @property
    def rank_norms(self) -> tuple[float, ...]:
        """Norm of each rank's own gradient, where every rank holds the whole one and adds its part of the square."""
        return tuple(_root(len(self.ranks) * rank["square"]) for rank in self.ranks)

    @property
    def num_positions_held(self) -> int:
        """That LayerClip held back at this step; one may count at several layers."""
        return sum(self.num_held.values())

    @property
    def held_at(self) -> str | None:
        """The highest layer that positions were held back from: it and all below got another gradient."""
        return next((name for name, number in reversed(self.num_held.items()) if number > 0), None)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were given and are finite, mean over ranks."""
        means = {name: self.mean(name) for name in METRICS}
        return {name: value for name, value in means.items() if value is not None and math.isfinite(value)}

    def worst_rank(self) -> int:
        """Rank with the largest |c|; one with a NaN counts as worst."""
        values = [rank["coefficient_abs_max"] for rank in self.ranks]
        known = [(math.isnan(value) and self.ranks[i]["num_tokens"] > 0, value) for i, value in enumerate(values)]
        return max(range(len(known)), key=lambda i: (known[i][0], -math.inf if math.isnan(values[i]) else values[i]))

    def extreme(self, field: str, sign: int) -> float | None:
        """Largest (sign 1) or smallest (sign -1) known value over ranks, None where no rank has one."""
        values = [rank[field] for rank in self.ranks if not math.isnan(rank[field])]
        return (max(values) if sign > 0 else min(values)) if values else None

    def total(self, field: str) -> float:
        return sum(rank[field] for rank in self.ranks)

    def mean(self, metric: str) -> float | None:
        """Mean over the ranks that gave the metric. A NaN that a rank gave is told apart from none given."""
        values = [rank[metric] for rank in self.ranks if rank[metric] != _NOT_GIVEN]
        return sum(values) / len(values) if values else None


_NOT_GIVEN = -1.7e308  # a sum of float64 keeps it exactly, and no metric has this value


@dataclass(frozen=True)
class Layout:
    """What the vector's places belong to; the same on every rank, whatever is switched on there.

    layers: keys of the measured layers; boundaries: the layers whose entering gradient may be (`ResidualStream.names`).
    """

    layers: tuple[str, ...]
    boundaries: tuple[str, ...]
    world_size: int

    @property
    def length(self) -> int:
        slots = self.world_size * len(_RANK_FIELDS)
        return 3 * len(self.layers) + len(_SHARED) + slots + 2 * len(self.boundaries)


def to_vector(view: LocalView, layout: Layout, rank: int) -> torch.Tensor:
    """This rank's addend: float64 [layout.length]."""
    layer_names, num_layers = layout.layers, len(layout.layers)
    vector = torch.zeros(layout.length, dtype=torch.float64)
    vector[:num_layers] = view.layer_squares_L
    if rank == 0:
        limits = view.limits or Limits()
        late, or_newest = view.wish or (-1, False)
        shared = [limits.version, _or_nan(limits.norm), _or_nan(limits.healthy_norm), late, or_newest]
        shared += [limits.layers.get(name, math.nan) for name in layer_names]
        shared += [limits.healthy_layers.get(name, math.nan) for name in layer_names]
        vector[num_layers : 3 * num_layers + len(_SHARED)] = torch.tensor(shared, dtype=torch.float64)
    at = 3 * num_layers + len(_SHARED) + rank * len(_RANK_FIELDS)
    metrics = [view.metrics.get(name, _NOT_GIVEN) for name in METRICS]
    flags = [float(flag) for flag in (view.failed, view.ready, view.idle)]
    flags += [-1.0 if view.kept_step is None else float(view.kept_step), float(view.layer_squares_L.sum())]
    vector[at : at + len(_RANK_FIELDS)] = torch.tensor([*flags, *view.summary.tolist(), *metrics], dtype=torch.float64)
    entering = [value for name in layout.boundaries for value in view.entering.get(name, (0.0, 0.0))]
    vector[layout.length - len(entering) :] = torch.tensor(entering, dtype=torch.float64)
    return vector


def from_vector(total: torch.Tensor, layout: Layout) -> CommonView:
    """What the sum over ranks says."""
    values: list[float] = total.tolist()
    layer_names, num_layers, world_size = layout.layers, len(layout.layers), layout.world_size
    squares, rest = values[:num_layers], values[num_layers:]
    version, norm_limit, healthy_norm, late, or_newest = rest[: len(_SHARED)]
    layer_limits = rest[len(_SHARED) : len(_SHARED) + num_layers]
    healthy_layers = rest[len(_SHARED) + num_layers : len(_SHARED) + 2 * num_layers]
    slots = rest[len(_SHARED) + 2 * num_layers :]
    entering = slots[world_size * len(_RANK_FIELDS) :]
    width = len(_RANK_FIELDS)
    return CommonView(
        norm=_root(math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)),
        layer_norms={name: _root(square) for name, square in zip(layer_names, squares, strict=True)},
        limits=Limits(
            version=int(version),
            norm=_or_none(norm_limit),
            healthy_norm=_or_none(healthy_norm),
            layers=_known(layer_names, layer_limits),
            healthy_layers=_known(layer_names, healthy_layers),
        ),
        ranks=tuple(
            dict(zip(_RANK_FIELDS, slots[rank * width : (rank + 1) * width], strict=True)) for rank in range(world_size)
        ),
        wish=None if late < 0 else (int(late), or_newest > 0),
        entering_norms=dict(zip(layout.boundaries, norms_from(entering[::2]), strict=True)),
        num_held=dict(zip(layout.boundaries, map(int, entering[1::2]), strict=True)),
    )


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _known(names: tuple[str, ...], values: list[float]) -> dict[str, float]:
    return {name: value for name, value in zip(names, values, strict=True) if not math.isnan(value)}
