"""
Subscriptions: a handler, the group it works for, and how.

``SubscriptionRegistry`` collects subscriptions apart from a bus, the way the document's example does; a bus that is given
the registry takes them over when it starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidings.core.actors import Capability
from tidings.core.events import Event
from tidings.core.names import check_group, check_topic

from .filtering import FilterChain
from .group import Group
from .pipeline import Handler
from .settings import Backoff, SubscriptionSettings

__all__ = ["Subscription", "SubscriptionRegistry", "make_settings"]


@dataclass(eq=False)
class Subscription:
    """One group's handler and its options; ``group_state`` while a bus runs it."""

    subscription_id: str
    topic: str
    group: str
    handler: Handler
    settings: SubscriptionSettings
    advanced_filters: Sequence[Any] = ()
    capabilities: frozenset[Capability] = frozenset()
    key_of: Callable[[Event], object] | None = None
    group_state: Group | None = field(default=None, repr=False)

    @property
    def is_active(self) -> bool:
        """Whether a bus runs it."""
        return self.group_state is not None

    def filter_chain(self) -> FilterChain | None:
        """Its filters, joined by and; ``None`` if it has none."""
        return FilterChain(self.advanced_filters) if self.advanced_filters else None


def make_settings(
    *,
    workers: int = 1,
    max_inflight: int = 1000,
    backoff_base: float = 0.5,
    backoff_mult: float = 2.0,
    backoff_max: float = 30.0,
    max_retries: int = 5,
    **options: Any,
) -> SubscriptionSettings:
    """The document's flat options as settings."""
    backoff = Backoff(base_s=backoff_base, mult=backoff_mult, max_s=backoff_max, retries_max=max_retries)
    return SubscriptionSettings(workers=workers, max_inflight=max_inflight, backoff=backoff, **options)


class SubscriptionRegistry:
    """Subscriptions by id, and by topic and group."""

    def __init__(self) -> None:
        self._by_id: dict[str, Subscription] = {}
        self._numbers = itertools.count(1)

    def register_subscription(
        self,
        topic: str,
        handler: Handler,
        *,
        group: str = "default",
        advanced_filters: Sequence[Any] = (),
        capabilities: Sequence[Capability] = (),
        key_of: Callable[[Event], object] | None = None,
        settings: SubscriptionSettings | None = None,
        **options: Any,
    ) -> tuple[str, Subscription]:
        """Add a subscription; its id and itself."""
        subscription = Subscription(
            subscription_id=f"sub-{next(self._numbers)}",
            topic=check_topic(topic),
            group=check_group(group),
            handler=handler,
            settings=settings or make_settings(**options),
            advanced_filters=tuple(advanced_filters),
            capabilities=frozenset(Capability(capability) for capability in capabilities),
            key_of=key_of,
        )
        self._by_id[subscription.subscription_id] = subscription
        return subscription.subscription_id, subscription

    def find(self, topic: str, group: str) -> Subscription | None:
        """The subscription of a group."""
        return next((sub for sub in self._by_id.values() if (sub.topic, sub.group) == (topic, group)), None)

    def get(self, subscription_id: str) -> Subscription | None:
        """A subscription by id."""
        return self._by_id.get(subscription_id)

    def list(self, topic: str | None = None) -> list[Subscription]:
        """All subscriptions, or those of a topic."""
        return [sub for sub in self._by_id.values() if topic in (None, sub.topic)]

    def put_back(self, subscription: Subscription) -> None:
        """Take a subscription in again that was taken out, under its old id."""
        self._by_id[subscription.subscription_id] = subscription

    def remove(self, subscription_id: str) -> bool:
        """Take a subscription out; whether it was there."""
        return self._by_id.pop(subscription_id, None) is not None
