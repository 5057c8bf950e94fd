"""The reserve: one account for all that use it, and no length without room."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tidings.log.embedded.disk import File, OsDisk
from tidings.log.embedded.reserve import KEPT_FROM_LETTERS, KEPT_FROM_RECORDS, KEPT_FROM_SEGMENTS, Reserve
from tidings.testing import SimulatedDisk

MIB = 1 << 20
SIZE = 2 * MIB


def room(path: Path) -> int:
    """The bytes that the disk holds for a file."""
    return os.stat(path).st_blocks * 512


class SlowDisk(OsDisk):
    """The machine's disk, with a pause before a reserve is cut."""

    def __init__(self, pause: Callable[[], object]) -> None:
        self.pause = pause

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        return _SlowFile(super().open(path, create=create, write=write), self.pause)


class _SlowFile:
    def __init__(self, file: File, pause: Callable[[], object]) -> None:
        self._file = file
        self._pause = pause
        self.read, self.write, self.size, self.sync, self.close = (
            file.read,
            file.write,
            file.size,
            file.sync,
            file.close,
        )
        self.allocate = file.allocate

    def truncate(self, size: int) -> None:
        self._pause()
        self._file.truncate(size)


def full_once() -> Callable[[], None]:
    """A job that finds the disk full the first time."""
    tries = iter((True, False))

    def job() -> None:
        if next(tries):
            raise OSError(errno.ENOSPC, "No space left on device")

    return job


def test_two_parts_of_a_process_that_cut_it_at_once_leave_no_hole(tmp_path: Path) -> None:
    """The one that is slow to cut does not make the file longer again than the other left it."""
    second_is_done = threading.Event()
    is_first = threading.Lock()

    def pause() -> None:
        if is_first.acquire(blocking=False):
            second_is_done.wait(0.3)  # in vain, if the other has to wait for this one

    disk, path = SlowDisk(pause), tmp_path / "reserve"
    assert Reserve(disk, path).make_whole(SIZE)
    first, second = Reserve(disk, path), Reserve(disk, path)
    slow = threading.Thread(target=first.run, args=(full_once(), 100_000))
    slow.start()
    while not is_first.locked():
        pass
    second.run(full_once(), 1_000_000)
    second_is_done.set()
    slow.join()

    assert os.stat(path).st_size <= SIZE - 1_100_000
    assert room(path) >= os.stat(path).st_size
    assert first.make_whole(SIZE)
    assert (os.stat(path).st_size, room(path) >= SIZE) == (SIZE, True)


@pytest.mark.parametrize("is_new", [False, True], ids=["made by this process", "found"])
def test_a_hole_is_filled(tmp_path: Path, is_new: bool) -> None:
    """A reserve of the right length that has a hole is not whole, and is made whole from its start."""
    path = tmp_path / "reserve"
    reserve = Reserve(OsDisk(), path)
    if not is_new:
        assert reserve.make_whole(SIZE)
    else:
        path.touch()
    os.truncate(path, MIB)
    os.truncate(path, SIZE)
    assert room(path) < SIZE

    assert reserve.make_whole(SIZE)

    assert room(path) >= SIZE


def test_a_hole_does_not_count_as_room(tmp_path: Path) -> None:
    """Whether the share of others is reached is asked of the room, not of the length."""
    path = tmp_path / "reserve"
    reserve = Reserve(OsDisk(), path, keeps=KEPT_FROM_RECORDS)
    assert reserve.make_whole(SIZE)
    os.truncate(path, MIB)
    os.truncate(path, SIZE)

    assert reserve.is_used_up()


def test_another_process_is_waited_for(tmp_path: Path) -> None:
    """While another process has the file locked, nothing is cut off it."""
    path = tmp_path / "reserve"
    reserve = Reserve(OsDisk(), path)
    assert reserve.make_whole(SIZE)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        cutting = threading.Thread(target=reserve.run, args=(full_once(), 100_000))
        cutting.start()
        cutting.join(0.1)
        assert (cutting.is_alive(), os.stat(path).st_size) == (True, SIZE)
        os.truncate(path, MIB)  # the other process was in need too
        fcntl.flock(other, fcntl.LOCK_UN)
        cutting.join()

    assert os.stat(path).st_size < MIB
    assert room(path) >= os.stat(path).st_size


def test_the_shares_are_of_one_whole(tmp_path: Path) -> None:
    """What one part sees as the largest size holds for all of them, whenever they were made."""
    path = tmp_path / "reserve"
    whole = Reserve(OsDisk(), path)
    assert whole.make_whole(SIZE)
    segments = Reserve(OsDisk(), path, keeps=KEPT_FROM_SEGMENTS)
    while whole.left_bytes > SIZE * KEPT_FROM_SEGMENTS:
        whole.run(full_once(), 100_000)
    late = Reserve(OsDisk(), path, keeps=KEPT_FROM_LETTERS)

    for reserve in (segments, late):
        with pytest.raises(OSError, match="No space"):
            reserve.run(full_once())


def test_a_reserve_that_is_whole_is_on_the_disk() -> None:
    """A power cut right after it was made whole takes nothing of it."""
    disk, path = SimulatedDisk(), Path("/w/reserve")
    disk.make_folder(path.parent)
    disk.sync_folder(Path("/"))
    assert Reserve(disk, path).make_whole(SIZE)

    assert len(disk.after_crash("lose_all").read_all(path)) == SIZE


def test_a_symbolic_link_is_never_written_through(tmp_path: Path) -> None:
    """Whoever may write in the folder cannot have another file of the user cut or filled."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"keep me")
    (tmp_path / "reserve").symlink_to(mine)

    with pytest.raises(OSError, match="symbolic link"):
        Reserve(OsDisk(), tmp_path / "reserve").make_whole(SIZE)

    assert mine.read_bytes() == b"keep me"


def _wait_a_little(rng: random.Random, never: threading.Event) -> None:
    never.wait(rng.random() / 200)


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.heavy)])
def test_any_mixture_of_threads_leaves_what_it_says(tmp_path: Path, count: int) -> None:
    """Seven parts that cut and renew it in threads, with pauses wherever it is cut: its length is never more than its room."""
    for seed in range(count):
        rng = random.Random(seed)
        path = tmp_path / f"reserve-{seed}"
        disk = SlowDisk(partial(_wait_a_little, rng, threading.Event()))
        parts = [Reserve(disk, path, keeps=keeps) for keeps in (0, 0, 0, 0.125, 0.25, 0.75, 0.875)]
        assert parts[0].make_whole(SIZE)

        def work(part: Reserve, seed: int) -> None:
            own = random.Random(seed)
            for _ in range(10):
                if own.random() < 0.2:
                    part.make_whole(SIZE)
                else:
                    try:
                        part.run(full_once(), own.randrange(300_000))
                    except OSError:
                        continue
                part.is_used_up()

        threads = [threading.Thread(target=work, args=(part, seed + at)) for at, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert room(path) >= os.stat(path).st_size, seed
        assert parts[0].make_whole(SIZE)
        assert room(path) >= SIZE, seed
        path.unlink()
