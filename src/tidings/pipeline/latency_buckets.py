"""
How late events were written, counted in buckets that grow by a twentieth: counts add up, so percentiles hold over any range.

A percentile of a day is not the mean of its minutes' percentiles; it is read from the day's counts, and is at most a
fortieth away from the true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

GROWTH: Final = 1.05
"""
Bucket 0 holds what was written at its own time, or before it by a clock that is wrong; bucket ``n`` what was written after
``GROWTH ** (n - 1)`` to ``GROWTH ** n`` microseconds.
"""


def bucket_ms(bucket: int) -> float:
    """The middle of a bucket, in milliseconds."""
    return 0.0 if bucket <= 0 else float(GROWTH ** (bucket - 0.5)) / 1000


def bucket_of(ms: float) -> int:
    """The bucket that a latency in milliseconds is counted in."""
    return 0 if ms * 1000 < 1 else 1 + math.floor(math.log(ms * 1000) / math.log(GROWTH))


def percentile_ms(counts: Mapping[int, int], rank: float) -> float | None:
    """The latency that a share of ``rank`` of the events did not exceed; ``None`` of no events."""
    left = rank * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0 and counts[bucket]:
            return bucket_ms(bucket)
    return None
