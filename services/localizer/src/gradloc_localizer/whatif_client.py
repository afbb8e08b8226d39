"""Asks the what-if app and follows its lines: what it waits for, how far it is, its answer. Knows no Ray."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from gradloc_proto.whatif import LINE_LENGTH_MAX, MEDIA_TYPE, WhatIfLine, WhatIfOptions, WhatIfRequest

TOKEN_VARIABLE = "GRADLOC_WHATIF_TOKEN"
SILENCE_MAX_S = 900.0  # one replay of a large step goes by without a line


def request_of(snapshot: str, options: WhatIfOptions) -> WhatIfRequest:
    """The step by the end of its snapshot's address, RUN/ATTEMPT/STEP. Raises ValueError."""
    parts = snapshot.rstrip("/").split("/")[-3:]
    try:
        run, attempt, step = parts
        return WhatIfRequest(run=run, attempt=int(attempt), step=int(step), **options.model_dump())
    except (ValueError, ValidationError):
        raise ValueError(
            f"{snapshot[:120]!r} names no step; with --serve a snapshot ends in RUN/ATTEMPT/STEP such as my-run/0/1204"
        ) from None


def ask(
    url: str,
    request: WhatIfRequest,
    on_progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
    token: str | None = None,
) -> dict[str, Any]:
    """The answer, with how long it took until a replica began: `replica`. Raises ValueError or OSError."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"--serve {url[:80]!r} is not an address; expected http://host:port/whatif")
    headers = {"Content-Type": "application/json", "Accept": MEDIA_TYPE}
    token = token or os.environ.get(TOKEN_VARIABLE)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    posted = urllib.request.Request(url, data=request.model_dump_json().encode(), headers=headers, method="POST")
    replica: dict[str, Any] = {}
    try:
        with urllib.request.urlopen(posted, timeout=SILENCE_MAX_S) as reply:
            while data := reply.readline(LINE_LENGTH_MAX + 1):
                line = WhatIfLine.model_validate_json(data)
                if line.problem is not None:
                    raise ValueError(line.problem.detail)
                if line.started is not None:
                    replica = {"started": line.started, "waited_s": line.waited_s}
                if line.answer is not None:
                    return line.answer | {"replica": replica}
                if line.stage is not None:
                    waiting = f"{line.stage}, {line.waited_s:.0f} s" if line.fraction is None else line.stage
                    on_progress(waiting, line.fraction or 0.0)
    except urllib.error.HTTPError as error:
        raise ValueError(_detail(error)) from None
    except ValidationError:
        raise ValueError(f"{url[:80]} answers, but not as the what-if app does; check the address") from None
    except urllib.error.URLError as error:
        raise OSError(f"the what-if app at {url[:80]} does not answer: {error.reason}") from None
    raise OSError(f"the what-if app at {url[:80]} ended without an answer; ask again")


def _detail(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            said = json.loads(error.read(LINE_LENGTH_MAX))["problem"]["detail"]
        except (ValueError, KeyError, TypeError):
            said = "no reason given"
    return f"the what-if app says {error.code}: {str(said)[:300]}"
