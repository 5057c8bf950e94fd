"""``/v1/groups``: the status of durable groups; pausing, resuming, moving and deleting them. Each is a right on the group."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from starlette.responses import Response

from tidings.access.resources import Action, group_of, topic
from tidings.bus.admin import GroupChange, GroupDetails, GroupReport, SeekTarget
from tidings.core.names import check_topic, check_topic_and_group
from tidings.wire.events import time_of

from ..errors import BadRequest
from .operations import JSON, ApiOperation, Call, json_answer

_Report = TypeVar("_Report", bound=GroupReport)
_COUNTS: Final = (
    *(
        "committed",
        "next_offset",
        "lag",
        "acknowledged_early",
        "failed_attempts",
        "oldest_unacked_age_s",
        "dead_letters",
    ),
    *("handling", "delivered", "acked", "retried", "dead_lettered"),
)


class GroupsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups to list."""

    topic: str | None = None


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of topics that the caller may read."""

    groups: list[GroupReport]


class SeekBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to go on: exactly one of the first three."""

    to_offset: Annotated[int, msgspec.Meta(ge=0)] | None = None
    to_time: str | None = None
    """The first event written at this time or later."""
    to: Literal["earliest", "latest"] | None = None
    dry_run: bool = False


class DryRunBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether to say only what would be done."""

    dry_run: bool = False


class DryRunQuery(DryRunBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same, of a request without a body."""


async def list_groups(call: Call) -> Response:
    """The groups."""
    query, services = call.query(GroupsQuery), call.api.services
    wanted = None if query.topic is None else check_topic(query.topic)
    if wanted is not None:
        call.capsule.require(Action.READ, topic(wanted))
    reports = await services.bus.admin.reports(
        wanted, may_read=lambda name: call.capsule.allows(Action.READ, topic(name))
    )
    if not await call.capsule.sees_whole_topics():
        reports = [_without_counts(report) for report in reports]
    return json_answer(GroupList(groups=reports))


async def show_group(call: Call) -> Response:
    """One group."""
    name, group = _names(call)
    call.capsule.require(Action.READ, topic(name))
    report = await call.api.services.bus.admin.report(name, group)
    if not await call.capsule.sees_whole_topics():
        report = msgspec.structs.replace(_without_counts(report), acknowledged_ranges=[], failed_attempts_by_offset={})
    return json_answer(report)


def _without_counts(report: _Report) -> _Report:
    """The group's state, for a caller who may read part of its topic: the counts are of all of it."""
    return msgspec.structs.replace(report, **dict.fromkeys(_COUNTS))


async def pause(call: Call) -> Response:
    """Deliver nothing more."""
    name, group = _names(call)
    call.capsule.require(Action.PAUSE, group_of(name, group))
    body = await call.body(DryRunBody)
    admin = call.api.services.bus.admin
    return json_answer(await admin.pause(name, group, dry_run=body.dry_run, audit=call.audit()))


async def resume(call: Call) -> Response:
    """Go on delivering."""
    name, group = _names(call)
    call.capsule.require(Action.PAUSE, group_of(name, group))
    body = await call.body(DryRunBody)
    admin = call.api.services.bus.admin
    return json_answer(await admin.resume(name, group, dry_run=body.dry_run, audit=call.audit()))


async def seek(call: Call) -> Response:
    """Set the group's position."""
    name, group = _names(call)
    call.capsule.require(Action.MOVE, group_of(name, group))
    body = await call.body(SeekBody)
    admin = call.api.services.bus.admin
    return json_answer(await admin.seek(name, group, _target(body), dry_run=body.dry_run, audit=call.audit()))


async def delete(call: Call) -> Response:
    """Forget the group."""
    query = call.query(DryRunQuery)
    name, group = _names(call)
    call.capsule.require(Action.DELETE, group_of(name, group))
    admin = call.api.services.bus.admin
    return json_answer(await admin.delete(name, group, dry_run=query.dry_run, audit=call.audit()))


def _target(body: SeekBody) -> SeekTarget:
    if sum(each is not None for each in (body.to_offset, body.to_time, body.to)) != 1:
        raise BadRequest("body", "give one place to go to: to_offset, to_time or to")
    if body.to_time is not None:
        return time_of("body.to_time", body.to_time)
    target = body.to_offset if body.to_offset is not None else body.to
    assert target is not None
    return target


def _names(call: Call) -> tuple[str, str]:
    return check_topic_and_group(call.path("topic"), call.path("group"))


_GROUP: Final = "/v1/groups/{topic}/{group}"

OPERATIONS: Final = (
    ApiOperation(
        method="GET",
        path="/v1/groups",
        name="listGroups",
        summary="List durable groups with their position, lag and members.",
        tag="groups",
        handle=list_groups,
        query=GroupsQuery,
        answers={200: {JSON: GroupList}},
        problems=(403,),
    ),
    ApiOperation(
        method="GET",
        path=_GROUP,
        name="showGroup",
        summary="Show one group.",
        tag="groups",
        handle=show_group,
        answers={200: {JSON: GroupDetails}},
        problems=(403, 404),
    ),
    ApiOperation(
        method="DELETE",
        path=_GROUP,
        name="deleteGroup",
        summary="Forget a group that has no members; its events stay in the log, its dead letters in their file.",
        tag="groups",
        handle=delete,
        query=DryRunQuery,
        answers={200: {JSON: GroupChange}},
        problems=(403, 404, 409, 503),
    ),
    ApiOperation(
        method="POST",
        path=f"{_GROUP}/pause",
        name="pauseGroup",
        summary="Deliver nothing more to a group until it is resumed, also after a restart.",
        tag="groups",
        handle=pause,
        body={JSON: DryRunBody},
        answers={200: {JSON: GroupChange}},
        problems=(403, 404, 409, 415, 503),
    ),
    ApiOperation(
        method="POST",
        path=f"{_GROUP}/resume",
        name="resumeGroup",
        summary="Go on delivering to a group.",
        tag="groups",
        handle=resume,
        body={JSON: DryRunBody},
        answers={200: {JSON: GroupChange}},
        problems=(403, 404, 409, 415, 503),
    ),
    ApiOperation(
        method="POST",
        path=f"{_GROUP}/seek",
        name="seekGroup",
        summary="Set a group's position: back to have events delivered again, forward to skip some.",
        tag="groups",
        handle=seek,
        body={JSON: SeekBody},
        answers={200: {JSON: GroupChange}},
        problems=(403, 404, 409, 410, 415, 503),
    ),
)
