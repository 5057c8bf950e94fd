"""A simulated disk fails when told to, forgets what a failed sync left, and fills up."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.log.embedded.disk import File, is_full
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk
from tidings.testing.disk import Operation

A, B = Path("wal/a"), Path("wal/b")
FOLDER = Path("wal")


def disk_with(data: bytes, seed: int = 0) -> SimulatedDisk:
    disk = SimulatedDisk(seed)
    disk.write_all(A, data)
    return disk


ACTS: dict[Operation, Callable[[SimulatedDisk, File], object]] = {
    "open": lambda disk, file: disk.open(A),
    "read": lambda disk, file: file.read(0, 1),
    "write": lambda disk, file: file.write(0, b"n"),
    "truncate": lambda disk, file: file.truncate(0),
    "sync": lambda disk, file: file.sync(),
    "rename": lambda disk, file: disk.rename(A, B),
    "remove": lambda disk, file: disk.remove(A),
    "make_folder": lambda disk, file: disk.make_folder(FOLDER / "below"),
    "sync_folder": lambda disk, file: disk.sync_folder(FOLDER),
    "lock": lambda disk, file: disk.lock(FOLDER / "lock"),
}


@pytest.mark.parametrize("operation", ACTS)
def test_a_call_of_the_chosen_kind_fails_once(operation: Operation) -> None:
    """The next call of that kind raises the error and does nothing; the one after it works."""
    disk = disk_with(b"old")
    file = disk.open(A, write=True)
    disk.fail_next(operation, errno.EIO)

    with pytest.raises(OSError, match="Input/output error") as failure:
        ACTS[operation](disk, file)

    assert failure.value.errno == errno.EIO
    assert disk.tree() == {A: b"old"}
    assert disk.names(FOLDER) == ["a"]
    ACTS[operation](disk, file)


@pytest.mark.parametrize("operation", ACTS)
def test_calls_of_other_kinds_go_on(operation: Operation) -> None:
    """A fault that waits for one kind of call leaves all others alone."""
    for other in ACTS.keys() - {operation}:
        disk = disk_with(b"old")
        file = disk.open(A, write=True)
        disk.fail_next(operation, errno.EIO)
        ACTS[other](disk, file)


def test_a_failing_create_makes_no_file() -> None:
    """When opening fails, the file that it should have made is not there."""
    disk = disk_with(b"")
    disk.fail_next("open", errno.EMFILE)

    with pytest.raises(OSError, match="Too many open files"):
        disk.open(B, create=True)

    assert not disk.exists(B)


def test_faults_choose_their_paths_and_times() -> None:
    """A fault strikes only paths with its text in them, as often as it was told."""
    disk = disk_with(b"old")
    disk.write_all(B, b"old")
    disk.fail_next("sync", OSError(errno.EIO, "bad sector"), path_contains="wal/a", times=2)
    first, second = disk.open(A), disk.open(B)

    second.sync()
    for _ in range(2):
        with pytest.raises(OSError, match=r"bad sector.*wal/a"):
            first.sync()
    first.sync()


@pytest.mark.parametrize("text", ["wal/a", "wal/b"])
def test_a_rename_fails_by_either_of_its_paths(text: str) -> None:
    """A fault on a rename may name the old path or the new one."""
    disk = disk_with(b"")
    disk.fail_next("rename", errno.EIO, path_contains=text)

    with pytest.raises(OSError, match="Input/output"):
        disk.rename(A, B)
    disk.rename(A, B)


@pytest.mark.parametrize(
    ("operation", "error", "times"), [("fsync", errno.EIO, 1), ("sync", OSError("text"), 1), ("sync", errno.EIO, 0)]
)
def test_a_fault_that_could_not_strike_is_refused(operation: str, error: OSError | int, times: int) -> None:
    """A misspelt call, an error without a number or no times at all is an error in the test itself."""
    with pytest.raises(ValueError, match="cannot let"):
        SimulatedDisk().fail_next(operation, error, times=times)  # type: ignore[arg-type]


def test_a_failed_write_may_have_written_a_part() -> None:
    """After a failed write some of its bytes are there, but never all."""
    found = set()
    for seed in range(100):
        disk = disk_with(b"", seed)
        disk.fail_next("write", errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            disk.open(A, write=True).write(0, b"abcd")
        found.add(disk.read_all(A))

    assert found == {b"a", b"ab", b"abc"}


def test_a_failed_call_counts() -> None:
    """A call that failed may have changed something, so it is counted, and the machine may stop at it."""
    disk = disk_with(b"")
    disk.fail_next("sync", errno.EIO, times=2)
    file = disk.open(A)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    assert disk.calls == 1

    disk.crash_after = 2
    with pytest.raises(SimulatedCrash):
        file.sync()


@pytest.mark.parametrize("mode", CRASH_MODES)
def test_a_failed_sync_forgets(mode: CrashMode) -> None:
    """What a failed sync did not write is read until the crash and gone after it, in every mode."""
    disk = disk_with(b"old")
    file = disk.open(A, write=True)
    file.write(0, b"new and longer")
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()

    file.sync()

    assert file.read(0, 100) == b"new and longer"
    for seed in range(50):
        assert disk.after_crash(mode, seed=seed).read_all(A) == b"old"


def test_what_is_written_after_a_failed_sync_is_synced_without_the_forgotten() -> None:
    """A later sync makes later writes durable; where the forgotten ones were there are zeros."""
    disk = disk_with(b"old")
    file = disk.open(A, write=True)
    file.write(3, b"lost")
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()

    file.write(7, b"kept")
    file.sync()

    assert file.read(0, 100) == b"oldlostkept"
    assert disk.after_crash("keep_all").read_all(A) == b"old" + bytes(4) + b"kept"


def test_a_failed_sync_forgets_only_its_own_file() -> None:
    """Pending writes of other files still reach the disk."""
    disk = disk_with(b"")
    disk.write_all(B, b"")
    disk.open(B, write=True).write(0, b"kept")
    disk.fail_next("sync", errno.EIO, path_contains="wal/a")
    with pytest.raises(OSError, match="Input/output"):
        disk.open(A).sync()

    disk.open(B).sync()

    assert disk.after_crash("lose_all").read_all(B) == b"kept"


def test_a_failed_folder_sync_may_be_tried_again() -> None:
    """Names stay pending when their folder's sync fails."""
    disk = disk_with(b"")
    disk.rename(A, B)
    disk.fail_next("sync_folder", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        disk.sync_folder(FOLDER)
    assert disk.after_crash("lose_all").names(FOLDER) == ["a"]

    disk.sync_folder(FOLDER)

    assert disk.after_crash("lose_all").names(FOLDER) == ["b"]


# --- Room ---


def test_a_full_disk_takes_what_fits() -> None:
    """A write beyond the capacity writes what there is room for and says that the disk is full."""
    disk = disk_with(b"12345")
    disk.capacity_bytes = 8
    file = disk.open(A, write=True)

    with pytest.raises(OSError, match="No space") as failure:
        file.write(4, b"abcdefgh")

    assert is_full(failure.value)
    assert disk.read_all(A) == b"1234abcd"
    assert disk.used_bytes == 8


def test_room_is_counted_over_all_files() -> None:
    """What one file takes, another one lacks."""
    disk = disk_with(b"12345")
    disk.capacity_bytes = 8

    with pytest.raises(OSError, match="No space"):
        disk.open(B, create=True).write(0, b"abcdefgh")

    assert disk.read_all(B) == b"abc"


def test_overwriting_needs_no_room() -> None:
    """On a full disk, or one that was made too small, bytes that are there can be written again."""
    disk = disk_with(b"12345")
    disk.capacity_bytes = 3

    disk.open(A, write=True).write(0, b"abcde")

    assert disk.read_all(A) == b"abcde"


def test_shrinking_needs_no_room() -> None:
    """On a disk that was made too small, a file can be cut, though it still does not fit then."""
    disk = disk_with(b"12345")
    disk.capacity_bytes = 3

    disk.open(A, write=True).truncate(4)

    assert disk.used_bytes == 4


def test_a_gap_that_does_not_fit_is_not_begun() -> None:
    """A write so far behind the end that nothing of it fits leaves the file as it was."""
    disk = disk_with(b"12345")
    disk.capacity_bytes = 8

    with pytest.raises(OSError, match="No space"):
        disk.open(A, write=True).write(20, b"abc")

    assert disk.read_all(A) == b"12345"


def test_growing_by_truncate_needs_room_too() -> None:
    """A file is not stretched beyond the capacity."""
    disk = disk_with(b"12345")
    disk.capacity_bytes = 8
    file = disk.open(A, write=True)

    with pytest.raises(OSError, match="No space"):
        file.truncate(9)
    assert file.size() == 5
    file.truncate(8)
    assert disk.used_bytes == 8


def free_by_removing(disk: SimulatedDisk) -> None:
    disk.remove(B)


def free_by_cutting(disk: SimulatedDisk) -> None:
    disk.open(B, write=True).truncate(0)


def free_by_replacing(disk: SimulatedDisk) -> None:
    disk.open(FOLDER / "empty", create=True).close()
    disk.rename(FOLDER / "empty", B)


def free_by_enlarging(disk: SimulatedDisk) -> None:
    disk.capacity_bytes = 20


def free_by_lifting_the_limit(disk: SimulatedDisk) -> None:
    disk.capacity_bytes = None


@pytest.mark.parametrize(
    "free", [free_by_removing, free_by_cutting, free_by_replacing, free_by_enlarging, free_by_lifting_the_limit]
)
def test_with_room_again_writing_goes_on(free: Callable[[SimulatedDisk], None]) -> None:
    """The write that found no room works as soon as there is some."""
    disk = disk_with(b"12345")
    disk.write_all(B, b"12345")
    disk.capacity_bytes = 10
    file = disk.open(A, write=True)
    with pytest.raises(OSError, match="No space"):
        file.write(5, b"abc")

    free(disk)
    file.write(5, b"abc")

    assert disk.read_all(A) == b"12345abc"


def test_a_crash_does_not_enlarge_the_disk() -> None:
    """The capacity is the same after a crash, and what was lost is free again."""
    disk = disk_with(b"12345")
    disk.capacity_bytes = 8
    disk.open(A, write=True).write(5, b"abc")

    after = disk.after_crash("lose_all")

    assert (after.capacity_bytes, after.used_bytes) == (8, 5)
    after.open(A, write=True).write(5, b"abc")


def test_a_crash_ends_all_faults() -> None:
    """The machine that comes up after a crash has a disk that works and no crash planned."""
    disk = disk_with(b"")
    disk.fail_next("sync", errno.EIO, times=100)
    disk.crash_after = 0

    after = disk.after_crash()

    after.open(A).sync()
    assert (after.calls, after.is_crashed) == (1, False)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.binary(min_size=1, max_size=30)), max_size=20))
def test_the_capacity_is_never_passed(course: list[tuple[int, int, bytes]]) -> None:
    """However files are written, together they hold no more than the capacity, and only a write that needs more is refused."""
    disk = SimulatedDisk(capacity_bytes=64)
    for number, byte_offset, data in course:
        file = disk.open(Path(f"file{number}"), create=True)
        needed = max(0, byte_offset + len(data) - file.size())
        room = 64 - disk.used_bytes
        if needed <= room:
            file.write(byte_offset, data)
        else:
            with pytest.raises(OSError, match="No space"):
                file.write(byte_offset, data)
        assert disk.used_bytes <= 64
