"""A message of every type with every field set: bytes to test a reader with, in any language.

`fill` walks the fields of a message type and asks a source for each value, so tests can draw
random messages with the same walk. Knows types and bounds, nothing of what the fields mean.
"""

import math
import re
import types
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradloc_proto.identities import RUN_ID_PATTERN
from gradloc_proto.messages import MESSAGE_TYPES, SCHEMA_VERSION, Message

_Model = TypeVar("_Model", bound=BaseModel)


class Source(Protocol):
    """Where the values come from."""

    def integer(self, low: int, high: int) -> int:
        """An integer between `low` and `high`."""

    def number(self, low: float, high: float, *, finite: bool) -> float:
        """A float between `low` and `high`; where `finite` is false, also one that is not."""

    def text(self, pattern: str | None, length_max: int) -> str:
        """A text that matches `pattern`."""

    def boolean(self) -> bool:
        """True or false."""

    def one_of(self, options: Sequence[Any]) -> Any:
        """One of `options`, never empty."""

    def size(self) -> int:
        """How many items a list or mapping gets."""


class EverythingOnce:
    """Deterministic: everything present, numbers in turn plain and not finite."""

    def __init__(self) -> None:
        self._counter = count(1)

    def integer(self, low: int, high: int) -> int:
        return min(high, max(low, 0) + next(self._counter))

    def number(self, low: float, high: float, *, finite: bool) -> float:
        if finite:
            return min(high, max(low, 0.5))
        return (0.25, math.nan, math.inf, -math.inf, 1e-300)[next(self._counter) % 5]

    def text(self, pattern: str | None, length_max: int) -> str:
        return "run-1" if pattern == RUN_ID_PATTERN else f'text {next(self._counter)} · "<th"'

    def boolean(self) -> bool:
        return True

    def one_of(self, options: Sequence[Any]) -> Any:
        # None comes last in an Optional, and the first of a Literal is often its default.
        usable = [option for option in options if option is not type(None)]
        return usable[next(self._counter) % len(usable)]

    def size(self) -> int:
        return 2


def sample(message_type: type[Message]) -> Message:
    """The message of `message_type` with every field set."""
    return fill(message_type, EverythingOnce())


def samples() -> Iterable[Message]:
    """One sample of each message type."""
    return (sample(message_type) for message_type in MESSAGE_TYPES)


def fill(model: type[_Model], source: Source) -> _Model:
    """An instance of `model` whose fields all come from `source`; `type` and `schema_version` keep their defaults.

    Raises TypeError for a field of a kind that it does not know.
    """
    values = {}
    for name, info in model.model_fields.items():
        if name == "schema_version" and info.default == SCHEMA_VERSION:
            continue
        values[name] = _value(info.annotation, list(info.metadata), source)
    return model(**values)


def _value(annotation: Any, metadata: list[Any], source: Source) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0], [*metadata, *_flat(arguments[1:])], source)
    if origin in (Union, types.UnionType):
        chosen = source.one_of(arguments)
        return None if chosen is type(None) else _value(chosen, metadata, source)
    if origin is Literal:
        return source.one_of(arguments)
    if origin is dict:
        return {_value(arguments[0], [], source): _value(arguments[1], [], source) for _ in range(source.size())}
    if origin is tuple:
        items = arguments[:1] * source.size() if arguments[-1] is Ellipsis else arguments
        return tuple(_value(item, [], source) for item in items)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return fill(annotation, source)
    return _leaf(annotation, metadata, source)


def _leaf(annotation: Any, metadata: list[Any], source: Source) -> Any:
    def bound(name: str, default: Any) -> Any:
        found = [getattr(item, name) for item in metadata if getattr(item, name, None) is not None]
        return found[0] if found else default

    if annotation is bool:
        return source.boolean()
    if annotation is int:
        return source.integer(bound("ge", -(2**53)), bound("le", 2**53 - 1))
    if annotation is float:
        low, high = bound("ge", -math.inf), bound("le", math.inf)
        finite = bound("allow_inf_nan", True) is False or math.isfinite(low) or math.isfinite(high)
        return source.number(low, high, finite=finite)
    if annotation is str:
        pattern = bound("pattern", None)
        return source.text(pattern.pattern if isinstance(pattern, re.Pattern) else pattern, bound("max_length", 512))
    raise TypeError(f"no sample value for a field of type {annotation!r}")


def _flat(metadata: Iterable[Any]) -> Iterable[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)
