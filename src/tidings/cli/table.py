"""
``tidings table``: the lake's tables, and questions to them. No Spark is started for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import NO_TABLES, as_typed, human_bytes
from .session import Session, command

if TYPE_CHECKING:
    from tidings.pipeline.lake import Lake


app = typer.Typer(
    help="The lake's tables: list them, look at one, ask in SQL.", no_args_is_help=True, rich_markup_mode=None
)

_SHOWN_ROWS_MAX = 100_000


@command(app, "list", has_lake=True, examples="tidings table list\ntidings table list --json | jq .[].name")
def list_tables(session: Session) -> None:
    """List the tables there are."""
    from tidings.pipeline.catalogue import describe

    lake = _lake(session)
    abouts = _abouts()
    tables = [describe(lake, name, abouts) for name in lake.tables()]
    if session.out.is_json:
        session.out.json(
            [
                {"name": each.name, "rows": each.rows, "files": each.files, "bytes": each.bytes, "about": each.about}
                for each in tables
            ]
        )
        return
    if not tables:
        session.out.text(as_typed(NO_TABLES))
        return
    session.out.table(
        "Tables",
        ("table", "rows>", "files>", "size>", "a row is"),
        ((each.name, each.rows, each.files, human_bytes(each.bytes), each.about) for each in tables),
    )


@command(
    app,
    "show",
    has_lake=True,
    examples="tidings table show bronze.events\ntidings table show gold.topic_minutes --rows 20",
)
def show(
    session: Session,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Such as bronze.events.")],
    *,
    rows: Annotated[int, typer.Option("--rows", min=0, max=1000, metavar="N", help="So many of its rows.")] = 5,
) -> None:
    """Show a table's columns, its size, how far it reaches, and some rows."""
    from tidings.pipeline.catalogue import describe
    from tidings.pipeline.catalogue import query as ask

    lake = _lake(session)
    info = describe(lake, table, _abouts())
    layer, _, name = table.partition(".")
    answer = ask(lake, f'select * from {layer}."{name}" limit {rows}')
    if session.out.is_json:
        session.out.json(
            {
                "name": info.name,
                "about": info.about,
                "columns": [{"name": column, "type": kind} for column, kind in info.columns],
                "rows": info.rows,
                "files": info.files,
                "bytes": info.bytes,
                "version": info.version,
                "seq": info.seq,
                "sample": [_as_json(answer.columns, row) for row in answer.rows],
            }
        )
        return
    session.out.facts(
        info.name,
        (
            ("a row is", info.about),
            ("rows", info.rows),
            ("files", f"{info.files} ({human_bytes(info.bytes)})"),
            ("up to seq", "-" if info.seq is None else info.seq),
            ("version", info.version),
        ),
    )
    session.out.table("Columns", ("column", "type"), info.columns)
    if answer.rows:
        session.out.table("Rows", answer.columns, answer.rows)


@command(
    app,
    "query",
    has_lake=True,
    examples="""
            tidings table query "select topic, count(*) from bronze.events group by all order by 2 desc"
            tidings table query "select * from gold.topic_minutes order by minute desc limit 10" --json
        """,
)
def query(
    session: Session,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT.")],
    *,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=_SHOWN_ROWS_MAX, metavar="N", help="At most so many rows.")
    ] = 1000,
) -> None:
    """Ask about the tables in SQL (DuckDB's dialect), by names such as bronze.events. Nothing can be changed by it."""
    from tidings.pipeline.catalogue import query as ask

    answer = ask(_lake(session), sql, rows_max=limit)
    if session.out.is_json:
        for row in answer.rows:
            session.out.json(_as_json(answer.columns, row))
    else:
        session.out.table("Answer", answer.columns, answer.rows)
    if answer.is_cut:
        session.out.note(f"there is more; --limit shows up to {_SHOWN_ROWS_MAX} rows")


def _lake(session: Session) -> Lake:
    from tidings.pipeline.lake import Lake

    return Lake(session.lake, session.clock)


def _abouts() -> dict[str, str]:
    from tidings.pipeline.jobs.registry import all_jobs

    return {output.table: output.about for job in all_jobs() for output in job.writes}


def _as_json(columns: tuple[str, ...], row: tuple[Any, ...]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in zip(columns, row, strict=True)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
