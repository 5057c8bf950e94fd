"""The reference of the tables that jobs write, made from the jobs' own declarations."""

from __future__ import annotations

from collections.abc import Iterator

from tidings.pipeline.jobs.job import Job, OutputTable
from tidings.pipeline.jobs.registry import all_jobs
from tidings.pipeline.schemas import columns_of

__all__ = ["job_tables_page"]


def job_tables_page() -> str:
    """Every table of every job, with its columns."""
    written = sorted(((table, job) for job in all_jobs() for table in job.writes), key=lambda each: each[0].table)
    lines = [
        "# Tables of the jobs",
        "",
        "This page is made by `python -m tools.reference`, and a test keeps it current.",
        "The tables that every log has are in [tables](tables.md); `tidings pipeline explain` has the jobs.",
        "",
        "| table | a row is |",
        "|---|---|",
        *(f"| [{table.table}](#{table.table.replace('.', '')}) | {table.about} |" for table, _ in written),
    ]
    for table, job in written:
        lines += ["", f"## {table.table}", "", *_section(table, job)]
    return "\n".join(lines) + "\n"


def _section(table: OutputTable, job: Job) -> Iterator[str]:
    yield table.about
    yield f"Written by `{job.name}` from {', '.join(f'`{each}`' for each in job.reads)}; {_way(job)}."
    yield from ("", "| column | type |", "|---|---|")
    yield from (f"| `{name}` | `{kind}` |" for name, kind in columns_of(table.schema))


def _way(job: Job) -> str:
    if job.partitioning is None:
        return "each run replaces all of it"
    column = job.partitioning.seq_column
    return f"rows of new events are added, by `{column}`" if column else "days whose input changed are replaced"
