"""
Words and patterns in people's text.

Words are matched whole: "hi" is in "Hi there" and not in "this". Nothing found here leaves with its text: callers learn
which of their own words occurred, and which kinds of personal data.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Final

PERSONAL_DATA: Final[Mapping[str, re.Pattern[str]]] = {
    # Every repetition is bounded and no two neighbours share characters: matching stays linear on hostile text.
    "email": re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])"),
    "ssn": re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])"),
    "phone": re.compile(r"(?<![\d-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?!\d)"),
}
_SECRETS: Final = (
    *("password", "passwords", "passphrase", "secret", "secrets", "credential", "credentials"),
    *("api key", "api_key", "private key", "access token", "pin code"),
)


@functools.lru_cache(maxsize=256)
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    # The longest first, so that "this morning" is not cut short by a word that begins it.
    spelled = sorted(words, key=len, reverse=True)
    joined = "|".join(r"\s+".join(re.escape(part) for part in word.split()) for word in spelled)
    return re.compile(rf"(?<!\w)(?:{joined})(?!\w)", re.IGNORECASE)


def find_words(text: str, words: Iterable[str]) -> set[str]:
    """Which of ``words`` (or phrases) occur in ``text`` as whole words, in lower case."""
    return {" ".join(found.lower().split()) for found in _pattern(tuple(words)).findall(text)}


def count_words(text: str, words: Iterable[str]) -> int:
    """How many of ``words`` occur; one that occurs twice counts once."""
    return len(find_words(text, words))


def has_secret(text: str) -> bool:
    """Whether the text speaks of passwords, keys and the like."""
    return _pattern(_SECRETS).search(text) is not None


def personal_data_kinds(text: str) -> tuple[str, ...]:
    """The kinds of personal data that the text seems to hold, sorted."""
    return tuple(sorted(kind for kind, pattern in PERSONAL_DATA.items() if pattern.search(text)))


def redact(text: str, kinds: Iterable[str]) -> tuple[str, dict[str, int]]:
    """
    Replace personal data by its kind in brackets.

    Args:
        text: What to clean.
        kinds: Keys of ``PERSONAL_DATA``.

    Returns:
        The text, and how many places of each kind were replaced.

    Raises:
        KeyError: A kind is not known.
    """
    counts: dict[str, int] = {}
    for kind in sorted(set(kinds)):
        text, count = PERSONAL_DATA[kind].subn(f"[{kind}]", text)
        if count:
            counts[kind] = count
    return text, counts
