"""The keys of memories as they are stored: found again, many at once, and never in another space."""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.cognition.jobs.consolidation_likeness import BANDS, Sieve, packed_keys, paired, words_of

TEXTS = ["tea in the garden", None, "tea in the garden!", "", "a", "\ud83d tea", "x" * 50_000]


def packed(texts: list[str | None], space: int) -> pa.Array:
    """Memories whose ids are their places, as they are stored."""
    ids = np.arange(len(texts)) - 3
    return pa.array(packed_keys(texts, np.full(len(texts), space), ids, ids * 1_000), pa.binary())


def listed(words: pa.Array) -> list[list[int]]:
    """All words of each."""
    return [[*each["names"], *each["keys"]] for each in words.to_pylist()]


def words(texts: list[str | None], space: int) -> list[list[int]]:
    """The words of memories."""
    return listed(words_of(packed(texts, space)))


def test_a_memory_has_a_word_for_its_id_one_for_its_text_and_one_for_each_key() -> None:
    """Without a text there is the id alone; the words do not depend on which others are worked on with it."""
    together, alone = words(TEXTS, 7), [words([*TEXTS[:at], text], 7)[at] for at, text in enumerate(TEXTS)]

    assert [len(each) for each in together] == [2 + BANDS if text else 1 for text in TEXTS]
    assert together == alone


def test_what_is_looked_for_is_found_and_nothing_else() -> None:
    """Of every memory those words come back, in their order, that are looked for; also from a part of what is stored."""
    known = words(TEXTS, 7)
    wanted = {known[0][0], *known[2][3:9], known[6][-1], 12345}
    stored, sieve = packed(TEXTS, 7), Sieve(np.array(sorted(wanted)))

    assert listed(words_of(stored, sieve)) == [[word for word in each if word in wanted] for each in known]
    assert words_of(stored.slice(2, 3), sieve).to_pylist() == words_of(stored, sieve).to_pylist()[2:5]
    assert words_of(stored.slice(2, 0), sieve).to_pylist() == []


def test_texts_of_two_spaces_share_no_words() -> None:
    """The same text in another space has other words; nearly the same text of one space shares some."""
    here, there = words(TEXTS, 7), words(TEXTS, 8)

    assert set(here[0]) & set(there[0]) == set(
        here[0][:2]
    )  # id and text, whose space is in the number they are made of
    assert len(set(here[0][2:]) & set(here[2][2:])) >= 2


def test_a_new_text_meets_the_last_ones_before_it_that_have_a_key_of_it() -> None:
    """However the rows are cut into batches: by each key the last two before it, old or new, counted over all keys."""
    rows = [
        (5, 1, False),
        (5, 2, False),
        (5, 3, False),
        (5, 9, True),
        (5, 11, True),
        (6, 4, False),
        (7, 3, False),
        (7, 9, True),
    ]
    expected = {(9, 3): 2, (9, 2): 1, (11, 9): 1, (11, 3): 1}

    for size in range(1, len(rows) + 1):
        table = pa.table(dict(zip(("key", "seq", "is_new"), map(list, zip(*rows, strict=True)), strict=True)))
        found: dict[tuple[int, int], int] = {}
        for batch in paired(table.to_batches(max_chunksize=size), 2):
            for row in batch.to_pylist():
                pair = (row["seq"], row["other_seq"])
                found[pair] = found.get(pair, 0) + row["shared"]
        assert found == expected
