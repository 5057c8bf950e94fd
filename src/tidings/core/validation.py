"""Values from outside are checked by msgspec; here is how its refusals become ours, in one place for every package."""

from __future__ import annotations

import re
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that decoding JSON raises for text that is no JSON, or not of the type that is asked for."""
_PLACE: Final = re.compile(r"(.*) - at `(?:key` in `)?\$\.?(.*)`", re.DOTALL)


def explain(error: BaseException, whole: str = "") -> tuple[str, str]:
    """
    What a decoder found wrong, and the path of the field it found it in.

    Args:
        error: What ``msgspec`` raised.
        whole: The path to give if the value is wrong as a whole.
    """
    found = _PLACE.fullmatch(str(error))
    return (found[1], found[2] or whole) if found else (str(error), whole)
