"""Tensors as the bytes of a safetensors file, piece by piece.

The library's own `save` holds the interpreter's lock while it copies (1 s for 800 MB, measured), and with it the
training loop that a snapshot is written behind. Here nothing is copied, and whoever hashes or writes a piece lets the
loop go on. Reading is the library's. Knows no store.
"""

import json
import struct
from collections.abc import Iterator, Mapping

import torch

PIECE_BYTES = 16 << 20  # what a remote file system copies at once, holding the lock
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
