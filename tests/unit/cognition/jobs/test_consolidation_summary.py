"""Likeness and summaries, as plain functions of texts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.jobs.consolidation_likeness import BANDS, band_keys, likeness
from tidings.cognition.jobs.consolidation_rollups import Item, sum_up, tokens_in

HOUR = 3_600_000_000
DAY = 24 * HOUR


def item(name: str, text: str, *, at: int = 0, salience: float = 0.5) -> Item:
    return Item(name, at, text, salience)


@pytest.mark.req("C1")
def test_likeness_by_hand() -> None:
    """Of the pieces abc, bcd and abc, bce one of three is shared (Jaccard), and the vectors meet at a half (cosine)."""
    assert likeness("abcd", "abce", None, None) == pytest.approx((1 / 3, 1 / 2))
    assert likeness("abc", "abc", None, None) == (1, 1)
    assert likeness("ab", "ab", None, None) == (1, 1)
    assert likeness("", "", None, None) == (0, 0)
    assert likeness("abcabc", "abc", None, None) == pytest.approx((1 / 3, 2 / math.sqrt(6)))


@pytest.mark.req("C1")
def test_embeddings_count_where_both_have_them() -> None:
    """Vectors of one length give the cosine; of different lengths, of no length or out of range, the pieces do."""
    assert likeness("abcd", "abce", [1.0, 0.0], [1.0, 1.0])[1] == pytest.approx(math.sqrt(0.5))
    for one, other in [([1.0], [1.0, 1.0]), ([0.0], [0.0]), (None, [1.0]), ([1e200, 1e200], [1e200, 0.0])]:
        assert likeness("abcd", "abce", one, other)[1] == pytest.approx(0.5)


def keys_of(text: str) -> list[int]:
    (keys,) = band_keys([text])
    return [int(key) for key in keys]


def test_keys_follow_from_the_pieces_alone() -> None:
    """A text has the same 24 keys wherever it is; the same pieces in another order give the same keys; other texts others."""
    texts = ["the kettle is on", "a bus came late", "é", "the kettle is on"]
    together = [[int(key) for key in keys] for keys in band_keys(texts)]

    assert together == [keys_of(text) for text in texts]
    assert [len(keys) for keys in together] == [BANDS] * 4
    assert together[0] == together[3]
    assert set(together[0]).isdisjoint(together[1])
    assert keys_of("abcabcabc") == keys_of("abcabcabcabc")
    assert keys_of("a") != keys_of("b")
    assert len(band_keys([])) == 0


@given(st.text(min_size=60, max_size=200), st.data())
def test_texts_alike_share_a_key(text: str, data: st.DataObject) -> None:
    """Two texts that share nine tenths of their pieces are compared: they have a key in common."""
    at = data.draw(st.integers(0, len(text)))
    other = text[:at] + "!" + text[at:]

    assert set(keys_of(text)) & set(keys_of(other)) or likeness(text, other, None, None)[0] < 0.9


@pytest.mark.req("C3")
def test_the_best_sentences_within_the_budget_in_order_of_time() -> None:
    """The budget of tokens is kept, and what was chosen is told in the order it happened."""
    items = [
        item("a", "Ada fixed the boiler today.", at=1 * HOUR),
        item("b", "It rained. The school bus broke down near the bridge.", at=2 * HOUR),
        item("c", "Bob baked bread with rye and seeds.", at=3 * HOUR),
    ]
    summary = sum_up(items, end_micros=DAY, half_life_h=72, tokens_max=18)

    assert summary.token_count <= 18
    assert tokens_in(summary.text) == summary.token_count
    assert summary.token_count_before == 6 + 3 + 9 + 8
    ids = [choice.event_id for choice in summary.choices]
    assert len(ids) >= 2
    told = [summary.text.index(choice.text) for choice in sorted(summary.choices, key=lambda choice: choice.event_id)]
    assert told == sorted(told)


@pytest.mark.req("C3")
def test_sentence_scores_by_hand() -> None:
    """
    Two sentences of words that all occur once weigh the same (tf-idf 1 of 1), so recency decides; the other shares no
    word with it and loses nothing; what two items say is told once, as the later one's.
    """
    items = [item("old", "red fox", at=0), item("new", "blue whale", at=72 * HOUR), item("same", "Blue  whale", at=0)]
    summary = sum_up(items, end_micros=72 * HOUR, half_life_h=72, tokens_max=100)

    assert [(choice.event_id, choice.score) for choice in summary.choices] == [("new", 1.0), ("old", 0.85)]


@pytest.mark.req("C3")
def test_what_was_said_counts_less() -> None:
    """A sentence close to one that was chosen loses three tenths of their cosine to a sentence that is new."""
    items = [
        item("a", "the cat sat on the mat", at=0),
        item("b", "the cat sat on the rug", at=0),
        item("c", "storms delayed every ferry tonight", at=0),
    ]
    summary = sum_up(items, end_micros=0, half_life_h=72, tokens_max=11)

    assert {choice.event_id for choice in summary.choices} >= {"c"}
    assert len(summary.choices) == 2


@pytest.mark.req("C3")
def test_salient_items_are_covered_first() -> None:
    """However dull its words, a salient item is in the summary before others, until four of five are covered."""
    dull = [item(f"s{n}", f"note note note {n}", at=0, salience=0.9) for n in range(5)]
    loud = [item(f"l{n}", f"rare word{n} thing{n} here{n}", at=DAY) for n in range(20)]
    summary = sum_up(dull + loud, end_micros=DAY, half_life_h=72, tokens_max=16)

    assert summary.coverage == pytest.approx(0.8)
    assert {choice.event_id[0] for choice in summary.choices} == {"s"}


def test_nothing_and_nonsense() -> None:
    """No items, empty texts and signs without words give an empty summary that covers all there is."""
    for items in ([], [item("a", "")], [item("a", "... !!! ???")]):
        summary = sum_up(items, end_micros=0, half_life_h=72, tokens_max=10)
        assert (summary.text, summary.choices, summary.token_count, summary.coverage) == ("", (), 0, 1.0)


def test_a_sentence_longer_than_the_budget_is_cut() -> None:
    """One endless sentence fills the budget and no more."""
    summary = sum_up([item("a", "word " * 5_000)], end_micros=0, half_life_h=72, tokens_max=50)

    assert summary.token_count == 50


ITEMS = st.lists(
    st.builds(
        item, st.uuids().map(str), st.text("ab .!\n", max_size=40), at=st.integers(0, DAY), salience=st.floats(0, 1)
    ),
    max_size=8,
)


@given(ITEMS, st.randoms(use_true_random=False), st.integers(1, 30))
def test_the_order_of_items_does_not_matter(items: list[Item], random: object, tokens_max: int) -> None:
    """Rows come in any order; the summary is the same, and within the budget."""
    shuffled = list(items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one = sum_up(items, end_micros=DAY, half_life_h=72, tokens_max=tokens_max)

    assert one == sum_up(shuffled, end_micros=DAY, half_life_h=72, tokens_max=tokens_max)
    assert one.token_count <= tokens_max
