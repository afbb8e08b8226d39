"""How large a request's body may be: refused before it is read, cut off where its head lied. Plain ASGI."""

from fastapi import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradloc_reporter.answers import Problem

BODY_BYTES_MAX = 64 << 10  # a wish holds a few hundred bytes; a body would be read whole


class BodySize:
    """Refuses by the length that the head tells; what comes in pieces, once they are too many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not told.isdigit() or int(told[:12]) > BODY_BYTES_MAX:
            await _refusal()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > BODY_BYTES_MAX:
                raise HTTPException(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
            return message

        await self._app(scope, counted, send)


def _refusal() -> Response:
    problem = Problem(
        title="Content Too Large",
        status=413,
        detail=f"the body is larger than {BODY_BYTES_MAX} bytes",
        what_to_do="Send the wish alone; /api/v1/openapi.json says what it holds.",
    )
    # The body is not read: the connection must not be used again.
    return Response(problem.model_dump_json(), 413, {"Connection": "close"}, media_type="application/problem+json")
