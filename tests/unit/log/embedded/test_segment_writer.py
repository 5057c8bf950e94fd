"""Seals, checkpoint and segment_writer: what they vouch for is on disk, and doing it twice comes to the same."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from pathlib import Path
from typing import Final

import pytest

from tidings.log.embedded.checkpoint import (
    CHAIN_START,
    append_seal_line,
    chained,
    encode_segment_drop,
    save_checkpoint,
)
from tidings.log.embedded.index import MemoryIndex
from tidings.log.embedded.inspect import read_checkpoint, read_seals
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.segment_writer import SegmentWriter
from tidings.log.embedded.state import SegmentWrite, Stream
from tidings.log.errors import CorruptLog
from tidings.log.segment import Head, encode_line, head_of
from tidings.testing import SimulatedDisk, VirtualClock

LAYOUT: Final = Layout(Path("/ws"))
KEY: Final = StreamKey("alpha")


def line(n: int) -> bytes:
    """The line of offset n and seq n + 1."""
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":{"written_at":"2026-01-01T00:00:00.000000Z"},"payload":{}}' % (n, n + 1)
    )


class Bench:
    """A segment_writer, a stream of short segments, and a disk to try them on."""

    def __init__(self, key: StreamKey = KEY) -> None:
        self.disk = SimulatedDisk()
        LAYOUT.create(self.disk, VirtualClock(), "flat")
        self.stream = Stream(key, lines_max=2, bytes_max=10**6)
        self.segment_writer = SegmentWriter(self.disk, LAYOUT, MemoryIndex())
        self.count = 0

    def chunks(self, count: int) -> list[SegmentWrite]:
        """RecordLocation that many more lines."""
        lines = [line(n) for n in range(self.count, self.count + count)]
        self.count += count
        first, last = head_of(lines[0]), head_of(lines[-1])
        assert isinstance(first, Head)
        assert isinstance(last, Head)
        return self.stream.place(lines, sum(map(len, lines)), first, last)

    def content(self, number: int, disk: SimulatedDisk | None = None) -> bytes:
        """What a segment's file holds."""
        return (disk or self.disk).read_all(LAYOUT.segment(self.stream.key, number))


@pytest.mark.req("F26", "F27", "F28", "F38")
def test_segments_hold_the_lines_as_committed() -> None:
    """Segments lie in wal/ under topic and number, and hold the committed lines byte for byte."""
    bench = Bench()
    settled = bench.segment_writer.write(bench.chunks(5))
    assert [(each.segment.number, each.flushed_bytes) for each in settled] == [
        (number, len(bench.content(number))) for number in (1, 2, 3)
    ]
    assert bench.disk.names(LAYOUT.wal) == [f"alpha.{number:08d}.jsonl" for number in (1, 2, 3)]
    assert b"".join(map(bench.content, (1, 2, 3))) == b"".join(map(line, range(5)))


@pytest.mark.parametrize("key", [KEY, StreamKey("alpha", "person:ana")], ids=["flat", "space"])
def test_what_a_seal_vouches_for_is_on_disk(key: StreamKey) -> None:
    """A sealed segment, its name and its seal survive the loss of everything unsynced, and the digests are right."""
    bench = Bench(key)
    bench.segment_writer.write(bench.chunks(5))
    cut = bench.disk.after_crash("lose_all")
    found = read_seals(cut, LAYOUT, key).checked()
    chain = CHAIN_START
    for number, seal in enumerate(found.seals.values(), 1):
        content = bench.content(number, cut)
        chain = chained(chain, hashlib.sha256(content).hexdigest())
        assert (seal.segment, seal.bytes, seal.lines, seal.chain) == (number, len(content), 2, chain)
    assert len(found.seals) == 2
    assert not found.dropped


def test_what_a_checkpoint_vouches_for_is_on_disk() -> None:
    """All bytes that a checkpoint counts survive the loss of everything unsynced."""
    bench = Bench()
    bench.segment_writer.write(bench.chunks(3))
    bench.segment_writer.checkpoint(3)
    bench.segment_writer.write(bench.chunks(1))
    cut = bench.disk.after_crash("lose_all")
    checkpoint = read_checkpoint(cut, LAYOUT)
    assert checkpoint.seq == 3
    assert checkpoint.streams["alpha"].segment == 2
    assert bench.content(2, cut)[: checkpoint.streams["alpha"].bytes] == line(2)


@pytest.mark.req("F70")
@pytest.mark.parametrize("op", ["open", "write", "sync_folder", "make_folder"])
def test_writing_again_after_no_room_comes_to_the_same(op: str) -> None:
    """Whichever call finds no room, giving the same chunks again leaves the same files, and reports all of it."""
    for skipped in range(12):
        bench, clean = Bench(), Bench()
        clean.segment_writer.write(clean.chunks(7))
        chunks = bench.chunks(7)
        calls = [call for call in clean.disk.trace if call.op == op]
        if skipped >= len(calls):
            break
        bench.disk.fail_next(op, errno.ENOSPC, path_contains=calls[skipped].path.name)  # type: ignore[arg-type]
        reported = []
        for _ in range(2):
            with contextlib.suppress(OSError):
                reported = bench.segment_writer.write(chunks)
                break
        assert {path: data for path, data in bench.disk.tree().items() if path.name != "meta.json"} == {
            path: data for path, data in clean.disk.tree().items() if path.name != "meta.json"
        }
        assert [each.segment.number for each in reported] == [1, 2, 3, 4]
        cut = bench.disk.after_crash("lose_all")
        assert cut.read_all(LAYOUT.seal_file(KEY)) == clean.disk.read_all(LAYOUT.seal_file(KEY))
        assert list(read_seals(cut, LAYOUT, KEY).checked().seals) == [1, 2, 3]


@pytest.mark.parametrize("part", ["/wal/", "/seals/"])
def test_a_sync_without_room_is_no_full_disk(part: str) -> None:
    """A failed sync never says that the disk is full: that would invite to try it again."""
    bench = Bench()
    bench.disk.fail_next("sync", errno.ENOSPC, path_contains=part)
    with pytest.raises(OSError, match="sync") as caught:
        bench.segment_writer.write(bench.chunks(5))
    assert caught.value.errno == errno.EIO


def test_an_appended_seal_line_is_there_once() -> None:
    """Appending the same line again, after a failure that hid its success, changes nothing."""
    bench = Bench()
    bench.segment_writer.write(bench.chunks(5))
    path = LAYOUT.seal_file(KEY)
    append_seal_line(bench.disk, LAYOUT, KEY, encode_segment_drop(1))
    before = bench.disk.read_all(path)
    append_seal_line(bench.disk, LAYOUT, KEY, encode_segment_drop(1))
    assert bench.disk.read_all(path) == before
    assert read_seals(bench.disk, LAYOUT, KEY).dropped == {1}


def test_a_torn_seal_line_is_passed_over_and_written_over() -> None:
    """A last line that was torn anywhere counts as not there, and the next one takes its place."""
    bench = Bench()
    bench.segment_writer.write(bench.chunks(5))
    path = LAYOUT.seal_file(KEY)
    data = bench.disk.read_all(path)
    second = data.index(b"\n") + 1
    for end in range(second, len(data)):
        bench.disk.write_all(path, data[:end])
        assert list(read_seals(bench.disk, LAYOUT, KEY).checked().seals) == [1]
    append_seal_line(bench.disk, LAYOUT, KEY, data[second:])
    assert bench.disk.read_all(path) == data


def test_a_chain_of_seals_breaks_where_it_was_altered() -> None:
    """Removing, swapping or editing seals is noticed, even with checksums made anew."""
    bench = Bench()
    bench.segment_writer.write(bench.chunks(7))
    path = LAYOUT.seal_file(KEY)
    one, two, three = bench.disk.read_all(path).splitlines(keepends=True)
    edited = encode_line(two[18:-1].replace(b'"sha256":"', b'"sha256":"0', 1))
    for altered in (two + three, one + three, two + one + three, one + edited + three):
        bench.disk.write_all(path, altered)
        with pytest.raises(CorruptLog) as caught:
            read_seals(bench.disk, LAYOUT, KEY).checked()
        assert caught.value.path == str(path)
    bench.disk.write_all(path, one + two[:-9] + b"\n" + three)
    with pytest.raises(CorruptLog) as caught:
        read_seals(bench.disk, LAYOUT, KEY).checked()
    assert caught.value.byte_offset == len(one)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"crc":"00000000","seq":1,"streams":{}}\n', b"\xff\xff\n"])
def test_a_damaged_checkpoint_counts_as_none(damage: bytes) -> None:
    """A checkpoint that is not whole is ignored: it is a short cut, not the truth."""
    bench = Bench()
    save_checkpoint(bench.disk, LAYOUT, 5, {KEY: (1, 10)})
    assert read_checkpoint(bench.disk, LAYOUT).checkpoint is not None
    bench.disk.write_all(LAYOUT.checkpoint, damage)
    assert read_checkpoint(bench.disk, LAYOUT).checkpoint is None


def test_thousands_of_topics_need_few_open_files() -> None:
    """Streams beyond the limit of open files are closed synced, and a checkpoint still covers all of them."""
    bench = Bench()
    for n in range(300):
        bench.stream = Stream(StreamKey(f"topic{n}"), lines_max=9, bytes_max=10**6)
        bench.count = 0
        bench.segment_writer.write(bench.chunks(1))
    bench.segment_writer.checkpoint(300)
    cut = bench.disk.after_crash("lose_all")
    assert all(cut.read_all(LAYOUT.segment(StreamKey(f"topic{n}"), 1)) == line(0) for n in range(300))
