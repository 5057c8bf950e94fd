"""
Every operation of the steward's wire, in one place below the Unix socket and ``/happenings``.

``perform`` checks that the caller may, and hands the request to whoever does it. A request that takes a capability is done only if that was
negotiated and may still be had.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tidings.happenings.happening import static_labels, variants
from tidings.ledger.catalogue import CurrentCatalogue
from tidings.ledger.ledger import Ledger
from tidings.ledger.state import Rehearsed
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.time_trust import TimeTrustTracker
from tidings.schedule.watch_runner import WatchRunner
from tidings.wire.steward import answers, requests

from .acting import Acting, ServesAlready
from .administering import Administering
from .claimants import Names
from .errors import CapabilityNotGranted
from .reading import Reading
from .scheduling import Scheduling
from .settings import StewardSettings

if TYPE_CHECKING:
    from .authority import Caller

FEATURES: Final = (
    "subscribe_happenings_cursor",
    "alias_chain_walking",
    "active_custodies_snapshot",
    "paginated_state_snapshots",
    "capability_negotiation",
    "subscribe_subject_push",
    "rack_structural_projection",
    "plugin_inventory",
    "catalogue_resilience",
    "clock_trust_signal",
    "appointment_scheduling",
    "condition_driven_watches",
    "grammar_orphan_admin",
)
"""What clients of old look for; only grows."""

Handler: TypeAlias = "Callable[[Any, Caller], Coroutine[Any, Any, Any]]"


class Operations:
    """
    What requests mean.

    Args:
        ledger: The ledger.
        settings: Bounds.
        names: How plugins are called.
        appointments, watches: Who runs them.
        trust: How far the clock is trusted.
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: StewardSettings,
        names: Names,
        *,
        appointments: AppointmentRunner,
        watches: WatchRunner,
        trust: TimeTrustTracker,
    ) -> None:
        self._ledger = ledger
        self._trust = trust
        families = (
            self,
            Reading(ledger, names, settings),
            Acting(ledger, calls_count_max=settings.calls_count_max),
            Administering(ledger, names),
            Scheduling(ledger, appointments, watches),
        )
        self._handlers: dict[type[requests.StewardRequest], Handler] = {
            kind: getattr(family, op)
            for op, kind in requests.REQUESTS.items()
            for family in families
            if hasattr(family, op)
        }

    async def perform(self, request: requests.StewardRequest, caller: Caller) -> Any:
        """
        Do what is asked for; the answer, or a ``Stream``.

        Raises:
            TidingsError: It cannot be done, or not by this caller.
        """
        authority = caller.authority
        assert authority is not None
        capability = request.capability
        if capability is not None and not (capability in caller.granted and authority.may_have(capability)):
            raise CapabilityNotGranted(request.op, capability)
        authority.require(request.need)
        if caller.served is not None and request.need == "subscribe":
            raise ServesAlready(caller.served.plugin.name)  # its answers would be passed over
        handler = self._handlers.get(type(request))
        if handler is None:
            raise requests.RequestInvalid(f"{request.op} is not spoken here")
        if not (isinstance(request, requests.RehearsableRequest) and request.dry_run):
            return await handler(request, caller)
        try:
            answer = await handler(request, caller)
        except Rehearsed:
            return answers.RehearsalAnswer(rehearsed=request.op, would_change=True)
        outcome = answer.result if isinstance(answer, answers.Done) else None
        return answers.RehearsalAnswer(rehearsed=request.op, would_change=False, outcome=outcome)

    async def negotiate(self, request: requests.NegotiateRequest, caller: Caller) -> answers.Granted:
        """Grant what may be had of what is asked for; names that are not known are passed over."""
        authority = caller.authority
        assert authority is not None
        granted = [name for name in dict.fromkeys(request.capabilities) if authority.may_have(name)]
        caller.granted = frozenset(granted)
        return answers.Granted(granted=granted)

    async def describe_capabilities(
        self, request: requests.DescribeCapabilitiesRequest, caller: Caller
    ) -> answers.CapabilitiesAnswer:
        """What there is to ask for."""
        source = await self._ledger.read(lambda state: state.part(CurrentCatalogue).source)
        return answers.CapabilitiesAnswer(
            ops=[
                op for op, kind in requests.REQUESTS.items() if kind in self._handlers or kind is requests.AnswerRequest
            ],
            features=list(FEATURES),
            catalogue_source=source.value,
            clock_trust=self._trust.state.value,
            has_battery_rtc=False,
            coalesce_labels={name: list(static_labels(name)) for name in variants()},
            epoch=self._ledger.log.position.epoch,
        )
