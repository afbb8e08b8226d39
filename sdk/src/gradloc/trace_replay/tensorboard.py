"""Scalars of a TensorBoard events file, read from its bytes: length-framed protocol buffers.

Needs neither TensorBoard nor protobuf; checksums are not verified. Format: TFRecord (length as uint64,
its CRC, the event, its CRC); event: step = field 2, summary = field 5; value: tag = 1, simple_value = 2,
tensor = 8 (float_val = 5, tensor_content = 4).
"""

import struct
from collections.abc import Iterator, Mapping

_FIXED = {1: 8, 5: 4}  # bytes of the wire types of fixed size


def is_events(data: bytes) -> bool:
    """Whether the bytes begin with an event that names its version, as every events file does."""
    return data[12:64].find(b"brain.Event:") >= 0


def records_of(data: bytes) -> list[Mapping[str, object]]:
    """One record a step: "step" and the scalars logged at it. A record cut off at the end is left out."""
    steps: dict[int, dict[str, object]] = {}
    for event in _frames(data):
        step, summaries = 0, []
        for field, value in _fields(event):
            if field == 2 and isinstance(value, int):
                step = value
            elif field == 5 and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for field, value in _fields(summary):
                scalar = _scalar(value) if field == 1 and isinstance(value, bytes) else None
                if scalar is not None:
                    steps.setdefault(step, {"step": step})[scalar[0]] = scalar[1]
    return list(steps.values())


def _frames(data: bytes) -> Iterator[bytes]:
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        end = place + 12 + length
        if end + 4 > len(data):
            return
        yield data[place + 12 : end]
        place = end + 4


def _scalar(value: bytes) -> tuple[str, float] | None:
    tag, scalar = None, None
    for field, item in _fields(value):
        if field == 1 and isinstance(item, bytes):
            tag = item.decode("utf-8", errors="replace")
        elif field == 2 and isinstance(item, bytes) and len(item) == 4:
            (scalar,) = struct.unpack("<f", item)
        elif field == 8 and isinstance(item, bytes):
            for inner, content in _fields(item):
                if inner in (4, 5) and isinstance(content, bytes) and len(content) == 4:
                    (scalar,) = struct.unpack("<f", content)
    return None if tag is None or scalar is None else (tag, float(scalar))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, varint or bytes) of a message; ends at the first byte that makes no sense."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if wire == 2:
            length, place = _varint(data, place)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            return
        if place + length > len(data):
            return
        yield key >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, place
