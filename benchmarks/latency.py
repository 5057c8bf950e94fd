"""Latency at a steady rate, as rows: for whatever carries the events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from .measuring import Percentiles, Taken, percentiles
from .report import Row, at_most, unsure

__all__ = ["AtRate", "latency_rows", "others_cores", "times_between"]

_REACHED_MIN: Final = 0.9


class AtRate(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a steady rate."""

    reached_per_s: float
    taken: Taken
    server_cpu_s: float


def times_between(begun: Sequence[int], heard: Iterable[Sequence[int]]) -> Percentiles:
    """From when each event began until each of those who hear of it did; one who heard before counts as at once."""
    return percentiles([max(0, at - since) for times in heard for since, at in zip(begun, times, strict=True)])


def others_cores(taken: Taken, server_cpu_s: float) -> float:
    """Cores that neither the client nor the server used."""
    return max(0.0, (taken.others_cores or 0.0) - server_cpu_s / taken.wall_s)


def latency_rows(
    bench: str, about: str, per_s: int, found: AtRate, figures: Iterable[tuple[str, Percentiles, float | None]]
) -> Iterator[Row]:
    """
    One row a figure: what it is, the latencies in microseconds, and how many milliseconds its p99 may be, if there is a limit.

    Args:
        bench: Whose rows they are.
        about: What all of them were measured at.
        per_s: The rate that was asked for.
        found: What came of it.
        figures: The latencies.
    """
    for name, which, ceiling in figures:
        row = Row(
            bench=bench,
            case=f"{name}, {about}",
            unit="ms",
            ours=max(which.p99 / 1000, 0.001),
            detail={
                "p50": which.p50 / 1000,
                "reached/s": found.reached_per_s,
                "server's cores": found.server_cpu_s / found.taken.wall_s,
                "others' cores": others_cores(found.taken, found.server_cpu_s),
            },
        )
        judged = row if ceiling is None else at_most(row, ceiling)
        # Where the rate was not reached, events waited before they were committed, and what came after is another story.
        is_short = found.reached_per_s < _REACHED_MIN * per_s
        yield unsure(judged) if judged.verdict == "pass" and is_short else judged
