"""Which step is abnormal for its run: judge it by what was learnt before, learn from it, tell the limits.

No I/O, no clock, no torch; a fixed amount of memory a series. Knows nothing of incidents.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gradloc_proto.messages import Flag, Limits
from gradloc_proto.rules import baseline
from gradloc_proto.rules.baseline import UNITS_PER_OCTAVE, Baseline, Factors, Floats, amount_of
from gradloc_proto.rules.observation import Observation
from gradloc_proto.rules.trends import Trends

Sensitivity = Factors
DEFAULT_SENSITIVITY = Sensitivity()

# Rows of the baselines: the amplitudes of an observation, the spread between layers, then the layers.
NORM, ENERGY, GAIN, RATIO, KL, SPREAD = range(6)
NUM_GLOBAL = 6
# How many octaves above the norm's factors a series must be. Hundreds of layers are judged at every
# step, so each must be a hundred times quieter than the norm; ratio and KL are heavy-tailed by nature.
_TOLERANCE_OCTAVES = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
_LAYER_TOLERANCE_OCTAVES = 1.0
# Energy and gain tell the kind of a spike; alone, without the norm, they must be clearer still.
_ALONE_UNITS = 1.0 * UNITS_PER_OCTAVE
_DRIFT_STEPS = 3
# Below these a drift is not material: an importance ratio that every clip removes, nats a token.
_DRIFT_MIN = {RATIO: 10.0, KL: 0.05}
SPREAD_LAYERS_MIN = 4
_SPREAD_MIN_UNITS = 2.0 * UNITS_PER_OCTAVE
_JUDGED = "_judged"


@dataclass(frozen=True)
class RunState:
    """Baselines of one run. Grows only with the number of layers."""

    sensitivity: Sensitivity = DEFAULT_SENSITIVITY
    layer_names: tuple[str, ...] = ()
    series: Baseline = field(default_factory=lambda: baseline.empty(NUM_GLOBAL))
    trends: Trends = field(default_factory=Trends)
    version: int = 0  # one more than the last step that changed the limits
    version_scale: float = 1.0  # the sensitivity's scale at that step

    @cached_property
    def rows(self) -> dict[str, int]:
        """Row of each layer."""
        return {name: row for row, name in enumerate(self.layer_names, NUM_GLOBAL)}

    @cached_property
    def margin_S(self) -> Floats:
        """What a series must exceed its limit at scale 1 by, in units."""
        octaves_S = np.full(len(self.series), _LAYER_TOLERANCE_OCTAVES)
        octaves_S[:NUM_GLOBAL] = _TOLERANCE_OCTAVES
        return np.asarray((octaves_S + math.log2(self.sensitivity.scale)) * UNITS_PER_OCTAVE)

    @cached_property
    def limits(self) -> Limits:
        """See `limits_of`."""
        limits = np.exp2((self.series.limit_S + self.margin_S) / UNITS_PER_OCTAVE).tolist()
        healthy = np.exp2(self.series.median_S.astype(np.float64) / UNITS_PER_OCTAVE).tolist()

        def known(value: float, power: int = 1) -> float | None:
            return None if math.isnan(value) else value**power

        pairs = zip(self.layer_names, limits[NUM_GLOBAL:], healthy[NUM_GLOBAL:], strict=True)
        layers = [(name, limit, middle) for name, limit, middle in pairs if limit == limit]
        return Limits(
            version=self.version,
            norm=known(limits[NORM]),
            healthy_norm=known(healthy[NORM]),
            energy=known(limits[ENERGY], 2),
            healthy_energy=known(healthy[ENERGY], 2),
            gain=known(limits[GAIN], 2),
            healthy_gain=known(healthy[GAIN], 2),
            layers={name: limit for name, limit, _ in layers},
            healthy_layers={name: middle for name, _, middle in layers},
        )


def judge(state: RunState, observation: Observation) -> tuple[Flag, ...]:
    """Flags of one step against what was learnt before it, worst first; empty when healthy."""
    value_S = _values(state, observation)
    flags = _not_finite(state, observation)
    high_S = state.series.exceeds(value_S, state.margin_S)
    if not flags and high_S.any():
        flags = _stand_out(state, observation, value_S, high_S)
    is_high = bool(high_S[NORM])
    trends, slow = state.trends.after(observation, state.series, row=NORM, is_high=is_high)
    # Whoever learns from this step next need not work it out again.
    observation.__dict__[_JUDGED] = (state, value_S, is_high, trends)
    return (*flags, *slow)


def learn(state: RunState, observation: Observation, flags: tuple[Flag, ...]) -> RunState:
    """The state after one step, whose flags `judge` gave. What stands out teaches nothing until it has lasted."""
    state = _with_layers(state, observation.layer_names)
    judged_state, value_S, is_high, trends = observation.__dict__.pop(_JUDGED, (None, None, None, None))
    if judged_state is not state:
        value_S = _values(state, observation)
        is_high = bool(value_S[NORM] > state.series.limit_S[NORM] + state.margin_S[NORM])
        trends = None
    if not is_high and any(flag.rule == "norm" for flag in flags):
        is_high, trends = True, None
    if trends is None:
        trends, _ = state.trends.after(observation, state.series, row=NORM, is_high=is_high)
    factors = state.sensitivity
    if not math.isfinite(observation.norm) or any(flag.rule == "non-finite" for flag in flags):
        return replace(state, trends=trends)
    series = state.series.after(value_S, factors, state.margin_S, is_suspect=is_high)
    # Limits that are not renewed are the very same arrays.
    is_same = series.limit_S is state.series.limit_S or (
        np.array_equal(series.limit_S, state.series.limit_S, equal_nan=True)
        and np.array_equal(series.median_S, state.series.median_S, equal_nan=True)
    )
    if is_same and factors.scale == state.version_scale:
        after = replace(state, series=series, trends=trends)
        inherit(after, state, "limits")
    else:
        # The version must grow, whatever the step's number: readers keep the highest.
        version = max(state.version, observation.step) + 1
        after = replace(state, series=series, trends=trends, version=version, version_scale=factors.scale)
    inherit(after, state, "rows", "margin_S")
    return after


def limits_of(state: RunState) -> Limits:
    """Limits for the next step; None for a series until enough values were accepted."""
    limits = state.limits
    # `version` may have been raised from outside, by a detector that read steps out of order.
    return limits if limits.version == state.version else limits.model_copy(update={"version": state.version})


def breaches(limits: Limits, norm: float, layer_norms: dict[str, float]) -> tuple[str, ...]:
    """Rules that a step breaks under published limits: the trainer's own judgement.

    Empty when healthy or when the limits are not known yet; a norm that is not finite always breaks one.
    """
    hit = []
    if not math.isfinite(norm):
        hit.append("non-finite")
    elif limits.norm is not None and norm > limits.norm:
        hit.append("norm")
    if any(value > limits.layers.get(name, math.inf) for name, value in layer_norms.items()):
        hit.append("layer")
    return tuple(hit)


def inherit(after: RunState, before: RunState, *names: str) -> None:
    """Give `after` what was derived from unchanged parts of `before`: deriving it again costs more than judging."""
    for name in names:
        if name in before.__dict__:
            after.__dict__[name] = before.__dict__[name]


def _with_layers(state: RunState, names: tuple[str, ...]) -> RunState:
    if names == state.layer_names:
        return state
    fresh = tuple(name for name in dict.fromkeys(names) if name not in state.rows)
    if not fresh:
        return state
    return replace(state, layer_names=(*state.layer_names, *fresh), series=state.series.grown(len(fresh)))


def _values(state: RunState, observation: Observation) -> Floats:
    """The step's value of each series, in units; NaN for what was not logged or is not known to the state."""
    value_S = np.empty(len(state.series))
    value_S[:SPREAD] = observation.amplitude_units_A
    if observation.layer_names == state.layer_names:
        value_S[NUM_GLOBAL:] = observation.layer_units_L
    else:
        value_S[NUM_GLOBAL:] = math.nan
        for name, value in zip(observation.layer_names, observation.layer_units_L.tolist(), strict=True):
            if name in state.rows:
                value_S[state.rows[name]] = value
    value_S[SPREAD] = _spread(value_S[NUM_GLOBAL:] - state.series.median_S[NUM_GLOBAL:])
    return value_S


def _spread(growth_L: Floats) -> float:
    """How far the layer that grew most is above the middle one, in units; NaN with too few layers."""
    growth_K = growth_L[np.isfinite(growth_L)]
    if len(growth_K) < SPREAD_LAYERS_MIN:
        return math.nan
    growth_K.sort()
    return float(growth_K[-1] - growth_K[len(growth_K) // 2])


def _not_finite(state: RunState, observation: Observation) -> list[Flag]:
    found = {} if math.isfinite(observation.norm) else {"norm": observation.norm}
    infinite_L = np.isinf(observation.layer_norms_L)  # NaN means "not logged"
    if infinite_L.any():
        for index in np.flatnonzero(infinite_L).tolist():
            found[observation.layer_names[index]] = float(observation.layer_norms_L[index])
    if not found:
        return []
    limits = limits_of(state)
    healthy: dict[str, float | None] = {"norm": limits.healthy_norm, **limits.healthy_layers}
    limit: dict[str, float | None] = {"norm": limits.norm, **limits.layers}
    return [
        Flag(
            rule="non-finite",
            series=name,
            value=value,
            score=math.inf,
            baseline=healthy.get(name),
            limit=limit.get(name),
        )
        for name, value in found.items()
    ]


def _stand_out(state: RunState, observation: Observation, value_S: Floats, high_S: np.ndarray) -> list[Flag]:
    """Flags of the series that are above their limits, for those in which it is news."""
    middle_S = state.series.median_S
    limit_S = state.series.limit_S + state.margin_S
    news_S = high_S & state.series.is_news(value_S)

    def flag(rule: str, series: str, row: int, value: float | None = None, power: int = 1) -> Flag:
        return Flag(
            rule=rule,
            series=series,
            value=amount_of(power * value_S[row]) if value is None else value,
            score=amount_of(power * (value_S[row] - middle_S[row])),
            baseline=amount_of(power * middle_S[row]),
            limit=amount_of(power * limit_S[row]),
        )

    flags = [flag("norm", "norm", NORM, observation.norm)] if news_S[NORM] else []
    rows = (np.flatnonzero(news_S[NUM_GLOBAL:]) + NUM_GLOBAL).tolist()
    layers = [flag("layer", state.layer_names[row - NUM_GLOBAL], row) for row in rows]
    flags += sorted(layers, key=lambda found: -found.score)
    # On a step that hardly learns (no advantage in any group) the parts of the gradient mean little.
    is_material = value_S[NORM] >= middle_S[NORM]
    for row, name, value in ((ENERGY, "energy", observation.energy), (GAIN, "gain", observation.gain)):
        is_clear = news_S[row] and is_material and value_S[row] > limit_S[row] + _ALONE_UNITS
        if is_clear or (high_S[row] and news_S[NORM]):
            flags.append(flag(name, name, row, value, power=2))
    if news_S[SPREAD] and is_material and value_S[SPREAD] > _SPREAD_MIN_UNITS:
        growth_L = value_S[NUM_GLOBAL:] - middle_S[NUM_GLOBAL:]
        flags.append(flag("spread", state.layer_names[int(np.nanargmax(growth_L))], SPREAD))
    for row, name, value in ((RATIO, "ratio", observation.ratio_max), (KL, "kl", observation.kl)):
        is_lasting = state.series.streak_S[row] == _DRIFT_STEPS - 1
        if high_S[row] and is_lasting and value is not None and value > _DRIFT_MIN[row]:
            flags.append(flag(f"{name}-drift", name, row, value))
    return flags
