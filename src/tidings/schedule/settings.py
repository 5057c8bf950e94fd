"""Settings of what is done later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from tidings.core.settings import Settings

from .errors import BadRecurrence
from .recurrence import zone_named


class ScheduleSettings(Settings, frozen=True, kw_only=True):
    """Appointments and the clock that they go by."""

    appointments_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 10_000
    """Appointments that can still fire, of all creators."""
    appointments_per_creator_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 1_000
    """The same, of one creator."""
    finished_appointments_max: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 1_000
    """Fired and cancelled appointments that are still listed; the one that ended first is forgotten first."""
    drop_tolerance_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 1_000
    """How late an appointment may be that is dropped when it is late."""
    dispatches_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Actions under way at once; what is due meanwhile waits."""
    local_zone: str | None = None
    """The zone called ``local``, by its IANA name; that of the machine if left out."""
    clock_source: Literal["assumed", "kernel"] = "assumed"
    """Whether the clock is right: taken for granted, or as the kernel says, which knows whether a time service adjusts it."""
    clock_poll_interval_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 5.0
    """How often the clock is looked at: whether it was set, and whether it is right."""
    clock_tolerance_s: Annotated[float, msgspec.Meta(ge=0)] = 86_400.0
    """How long a clock is trusted that nothing adjusts any more."""
    clock_step_s_min: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """By how much a clock must have gone wrong between two looks to have been set."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        if self.local_zone is not None:
            try:
                zone_named(self.local_zone)
            except BadRecurrence as error:
                yield "local_zone", error.problem
