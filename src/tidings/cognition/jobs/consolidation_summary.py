"""
Summing texts up by choosing from their sentences. Plain functions, run on executors.

    score of a sentence = 0.7 tf-idf + 0.3 recency - 0.3 (largest cosine to a sentence already chosen)

Tf-idf is the mean weight of a sentence's words, as a share of the best sentence's. The best one is chosen, then the best of
the rest, as long as the budget of tokens lasts. Salient items come first until enough of them are covered. The same items
give the same summary in whatever order they come.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["Choice", "Item", "Summary", "sum_up", "tokens_in"]

COVERAGE_MIN: Final = 0.8
SALIENT_MIN: Final = 0.7
_SENTENCES_MAX: Final = 2_000
_HOUR_MICROS: Final = 3_600_000_000
_TOKEN: Final = re.compile(r"\w+|[^\w\s]")
_WORD: Final = re.compile(r"\w+")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?…])\s+|\s*\n\s*")


class Item(NamedTuple):
    """Something to sum up."""

    event_id: str
    at_micros: int
    text: str
    salience: float


class Choice(NamedTuple):
    """A sentence that was chosen."""

    event_id: str
    text: str
    score: float


class Summary(NamedTuple):
    """What is left of the items."""

    text: str
    """The chosen sentences, in the order of their items' times."""
    choices: tuple[Choice, ...]
    """The same, the best first."""
    token_count: int
    token_count_before: int
    coverage: float
    """The share of salient items that a chosen sentence stems from; 1 where none is salient."""


class _Sentence(NamedTuple):
    item: Item
    """The last one that says it."""
    said_by: frozenset[str]
    at: int
    text: str
    token_count: int
    weights: dict[str, float]
    base: float


def tokens_in(text: str) -> int:
    """How many words and signs a text has."""
    return sum(1 for _ in _TOKEN.finditer(text))


def sum_up(items: Iterable[Item], *, end_micros: int, half_life_h: float, tokens_max: int) -> Summary:
    """
    Choose sentences.

    Args:
        items: What there is to say.
        end_micros: Recency is seen from here: the period's end, so that a summary does not change as it ages.
        half_life_h: After so many hours a sentence's recency has halved.
        tokens_max: The budget.
    """
    ordered = sorted(items, key=lambda item: (item.at_micros, item.event_id))
    waiting = _sentences(ordered, end_micros, half_life_h, tokens_max)
    salient = {item.event_id for item in ordered if item.salience >= SALIENT_MIN}
    covered: set[str] = set()
    nearest = [0.0] * len(waiting)
    taken: list[tuple[_Sentence, float]] = []
    left = tokens_max
    open_ = set(range(len(waiting)))
    while open_:
        fits = [at for at in open_ if waiting[at].token_count <= left]
        if len(covered) < COVERAGE_MIN * len(salient):
            missing = salient - covered
            fits = [at for at in fits if waiting[at].said_by & missing] or fits
        if not fits:
            break
        best = max(fits, key=lambda at: (waiting[at].base - 0.3 * nearest[at], -at))
        chosen = waiting[best]
        taken.append((chosen, chosen.base - 0.3 * nearest[best]))
        open_.discard(best)
        left -= chosen.token_count
        covered |= chosen.said_by & salient
        for at in open_:
            nearest[at] = max(nearest[at], _cosine(chosen.weights, waiting[at].weights))
    told = sorted(taken, key=lambda pair: (pair[0].item.at_micros, pair[0].item.event_id, pair[0].at))
    return Summary(
        text=" ".join(sentence.text for sentence, _ in told),
        choices=tuple(Choice(sentence.item.event_id, sentence.text, round(score, 6)) for sentence, score in taken),
        token_count=tokens_max - left,
        token_count_before=sum(tokens_in(item.text) for item in ordered),
        coverage=len(covered) / len(salient) if salient else 1.0,
    )


def _sentences(items: Sequence[Item], end_micros: int, half_life_h: float, tokens_max: int) -> list[_Sentence]:
    """Every sentence that has words, each once, in the order of the items' times; the best ones if there are too many."""
    found: dict[str, tuple[Item, int, str]] = {}
    said_by: dict[str, set[str]] = {}
    for item in items:
        for at, raw in enumerate(_SENTENCE_END.split(item.text)):
            text = _cut(raw.strip(), tokens_max)
            if _WORD.search(text):
                key = " ".join(text.lower().split())
                found[key] = (item, at, text)
                said_by.setdefault(key, set()).add(item.event_id)
    words = {key: Counter(_WORD.findall(key)) for key in found}
    seen_in = Counter(word for counts in words.values() for word in counts)
    weigh = {word: math.log((1 + len(found)) / (1 + count)) + 1 for word, count in seen_in.items()}
    weights = {key: {word: n * weigh[word] for word, n in counts.items()} for key, counts in words.items()}
    means = {key: sum(weights[key].values()) / words[key].total() for key in found}
    best = max(means.values(), default=1.0)
    sentences = []
    for key, (item, at, text) in found.items():
        age_h = max(0, end_micros - item.at_micros) / _HOUR_MICROS
        base = 0.7 * means[key] / best + 0.3 * 2.0 ** (-age_h / half_life_h)
        sentences.append(_Sentence(item, frozenset(said_by[key]), at, text, tokens_in(text), weights[key], base))
    if len(sentences) <= _SENTENCES_MAX:
        return sentences
    kept = sorted(range(len(sentences)), key=lambda at: (-sentences[at].base, at))[:_SENTENCES_MAX]
    return [sentences[at] for at in sorted(kept)]


def _cut(text: str, tokens_max: int) -> str:
    """A sentence longer than the whole budget ends where the budget does."""
    for at, token in enumerate(_TOKEN.finditer(text), 1):
        if at == tokens_max:
            return text[: token.end()]
    return text


def _cosine(one: dict[str, float], other: dict[str, float]) -> float:
    if len(other) < len(one):
        one, other = other, one
    product = sum(weight * other[word] for word, weight in one.items() if word in other)
    if not product:
        return 0.0
    return product / math.sqrt(sum(w * w for w in one.values()) * sum(w * w for w in other.values()))
