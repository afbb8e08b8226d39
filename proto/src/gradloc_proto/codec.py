"""Messages to bytes and back. The only place that knows the wire format (JSON in UTF-8)."""

from pydantic import TypeAdapter, ValidationError

from gradloc_proto.messages import MESSAGE_TYPES, SCHEMA_VERSION, AnyMessage, Message, type_name
from gradloc_proto.streams import MESSAGE_BYTES_MAX

_ADAPTER: TypeAdapter[Message] = TypeAdapter(AnyMessage)
_MAJOR = SCHEMA_VERSION.split(".", maxsplit=1)[0]
_KNOWN_TYPES = frozenset(type_name(message_type) for message_type in MESSAGE_TYPES)


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


def decode(data: bytes) -> Message:
    """Message of `data`. Raises MessageRejected with one line of reason; never echoes user text."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageRejected(f"{len(data)} bytes, over the limit of {MESSAGE_BYTES_MAX}")
    try:
        message = _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise MessageRejected(_reason(error)) from None
    except RecursionError:
        raise MessageRejected("nested too deeply") from None
    major = message.schema_version.split(".", maxsplit=1)[0]
    if major != _MAJOR:
        raise MessageRejected(
            f"schema version {message.schema_version[:20]!r}, expected {_MAJOR}.x; upgrade this reader first"
        )
    return message


def _reason(error: ValidationError) -> str:
    # Values are left out on purpose: a poison message may hold prompts.
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:120]
    if first["type"] == "union_tag_invalid":
        return "unknown message type; known: " + ", ".join(sorted(_KNOWN_TYPES))
    text = first["msg"].replace("\n", " ")[:160]
    return f"{where or 'message'}: {text} (expected a gradloc message of schema {_MAJOR}.x)"
