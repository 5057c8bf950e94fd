"""Retries: what to do after an attempt has failed. Plain values: no clock, no disk; chance comes in."""

from __future__ import annotations

import random
from typing import NamedTuple

from .settings import Backoff

__all__ = ["Retry", "delay_cap_s", "next_retry"]


class Retry(NamedTuple):
    """Try again after this delay."""

    delay_s: float


def delay_cap_s(backoff: Backoff, failures: int) -> float:
    """The longest delay after ``failures`` failures: ``min(base * mult**(failures - 1), max)``."""
    try:
        return min(backoff.base_s * backoff.mult ** (failures - 1), backoff.max_s)
    except OverflowError:
        # A float ends long before it matters; the cap is what would be taken anyway.
        return backoff.max_s if backoff.base_s else 0.0


def next_retry(backoff: Backoff, failures: int, rng: random.Random, delay_s: float | None = None) -> Retry | None:
    """
    When to try again after ``failures`` failures (at least 1); ``None`` if the event is a dead letter now.

    Full jitter: the delay is drawn evenly from zero to the cap, so that what failed together does not return together.
    ``delay_s`` is the handler's own wish and is taken as it is.
    """
    if failures > backoff.retries_max:
        return None
    return Retry(rng.uniform(0.0, delay_cap_s(backoff, failures)) if delay_s is None else max(0.0, delay_s))
