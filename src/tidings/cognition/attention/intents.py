"""
What a request is for: guesses from its words, its tags and its own claim, and the topic each guess leads to.

The numbers are the rules' own; the word lists are ours, chosen so that no word speaks for two intents.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from ..ports import clip01
from ..words import count_words
from .requests import Action, GateRequest, GateRouting, Intent, IntentGuess

__all__ = ["derive_intents", "route"]

_PATTERNS: Final[dict[Intent, tuple[str, ...]]] = {
    Intent.PROSPECTIVE_SCHEDULE: ("remind", "reminder", "schedule", "appointment", "alarm", "timer", "due"),
    Intent.RECALL: ("recall", "what did", "when did", "where did", "who was", "find", "search", "look up", "show me"),
    Intent.WRITE: ("save", "note", "write down", "record", "store", "jot", "log"),
    Intent.PROJECT: ("plan", "planning", "project", "outline", "organise", "organize", "roadmap"),
    Intent.HIPPO_ENCODE: ("remember", "memory", "learned", "learnt", "experienced", "happened", "felt"),
}
_FUTURE: Final = ("tomorrow", "tonight", "later", "soon", "next week", "next month", "next year")
_PAST: Final = ("yesterday", "ago", "earlier", "previously", "last night", "last week", "last month", "last year")
_GUESSES_MAX: Final = 3
_TOPICS: Final = {
    Intent.PROSPECTIVE_SCHEDULE: ("bus.prospective.schedule", 1),
    Intent.RECALL: ("bus.retrieval.query", 2),
    Intent.WRITE: ("bus.write.ingest", 1),
    Intent.PROJECT: ("bus.planning.project", 1),
    Intent.HIPPO_ENCODE: ("bus.hippocampus.encode", 3),
    Intent.UNKNOWN: ("bus.hippocampus.encode", 3),
}
_BY_ACTION: Final = {Action.BOOST: 2, Action.DEFER: -1}


def derive_intents(request: GateRequest) -> tuple[IntentGuess, ...]:
    """The likeliest intents, at most three, best first; without any sign, an experience to encode."""
    sources: dict[Intent, list[float]] = defaultdict(list)
    if request.declared_intent is not None and request.declared_confidence > 0:
        known = request.declared_intent in set(Intent)
        declared = Intent(request.declared_intent) if known else Intent.UNKNOWN
        sources[declared].append(clip01(request.declared_confidence))
    for intent, words in _PATTERNS.items():
        matched = count_words(request.text, words)
        if matched:
            sources[intent].append(min(0.9, 0.3 + 0.2 * matched))
    if count_words(request.text, _FUTURE):
        sources[Intent.PROSPECTIVE_SCHEDULE].append(0.6)
    if count_words(request.text, _PAST):
        sources[Intent.RECALL].append(0.5)
    tags = () if request.affect is None else request.affect.tags
    if "urgent" in tags:
        sources[Intent.PROSPECTIVE_SCHEDULE].append(0.7)
    if "reflective" in tags:
        sources[Intent.HIPPO_ENCODE].append(0.6)
    if not sources:
        return (IntentGuess(Intent.HIPPO_ENCODE, 0.6),)
    order = list(Intent)
    guesses = [IntentGuess(intent, combine(confidences)) for intent, confidences in sources.items()]
    guesses.sort(key=lambda guess: (-guess.confidence, order.index(guess.intent)))
    return tuple(guesses[:_GUESSES_MAX])


def combine(confidences: list[float]) -> float:
    """One source speaks for itself; several add up, discounted while they are few."""
    if len(confidences) == 1:
        return confidences[0]
    return min(0.95, sum(confidences) * min(1.0, 0.2 * len(confidences)))


def route(intent: Intent, action: Action, deadline: str | None, processing_ms_max: int) -> GateRouting:
    """Where a request of this intent goes, and how hard it is tried."""
    topic, base = _TOPICS[intent]
    return GateRouting(
        topic=topic,
        priority=max(0, base + _BY_ACTION.get(action, 0)),
        deadline=deadline,
        retries_max=3 if action is Action.BOOST else 1,
        processing_ms_max=processing_ms_max,
    )
