"""
The hippocampal bridge's arithmetic: how alike are two texts, and how new is one?

A text is lower-cased, its spaces evened out, and cut into overlapping pieces of three characters. From the pieces come
512 bits that differ in few places for texts alike (SimHash) and 64 numbers of which two texts share about as many as they
share pieces (MinHash). Both follow from the text alone, in every process and for ever: they are stored.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

import msgspec

from ..ports import clip01, sigmoid

__all__ = [
    "BANDS",
    "SIMHASH_BITS",
    "Fingerprint",
    "completion_score",
    "fingerprint",
    "hamming",
    "jaccard",
    "minhash_similarity",
    "novelty",
    "shingles",
]

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
