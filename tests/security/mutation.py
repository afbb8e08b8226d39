"""Inputs near to what is expected: a valid one with some bytes changed, doubled, cut out, or taken from another."""

import random
from collections.abc import Iterator, Sequence

_SPICES = (
    b"NaN", b"-Infinity", b"1e400", b"-0", b"0", b"null", b"true", b"[]", b"{}", b'""', b"9" * 25, b"9" * 400,
    b"9" * 5_000, b"-1", b"9223372036854775808", b'"\\ud800"', b"\\u0000", b"\x00", b"\xff\xfe", b"\xed\xa0\x80",
    b"../", b"..\\", b"%00", b"\x1b[2J", b"=cmd|' /C calc'!A1", b"[" * 2_000, b'{"a":' * 2_000, b"'", b'"', b"\\",
    b"\n", b"\r", b",", b":", b"-", b"0001-01-01 00:00:00", b"9999-12-31T23:59:60", b"F8_E4M3", b"1_0",
    b"\xe2\x80\xae", b"x" * 5_000,
)  # fmt: skip
_EDITS_MAX = 6


def inputs(seed: int, seeds: Sequence[bytes], count: int) -> Iterator[bytes]:
    """`count` inputs; the same for the same seed."""
    for number in range(count):
        yield mutated(random.Random(f"{seed}/{number}"), seeds)


def mutated(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.randint(1, _EDITS_MAX)):
        start = dice.randint(0, len(data))
        end = min(len(data), start + dice.choice((1, 1, 2, 8, dice.randint(0, len(data)))))
        match dice.randrange(7):
            case 0 if start < len(data):
                data[start] = dice.randrange(256)
            case 1:
                data[start:end] = b""
            case 2:
                data[start:start] = dice.choice(_SPICES)
            case 3:
                data[start:end] = dice.choice(_SPICES)
            case 4:
                data[start:start] = data[start:end]
            case 5:
                other = dice.choice(seeds)
                place = dice.randint(0, len(other))
                data[start:end] = other[place : place + dice.randint(0, 64)]
            case _:
                data[start:start] = dice.randbytes(dice.randint(1, 16))
    return bytes(data)
