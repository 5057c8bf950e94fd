"""
What to do with a memory that is much like one the space already has: store it, link the two, or merge them.

A merge leaves one memory where there were two, so only memories of one band, with a text each, and alike in everything else
are merged. What is alike but may not be merged is linked. The store finds the candidates and does what is decided.

Likeness is computed from fingerprints. A text is lower-cased, its spaces evened out, and split into overlapping shingles of
three characters. From these come 512 bits that differ in few places for texts alike (SimHash) and 64 numbers of which two
texts share about as many as they share shingles (MinHash). Both depend on the text alone, in every process and for ever:
they are stored.
"""

from __future__ import annotations

import enum
import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from tidings.core.events import SecurityBand

from ..ports import clip01, sigmoid
from .requests import MergeStrategy, WriteSettings

SIMHASH_BITS: Final = 512
MINHASH_COUNT: Final = 64
BANDS: Final = 16
_ROWS: Final = MINHASH_COUNT // BANDS
_SHINGLE_CHARS: Final = 3
_MINHASH: Final = struct.Struct(f">{MINHASH_COUNT}I")


class Fingerprint(msgspec.Struct, frozen=True):
    """A text's two signatures."""

    simhash: int
    minhash: tuple[int, ...]

    def bands(self) -> list[bytes]:
        """
        Sixteen keys. Two texts that share four fifths of their pieces share a key but for one time in five thousand, so
        looking keys up finds near-duplicates without comparing everything.
        """
        packed = self.minhash_bytes()
        width = 4 * _ROWS
        return [packed[at : at + width] for at in range(0, len(packed), width)]

    def simhash_bytes(self) -> bytes:
        """As stored."""
        return self.simhash.to_bytes(SIMHASH_BITS // 8)

    def minhash_bytes(self) -> bytes:
        """As stored."""
        return _MINHASH.pack(*self.minhash)


def shingles(text: str) -> frozenset[str]:
    """The pieces of a text; a text shorter than a piece is one piece, an empty one has none."""
    even = " ".join(text.lower().split())
    if len(even) <= _SHINGLE_CHARS:
        return frozenset([even] if even else [])
    return frozenset(even[at : at + _SHINGLE_CHARS] for at in range(len(even) - _SHINGLE_CHARS + 1))


def fingerprint(pieces: Iterable[str]) -> Fingerprint:
    """Both signatures of a set of pieces."""
    planes: list[int] = []
    lowest = (0xFFFF_FFFF,) * MINHASH_COUNT
    count = 0
    for piece in pieces:
        digest = hashlib.shake_128(piece.encode("utf-8", "surrogatepass")).digest(SIMHASH_BITS // 8 + _MINHASH.size)
        lowest = tuple(map(min, lowest, _MINHASH.unpack_from(digest, SIMHASH_BITS // 8)))
        # Counts the ones of all 512 places at once: plane i holds bit i of every place's count.
        carry = int.from_bytes(digest[: SIMHASH_BITS // 8])
        for at, plane in enumerate(planes):
            planes[at], carry = plane ^ carry, plane & carry
            if not carry:
                break
        if carry:
            planes.append(carry)
        count += 1
    simhash = 0
    for place in range(SIMHASH_BITS):
        ones = sum(((plane >> place) & 1) << at for at, plane in enumerate(planes))
        if 2 * ones > count:
            simhash |= 1 << place
    return Fingerprint(simhash, lowest)


def hamming(one: int, other: int) -> int:
    """In how many of the 512 places two SimHashes differ."""
    return (one ^ other).bit_count()


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """The share of pieces two texts have in common; two empty texts are alike."""
    if not one and not other:
        return 1.0
    return len(one & other) / len(one | other)


def minhash_similarity(one: Fingerprint, other: Fingerprint) -> float:
    """An estimate of ``jaccard`` from the signatures."""
    return sum(a == b for a, b in zip(one.minhash, other.minhash, strict=True)) / MINHASH_COUNT


def novelty(distance: int, duplicate_rate: float) -> float:
    """
    How new a text is: ``sigmoid(6 * distance / 512 - duplicate_rate)``.

    Args:
        distance: The Hamming distance to the nearest known text; 512 when nothing is known.
        duplicate_rate: The share of known texts that nearly equal it.
    """
    return sigmoid(6 * distance / SIMHASH_BITS - duplicate_rate)


def completion_score(distance: int, cosine: float | None = None) -> float:
    """How well a stored text completes a cue: 0.7 cosine and 0.3 Hamming likeness, or the latter alone."""
    likeness = 1 - distance / SIMHASH_BITS
    return likeness if cosine is None else clip01(0.7 * cosine + 0.3 * likeness)


_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+")


class DedupeOutcome(enum.StrEnum):
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

    outcome: DedupeOutcome
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
            return Dedupe(outcome=DedupeOutcome.MERGE, similarity=similarity, known=known, merged=merged)
    similarity, likest = alike[0] if alike else (0.0, None)
    if likest is None or similarity < settings.link_at:
        return Dedupe(outcome=DedupeOutcome.CREATE, similarity=similarity)
    return Dedupe(outcome=DedupeOutcome.LINK, similarity=similarity, known=likest)


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
