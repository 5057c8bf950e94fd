"""What an appointment asks for: when it fires, and what becomes of an occurrence that is late."""

from __future__ import annotations

from datetime import date, tzinfo
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from tidings.core.validation import reread

from .errors import BadRecurrence
from .recurrence import (
    SPAN_MS_MAX,
    Cron,
    Local,
    MomentMs,
    OneShot,
    Periodic,
    Recurrence,
    SpanMs,
    Tagged,
    Utc,
    Zone,
    cron_of,
    datetime_of_ms,
    ms_of,
    next_in_series,
    next_moment,
    zone_of,
)

_SPEC_BYTES_MAX: Final = 64 * 1024
_GRACE_MS: Final = 300_000


class Drop(Tagged, frozen=True, gc=False, tag="drop"):
    """An occurrence that is late is left out."""


class Catchup(Tagged, frozen=True, gc=False, tag="catchup"):
    """An occurrence that is late fires, however late."""


class CatchupWithinGrace(Tagged, frozen=True, gc=False, tag="catchup_within_grace"):
    """An occurrence that is late fires, if it is no later than this."""

    grace_ms: Annotated[int, msgspec.Meta(ge=0, le=100 * SPAN_MS_MAX)] = _GRACE_MS


MissPolicy: TypeAlias = Drop | Catchup | CatchupWithinGrace


class AppointmentSpec(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """When an appointment fires."""

    appointment_id: str
    recurrence: Recurrence
    time: str | None = None
    """``HH:MM`` or ``HH:MM:SS``, for rules that name days."""
    zone: Zone | None = None
    """Whose clocks: the machine's if left out, for cron UTC."""
    end_time_ms: MomentMs | None = None
    """No occurrence after this moment."""
    max_fires: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """So many fires at the most. What is missed does not count."""
    except_: tuple[str, ...] = msgspec.field(default=(), name="except")
    """Dates (ISO, in the zone) that are passed over."""
    miss_policy: MissPolicy = CatchupWithinGrace()
    pre_fire_ms: SpanMs | None = None
    """How long before each occurrence its approach is told."""
    must_wake_device: bool = False
    """Whether a sleeping machine is to be woken for it."""
    wake_pre_arm_ms: SpanMs | None = None
    """How long before the occurrence."""

    def next_fire_ms(
        self, after_ms: int, *, local: tzinfo, previous_ms: int | None = None, fires_completed: int = 0
    ) -> int | None:
        """
        The first occurrence strictly after a moment; one that happens once, even if it has passed.

        Args:
            after_ms: The moment.
            local: The machine's zone.
            previous_ms: The occurrence before, from which intervals are counted; none yet: from ``after_ms``.
            fires_completed: How often it has fired.

        Raises:
            BadRecurrence: A rule, a time, a date or a zone cannot be used.
        """
        if self.max_fires is not None and fires_completed >= self.max_fires:
            return None
        match self.recurrence:
            case OneShot(fire_at_ms=fire_at_ms):
                found = fire_at_ms if previous_ms is None else None
            case Periodic(interval_ms=interval_ms):
                first_ms = after_ms if previous_ms is None else previous_ms
                found = next_in_series(first_ms + interval_ms, interval_ms, after_ms)
            case calendar:
                skipped = [_date(each) for each in self.except_]
                zone = zone_of(self.zone or Local(), local)
                moment = next_moment(cron_of(calendar, self.time), datetime_of_ms(after_ms), zone, skipped)
                found = None if moment is None else ms_of(moment)
        if found is None or (self.end_time_ms is not None and found > self.end_time_ms):
            return None
        return found


def _date(text: str) -> date:
    try:
        found = date.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.isoformat() != text:
        raise BadRecurrence("except", f"{text!r:.40} is no date as YYYY-MM-DD")
    return found


def appointment_spec(value: AppointmentSpec | Any) -> AppointmentSpec:
    """
    A spec, from JSON or as it is, with its zone.

    Raises:
        BadRecurrence: It is none; ``field`` names the part at fault.
    """
    spec: AppointmentSpec = reread(
        value,
        AppointmentSpec,
        lambda path, problem: BadRecurrence(path or "spec", problem),
        bytes_max=_SPEC_BYTES_MAX,
    )
    if spec.zone is None:
        spec = msgspec.structs.replace(spec, zone=Utc() if isinstance(spec.recurrence, Cron) else Local())
    return spec
