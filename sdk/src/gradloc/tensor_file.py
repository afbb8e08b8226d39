"""Tensors as the bytes of a safetensors file, piece by piece.

The library's own `save` holds the interpreter's lock while it copies (1 s for 800 MB, measured), and with it the
training loop that a snapshot is written behind. Here nothing is copied, and whoever hashes or writes a piece lets the
loop go on. Whole files are read by the library; piece by piece, for who keeps a part of each tensor, here. Knows no
store.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

PIECE_BYTES = 16 << 20  # what a remote file system copies at once, holding the lock
HEADER_BYTES_MAX = 100_000_000  # the library's own limit
_ALIGNMENT = 8  # of the header's length, by the format
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The file, in pieces of at most PIECE_BYTES; tensors are on the host. Raises ValueError for a format it has no
    name for."""
    # The widest first, so that every tensor starts where its elements may.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {}
    start = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}; expected one of {', '.join(map(str, _NAMES))}")
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    yield memoryview(struct.pack("<Q", len(encoded)) + encoded)
    for _, tensor in ordered:
        flat = tensor.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]


@dataclass(frozen=True)
class Described:
    """A tensor as the header tells of it; `start`: of its bytes among those of all tensors."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Stream(Protocol):
    def read(self, num_bytes: int, /) -> bytes: ...


def header(stream: Stream) -> tuple[Described, ...]:
    """What the file holds, in the order of its bytes. Raises ValueError."""
    (length,) = struct.unpack("<Q", _exactly(stream, 8))
    if length > HEADER_BYTES_MAX:
        raise ValueError(f"not a safetensors file: a header of {length} bytes")
    try:
        document = json.loads(_exactly(stream, length))
        found = [_described(name, told) for name, told in document.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("not a safetensors file: its header cannot be read") from None
    found.sort(key=lambda one: (one.start, one.numel))
    at = 0
    for one in found:
        if one.start != at:
            raise ValueError("not a safetensors file: its tensors do not lie one after the other")
        at += one.numel * one.dtype.itemsize
    return tuple(found)


def elements(
    stream: Stream, described: tuple[Described, ...], piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[Described, int, torch.Tensor]]:
    """After the header: (tensor, number of the first element, some elements of it, flat), to the file's end. Raises
    ValueError where that comes too early or too late."""
    for one in described:
        step = max(1, piece_bytes // one.dtype.itemsize)
        for at in range(0, one.numel, step):
            num = min(step, one.numel - at)
            yield one, at, torch.frombuffer(bytearray(_exactly(stream, num * one.dtype.itemsize)), dtype=one.dtype)
    if stream.read(1):
        raise ValueError("not a safetensors file: it is longer than its header says")


def _described(name: str, told: Any) -> Described:
    dtype = {known: dtype for dtype, known in _NAMES.items()}[told["dtype"]]
    shape = tuple(told["shape"])
    start, end = told["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError
    return Described(name, dtype, shape, start)


def _exactly(stream: Stream, num_bytes: int) -> bytes:
    parts = []
    while num_bytes and (data := stream.read(num_bytes)):
        parts.append(data)
        num_bytes -= len(data)
    if num_bytes:
        raise ValueError("truncated: it ends before its header says")
    return parts[0] if len(parts) == 1 else b"".join(parts)
