"""
What an event takes to be shown to somebody, and to be published: the same at every entrance.

It is in a topic and in a space, and takes the right on both. If it names partitions, it takes the right on one of them to get it, as for
sync clients, who get what is in any partition that they may ask for; and on all of them to publish it. If it is in a project, it takes the
right on that too. So nobody who is bound to some partitions reads others through the topic that sync clients' events are stored in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from tidings.access.book import Capsule
from tidings.access.errors import Forbidden
from tidings.access.resources import Action, partition, project, space, topic
from tidings.bus.store import DeadLetter
from tidings.log.record import Record
from tidings.sync.dialects import DIALECTS
from tidings.sync.requests import Scope

__all__ = ["may_get", "may_get_of_topic", "may_read_letter", "require_partitions"]

_DIALECTS: Final = {dialect.topic: dialect for dialect in DIALECTS}
_UNKNOWN: Final = ("",)
"""The partition of an event in a project whose payload cannot be read: no claim and no grant names it."""


def may_get(capsule: Capsule, action: Action, record: Record) -> bool:
    """Whether a record may be shown: ``action`` is how it is asked for."""
    return capsule.allows(action, topic(record.topic)) and may_get_of_topic(capsule, action, record)


def may_get_of_topic(capsule: Capsule, action: Action, record: Record) -> bool:
    """The same for whoever has the right on the topic."""
    meta = record.meta
    if not capsule.allows(action, space(meta.space_id)):
        return False
    return not meta.partitions or _may_see(capsule, action, _scope(meta.topic, meta.partitions, record.payload_json))


def may_read_letter(capsule: Capsule, letter: DeadLetter) -> bool:
    """Whether a dead letter, which holds its event, may be shown."""
    if not capsule.allows_event(Action.READ, letter.topic, letter.space_id):
        return False
    partitions = tuple(letter.event.get("meta", {}).get("partitions", ()))
    payload = msgspec.json.encode(letter.event.get("payload"))
    return not partitions or _may_see(capsule, Action.READ, _scope(letter.topic, partitions, payload))


def require_partitions(capsule: Capsule, partitions: Iterable[str]) -> None:
    """
    Make sure that an event that names these partitions may be published.

    Raises:
        Forbidden: It may not; the error names the first that is missing.
    """
    for name in partitions:
        if not capsule.extends_to(Action.PUBLISH, partition(name)):
            raise Forbidden(capsule.context.subject, Action.PUBLISH, partition(name))


def _scope(topic_name: str, partitions: tuple[str, ...], payload_json: bytes) -> Scope:
    dialect = _DIALECTS.get(topic_name)
    return Scope(None, partitions) if dialect is None else dialect.scope_of(partitions, payload_json)


def _may_see(capsule: Capsule, action: Action, scope: Scope) -> bool:
    if scope.project is not None and not capsule.extends_to(action, project(scope.project)):
        return False
    return any(capsule.extends_to(action, partition(name)) for name in scope.partitions or _UNKNOWN)
