"""
What to do with a text that is much like one the space already has: keep it apart, link the two, or merge them.

Plain values: the store finds the candidates and does what is decided.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from .fingerprints import jaccard, shingles
from .settings import MergeStrategy, WriteSettings

__all__ = ["Dedupe", "Known", "Outcome", "judge", "merged_content"]

_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+")


class Outcome(enum.StrEnum):
    """What becomes of a new text."""

    CREATE = "create"
    LINK = "link"
    MERGE = "merge"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A memory the space already has."""

    memory_id: str
    text: str
    content: dict[str, Any]


class Dedupe(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, and how alike the two are."""

    outcome: Outcome
    similarity: float = 0.0
    known: Known | None = None


def judge(text: str, candidates: Iterable[Known], settings: WriteSettings) -> Dedupe:
    """Compare a text with the candidates; the likest decides, and of equals the first given."""
    pieces = shingles(text)
    best = Dedupe(outcome=Outcome.CREATE)
    for known in candidates:
        similarity = jaccard(pieces, shingles(known.text))
        if similarity > best.similarity:
            best = Dedupe(outcome=Outcome.CREATE, similarity=similarity, known=known)
    if best.known is None or best.similarity < settings.link_at:
        return Dedupe(outcome=Outcome.CREATE, similarity=best.similarity)
    is_merged = best.similarity > settings.merge_above and settings.strategy is not MergeStrategy.LINK_ONLY
    return msgspec.structs.replace(best, outcome=Outcome.MERGE if is_merged else Outcome.LINK)


def merged_content(known: Known, text: str, said_at: str, settings: WriteSettings) -> dict[str, Any]:
    """
    The content of a memory after ``text`` was merged into it.

    Bounded: what would make the text too long, or the context too many, is left out; that it was said is still counted by
    the store.
    """
    content = dict(known.content)
    match settings.strategy:
        case MergeStrategy.MERGE_CONTENT:
            merged = _with_new_sentences(known.text, text)
            if len(merged) <= settings.text_chars_max:
                content["text"] = merged
        case MergeStrategy.APPEND_CONTEXT:
            before = content.get("context")
            context: list[Mapping[str, Any]] = list(before) if isinstance(before, list) else []
            fits = sum(len(str(each)) for each in context) + len(text) <= settings.text_chars_max
            if len(context) < settings.context_count_max and fits:
                content["context"] = [*context, {"text": text, "said_at": said_at}]
        case MergeStrategy.TEMPORAL_UPDATE | MergeStrategy.LINK_ONLY:
            pass
    return content


def _with_new_sentences(old: str, new: str) -> str:
    def plain(sentence: str) -> str:
        return " ".join(sentence.lower().split()).rstrip(".!?")

    have = {plain(sentence) for sentence in _SENTENCE.split(old)}
    added = [sentence.strip() for sentence in _SENTENCE.split(new) if plain(sentence) not in have]
    return " ".join([old, *(sentence for sentence in added if sentence)])
