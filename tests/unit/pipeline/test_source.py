"""What is new in the log is cut at one seq, and is found again from any place to begin at."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.unit.pipeline.support import SMALL, Workspace, event
from tidings.log.embedded import open_log
from tidings.log.segment import head_of
from tidings.pipeline.errors import PositionLost
from tidings.pipeline.source import SourceChunk
from tidings.pipeline.state_files import Hints, Mark, load_hints, save_hints
from tidings.pipeline.storage import Storage

BYTES_MAX = 1 << 40


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A log of three topics with segments of ten lines."""
    made = Workspace(tmp_path)
    made.append(event(number, f"t{number % 3}") for number in range(100))
    return made


def seqs_of(workspace: Workspace, chunk: SourceChunk) -> list[int]:
    """The seqs that a task would take from a chunk."""
    found = []
    for each in chunk.ranges:
        data = (workspace.layout.wal / each.path).read_bytes()[each.start : each.end]
        assert not data or data.endswith(b"\n")
        for line in data.splitlines():
            head = head_of(line)
            assert head is not None
            found.append(head.seq)
    return sorted(seq for seq in found if chunk.since < seq <= chunk.until)


def pin(workspace: Workspace, since: int = 0, hints: Hints | None = None, files_max: int = 1000) -> list[SourceChunk]:
    """All chunks after a seq."""
    view = workspace.source().pin(since, hints or Hints(workspace.epoch, 0))
    return list(view.chunks(BYTES_MAX, files_max))


def test_everything_is_found(workspace: Workspace) -> None:
    """
    From the beginning, pinning finds every record up to the last.
    """
    (chunk,) = pin(workspace)

    assert chunk.until == 100
    assert seqs_of(workspace, chunk) == list(range(1, 101))


@pytest.mark.parametrize("files_max", [1, 2, 3, 7])
def test_a_long_way_is_gone_in_steps(workspace: Workspace, files_max: int) -> None:
    """
    Chunks follow one another without a gap or an overlap, however small they are.
    """
    chunks = pin(workspace, files_max=files_max)

    assert len(chunks) > 1
    assert [seq for chunk in chunks for seq in seqs_of(workspace, chunk)] == list(range(1, 101))
    assert all(before.until == after.since for before, after in itertools.pairwise(chunks))


@pytest.mark.parametrize("since", [0, 1, 33, 99])
@pytest.mark.parametrize("files_max", [1, 1000])
def test_hints_only_save_reading(workspace: Workspace, since: int, files_max: int) -> None:
    """
    Old hints, fresh ones and none lead to the same records.
    """
    workspace.append(event(1000 + number, f"t{number % 4}") for number in range(50))
    wanted = list(range(since + 1, 151))
    every = [Hints(workspace.epoch, 0)]
    every += [chunk.hints for chunk in pin(workspace, files_max=1) if chunk.until <= since]

    for hints in every:
        chunks = pin(workspace, since, hints, files_max)
        assert [seq for chunk in chunks for seq in seqs_of(workspace, chunk)] == wanted


def test_reading_on_reads_nothing_twice(workspace: Workspace) -> None:
    """
    After a run, the next one is pointed at the new bytes and no others.
    """
    (first,) = pin(workspace)
    assert pin(workspace, first.until, first.hints) == []
    workspace.append(event(1000 + number, "t0") for number in range(5))

    (second,) = pin(workspace, first.until, first.hints)

    assert seqs_of(workspace, second) == list(range(101, 106))
    size = sum(len(line) + 1 for line in _last_lines(workspace, 5))
    assert second.size == size


def _last_lines(workspace: Workspace, count: int) -> list[bytes]:
    lines = [line for path in workspace.segments() for line in path.read_bytes().splitlines()]
    return sorted(lines, key=lambda line: head_of(line).seq)[-count:]  # type: ignore[union-attr]


def test_a_line_that_is_being_written_waits(workspace: Workspace) -> None:
    """
    Half a line at the end of an open segment belongs to the next run.
    """
    path = workspace.segments()[-1]
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 3].rsplit(b"\n", 1)[-1])

    (chunk,) = pin(workspace)

    assert chunk.until == 100
    assert seqs_of(workspace, chunk) == list(range(1, 101))


async def test_a_living_log_is_read_beside_its_writer(tmp_path: Path) -> None:
    """
    What the log has committed is seen without waiting for it to be closed.
    """
    log = await open_log(tmp_path, SMALL)
    try:
        await log.append_many([event(number) for number in range(7)])
        workspace = Workspace(tmp_path)
        found: list[SourceChunk] = []
        for _ in range(400):
            found = await asyncio.to_thread(pin, workspace)
            if found and found[0].until == 7:
                break
            await asyncio.sleep(0.01)
    finally:
        await log.close()

    assert seqs_of(workspace, found[0]) == list(range(1, 8))


def test_a_log_that_was_put_back_is_refused(workspace: Workspace) -> None:
    """
    A lake that is ahead of its log is never taken for one that is behind.
    """
    with pytest.raises(PositionLost) as caught:
        pin(workspace, since=500)

    assert (caught.value.seq, caught.value.log_seq) == (500, 100)


def test_what_was_dropped_unread_is_told(workspace: Workspace) -> None:
    """
    Segments that retention took before the lake had them are gaps, each with its seqs.
    """
    assert workspace.retain("t0", 0) == 3

    (chunk,) = pin(workspace)

    assert [(gap.first_offset, gap.last_offset) for gap in chunk.gaps] == [(0, 9), (10, 19), (20, 29)]
    missing = {seq for gap in chunk.gaps for seq in range(gap.first_seq, gap.last_seq + 1, 3)}
    assert sorted(missing | set(seqs_of(workspace, chunk))) == list(range(1, 101))


def test_what_was_dropped_after_it_was_taken_is_no_gap(workspace: Workspace) -> None:
    """
    Once the lake has a segment, its going is of no interest.
    """
    (first,) = pin(workspace)
    workspace.retain("t0", 0)
    workspace.append([event(1000, "t0")])

    (second,) = pin(workspace, first.until, first.hints)

    assert second.gaps == ()
    assert seqs_of(workspace, second) == [101]


def test_hints_are_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    """
    Damaged hints, those of another epoch and those from the future count as none.
    """
    hints = Hints("0" * 16, 7, {"demo": Mark(1, 20, 0)})
    save_hints(Storage.of(tmp_path), hints)

    assert load_hints(Storage.of(tmp_path), epoch="0" * 16, seq=7) == hints
    assert load_hints(Storage.of(tmp_path), epoch="0" * 16, seq=6).streams == {}
    assert load_hints(Storage.of(tmp_path), epoch="1" * 16, seq=7).streams == {}
    (tmp_path / "positions.json").write_bytes((tmp_path / "positions.json").read_bytes().replace(b"20", b"21"))
    assert load_hints(Storage.of(tmp_path), epoch="0" * 16, seq=7).streams == {}
