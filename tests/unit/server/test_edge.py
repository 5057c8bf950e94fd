"""The edge gives every request an id, bounds its body, answers exactly once, and leaves one line behind."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, Router

from tidings.core.clock import SYSTEM_CLOCK
from tidings.server.edge import ACCESS_LOGGER, REQUEST_ID, Edge
from tidings.server.monitoring import JsonFormatter, TextFormatter
from tidings.server.settings import ServerSettings


async def _length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def _show_id(request: Request) -> PlainTextResponse:
    assert REQUEST_ID.get() == request.state.request_id
    return PlainTextResponse(request.state.request_id, headers={"x-request-id": "not this one"})


async def _fail(request: Request) -> PlainTextResponse:
    raise RuntimeError("a secret of the implementation")


async def _stream(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        yield b"begun"
        raise RuntimeError("too late for a problem")

    return StreamingResponse(parts())


class Site:
    """An application behind an edge, and what was observed of it."""

    def __init__(self, **settings: Any) -> None:
        self.observed: list[tuple[str, str, int]] = []
        routes = [
            Route("/length", _length, methods=["POST"]),
            Route("/id", _show_id),
            Route("/fail", _fail),
            Route("/stream", _stream),
            Route("/item/{name}", _show_id),
        ]
        self.app = Edge(
            Router(routes),
            settings=lambda: ServerSettings(**settings),
            clock=SYSTEM_CLOCK,
            observed=lambda method, route, status, seconds: self.observed.append((method, route, status)),
        )

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://node")


async def test_a_request_keeps_its_id_or_gets_one() -> None:
    """An acceptable id is taken over and returned, also where a handler sets another; without one, one is made."""
    async with Site().client() as client:
        given = await client.get("/id", headers={"x-request-id": "trace-7"})
        made = await client.get("/id")

    assert (given.text, given.headers.get_list("x-request-id")) == ("trace-7", ["trace-7"])
    assert made.text == made.headers["x-request-id"]
    assert made.text.startswith("rq-")


@pytest.mark.parametrize("bad", ["x" * 129, "a b", "a\tb", "<script>", ""])
async def test_an_id_that_could_do_harm_is_replaced(bad: str) -> None:
    """An id that is too long, or could break a log line or a page, is not repeated."""
    async with Site().client() as client:
        answer = await client.get("/id", headers={"x-request-id": bad})

    assert answer.text.startswith("rq-")


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_over_the_limit_is_refused(is_declared: bool) -> None:
    """A body that declares its length is refused unread, one that does not as soon as it is too long; at the limit it passes."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 500

    site = Site(body_bytes_max=1024)
    async with site.client() as client:
        answer = await client.post("/length", content=b"x" * 1025 if is_declared else parts())
        passed = await client.post("/length", content=b"x" * 1024)

    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["status"]) == (413, "node.body_too_large", 413)
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert passed.text == "1024"


async def test_a_failing_handler_shows_nothing_of_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets a problem with the request's id; the cause is in the log under that id."""
    caplog.set_level(logging.ERROR, "tidings.server.edge")
    async with Site().client() as client:
        answer = await client.get("/fail", headers={"x-request-id": "r-1"})

    assert answer.status_code == 500
    assert answer.json()["code"] == "node.internal_error"
    assert answer.json()["request_id"] == "r-1"
    assert "secret" not in answer.text
    assert "a secret of the implementation" in caplog.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("POST", "/id", 405)])
async def test_what_no_route_answers_is_a_problem_too(method: str, path: str, status: int) -> None:
    """An unknown path or method gets a problem document with the request's id, like every other refusal."""
    async with Site().client() as client:
        answer = await client.request(method, path)

    assert answer.status_code == status
    assert answer.json()["code"] == "node.request_refused"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert status == 404 or set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_an_answer_that_has_begun_is_not_answered_again() -> None:
    """A stream that fails half way ends; no second answer is mixed into it."""
    site = Site()
    async with site.client() as client:
        answer = await client.get("/stream")

    assert answer.content == b"begun"
    assert site.observed == [("GET", "/stream", 200)]


async def test_requests_are_observed_by_route_not_by_path() -> None:
    """Paths and methods that nobody declared do not make new series."""
    site = Site()
    async with site.client() as client:
        for name in ("a", "b"):
            await client.get(f"/item/{name}")
        await client.get("/nowhere/at/all")
        await client.request("BREW", "/id")

    assert site.observed[:3] == [("GET", "/item/{name}", 200)] * 2 + [("GET", "(none)", 404)]
    assert site.observed[3][0] == "other"


async def test_one_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    """The access log has method, path, status, sizes, peer and id, as text and as JSON; it can be switched off."""
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    async with Site().client() as client:
        await client.post("/length", content=b"abc", headers={"x-request-id": "r-2"})
    async with Site(access_log=False).client() as client:
        await client.get("/id")

    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["method"], line["path"], line["status"], line["bytes_in"]) == ("POST", "/length", 200, 3)
    assert (line["request_id"], line["level"], line["logger"]) == ("r-2", "info", ACCESS_LOGGER)
    text = TextFormatter().format(record)
    assert "POST /length 200" in text
    assert text.endswith("[r-2]")


def test_a_line_stays_a_line() -> None:
    """What came from outside cannot begin a line of its own in the text log."""
    record = logging.makeLogRecord(
        {"msg": "path %s", "args": ("/a\nforged line",), "name": "tidings.x", "levelname": "INFO"}
    )

    assert "\n" not in TextFormatter().format(record)


def test_errors_are_in_the_line() -> None:
    """The JSON line holds the error's text; extra values that JSON does not know become text."""
    try:
        raise ValueError("because")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.makeLogRecord({"msg": "m", "exc_info": info, "thing": object(), "levelname": "ERROR"})
    line = json.loads(JsonFormatter().format(record))

    assert "ValueError: because" in line["error"]
    assert line["thing"].startswith("<object")
