"""Messages to bytes and back. The only place that knows the wire format (JSON in UTF-8).

Bytes from a stream are not trusted: what is wrong with them is said without repeating any of them.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from gradloc_proto.messages import MESSAGE_TYPES, SCHEMA_VERSION, AnyMessage, Message, type_name
from gradloc_proto.streams import MESSAGE_BYTES_MAX

_ADAPTER: TypeAdapter[Message] = TypeAdapter(AnyMessage)
_MAJOR = SCHEMA_VERSION.split(".", maxsplit=1)[0]
_KNOWN_TYPES = frozenset(type_name(message_type) for message_type in MESSAGE_TYPES)
_VERSION = re.compile(r"([0-9]{1,4})\.[0-9]{1,4}")


def _names(schema: object) -> Iterator[str]:
    """Every property name in a JSON Schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for value in schema.values():
            yield from _names(value)


_KNOWN_NAMES = _KNOWN_TYPES | frozenset(_names(_ADAPTER.json_schema()))


class _Head(BaseModel):
    schema_version: str


class MessageRejected(ValueError):
    """Bytes that are not a message this version can read; the text says why and what was expected."""


def encode(message: Message) -> bytes:
    """Bytes of a message. Raises ValueError when it is larger than a stream accepts."""
    data = message.model_dump_json(exclude_none=True).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise ValueError(
            f"message {type(message).__name__} is {len(data)} bytes, over the limit of {MESSAGE_BYTES_MAX}; "
            "send fewer layers or a shorter sequence window"
        )
    return data


def plain_number(value: float) -> float | str:
    """A number as strict JSON carries it, here and in messages: NaN and infinities as strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def plain(value: Any) -> Any:
    """Lists, tuples and dicts as strict JSON takes them: `plain_number` wherever there is a float in them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain_number(value) if isinstance(value, float) else value


def decode(data: bytes) -> Message:
    """Message of `data`. Raises MessageRejected with one line of reason; never echoes user text."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageRejected(f"{len(data)} bytes, over the limit of {MESSAGE_BYTES_MAX}")
    try:
        message = _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise MessageRejected(_version_reason(data) or _reason(error)) from None
    reason = _version_objection(message.schema_version)
    if reason is not None:
        raise MessageRejected(reason)
    return message


def _version_objection(schema_version: str) -> str | None:
    version = _VERSION.fullmatch(schema_version)
    if version is None:
        return f"schema version is not MAJOR.MINOR; expected {_MAJOR}.x"
    if version[1] != _MAJOR:
        return f"schema version {version[0]}, expected {_MAJOR}.x; upgrade this reader first"
    return None


def _version_reason(data: bytes) -> str | None:
    # A message of another major version fails in some field: the version is what its reader should be told.
    try:
        return _version_objection(_Head.model_validate_json(data).schema_version)
    except ValidationError:
        return None


def _reason(error: ValidationError) -> str:
    # Values, and keys that a sender made up, are left out on purpose: a poison message may hold prompts.
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) if isinstance(part, int) or part in _KNOWN_NAMES else "*" for part in first["loc"])[:120]
    if first["type"] == "union_tag_invalid":
        return "unknown message type; known: " + ", ".join(sorted(_KNOWN_TYPES))
    text = first["msg"].replace("\n", " ")[:160]
    return f"{where or 'message'}: {text} (expected a gradloc message of schema {_MAJOR}.x)"
