"""``/v1/topics``, ``/v1/whoami`` and ``/v1/retention``: what is there for the caller, who the caller is, and dropping what is old."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from tidings.access.resources import Action, space, topic
from tidings.core.clock import format_utc
from tidings.core.names import check_topic
from tidings.core.settings import checked
from tidings.log.errors import UnknownTopic
from tidings.log.interface import TopicInfo
from tidings.log.retention import RetentionPlan, SegmentInfo
from tidings.log.settings import TopicRetention

from ..errors import BadRequest
from .operations import JSON, ApiOperation, Call, json_answer


class TopicOut(msgspec.Struct, frozen=True, kw_only=True):
    """
    A topic's bounds. An empty one has ``first_offset == next_offset``.

    They count all events of the topic, so they are null for a caller who may not read all of its spaces, partitions and projects.
    """

    topic: str
    first_offset: int | None
    next_offset: int | None
    first_seq: int | None
    last_seq: int | None
    size_bytes: int | None
    segment_count: int | None
    groups: list[str]
    """The durable groups that have a place in it."""
    segments: list[SegmentInfo] | msgspec.UnsetType = msgspec.UNSET
    """If requested: its segments, of spaces that the caller may read, without the partitions that they name. None for a caller who may not read all of the topic."""


class TopicsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to show of the topics."""

    segments: bool = False


class TopicList(msgspec.Struct, frozen=True, kw_only=True):
    """The topics that the caller may read."""

    topics: list[TopicOut]
    epoch: str
    seq: int


class WhoAmI(msgspec.Struct, frozen=True, kw_only=True):
    """What the token says, as the node understands it."""

    subject: str
    client_id: str | None
    user_id: str | None
    token_id: str | None
    expires_at: str | None
    roles: list[str]
    topics: list[str]
    topic_prefixes: list[str]
    partitions: list[str]
    partition_prefixes: list[str]
    projects: list[str]
    spaces: list[str]
    space_prefixes: list[str]
    groups: list[str]
    group_prefixes: list[str]
    is_read_only: bool
    names_none_of: list[str]
    """Kinds that the token speaks of without naming any, and so is bound to none of."""
    access_seq: int
    """The last access record that was taken into account."""


class RetentionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to drop, for this once: rules by topic; ``*`` is for topics that have none of their own."""

    rules: dict[str, TopicRetention]
    dry_run: bool = False


async def list_topics(call: Call) -> Response:
    """The topics, with their bounds."""
    log, query = call.api.services.log, call.query(TopicsQuery)
    groups = await _groups(call)
    is_whole = await call.capsule.sees_whole_topics()
    shown = [
        _shown(info, groups, call if query.segments else None, is_whole=is_whole)
        for name, info in sorted(log.topics().items())
        if call.capsule.allows(Action.READ, topic(name))
    ]
    return json_answer(TopicList(topics=shown, epoch=log.position.epoch, seq=log.position.seq))


async def show_topic(call: Call) -> Response:
    """One topic."""
    name = check_topic(call.path("topic"))
    call.capsule.require(Action.READ, topic(name))
    info = call.api.services.log.topic(name)
    if info is None:
        raise UnknownTopic(name)
    is_whole = await call.capsule.sees_whole_topics()
    return json_answer(_shown(info, await _groups(call), is_whole=is_whole))


async def drop_old(call: Call) -> Response:
    """What the rules let go of."""
    body = await call.body(RetentionBody)
    if not body.rules:
        raise BadRequest("body.rules", "no rule was given, so nothing could go")
    rules = {name if name == "*" else check_topic(name): checked(rule) for name, rule in body.rules.items()}
    retention = call.api.services.retention
    return json_answer(await retention.run(rules, audit=call.audit(), dry_run=body.dry_run))


async def _groups(call: Call) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, group in await call.api.services.bus.groups():
        found.setdefault(name, []).append(group)
    return found


def _shown(info: TopicInfo, groups: dict[str, list[str]], reader: Call | None = None, *, is_whole: bool) -> TopicOut:
    """A topic; with its figures and segments, as far as a reader may know of them."""
    return TopicOut(
        topic=info.topic,
        first_offset=info.first_offset if is_whole else None,
        next_offset=info.next_offset if is_whole else None,
        first_seq=info.first_seq if is_whole else None,
        last_seq=info.last_seq if is_whole else None,
        size_bytes=info.size_bytes if is_whole else None,
        segment_count=len(info.segments) if is_whole else None,
        groups=groups.get(info.topic, []),
        segments=msgspec.UNSET
        if reader is None
        else [
            msgspec.structs.replace(each, partitions={})
            for each in (info.segments if is_whole else ())
            if each.space_id is None or reader.capsule.allows(Action.READ, space(each.space_id))
        ],
    )


async def who_am_i(call: Call) -> Response:
    """The caller."""
    context = call.capsule.context
    claims, expires_at_ns = context.claims, context.expires_at_ns
    return json_answer(
        WhoAmI(
            subject=context.subject,
            client_id=context.client_id,
            user_id=context.user_id,
            token_id=context.token_id,
            expires_at=None if expires_at_ns is None else format_utc(expires_at_ns).decode(),
            roles=sorted(claims.roles),
            topics=sorted(claims.topics),
            topic_prefixes=list(claims.topic_prefixes),
            partitions=sorted(claims.partitions),
            partition_prefixes=list(claims.partition_prefixes),
            projects=sorted(claims.projects),
            spaces=sorted(claims.spaces),
            space_prefixes=list(claims.space_prefixes),
            groups=sorted(claims.groups),
            group_prefixes=list(claims.group_prefixes),
            is_read_only=claims.is_read_only,
            names_none_of=sorted(claims.names_none_of),
            access_seq=call.api.services.book.seq,
        )
    )


OPERATIONS: Final = (
    ApiOperation(
        method="GET",
        path="/v1/topics",
        name="listTopics",
        summary="List the topics that the caller may read.",
        tag="topics",
        handle=list_topics,
        query=TopicsQuery,
        answers={200: {JSON: TopicList}},
    ),
    ApiOperation(
        method="GET",
        path="/v1/topics/{topic}",
        name="showTopic",
        summary="Show one topic's bounds and groups.",
        tag="topics",
        handle=show_topic,
        answers={200: {JSON: TopicOut}},
        problems=(403, 404),
    ),
    ApiOperation(
        method="POST",
        path="/v1/retention",
        name="dropOldSegments",
        summary="Drop the sealed segments that rules let go of and nobody needs; says what became of each, and why.",
        tag="topics",
        handle=drop_old,
        body={JSON: RetentionBody},
        answers={200: {JSON: RetentionPlan}},
        problems=(403, 415),
        is_administrative=True,
    ),
    ApiOperation(
        method="GET",
        path="/v1/whoami",
        name="whoAmI",
        summary="Show who the caller is and what its token claims.",
        tag="access",
        handle=who_am_i,
        answers={200: {JSON: WhoAmI}},
    ),
)
