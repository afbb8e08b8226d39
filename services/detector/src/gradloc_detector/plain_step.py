"""Reads the commonest message, a step of the current schema, as fast as JSON can be read. The only door to msgspec.

Takes a part of what `codec` takes, with the same values: the type is made from StepObserved itself, and
whatever is unusual (a number as text, NaN, an unknown field, another version) is left to `codec`, which also
says what is wrong with it.
"""

import types
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol, Union, cast, get_args, get_origin

import msgspec
from pydantic.fields import FieldInfo

from gradloc_proto.messages import SCHEMA_VERSION, Part, StepObserved
from gradloc_proto.streams import MESSAGE_BYTES_MAX


class PlainStep(Protocol):
    """What a calm step is judged by; as in StepObserved, but for the layer norms (`norms_of`)."""

    run_id: str
    attempt: int
    ts: float
    step: int
    grad_norm: float
    layer_norms: object
    energy: float | None
    ratio_max: float | None
    kl: float | None
    reward_mean: float | None
    accuracy: float | None
    decision: str
    rules_hit: tuple[str, ...]
    num_events_dropped: int


class Reader:
    """Reads the steps that log exactly the layers `names`. Their run ids are the caller's to compare."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._decode = _decoder(names).decode

    def read(self, data: bytes) -> PlainStep | None:
        """The step in `data`, or None where it takes `codec` to tell."""
        if len(data) > MESSAGE_BYTES_MAX:
            return None
        try:
            step = self._decode(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        return cast(PlainStep, step) if step.schema_version == SCHEMA_VERSION else None


def norms_of(step: PlainStep) -> tuple[float, ...]:
    """Layer norms in the order of the reader's names."""
    return msgspec.structs.astuple(cast(msgspec.Struct, step.layer_norms))


@lru_cache(maxsize=256)  # runs of one architecture share it
def _decoder(names: tuple[str, ...]) -> "msgspec.json.Decoder[Any]":
    fields = {f"layer_{index}": name for index, name in enumerate(names)}
    norms = msgspec.defstruct(
        "LayerNorms", [(field, float) for field in fields], rename=fields, forbid_unknown_fields=True, gc=False
    )
    return msgspec.json.Decoder(_struct(StepObserved, layer_norms=norms))


def _struct(part: type[Part], **kinds: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A type that holds what `part` holds and has its bounds; `kinds` replaces fields, which are then required."""
    fields: list[Any] = []
    for name, field in part.model_fields.items():
        if name in kinds:
            fields.append((name, kinds[name]))
            continue
        kind = _kind(field.annotation, field.metadata)
        is_required = field.is_required() or name == "type"
        fields.append((name, kind) if is_required else (name, kind, field.get_default(call_default_factory=True)))
    return msgspec.defstruct(part.__name__, fields, kw_only=True, forbid_unknown_fields=True, gc=False)


def _kind(annotation: Any, metadata: list[Any]) -> Any:
    if metadata:
        bounds: dict[str, Any] = {}
        for item in metadata:
            if isinstance(item, FieldInfo):
                return _kind(annotation, [*item.metadata, *(other for other in metadata if other is not item)])
            # What has none of these is the pattern of run ids, and "finite", which all JSON numbers are.
            bounds |= {name: getattr(item, name) for name in ("ge", "le", "max_length") if hasattr(item, name)}
        kind = _kind(annotation, [])
        return Annotated[kind, msgspec.Meta(**bounds)] if bounds else kind
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], list(arguments[1:]))
    if origin in (Union, types.UnionType):
        return Union[tuple(_kind(item, []) for item in arguments)]  # noqa: UP007 (made of values)
    if origin in (dict, tuple):
        return origin[tuple(item if item is Ellipsis else _kind(item, []) for item in arguments)]
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return _struct(annotation)
    assert origin is Literal or annotation in (int, float, str, type(None)), (
        f"a kind without a plain form: {annotation}"
    )
    return annotation
