"""
How late events were written, counted in buckets that grow by a fiftieth: counts add up, so percentiles hold over any range.

A percentile of a day is not the mean of its minutes' percentiles; it is read from the day's counts, and is at most one per
cent away from the true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

GROWTH: Final = 1.02
"""
Bucket 0 holds what was written at its own time; bucket ``n`` what was written from ``GROWTH ** (n - 1)`` to ``GROWTH ** n``
microseconds later, and bucket ``-n`` what was written as much before its own time, as somebody's clock was wrong.
"""


def bucket_of(ms: float) -> int:
    """The bucket that a latency in milliseconds is counted in."""
    us = abs(ms) * 1000
    return 0 if us < 1 else int(math.copysign(1 + math.floor(math.log(us) / math.log(GROWTH)), ms))


def bucket_ms(bucket: int) -> float:
    """The middle of a bucket, in milliseconds."""
    return 0.0 if bucket == 0 else math.copysign(GROWTH ** (abs(bucket) - 0.5) / 1000, bucket)


def percentile_ms(counts: Mapping[int, int], rank: float) -> float | None:
    """The latency that a share of ``rank`` of the events did not exceed; ``None`` of no events."""
    left = rank * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0 and counts[bucket]:
            return bucket_ms(bucket)
    return None
