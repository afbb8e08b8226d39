"""The remedies that somebody asks for in words, on the command line or over HTTP. Imports no torch until it must."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradloc_proto.whatif import WhatIfOptions

if TYPE_CHECKING:
    from gradloc.whatif import Change


@dataclass(frozen=True)
class Drop:
    """Tokens of one sequence to leave out; `token` None: all of them. Numbers as findings name them."""

    rank: int
    micro_batch: int
    sequence: int
    token: int | None = None

    def __str__(self) -> str:
        names = ("rank", "micro-batch", "sequence", "token")
        values = (self.rank, self.micro_batch, self.sequence, self.token)
        return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True) if value is not None)


@dataclass(frozen=True)
class Asked:
    """Bounds and places as numbers. Whether bounds can be meant is the remedy's to say."""

    drops: tuple[Drop, ...]
    token_clip: tuple[Any, ...] | None
    seq_clip: tuple[Any, ...] | None
    advantage_clip: float | None
    layer_clip: bool
    clip_norm: float | None
    skip_above: float | None

    def changes(self, healthy_layer_norms: Mapping[str, float]) -> "list[Change]":
        """What is tried; nothing where nothing was named. Raises ValueError."""
        from gradloc import whatif

        found: list[Change] = []
        if self.token_clip is not None:
            found.append(whatif.token_clip(*self.token_clip))
        if self.seq_clip is not None:
            found.append(whatif.seq_clip(*self.seq_clip))
        if self.advantage_clip is not None:
            found.append(whatif.advantage_clip(self.advantage_clip))
        if self.layer_clip:
            if not healthy_layer_norms:
                raise ValueError("layer-clip: the snapshot holds no healthy layer norms to compare with")
            found.append(whatif.layer_clip(healthy_layer_norms))
        if self.clip_norm is not None:
            found.append(whatif.norm_clip(self.clip_norm))
        if self.skip_above is not None:
            found.append(whatif.skip_above(self.skip_above))
        return found


def read(options: WhatIfOptions) -> Asked:
    """Raises ValueError, in one line."""
    return Asked(
        drops=tuple(_drop(text) for text in options.drop),
        token_clip=None if options.token_clip is None else _bounds("token-clip", options.token_clip),
        seq_clip=None if options.seq_clip is None else _bounds("seq-clip", options.seq_clip),
        advantage_clip=options.advantage_clip,
        layer_clip=options.layer_clip,
        clip_norm=options.clip_norm,
        skip_above=options.skip_above,
    )


def _bounds(name: str, text: str) -> tuple[Any, ...]:
    """LOW:HIGH or LOW:HIGH:WORD."""
    parts = text.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
        if len(parts) > 3:
            raise ValueError
    except (ValueError, IndexError):
        raise ValueError(
            f"{name} is {text[:40]!r}; expected LOW:HIGH such as 0.5:5, with one more word at most"
        ) from None
    return (low, high, *parts[2:])


def _drop(text: str) -> Drop:
    parts = text.split(":")
    if len(parts) not in (3, 4) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"drop is {text[:40]!r}; expected RANK:MICRO:SEQ or RANK:MICRO:SEQ:TOKEN such as 3:0:2:358")
    return Drop(*(int(part[:9]) for part in parts))
