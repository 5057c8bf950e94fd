"""
The first engine: the only way in.

Each manager of the node that may tell of events has a channel, made at the start and never after. A descriptor is checked here, whole, while its
manager waits: its form first, then whether it may be told by this source, then whether there is room. What is refused is refused to the manager,
recorded, and changes nothing. What is taken gets its place behind the source's others and is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from .ceiling import Ceiling
from .constants import APP_SOURCES_MAX, ENVELOPE_BYTES_MAX, SUMMARY_CHARS_MAX
from .contexts import SYSTEM_APP, ReducedVisibility
from .descriptors import EventDescriptor
from .envelopes import encode
from .errors import DescriptorRefused, InvalidDescriptor, ProtocolCode, QueueFull, ScopeViolation, SourceRefused
from .event_types import (
    APP_MANAGER,
    CLASS_SOURCES,
    GRAPH_MANAGER,
    SOURCE_MANAGERS,
    EventDeclaration,
    EventDeclarations,
)
from .forms import check_count, check_form
from .isolation import scope_of
from .names import EventClass, class_of
from .queues import BoundedQueue

_OTHER_FIELDS: Final = 1_024
"""Bytes of an envelope that are neither scope nor summary, at most."""


class TaggedDescriptor(msgspec.Struct, frozen=True):
    """A descriptor that was taken, unchanged, with its place among those of its source."""

    source_manager: str
    local_order: int
    descriptor: EventDescriptor


class Rejection(msgspec.Struct, frozen=True):
    """A descriptor that was refused, for the record: nothing of its contents."""

    source_manager: str
    """Whose channel it came through."""
    error: DescriptorRefused
    event_type: str = ""
    app_id: str = ""
    trace_id: str = ""

    @classmethod
    def of(cls, source_manager: str, descriptor: object, error: DescriptorRefused) -> Rejection:
        """What is known of the descriptor, as far as it is what it should be."""
        if not isinstance(descriptor, EventDescriptor):
            return cls(source_manager, error)
        trace_id = getattr(descriptor.operation_context, "trace_id", "")
        texts = (
            text[:SUMMARY_CHARS_MAX] if isinstance(text, str) else ""
            for text in (descriptor.event_type, descriptor.app_id, trace_id)
        )
        return cls(source_manager, error, *texts)


class _Source:
    """What was last taken of a source."""

    __slots__ = ("anchor", "contents", "local_order", "proof", "suborder")

    def __init__(self) -> None:
        self.anchor = self.suborder = self.proof = -1
        self.local_order = 0
        self.contents: set[tuple[str, object]] = set()
        """Type and objects of what was taken at this anchor."""


class IntakeChannel:
    """One manager's way in. ``SourceIntake.register`` makes it."""

    __slots__ = ("_pass_over", "_submit", "source_manager")

    def __init__(
        self,
        source_manager: str,
        submit: Callable[[str, EventDescriptor, int], None],
        pass_over: Callable[[str, int], None],
    ) -> None:
        self.source_manager: Final = source_manager
        self._submit = submit
        self._pass_over = pass_over

    def submit(self, descriptor: EventDescriptor, proof: int) -> None:
        """
        Tell of an event, after the commit of what it tells of.

        Args:
            proof: That the commit is over: for graph events the seq of the record, which the log has to know as committed; for others a
                count of the source's own that grows with each commit.

        Raises:
            InvalidDescriptor: Something is missing, of the wrong kind, not well-formed, or was told before.
            ScopeViolation: It names more than one app or domain, or something that this source may not tell of.
            QueueFull: There is no room, its class is paused, or the gateway is not running.
        """
        self._submit(self.source_manager, descriptor, proof)

    def pass_over(self, seq: int) -> None:
        """Nothing will be told of records up to this seq: nobody is there who would hear of them."""
        self._pass_over(self.source_manager, seq)


class SourceIntake:
    """
    Checks, tags and passes on.

    Args:
        declarations: The event types there are.
        ceiling: What may wait.
        out: The queue to normalization.
        committed_seq: The last seq that is committed.
        is_app_known: Whether an app is registered.
        make_room: Asked when a graph event finds the ceiling reached; says whether there is room now.
        on_rejected: Told of everything that is refused.
        wake: Called when something was taken.
    """

    def __init__(
        self,
        declarations: EventDeclarations,
        ceiling: Ceiling,
        out: BoundedQueue[TaggedDescriptor],
        *,
        committed_seq: Callable[[], int],
        is_app_known: Callable[[str], bool],
        make_room: Callable[[], bool],
        on_rejected: Callable[[Rejection], None],
        wake: Callable[[], None],
    ) -> None:
        self.is_open = False
        """Whether the engines behind it run: before and after that everything is refused."""
        self._declarations = declarations
        self._ceiling = ceiling
        self._out = out
        self._committed_seq = committed_seq
        self._is_app_known = is_app_known
        self._make_room = make_room
        self._on_rejected = on_rejected
        self._wake = wake
        self._is_sealed = False
        self._since = 0
        self._channels: set[str] = set()
        self._sources: dict[str, _Source] = {}

    @property
    def sources(self) -> frozenset[str]:
        """The managers that have a channel."""
        return frozenset(self._channels)

    @property
    def graph_seq(self) -> int:
        """Up to here nothing more will be told of: the seq of the last graph event, taken or refused; at first the last that was committed."""
        source = self._sources.get(GRAPH_MANAGER)
        return max(self._since, -1 if source is None else source.anchor)

    def register(self, source_manager: str) -> IntakeChannel:
        """
        The channel of a manager: one each, while the node is put together.

        Raises:
            SourceRefused: There is no such manager, it has its channel, or registration is over.
        """
        if self._is_sealed or source_manager not in SOURCE_MANAGERS or source_manager in self._channels:
            raise SourceRefused(source_manager)
        self._channels.add(source_manager)
        self._sources[source_manager] = _Source()
        return IntakeChannel(source_manager, self._submit, self._pass_over)

    def close_registration(self) -> None:
        """All channels there will be are there; what is committed by now is told by none of them."""
        self._is_sealed = True
        self._since = self._committed_seq()

    def _pass_over(self, channel: str, seq: int) -> None:
        if channel == GRAPH_MANAGER:
            self._since = max(self._since, min(seq, self._committed_seq()))

    # Taking a descriptor

    def _submit(self, channel: str, descriptor: EventDescriptor, proof: int) -> None:
        try:
            self._take(channel, descriptor, proof)
        except DescriptorRefused as error:
            if type(proof) is int:
                self._pass_over(channel, proof)
            self._on_rejected(Rejection.of(channel, descriptor, error))
            raise
        self._wake()

    def _take(self, channel: str, descriptor: EventDescriptor, proof: int) -> None:
        if not isinstance(descriptor, EventDescriptor):
            raise InvalidDescriptor("descriptor", "is no EventDescriptor", ProtocolCode.INVALID_TYPE)
        name = descriptor.event_type
        declaration = self._declarations.get(name) if isinstance(name, str) else None
        check_form(descriptor, declaration)
        source = self._source_of(descriptor.source_manager)
        event_class, anchor = class_of(descriptor.event_class), descriptor.sequence_anchor_hint
        suborder = self._check_place(descriptor, event_class is EventClass.GRAPH, proof, source)
        declaration, source = self._check_right(channel, descriptor, declaration, source)
        scope = scope_of(descriptor, declaration)
        # Without a hint the other bounds keep an envelope below its own.
        if descriptor.scope_hint:
            size = len(encode(scope)) + len(encode(descriptor.payload_summary)) + _OTHER_FIELDS
            if size > ENVELOPE_BYTES_MAX:
                problem = f"makes an envelope of up to {size} bytes, more than {ENVELOPE_BYTES_MAX}"
                raise InvalidDescriptor("scope_hint", problem, ProtocolCode.INVALID_ENCODING)
        if not self.is_open:
            raise QueueFull("event", "the gateway is not running")
        name = descriptor.source_manager
        if event_class is EventClass.GRAPH and not self._ceiling.has_room_for_envelope(name):
            self._make_room()
        self._ceiling.hold_envelope(name, declaration.event_class)
        # What is in the queue is below the ceiling, so it has room.
        self._out.put(TaggedDescriptor(name, source.local_order + 1, descriptor))
        source.local_order += 1
        if anchor != source.anchor:
            source.contents.clear()
        source.anchor, source.suborder, source.proof = anchor, suborder, proof
        if event_class is EventClass.GRAPH:
            source.contents.add((descriptor.event_type, descriptor.payload_summary["object_ids"]))

    def _source_of(self, name: str) -> _Source | None:
        source = self._sources.get(name)
        if (
            source is None
            and self._declarations.is_app_source(name)
            and len(self._sources) < APP_SOURCES_MAX + len(SOURCE_MANAGERS)
        ):
            source = self._sources[name] = _Source()
        return source

    def _check_place(self, descriptor: EventDescriptor, is_graph: bool, proof: int, source: _Source | None) -> int:
        """That the commit is over, and that this was not told before. Returns the place among events of the same anchor."""
        check_count("proof", proof)
        anchor, hint = descriptor.sequence_anchor_hint, descriptor.resume_hint
        if not is_graph:
            if source is not None and anchor <= source.anchor:
                raise InvalidDescriptor(
                    "sequence_anchor_hint", f"{anchor} is not above {source.anchor}", ProtocolCode.INVALID_ENCODING
                )
            if source is not None and proof <= source.proof:
                raise InvalidDescriptor("proof", f"{proof} is not above {source.proof}", ProtocolCode.INVALID_ENCODING)
            return 0
        if proof != anchor:
            raise InvalidDescriptor("proof", f"is for seq {proof}, not for {anchor}", ProtocolCode.INVALID_ENCODING)
        if anchor > self._committed_seq():
            raise InvalidDescriptor("proof", f"seq {anchor} is not committed", ProtocolCode.INVALID_ENCODING)
        if hint is not None and hint.global_seq != anchor:
            raise InvalidDescriptor(
                "resume_hint", f"is for seq {hint.global_seq}, not for {anchor}", ProtocolCode.INVALID_ENCODING
            )
        suborder = 0 if hint is None else hint.local_order
        if source is not None and (anchor, suborder) <= (source.anchor, source.suborder):
            raise InvalidDescriptor(
                "sequence_anchor_hint",
                f"seq {anchor} ({suborder}) is not after {source.anchor} ({source.suborder})",
                ProtocolCode.INVALID_ENCODING,
            )
        contents = (descriptor.event_type, descriptor.payload_summary.get("object_ids"))
        if source is not None and anchor == source.anchor and contents in source.contents:
            raise InvalidDescriptor(
                "payload_summary", f"was told before for seq {anchor}", ProtocolCode.INVALID_ENCODING
            )
        return suborder

    def _check_right(
        self, channel: str, descriptor: EventDescriptor, declaration: EventDeclaration | None, source: _Source | None
    ) -> tuple[EventDeclaration, _Source]:
        """That this source may tell of this, through this channel."""
        name, event_class = descriptor.source_manager, class_of(descriptor.event_class)
        context = descriptor.operation_context
        problem = None
        if source is None:
            problem = "source_manager", f"{name!r} is registered nowhere"
        elif name != channel and not (channel == APP_MANAGER and name.startswith("app.")):
            problem = "source_manager", f"{channel} tells of events in the name of {name}"
        elif event_class is not EventClass.APP and name not in CLASS_SOURCES[event_class]:  # type: ignore[index]
            problem = "event_class", f"{name} may not tell of {event_class} events"
        elif declaration is None:
            problem = "event_type", f"{descriptor.event_type} is not declared"
        elif name not in declaration.sources:
            problem = "event_type", f"{descriptor.event_type} belongs to {', '.join(sorted(declaration.sources))}"
        elif isinstance(context, ReducedVisibility) and context.source_manager != name:
            problem = "operation_context", f"is that of {context.source_manager}"
        elif descriptor.app_id != SYSTEM_APP and not self._is_app_known(descriptor.app_id):
            raise ScopeViolation("app_id", f"there is no app {descriptor.app_id!r}", ProtocolCode.INVALID_IDENTIFIER)
        if problem is not None:
            raise ScopeViolation(*problem, ProtocolCode.SCOPE_EXCEEDED)
        assert declaration is not None
        assert source is not None
        return declaration, source
