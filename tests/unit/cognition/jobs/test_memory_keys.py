"""The keys of memories as they are stored: found again, many at once, and never in another space."""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.cognition.jobs.consolidation_likeness import BANDS, Sieve, nearest, packed_keys, paired, words_of

TEXTS = ["tea in the garden", None, "tea in the garden!", "", "a", "\ud83d tea", "x" * 50_000]


def packed(texts: list[str | None], space: int) -> pa.Array:
    """Memories whose ids are their places, as they are stored."""
    ids = np.arange(len(texts)) - 3
    return pa.array(packed_keys(texts, np.full(len(texts), space), ids, ids * 1_000), pa.binary())


def words_in(stored: pa.Array, sieve: Sieve | None = None) -> list[list[int]]:
    """The words of each memory, in the order they are stored, of those that are looked for or all."""
    found: list[list[int]] = [[] for _ in stored]
    seqs, has_keys = pa.array(range(len(stored)), pa.int64()), pa.array([True] * len(stored), pa.bool_())
    for row in words_of(seqs, stored, has_keys, sieve).to_pylist():
        found[row["seq"]].append(row["word"])
    return found


def words(texts: list[str | None], space: int) -> list[list[int]]:
    """The words of memories."""
    return words_in(packed(texts, space))


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

    found = [[word for word in each if word in wanted] for each in known]
    assert words_in(stored, sieve) == found
    assert words_in(stored.slice(2, 3), sieve) == found[2:5]
    assert words_in(stored.slice(2, 0), sieve) == []


def test_the_first_two_words_are_names_and_keys_may_be_left_out() -> None:
    """Of a text that was known before only the words for its id and its text are of use."""
    seqs, has_keys = pa.array(range(10, 10 + len(TEXTS)), pa.int64()), pa.array([at != 2 for at in range(len(TEXTS))])

    found = words_of(seqs, packed(TEXTS, 7), has_keys).to_pylist()

    of_each = {seq: [row["is_name"] for row in found if row["seq"] == seq] for seq in seqs.to_pylist()}
    whole = [True, True, *[False] * BANDS]
    assert list(of_each.values()) == [whole, [True], [True, True], [True], whole, whole, whole]


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
        table = pa.table(dict(zip(("word", "seq", "is_new"), map(list, zip(*rows, strict=True)), strict=True)))
        found: dict[tuple[int, int], int] = {}
        for batch in paired(table.to_batches(max_chunksize=size), 2):
            for row in batch.to_pylist():
                pair = (row["seq"], row["other_seq"])
                found[pair] = found.get(pair, 0) + row["shared"]
        assert found == expected


def test_a_new_text_is_compared_with_those_that_share_most_and_are_latest() -> None:
    """At most so many, and none with fewer keys in common than it takes; the same as counted one by one."""
    draw = np.random.default_rng(5)
    known, fresh = (
        pa.table({"seq": draw.integers(low, low + 60, 400), "word": draw.integers(0, 40, 400)})
        .group_by(["seq", "word"])
        .aggregate([])
        for low in (0, 1_000)
    )
    keys: dict[int, set[int]] = {}
    for row in [*known.to_pylist(), *fresh.to_pylist()]:
        keys.setdefault(row["seq"], set()).add(row["word"])

    found = nearest(fresh, known, 1_000, 2).to_pylist()
    few = nearest(fresh, known, 3, 2).to_pylist()

    ranked = {
        seq: sorted(
            (-len(keys[seq] & keys[other]), -other)
            for other in keys
            if other < seq and len(keys[seq] & keys[other]) >= 2
        )
        for seq in sorted(keys)
        if seq >= 1_000
    }
    assert found == [{"seq": seq, "other_seq": -other} for seq, each in ranked.items() for _, other in each]
    assert max(sum(row["seq"] == seq for row in few) for seq in ranked) <= 3
    assert nearest(fresh.slice(0, 0), known, 3, 2).num_rows == 0
