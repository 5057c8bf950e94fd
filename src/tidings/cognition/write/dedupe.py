"""
What to do with a memory that is much like one the space already has: keep it apart, link the two, or merge them.

A merge leaves one memory where there were two, so it must not cost anything but a text said twice: only memories of one
band, with a text each, and alike in everything else are merged. What is alike but may not be merged is linked.

Plain values: the store finds the candidates and does what is decided.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from tidings.core.actors import SecurityBand

from .fingerprints import jaccard, shingles
from .settings import MergeStrategy, WriteSettings

__all__ = ["Dedupe", "Fresh", "Known", "Outcome", "judge", "text_of"]

_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+")


class Outcome(enum.StrEnum):
    """What becomes of a new memory."""

    CREATE = "create"
    LINK = "link"
    MERGE = "merge"


class Fresh(msgspec.Struct, frozen=True, kw_only=True):
    """A memory to be written."""

    content: dict[str, Any]
    security_band: SecurityBand
    said_at: str


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A memory the space already has."""

    memory_id: str
    episode_id: str
    content: dict[str, Any]
    security_band: SecurityBand | None
    """``None`` where it is not known, of a memory that was stored before bands were."""


class Dedupe(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, and how alike the two are."""

    outcome: Outcome
    similarity: float = 0.0
    known: Known | None = None
    merged: dict[str, Any] | None = None
    """Of a merge, the content that the known memory has now."""


def text_of(content: Mapping[str, Any]) -> str:
    """What is compared: the text, or the whole content where there is none."""
    return _said(content) or msgspec.json.encode(content, order="sorted").decode()


def judge(fresh: Fresh, candidates: Iterable[Known], settings: WriteSettings) -> Dedupe:
    """Compare a memory with the candidates: the likest that may be merged, else the likest; of equals the first given."""
    pieces = shingles(text_of(fresh.content))
    alike = [(jaccard(pieces, shingles(text_of(known.content))), known) for known in candidates]
    alike.sort(key=lambda pair: -pair[0])
    for similarity, known in alike:
        if similarity <= settings.merge_above:
            break
        merged = _merged_content(fresh, known, settings)
        if merged is not None:
            return Dedupe(outcome=Outcome.MERGE, similarity=similarity, known=known, merged=merged)
    similarity, likest = alike[0] if alike else (0.0, None)
    if likest is None or similarity < settings.link_at:
        return Dedupe(outcome=Outcome.CREATE, similarity=similarity)
    return Dedupe(outcome=Outcome.LINK, similarity=similarity, known=likest)


def _merged_content(fresh: Fresh, known: Known, settings: WriteSettings) -> dict[str, Any] | None:
    """The content of the known memory with the fresh one merged into it; ``None`` where that would lose something."""
    text, before = _said(fresh.content), _said(known.content)
    if not text or not before or fresh.security_band is not known.security_band:
        return None
    has_own_context = "context" in fresh.content
    if _beside_text(fresh.content) != _beside_text(known.content, leave_out_appended=not has_own_context):
        return None
    content = dict(known.content)
    match settings.strategy:
        case MergeStrategy.MERGE_CONTENT:
            content["text"] = _with_new_sentences(before, text)
            return content if len(content["text"]) <= settings.text_chars_max else None
        case MergeStrategy.APPEND_CONTEXT if not has_own_context:
            context = content.get("context", [])
            fits = sum(len(str(each)) for each in context) + len(text) <= settings.text_chars_max
            content["context"] = [*context, {"text": text, "said_at": fresh.said_at}]
            return content if fits and len(context) < settings.context_count_max else None
        case MergeStrategy.TEMPORAL_UPDATE:
            return content
        case _:
            return None


def _said(content: Mapping[str, Any]) -> str | None:
    """The text, if there is one that says something."""
    text = content.get("text")
    return text if isinstance(text, str) and text.strip() else None


def _beside_text(content: Mapping[str, Any], *, leave_out_appended: bool = False) -> bytes:
    rest = {name: value for name, value in content.items() if name != "text"}
    if leave_out_appended and _is_appended(rest.get("context")):
        del rest["context"]
    # As it is spelled: to Python 1, 1.0 and True are equal.
    return msgspec.json.encode(rest, order="sorted")


def _is_appended(context: object) -> bool:
    """Whether a context is one that merging has made, and not the writer's own."""
    return isinstance(context, list) and all(
        isinstance(each, dict) and each.keys() == {"text", "said_at"} for each in context
    )


def _with_new_sentences(old: str, new: str) -> str:
    def plain(sentence: str) -> str:
        return " ".join(sentence.lower().split()).rstrip(".!?")

    have = {plain(sentence) for sentence in _SENTENCE.split(old)}
    added = [sentence.strip() for sentence in _SENTENCE.split(new) if plain(sentence) not in have]
    return " ".join([old, *(sentence for sentence in added if sentence)])
