"""The journal: frames are found whole or not at all, whatever a crash or an earlier use left around them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

import pytest

from tidings.log.embedded.inspect import JournalReport
from tidings.log.embedded.journal import Journal, JournalBusy, encode_frame
from tidings.log.errors import StorageFull
from tidings.log.segment import encode_line
from tidings.testing import SimulatedDisk

FOLDER: Final = Path("/journal")
PATH: Final = FOLDER / "00000000.jsonl"


def line(seq: int, payload: str = "{}") -> bytes:
    """A record's line."""
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":{"written_at":"2026-01-01T00:00:00.000000Z","topic":"a","space_id":"s","event_id":"e"},"payload":%b}'
        % (seq - 1, seq, payload.encode())
    )


def frame(first: int, last: int, durable: int | None = None, payload: str = "{}") -> bytes:
    """A commit of the seqs from first to last."""
    lines = [line(seq, payload) for seq in range(first, last + 1)]
    return encode_frame(lines, first=first, last=last, durable=first - 1 if durable is None else durable)


def read(data: bytes) -> JournalReport:
    """What is found in a journal file."""
    return JournalReport([(PATH, data)])


def spans(data: bytes) -> list[tuple[int, int]]:
    """The seqs of the frames found."""
    return [(found.first, found.last) for found in read(data).frames if found.is_whole]


def journal(disk: SimulatedDisk, *, file_bytes: int = 1000, count_max: int = 3, is_synced: bool = True) -> Journal:
    """A journal in an empty folder."""
    disk.make_folder(FOLDER)
    made = Journal(disk, FOLDER, file_bytes=file_bytes, count_max=count_max, is_synced=is_synced)
    made.prepare_spare()
    return made


def commit(log: Journal, first: int, last: int) -> None:
    """Commit lines of some length."""
    log.commit([line(seq, '{"pad":"%s"}' % ("x" * 100)) for seq in range(first, last + 1)], first, last)


def test_frames_are_found_in_order() -> None:
    """Frames that follow one another are found, with their lines' places in the file."""
    data = frame(1, 2) + frame(3, 3) + bytes(100)
    found = read(data)

    assert spans(data) == [(1, 2), (3, 3)]
    assert found.durable == 2
    assert not found.problems
    for each in (line for frame in found.frames for line in frame.lines):
        assert data[each.byte_offset : each.byte_offset + len(each.data)] == each.data


@pytest.mark.req("F71")
def test_a_frame_torn_at_any_byte_is_not_found() -> None:
    """Whichever byte the last frame ends at, it counts only if it is whole; those before it always do."""
    before, torn = frame(1, 2), frame(3, 5)
    for end in range(len(torn)):
        data = (before + torn[:end]).ljust(2000, b"\0")
        found = read(data)
        assert spans(data) == [(1, 2)]
        assert (not found.problems) == (end == 0)
        if found.problems:
            assert len(before) <= found.problems[0].byte_offset <= len(before) + end


def test_a_frame_with_a_hole_is_not_found() -> None:
    """A frame of which one sector never arrived does not count, wherever the hole is."""
    whole = frame(1, 6, payload='{"pad":"%s"}' % ("x" * 200))
    for at in range(0, len(whole) - 1, 64):
        holed = whole[:at] + bytes(min(64, len(whole) - at)) + whole[at + 64 :]
        assert spans(holed + frame(7, 7)) == [(7, 7)]


def test_a_later_frame_tells_what_was_durable() -> None:
    """Past a damaged frame the search goes on: a later one proves that it was acknowledged."""
    damaged = bytearray(frame(1, 2) + frame(3, 4) + frame(5, 5))
    damaged[len(frame(1, 2)) + len(frame(3, 4)) - 5] ^= 1
    found = read(bytes(damaged))

    assert spans(bytes(damaged)) == [(1, 2), (5, 5)]
    assert found.durable == 4
    assert found.problems[0].path == PATH


def test_what_an_earlier_use_left_is_found_as_such() -> None:
    """Frames of an earlier use of the file stand behind the new ones, and their seqs tell them apart."""
    old = frame(1, 3) + frame(4, 6) + frame(7, 9)
    new = frame(20, 21)
    data = new + old[len(new) :]
    found = read(data)

    assert spans(data)[0] == (20, 21)
    assert set(spans(data)[1:]) <= {(4, 6), (7, 9)}
    assert (7, 9) in spans(data)
    assert found.durable == 19


def test_a_payload_that_looks_like_a_frame_is_no_frame() -> None:
    """A payload that is spelled like a frame's head is not taken for one, even if the frame around it is torn."""
    head = frame(900, 900).split(b"\n")[0].decode()
    data = frame(1, 2, payload=head)
    assert spans(data) == [(1, 2)]
    assert all(span[0] < 900 for end in range(len(data)) for span in spans(data[:end]))
    assert max(read(data[:end]).durable for end in range(len(data))) == 0


def test_lines_of_other_seqs_make_no_frame() -> None:
    """A frame whose lines are not exactly the seqs that its head names does not count."""
    lines = [line(1), line(3)]
    assert spans(encode_frame(lines, first=1, last=2, durable=0)) == []
    assert spans(encode_frame([line(1)], first=1, last=2, durable=0)) == []


@pytest.mark.req("F32")
def test_a_commit_is_on_disk_when_it_returns() -> None:
    """What commit has returned from survives the loss of everything unsynced, the file's name included."""
    disk = SimulatedDisk()
    log = journal(disk)
    disk.sync_folder(FOLDER.parent)
    commit(log, 1, 2)
    assert log.synced_seq == 2
    assert spans(disk.after_crash("lose_all").read_all(PATH)) == [(1, 2)]


def test_without_sync_a_commit_may_be_lost_until_synced() -> None:
    """A journal that does not sync each commit keeps it only once sync was called, and knows how far it is."""
    disk = SimulatedDisk()
    log = journal(disk, is_synced=False)
    disk.sync_folder(FOLDER.parent)
    commit(log, 1, 2)
    assert log.synced_seq == 0
    assert spans(disk.after_crash("lose_all").read_all(PATH)) == []
    log.sync()
    assert log.synced_seq == 2
    assert spans(disk.after_crash("lose_all").read_all(PATH)) == [(1, 2)]


def test_a_file_is_used_again_only_when_it_is_settled() -> None:
    """With all files full the journal is busy, until what is in one of them has reached the segments."""
    disk = SimulatedDisk()
    log = journal(disk, count_max=2)
    commit(log, 1, 3)
    commit(log, 4, 6)
    with pytest.raises(JournalBusy):
        commit(log, 7, 9)
    assert [spans(disk.read_all(FOLDER / name)) for name in disk.names(FOLDER)] == [[(1, 3)], [(4, 6)]]
    log.checkpointed_seq = 2
    with pytest.raises(JournalBusy):
        commit(log, 7, 9)
    log.checkpointed_seq = 3
    commit(log, 7, 9)
    assert spans(disk.read_all(PATH))[0] == (7, 9)
    assert len(disk.names(FOLDER)) == 2


def test_a_commit_larger_than_a_file_gets_a_file_of_its_size() -> None:
    """A batch that no file can hold gets one that can."""
    disk = SimulatedDisk()
    log = journal(disk, file_bytes=500)
    commit(log, 1, 20)
    assert spans(disk.read_all(FOLDER / "00000001.jsonl")) == [(1, 20)]


@pytest.mark.req("F72")
def test_a_commit_without_room_leaves_nothing_that_could_count() -> None:
    """A refused commit is not found later, however much of it was written; its seqs can be given out anew."""
    for seed in range(30):
        disk = SimulatedDisk(seed)
        log = journal(disk)
        commit(log, 1, 1)
        disk.fail_next("write", errno.ENOSPC)
        with pytest.raises(StorageFull):
            commit(log, 2, 4)
        assert spans(disk.read_all(PATH)) == [(1, 1)]
        commit(log, 2, 2)
        assert spans(disk.read_all(PATH)) == [(1, 1), (2, 2)]


@pytest.mark.req("F72")
def test_no_room_for_a_file_leaves_no_file() -> None:
    """A journal file that does not fit is taken away again, and the next try makes it."""
    disk = SimulatedDisk()
    log = journal(disk)
    commit(log, 1, 1)
    disk.capacity_bytes = disk.used_bytes + 300
    with pytest.raises(StorageFull):
        log.prepare_spare()
    assert disk.names(FOLDER) == ["00000000.jsonl"]
    disk.capacity_bytes = None
    log.prepare_spare()
    assert len(disk.names(FOLDER)) == 2


def test_removing_leaves_no_file() -> None:
    """After remove there is nothing to recover from."""
    disk = SimulatedDisk()
    log = journal(disk)
    commit(log, 1, 3)
    log.prepare_spare()
    log.remove()
    assert disk.names(FOLDER) == []
