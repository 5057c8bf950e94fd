"""
How alike two texts are, and the keys by which texts that may be alike are found. No Spark here.

A text's shingles are its overlapping runs of three characters. ``band_keys`` gives each text 24 keys, made of four MinHashes
each. Two texts that share 69 % of their shingles (fewer cannot make a near-duplicate) share five keys on average, and two or
more almost always.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

BANDS: Final = 24
_ROWS: Final = 4
_PIECE_CHARS: Final = 3
_CODE_BITS: Final = 21  # a code point of Unicode: three of them fit into 64 bits


def _mixed(values: Any) -> Any:
    """64-bit numbers spread evenly: each bit of the result depends on every bit put in (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_SALTS: Final = _mixed(np.arange(1, BANDS * _ROWS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def band_keys(text: str) -> list[int]:
    """The keys of a text, one a band, the same in every process; none for an empty text."""
    if not text:
        return []
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    padded = np.concatenate([codes, np.zeros(max(0, _PIECE_CHARS - len(codes)), dtype=np.uint64)])
    shift = np.uint64(_CODE_BITS)
    pieces = np.unique((((padded[:-2] << shift) | padded[1:-1]) << shift) | padded[2:])
    lowest = _mixed(_mixed(pieces)[:, None] ^ _SALTS[None, :]).min(axis=0)
    keys = np.zeros(BANDS, dtype=np.uint64)
    for row in range(_ROWS):
        keys = _mixed(keys ^ lowest[row::_ROWS])
    return [int(key) for key in keys.astype(np.int64)]


def likeness(
    one: str, other: str, one_vector: Sequence[float] | None, other_vector: Sequence[float] | None
) -> tuple[float, float]:
    """
    Jaccard of the pieces, and cosine: of the embeddings where both texts have one of the same length, else of how often each
    piece occurs.
    """
    pieces, others = _pieces(one), _pieces(other)
    together = len(pieces.keys() | others.keys())
    jaccard = len(pieces.keys() & others.keys()) / together if together else 0.0
    vectors = _cosine_of_vectors(one_vector, other_vector)
    return jaccard, _cosine(pieces, others) if vectors is None else vectors


# Pairs come sorted by one of their texts, so the last few are asked for again and again.
@functools.lru_cache(maxsize=8)
def _pieces(text: str) -> Counter[str]:
    if len(text) <= _PIECE_CHARS:
        return Counter([text] if text else [])
    return Counter(text[at : at + _PIECE_CHARS] for at in range(len(text) - _PIECE_CHARS + 1))


def _cosine(one: Counter[str], other: Counter[str]) -> float:
    product = sum(count * other[piece] for piece, count in one.items() if piece in other)
    lengths = sum(n * n for n in one.values()) * sum(n * n for n in other.values())
    return product / math.sqrt(lengths) if lengths else 0.0


def _cosine_of_vectors(one: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    if one is None or other is None or len(one) != len(other):
        return None
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    with np.errstate(over="ignore", invalid="ignore"):
        length = float(np.sqrt(np.dot(a, a)) * np.sqrt(np.dot(b, b)))
        cosine = float(np.dot(a, b)) / length if length and math.isfinite(length) else math.nan
    return min(1.0, max(-1.0, cosine)) if math.isfinite(cosine) else None
