"""The keys of memories as they are stored: found again, many at once, and never in another space."""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.cognition.jobs.consolidation_likeness import BANDS, Sieve, packed_keys, words_of

TEXTS = ["tea in the garden", None, "tea in the garden!", "", "a", "\ud83d tea", "x" * 50_000]


def words(texts: list[str | None], space: int) -> list[list[int]]:
    """The words of memories whose ids are their places."""
    spaces, ids = np.full(len(texts), space), np.arange(len(texts)) - 3
    found: list[list[int]] = words_of(pa.array(packed_keys(texts, spaces, ids), pa.binary())).to_pylist()
    return found


def test_a_memory_has_a_word_for_its_id_and_one_for_each_key_of_its_text() -> None:
    """Without a text there is the id alone; the words do not depend on which others are worked on with it."""
    together, alone = words(TEXTS, 7), [words([*TEXTS[:at], text], 7)[at] for at, text in enumerate(TEXTS)]

    assert [len(each) for each in together] == [1 + BANDS if text else 1 for text in TEXTS]
    assert together == alone


def test_what_is_looked_for_is_found_and_nothing_else() -> None:
    """Of every memory those words come back, in their order, that are looked for; also from a part of what is stored."""
    known = words(TEXTS, 7)
    wanted = {known[0][0], *known[2][3:9], known[6][-1], 12345}
    packed = pa.array(packed_keys(TEXTS, np.full(len(TEXTS), 7), np.arange(len(TEXTS)) - 3), pa.binary())
    sieve = Sieve(np.array(sorted(wanted)))

    assert words_of(packed, sieve).to_pylist() == [[word for word in each if word in wanted] for each in known]
    assert words_of(packed.slice(2, 3), sieve).to_pylist() == words_of(packed, sieve).to_pylist()[2:5]
    assert words_of(packed.slice(2, 0), sieve).to_pylist() == []


def test_texts_of_two_spaces_share_no_words() -> None:
    """The same text in another space has other words; nearly the same text of one space shares some."""
    here, there = words(TEXTS, 7), words(TEXTS, 8)

    assert set(here[0]) & set(there[0]) == {here[0][0]}  # the id's, whose space is in the number it is made of
    assert len(set(here[0][1:]) & set(here[2][1:])) >= 2
