"""
What the app manager tells the gateway in the name of apps: one event for each committed record that an app has declared an event type for.

Nobody else submits an app's events. A program that wants one told publishes a record of its app: what is told was committed, by somebody who
may publish it, and an app's declaration says which of its fields are told.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tidings.access.apps import AppEventType, AppRegistry
from tidings.core.errors import TidingsError
from tidings.core.validation import UNREADABLE
from tidings.gateway.constants import SUMMARY_ITEMS_MAX
from tidings.gateway.descriptors import EventDescriptor, SummaryValue
from tidings.gateway.errors import DescriptorRefused
from tidings.gateway.intake import IntakeChannel
from tidings.log.record import Record

from .event_rights import read_scope_of
from .graph_source import context_of

logger = logging.getLogger(__name__)


class AppSource:
    """
    A listener of the dispatcher, behind the access book and the app registry.

    Args:
        apps: Which event types there are.
        channel: The app manager's way into the gateway.
    """

    def __init__(self, apps: AppRegistry, channel: IntakeChannel) -> None:
        self._apps = apps
        self._channel = channel
        self._anchors: Counter[str] = Counter()
        self.refused_count = 0
        """Events that the gateway did not take; it has put each on record."""

    def committed(self, records: Sequence[Record]) -> None:
        """See ``log.dispatcher.Listener``."""
        for record in records:
            for declared in self._apps.event_types_of(record.topic, record.meta.type, record.meta.app):
                for summary in _summaries(record, declared):
                    self._tell(record, declared, summary)

    def _tell(self, record: Record, declared: AppEventType, summary: Mapping[str, SummaryValue]) -> None:
        source = f"app.{declared.slug}"
        context = context_of(record, declared.slug)
        owner = context.requester_identity_id
        is_owners = "requester_identity_id" in declared.scope_anchors
        if is_owners and owner is None:
            return  # it would be nobody's, and so everybody's
        self._anchors[source] += 1
        descriptor = EventDescriptor(
            source_manager=source,
            event_class=source,
            event_type=declared.event_type,
            sequence_anchor_hint=self._anchors[source],
            operation_context=context,
            app_id=declared.slug,
            domain_id=record.topic,
            payload_summary=summary,
            scope_hint={"requester_identity_id": owner} if is_owners and owner else {},
            read_scope=read_scope_of(record) if declared.audience == "acl" else None,
        )
        try:
            self._channel.submit(descriptor, self._anchors[source])
        except DescriptorRefused as error:
            self.refused_count += 1
            logger.warning("%s of the record at seq %d is not told: %s", declared.event_type, record.seq, error)


def _summaries(record: Record, declared: AppEventType) -> Iterator[dict[str, SummaryValue]]:
    """What is told of a record: what its payload says under the declared names, several times if it names many objects."""
    wanted = {*declared.payload_fields, *declared.optional_fields} - {"object_ids"}
    summary: dict[str, SummaryValue] = {}
    if wanted:
        try:
            payload = msgspec.json.decode(record.payload_json)
        except (*UNREADABLE, TidingsError):  # sealed: then the gateway says what is missing
            payload = None
        if isinstance(payload, dict):
            summary = {name: _plain(payload[name]) for name in wanted if name in payload}
    if not declared.is_object_scoped:
        yield summary
    else:
        objects = record.meta.objects
        for at in range(0, len(objects), SUMMARY_ITEMS_MAX):
            yield {**summary, "object_ids": objects[at : at + SUMMARY_ITEMS_MAX]}


def _plain(value: object) -> SummaryValue:
    """As the gateway takes it; what it does not take it refuses, with a record of that."""
    return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]
