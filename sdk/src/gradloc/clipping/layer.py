"""LayerClip: each layer's gradient held to a limit from that layer's own history. Pure.

    limit_l = max(factor_of_max * largest, factor_of_median * median), but at most ceiling_of_median * median,
              of layer l's last accepted norms
    scale_l = 1                               where norm_l <= limit_l
              (median_l / norm_l) ** power    above it
              0                               where the norm is not finite

power 1 brings an exploded layer back to its usual norm. The default is 2, a redescending estimator: if a
healthy part of norm h and an unrelated explosion are added, the best linear guess of the healthy part is (h /
norm)² times the sum (Wiener), so the more a layer explodes the less of it is kept; clipping to the limit
would keep the explosion's direction at several times the healthy size. Accepted means finite, positive and
not above the limit: neither a spike nor a NaN nor a zero can poison the history. The ceiling keeps explosions
that stay just under the limit from taking it with them: of the largest alone each could triple it, of the
median it takes half of the history to move it. A level that lasts `regime_steps` steps in a row becomes the
history. Two thresholds, as for edges of pictures: at a step in which some layer is above its limit (or a position was
held back) the others' limit is max(largest, suspect_of_median * median), for what struck has reached them as well;
a layer between the two is scaled then, and not learned from. Source: GradLoc's article (type B, "LayerClip"; no formula
is published). The default factors are the smallest of those tried that touched none of 1,800 healthy steps.
Shapes: L layers, W kept norms, K steps of a new regime.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """Settings of LayerClip."""

    factor_of_max: float = 3.0
    factor_of_median: float = 6.0
    ceiling_of_median: float = 10.0
    suspect_of_median: float = 2.0
    power: float = 2.0
    window: int = 32
    num_warmup: int = 8
    regime_steps: int = 12

    def __post_init__(self) -> None:
        if not (1.0 <= self.factor_of_max < math.inf and 1.0 <= self.factor_of_median < math.inf):
            raise ValueError(
                f"LayerClip: factors are {self.factor_of_max} and {self.factor_of_median}; expected 1 or more, "
                "for below it healthy steps are clipped"
            )
        if not self.ceiling_of_median >= self.factor_of_median:
            raise ValueError(
                f"LayerClip: ceiling_of_median is {self.ceiling_of_median}; expected factor_of_median "
                f"({self.factor_of_median}) or more, for the limit lies between the two"
            )
        if not 1.0 <= self.suspect_of_median < math.inf:
            raise ValueError(
                f"LayerClip: suspect_of_median is {self.suspect_of_median}; expected 1 or more, for below it "
                "healthy layers are clipped"
            )
        if not 1.0 <= self.power < math.inf:
            raise ValueError(
                f"LayerClip: power is {self.power}; expected 1 (back to the median) or more (2 drops what explodes)"
            )
        if not 1 <= self.num_warmup <= self.window <= 4_096:
            raise ValueError(
                f"LayerClip: num_warmup is {self.num_warmup} and window {self.window}; "
                "expected 1 <= num_warmup <= window <= 4096"
            )
        if not self.num_warmup <= self.regime_steps <= self.window:
            raise ValueError(
                f"LayerClip: regime_steps is {self.regime_steps}; expected from num_warmup ({self.num_warmup}) "
                f"to window ({self.window})"
            )


@dataclass(frozen=True)
class LayerHistory:
    """What LayerClip remembers: last accepted norms and, of layers above their limit, the norms since."""

    names: tuple[str, ...]
    accepted_LW: Array  # NaN where there is none yet
    num_accepted_L: npt.NDArray[np.int64]  # ever
    pending_LK: Array
    num_pending_L: npt.NDArray[np.int64]


def layer_clip(norms_L: Array, limits_L: Array, targets_L: Array | None = None, power: float = 2.0) -> Array:
    """Scale in [0, 1] of each layer: float64 [L]; (target / norm) ** power above the limit.

    `targets_L` are healthy norms, the limits themselves when None. A limit that is NaN is not known yet:
    scale 1.
    """
    targets_L = limits_L if targets_L is None else targets_L
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale_L = np.where(norms_L > limits_L, (targets_L / norms_L) ** power, 1.0)
    return np.where(np.isfinite(norms_L), np.minimum(scale_L, 1.0), 0.0)


def empty_history(names: tuple[str, ...], settings: LayerLimits) -> LayerHistory:
    num_layers = len(names)
    return LayerHistory(
        names,
        np.full((num_layers, settings.window), math.nan),
        np.zeros(num_layers, dtype=np.int64),
        np.full((num_layers, settings.regime_steps), math.nan),
        np.zeros(num_layers, dtype=np.int64),
    )


def medians_from(history: LayerHistory) -> Array:
    """Median of each layer's accepted norms: float64 [L], NaN where there are none."""
    medians_L = np.full(len(history.names), math.nan)
    known_L = np.isfinite(history.accepted_LW).any(axis=1)
    if known_L.any():
        with np.errstate(over="ignore"):
            medians_L[known_L] = np.nanmedian(history.accepted_LW[known_L], axis=1)
    return medians_L


def limits_from(history: LayerHistory, settings: LayerLimits) -> Array:
    """Limit of each layer for the next step: float64 [L]; NaN until `num_warmup` norms were accepted."""
    limits_L = np.full(len(history.names), math.nan)
    known_L = np.isfinite(history.accepted_LW).sum(axis=1) >= settings.num_warmup
    if known_L.any():
        rows = history.accepted_LW[known_L]
        with np.errstate(over="ignore"):  # an infinite limit is one that nothing finite exceeds
            largest_L, median_L = np.nanmax(rows, axis=1), np.nanmedian(rows, axis=1)
            wanted_L = np.maximum(settings.factor_of_max * largest_L, settings.factor_of_median * median_L)
            limits_L[known_L] = np.minimum(wanted_L, settings.ceiling_of_median * median_L)
    return limits_L


def strict_limits_from(history: LayerHistory, settings: LayerLimits) -> Array:
    """Limit of each layer at a step that something struck: float64 [L], NaN where there is none yet."""
    strict_L, limits_L = np.full(len(history.names), math.nan), limits_from(history, settings)
    known_L = np.isfinite(history.accepted_LW).sum(axis=1) >= settings.num_warmup
    if known_L.any():
        rows = history.accepted_LW[known_L]
        with np.errstate(over="ignore"):
            bar_L = np.maximum(np.nanmax(rows, axis=1), settings.suspect_of_median * np.nanmedian(rows, axis=1))
        strict_L[known_L] = np.minimum(bar_L, limits_L[known_L])
    return strict_L


def learn(history: LayerHistory, norms_L: Array, settings: LayerLimits) -> LayerHistory:
    """The history after a step. `norms_L` [L] are those before clipping."""
    limits_L = limits_from(history, settings)
    usable_L = np.isfinite(norms_L) & (norms_L > 0)
    over_L = usable_L & (norms_L > limits_L)  # a limit that is NaN is never exceeded
    accepted_LW, num_accepted_L = history.accepted_LW.copy(), history.num_accepted_L.copy()
    pending_LK, num_pending_L = history.pending_LK.copy(), history.num_pending_L.copy()
    for layer in np.flatnonzero(usable_L & ~over_L):
        accepted_LW[layer, num_accepted_L[layer] % settings.window] = norms_L[layer]
        num_accepted_L[layer] += 1
        num_pending_L[layer] = 0
    for layer in np.flatnonzero(over_L):
        pending_LK[layer, num_pending_L[layer]] = norms_L[layer]
        num_pending_L[layer] += 1
        if num_pending_L[layer] == settings.regime_steps:
            accepted_LW[layer] = math.nan
            accepted_LW[layer, : settings.regime_steps] = pending_LK[layer]
            num_accepted_L[layer] = settings.regime_steps
            num_pending_L[layer] = 0
    return replace(
        history,
        accepted_LW=accepted_LW,
        num_accepted_L=num_accepted_L,
        pending_LK=pending_LK,
        num_pending_L=num_pending_L,
    )


def dump_history(history: LayerHistory) -> dict[str, Any]:
    """The history as data that JSON and torch.save(weights_only) can hold; NaN as None."""

    def rows(values: Array) -> list[list[float | None]]:
        return [[value if math.isfinite(value) else None for value in row] for row in values.tolist()]

    return {
        "version": _VERSION,
        "names": list(history.names),
        "accepted": rows(history.accepted_LW),
        "num_accepted": history.num_accepted_L.tolist(),
        "pending": rows(history.pending_LK),
        "num_pending": history.num_pending_L.tolist(),
    }


def load_history(data: Mapping[str, Any], names: tuple[str, ...], settings: LayerLimits) -> LayerHistory:
    """Inverse of `dump_history`. Raises ValueError where it is of other layers, another window or no history."""
    if data.get("version") != _VERSION or list(data.get("names", [])) != list(names):
        raise ValueError(
            "LayerClip: the saved state is of another model or version; expected one for the layers "
            f"{list(names)[:4]}...; start without it"
        )

    def rows(key: str, width: int) -> Array:
        values = [[math.nan if cell is None else float(cell) for cell in row] for row in data[key]]
        return np.array(values, dtype=np.float64).reshape(len(names), width)

    try:
        history = LayerHistory(
            names,
            rows("accepted", settings.window),
            np.array(data["num_accepted"], dtype=np.int64).reshape(len(names)),
            rows("pending", settings.regime_steps),
            np.array(data["num_pending"], dtype=np.int64).reshape(len(names)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"LayerClip: the saved state does not fit window {settings.window} and regime_steps "
            f"{settings.regime_steps}; use the settings it was saved with"
        ) from error
    if not ((history.num_accepted_L >= 0).all() and (history.num_pending_L >= 0).all()):
        raise ValueError("LayerClip: the saved state has negative counts; start without it")
    return replace(history, num_pending_L=np.minimum(history.num_pending_L, settings.regime_steps - 1))
