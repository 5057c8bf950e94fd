"""
``/v1/guard``: who is kept out for a time.

For administrators. The guard itself keeps nobody from this place: a directive that denies everybody can be lifted here.
"""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from tidings.access.guard import Directive

from ..errors import BadRequest
from .operations import JSON, ApiOperation, Call, json_answer


class DirectiveApplied(msgspec.Struct, frozen=True, kw_only=True):
    """The directive is in force."""

    directive: Directive
    closed: int
    """Connections that it closed."""


class DirectiveOut(msgspec.Struct, frozen=True, kw_only=True):
    """A directive in force."""

    directive: Directive
    ends_in_s: float


class DirectiveList(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force."""

    directives: list[DirectiveOut]
    denied: int
    """Newcomers that were turned away since the node started."""


async def apply_directive(call: Call) -> Response:
    """Deny or allow."""
    guard = call.api.services.guard
    try:
        wanted = await call.body(Directive)
    except BadRequest as error:
        guard.note_refused(error.field, error.problem, by=call.subject)
        raise
    directive, closed = guard.apply(wanted, by=call.subject)
    return json_answer(DirectiveApplied(directive=directive, closed=closed), 201)


async def list_directives(call: Call) -> Response:
    """What is in force."""
    services = call.api.services
    now_s = services.clock.monotonic()
    shown = [
        DirectiveOut(directive=each.directive, ends_in_s=round(each.expires_at_s - now_s, 3))
        for each in services.guard.directives()
    ]
    return json_answer(DirectiveList(directives=shown, denied=services.guard.denied_count))


OPERATIONS: Final = (
    ApiOperation(
        method="POST",
        path="/v1/guard/directives",
        name="applyDirective",
        summary="Keep somebody out for a time, close their connections, or let them in again.",
        tag="guard",
        handle=apply_directive,
        is_administrative=True,
        body={JSON: Directive},
        answers={201: {JSON: DirectiveApplied}},
        problems=(403, 503),
        is_guarded=False,
    ),
    ApiOperation(
        method="GET",
        path="/v1/guard/directives",
        name="listDirectives",
        summary="List the directives in force.",
        tag="guard",
        handle=list_directives,
        is_administrative=True,
        answers={200: {JSON: DirectiveList}},
        problems=(403,),
        is_guarded=False,
    ),
)
