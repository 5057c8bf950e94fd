"""``/v1/groups``: the status of durable groups; pausing, resuming, moving and deleting them. Each is a right on the group."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from starlette.responses import Response

from tidings.access.resources import Action, group_of, topic
from tidings.bus.admin import SeekTarget, offset_of, plan_seek
from tidings.bus.cursors import bounds
from tidings.core.names import check_topic, check_topic_and_group
from tidings.wire.events import time_of

from ..errors import BadRequest, GroupNotRunning
from .group_facts import GroupOut, Move, look_at, subscription_of
from .operations import JSON, ApiOperation, Call, json_answer


class GroupsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups to list."""

    topic: str | None = None


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of topics that the caller may read."""

    groups: list[GroupOut]


class SeekBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to go on: exactly one of the first three."""

    to_offset: Annotated[int, msgspec.Meta(ge=0)] | None = None
    to_time: str | None = None
    """The first event written at this time or later."""
    to: Literal["earliest", "latest"] | None = None
    dry_run: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing more to say."""

    dry_run: bool = False


class PauseOut(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the group was changed, or was so already."""

    topic: str
    group: str
    carried_out: bool
    changes: bool
    audit_seq: int | None = None


async def list_groups(call: Call) -> Response:
    """The groups."""
    query, services = call.query(GroupsQuery), call.api.services
    wanted = None if query.topic is None else check_topic(query.topic)
    if wanted is not None:
        call.capsule.require(Action.READ, topic(wanted))
    known = await services.bus.groups(wanted)
    seen = [key for key in known if call.capsule.allows(Action.READ, topic(key[0]))]
    return json_answer(GroupList(groups=[await look_at(services, *key) for key in seen]))


async def show_group(call: Call) -> Response:
    """One group."""
    name, group = _names(call)
    call.capsule.require(Action.READ, topic(name))
    await call.api.services.bus.admin.check_known(name, group)
    return json_answer(await look_at(call.api.services, name, group))


async def pause(call: Call) -> Response:
    """Deliver nothing more."""
    return await _set_paused(call, is_paused=True)


async def resume(call: Call) -> Response:
    """Go on delivering."""
    return await _set_paused(call, is_paused=False)


async def _set_paused(call: Call, *, is_paused: bool) -> Response:
    body = await call.body(PauseBody)
    name, group = _names(call)
    call.capsule.require(Action.PAUSE, group_of(name, group))
    services = call.api.services
    await services.bus.admin.check_known(name, group)
    running = subscription_of(services, name, group)
    if running is None or running.group_state is None:
        raise GroupNotRunning(name, group)
    changes = running.group_state.is_paused != is_paused
    if body.dry_run or not changes:
        return json_answer(PauseOut(topic=name, group=group, carried_out=False, changes=changes))
    audit = call.audit()
    await (services.bus.pause if is_paused else services.bus.resume)(name, group, audit=audit)
    return json_answer(PauseOut(topic=name, group=group, carried_out=True, changes=True, audit_seq=audit.seq))


async def seek(call: Call) -> Response:
    """Set the group's position."""
    body = await call.body(SeekBody)
    name, group = _names(call)
    call.capsule.require(Action.MOVE, group_of(name, group))
    services = call.api.services
    await services.bus.admin.check_known(name, group)
    target = await _target(call, name, body)
    plan = plan_seek(await services.bus.position_of(name, group), target)
    planned = Move(topic=name, group=group, carried_out=False, **msgspec.structs.asdict(plan))
    if body.dry_run:
        return json_answer(planned)
    audit = call.audit()
    await services.bus.seek(name, group, target, audit=audit)
    return json_answer(msgspec.structs.replace(planned, carried_out=True, audit_seq=audit.seq))


async def delete(call: Call) -> Response:
    """Forget the group."""
    name, group = _names(call)
    call.capsule.require(Action.DELETE, group_of(name, group))
    services, audit = call.api.services, call.audit()
    await services.bus.admin.check_known(name, group)
    await services.bus.delete_group(name, group, audit=audit)
    return json_answer(PauseOut(topic=name, group=group, carried_out=True, changes=True, audit_seq=audit.seq))


async def _target(call: Call, name: str, body: SeekBody) -> int:
    if sum(each is not None for each in (body.to_offset, body.to_time, body.to)) != 1:
        raise BadRequest("body", "give one place to go to: to_offset, to_time or to")
    log = call.api.services.log
    aim: SeekTarget | None = body.to_offset if body.to_offset is not None else body.to
    if body.to_time is not None:
        aim = time_of("body.to_time", body.to_time)
    assert aim is not None
    target = await offset_of(log, name, aim)
    if target is None:
        first, end = bounds(log, name)
        raise BadRequest("body.to_offset", f"topic {name!r} has offsets from {first} to {end}")
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
        answers={200: {JSON: GroupOut}},
        problems=(403, 404),
    ),
    ApiOperation(
        method="DELETE",
        path=_GROUP,
        name="deleteGroup",
        summary="Forget a group that has no members; its events stay in the log, its dead letters in their file.",
        tag="groups",
        handle=delete,
        answers={200: {JSON: PauseOut}},
        problems=(403, 404, 409, 503),
    ),
    ApiOperation(
        method="POST",
        path=f"{_GROUP}/pause",
        name="pauseGroup",
        summary="Deliver nothing more to a group until it is resumed, also after a restart.",
        tag="groups",
        handle=pause,
        body={JSON: PauseBody},
        answers={200: {JSON: PauseOut}},
        problems=(403, 404, 409, 415, 503),
    ),
    ApiOperation(
        method="POST",
        path=f"{_GROUP}/resume",
        name="resumeGroup",
        summary="Go on delivering to a group.",
        tag="groups",
        handle=resume,
        body={JSON: PauseBody},
        answers={200: {JSON: PauseOut}},
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
        answers={200: {JSON: Move}},
        problems=(403, 404, 409, 410, 415, 503),
    ),
)
