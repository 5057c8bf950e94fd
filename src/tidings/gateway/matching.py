"""
Who gets an event: found by what the event is, not by asking every subscriber.

Subscribers stand in an index by channel, app and domain; those who asked for objects, by object. Who is meant by one kind of event is
worked out once and kept, until access or apps change; whoever comes or goes is added to or taken from what is kept. So the cost of an event is
that of looking up its kind, and subscribers that it does not concern cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from .filters import AudienceKey, FilterRules, key_of, object_ids_of
from .names import EventClass
from .resume_index import Retained
from .subscribers import Subscriber

_KEPT_MAX: Final = 1024
"""Kinds of events whose audience is kept; with more, all are worked out anew."""

Members = dict[Subscriber, None]
_PlaceT = TypeVar("_PlaceT")


class Matching:
    """
    The index of subscribers, and the audiences that were worked out.

    Args:
        rules: Who is meant by an event.
        version: Changes whenever ``rules`` may answer otherwise: with access and with apps.
    """

    def __init__(self, rules: FilterRules, version: Callable[[], object]) -> None:
        self._rules = rules
        self._version_now = version
        self._version: object = None
        self._places: dict[str, dict[tuple[str, str | None], Members]] = {}
        self._objects: dict[tuple[str, str], Members] = {}
        self._kept: dict[str, dict[AudienceKey, tuple[Retained, Members]]] = {}
        """By channel: whoever comes or goes is asked for nothing but the events of theirs."""

    def add(self, subscriber: Subscriber) -> None:
        """From now on it is among those who are looked for."""
        for members in self._members_of(subscriber):
            members[subscriber] = None
        if subscriber.filters.object_ids is None and self._is_current():
            for retained, members in self._kept_for(subscriber):
                if self.includes(subscriber, retained):
                    members[subscriber] = None

    def remove(self, subscriber: Subscriber) -> None:
        """It is gone."""
        for _, members in self._kept_for(subscriber):
            members.pop(subscriber, None)
        filters = subscriber.filters
        for channel in filters.channels:
            if filters.object_ids is None:
                _take(self._places.get(channel, {}), (filters.app_id, filters.domain_id), subscriber)
            else:
                for name in filters.object_ids:
                    _take(self._objects, (channel, name), subscriber)

    def audience(self, retained: Retained) -> Mapping[Subscriber, None]:
        """Everybody who is to get an event now. Equal audiences of events of one kind are the same object."""
        if retained.capsule is None:
            return {}
        if not self._is_current():
            self._kept.clear()
            self._version = self._version_now()
        key = key_of(retained.envelope, retained.capsule)
        found = self._kept.get(retained.channel, {}).get(key)
        if found is None:
            if sum(map(len, self._kept.values())) >= _KEPT_MAX:
                self._kept.clear()
            members = {each: None for each in self._candidates(retained) if self.includes(each, retained)}
            found = self._kept.setdefault(retained.channel, {})[key] = retained, members
        if not self._objects:
            return found[1]
        by_object = {
            each: None
            for name in object_ids_of(retained)
            for each in self._objects.get((retained.channel, name), ())
            if self.includes(each, retained)
        }
        return {**found[1], **by_object} if by_object else found[1]

    def includes(self, subscriber: Subscriber, retained: Retained) -> bool:
        """Whether one subscriber is to get an event, now."""
        return self._rules.includes(subscriber.filters, subscriber.context, subscriber.rights, retained)

    def _is_current(self) -> bool:
        return self._version == self._version_now()

    def _candidates(self, retained: Retained) -> Iterable[Subscriber]:
        places = self._places.get(retained.channel, {})
        app = retained.envelope.scope.app_id
        domain = None if retained.capsule is None else retained.capsule.domain_id
        if app is not None and retained.event_class is not EventClass.APP:
            yield from places.get((app, None), ())
            if domain is not None:
                yield from places.get((app, domain), ())
        else:  # of no app, or of one whose events others may be let see
            for (_, wanted), members in places.items():
                if wanted is None or wanted == domain:
                    yield from members

    def _kept_for(self, subscriber: Subscriber) -> Iterable[tuple[Retained, Members]]:
        return (found for channel in subscriber.filters.channels for found in self._kept.get(channel, {}).values())

    def _members_of(self, subscriber: Subscriber) -> Iterable[Members]:
        filters = subscriber.filters
        for channel in filters.channels:
            if filters.object_ids is None:
                yield self._places.setdefault(channel, {}).setdefault((filters.app_id, filters.domain_id), {})
            else:
                for name in filters.object_ids:
                    yield self._objects.setdefault((channel, name), {})


def _take(kept: dict[_PlaceT, Members], place: _PlaceT, subscriber: Subscriber) -> None:
    members = kept.get(place)
    if members is not None:
        members.pop(subscriber, None)
        if not members:
            del kept[place]
