"""Flight mode: which classes of radios are switched off. A class is named by the shelf of the plugin that drives its hardware."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from tidings.happenings.variants import FlightModeChanged

from .commands import Command, CommandOutcome, check_name
from .errors import InvalidCommand
from .state import LedgerState

FLIGHT_MODE_RACK: Final = "flight_mode"


FLIGHT_MODE_SET: Final = "flight_mode.set"
"""The request that switches radios."""


class FlightModes:
    """The state of each class of radios that was ever set."""

    name: ClassVar[str] = "flight_modes"
    frozen_type: ClassVar[Any] = dict[str, bool]

    def __init__(self) -> None:
        self._on: dict[str, bool] = {}

    def freeze(self) -> dict[str, bool]:
        """The classes by name; true where the radios are off."""
        return dict(sorted(self._on.items()))

    def restore(self, frozen: dict[str, bool]) -> None:
        self._on.update(frozen)

    def get(self, rack_class: str) -> bool | None:
        """Whether flight mode is on; none if it was never set."""
        return self._on.get(rack_class)

    def put(self, rack_class: str, on: bool) -> None:
        """Set one class."""
        self._on[rack_class] = on


def is_flight_mode_shelf(shelf: str) -> bool:
    """Whether a shelf is in the rack of flight mode."""
    return shelf.startswith(f"{FLIGHT_MODE_RACK}.")


class SetFlightMode(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Switch a class of radios; ``on`` means that they are off. What is so already is no change.

    ``rack_class`` is the whole name of the shelf, rack included.
    """

    rack_class: str
    on: bool

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        check_name("rack_class", self.rack_class)
        if not is_flight_mode_shelf(self.rack_class):
            raise InvalidCommand("rack_class", f"{self.rack_class!r} is no shelf of the rack {FLIGHT_MODE_RACK!r}")
        modes = state.part(FlightModes)
        if modes.get(self.rack_class) == self.on:
            return CommandOutcome(result=False, is_changed=False)
        modes.put(self.rack_class, self.on)
        return CommandOutcome([FlightModeChanged(at_ms=at_ms, rack_class=self.rack_class, on=self.on)], result=True)
