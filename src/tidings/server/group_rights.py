"""
Rights on groups, and how many there may be.

Whoever reads a topic does not thereby take part in its groups: what one member acknowledges, no other member sees. So joining a group takes a
right on that group, and bringing one into being a further one. How many groups there are is bounded over all, per topic, and per subject
that has made them; who made a group is on record in the topic ``audit``, and read from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tidings.access.audit import AUDIT_TOPIC, Audit
from tidings.access.book import Capsule
from tidings.access.resources import Action, group_of, topic
from tidings.bus.eventbus import EventBus
from tidings.log.interface import Query
from tidings.log.reading import records

from .errors import NodeError
from .group_settings import GroupsSettings

_CREATE = "group.create"
_CREATED = f"groups.{_CREATE}"


class TooManyGroups(NodeError):
    """There are as many groups as there may be."""

    code = "groups.too_many_groups"
    status = 409
    hint = (
        "delete groups that nobody needs; the limits are the settings groups.groups_count_max, groups.groups_per_topic_max"
        " and groups.groups_per_subject_max"
    )
    text = "there are {count} groups {scope} already"
    count: int
    scope: str


def require_membership(capsule: Capsule, topic_name: str, group: str) -> None:
    """
    Make sure that somebody may be a member of a group: it takes the topic and the group.

    Raises:
        Forbidden, TokenRevoked: They may not.
    """
    capsule.require(Action.SUBSCRIBE, topic(topic_name))
    capsule.require(Action.JOIN, group_of(topic_name, group))


class GroupCreation:
    """
    Who may bring groups into being, one at a time.

    Args:
        bus: Whose groups they are.
        settings: How many there may be.
    """

    def __init__(self, bus: EventBus, settings: GroupsSettings) -> None:
        self._bus = bus
        self._settings = settings
        self._lock = asyncio.Lock()
        self._creators: dict[tuple[str, str], str] = {}
        self._read_through = 0

    @contextlib.asynccontextmanager
    async def of(self, capsule: Capsule, topic_name: str, group: str) -> AsyncIterator[None]:
        """
        Join a group within this: if there is none of that name, it is made, on record and within the bounds.

        Raises:
            Forbidden, TokenRevoked: It would be made, and may not be.
            TooManyGroups: There is no room for one more.
        """
        if await self._is_known(topic_name, group):
            yield
            return
        capsule.require(Action.CREATE, group_of(topic_name, group))
        async with self._lock:
            if await self._is_known(topic_name, group):
                yield
                return
            subject = capsule.context.subject
            await self._check_room(topic_name, subject)
            details = {"topic": topic_name, "group": group}
            async with Audit(subject, "groups").of(self._bus.log, _CREATE, details):
                yield

    async def _is_known(self, topic_name: str, group: str) -> bool:
        is_running = any(each.group == group for each in self._bus.get_subscriptions(topic_name))
        return is_running or (topic_name, group) in await self._bus.groups(topic_name)

    async def _check_room(self, topic_name: str, subject: str) -> None:
        settings = self._settings
        known = set(await self._bus.groups()) | {(each.topic, each.group) for each in self._bus.get_subscriptions()}
        if len(known) >= settings.groups_count_max:
            raise TooManyGroups(len(known), "at this node")
        of_topic = sum(name == topic_name for name, _ in known)
        if of_topic >= settings.groups_per_topic_max:
            raise TooManyGroups(of_topic, f"of topic {topic_name!r}")
        await self._read_creators()
        self._creators = {key: maker for key, maker in self._creators.items() if key in known}
        of_subject = sum(maker == subject for maker in self._creators.values())
        if of_subject >= settings.groups_per_subject_max:
            raise TooManyGroups(of_subject, f"made by {subject!r}")

    async def _read_creators(self) -> None:
        """Take in what was recorded since the last look."""
        if AUDIT_TOPIC not in self._bus.log.topics():
            return
        self._read_through = max(self._read_through, self._bus.log.topics()[AUDIT_TOPIC].first_offset)
        query = Query(topic=AUDIT_TOPIC, from_offset=self._read_through)
        async for record in records(self._bus.log, query):
            self._read_through = record.offset + 1
            if record.meta.type == _CREATED and isinstance(record.meta.actor, str):
                payload = record.payload
                self._creators[str(payload["topic"]), str(payload["group"])] = record.meta.actor
