"""
Recovery at its worst: every journal file full, and nothing of it in the segments.

The journal is written with the engine's own writer, as a process leaves it that dies before its segment_writer has run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, format_utc
from tidings.log import LogSettings
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.journal import Journal, JournalBusy
from tidings.log.embedded.layout import Layout

from .filling import line_of, time_ns_of
from .measuring import Taken, Window, one_core, run_on
from .report import Row, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "measure_recovery", "write_journal"]

_FRAME_LINES = 256


class Journalled(msgspec.Struct, frozen=True):
    """A workspace whose log is all journal."""

    workspace: str
    file_bytes: int
    file_count: int


class Written(msgspec.Struct, frozen=True):
    """How much the journal holds."""

    records: int
    bytes: int


class Recovered(msgspec.Struct, frozen=True):
    """What recovering it took."""

    taken: Taken
    records: int


def _settings(case: Journalled) -> LogSettings:
    return LogSettings(journal_bytes=case.file_bytes, journal_count_max=case.file_count)


def write_journal(case: Journalled) -> Written:
    """Commit until the journal has no room left."""
    layout, disk, settings = Layout(Path(case.workspace)), OsDisk(), _settings(case)
    disk.make_folder(layout.root)
    layout.create(disk, SYSTEM_CLOCK, settings.layout)
    journal = Journal(
        disk, layout.journal, file_bytes=settings.journal_bytes, count_max=settings.journal_count_max, is_synced=True
    )
    seq = size = 0
    try:
        while True:
            seqs = range(seq + 1, seq + 1 + _FRAME_LINES)
            written_at = format_utc(time_ns_of(seq))
            lines = [line_of(each, written_at, has_partitions=False) for each in seqs]
            journal.commit(lines, seqs[0], seqs[-1])
            seq, size = seqs[-1], size + sum(map(len, lines))
    except JournalBusy:
        return Written(seq, size)
    finally:
        journal.close()


class Recovery(msgspec.Struct, frozen=True):
    """The log to be recovered."""

    journalled: Journalled
    is_one_core: bool


def measure_recovery(case: Recovery) -> Recovered:
    """Open the log, which brings the journal into segments and index."""

    async def main() -> Recovered:
        window = Window()
        log = await open_log(case.journalled.workspace, _settings(case.journalled))
        taken = window.take()
        records = log.position.seq
        await log.close()
        return Recovered(taken, records)

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Fill a journal, recover it; the median and best of some rounds."""
    case = Journalled(str(Path(folder) / "recovering"), scale.journal_bytes, scale.journal_count)
    found: list[Recovered] = []
    for _ in range(min(2, scale.rounds)):
        try:
            written = run(write_journal, case)
            found.append(run(measure_recovery, Recovery(case, is_one_core)))
        finally:
            shutil.rmtree(case.workspace, ignore_errors=True)
        assert found[-1].records == written.records, "all that was journalled is there"
    best = min(found, key=lambda each: each.taken.wall_s)
    yield noted(
        "recovery",
        f"{case.file_count} full journal files, {written.bytes >> 20} MiB, {best.records:,} records",
        "s",
        best.taken.wall_s,
        **{
            "CPU s": best.taken.cpu_s,
            "CPU us/record": best.taken.cpu_s / best.records * 1e6,
            "slowest": max(each.taken.wall_s for each in found),
            "others' cores": best.taken.others_cores or 0.0,
        },
    )
