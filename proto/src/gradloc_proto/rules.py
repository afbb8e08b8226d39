"""Which step is abnormal for its run: the pure rules that trainer and detector apply alike.

    flags = judge(state, observation)           # before learning from it
    state = learn(state, observation, flags)
    limits = limits_of(state)                    # what the trainer compares its next step with

No I/O, no clock, no torch; a fixed amount of memory a series. Knows nothing of incidents.

Rule. A step is a spike when it is not finite, or when it exceeds both `factor_of_max` times the
largest and `factor_of_median` times the median of the last `window` accepted positive values: the
first makes it abnormal for this run, the second makes it material. Accepted means finite, positive
and not flagged, so neither a spike nor a NaN nor an exact zero can poison the baseline. A new level
that lasts `regime_steps` flagged steps becomes the baseline.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gradloc_proto.messages import Flag, Limits, StepObserved

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Settings of the rules. `scale` is the one knob for users: 2 tolerates spikes twice as large."""

    window: int = 32
    num_warmup: int = 8
    factor_of_max: float = 2.0
    factor_of_median: float = 4.0
    layer_factor_of_max: float = 4.0
    layer_factor_of_median: float = 8.0
    regime_steps: int = 12
    scale: float = 1.0


DEFAULT_SENSITIVITY = Sensitivity()
GLOBAL_SERIES = ("norm", "energy", "gain")


@dataclass(frozen=True, slots=True)
class Observation:
    """The numbers of one step that the rules look at; NaN in `layer_norms_L` means "not logged"."""

    step: int
    norm: float
    energy: float | None
    layer_names: tuple[str, ...]
    layer_norms_L: Array  # noqa: N815  [L]

    @property
    def gain(self) -> float | None:
        """norm² / energy, or None where it has no meaning."""
        if self.energy is None or not self.energy > 0 or not math.isfinite(self.energy):
            return None
        return self.norm * self.norm / self.energy if math.isfinite(self.norm) else None


@dataclass(frozen=True, slots=True)
class SeriesBaseline:
    """The last accepted values of S series. `values_SW` [S, W], NaN where there is none yet."""

    values_SW: Array  # noqa: N815
    next_slot: int = 0


@dataclass(frozen=True, slots=True)
class RunState:
    """Baselines of one run. Grows only with the number of layers."""

    sensitivity: Sensitivity = DEFAULT_SENSITIVITY
    layer_names: tuple[str, ...] = ()
    globals: SeriesBaseline = field(default_factory=lambda: _empty(len(GLOBAL_SERIES), DEFAULT_SENSITIVITY.window))
    layers: SeriesBaseline = field(default_factory=lambda: _empty(0, DEFAULT_SENSITIVITY.window))
    pending_regime: tuple[float, ...] = ()
    version: int = 0


def observation_of(message: StepObserved) -> Observation:
    """The rules' view of a step message."""
    return Observation(
        step=message.step,
        norm=message.grad_norm,
        energy=message.energy,
        layer_names=tuple(message.layer_norms),
        layer_norms_L=np.fromiter(message.layer_norms.values(), dtype=np.float64, count=len(message.layer_norms)),
    )


def judge(state: RunState, observation: Observation) -> tuple[Flag, ...]:
    """Flags of one step against what was learnt before it, worst first; empty when healthy."""
    limits = limits_of(state)
    flags = list(_judge_norm(limits, observation))
    if flags and flags[0].rule == "non-finite":
        return tuple(flags)
    layer_flags = []
    for name, value in zip(observation.layer_names, observation.layer_norms_L.tolist(), strict=True):
        limit = limits.layers.get(name)
        if limit is not None and value > limit:
            baseline = limits.healthy_layers[name]
            layer_flags.append(
                Flag(rule="layer", series=name, value=value, score=value / baseline, baseline=baseline, limit=limit)
            )
    layer_flags.sort(key=lambda flag: -flag.score)
    return tuple(flags + layer_flags)


def _judge_norm(limits: Limits, observation: Observation) -> tuple[Flag, ...]:
    norm = observation.norm
    if not math.isfinite(norm):
        return (
            Flag(
                rule="non-finite",
                series="norm",
                value=norm,
                score=math.inf,
                baseline=limits.healthy_norm,
                limit=limits.norm,
            ),
        )
    if limits.norm is None or limits.healthy_norm is None or norm <= limits.norm:
        return ()
    score = norm / limits.healthy_norm
    return (Flag(rule="norm", series="norm", value=norm, score=score, baseline=limits.healthy_norm, limit=limits.norm),)


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


def learn(state: RunState, observation: Observation, flags: tuple[Flag, ...]) -> RunState:
    """The state after one step. A flagged step teaches nothing until its level has lasted."""
    state = _with_layers(state, observation.layer_names)
    if any(flag.rule == "norm" for flag in flags):
        pending = (*state.pending_regime, observation.norm)[-state.sensitivity.regime_steps :]
        if len(pending) < state.sensitivity.regime_steps:
            return replace(state, pending_regime=pending)
        fresh = _empty(len(GLOBAL_SERIES), state.sensitivity.window)
        values = fresh.values_SW.copy()
        values[0, : len(pending)] = pending
        return replace(
            state,
            globals=SeriesBaseline(values, len(pending)),
            layers=_empty(len(state.layer_names), state.sensitivity.window),
            pending_regime=(),
            version=observation.step + 1,
        )
    if any(flag.rule == "non-finite" for flag in flags):
        return state
    gain = observation.gain
    row = np.array(
        [
            observation.norm,
            math.nan if observation.energy is None else observation.energy,
            math.nan if gain is None else gain,
        ]
    )
    flagged_layers = {flag.series for flag in flags if flag.rule == "layer"}
    layer_row = np.array(
        [
            math.nan if name in flagged_layers else value
            for name, value in zip(observation.layer_names, observation.layer_norms_L.tolist(), strict=True)
        ]
    )
    order = {name: index for index, name in enumerate(observation.layer_names)}
    aligned = np.array([layer_row[order[name]] if name in order else math.nan for name in state.layer_names])
    return replace(
        state,
        globals=_push(state.globals, row),
        layers=_push(state.layers, aligned),
        pending_regime=(),
        version=observation.step + 1,
    )


def limits_of(state: RunState) -> Limits:
    """Limits for the next step; None for a series until `num_warmup` values were accepted."""
    sensitivity = state.sensitivity
    limit_S, median_S = _limits(state.globals, sensitivity, sensitivity.factor_of_max, sensitivity.factor_of_median)
    layer_limit_L, layer_median_L = _limits(
        state.layers, sensitivity, sensitivity.layer_factor_of_max, sensitivity.layer_factor_of_median
    )
    known = np.isfinite(layer_limit_L)

    def value(array_S: Array, index: int) -> float | None:
        return float(array_S[index]) if math.isfinite(array_S[index]) else None

    return Limits(
        version=state.version,
        norm=value(limit_S, 0),
        healthy_norm=value(median_S, 0),
        energy=value(limit_S, 1),
        healthy_energy=value(median_S, 1),
        gain=value(limit_S, 2),
        healthy_gain=value(median_S, 2),
        layers={name: float(layer_limit_L[i]) for i, name in enumerate(state.layer_names) if known[i]},
        healthy_layers={name: float(layer_median_L[i]) for i, name in enumerate(state.layer_names) if known[i]},
    )


def _limits(baseline: SeriesBaseline, sensitivity: Sensitivity, of_max: float, of_median: float) -> tuple[Array, Array]:
    values_SW = baseline.values_SW
    num_S = np.sum(np.isfinite(values_SW), axis=1)
    known_S = num_S >= sensitivity.num_warmup
    limit_S = np.full(len(values_SW), math.nan)
    median_S = np.full(len(values_SW), math.nan)
    if known_S.any():
        rows = values_SW[known_S]
        median_S[known_S] = np.nanmedian(rows, axis=1)
        # With few values the largest of them says less about the largest to come.
        margin_S = 1.0 + sensitivity.num_warmup / num_S[known_S] * 0.5
        limit_S[known_S] = sensitivity.scale * np.maximum(
            of_max * margin_S * np.nanmax(rows, axis=1), of_median * median_S[known_S]
        )
    return limit_S, median_S


def _empty(num_series: int, window: int) -> SeriesBaseline:
    return SeriesBaseline(np.full((num_series, window), math.nan))


def _push(baseline: SeriesBaseline, row_S: Array) -> SeriesBaseline:
    values = baseline.values_SW.copy()
    values[:, baseline.next_slot % values.shape[1]] = np.where(np.isfinite(row_S) & (row_S > 0), row_S, math.nan)
    return SeriesBaseline(values, (baseline.next_slot + 1) % values.shape[1])


def _with_layers(state: RunState, names: tuple[str, ...]) -> RunState:
    fresh = [name for name in names if name not in set(state.layer_names)]
    if not fresh:
        return state
    grown = _empty(len(fresh), state.sensitivity.window)
    values = np.concatenate([state.layers.values_SW, grown.values_SW])
    return replace(
        state,
        layer_names=(*state.layer_names, *fresh),
        layers=SeriesBaseline(values, state.layers.next_slot),
    )


def dump_state(state: RunState) -> dict[str, object]:
    """The state as JSON-able data, for checkpoints; NaN as None."""

    def rows(baseline: SeriesBaseline) -> list[list[float | None]]:
        return [[value if math.isfinite(value) else None for value in row] for row in baseline.values_SW.tolist()]

    return {
        "sensitivity": {name: getattr(state.sensitivity, name) for name in Sensitivity.__slots__},
        "layer_names": list(state.layer_names),
        "globals": {"values": rows(state.globals), "next_slot": state.globals.next_slot},
        "layers": {"values": rows(state.layers), "next_slot": state.layers.next_slot},
        "pending_regime": list(state.pending_regime),
        "version": state.version,
    }


def load_state(data: dict[str, object]) -> RunState:
    """Inverse of `dump_state`. Raises ValueError when `data` is not such a state."""

    def baseline(value: object, window: int) -> SeriesBaseline:
        assert isinstance(value, dict)
        rows = [[math.nan if cell is None else float(cell) for cell in row] for row in value["values"]]
        array = np.array(rows, dtype=np.float64).reshape(len(rows), window)
        return SeriesBaseline(array, int(value["next_slot"]))

    try:
        settings = data["sensitivity"]
        names = data["layer_names"]
        pending = data["pending_regime"]
        version = data["version"]
        assert isinstance(settings, dict) and isinstance(names, list)
        assert isinstance(pending, list) and isinstance(version, int)
        sensitivity = Sensitivity(**settings)
        return RunState(
            sensitivity=sensitivity,
            layer_names=tuple(str(name) for name in names),
            globals=baseline(data["globals"], sensitivity.window),
            layers=baseline(data["layers"], sensitivity.window),
            pending_regime=tuple(float(value) for value in pending),
            version=version,
        )
    except (KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"not a saved state of the rules: {error!r}; expected what dump_state wrote") from error
