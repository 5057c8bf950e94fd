"""
How alike two texts are, and the keys by which texts that may be alike are found. No Spark here.

A text's shingles are its overlapping runs of three characters. ``band_keys`` gives each text 24 keys, made of four MinHashes
each. Two texts that share 69 % of their shingles (fewer cannot make a near-duplicate) share five keys on average, and two or
more almost always.

A memory's keys are stored as words of 32 bits, one after the other (``packed_keys``): one that stands for its id, and if it says
something one that stands for its text and one for each key of it. ``words_of`` looks through those of many memories at once,
``paired`` finds who shares keys with whom, and ``nearest`` who shares most. The space is part of every word.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

BANDS: Final = 24
_ROWS: Final = 4
_PIECE_CHARS: Final = 3
_CODE_BITS: Final = 21  # a code point of Unicode: three of them fit into 64 bits
_CODES_MAX: Final = 16_384
"""Texts are worked on together up to so many characters: 96 numbers for each are held at a time."""
_SIEVE_BITS: Final = 20


def _mixed(values: Any) -> Any:
    """64-bit numbers spread evenly: each bit of the result depends on every bit put in (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_SALTS: Final = _mixed(np.arange(1, BANDS * _ROWS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def band_keys(texts: Sequence[str]) -> Any:
    """The keys of texts that are not empty: a row a text, a column a band, the same in every process."""
    codes = [
        np.frombuffer(text.ljust(_PIECE_CHARS, "\0").encode("utf-32-le", "surrogatepass"), "<u4") for text in texts
    ]
    found = [np.empty((0, BANDS), dtype=np.uint64)]
    first = 0
    while first < len(codes):
        last, size = first, 0
        while last < len(codes) and (last == first or size + len(codes[last]) <= _CODES_MAX):
            size += len(codes[last])
            last += 1
        found.append(_keys_of(codes[first:last]))
        first = last
    return np.concatenate(found)


def _keys_of(codes: Sequence[Any]) -> Any:
    shift = np.uint64(_CODE_BITS)
    wide = [each.astype(np.uint64) for each in codes]
    pieces = [(((each[:-2] << shift) | each[1:-1]) << shift) | each[2:] for each in wide]
    # Each piece is mixed once, however many of the texts have it.
    known, places = np.unique(np.concatenate(pieces), return_inverse=True)
    mixed = _mixed(_mixed(known)[:, None] ^ _SALTS[None, :])
    lowest = np.minimum.reduceat(mixed[places], np.cumsum([0, *map(len, pieces[:-1])]), axis=0)
    keys = np.zeros((len(pieces), BANDS), dtype=np.uint64)
    for row in range(_ROWS):
        keys = _mixed(keys ^ lowest[:, row::_ROWS])
    return keys


def packed_keys(texts: Sequence[str | None], space_hashes: Any, id_hashes: Any, text_hashes: Any) -> list[bytes]:
    """
    The words of memories.

    Args:
        texts: What each says, if anything.
        space_hashes, id_hashes, text_hashes: A number that stands for its space, one for its space and id, one for its space and text.
    """
    names = np.stack([id_hashes, text_hashes], axis=1).astype(np.uint32)
    has_text = np.array([bool(each) for each in texts], dtype=bool)
    keys = band_keys([each for each in texts if each])
    words = iter(_mixed(keys ^ space_hashes.astype(np.uint64)[has_text][:, None]).astype(np.uint32))
    return [
        names[at].tobytes() + next(words).tobytes() if has else names[at, :1].tobytes()
        for at, has in enumerate(has_text)
    ]


class Sieve:
    """
    Words that are looked for.

    Args:
        words: All of them, as unsigned numbers of 32 bits.
    """

    def __init__(self, words: Any) -> None:
        self._words = np.unique(words.astype(np.uint32))
        # Most words are told by a few of their bits not to be among them.
        self._may_be = np.zeros(1 << _SIEVE_BITS, dtype=bool)
        self._may_be[self._words & np.uint32((1 << _SIEVE_BITS) - 1)] = True

    def among(self, words: Any) -> Any:
        """The places of those words that are looked for."""
        places = np.flatnonzero(self._may_be[words & np.uint32((1 << _SIEVE_BITS) - 1)])
        return places[np.isin(words[places], self._words)]


def words_of(seqs: pa.Array, packed: pa.Array, has_keys: pa.Array, sieve: Sieve | None = None) -> pa.RecordBatch:
    """
    The words of memories from the way they are stored, one a row: ``seq``, ``word``, and whether it stands for an id or a text
    (``is_name``) or is a key.

    Args:
        seqs: Of the memories.
        packed: Their words as they are stored.
        has_keys: Whose keys count.
        sieve: Which words are looked for; without it all are.
    """
    ends = np.zeros(1, np.int32)
    words = np.empty(0, np.uint32)
    if len(packed):
        ends = np.frombuffer(packed.buffers()[1], np.int32)[packed.offset :][: len(packed) + 1] // 4
        words = np.frombuffer(packed.buffers()[2], np.uint32)[ends[0] : ends[-1]]
        ends = ends - ends[0]
    places = np.arange(len(words)) if sieve is None else sieve.among(words)
    owners = np.searchsorted(ends, places, side="right") - 1
    is_name = places - ends[owners] < 2  # a word for the id, one for the text, then the keys
    chosen = is_name | has_keys.to_numpy(zero_copy_only=False)[owners]
    columns = [seqs.to_numpy()[owners[chosen]], words[places[chosen]].astype(np.int64), is_name[chosen]]
    return pa.RecordBatch.from_arrays([pa.array(each) for each in columns], list(WORDS))


WORDS: Final = ("seq", "word", "is_name")


def paired(batches: Iterable[pa.RecordBatch], neighbours_max: int) -> Iterator[pa.RecordBatch]:
    """
    Which new texts share keys with which texts before them.

    Args:
        batches: ``word``, ``seq`` and ``is_new`` of all texts, in the order of the first two.
        neighbours_max: Of each key so many texts before a new one count, the last ones.

    Returns:
        ``seq``, ``other_seq``, and how many keys they share in a batch of what was given: ``shared``.
    """
    before = [np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, dtype=bool)]
    for batch in batches:
        here = [batch.column(name).to_numpy(zero_copy_only=False) for name in _PAIRED]
        word, seq, is_new = (np.concatenate(each) for each in zip(before, here, strict=True))
        places = np.flatnonzero(is_new[len(before[0]) :]) + len(before[0])
        found = [np.empty((2, 0), np.int64)]
        for back in range(1, neighbours_max + 1):
            places = places[places >= back]
            places = places[word[places - back] == word[places]]
            if not len(places):
                break
            found.append(np.stack([seq[places], seq[places - back]]))
        yield _counted(np.concatenate(found, axis=1))
        before = [each[-neighbours_max:] for each in (word, seq, is_new)]


def _counted(pairs: Any) -> pa.RecordBatch:
    """Each pair of seqs once, in their order, with how often it is there."""
    pairs = pairs[:, np.lexsort(pairs[::-1])]
    is_first = np.ones(pairs.shape[1], dtype=bool)
    is_first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    places = np.flatnonzero(is_first)
    shared = np.diff(np.append(places, pairs.shape[1]))
    return pa.RecordBatch.from_arrays([pairs[0, places], pairs[1, places], shared], ["seq", "other_seq", "shared"])


def nearest(fresh: pa.Table, known: pa.Table, neighbours_max: int, shared_min: int) -> pa.Table:
    """
    New texts, each with those before it that it is compared with (``seq``, ``other_seq``): the likeliest, then the latest.

    Args:
        fresh, known: ``seq`` and ``word`` of the keys of new texts, and of texts before them.
        neighbours_max: So many others of each, and of each key so many.
        shared_min: With fewer keys in common two texts are not compared.
    """
    word, seq = (np.concatenate([each[name].to_numpy() for each in (fresh, known)]) for name in ("word", "seq"))
    is_new = np.arange(len(word)) < fresh.num_rows
    order = np.lexsort([seq, word])
    (found,) = paired(
        [pa.RecordBatch.from_arrays([word[order], seq[order], is_new[order]], list(_PAIRED))], neighbours_max
    )
    seqs, others, shared = (found.column(name).to_numpy() for name in found.schema.names)
    likeliest = np.flatnonzero(shared >= shared_min)
    likeliest = likeliest[np.lexsort([-others[likeliest], -shared[likeliest], seqs[likeliest]])]
    # The place of each among those of its text, which follow one another.
    _, begins, counts = np.unique(seqs[likeliest], return_index=True, return_counts=True)
    chosen = likeliest[np.arange(len(likeliest)) - np.repeat(begins, counts) < neighbours_max]
    return pa.table({"seq": seqs[chosen], "other_seq": others[chosen]})


_PAIRED: Final = ("word", "seq", "is_new")


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
