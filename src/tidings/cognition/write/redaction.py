"""
Redaction before anything is stored or told: personal data is replaced by its kind, in every string of the content.

When redaction itself fails, nothing of the content is kept: a memory with a hole is repairable, a leak is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from tidings.core.actors import SecurityBand

from ..words import PERSONAL_DATA, redact

__all__ = ["CONSERVATIVE", "NOTHING_KEPT", "Redacted", "kinds_to_redact", "redact_content", "redact_words"]

CONSERVATIVE: Final = "[redacted]"
_DEPTH_MAX: Final = 16


class Redacted(msgspec.Struct, frozen=True, kw_only=True):
    """What may be kept."""

    content: dict[str, Any]
    counts: dict[str, int]
    kinds: frozenset[str] = frozenset()
    is_conservative: bool = False


NOTHING_KEPT: Final = Redacted(content={"text": CONSERVATIVE}, counts={}, is_conservative=True)
"""What is left when it is not known what may be kept."""


def kinds_to_redact(band: SecurityBand, obligations: Collection[str], space_kinds: frozenset[str]) -> frozenset[str]:
    """All kinds under an obligation or outside GREEN; else what the space does not keep."""
    if "REDACT_PII" in obligations or band is not SecurityBand.GREEN:
        return frozenset(PERSONAL_DATA) | space_kinds
    return space_kinds


def redact_content(content: Mapping[str, Any], kinds: frozenset[str]) -> Redacted:
    """Clean every string of the content, keys included."""
    counts: Counter[str] = Counter()
    try:
        cleaned = _clean(content, kinds, counts, 0)
    except (KeyError, ValueError, TypeError):  # an unknown kind, nested too deeply, not JSON
        return NOTHING_KEPT
    return Redacted(content=cleaned, counts=dict(sorted(counts.items())), kinds=kinds)


def redact_words(words: tuple[str, ...], redacted: Redacted) -> tuple[str, ...]:
    """Tags and the like, cleaned as the content was; none, where nothing of the content was kept."""
    return () if redacted.is_conservative else tuple(redact(word, redacted.kinds)[0] for word in words)


def _clean(value: Any, kinds: frozenset[str], counts: Counter[str], depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        text, found = redact(value, kinds)
        counts.update(found)
        return text
    if isinstance(value, Mapping):
        return {
            _clean(str(key), kinds, counts, depth + 1): _clean(each, kinds, counts, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean(each, kinds, counts, depth + 1) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON")
