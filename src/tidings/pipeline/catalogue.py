"""
The tables as a person sees them: what each is, how large, how far, and questions to them in SQL.

No Spark here: a question is answered by DuckDB over the files that a table's log names, read-only, in this process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb

from .bronze import check_reach
from .errors import QueryRefused, UnknownTable
from .lake import Lake
from .schemas import CORE_TABLES
from .storage_errors import translate_read_errors

_SCAN_FAILED: Final = "reading the stream registered as"
"""What DuckDB says if not the question, but a file that it leads to, is at fault."""
_LAYERS: Final = ("bronze", "silver", "gold")
_TABLE: Final = r"\b({layers})\s*\.\s*\"?([a-z_0-9]+)\"?"


@dataclass(frozen=True, slots=True)
class TableInfo:
    """One table."""

    name: str
    about: str
    columns: tuple[tuple[str, str], ...]
    rows: int
    files: int
    bytes: int
    version: int
    seq: int | None
    """The last seq that it takes into account."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows that answer a question."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    is_cut: bool
    """Whether there were more."""


def describe(lake: Lake, table: str, abouts: dict[str, str] | None = None) -> TableInfo:
    """
    What there is to know about a table.

    Raises:
        UnknownTable: There is none of that name.
    """
    about = {spec.name: spec.about for spec in CORE_TABLES} | (abouts or {})
    target = lake.open(table)
    files = lake.files(table)
    seq = lake.note(table).get("seq")
    return TableInfo(
        table,
        about.get(table, ""),
        tuple((field.name, str(field.type)) for field in lake.schema(table)),
        sum(file.rows for file in files),
        len(files),
        sum(file.size for file in files),
        int(target.version()),
        None if seq is None else int(seq),
    )


def query(lake: Lake, sql: str, *, rows_max: int = 1000, memory_mb: int = 1024) -> Answer:
    """
    Answer a question about the tables, asked in SQL.

    Raises:
        UnknownTable: It names a table that is not there.
        QueryRefused: It is not one SELECT, or DuckDB does not understand it.
        LakeDamaged, LakeUnreachable: A file of a table cannot be read, or bronze has lost commits.
    """
    check_reach(lake)
    with duckdb.connect(config={"memory_limit": f"{memory_mb}MB"}) as duck:
        duck.execute("set timezone = 'UTC'")
        try:
            statements = duck.extract_statements(sql)
        except duckdb.Error as error:
            raise QueryRefused(str(lake.storage), _first(error)) from error
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryRefused(str(lake.storage), "only one SELECT is answered")
        layers = {*_LAYERS, *lake.tables_folder.folders()}
        tables = re.compile(_TABLE.format(layers="|".join(map(re.escape, sorted(layers)))), re.IGNORECASE)
        for layer, name in sorted({(found[1].lower(), found[2]) for found in tables.finditer(sql)}):
            _show(duck, lake, layer, name)
        # What the question itself names is all it may reach: no other file, and no setting.
        duck.execute("set enable_external_access = false")
        duck.execute("set lock_configuration = true")
        try:
            found = duck.execute(sql)
            names = tuple(column[0] for column in found.description or ())
            rows: Sequence[tuple[Any, ...]] = found.fetchmany(rows_max + 1)
        except duckdb.Error as error:
            if _SCAN_FAILED in str(error):
                with translate_read_errors(lake.tables_folder):
                    raise
            raise QueryRefused(str(lake.storage), _first(error)) from error
    return Answer(names, tuple(rows[:rows_max]), len(rows) > rows_max)


def _show(duck: duckdb.DuckDBPyConnection, lake: Lake, layer: str, name: str) -> None:
    table = f"{layer}.{name}"
    if not lake.exists(table):
        raise UnknownTable(table, "there is no such table")
    duck.execute(f"create schema if not exists {layer}")
    duck.register(f"{layer}_{name}", lake.dataset(table))
    duck.execute(f'create view {layer}."{name}" as select * from "{layer}_{name}"')


def _first(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
