"""What a manager hands in after its commit: the only way into the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from tidings.access.visibility import ReadScope

from .contexts import EventContext

SEQ_MAX: Final = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""

SummaryValue = None | bool | int | str | tuple[str, ...]
_NO_HINT: Final[Mapping[str, str]] = MappingProxyType({})


class ResumeHint(msgspec.Struct, frozen=True):
    """Where a descriptor stands among several of one commit. Never leaves the gateway."""

    global_seq: int
    local_order: int


class EventDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """
    One thing that happened, as the manager tells it that is in charge of it. It does not change, nor do its summary and its hint.

    Construction checks nothing; ``SourceIntake.submit`` does, so that there is one place that refuses and one list of reasons.
    """

    source_manager: str
    event_class: str
    """``graph``, ``system``, ``network``, ``security``, or ``app.<slug>``."""
    event_type: str
    sequence_anchor_hint: int
    """The record's seq for ``graph``; a count of the source's own that only grows otherwise."""
    operation_context: EventContext
    app_id: str
    domain_id: str | None
    """The topic for ``graph``."""
    payload_summary: Mapping[str, SummaryValue]
    read_scope: ReadScope | None = None
    """What it takes to read the record that it tells of: for ``graph``, and for app events that are read by right."""
    scope_hint: Mapping[str, str] = _NO_HINT
    audience_hint: object = None
    """Taken along and never believed."""
    resume_hint: ResumeHint | None = None

    def __post_init__(self) -> None:
        # Copied even if it is read-only: somebody may hold what it shows.
        if isinstance(self.payload_summary, dict | MappingProxyType):
            msgspec.structs.force_setattr(self, "payload_summary", MappingProxyType(dict(self.payload_summary)))
        if self.scope_hint is not _NO_HINT and isinstance(self.scope_hint, dict | MappingProxyType):
            msgspec.structs.force_setattr(self, "scope_hint", MappingProxyType(dict(self.scope_hint)))
