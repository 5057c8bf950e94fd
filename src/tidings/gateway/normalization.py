"""
The second engine: descriptors become envelopes.

An envelope gets its id, its place, its scope and its resume token here, and is in the resume index before any later engine sees it. The order
within a class is that of intake, and the summary passes unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from tidings.access.visibility import ReadRequest
from tidings.core.clock import Clock

from .ceiling import Ceiling
from .contexts import RequestContext
from .descriptors import EventDescriptor
from .envelopes import EventEnvelope, GlobalAnchor, SourceAnchor, encode
from .errors import DescriptorRefused, ProtocolCode, ScopeViolation
from .event_types import EventDeclaration, EventDeclarations
from .forms import check_form
from .intake import Rejection, TaggedDescriptor
from .isolation import scope_of
from .names import EventClass
from .queues import BoundedQueue, ClassQueues
from .resume_index import ResumeIndex, Retained
from .resume_tokens import KeyedHash, ResumeTokens

_EVENT_ID_BYTES: Final = 16


class Normalized(msgspec.Struct, frozen=True):
    """An envelope on its way to its audience, with what that is asked for with."""

    retained: Retained
    request: ReadRequest
    labels: tuple[str, ...]
    """What the contract names beside the request: how its audience is found."""
    local_order: int


class EnvelopeBuilder:
    """
    Makes envelopes of descriptors: for live events, and for those that are read again from the log.

    Args:
        tokens: Issues their resume tokens.
        contract_key: 32 random bytes, for one life of the gateway: whoever lacks it cannot guess a contract's inputs.
        clock: For the time of issue and of emission.
        random_bytes: As ``os.urandom``.
    """

    def __init__(
        self, tokens: ResumeTokens, contract_key: bytes, clock: Clock, random_bytes: Callable[[int], bytes]
    ) -> None:
        self._tokens = tokens
        self._contracts = KeyedHash(contract_key)
        self._clock = clock
        self._random_bytes = random_bytes

    def build(self, descriptor: EventDescriptor, declaration: EventDeclaration, anchor: int) -> EventEnvelope:
        """
        The envelope of a descriptor, still without its contract.

        Args:
            anchor: The seq for graph events, the source's ``event_seq`` for others.

        Raises:
            ScopeViolation, InvalidDescriptor: It reaches beyond one app or domain.
        """
        event_class = declaration.event_class
        event_id = self._random_bytes(_EVENT_ID_BYTES)
        return EventEnvelope(
            audience_contract="",
            emitted_at=int(self._clock.monotonic() * 1_000_000),
            event_id=event_id.hex(),
            event_type=declaration.event_type,
            payload_summary=descriptor.payload_summary,
            resume_token=self._tokens.issue(event_class, event_id, anchor, self._clock.now_ns() // 1_000_000),
            scope=scope_of(descriptor, declaration),
            sequence_anchor=GlobalAnchor(anchor) if event_class is EventClass.GRAPH else SourceAnchor(anchor),
            source_manager=descriptor.source_manager,
        )

    def request_for(self, descriptor: EventDescriptor, declaration: EventDeclaration) -> ReadRequest:
        """What the access layer is asked with for those who may read the event."""
        context = descriptor.operation_context
        objects = descriptor.payload_summary.get("object_ids")
        return ReadRequest(
            origin_identity_id=context.requester_identity_id if isinstance(context, RequestContext) else None,
            app_id=descriptor.app_id,
            domain_id=descriptor.domain_id,
            subscription_type=descriptor.event_class,
            object_ids=objects if isinstance(objects, tuple) else (),
            audience=declaration.audience,
            scope=descriptor.read_scope,
        )

    def contract_for(self, request: ReadRequest, labels: tuple[str, ...]) -> str:
        """The audience contract: a keyed hash of everything that decides who may see the event."""
        inputs = (
            request.subscription_type,
            request.app_id,
            request.domain_id,
            request.origin_identity_id,
            sorted(request.object_ids),
            sorted(labels),
        )
        return self._contracts.digest(encode(inputs)).hex()

    def with_contract(self, envelope: EventEnvelope, request: ReadRequest, labels: tuple[str, ...]) -> EventEnvelope:
        """The same envelope with its contract."""
        return EventEnvelope(
            audience_contract=self.contract_for(request, labels),
            emitted_at=envelope.emitted_at,
            event_id=envelope.event_id,
            event_type=envelope.event_type,
            payload_summary=envelope.payload_summary,
            resume_token=envelope.resume_token,
            scope=envelope.scope,
            sequence_anchor=envelope.sequence_anchor,
            source_manager=envelope.source_manager,
        )

    def rebuild(self, descriptor: EventDescriptor, declaration: EventDeclaration) -> EventEnvelope:
        """
        The whole envelope of a committed record that is read again: its place is its seq.

        Raises:
            InvalidDescriptor, ScopeViolation: Intake would have refused it too.
        """
        check_form(descriptor, declaration)
        envelope = self.build(descriptor, declaration, descriptor.sequence_anchor_hint)
        return self.with_contract(envelope, self.request_for(descriptor, declaration), labels_of(declaration))


def labels_of(declaration: EventDeclaration) -> tuple[str, ...]:
    """What an event's contract names beside its request."""
    return (declaration.audience.value,)


class Normalizer:
    """
    Moves events from intake to the queues of their classes.

    Args:
        intake: What was taken in, in its order.
        out: A queue for each class.
        index: Where envelopes are entered before they are put there.
        builder: Makes the envelopes.
        declarations: The types there are now.
        ceiling: Gives back the place of what cannot be told any more.
        on_produced: Told class, type and app of each envelope.
        on_rejected: Told of each descriptor whose type was withdrawn while it waited.
    """

    def __init__(
        self,
        intake: BoundedQueue[TaggedDescriptor],
        out: ClassQueues[Normalized],
        index: ResumeIndex,
        builder: EnvelopeBuilder,
        declarations: EventDeclarations,
        ceiling: Ceiling,
        *,
        on_produced: Callable[[EventClass, str, str], None],
        on_rejected: Callable[[Rejection], None],
    ) -> None:
        self._intake = intake
        self._out = out
        self._index = index
        self._builder = builder
        self._declarations = declarations
        self._ceiling = ceiling
        self._on_produced = on_produced
        self._on_rejected = on_rejected
        self._event_seqs: Counter[str] = Counter()

    def run(self, budget: int) -> int:
        """Normalize up to ``budget`` descriptors; says how many were there."""
        done = 0
        while done < budget and (tagged := self._intake.take()) is not None:
            done += 1
            try:
                self._normalize(tagged)
            except DescriptorRefused as error:
                self._ceiling.release_envelope(tagged.source_manager)
                self._on_rejected(Rejection.of(tagged.source_manager, tagged.descriptor, error))
        return done

    def _normalize(self, tagged: TaggedDescriptor) -> None:
        descriptor, source = tagged.descriptor, tagged.source_manager
        declaration = self._declarations.get(descriptor.event_type)
        if declaration is None:
            raise ScopeViolation(
                "event_type", f"{descriptor.event_type} was withdrawn while it waited", ProtocolCode.SCOPE_EXCEEDED
            )
        event_class = declaration.event_class
        is_graph = event_class is EventClass.GRAPH
        anchor = descriptor.sequence_anchor_hint if is_graph else self._event_seqs[source] + 1
        envelope = self._builder.build(descriptor, declaration, anchor)
        if not is_graph:
            self._event_seqs[source] = anchor
        retained = Retained(event_class, descriptor.event_class, envelope, anchor)
        request = self._builder.request_for(descriptor, declaration)
        self._index.add(retained)
        self._out.put(event_class, Normalized(retained, request, labels_of(declaration), tagged.local_order))
        self._on_produced(event_class, descriptor.event_type, descriptor.app_id)
