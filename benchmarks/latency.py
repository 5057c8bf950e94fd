"""Latency at a steady rate: single events, many who hear of each, and the rows that it makes, for whatever carries the events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from .measuring import Percentiles, Taken, percentiles
from .report import Row, at_most, unsure
from .running import Runner
from .sync_serving import Server

__all__ = ["AtRate", "SteadyRate", "latency_rows", "others_cores", "times_between"]

_REACHED_MIN: Final = 0.9


class SteadyRate(msgspec.Struct, frozen=True, kw_only=True):
    """Single events at a steady rate, and many who hear of each."""

    server: Server
    workspace: str
    """The server's: its log says when each commit began."""
    subscribers: int
    per_s: int
    seconds: float
    run: str
    is_one_core: bool = False


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


_CaseT = TypeVar("_CaseT", bound=SteadyRate)
_FoundT = TypeVar("_FoundT", bound=AtRate)


def latency_rows(
    run: Runner,
    bench: str,
    measure: Callable[[_CaseT], _FoundT],
    case: _CaseT,
    figures: Iterable[tuple[str, Callable[[_FoundT], Percentiles], float | None]],
    how: str = "",
) -> Iterator[Row]:
    """
    Measure a case; one row a figure.

    Args:
        run: Has it measured.
        bench: Whose rows they are.
        measure, case: What is measured.
        figures: What each is, where it is found, and how many milliseconds its p99 may be, if there is a limit.
        how: More about the case.
    """
    found, per_s = run(measure, case), case.per_s
    for name, percentiles_of, ceiling in figures:
        which = percentiles_of(found)
        row = Row(
            bench=bench,
            case=f"{name} p99, at {per_s:,} commits/s, {case.subscribers} subscribers{how}",
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
