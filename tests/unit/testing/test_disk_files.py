"""While nothing goes wrong, a simulated disk answers as the machine's own does."""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.log.embedded.disk import Disk, File, OsDisk, fill_with_zeros, read_file, replace_file
from tidings.testing import CRASH_MODES, DiskCall, SimulatedDisk

PATHS = [Path(text) for text in ("a", "b", "f/a", "f/b", "f/g/c", "missing/a")]
paths = st.sampled_from(PATHS)
offsets = st.integers(0, 1500)

CHANGES = ["create", "write", "write", "truncate", "sync", "rename", "remove", "make_folder", "sync_folder"]
LOOKS = ["read", "names", "exists"]
Step = tuple[str, Path, Path, int, bytes]
steps = st.tuples(st.sampled_from(CHANGES + LOOKS), paths, paths, offsets, st.binary(max_size=20))


def answer(disk: Disk, root: Path, step: Step) -> object:
    """Carry out one step; what it returned, or the kind of error it raised."""
    what, path, other, number, data = step
    path, other = root / path, root / other

    def with_file(act: Callable[[File], object], *, create: bool = False) -> object:
        file = disk.open(path, create=create, write=True)
        try:
            return act(file)
        finally:
            file.close()

    acts: dict[str, Callable[[], object]] = {
        "create": lambda: with_file(lambda file: file.size(), create=True),
        "write": lambda: with_file(lambda file: file.write(number, data)),
        "truncate": lambda: with_file(lambda file: file.truncate(number)),
        "read": lambda: with_file(lambda file: (file.read(number, 700), file.size())),
        "sync": lambda: with_file(lambda file: file.sync()),
        "rename": lambda: disk.rename(path, other),
        "remove": lambda: disk.remove(path),
        "make_folder": lambda: disk.make_folder(path.parent),
        "sync_folder": lambda: disk.sync_folder(path.parent),
        "names": lambda: disk.names(path.parent),
        "exists": lambda: disk.exists(path),
    }
    try:
        return acts[what]()
    except OSError as error:
        return type(error), error.errno


@given(st.lists(steps, max_size=40))
def test_it_answers_as_the_machines_own_disk(course: list[Step]) -> None:
    """Any course of calls gets the same results and the same errors, and leaves the same files."""
    disk, real = SimulatedDisk(), OsDisk()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        disk.make_folder(root)
        for step in course:
            assert answer(disk, root, step) == answer(real, root, step), step
        assert disk.tree() == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("text", ["file", "a/file", "/file", "/a/file"])
def test_paths_may_be_absolute_or_not(text: str) -> None:
    """A file is found under the path it was made with, whatever kind of path that is."""
    disk, path = SimulatedDisk(), Path(text)
    disk.make_folder(path.parent)

    replace_file(disk, path, b"text")

    assert read_file(disk, path) == b"text"
    assert disk.tree() == {path: b"text"}
    assert disk.names(path.parent) == ["file"]


def open_folder(disk: Disk, folder: Path) -> None:
    disk.open(folder, write=True)


def rename_onto_folder(disk: Disk, folder: Path) -> None:
    disk.open(folder.parent / "file", create=True).close()
    disk.rename(folder.parent / "file", folder)


def make_folder_onto_file(disk: Disk, folder: Path) -> None:
    disk.open(folder / "file", create=True).close()
    disk.make_folder(folder / "file")


def make_folder_below_file(disk: Disk, folder: Path) -> None:
    disk.open(folder / "file", create=True).close()
    disk.make_folder(folder / "file" / "folder")


def list_a_file(disk: Disk, folder: Path) -> None:
    disk.open(folder / "file", create=True).close()
    disk.names(folder / "file")


def look_below_file(disk: Disk, folder: Path) -> None:
    disk.open(folder / "file", create=True).close()
    assert not disk.exists(folder / "file" / "below")
    disk.open(folder / "file" / "below")


def write_only_read(disk: Disk, folder: Path) -> None:
    disk.open(folder / "file", create=True).close()
    disk.open(folder / "file").write(0, b"x")


def use_after_close(disk: Disk, folder: Path) -> None:
    file = disk.open(folder / "file", create=True)
    file.close()
    file.close()
    file.read(0, 1)


def write_before_the_start(disk: Disk, folder: Path) -> None:
    disk.open(folder / "file", create=True).write(-1, b"x")


def remove_folder(disk: Disk, folder: Path) -> None:
    disk.remove(folder)


def sync_missing_folder(disk: Disk, folder: Path) -> None:
    disk.sync_folder(folder / "missing")


@pytest.mark.parametrize(
    "misuse",
    [
        open_folder,
        rename_onto_folder,
        make_folder_onto_file,
        make_folder_below_file,
        list_a_file,
        look_below_file,
        write_only_read,
        use_after_close,
        write_before_the_start,
        remove_folder,
        sync_missing_folder,
    ],
)
def test_misuse_gets_the_machines_own_error(misuse: Callable[[Disk, Path], None], tmp_path: Path) -> None:
    """What the machine's disk refuses is refused here with the same error number."""
    numbers = []
    for disk in (OsDisk(), SimulatedDisk()):
        folder = tmp_path / "folder"
        disk.make_folder(folder)
        with pytest.raises(OSError, match=r"\[Errno") as refusal:
            misuse(disk, folder)
        numbers.append(refusal.value.errno)

    assert numbers[0] == numbers[1]


def test_an_open_file_outlives_its_name() -> None:
    """A file that was renamed or removed goes on under its handle."""
    disk = SimulatedDisk()
    file = disk.open(Path("a"), create=True)
    disk.rename(Path("a"), Path("b"))
    file.write(0, b"moved")
    assert disk.read_all(Path("b")) == b"moved"

    disk.remove(Path("b"))
    file.write(0, b"M")

    assert file.read(0, 10) == b"Moved"
    assert disk.tree() == {}


def test_what_was_handed_in_may_be_changed_afterwards() -> None:
    """The disk keeps the bytes as they were when they were written."""
    disk, data = SimulatedDisk(), bytearray(b"before")
    file = disk.open(Path("a"), create=True)
    file.write(0, memoryview(data))  # type: ignore[arg-type]  # as a careless caller may

    data[:] = b"after!"
    file.sync()
    disk.sync_folder(Path())

    assert disk.after_crash("lose_all").read_all(Path("a")) == b"before"


def test_a_second_lock_is_told_that_there_is_one() -> None:
    """One lock a path; the second one gets a text, and the lock once the first is released."""
    disk, path = SimulatedDisk(), Path("writer.lock")
    first = disk.lock(path)
    assert not isinstance(first, str)

    assert isinstance(disk.lock(path), str)
    assert not isinstance(disk.lock(Path("other.lock")), str)
    first.release()
    second = disk.lock(path)
    assert not isinstance(second, str)
    first.release()
    assert isinstance(disk.lock(path), str)
    assert disk.names(Path()) == ["other.lock", "writer.lock"]


def test_a_lock_needs_its_folder() -> None:
    """Without the folder there is no lock, as on the machine's disk."""
    with pytest.raises(FileNotFoundError):
        SimulatedDisk().lock(Path("missing/lock"))


def test_locks_vanish_in_a_crash() -> None:
    """The machine that comes up after a crash finds nothing locked."""
    disk = SimulatedDisk()
    disk.lock(Path("lock"))

    assert not isinstance(disk.after_crash("keep_all").lock(Path("lock")), str)


def test_calls_that_change_or_sync_are_counted() -> None:
    """Every change and every sync is one call with its number, name and path; looking is none."""
    disk = SimulatedDisk()
    folder, path, other = Path("f"), Path("f/a"), Path("f/b")
    disk.make_folder(folder)
    file = disk.open(path, create=True)
    file.write(0, b"text")
    file.truncate(2)
    file.sync()
    disk.rename(path, other)
    disk.sync_folder(folder)
    disk.remove(other)
    disk.lock(path)
    expected = [
        DiskCall(1, "make_folder", folder),
        DiskCall(2, "open", path),
        DiskCall(3, "write", path),
        DiskCall(4, "truncate", path),
        DiskCall(5, "sync", path),
        DiskCall(6, "rename", path),
        DiskCall(7, "sync_folder", folder),
        DiskCall(8, "remove", other),
        DiskCall(9, "lock", path),
    ]

    disk.make_folder(folder)
    disk.remove(other)
    disk.open(path, create=True).close()
    disk.lock(path)
    assert (file.size(), file.read(0, 9), disk.names(folder), disk.exists(other)) == (2, b"te", ["a"], False)
    assert (disk.read_all(path), disk.tree()) == (b"", {path: b""})
    disk.write_all(other, b"data")
    disk.flip(other, 0, 1)

    assert disk.trace == expected
    assert disk.calls == len(expected)


def test_the_trace_is_bounded() -> None:
    """After very many calls the last ones are still told, and the count is right."""
    disk = SimulatedDisk()
    file = disk.open(Path("a"), create=True)
    for _ in range(12_000):
        file.sync()

    assert disk.calls == 12_001
    assert len(disk.trace) == 10_000
    assert disk.trace[-1] == (12_001, "sync", Path("a"))


def test_flip_turns_bits_for_readers_and_on_the_disk() -> None:
    """A flipped byte reads as flipped, before and after a crash, synced or not; twice is as before."""
    disk, path = SimulatedDisk(), Path("a")
    disk.write_all(path, b"\x00\x00")
    disk.open(path, write=True).write(1, b"\x00\x00")

    for byte_offset, mask in ((0, 0x81), (1, 0xFF), (2, 0x01)):
        disk.flip(path, byte_offset, mask)

    assert disk.read_all(path) == b"\x81\xff\x01"
    assert disk.after_crash("keep_all").read_all(path) == b"\x81\xff\x01"
    assert disk.after_crash("lose_all").read_all(path) == b"\x81\xff"
    disk.flip(path, 1, 0xFF)
    assert disk.read_all(path) == b"\x81\x00\x01"


@pytest.mark.parametrize("is_removed", [False, True])
def test_what_was_put_there_is_durable_whatever_was_pending(is_removed: bool) -> None:
    """A file that a test puts in place survives, though its name and data had changes under way."""
    disk, path = SimulatedDisk(), Path("f/a")
    disk.make_folder(path.parent)
    disk.open(path, create=True).write(0, b"pending")
    disk.rename(path, Path("f/b"))
    disk.open(path, create=True).write(0, b"pending too")
    if is_removed:
        disk.remove(path)

    disk.write_all(path, b"put")

    for mode in CRASH_MODES:
        assert {disk.after_crash(mode, seed=seed).read_all(path) for seed in range(50)} == {b"put"}
    disk.sync_folder(path.parent)
    assert disk.read_all(path) == disk.after_crash("lose_all").read_all(path) == b"put"


@pytest.mark.parametrize("path", [Path("f"), Path("f/a/b")])
def test_a_file_is_not_put_where_something_else_is(path: Path) -> None:
    """A test that takes a folder for a file, or a file for a folder, is told."""
    disk = SimulatedDisk()
    disk.write_all(Path("f/a"), b"")

    with pytest.raises(FileExistsError):
        disk.write_all(path, b"")
    assert disk.tree() == {Path("f/a"): b""}


@pytest.mark.parametrize(("byte_offset", "mask"), [(2, 1), (-1, 1), (0, 0), (0, 256)])
def test_flip_refuses_what_would_change_nothing(byte_offset: int, mask: int) -> None:
    """A flip outside the file, or of no bit, is an error in the test that asks for it."""
    disk = SimulatedDisk()
    disk.write_all(Path("a"), b"ab")

    with pytest.raises(ValueError, match="cannot flip"):
        disk.flip(Path("a"), byte_offset, mask)


def test_a_clone_goes_on_by_itself() -> None:
    """A clone has the same files, pending changes, counts and plans; what happens to one is not seen by the other."""
    disk, path = SimulatedDisk(seed=3, crash_after=6), Path("a")
    disk.write_all(path, b"old")
    file = disk.open(path, write=True)
    file.write(0, b"new")
    disk.fail_next("rename", errno.EIO)
    disk.lock(Path("lock"))

    twin = disk.clone()
    file.write(0, b"xxx")

    assert (twin.calls, twin.trace, twin.crash_after, twin.seed) == (2, disk.trace[:2], 6, 3)
    assert twin.read_all(path) == b"new"
    assert twin.after_crash("lose_all").read_all(path) == b"old"
    twin.flip(path, 0, 1)
    twin.open(path, write=True).sync()
    assert (twin.after_crash("lose_all").read_all(path), disk.read_all(path)) == (b"oew", b"xxx")
    assert disk.after_crash("lose_all").read_all(path) == b"old"
    assert not isinstance(twin.lock(Path("lock")), str)
    for each in (twin, disk):
        with pytest.raises(OSError, match="Input/output"):
            each.rename(path, Path("b"))
    assert (twin.calls, disk.calls) == (5, 4)


def change_by_writing(disk: SimulatedDisk) -> None:
    disk.open(SHARED, write=True).write(1, b"X")


def change_by_cutting(disk: SimulatedDisk) -> None:
    disk.open(SHARED, write=True).truncate(1)


def change_by_syncing(disk: SimulatedDisk) -> None:
    disk.open(SHARED).sync()


def change_by_flipping(disk: SimulatedDisk) -> None:
    disk.flip(SHARED, 0, 0xFF)


def change_by_putting(disk: SimulatedDisk) -> None:
    disk.write_all(SHARED, b"put")


def change_by_removing(disk: SimulatedDisk) -> None:
    disk.remove(SHARED)
    disk.sync_folder(Path())


SHARED = Path("a")
CHANGED_BY = [
    change_by_writing,
    change_by_cutting,
    change_by_syncing,
    change_by_flipping,
    change_by_putting,
    change_by_removing,
]


def what_was_synced(disk: SimulatedDisk) -> SimulatedDisk:
    return disk.after_crash("lose_all")


@pytest.mark.parametrize("copied", [SimulatedDisk.clone, SimulatedDisk.after_crash, what_was_synced])
@pytest.mark.parametrize("change", CHANGED_BY)
def test_copies_do_not_feel_each_others_changes(
    change: Callable[[SimulatedDisk], None], copied: Callable[[SimulatedDisk], SimulatedDisk]
) -> None:
    """Whatever is done to a disk or to its copy, the other one reads, and would lose, what it did before."""

    def state(disk: SimulatedDisk) -> list[dict[Path, bytes]]:
        return [disk.tree(), disk.after_crash("lose_all").tree(), disk.after_crash("keep_all").tree()]

    for at in (0, 1):
        disk = SimulatedDisk()
        disk.write_all(SHARED, b"old")
        disk.open(SHARED, write=True).write(0, b"new")
        pair = [disk, copied(disk)]
        before = [state(each) for each in pair]
        change(pair[at])
        assert state(pair[1 - at]) == before[1 - at]


def test_a_clone_has_the_same_luck() -> None:
    """What chance does to a disk from here on, it does to its clone too."""
    disk = SimulatedDisk(seed=1)
    disk.write_all(SHARED, b"")
    disk.fail_next("write", errno.EIO, times=20)

    def failed(each: SimulatedDisk) -> bytes:
        file = each.open(SHARED, write=True)
        file.truncate(0)
        with pytest.raises(OSError, match="Input/output"):
            file.write(0, b"x" * 1000)
        return file.read(0, 1000)

    first = [failed(disk) for _ in range(5)]
    twin = disk.clone()

    then = [failed(disk) for _ in range(5)]
    assert then == [failed(twin) for _ in range(5)]
    assert then != first


def test_threads_may_share_it() -> None:
    """Calls from several threads are all carried out and all counted."""
    disk = SimulatedDisk()

    def work(name: str) -> None:
        file = disk.open(Path(name), create=True)
        for at in range(200):
            file.write(at, b"x")
            file.sync()

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert disk.calls == 4 * 401
    assert disk.tree() == {Path(name): b"x" * 200 for name in "abcd"}


def test_megabytes_of_zeros_are_quickly_durable() -> None:
    """A journal is filled with zeros by one call a mebibyte and one sync, and survives."""
    disk, path = SimulatedDisk(), Path("journal")
    fill_with_zeros(disk.open(path, create=True), 3 << 20)
    disk.sync_folder(Path())

    assert disk.calls == 6
    assert disk.after_crash("lose_all").read_all(path) == bytes(3 << 20)
