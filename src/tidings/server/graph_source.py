"""
What the gateway is told of committed records: one descriptor for each that names objects, several if it names many.

``descriptors_of`` is the only place that makes them, for the live events and for those that are read again from the log, so both tell the same.
``GraphSource`` listens to the dispatcher behind the access book and the app registry: what is told was committed, and whoever lost the right to
see it has lost it before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import orjson

from tidings.access.administration import ACCESS_TOPIC
from tidings.gateway.constants import SUMMARY_BYTES_MAX, SUMMARY_CHARS_MAX, SUMMARY_ITEMS_MAX
from tidings.gateway.contexts import RequestContext
from tidings.gateway.descriptors import EventDescriptor, ResumeHint, SummaryValue
from tidings.gateway.errors import DescriptorRefused
from tidings.gateway.event_types import GRAPH_MANAGER
from tidings.gateway.intake import IntakeChannel
from tidings.log.record import Record

from .event_rights import read_scope_of
from .objects import objects_of

logger = logging.getLogger(__name__)

_TRACE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_PARTS_BYTES: Final = 32
"""What ``part`` and ``parts`` add to a summary, at most."""
_FEW_CHARS: Final = 600
"""So many characters in all fit beside everything else, however they are encoded."""


def descriptors_of(record: Record, default_app: str) -> list[EventDescriptor]:
    """
    What a record has to tell: nothing, unless it names objects.

    A record with more objects than one summary holds takes several, each with ``part`` and ``parts``; the same ones every time.
    """
    objects = objects_of(record)
    if not objects:
        return []
    meta = record.meta
    app = meta.app or default_app
    context = context_of(record, app)
    owner = context.requester_identity_id
    about: dict[str, SummaryValue] = {"op_count": len(objects), "op_kinds": (meta.type,), "space_id": meta.space_id}
    if owner is not None:
        about["owner_identity_id"] = owner
    groups = list(_groups(objects, about))
    scope = read_scope_of(record)
    event_type = _event_type(meta.topic, objects)
    return [
        EventDescriptor(
            source_manager=GRAPH_MANAGER,
            event_class="graph",
            event_type=event_type,
            sequence_anchor_hint=record.seq,
            operation_context=context,
            app_id=app,
            domain_id=meta.topic,
            payload_summary={
                "object_ids": group,
                **about,
                **({"part": at + 1, "parts": len(groups)} if len(groups) > 1 else {}),
            },
            resume_hint=ResumeHint(record.seq, at),
            read_scope=scope,
        )
        for at, group in enumerate(groups)
    ]


def context_of(record: Record, app: str) -> RequestContext:
    """On whose behalf a record was published."""
    meta = record.meta
    actor = meta.actor.get("user_id") if isinstance(meta.actor, Mapping) else meta.actor
    owner = actor if isinstance(actor, str) and 0 < len(actor) <= SUMMARY_CHARS_MAX else None
    trace_id = meta.trace_id
    return RequestContext(
        app_id=app,
        requester_identity_id=owner,
        trace_id=trace_id if trace_id is not None and _TRACE_ID.fullmatch(trace_id) else f"seq-{record.seq}",
    )


def _event_type(topic: str, objects: tuple[str, ...]) -> str:
    if topic == ACCESS_TOPIC:
        return "graph.acl_changed"
    if all(each.startswith("rating:") for each in objects):
        return "graph.rating_changed"
    return "graph.object_mutated"


def _groups(objects: tuple[str, ...], about: Mapping[str, SummaryValue]) -> Iterator[tuple[str, ...]]:
    """The objects in as many groups as it takes, each in their order, that fit into a summary with what else it says."""
    if len(objects) <= SUMMARY_ITEMS_MAX and sum(map(len, objects)) <= _FEW_CHARS:
        yield objects
        return
    room = SUMMARY_BYTES_MAX - _PARTS_BYTES - len(orjson.dumps({"object_ids": [], **about}))
    group: list[str] = []
    left = room
    for each in objects:
        size = len(orjson.dumps(each)) + 1
        if group and (size > left or len(group) == SUMMARY_ITEMS_MAX):
            yield tuple(group)
            group, left = [], room
        group.append(each)
        left -= size
    yield tuple(group)


class GraphSource:
    """
    Tells the gateway of every committed record that names objects, in seq order.

    What the gateway refuses is logged here and recorded there; the record stands, and the next one is told. The commit is never undone.

    Nothing is made of records while nobody is there to be told, and nobody could come back for them: whoever subscribes is told where to read on.

    Args:
        channel: The graph manager's way into the gateway.
        default_app: The app of records that name none.
        is_heard: Whether somebody is subscribed, or could come back with a token.
    """

    def __init__(
        self, channel: IntakeChannel, default_app: Callable[[], str], is_heard: Callable[[], bool] = lambda: True
    ) -> None:
        self._channel = channel
        self._default_app = default_app
        self._is_heard = is_heard
        self.refused_count = 0
        """Records that could not be told."""

    def committed(self, records: Sequence[Record]) -> None:
        """See ``log.dispatcher.Listener``."""
        if not self._is_heard():
            self._channel.pass_over(records[-1].seq)
            return
        first: tuple[int, DescriptorRefused] | None = None
        before = self.refused_count
        for record in records:
            try:
                self._tell(record)
            except DescriptorRefused as error:
                self.refused_count += 1
                first = first or (record.seq, error)
        if first is not None:
            # One line for them all: each is on record, and it is publishers who decide how many there are.
            more = self.refused_count - before - 1
            logger.error("the record at seq %d could not be told to subscribers: %s; and %d more", *first, more)

    def _tell(self, record: Record) -> None:
        """
        One record's descriptors; if one is refused, the rest are not told either.

        Raises:
            DescriptorRefused: The gateway does not take one.
        """
        for descriptor in descriptors_of(record, self._default_app()):
            self._channel.submit(descriptor, record.seq)
