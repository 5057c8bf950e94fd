"""What every job may need: a setting of its own, and a table in the shape that it promised."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tidings.core.errors import SettingsError

from .job import JobContext, Output

__all__ = ["setting", "shaped"]

_T = TypeVar("_T")


def setting(context: JobContext, name: str, default: _T, *, above: float | None = None) -> _T:
    """
    A setting of the job, or its default; a whole number will do where the default is a fraction.

    Raises:
        SettingsError: It is of another type than the default, or not above ``above``.
    """
    given: Any = context.settings.get(name, default)
    if isinstance(default, float) and type(given) is int:
        given = float(given)
    if isinstance(default, tuple) and isinstance(given, list):
        given = tuple(given)
    kind: Any = type(default)
    if type(given) is not kind:
        raise SettingsError(name, f"expected {kind.__name__}, got {given!r}")
    if above is not None and not given > above:
        raise SettingsError(name, f"must be above {above:g}, got {given!r}")
    return cast("_T", given)


def shaped(frame: DataFrame, output: Output) -> DataFrame:
    """The columns that an output's schema names, in its order and of its types; others are left behind."""
    return frame.select(*(F.col(f"`{name}`").cast(kind).alias(name) for name, kind in _columns_of(output.schema)))


def _columns_of(schema: str) -> list[tuple[str, str]]:
    columns: list[tuple[str, str]] = []
    depth, start = 0, 0
    for place, letter in enumerate(f"{schema},"):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            name, kind = schema[start:place].split(maxsplit=1)
            columns.append((name, kind))
            start = place + 1
    return columns
