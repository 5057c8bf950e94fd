"""The reader of segments: what is good, where it ends, and each problem with its place."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Final

import pytest

from tidings.log.embedded import inspect
from tidings.log.embedded.inspect import START, LineInfo, SegmentReport, read_segment
from tidings.log.embedded.layout import StreamKey
from tidings.log.segment import encode_line
from tidings.testing import SimulatedDisk

PATH: Final = Path("/wal/t.00000001.jsonl")


def line(n: int, topic: str = "t") -> bytes:
    """The line of offset n and seq n + 1."""
    meta = b'{"written_at":"2026-01-01T00:00:00.000000Z","topic":"%b","space_id":"s","event_id":"e%d","partitions":["p%d"]}'
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":%b,"payload":{"n":%d}}' % (n, n + 1, meta % (topic.encode(), n, n % 2), n)
    )


LINES: Final = [line(n) for n in range(4)]
DATA: Final = b"".join(LINES)


def read(data: bytes, seen: list[LineInfo] | None = None) -> SegmentReport:
    """What is found in a segment with these bytes."""
    disk = SimulatedDisk()
    disk.make_folder(PATH.parent)
    disk.write_all(PATH, data)
    return read_segment(disk, PATH, StreamKey("t"), START, is_flat=True, seen=(seen if seen is not None else []).extend)


def places(report: SegmentReport) -> list[tuple[str, int]]:
    """The problems by code and byte."""
    return [(problem.code, problem.byte_offset) for problem in report.problems]


@pytest.mark.req("F71")
@pytest.mark.parametrize("block_bytes", [64, 1 << 18])
def test_a_cut_ends_what_is_good_at_the_last_whole_line(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a segment is cut, the whole lines before the cut are found and digested, and where they end."""
    monkeypatch.setattr(inspect, "_BLOCK_BYTES", block_bytes)
    for cut in range(len(DATA) + 1):
        seen: list[LineInfo] = []
        report = read(DATA[:cut], seen)
        end = max(size for n in range(5) if (size := sum(map(len, LINES[:n]))) <= cut)

        assert (report.good_bytes, report.size) == (end, cut)
        assert b"".join(LINES[: report.good_lines]) == DATA[:end]
        assert [info.seq for info in seen] == list(range(1, report.good_lines + 1))
        assert places(report) == ([] if end == cut else [("line.unfinished", end)])
        assert report.good_digest.hexdigest() == hashlib.sha256(DATA[:end]).hexdigest()
        assert report.sha256 == hashlib.sha256(DATA[:cut]).hexdigest()


def test_each_kind_of_problem_has_its_place() -> None:
    """A damaged, foreign, misplaced or swapped line is named, and what is whole behind it is counted apart."""
    one, two, three, four = LINES
    at = len(one)
    damaged = two.replace(b'"n":1', b'"n":7')

    assert places(read(one + damaged + three)) == [("line.checksum", at)]
    assert places(read(one + encode_line(b'"hello":"world"}') + two)) == [("line.format", at)]
    assert places(read(one + line(1, "other") + two)) == [("line.misplaced", at)]
    assert places(read(one + three + two)) == [("line.order", at), ("line.order", at + len(three))]
    behind = read(one + damaged + three + four)
    assert (behind.good_lines, behind.lines, list(behind.after), behind.highest_seq) == (1, 3, [3, 4], 4)
    assert behind.partitions == {"p0": 1}


def test_blocks_and_lines_give_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a segment is divided into blocks, and whatever is wrong with it, the report is the same."""
    chance = random.Random(12)
    for _ in range(200):
        lines = list(LINES)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(lines))
            spot = chance.randrange(len(lines[at]))
            lines[at] = chance.choice(
                [lines[at][:spot] + b"\x00" + lines[at][spot + 1 :], lines[at][:spot], LINES[at - 1]]
            )
        reports = []
        for block_bytes in (1 << 18, 200, 17):
            monkeypatch.setattr(inspect, "_BLOCK_BYTES", block_bytes)
            report = read(b"".join(lines))
            digest = report.good_digest.hexdigest()
            assert digest == hashlib.sha256(b"".join(lines)[: report.good_bytes]).hexdigest()
            reports.append({**vars(report), "good_digest": digest, "digest": report.sha256})
        assert reports[0] == reports[1] == reports[2]
