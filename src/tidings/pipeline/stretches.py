"""
Stretches of an axis, as plain numbers: which of them changed, how far a change reaches, and which rows lie within.

The axis is time, in whole seconds since 1970, or the log's seqs. A stretch begins at its first number and ends before its
second one. Taking in more than had to be is always right, only dearer: so stretches are widened to whole pieces, and where
there are very many the nearest ones are joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .lake_log import DataFile

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyspark.sql import Column

__all__ = ["Stretch", "gaps", "holds_any", "joined", "may_hold_any", "widened"]

Stretch = tuple[int, int]

STRETCHES_MAX: Final = 32
_DAY_S: Final = 86_400
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1)
# What a calendar can name; a stretch may be meant to go on for ever.
_FIRST_S: Final = -62_135_596_800
_LAST_S: Final = 253_402_214_400


def joined(stretches: Iterable[Stretch], count_max: int = STRETCHES_MAX) -> tuple[Stretch, ...]:
    """The same stretches in order, none touching another; beyond ``count_max`` the smallest gaps between them are closed."""
    found: list[Stretch] = []
    for low, high in sorted(stretches):
        if high <= low:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    if len(found) <= count_max:
        return tuple(found)
    by_size = sorted(range(1, len(found)), key=lambda at: found[at][0] - found[at - 1][1], reverse=True)
    starts = [0, *sorted(by_size[: count_max - 1])]
    ends = [*(start - 1 for start in starts[1:]), len(found) - 1]
    return tuple((found[start][0], found[end][1]) for start, end in zip(starts, ends, strict=True))


def widened(stretches: Iterable[Stretch], length: int, *, before: float = 0, after: float = 0) -> tuple[Stretch, ...]:
    """The stretches from so much before them to so much after them, in whole pieces of a length."""
    return joined(
        (int((low - before) // length) * length, -int(-(high + after) // length) * length) for low, high in stretches
    )


def may_hold_any(file: DataFile, column: str, stretches: tuple[Stretch, ...]) -> bool:
    """Whether a file may have rows in one of the stretches, by its bounds; bounds that are unknown hold anything."""
    least, most = file.minimum.get(column), file.maximum.get(column)
    low = -np.inf if least is None else _place(least)
    # Bounds may have been rounded down, and a day goes on until the next one.
    high = np.inf if most is None else _place(most) + (_DAY_S if _is_day(most) else 1)
    return any(start <= high and low < end for start, end in stretches)


def holds_any(column: str, kind: str, stretches: tuple[Stretch, ...]) -> Column:
    """Whether a row lies in one of the stretches, as a condition for Spark."""
    from pyspark.sql import functions as F

    found: Column = F.lit(False)
    for low, high in stretches:
        is_in = (F.col(column) >= _literal(low, kind)) & (F.col(column) < _literal(high, kind))
        found = found | is_in
    return found


def gaps(values: pa.ChunkedArray | pa.Array, kind: str, stretches: tuple[Stretch, ...]) -> np.ndarray[Any, Any]:
    """For each value the number of the gap between stretches that it lies in, counted from 0; -1 if it lies in a stretch."""
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    if kind == "timestamp":
        numbers = np.floor_divide(
            _filled(pc.cast(pc.cast(values, pa.timestamp("us", tz="UTC")), pa.int64())), 1_000_000
        )
    elif kind == "date":
        numbers = _filled(pc.cast(pc.cast(values, pa.int32()), pa.int64())) * _DAY_S
    else:
        numbers = _filled(values)
    lows = np.array([low for low, _ in stretches], dtype=np.int64)
    highs = np.array([high for _, high in stretches], dtype=np.int64)
    passed = np.searchsorted(highs, numbers, side="right")
    following = np.append(lows, np.iinfo(np.int64).max)[passed]
    return np.where(numbers >= following, -1, passed)


def _filled(values: Any) -> np.ndarray[Any, Any]:
    # A row without a place lies in no stretch: it stays with what comes before the first one.
    found: np.ndarray[Any, Any] = values.fill_null(np.iinfo(np.int64).min).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)


def _is_day(value: Any) -> bool:
    return isinstance(value, date) and not isinstance(value, datetime)


def _place(value: Any) -> int:
    if isinstance(value, datetime):
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value
        return (moment - _EPOCH) // timedelta(seconds=1)
    if isinstance(value, date):
        return (value - _EPOCH_DAY).days * _DAY_S
    return int(value)


def _literal(place: int, kind: str) -> Column:
    from pyspark.sql import functions as F

    if kind == "timestamp":
        held = min(max(place, _FIRST_S), _LAST_S)
        return F.lit(_EPOCH + timedelta(seconds=held)).cast("timestamp")
    if kind == "date":
        held = min(max(place, _FIRST_S), _LAST_S)
        return F.lit(_EPOCH_DAY + timedelta(days=-(-held // _DAY_S)))
    return F.lit(place)
