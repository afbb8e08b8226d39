"""What messages are made of: kinds of numbers and texts with their bounds, and parts without identity.

Knows nothing of streams. NaN and infinities survive: they travel as the JSON strings "NaN",
"Infinity", "-Infinity".
"""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gradloc_proto.identities import RUN_ID_PATTERN

RunId = Annotated[str, Field(pattern=RUN_ID_PATTERN)]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]  # exact in JSON readers, fits a database's integer
Seconds = Annotated[float, Field(ge=0, le=253_402_300_799, allow_inf_nan=False)]  # up to the year 9999
ShortText = Annotated[str, Field(max_length=512)]
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number_again(value: object) -> object:
    # On the wire a number that is not finite is a string; where text is allowed too, it must come back as a number.
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


Evidence = Annotated[float | str | None, BeforeValidator(_number_again)]
Decision = Literal["go", "snapshot", "skip"]
Verdict = Literal[
    "token",
    "sequence",
    "layer",
    "group",
    "micro-batch",
    "rank",
    "data-source",
    "batch-wide",
    "accounting",
    "mask",
    "norm-overflow",
    "not-reproduced",
    "non-finite",
    "inconclusive",
]
VERDICTS: tuple[str, ...] = Verdict.__args__  # type: ignore[attr-defined]


class Part(BaseModel):
    """A piece of a message, without an identity of its own."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class TokenRef(Part):
    """A place in a step. `token` counts positions of the whole row (prompt included) from 0."""

    rank: Count
    micro_batch: Count
    sequence: Count
    token: Count


class Limits(Part):
    """Limits of a run at one version; None means "not known yet: do not judge"."""

    version: Count = 0
    norm: float | None = None
    healthy_norm: float | None = None
    layers: dict[str, float] = {}
    healthy_layers: dict[str, float] = {}
    energy: float | None = None
    healthy_energy: float | None = None
    gain: float | None = None
    healthy_gain: float | None = None


class Flag(Part):
    """One rule's objection to one step. `score` is value over baseline (inf when not finite)."""

    rule: ShortText
    series: ShortText
    value: float
    score: float
    baseline: float | None = None
    limit: float | None = None


class Spike(Part):
    """One abnormal step: derived id, its worst flag first."""

    spike_id: ShortText
    step: Count
    grad_norm: float
    healthy_norm: float | None = None
    limit: float | None = None
    flags: tuple[Flag, ...]
    snapshot: ShortText | None = None
