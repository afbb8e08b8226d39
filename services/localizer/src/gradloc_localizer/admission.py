"""Who may ask the what-if app, and what for. Knows HTTP and no Ray."""

import hmac

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gradloc_localizer.asked import read
from gradloc_localizer.waiting import problem
from gradloc_proto.whatif import WhatIfRequest

REQUEST_LENGTH_MAX = 64 * 1024


async def admitted(request: Request, token: str) -> WhatIfRequest | Response:
    """The request, or why it is refused."""
    given = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        return _refused(401, "this app wants a token; send Authorization: Bearer TOKEN")
    if request.method != "POST":
        return _refused(405, 'expected POST with JSON such as {"run": "my-run", "attempt": 0, "step": 1204}')
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > REQUEST_LENGTH_MAX:
            return _refused(413, f"the request is longer than {REQUEST_LENGTH_MAX} bytes")
    try:
        asked = WhatIfRequest.model_validate_json(body)
        read(asked)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        return _refused(422, f"{where}: {first['msg']}")
    except ValueError as error:
        return _refused(422, str(error))
    return asked


def _refused(status: int, detail: str) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": 'Bearer realm="gradloc"'}, 405: {"Allow": "POST"}}.get(status, {})
    return JSONResponse({"problem": problem(status, detail).model_dump()}, status, headers)
