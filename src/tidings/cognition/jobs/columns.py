"""
What the temporal and the consolidation jobs share: reading payloads, times and zones, and publishing results.

A payload is JSON text that anybody may have written. Every function here answers null where a value is missing, is of
another type or cannot be, so an odd event costs itself and never the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, Final

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import TimestampNTZType

from tidings.core.events import Event, EventMeta
from tidings.core.ids import content_id
from tidings.pipeline.jobs.job import JobContext, time_in
from tidings.pipeline.session import session_for_little

from ..errors import InvalidRequest
from ..ports import zone_of

_MICROS_PER_HOUR: Final = 3_600_000_000.0
_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(2262, 1, 1, tzinfo=UTC)
_OFFSET: Final = r"([+-]\d{2}:\d{2})$"
_NUMBER_MAX: Final = 1e15
_FEW: Final = 10_000


def as_of(context: JobContext) -> Column:
    """The run's idea of now."""
    return F.lit(context.as_of.astimezone(UTC)).cast("timestamp")


def text(path: str, column: str = "payload") -> Column:
    """The value at a JSON path as text; an object or a list as JSON text."""
    return F.get_json_object(F.col(column), f"$.{path}")


def finite(said: Column) -> Column:
    """
    What was said as a number to reckon with, or null.

    Text such as "NaN" or "Infinity" casts to a double, and one of these in a sum takes the whole sum with it. So does a number
    beside which a double has no room for the others: from 1e15 on nothing counts as a number.
    """
    found = said.try_cast("double")
    return F.when(F.abs(found) < F.lit(_NUMBER_MAX), found)


def number(path: str) -> Column:
    """The value at a path of the payload as a number to reckon with."""
    return finite(text(path))


def finite_members(given: Column) -> Column:
    """The members of a map of texts that are numbers to reckon with, by name; empty where there is none."""
    cast_ = F.transform_values(given, lambda _, said: finite(said))
    known = F.map_filter(cast_, lambda _, found: found.isNotNull())
    return F.coalesce(known, F.create_map().cast("map<string,double>"))


def numbers(path: str) -> Column:
    """The numbers in an object of the payload, by name; empty where there is none."""
    return finite_members(F.from_json(text(path), "map<string,string>"))


def clipped(value: Column, low: float, high: float) -> Column:
    """``value``, or the nearer end of the range; null stays null (``greatest`` alone would make it ``low``)."""
    return F.when(value.isNotNull(), F.least(F.greatest(value, F.lit(low)), F.lit(high)))


def texts(path: str) -> Column:
    """The list of texts at a path of the payload."""
    return F.from_json(text(path), "array<string>")


def usable(ts: Column) -> Column:
    """``ts`` if it lies in the years that the log takes, 1970 to 2261: a payload's own times are nobody's promise."""
    return F.when((ts >= F.lit(_EARLIEST)) & (ts < F.lit(_LATEST)), ts)


def instant(path: str) -> Column:
    """The time at a path of the payload, ISO 8601 with year, month and day; without an offset it is taken for UTC."""
    return usable(time_in(text(path)))


def offset_in(written: Column) -> Column:
    """The offset that a time was written with, such as ``+02:00``; null for UTC, which says nothing of the place."""
    found = F.regexp_extract(written, _OFFSET, 1)
    return F.when(~found.isin("", "+00:00", "-00:00"), found)


def name_of_actor(actor: Column) -> Column:
    """Who acted: the ``user_id`` or ``agent_id`` of an actor in JSON, or the text itself."""
    in_json = [F.get_json_object(actor, f"$.{name}") for name in ("user_id", "agent_id", "id")]
    return F.coalesce(*in_json, F.when(~actor.startswith("{"), actor))


def iso(ts: Column) -> Column:
    """A time as text in UTC, to the microsecond. (A time that leaves Spark as such would come in the driver's own zone.)"""
    return F.date_format(ts, "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'")


def hours_between(start: Column, end: Column) -> Column:
    """Hours from one time to another, with fraction and sign."""
    return (F.unix_micros(end) - F.unix_micros(start)) / F.lit(_MICROS_PER_HOUR)


def recency(ts: Column, now: Column, half_life_h: Column) -> Column:
    """1 for now, half of it for each half-life gone by. An event ahead of ``now`` (a clock was behind) counts as now."""
    age_h = F.greatest(hours_between(ts, now), F.lit(0.0))
    return F.pow(F.lit(2.0), -age_h / half_life_h)


def digest(*parts: Column) -> Column:
    """64 hex digits that stand for the parts. Lengths keep ("ab", "c") and ("a", "bc") apart."""
    given = [F.coalesce(part.cast("string"), F.lit("")) for part in parts]
    return F.sha2(F.concat(*[F.concat(F.length(part).cast("string"), F.lit(":"), part) for part in given]), 256)


def zone_or_none(name: str) -> tzinfo | None:
    """The zone of that name, or an offset such as ``+05:30``; ``None`` if there is none."""
    if len(name) == 6 and name[0] in "+-" and name[3] == ":" and (name[1:3] + name[4:]).isdigit():
        east = timedelta(hours=int(name[1:3]), minutes=int(name[4:]))
        return timezone(east if name[0] == "+" else -east) if east < timedelta(hours=24) else None
    try:
        return zone_of(name)
    except InvalidRequest:
        return None


def wall_clock(ts: Column, tz: Column) -> Column:
    """What a clock on the wall showed at ``ts`` in the zone ``tz``; null where there is no such zone."""
    # In Python, since Spark's own functions stop the whole run at the first zone that the JVM does not know. A UDF is built
    # where it is used and not on import: it belongs to Spark Connect or to a JVM, and before a session starts nothing says which.
    return pandas_udf(_wall_clock, TimestampNTZType())(ts, tz)  # type: ignore[call-overload, no-any-return, unused-ignore]


def _wall_clock(ts: pd.Series, tz: pd.Series) -> pd.Series:
    shown = pd.Series(pd.NaT, index=ts.index, dtype="datetime64[ns]")
    utc = ts.astype("datetime64[ns]").dt.tz_localize("UTC")
    for name, here in utc.groupby(tz):
        zone = zone_or_none(str(name))
        if zone is not None:
            shown.loc[here.index] = here.dt.tz_convert(zone).dt.tz_localize(None)
    return shown


def held(frame: DataFrame, few: int = _FEW) -> tuple[DataFrame, int, Callable[[DataFrame], DataFrame]]:
    """
    The frame worked out once, how many rows it has, and how what follows from it should meet a large table: up to ``few`` rows are
    sent to where the large one is, so that that one need not be moved; of more Spark decides.
    """
    once = frame.localCheckpoint(eager=False)
    count = once.count()
    return once, count, F.broadcast if count <= few else lambda each: each


def brought(frame: DataFrame, few: int = _FEW) -> tuple[DataFrame, pa.Table | None]:
    """
    The frame worked out once, and its rows if they are few: those were brought here, and what follows from them alone is computed
    by a session for little. For narrow rows. Where it meets a large table, that one comes first: its session computes both.
    """
    once, count, _ = held(frame)
    if count > few:
        return once, None
    rows = once.toArrow()
    return session_for_little(frame.sparkSession).createDataFrame(rows, frame.schema), rows


def summaries(topic: str, kind: str, rows: DataFrame, context: JobContext, *, order: Iterable[str]) -> Iterator[Event]:
    """
    One event a row, in the order of some columns, oldest news first: its columns are the payload, but for ``_at``, and
    ``space_id`` is the space.

    The id follows from the payload: what was published before is known by it.
    """
    for row in rows.orderBy(*order).toLocalIterator():
        payload: dict[str, Any] = row.asDict(recursive=True)
        payload.pop("_at", None)
        space_id = str(payload["space_id"])
        event_id = content_id("ev", payload, topic, kind, space_id)
        meta = EventMeta(topic=topic, type=kind, space_id=space_id, event_id=event_id, ts=context.as_of)
        yield Event(meta, payload)
