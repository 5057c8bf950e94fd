"""The HTTP application of a node: probes, metrics, and the routes of the API behind one edge."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import orjson
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tidings.access.errors import AccessError
from tidings.core.clock import Clock

from .edge import REQUEST_ID_HEADER, Edge, is_own_host, problem_response
from .health import Readiness, Reason
from .monitoring import CONTENT_TYPE, NodeMetrics, is_loopback
from .settings import ServerSettings

_JSON = "application/json"
_NEVER_STORED = {"cache-control": "no-store"}
_METHODS: Final = ("GET", "POST", "PATCH", "DELETE")
_HEADERS: Final = ("authorization", "content-type", "idempotency-key", "last-event-id", REQUEST_ID_HEADER)
_EXPOSED: Final = ("retry-after", REQUEST_ID_HEADER)
"""What pages of other origins may send, and see of an answer beside its body."""
_STATIC: Final = Path(__file__).parent / "static"
_HTML: Final = "text/html; charset=utf-8"
_JAVASCRIPT: Final = "text/javascript; charset=utf-8"
_FILES: Final = {
    "/": ("page.html", _HTML),
    "/page/page.js": ("page.js", _JAVASCRIPT),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/client/events.js": ("events.js", _JAVASCRIPT),
}
"""What is served as it lies in the package: the node's page, and the gateway's client for browsers."""
_PAGE_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
    )
)
"""The page's Content-Security-Policy: nothing from elsewhere, nothing inline, in no frame, no markup from strings."""


def application(
    api: Sequence[BaseRoute],
    *,
    health: Callable[[], Readiness],
    metrics: NodeMetrics,
    settings: Callable[[], ServerSettings],
    clock: Clock,
    may_read_node: Callable[[str | None], None],
    is_open: bool = False,
) -> Edge:
    """
    Everything that HTTP reaches.

    Args:
        api: The routes of the API.
        health: Whether the node is ready, now.
        metrics: What ``/metrics`` shows, and where requests are counted.
        settings: The settings that hold now.
        clock: For the time that requests take.
        may_read_node: Raises an ``AccessError`` if who sent this ``Authorization`` header may not read the node.
    """

    async def healthz(request: Request) -> Response:
        return Response(b'{"alive":true}', media_type=_JSON, headers=_NEVER_STORED)

    async def readyz(request: Request) -> Response:
        found = health()
        # The details name files and groups: they are for whoever may read the node, or has its Unix socket.
        is_trusted = request.client is None
        with contextlib.suppress(AccessError):
            may_read_node(request.headers.get("authorization"))
            is_trusted = True
        body = {
            "ready": found.is_ready,
            "reasons": [_plain(reason, is_trusted=is_trusted) for reason in found.reasons],
            "warnings": [_plain(reason, is_trusted=is_trusted) for reason in found.warnings],
            "seq": found.seq,
            "dispatched_seq": found.dispatched_seq,
        }
        status = 200 if found.is_ready else 503
        return Response(orjson.dumps(body), status, media_type=_JSON, headers=_NEVER_STORED)

    async def show_metrics(request: Request) -> Response:
        if not _needs_no_token(settings(), request):
            try:
                may_read_node(request.headers.get("authorization"))
            except AccessError as error:
                return problem_response(error, request.state.request_id)
        return Response(await metrics.text(), headers={"content-type": CONTENT_TYPE, **_NEVER_STORED})

    routes: list[BaseRoute] = [
        *(_file_route(path, *file) for path, file in _FILES.items()),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
        *api,
    ]
    return Edge(
        _Shared(_Paths(routes), lambda: settings().origins),
        settings=settings,
        clock=clock,
        observed=metrics.observed,
        is_open=is_open,
    )


def _file_route(path: str, name: str, media_type: str) -> Route:
    content = (_STATIC / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"cache-control": "no-cache", "etag": tag, "x-content-type-options": "nosniff"}
    if media_type == _HTML:
        headers |= {"content-security-policy": _PAGE_POLICY, "referrer-policy": "no-referrer"}

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(b"", 304, headers)
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, show, methods=["GET"])


class _Shared:
    """Lets browsers hand the answers to pages of other origins, those that the settings list; who others are, the edge has refused."""

    def __init__(self, app: ASGIApp, origins: Callable[[], Sequence[str]]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, origins = self._app, self._origins()
        if origins and any(name == b"origin" for name, _ in scope["headers"]):
            # Made for the request: the origins can be changed while the node runs.
            app = CORSMiddleware(app, origins, _METHODS, _HEADERS, expose_headers=_EXPOSED)
        await app(scope, receive, send)


class _Paths:
    """Finds a path without parameters at once, and any other as the router does, by trying one after another."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._router = Router(routes, redirect_slashes=False)
        self._plain: dict[str, Route] = {}
        patterns: list[Route] = []
        for each in routes:
            assert isinstance(each, Route)
            if each.param_convertors:
                patterns.append(each)
            elif not any(other.path_regex.match(each.path) for other in patterns):  # they come first
                self._plain.setdefault(each.path, each)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._plain.get(scope["path"])
        if route is None:
            await self._router(scope, receive, send)
        else:
            scope.update(route=route, endpoint=route.endpoint, path_params={})
            await route.handle(scope, receive, send)


def _needs_no_token(settings: ServerSettings, request: Request) -> bool:
    rule = settings.metrics_without_token
    # A Unix socket has no address: who reaches it is the node's own user. A web page of another name comes from loopback too.
    is_near = request.client is None or (
        is_loopback(request.client.host) and is_own_host(request.headers.get("host", "localhost"), settings)
    )
    return rule == "always" or (rule == "loopback" and is_near)


def _plain(reason: Reason, *, is_trusted: bool) -> dict[str, str]:
    return {"code": reason.code, "detail": reason.detail if is_trusted else reason.summary}
