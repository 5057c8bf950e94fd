"""
Subscriptions: a handler, the group it works for, and how.

``SubscriptionRegistry`` collects subscriptions apart from a bus, the way the document's example does; a bus that is given
the registry takes them over when it starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidings.core.actors import Capability
from tidings.core.errors import SettingsError
from tidings.core.events import Event
from tidings.core.names import check_topic_and_group
from tidings.core.settings import checked

from .errors import SubscriptionExists
from .filtering import FilterChain
from .group import Group
from .handlers import Handler
from .members import LocalMember, Members
from .settings import Backoff, SubscriptionSettings

__all__ = ["Subscription", "SubscriptionRegistry", "make_settings", "settings_of"]


@dataclass(eq=False)
class Subscription:
    """Who handles a group's events, and its options; ``group_state`` while a bus runs it."""

    subscription_id: str
    topic: str
    group: str
    handler: Handler | None
    """``None`` if the group is shared by members that come and go."""
    settings: SubscriptionSettings
    advanced_filters: Sequence[Any] = ()
    capabilities: frozenset[Capability] = frozenset()
    key_of: Callable[[Event], object] | None = None
    group_state: Group | None = field(default=None, repr=False)
    members: Members = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sole = None
        if self.handler is not None:
            sole = LocalMember(self.handler, self.settings.workers, f"tidings-{self.topic}-{self.group}")
        self.members = Members(sole)

    @property
    def is_shared(self) -> bool:
        """Whether members share it; if not, one handler has it to itself."""
        return self.handler is None

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


def settings_of(settings: SubscriptionSettings | None, options: Mapping[str, Any]) -> SubscriptionSettings:
    """
    The settings given at once, or those made of single options.

    Raises:
        SettingsError: Both are given, or one is out of its range.
    """
    if settings is not None and options:
        raise SettingsError(next(iter(options)), "is given beside settings, which say all of it")
    return checked(settings or make_settings(**options))


class SubscriptionRegistry:
    """Subscriptions by id, and by topic and group."""

    def __init__(self) -> None:
        self._by_id: dict[str, Subscription] = {}
        self._numbers = itertools.count(1)

    def register_subscription(
        self,
        topic: str,
        handler: Handler | None,
        *,
        group: str = "default",
        advanced_filters: Sequence[Any] = (),
        capabilities: Sequence[Capability] = (),
        key_of: Callable[[Event], object] | None = None,
        settings: SubscriptionSettings | None = None,
        **options: Any,
    ) -> tuple[str, Subscription]:
        """
        Add a subscription; its id and itself. Without a handler it is one that members share (``EventBus.join``).

        Raises:
            InvalidName: A name breaks the grammar.
            SubscriptionExists: The group has one here.
            SettingsError: An option is out of its range, or the handler or ``key_of`` cannot be called.
        """
        topic, group = check_topic_and_group(topic, group)
        if self.find(topic, group) is not None:
            raise SubscriptionExists(topic, group)
        if handler is not None and not callable(handler):
            raise SettingsError("handler", f"must be a function or a coroutine function, not {type(handler).__name__}")
        if key_of is not None and not callable(key_of):
            raise SettingsError("key_of", f"must be a function of an event, not {type(key_of).__name__}")
        subscription = Subscription(
            subscription_id=f"sub-{next(self._numbers)}",
            topic=topic,
            group=group,
            handler=handler,
            settings=settings_of(settings, options),
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

    def remove(self, subscription_id: str) -> bool:
        """Take a subscription out; whether it was there."""
        return self._by_id.pop(subscription_id, None) is not None
