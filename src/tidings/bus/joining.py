"""A bus's subscriptions as members of the groups of a node: what ``EventBus.run`` does when it is given a client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from tidings.core.errors import SettingsError
from tidings.log.interface import Appended, Duplicate

from .subscription import Subscription


class NodeClient(Protocol):
    """What is needed of a client of a node; ``tidings.Client`` is one."""

    url: str

    async def start(self) -> None:
        """Connect."""

    async def stopped(self) -> None:
        """Wait until connecting again is of no use; raises why."""

    async def close(self, timeout_s: float = 10.0) -> None:
        """Let handlers finish within the time, and go."""

    @property
    def publish(self) -> Callable[..., Awaitable[Appended | Duplicate]]:
        """As ``EventBus.publish``."""

    async def cancel_delayed(self, event_id: str) -> bool:
        """As ``EventBus.cancel_delayed``."""

    @property
    def subscribe(self) -> Callable[..., Awaitable[object]]:
        """Become a member of a group: topic, group, handler, and the options of ``SharedGroupOptions``."""


_SAME_NAME = (
    *("max_inflight", "max_inflight_bytes", "waiting_retries_max", "stall_timeout_s"),
    *("start", "order", "by_priority", "ack_deadline_ms"),
)


def check_joinable(subscriptions: Sequence[Subscription], *, has_middlewares: bool) -> None:
    """
    Make sure that a node can do what these subscriptions ask for.

    Raises:
        SettingsError: One asks for something that only works in the process that has the log.
    """
    hint = "put it into the handler, or let one process work without a node"
    if has_middlewares:
        raise SettingsError("middlewares", "do not run through a node", hint)
    for each in subscriptions:
        for name, is_asked_for in (
            ("advanced_filters", each.advanced_filters),
            ("capabilities", each.capabilities),
            ("key_of", each.key_of),
            ("batch_count_max", each.settings.batch_count_max > 1),
        ):
            if is_asked_for:
                raise SettingsError(
                    name, f"group {each.group!r} of topic {each.topic!r} has it, which a node does not offer", hint
                )


async def join_groups(client: NodeClient, subscriptions: Sequence[Subscription]) -> None:
    """Make each of these a member of its group, with the group's options."""
    for each in subscriptions:
        settings, backoff = each.settings, each.settings.backoff
        assert each.handler is not None
        await client.subscribe(
            each.topic,
            each.group,
            each.handler,
            workers=settings.workers,
            backoff_base=backoff.base_s,
            backoff_mult=backoff.mult,
            backoff_max=backoff.max_s,
            max_retries=backoff.retries_max,
            **{name: getattr(settings, name) for name in _SAME_NAME},
        )
