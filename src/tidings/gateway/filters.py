"""
What a subscriber asked for, checked and settled, and which events it takes in.

A filter can only narrow. What it names is held against the subscriber's context and rights before anything is registered, and the same
is asked again of every event: a filter that was allowed shows nothing that its bearer may not see now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from tidings.access.apps import AppRegistry
from tidings.access.book import Capsule
from tidings.access.resources import Action, node, topic
from tidings.access.visibility import Audience, ReadCapsule, ReadScope, may_observe_peers
from tidings.core.errors import InvalidEvent
from tidings.core.names import check_object, check_topic
from tidings.wire.gateway import CloseReason, SubscribeEvents

from .constants import CHANNELS_MAX, SUMMARY_ITEMS_MAX
from .contexts import RequestContext
from .envelopes import EventEnvelope, EventScope
from .event_types import EventDeclarations
from .names import EventClass, channel_of, class_of
from .refusals import SubscriptionClosed
from .resume_index import Retained

_ALWAYS_GATED: Final = ("system.*", "security.*")


class EventFilter(NamedTuple):
    """One channel, or one event type of it."""

    channel: str
    event_type: str | None

    def __str__(self) -> str:
        return self.event_type or f"{self.channel}.*"


class SubscriptionFilters(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection is subscribed to, for as long as it lives."""

    app_id: str
    events: tuple[EventFilter, ...]
    domain_id: str | None = None
    object_ids: frozenset[str] | None = None
    peer_identity_id: str | None = None

    @property
    def channels(self) -> tuple[str, ...]:
        """Each channel that something is asked of, once."""
        return tuple(dict.fromkeys(each.channel for each in self.events))


class AdminGate:
    """
    Which event types only administrators may ask for.

    Args:
        admin_channels: Event types, or families as ``network.*``, beside those that always are.
    """

    def __init__(self, admin_channels: Iterable[str] = ()) -> None:
        names = (*_ALWAYS_GATED, *admin_channels)
        self._types: Final = frozenset(name for name in names if not name.endswith(".*"))
        self._families: Final = tuple(name[:-1] for name in names if name.endswith(".*"))

    def covers(self, name: str) -> bool:
        """Whether an event type, or a family as ``graph.*`` as a whole, is for administrators."""
        return name in self._types or name.startswith(self._families)


class FilterRules:
    """
    Decides which filters can stand, and who is meant by an event.

    Args:
        declarations: The event types there are.
        apps: The apps there are, and the channels between them.
        gate: What is for administrators only.
    """

    def __init__(self, declarations: EventDeclarations, apps: AppRegistry, gate: AdminGate) -> None:
        self._declarations = declarations
        self._apps = apps
        self._gate = gate

    def settle(self, frame: SubscribeEvents, context: RequestContext, rights: Capsule) -> SubscriptionFilters:
        """
        The filters that a subscriber asked for.

        Raises:
            SubscriptionClosed: They make no sense (``filter_invalid``), or ask for what the subscriber may not see (``permission_denied``).
        """
        filters = self._checked(frame)
        self._require(filters, context, rights)
        return filters

    def _checked(self, frame: SubscribeEvents) -> SubscriptionFilters:
        if (frame.subscription_type is None) == (frame.channels is None):
            raise _invalid("give either subscription_type or channels")
        if frame.channels is None:
            channel = frame.subscription_type or ""
            events = [EventFilter(channel, frame.event_type)]
            if frame.event_type is not None and channel_of(frame.event_type) != channel:
                raise _invalid(f"event_type {frame.event_type[:64]!r} is not of {channel[:64]!r}: it can only narrow")
        else:
            if frame.event_type is not None:
                raise _invalid("event_type goes with subscription_type: a channel may be an event type itself")
            if not 1 <= len(frame.channels) <= CHANNELS_MAX:
                raise _invalid(f"channels must be 1 to {CHANNELS_MAX}")
            events = [
                EventFilter(name[:-2], None) if name.endswith(".*") else EventFilter(channel_of(name), name)
                for name in frame.channels
            ]
        for each in events:
            self._check_known(each)
        self._check_narrowing(frame, events)
        # A type beside its whole channel adds nothing.
        whole = {each.channel for each in events if each.event_type is None}
        kept = {each for each in events if each.event_type is None or each.channel not in whole}
        return SubscriptionFilters(
            app_id=frame.app_id,
            events=tuple(sorted(kept, key=str)),
            domain_id=frame.domain_id,
            object_ids=None if frame.object_ids is None else frozenset(map(_object, frame.object_ids)),
            peer_identity_id=frame.peer_identity_id,
        )

    def _check_known(self, event: EventFilter) -> None:
        declared = self._declarations.of_channel(event.channel) if class_of(event.channel) is EventClass.APP else None
        if class_of(event.channel) is None or declared == []:
            raise _invalid(f"there is no channel {event.channel[:64]!r}")
        if event.event_type is not None and self._declarations.get(event.event_type) is None:
            raise _invalid(f"there is no event type {event.event_type[:128]!r}")

    def _check_narrowing(self, frame: SubscribeEvents, events: Sequence[EventFilter]) -> None:
        if frame.object_ids is not None:
            if not 1 <= len(frame.object_ids) <= SUMMARY_ITEMS_MAX:
                raise _invalid(f"object_ids must be 1 to {SUMMARY_ITEMS_MAX}")
            if not all(self._is_object_scoped(each) for each in events):
                raise _invalid("object_ids works on graph events, and on app events that name objects")
        if frame.peer_identity_id is not None and any(each.channel != EventClass.NETWORK for each in events):
            raise _invalid("peer_identity_id works on network events only")
        if frame.domain_id is not None:
            try:
                check_topic(frame.domain_id)
            except InvalidEvent as error:
                raise _invalid(f"domain_id: {error.problem}") from error

    def _is_object_scoped(self, event: EventFilter) -> bool:
        if event.event_type is not None:
            declaration = self._declarations.get(event.event_type)
            return declaration is not None and declaration.is_object_scoped
        return all(each.is_object_scoped for each in self._declarations.of_channel(event.channel))

    def _require(self, filters: SubscriptionFilters, context: RequestContext, rights: Capsule) -> None:
        if filters.app_id != context.app_id:
            raise _denied(f"the connection is of app {context.app_id!r}")
        if not self._apps.is_enabled(context.app_id):  # since it was admitted
            raise _denied(f"there is no app {context.app_id!r}")
        if filters.domain_id is not None and not rights.allows(Action.READ, topic(filters.domain_id)):
            raise _denied(f"domain {filters.domain_id[:64]!r} may not be read")
        peer = filters.peer_identity_id
        if peer is not None and peer != context.requester_identity_id and not may_observe_peers(rights):
            raise _denied("peers may not be observed")
        for each in filters.events:
            if self._gate.covers(str(each)) and not _is_admin(context, rights):
                raise _denied(f"{each} is for administrators")
            owner = _owner_of(each.channel)
            if owner is not None and owner != context.app_id:
                domains = self._apps.readable_domains(context.app_id, owner)
                if not domains or (filters.domain_id is not None and filters.domain_id not in domains):
                    raise _denied(f"{each.channel} is of another app, and no channel leads there")

    def includes(
        self, filters: SubscriptionFilters, context: RequestContext, rights: Capsule, retained: Retained
    ) -> bool:
        """Whether a subscriber is to get an event: it asked for it, and may see it now. Makes no request; what was decided once is remembered."""
        envelope, capsule = retained.envelope, retained.capsule
        if capsule is None or not asks_for(filters, retained):
            return False
        if self._gate.covers(envelope.event_type) and not _is_admin(context, rights):
            return False
        return self._may_see(context, rights, retained.event_class, envelope.scope, capsule)

    def _may_see(
        self, context: RequestContext, rights: Capsule, event_class: EventClass, scope: EventScope, capsule: ReadCapsule
    ) -> bool:
        if scope.app_id is not None and scope.app_id != context.app_id:
            # Another app's event, and only by a channel that leads there.
            if event_class is not EventClass.APP or capsule.app_id != scope.app_id:
                return False
            if capsule.domain_id not in self._apps.readable_domains(context.app_id, scope.app_id):
                return False
        identity = context.requester_identity_id
        only = scope.requester_identity_id
        if only is not None and only != identity and event_class in (EventClass.GRAPH, EventClass.APP):
            return False
        if (
            capsule.audience is Audience.OBSERVERS
            and scope.peer_identity_id is not None
            and scope.peer_identity_id == identity
        ):
            return not rights.is_revoked
        return capsule.admits(rights)


AudienceKey = tuple[str, EventScope, str | None, Audience, ReadScope | None]


def key_of(envelope: EventEnvelope, capsule: ReadCapsule) -> AudienceKey:
    """What decides on who gets an event, but for its objects: equal keys, equal answers of ``FilterRules.includes``."""
    return envelope.event_type, envelope.scope, capsule.domain_id, capsule.audience, capsule.scope


def object_ids_of(retained: Retained) -> tuple[str, ...]:
    """The objects that an event names."""
    found = retained.envelope.payload_summary.get("object_ids")
    return found if isinstance(found, tuple) else ()


def asks_for(filters: SubscriptionFilters, retained: Retained) -> bool:
    """Whether an event is among what was asked for, whoever may see it."""
    event_type, scope, capsule = retained.envelope.event_type, retained.envelope.scope, retained.capsule
    return (
        capsule is not None
        and any(
            channel == retained.channel and (wanted is None or wanted == event_type)
            for channel, wanted in filters.events
        )
        and (filters.domain_id is None or filters.domain_id == capsule.domain_id)
        and (filters.peer_identity_id is None or filters.peer_identity_id == scope.peer_identity_id)
        and (filters.object_ids is None or not filters.object_ids.isdisjoint(object_ids_of(retained)))
    )


def _is_admin(context: RequestContext, rights: Capsule) -> bool:
    return context.is_admin and rights.allows(Action.ADMINISTER, node())


def _owner_of(channel: str) -> str | None:
    return channel.partition(".")[2] if class_of(channel) is EventClass.APP else None


def _object(name: str) -> str:
    """An object's id as records have it."""
    try:
        return check_object("object_ids", name)
    except InvalidEvent as error:
        raise _invalid(f"object_ids: {error.problem}: an object id is written type:id") from error


def _invalid(problem: str) -> SubscriptionClosed:
    return SubscriptionClosed(CloseReason.FILTER_INVALID, problem)


def _denied(problem: str) -> SubscriptionClosed:
    return SubscriptionClosed(CloseReason.PERMISSION_DENIED, problem)
