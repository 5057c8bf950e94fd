"""
The door ``/groups``: members of durable groups, and publishers, at the other end of a connection.

A connection says hello with its token, then joins groups and publishes (``groups_conversation``). To the bus a remote member is one
of those who share a group (``EventBus.join``): it is handed events up to the number it asked for, and its answers are a handler's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from tidings.access.administration import ACCESS_TOPIC
from tidings.bus.eventbus import EventBus
from tidings.core.clock import Clock, within
from tidings.log.record import Record
from tidings.wire import groups as wire
from tidings.wire.transport import Transport, Upgrade

from .api.authority import Authority
from .errors import NodeStopping
from .group_rights import GroupCreation
from .group_settings import GroupsSettings, options_given
from .groups_conversation import GroupsConversation, RemoteMember
from .services import Services

__all__ = ["GroupsDoor", "groups_door"]

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S: Final = 1.0
_UNWIND_S_MIN: Final = 1.0
"""What stopping groups and publishing gets to end in order, however short the deadline."""


class GroupsDoor:
    """
    What answers at ``/groups``.

    Args:
        bus: Where events are published, and whose groups are joined.
        authority: Who is asking.
        clock: What time it is.
        epoch: The life of the log, told to clients.
        settings: Bounds.
        reached: Called with an event's seq before it is handed to a member: ``None`` if the access book has seen that far, else
            something to wait for. It raises if the book will never get there.
        message_bytes_max: The longest message that the server lets through, told to clients; 0 if there is no limit.
    """

    def __init__(
        self,
        bus: EventBus,
        authority: Authority,
        *,
        clock: Clock,
        epoch: str,
        settings: GroupsSettings | None = None,
        reached: Callable[[int], Awaitable[None] | None] = lambda _: None,
        message_bytes_max: int = 0,
    ) -> None:
        self.bus = bus
        self.settings = settings or GroupsSettings()
        self.creation = GroupCreation(bus, self.settings)
        self.reached = reached
        self.authority = authority
        self.clock = clock
        self.epoch = epoch
        self.message_bytes_max = message_bytes_max
        self._conversations: set[GroupsConversation] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.is_shut = False

    def open(self, transport: Transport, upgrade: Upgrade) -> GroupsConversation:
        """Begin a conversation."""
        conversation = GroupsConversation(self, transport, upgrade)
        self._conversations.add(conversation)
        if self.is_shut:
            conversation.end(wire.CLOSE_GOING_AWAY, NodeStopping())
        elif self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep(), name="groups-sweep")
        return conversation

    def committed(self, records: Sequence[Record]) -> None:
        """A listener of the dispatcher, behind the access book: who has lost a right loses what it gave, at once."""
        if any(record.topic == ACCESS_TOPIC for record in records):
            self.rights_changed()

    def rights_changed(self) -> None:
        """Grants, policies or keys came or went."""
        for conversation in list(self._conversations):
            conversation.look_again()

    def failed(self, reason: str) -> None:
        """Changes of access are no longer heard of: nobody stays connected on what was true before."""
        for conversation in list(self._conversations):
            conversation.end(wire.CLOSE_GOING_AWAY, NodeStopping())
        logger.error("the connections of /groups were closed: %s", reason)

    async def shut(self, deadline_s: float) -> None:
        """Hand out nothing more, wait for the answers to what was handed out, and close."""
        self.is_shut = True
        conversations = list(self._conversations)
        started = self.clock.monotonic()
        finishing = asyncio.gather(*(conversation.finish() for conversation in conversations))
        if not await within(self.clock, deadline_s, finishing):
            finishing.cancel()
            await asyncio.gather(finishing, return_exceptions=True)
        for conversation in conversations:
            conversation.end(wire.CLOSE_GOING_AWAY, NodeStopping())
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        left_s = max(_UNWIND_S_MIN, deadline_s - (self.clock.monotonic() - started))
        ending = asyncio.gather(*self._tasks, return_exceptions=True)
        if not await within(self.clock, left_s, ending):
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def join(self, member: RemoteMember, options: wire.GroupOptions) -> None:
        """Make a connection's member one of its group's; see ``EventBus.join``."""
        await self.bus.join(
            member.topic,
            member.group,
            member,
            deliveries_count_max=self.settings.deliveries_count_max,
            **options_given(options),
        )

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        """Do something that takes time, and keep hold of it."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of /groups failed: %r", error, exc_info=error)

    def forget(self, conversation: GroupsConversation) -> None:
        """The connection is gone."""
        self._conversations.discard(conversation)

    def metrics(self) -> Iterable[tuple[str, str, float]]:
        """What ``/metrics`` shows of the door: name, meaning, value."""
        counts = [len(each.members) for each in self.bus.get_subscriptions() if each.is_shared]
        yield "tidings_groups_connections", "Open connections of the door /groups.", len(self._conversations)
        yield "tidings_groups_shared", "Groups that are shared through the node.", len(counts)
        yield "tidings_groups_members", "Members of shared groups, here and elsewhere.", sum(counts)
        out = sum(conversation.unanswered_count for conversation in self._conversations)
        yield "tidings_groups_unanswered", "Events that remote members have and have not answered.", out

    async def _sweep(self) -> None:
        """Close what has not said hello in time, and those whose token has expired, also if they are silent."""
        while True:
            await self.clock.sleep(_SWEEP_INTERVAL_S)
            for conversation in list(self._conversations):
                conversation.is_valid()


def groups_door(services: Services, settings: GroupsSettings | None = None) -> GroupsDoor:
    """The door over a node's parts."""
    dispatcher = services.dispatcher

    def reached(seq: int) -> Awaitable[None] | None:
        return None if dispatcher.seq >= seq else dispatcher.reached(seq)

    access = services.settings.access
    authority = Authority(services.verifier, services.book, services.clock, is_open=access.is_open)
    return GroupsDoor(
        services.bus,
        authority,
        clock=services.clock,
        epoch=services.log.position.epoch,
        settings=settings,
        reached=reached,
        message_bytes_max=services.settings.server.message_bytes_max,
    )
