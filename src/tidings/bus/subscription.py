"""
Subscriptions: a handler, its group, and the options.

``SubscriptionRegistry`` collects subscriptions apart from a bus; a bus that is given the registry starts them when it starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

from tidings.core.errors import SettingsError
from tidings.core.events import Capability, Event
from tidings.core.names import check_topic_and_group
from tidings.core.settings import checked

from .errors import SubscriptionExists
from .filtering import FilterChain
from .group import Group
from .handlers import Handler
from .members import LocalMember, Members
from .payloads import bind_handler
from .reserved import check_not_reserved
from .settings import Backoff, SubscriptionSettings


class SharedGroupOptions(TypedDict, total=False):
    """What ``join`` takes as keywords, beside what it names itself; see ``SubscriptionSettings`` for what each one does."""

    max_inflight: int
    max_inflight_bytes: int
    waiting_retries_max: int
    stall_timeout_s: float
    backoff_base: float
    """Seconds; ``backoff.base_s`` of the settings."""
    backoff_mult: float
    backoff_max: float
    max_retries: int
    """After the first delivery and this many retries the event is a dead letter; ``backoff.retries_max`` of the settings."""
    start: Literal["earliest", "latest"] | int
    order: Literal["none", "key", "strict"]
    by_priority: bool
    ack_deadline_ms: int | None


class SubscriptionOptions(SharedGroupOptions, total=False):
    """The same of ``subscribe`` and ``subscriber``."""

    workers: int
    batch_count_max: int


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
    is_added: bool = field(default=False, repr=False)
    """Added to a bus that runs, which has not started it yet."""

    def __post_init__(self) -> None:
        sole = None
        if self.handler is not None:
            handler = bind_handler(self.handler, takes_lists=self.settings.batch_count_max > 1)
            sole = LocalMember(handler, self.settings.workers, f"tidings-{self.topic}-{self.group}")
        self.members = Members(sole)
        self.filter_chain()  # refused where it is written, not when the bus starts

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


_BACKOFF: Mapping[str, str] = {
    "backoff_base": "base_s",
    "backoff_mult": "mult",
    "backoff_max": "max_s",
    "max_retries": "retries_max",
}


def settings_of(settings: SubscriptionSettings | None, options: Mapping[str, Any]) -> SubscriptionSettings:
    """
    The settings given at once, or those made of single options.

    Raises:
        SettingsError: Both are given, or one is unknown or out of its range.
    """
    if settings is not None:
        if options:
            raise SettingsError(next(iter(options)), "is given beside settings, which say all of it")
        if not isinstance(settings, SubscriptionSettings):
            raise SettingsError("settings", f"must be SubscriptionSettings, not {type(settings).__name__}")
        return checked(settings)
    known = sorted({*_BACKOFF, *SubscriptionSettings.__struct_fields__} - {"backoff"})
    for name in options:
        if name not in known:
            raise SettingsError(name, "is no option of a subscription", f"there are: {', '.join(known)}")
    backoff = Backoff(**{own: options[name] for name, own in _BACKOFF.items() if name in options})
    others = {name: value for name, value in options.items() if name not in _BACKOFF}
    try:
        return checked(SubscriptionSettings(backoff=backoff, **others))
    except SettingsError as error:
        given = {f"backoff.{own}": name for name, own in _BACKOFF.items()}  # as the caller wrote it
        raise SettingsError(given.get(error.path, error.path), error.problem, error.hint) from None


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
        **options: Unpack[SubscriptionOptions],
    ) -> tuple[str, Subscription]:
        """
        Add a subscription; its id and itself. Without a handler it is one that members share (``EventBus.join``).

        Raises:
            InvalidName: A name breaks the grammar.
            SubscriptionExists: The group has one here.
            ReservedGroup: It is the bus's own.
            SettingsError: An option is unknown or out of its range, or the handler or ``key_of`` cannot be called.
            InvalidHandler: A parameter of the handler asks for something that there is not.
        """
        topic, group = check_topic_and_group(topic, group)
        check_not_reserved(topic, group)
        if self.find(topic, group) is not None:
            raise SubscriptionExists(topic, group)
        if handler is not None and not callable(handler):
            raise SettingsError("handler", f"must be a function or a coroutine function, not {type(handler).__name__}")
        if key_of is not None and not callable(key_of):
            raise SettingsError("key_of", f"must be a function of an event, not {type(key_of).__name__}")
        if not isinstance(advanced_filters, Sequence):
            raise SettingsError("advanced_filters", f"must be a list of filters, not {type(advanced_filters).__name__}")
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
