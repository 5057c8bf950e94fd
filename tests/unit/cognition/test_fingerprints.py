"""Texts alike have fingerprints alike, and novelty follows its formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.write.dedupe import (
    Fingerprint,
    completion_score,
    fingerprint,
    hamming,
    jaccard,
    minhash_similarity,
    novelty,
    shingles,
)

LONG = "We walked along the shore until the lighthouse came into view, and then the rain began to fall on us all."


def of(text: str) -> Fingerprint:
    return fingerprint(shingles(text))


def test_shingles_are_lower_cased_three_character_pieces() -> None:
    """Spaces are evened out; a short text is one piece, an empty one none."""
    assert shingles("Ab  cD") == {"ab ", "b c", " cd"}
    assert shingles("Hi") == {"hi"}
    assert shingles("  ") == frozenset()


@pytest.mark.req("F115")
def test_fingerprints_have_512_bits_and_64_values() -> None:
    """And the stored forms are as long; case and spaces do not matter."""
    made = of(LONG)

    assert 0 < made.simhash < 1 << 512
    assert (len(made.simhash_bytes()), len(made.minhash), len(made.minhash_bytes())) == (64, 64, 256)
    assert [len(band) for band in made.bands()] == [16] * 16
    assert of(f"  {LONG.upper()} ") == made


@pytest.mark.parametrize("text", ["the quick brown fox", "the quick brown fo", "a", ""])
def test_each_simhash_bit_is_the_majority_of_the_pieces(text: str) -> None:
    """Counted plainly, piece by piece and bit by bit; a tie is a zero."""
    pieces = sorted(shingles(text))
    ones = [fingerprint([piece]).simhash for piece in pieces]
    majority = sum(1 << at for at in range(512) if 2 * sum(each >> at & 1 for each in ones) > len(ones))

    assert fingerprint(pieces).simhash == majority


def test_a_stored_fingerprint_never_changes() -> None:
    """The first bits of a known text: were the algorithm to change, stored memories would no longer match."""
    made = of("tidings")

    assert made == of("tidings")
    assert (made.simhash_bytes()[:4].hex(), made.minhash[0]) == ("4eec12e6", 473551080)


def test_distance_tells_alike_from_unlike() -> None:
    """A changed word moves few places, another text about half of them."""
    near, far = of(LONG.replace("rain", "hail")), of("Quarterly figures were sent to the accountant on Monday, twice.")

    assert hamming(of(LONG).simhash, near.simhash) < 120
    assert hamming(of(LONG).simhash, far.simhash) > 180
    assert of(LONG).bands() != near.bands()
    assert set(enumerate(of(LONG).bands())) & set(enumerate(near.bands()))


@given(st.text(alphabet="abcde ", min_size=1, max_size=80), st.text(alphabet="abcde ", min_size=1, max_size=80))
def test_minhash_estimates_jaccard(one: str, other: str) -> None:
    """Within what 64 samples can be off; equal sets give 1."""
    pieces = shingles(one), shingles(other)
    estimate = minhash_similarity(fingerprint(pieces[0]), fingerprint(pieces[1]))

    assert estimate == pytest.approx(jaccard(*pieces), abs=0.35)
    assert minhash_similarity(of(one), of(one)) == 1.0


@pytest.mark.req("F115")
@pytest.mark.parametrize(
    ("distance", "rate", "value"),
    [(0, 0.0, 0.5), (0, 1.0, 0.2689414), (256, 0.0, 0.9525741), (512, 0.0, 0.9975274), (256, 1.0, 0.8807971)],
)
def test_novelty_follows_its_formula(distance: int, rate: float, value: float) -> None:
    """sigmoid(6 d / 512 - duplicate rate)."""
    assert novelty(distance, rate) == pytest.approx(value)
    assert novelty(distance, rate) == pytest.approx(1 / (1 + math.exp(rate - 6 * distance / 512)))


@given(st.integers(0, 512), st.integers(0, 512), st.floats(0, 1))
def test_farther_is_newer(one: int, other: int, rate: float) -> None:
    """Novelty lies in 0..1, rises with distance and falls with duplicates."""
    near, far = sorted((one, other))

    assert 0 < novelty(near, rate) <= novelty(far, rate) < 1
    assert novelty(near, 1.0) <= novelty(near, rate)


@pytest.mark.req("F115")
def test_completion_mixes_cosine_and_hamming() -> None:
    """0.7 and 0.3, or Hamming alone without vectors."""
    assert completion_score(128, cosine=0.5) == pytest.approx(0.7 * 0.5 + 0.3 * 0.75)
    assert completion_score(128) == 0.75
