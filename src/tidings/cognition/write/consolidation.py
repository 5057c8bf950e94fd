"""When a space has gathered enough to be worth consolidating. Plain values."""

from __future__ import annotations

import msgspec

from .settings import ConsolidationSettings

__all__ = ["Gathered", "due_reasons"]


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """What a space has gathered since it was last consolidated."""

    writes: int
    duplicates: int
    since_ns: int
    """The time of the first write among them."""


def due_reasons(gathered: Gathered, settings: ConsolidationSettings, now_ns: int) -> tuple[str, ...]:
    """Why it is time; empty when it is not. With nothing gathered it never is."""
    if gathered.writes == 0:
        return ()
    age_s = (now_ns - gathered.since_ns) / 1e9
    checks = (
        ("write_count", gathered.writes >= settings.writes),
        ("duplicate_count", gathered.duplicates >= settings.duplicates),
        ("age", age_s >= settings.age_s),
    )
    return tuple(reason for reason, holds in checks if holds)
