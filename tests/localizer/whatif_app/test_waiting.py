"""Who asks the what-if app reads what is waited for, whatever the replica does; wrong requests get one clear reason."""

import asyncio
import json

import pytest
from starlette.requests import Request

from gradloc_localizer import waiting
from gradloc_localizer.admission import admitted
from gradloc_localizer.waiting import problem_of


def merged(told, *, stages=("starting a replica",), **options):
    """All lines of `told`, an asynchronous iterator."""
    left = list(stages)

    async def stage():
        return left.pop(0) if len(left) > 1 else left[0]

    async def collected():
        known = {"start_timeout_s": 1e9, "every_s": 1e-3}
        return [line async for line in waiting.lines(told, stage, problem_of, **(known | options))]

    return asyncio.run(collected())


def late(seen, *lines):
    """A replica that begins when three lines have been read."""

    async def told():
        while seen["stages"] < 3:
            await asyncio.sleep(0)
        for line in lines:
            if isinstance(line, Exception):
                raise line
            yield line

    return told()


def counting(seen):
    async def stage():
        seen["stages"] += 1
        return "starting a replica" if seen["stages"] < 3 else "waiting for a replica"

    return stage


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({"answer": {"step": 7}}, None),
        ({"problem": {"status": 404, "title": "Not Found", "detail": "no snapshot at x"}}, 404),
        (ValueError("cannot be\nread"), 422),
        (OSError("the store is away"), 503),
        (RuntimeError("boom"), 500),
        (None, 503),  # it ends and says nothing
    ],
)
def test_a_start_is_seen_then_the_work_then_one_last_line(last, status):
    seen = {"stages": 0}
    told = late(seen, {"stage": "opening", "fraction": 0.0, "started": True}, *([] if last is None else [last]))

    async def collected():
        lines = waiting.lines(told, counting(seen), problem_of, start_timeout_s=1e9, every_s=1e-3)
        return [line async for line in lines]

    *before, begins, end = asyncio.run(collected())
    assert [line.stage for line in before][:2] == ["starting a replica"] * 2
    assert begins.started is True and not any(line.is_last for line in [*before, begins])
    assert [line.waited_s for line in [*before, begins, end]] == sorted(
        line.waited_s for line in [*before, begins, end]
    )
    assert end.is_last and (end.problem.status if end.problem else None) == status
    assert end.problem is None or "\n" not in end.problem.detail


def test_a_pool_without_room_is_told_in_the_end():
    times = iter(range(0, 1000, 5))

    async def never():
        await asyncio.Event().wait()
        yield {}

    lines = merged(never(), start_timeout_s=20.0, clock=lambda: float(next(times)))
    assert lines[0].stage == "starting a replica"
    assert lines[-1].problem.status == 503 and "look at the pool" in lines[-1].problem.detail


def asked(body, token="", method="POST", **headers):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = iter([{"type": "http.request", "body": raw, "more_body": False}])

    async def receive():
        return next(sent)

    scope = {"type": "http", "method": method, "path": "/", "query_string": b""}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    return asyncio.run(admitted(Request(scope, receive), token))


STEP = {"run": "my-run", "attempt": 0, "step": 7}


def test_a_request_names_a_step_and_remedies():
    request = asked(STEP | {"drop": ["1:0:2:9"], "token_clip": "0.5:5", "limit": 2})
    assert (request.run, request.step, request.drop, request.limit) == ("my-run", 7, ("1:0:2:9",), 2.0)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 422, "Invalid JSON"),
        (b"\xff{", 422, "Invalid JSON"),
        (b" " * 70_000, 413, "longer than"),
        ([], 422, "the body"),
        ({"run": "my-run"}, 422, "step"),
        (STEP | {"run": "../etc"}, 422, "run"),
        (STEP | {"run": ".."}, 422, "run"),
        (STEP | {"snapshot": "file:///etc"}, 422, "snapshot"),
        (STEP | {"step": -1}, 422, "step"),
        (STEP | {"limit": float("nan")}, 422, "limit"),
        (STEP | {"clip_norm": float("inf")}, 422, "clip_norm"),
        (STEP | {"token_clip": "5"}, 422, "expected LOW:HIGH"),
        (STEP | {"drop": ["1:0"]}, 422, "expected RANK:MICRO:SEQ"),
        (STEP | {"drop": ["1:0:0"] * 65}, 422, "drop"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_reason(body, status, reason):
    refused = asked(body)
    assert refused.status_code == status
    problem = json.loads(refused.body)["problem"]
    assert problem["status"] == status and reason in problem["detail"] and "\n" not in problem["detail"]


def test_a_token_is_wanted_where_one_is_set():
    assert asked(STEP, "secret", authorization="Bearer secret").run == "my-run"
    for headers in ({}, {"authorization": "Bearer sécret"}, {"authorization": "secret"}):
        refused = asked(STEP, "secret", **headers)
        assert refused.status_code == 401 and b"secret" not in refused.body


def test_only_post_asks():
    assert asked(b"", method="GET").status_code == 405
