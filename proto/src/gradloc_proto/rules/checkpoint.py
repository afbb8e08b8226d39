"""The state of the rules as JSON and back, so that a saved state judges exactly as the one that was saved."""

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import asdict, fields

from gradloc_proto.rules import baseline
from gradloc_proto.rules.judgement import NUM_GLOBAL, RunState, Sensitivity
from gradloc_proto.rules.trends import CLIFF_BASE, CLIFF_RECENT, Cliff, Trends


def dump_state(state: RunState) -> dict[str, object]:
    """The state as JSON-able data, for checkpoints: about 150 bytes a series."""
    return {
        "sensitivity": asdict(state.sensitivity),
        "layer_names": list(state.layer_names),
        "series": {name: base64.b64encode(data).decode() for name, data in state.series.dump().items()},
        "num_steps": state.series.num_steps,
        "trends": {item.name: _plain(getattr(state.trends, item.name)) for item in fields(Trends)},
        "version": state.version,
        "version_scale": state.version_scale,
    }


def _plain(value: object) -> object:
    # Not asdict, which would copy every number of a cliff one by one.
    return {"values": list(value.values), "is_told": value.is_told} if isinstance(value, Cliff) else value


def load_state(data: Mapping[str, object]) -> RunState:
    """Inverse of `dump_state`. Raises ValueError when `data` is not such a state."""
    try:
        names = data["layer_names"]
        assert isinstance(names, list) and all(isinstance(name, str) for name in names), "layer names"
        version = data["version"]
        assert isinstance(version, int) and version >= 0, "version"
        sensitivity = Sensitivity(**{name: _number(value) for name, value in _mapping(data["sensitivity"]).items()})
        return RunState(
            sensitivity=sensitivity,
            layer_names=tuple(names),
            series=_series(data["series"], NUM_GLOBAL + len(names), int(_number(data["num_steps"]))),
            trends=_trends(_mapping(data["trends"])),
            version=version,
            version_scale=_number(data["version_scale"]),
        )
    except (KeyError, TypeError, ValueError, AssertionError, binascii.Error) as error:
        raise ValueError(f"not a saved state of the rules: {error!r}; expected what dump_state wrote") from error


def _series(value: object, num_series: int, num_steps: int) -> baseline.Baseline:
    arrays = {name: base64.b64decode(str(text), validate=True) for name, text in _mapping(value).items()}
    return baseline.load(arrays, num_series, num_steps)


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, dict), "not an object"
    return value


def _number(value: object) -> float:
    assert isinstance(value, int | float) and math.isfinite(value), "not a finite number"
    return float(value)


def _trends(value: Mapping[str, object]) -> Trends:
    known = {item.name for item in fields(Trends)}
    assert set(value) == known, "trends"
    cliffs = {name: _cliff(_mapping(value[name])) for name in ("reward", "accuracy")}
    numbers = {}
    for name in known - set(cliffs):
        item = value[name]
        assert item is None or isinstance(item, bool | int | float), name
        numbers[name] = item
    return Trends(**numbers, **cliffs)  # type: ignore[arg-type]


def _cliff(value: Mapping[str, object]) -> Cliff:
    values = value["values"]
    assert isinstance(values, list | tuple) and len(values) <= CLIFF_BASE + CLIFF_RECENT, "cliff"
    return Cliff(tuple(_number(item) for item in values), value["is_told"] is True)
