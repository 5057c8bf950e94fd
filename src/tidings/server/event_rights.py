"""
The rights that it takes to read an event and to publish one: the same over HTTP and at every endpoint.

An event is in a topic and in a space, and takes the right on both. If it names partitions, reading takes the right on one of them, as for
sync clients, who get what is in any partition that they may ask for; publishing takes the right on all of them. If it is in a project, it
takes the right on that too. So nobody who is bound to some partitions reads others through the topic that sync clients' events are stored
in.

Topics whose records Tidings itself acts on are not published to: whoever could write a grant into ``access`` by hand would need no other
right, and an unchecked policy would close the book. Nor are those of sync clients: sync checks each event's partitions and profile, and
that its client is who it says.

A record that holds an event, such as one of the topic ``schedule`` whose event waits for its time, takes the rights on that event in addition to
those on itself. ``_read_scope`` is the only place that decides this; dead letters and envelopes go through it too.

An event's actor is who publishes it. Another actor is named only by who was given the right to publish for that actor, as a gateway is:
otherwise everybody could write what others seem to have done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from tidings.access.administration import ACCESS_TOPIC
from tidings.access.apps import APPS_TOPIC
from tidings.access.audit import AUDIT_TOPIC
from tidings.access.authentication import Authenticator
from tidings.access.book import Capsule
from tidings.access.errors import Forbidden
from tidings.access.resources import Action, Resource, actor, normal, partition, space, topic
from tidings.access.visibility import ReadScope, may_read, may_read_of_topic
from tidings.bus.delayed_records import held_content, holds_event
from tidings.bus.reserved import SCHEDULE_TOPIC
from tidings.bus.store import DeadLetter
from tidings.core.events import Actor, Event, EventMeta
from tidings.core.names import check_space, check_topic
from tidings.ledger.records import LEDGER_TOPIC
from tidings.log.interface import Authorise
from tidings.log.record import Record
from tidings.sync.dialects import DIALECTS

from .errors import ForeignActor, ReservedTopic

_DIALECTS: Final = {dialect.topic: dialect for dialect in DIALECTS}
_OWN_TOPICS: Final = frozenset({ACCESS_TOPIC, APPS_TOPIC, AUDIT_TOPIC, LEDGER_TOPIC, SCHEDULE_TOPIC, *_DIALECTS})
_UNKNOWN: Final = ("",)
"""The partition of an event in a project whose payload cannot be read: no claim and no grant names it."""


def may_get(capsule: Capsule, action: Action, record: Record) -> bool:
    """Whether a record may be shown: ``action`` is how it is asked for."""
    return may_read(capsule, action, read_scope_of(record))


def may_get_of_topic(capsule: Capsule, action: Action, record: Record) -> bool:
    """The same for whoever has the right on the topic."""
    return may_read_of_topic(capsule, action, read_scope_of(record))


def read_scope_of(record: Record) -> ReadScope:
    """What it takes to read a record."""
    meta = record.meta
    return _read_scope(meta.topic, meta.type, meta.space_id, meta.partitions, record.payload_json)


def may_read_letter(capsule: Capsule, letter: DeadLetter) -> bool:
    """Whether a dead letter, which holds its event, may be shown."""
    meta = letter.event.get("meta", {})
    kind, partitions = str(meta.get("type", "")), tuple(meta.get("partitions", ()))
    is_payload_needed = bool(partitions) or letter.topic == SCHEDULE_TOPIC
    payload = msgspec.json.encode(letter.event.get("payload")) if is_payload_needed else b""
    return may_read(capsule, Action.READ, _read_scope(letter.topic, kind, letter.space_id, partitions, payload))


def require_publish(authenticator: Authenticator, capsule: Capsule, event: Event) -> None:
    """
    Make sure that an event may be published as it is, now; to Tidings' own topics none ever may.

    Raises:
        InvalidName: Topic or space break their grammar.
        ReservedTopic, ForeignActor, Forbidden, TokenRevoked, TokenExpired: It may not.
    """
    authenticator.check(capsule)
    require_publish_by(capsule, event)


def require_publish_by(capsule: Capsule, event: Event) -> None:
    """
    Make sure that an event may be published with these rights, however old the token is.

    Raises:
        InvalidName: Topic or space break their grammar.
        ReservedTopic, ForeignActor, Forbidden, TokenRevoked: It may not.
    """
    meta = event.meta
    name = check_topic(meta.topic)
    if name in _OWN_TOPICS:
        raise ReservedTopic(name)
    capsule.require_event(Action.PUBLISH, name, check_space(meta.space_id))
    for each in meta.partitions:
        if not capsule.extends_to(Action.PUBLISH, partition(each)):
            raise Forbidden(capsule.context.subject, Action.PUBLISH, partition(each))
    _require_actor(capsule, meta.actor)


def publish_questions(event: Event) -> Iterator[tuple[Action, Resource]]:
    """Yield the rights that publishing an event takes, for ``Capsule.decide_ahead``."""
    meta = event.meta
    yield Action.PUBLISH, topic(str(meta.topic))
    yield Action.PUBLISH, space(str(meta.space_id))
    for name in meta.partitions:
        yield Action.PUBLISH, partition(name)


class PublishRights:
    """
    The rights of one publisher on the events of one request.

    Args:
        authenticator: Checks whether the token is still valid.
        capsule: The publisher's rights.
    """

    def __init__(self, authenticator: Authenticator, capsule: Capsule) -> None:
        self._authenticator = authenticator
        self._capsule = capsule
        self._allowed: dict[int, tuple[EventMeta, tuple[object, ...], int]] = {}

    def allow(self, event: Event) -> None:
        """
        Make sure that an event may be published, now, and remember that.

        Raises:
            As ``require_publish``.
        """
        require_publish(self._authenticator, self._capsule, event)
        meta = event.meta
        asked = meta.topic, meta.space_id, meta.partitions, self._capsule.subject
        self._allowed[id(meta)] = meta, asked, self._capsule.version

    def authorise(self, event: Event) -> None:
        """
        Make sure of it again, when the log accepts the event: its rights are decided again only if access or the event has changed.

        Raises:
            As ``require_publish``.
        """
        meta = event.meta
        allowed, asked, version = self._allowed.get(id(meta), (None, (), -1))
        is_same = allowed is meta and asked == (meta.topic, meta.space_id, meta.partitions, meta.actor)
        if is_same and version == self._capsule.version:
            self._authenticator.check(self._capsule)  # Time goes on, whatever else stays.
        else:
            require_publish(self._authenticator, self._capsule, event)


def publish_right(authenticator: Authenticator, capsule: Capsule, event: Event) -> Authorise:
    """
    Make sure that an event may be published, now; the answer makes sure of it again, when the log accepts it. All rights are gone through
    then only if some have changed meanwhile, or the event has.

    Raises:
        As ``require_publish``, which both do.
    """
    rights = PublishRights(authenticator, capsule)
    rights.allow(event)
    return rights.authorise


def _require_actor(capsule: Capsule, given: str | Actor | Mapping[str, object] | None) -> None:
    """Make sure that an event's actor is its publisher, or one for whom that one may publish."""
    subject = capsule.context.subject
    if given == subject:
        return
    named = given.user_id if isinstance(given, Actor) else given.get("user_id") if isinstance(given, Mapping) else given
    if not isinstance(named, str) or not named:
        raise ForeignActor(subject, None)
    # Another spelling of a name would be stored as it is, and read as somebody else.
    if named != subject and (named != normal(named) or not capsule.allows(Action.PUBLISH, actor(named))):
        raise ForeignActor(subject, named)


def _read_scope(
    topic_name: str, kind: str, space_id: str, partitions: tuple[str, ...], payload_json: bytes
) -> ReadScope:
    """Return the scope of a record, including that of the event it holds. A held event that cannot be read is shown to no subject."""
    if topic_name == SCHEDULE_TOPIC and holds_event(kind):
        held = held_content(payload_json)
        if held is None or held.meta.topic == SCHEDULE_TOPIC:
            return ReadScope(topic_name, space_id, partitions, is_readable=False)
        inner = _read_scope(held.meta.topic, held.meta.type, space_id, held.meta.partitions, held.payload)
        return ReadScope(topic_name, space_id, partitions, inner=inner)
    dialect = _DIALECTS.get(topic_name)
    if not partitions or dialect is None:
        return ReadScope(topic_name, space_id, partitions)
    scope = dialect.scope_of(partitions, payload_json)
    return ReadScope(topic_name, space_id, scope.partitions or _UNKNOWN, scope.project)
