"""
Damaged files: the log opens with exactly the right records, or says which file and byte is wrong. Nothing in between.

Derived and redundant things may be ignored and made again; acknowledged records may not be missing, altered or
out of order without an error. A log that is refused is left as it was.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.conformance.support import read_all
from tests.crash.support import (
    BUS,
    ROOMY,
    WORKSPACE,
    Book,
    Workload,
    check,
    open_simulated,
    run_until,
    settled,
)
from tidings.log import Log, LogSettings, Query
from tidings.log.embedded import open_follower, open_log
from tidings.log.embedded.inspect import Frame, JournalReport
from tidings.log.embedded.layout import WorkspaceMeta, encode_meta
from tidings.log.errors import (
    CorruptLog,
    UnsupportedFormat,
    WorkspaceBusy,
    WorkspaceError,
    WorkspaceMissing,
    WorkspaceUnusable,
)
from tidings.log.segment import encode_line
from tidings.testing import SimulatedDisk

_STATES: Final = ("closed", "stopped", "stopped, segments lost")


async def _disk_in_state(state: str) -> tuple[SimulatedDisk, Book]:
    """A disk on which everything acknowledged can be read, in one of the ways it can be there."""
    if state == "closed":
        workload = Workload(SimulatedDisk(), ROOMY)
        log = await workload._open()
        await _write(log, workload.book)
        await log.close()
        return workload.disk, workload.book
    workload = await run_until(None, settings=ROOMY)
    return workload.disk.after_crash("keep_all" if state == "stopped" else "lose_all"), workload.book


async def _write(log: Log, book: Book) -> None:
    for n in range(3):
        await book.append_many(log, [book.event("alpha", event_id=f"a{n}-{m}", partitions=("p",)) for m in range(3)])
        await book.append_many(log, [book.event("beta") for _ in range(3)])
    await settled(log)
    await book.drop_sealed(log, "beta", keep_ids=True)
    await book.append_many(log, [book.event("alpha"), book.event("beta")])


def _used(data: bytes) -> int:
    return len(data.rstrip(b"\0"))


async def _open_or_refuse(disk: SimulatedDisk, book: Book, path: Path) -> WorkspaceError | None:
    """Open and read everything: all is right (``None``), or the error says where it is wrong."""
    before = disk.tree()
    try:
        log = await open_simulated(disk, settings=ROOMY)
    except WorkspaceError as error:
        # Sealed segments and kept ids are read when the index is built; by then the others are recovered.
        is_read_late = path.parent.name in ("wal", "ids")
        after = disk.tree()
        assert after == before or (is_read_late and after.get(path) == before.get(path)), "it was not left as it was"
        _check_names_the_place(error, path)
        return error
    try:
        await check(log, book)
    except CorruptLog as error:
        _check_names_the_place(error, path)
        return error
    finally:
        await log.close()
    return None


def _check_names_the_place(error: WorkspaceError, path: Path) -> None:
    assert str(BUS) in str(error)
    assert error.hint or type(error) is WorkspaceError
    if isinstance(error, CorruptLog):
        assert error.byte_offset >= 0
        assert re.search(r"at byte \d+", str(error))


def _frames(path: Path, data: bytes) -> list[Frame]:
    return [frame for frame in JournalReport([(path, data)]).frames if frame.is_whole]


def _last_frame(disk: SimulatedDisk) -> tuple[Path, int, range]:
    """The newest frame: its file, where it begins, and its seqs."""
    frames = [
        frame for path, data in disk.tree().items() if path.parent.name == "journal" for frame in _frames(path, data)
    ]
    last = max(frames)
    begin = disk.read_all(last.path).rfind(b"\n", 0, last.lines[0].byte_offset - 1) + 1
    return last.path, begin, range(last.first, last.last + 1)


def _without(book: Book, seqs: range) -> Book:
    """The book of somebody who was never told of these."""
    other = Book()
    other.offered, other.perhaps_dropped, other.dropped = book.offered, book.perhaps_dropped, book.dropped
    other.acknowledged = {number: place for number, place in book.acknowledged.items() if place.seq not in seqs}
    return other


def _places(disk: SimulatedDisk, every: int) -> Iterator[tuple[Path, int]]:
    for path, data in disk.tree().items():
        if path.name != "lock":
            for at in range(0, _used(data), every):
                yield path, at


async def _flip_everywhere(state: str, every: int) -> None:
    disk, book = await _disk_in_state(state)
    rng = random.Random(state)
    torn_path, torn_from, torn_seqs = _last_frame(disk) if state != "closed" else (Path(), 0, range(0))
    refused = 0
    for path, at in _places(disk, every):
        damaged = disk.clone()
        damaged.flip(path, at, 1 << rng.randrange(8))
        # Damage in the newest frame looks like a commit that the crash tore, if nothing else proves it was synced.
        is_last = path == torn_path and at >= torn_from
        try:
            refused += await _open_or_refuse(damaged, _without(book, torn_seqs) if is_last else book, path) is not None
        except Exception as error:
            error.add_note(f"byte {at} of {path} was altered")
            raise
    assert refused


@pytest.mark.crash
@pytest.mark.req("F71")
@pytest.mark.parametrize("state", _STATES)
async def test_no_altered_byte_alters_what_is_read(state: str) -> None:
    """Whichever byte is altered, the log has exactly what was acknowledged or says where it has not."""
    await _flip_everywhere(state, every=89)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("state", _STATES)
async def test_no_altered_byte_anywhere_alters_what_is_read(state: str) -> None:
    """The same, for every single byte."""
    await _flip_everywhere(state, every=1)


@pytest.mark.crash
@pytest.mark.parametrize("every", [211, pytest.param(97, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("state", _STATES)
async def test_no_shortened_file_goes_unnoticed(state: str, every: int) -> None:
    """Whichever file is cut, wherever, the log has exactly what was acknowledged or says where it has not."""
    disk, book = await _disk_in_state(state)
    _, _, torn_seqs = _last_frame(disk) if state != "closed" else (Path(), 0, range(0))
    for path, at in _places(disk, every):
        damaged = disk.clone()
        damaged.write_all(path, damaged.read_all(path)[:at])
        # The newest commits may be cut off the journal whole; what is not in it was never acknowledged, for all it knows.
        told = _without(book, _seqs_from(disk, path, at) if path.parent.name == "journal" else range(0))
        try:
            await _open_or_refuse(damaged, told, path)
        except Exception as error:
            error.add_note(f"{path} was cut at byte {at}; the last frame holds {torn_seqs}")
            raise


def _seqs_from(disk: SimulatedDisk, path: Path, at: int) -> range:
    lines = [line for frame in _frames(path, disk.read_all(path)) for line in frame.lines]
    cut = [line.info.seq for line in lines if line.byte_offset + len(line.data) > at]
    # A frame counts as a whole.
    firsts = [frame.first for frame in _frames(path, disk.read_all(path)) if cut and frame.last >= min(cut)]
    return range(min(firsts, default=0), max(cut, default=-1) + 1)


@pytest.mark.crash
@pytest.mark.parametrize("state", _STATES)
async def test_no_missing_file_goes_unnoticed(state: str) -> None:
    """Whichever file is gone, the log has exactly what was acknowledged or names what is missing."""
    disk, book = await _disk_in_state(state)
    for path in disk.tree():
        if path.parent.name == "journal" and state != "closed":
            continue  # the only copy of the newest commit, and nothing left that knows of it
        damaged = disk.clone()
        damaged.remove(path)
        error = await _open_or_refuse(damaged, book, path)
        if path.parent.name == "wal" and state == "closed":
            assert isinstance(error, CorruptLog)
            assert error.path == str(path)


async def _sealed() -> tuple[SimulatedDisk, Book]:
    """Sealed segments of one length each, closed."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    await book.append_many(log, [book.event("alpha") for _ in range(9)])
    await book.append_many(log, [book.event("beta") for _ in range(1)])
    await settled(log)
    await log.close()
    return disk, book


async def test_swapped_segments_are_noticed() -> None:
    """Two sealed segments of one size that changed places are not read as each other."""
    disk, book = await _sealed()
    one, two = (BUS / "wal" / f"alpha.{number:08d}.jsonl" for number in (1, 2))
    first, second = disk.read_all(one), disk.read_all(two)
    assert len(first) == len(second)
    disk.write_all(one, second)
    disk.write_all(two, first)

    error = await _open_or_refuse(disk, book, one)
    assert isinstance(error, CorruptLog)
    assert error.path in (str(one), str(two))


@pytest.mark.parametrize("damage", ["an altered line", "swapped lines"])
async def test_damage_in_a_segment_sealed_since_the_checkpoint_is_named(damage: str) -> None:
    """What was sealed after the last checkpoint is read when the log is opened, and the error names its place."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    await book.append_many(log, [book.event("alpha") for _ in range(9)])
    await settled(log)
    stopped = disk.after_crash("keep_all")
    await log.close()
    path = BUS / "wal" / "alpha.00000001.jsonl"
    one, two, *others = stopped.read_all(path).splitlines(keepends=True)
    altered = [one, two[:-5] + b"?" + two[-4:]] if damage == "an altered line" else [two, one]
    stopped.write_all(path, b"".join([*altered, *others]))

    with pytest.raises(CorruptLog) as caught:
        await open_simulated(stopped, settings=ROOMY)
    assert caught.value.path == str(path)
    assert caught.value.byte_offset == (len(one) if damage == "an altered line" else 0)


async def test_a_truncated_sealed_segment_is_named() -> None:
    """A sealed segment that lost its last line is refused with its path, and how long it was."""
    disk, book = await _sealed()
    path = BUS / "wal" / "alpha.00000001.jsonl"
    data = disk.read_all(path)
    disk.write_all(path, data[: data.rindex(b"\n", 0, -1) + 1])

    error = await _open_or_refuse(disk, book, path)
    assert isinstance(error, CorruptLog)
    assert error.path == str(path)
    assert str(len(data)) in str(error)
    assert error.seq == 1


async def test_an_edited_line_with_a_fresh_checksum_must_still_fit() -> None:
    """A line of the open segment that was given another place is refused although its checksum is right."""
    disk, book = await _sealed()
    path = BUS / "wal" / "alpha.00000003.jsonl"
    line = disk.read_all(path)
    disk.write_all(path, encode_line(line[18:-1].replace(b'"offset":8', b'"offset":7')))

    error = await _open_or_refuse(disk, book, path)
    assert isinstance(error, CorruptLog)
    assert (error.path, error.byte_offset) == (str(path), 0)


async def test_a_torn_last_seal_is_made_again() -> None:
    """A seal that a crash tore is made again from the segment, to the same bytes."""
    disk, book = await _sealed()
    path = BUS / "seals" / "alpha.jsonl"
    seals = disk.read_all(path)
    for at in range(seals.index(b"\n") + 1, len(seals), 37):
        torn = disk.clone()
        torn.write_all(path, seals[:at])
        assert await _open_or_refuse(torn, book, path) is None
        assert torn.read_all(path) == seals


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\0" * 80, b"[]"])
async def test_a_damaged_meta_file_is_refused(content: bytes) -> None:
    """A workspace whose description is empty or no description is refused by name, not made anew."""
    disk, _ = await _sealed()
    disk.write_all(BUS / "meta.json", content)
    with pytest.raises(WorkspaceError) as caught:
        await open_simulated(disk, settings=ROOMY)
    assert caught.value.path == str(BUS / "meta.json")


async def test_a_newer_format_is_left_alone() -> None:
    """A workspace of a later version is refused, told apart from damage, and not touched."""
    disk, _ = await _sealed()
    newer = WorkspaceMeta(format=99, epoch="e", created_at="2030-01-01T00:00:00.000000Z")
    disk.write_all(BUS / "meta.json", encode_meta(newer))
    before = disk.tree()
    with pytest.raises(UnsupportedFormat, match="format 99"):
        await open_simulated(disk, settings=ROOMY)
    assert disk.tree() == before


@pytest.mark.req("F74")
async def test_unknown_keys_are_passed_over() -> None:
    """Keys that a later version of the same format adds, to lines and to the description, do not hinder this one."""
    disk, book = await _sealed()
    meta = msgspec.json.decode(disk.read_all(BUS / "meta.json"))
    del meta["crc"]
    disk.write_all(BUS / "meta.json", encode_line(msgspec.json.encode(meta | {"later": [1]})[1:]))
    path = BUS / "wal" / "beta.00000001.jsonl"
    body = disk.read_all(path)[18:-1]
    body = body.replace(b'"payload":', b'"later":{"a":1},"payload":').replace(b',"ts":', b',"unheard_of":null,"ts":')
    disk.write_all(path, encode_line(body))
    log = await open_simulated(disk, settings=ROOMY)
    await check(log, book)
    await log.close()


async def test_a_checkpoint_that_is_gone_is_made_again() -> None:
    """Without its checkpoint a whole log opens as before: it only reads more."""
    disk, book = await _sealed()
    disk.remove(BUS / "checkpoint.json")
    assert await _open_or_refuse(disk, book, BUS / "checkpoint.json") is None
    assert disk.exists(BUS / "checkpoint.json")


async def test_a_cursor_ahead_of_the_log_proves_a_loss() -> None:
    """A group that acknowledged more than the log holds shows that records are gone: the log is refused."""
    disk, book = await _sealed()
    path = BUS / "offsets" / "alpha__workers.json"
    disk.write_all(path, encode_line(b'"committed":8,"segment":3,"ts":"2026-01-01T00:00:00Z"}'))
    assert await _open_or_refuse(disk.clone(), book, path) is None
    disk.write_all(path, encode_line(b'"committed":9,"segment":3,"ts":"2026-01-01T00:00:00Z"}'))
    error = await _open_or_refuse(disk, book, path)
    assert isinstance(error, CorruptLog)
    assert error.path == str(path)


async def test_a_stranger_among_the_files_does_no_harm() -> None:
    """Files that are not the log's, and ones that a crash left half made, are passed over and kept."""
    disk, book = await _sealed()
    strangers = [BUS / "wal" / "README", BUS / "ids" / "alpha.00000001.jsonl.new", BUS / "journal" / "notes.txt"]
    for path in strangers:
        disk.write_all(path, b"hello")
    assert await _open_or_refuse(disk, book, strangers[0]) is None
    assert [disk.read_all(path) for path in strangers] == [b"hello"] * 3


async def test_a_workspace_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A workspace path that is a file is named, by writer and reader alike."""
    (tmp_path / "file").write_text("hello")
    with pytest.raises(WorkspaceUnusable) as unusable:
        await open_log(tmp_path / "file")
    assert str(tmp_path / "file") in str(unusable.value)
    with pytest.raises(WorkspaceMissing):
        await open_follower(tmp_path / "file")


async def test_a_reader_makes_no_workspace(tmp_path: Path) -> None:
    """Following a workspace that is not there is refused and leaves nothing behind."""
    with pytest.raises(WorkspaceMissing) as caught:
        await open_follower(tmp_path / "none")
    assert caught.value.hint
    assert not (tmp_path / "none").exists()


async def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second writer is refused and told who the first is; when that one closes, the way is free."""
    settings = LogSettings(journal_bytes=1 << 20)
    first = await open_log(tmp_path, settings)
    with pytest.raises(WorkspaceBusy) as caught:
        await open_log(tmp_path, settings)
    assert re.fullmatch(r"process \d+", caught.value.owner)
    assert caught.value.owner in str(caught.value)
    assert caught.value.retryable
    await first.close()
    second = await open_log(tmp_path, settings)
    assert await read_all(second, Query()) == []
    await second.close()


def test_the_workspace_here_is_not_made_beforehand() -> None:
    """The simulated workspace lies below folders that only opening makes, so that their names are put to the test."""
    disk = SimulatedDisk()
    assert not disk.exists(WORKSPACE.parent.parent)
    asyncio.run(_open_and_cut(disk))
    assert disk.after_crash("lose_all").exists(BUS / "meta.json")


async def _open_and_cut(disk: SimulatedDisk) -> None:
    await (await open_simulated(disk)).close()
