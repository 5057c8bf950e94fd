"""Time zones by name."""

from __future__ import annotations

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from .errors import InvalidRequest

__all__ = ["zone_of"]


def zone_of(name: str) -> ZoneInfo:
    """
    The zone of a name.

    Raises:
        InvalidRequest: There is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidRequest("tz", f"{name[:80]!r} is not a time zone") from error
