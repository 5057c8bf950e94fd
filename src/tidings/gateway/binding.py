"""
The third engine: each envelope gets the capsule that says who may see it, and its contract.

Capsules are asked for in batches of one app, domain and channel, once for each envelope and never again. While the access layer cannot say who may
see what, everything waits here, in order. An envelope that the access layer will have nobody see goes no further; that is on record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidings.access.errors import AccessUnavailable
from tidings.access.visibility import CapsuleDenied, CapsuleIssuer, ReadCapsule

from .ceiling import Ceiling
from .normalization import EnvelopeBuilder, Normalized
from .queues import ClassQueues
from .resume_index import ResumeIndex, Retained
from .telemetry import Telemetry


class AudienceBinder:
    """
    Binds envelopes to their audience.

    Args:
        taken: What waits to be bound.
        bound: Where bound envelopes wait for their delivery.
        issuer: The access layer.
        builder: Writes the contract into the envelope.
        index: Forgets what nobody may see.
        ceiling: Is told of that too.
        telemetry: Hears of failures.
    """

    def __init__(
        self,
        taken: ClassQueues[Normalized],
        bound: ClassQueues[Retained],
        *,
        issuer: CapsuleIssuer,
        builder: EnvelopeBuilder,
        index: ResumeIndex,
        ceiling: Ceiling,
        telemetry: Telemetry,
    ) -> None:
        self._taken = taken
        self._bound = bound
        self._issuer = issuer
        self._builder = builder
        self._index = index
        self._ceiling = ceiling
        self._telemetry = telemetry
        self._halted: Final[list[Normalized]] = []

    def __len__(self) -> int:
        """How many envelopes it had begun with when access became unavailable."""
        return len(self._halted)

    def run(self, count_max: int) -> int:
        """
        Bind up to so many envelopes, in the order of their turn; returns how many.

        Raises:
            AccessUnavailable: Access cannot be decided: everything waits. If that came up on the way, what was taken is bound first the next time.
        """
        if (problem := self._issuer.unavailable_for) is not None:
            raise AccessUnavailable(problem)
        batch = self._halted
        while len(batch) < count_max and (item := self._taken.take()) is not None:
            batch.append(item)
        answers = self._ask(batch)
        done = batch[:]
        batch.clear()
        for item, answer in zip(done, answers, strict=True):
            self._bind(item, answer)
        return len(done)

    def clear(self) -> None:
        """Drop everything: the gateway has stopped."""
        self._halted.clear()

    def _ask(self, batch: Sequence[Normalized]) -> list[ReadCapsule | CapsuleDenied]:
        groups: dict[tuple[str, str | None, str], list[int]] = {}
        for place, item in enumerate(batch):
            request = item.request
            groups.setdefault((request.app_id, request.domain_id, request.subscription_type), []).append(place)
        answers: list[ReadCapsule | CapsuleDenied | None] = [None] * len(batch)
        for places in groups.values():
            issued = self._issuer.issue([batch[place].request for place in places])
            for place, answer in zip(places, issued, strict=True):
                answers[place] = answer
        return [CapsuleDenied("there was no answer") if each is None else each for each in answers]

    def _bind(self, item: Normalized, answer: ReadCapsule | CapsuleDenied) -> None:
        retained = item.retained
        if isinstance(answer, ReadCapsule) and not answer.fits(item.request):
            answer = CapsuleDenied("the capsule was made for another event")
        if isinstance(answer, CapsuleDenied):
            self._index.forget(retained)
            self._ceiling.release_envelope(retained.envelope.source_manager)
            self._telemetry.binding_failed(retained.event_class.value, item.request.app_id, answer.reason)
            return
        retained.bind(answer, self._builder.with_contract(retained.envelope, item.request, item.labels))
        self._bound.put(retained.event_class, retained)
