"""Numbers and spans of time in few characters, for people."""

from __future__ import annotations

from typing import Final

_SPANS_MS: Final = (
    (365.25 * 86_400_000, "y"),
    (86_400_000.0, "d"),
    (3_600_000.0, "h"),
    (60_000.0, "min"),
    (1000.0, "s"),
    (1.0, "ms"),
    (0.001, "µs"),
)


def short_number(value: float) -> str:
    """A number in few characters: 950, 1.2k, 34M; small ones with as many digits as they need."""
    size = abs(value)
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{_short(value / limit)}{unit}"
    return _short(value)


def short_duration(ms: float) -> str:
    """A span of time, given in milliseconds, in the unit that suits it: 250 µs, 1.5 s, 4 min, 2.1 h, 30 d, 56 y."""
    size = abs(ms)
    for length, unit in _SPANS_MS:
        if size >= length:
            return f"{_short(round(ms / length, 1))} {unit}"
    return "0 s"


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
