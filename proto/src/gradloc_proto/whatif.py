"""What is asked of the what-if app, and the lines that it answers with.

One request, many lines (application/x-ndjson): what is waited for, how far the work is, and last the answer or the
problem. A replica that must first be started is seen starting. Knows no remedy: its bounds are read where they apply.
"""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict, StrictBool

from gradloc_proto.parts import Count, Part, RunId, ShortText

NUM_DROPS_MAX = 64
LINE_LENGTH_MAX = 1 << 20
MEDIA_TYPE = "application/x-ndjson"
Words = Annotated[str, Field(max_length=80)]
Size = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]


class WhatIfOptions(Part):
    """The remedies to try, as `gradloc whatif` takes them; all of them with their defaults where none is named."""

    model_config = ConfigDict(extra="forbid")

    drop: Annotated[tuple[Words, ...], Field(max_length=NUM_DROPS_MAX)] = ()
    token_clip: Words | None = None
    seq_clip: Words | None = None
    advantage_clip: Size | None = None
    layer_clip: StrictBool = False
    clip_norm: Size | None = None
    skip_above: Size | None = None
    limit: Size | None = None


class WhatIfRequest(WhatIfOptions):
    """Names a step; where its snapshot lies is the app's to know."""

    run: RunId
    attempt: Count = 0
    step: Count


class WhatIfProblem(Part):
    """Why there is no answer."""

    status: int
    title: str
    detail: ShortText


class WhatIfLine(Part):
    """One line. `answer` and `problem` are last ones. started: a replica was started for this request."""

    waited_s: float
    stage: str | None = None
    fraction: float | None = None
    started: bool | None = None
    answer: dict[str, Any] | None = None
    problem: WhatIfProblem | None = None

    @property
    def is_last(self) -> bool:
        return self.answer is not None or self.problem is not None
