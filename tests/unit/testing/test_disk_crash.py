"""After a crash a simulated disk holds all that was synced, and any part of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.log.embedded.disk import Disk, replace_file
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk

SEEDS = range(200)
SECTOR = 512
A, B = Path("a"), Path("b")

every_mode = pytest.mark.parametrize("mode", CRASH_MODES)


def images(disk: SimulatedDisk, path: Path, mode: CrashMode = "random") -> set[bytes | None]:
    """What a file may hold after a crash, over many seeds; ``None`` where it is gone."""
    return {disk.after_crash(mode, seed=seed).tree().get(path) for seed in SEEDS}


def disk_with(data: bytes, path: Path = A) -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.write_all(path, data)
    return disk


# --- Data ---


@every_mode
def test_what_was_synced_survives(mode: CrashMode) -> None:
    """Data and name that were synced are there after every crash."""
    disk = SimulatedDisk()
    disk.make_folder(Path("/ws/wal"))
    path = Path("/ws/wal/a")
    file = disk.open(path, create=True)
    file.write(0, b"x" * 2000)
    file.sync()
    for folder in (Path("/"), Path("/ws"), Path("/ws/wal")):
        disk.sync_folder(folder)

    assert images(disk, path, mode) == {b"x" * 2000}


def test_what_was_not_synced_may_vanish_or_stay() -> None:
    """The two plain modes give the two ends: nothing of the pending writes, and all of them."""
    disk = disk_with(b"old")
    file = disk.open(A, write=True)
    file.write(3, b" and new")
    file.truncate(7)

    assert disk.after_crash("lose_all").read_all(A) == b"old"
    assert disk.after_crash("keep_all").read_all(A) == b"old and"
    assert images(disk, A) >= {b"old", b"old and"}


def test_reads_see_everything_until_the_crash() -> None:
    """Pending writes are read back as if they were on the disk."""
    disk = disk_with(b"old")
    file = disk.open(A, write=True)
    file.write(0, b"new!")

    assert file.read(0, 10) == disk.open(A).read(0, 10) == b"new!"


def test_a_write_may_be_torn_within_a_sector() -> None:
    """Some crash leaves the head of a short write, and some its tail behind old bytes."""
    disk = disk_with(b"........")
    disk.open(A, write=True).write(0, b"ABCDEFGH")

    assert images(disk, A) >= {b"........", b"ABCDEFGH", b"ABC.....", b"...DEFGH"}


def test_sectors_of_one_write_go_their_own_ways() -> None:
    """Some crash keeps the later sectors of a write and loses the earlier ones, or one in the middle."""
    old, new = b"." * 4 * SECTOR, b"N" * 4 * SECTOR
    disk = disk_with(old)
    disk.open(A, write=True).write(0, new)

    def kept(image: bytes | None) -> str:
        assert image is not None
        sectors = [image[at : at + SECTOR] for at in range(0, len(image), SECTOR)]
        return "".join("N" if each == b"N" * SECTOR else "." if each == b"." * SECTOR else "?" for each in sectors)

    found = {kept(image) for image in images(disk, A)}

    assert found >= {"....", "NNNN", "N..."}
    assert any(pattern.startswith(".") and "N" in pattern for pattern in found)
    assert any("N." in pattern and pattern.rindex("N") > pattern.index(".") for pattern in found)
    assert any("?" in pattern for pattern in found)


def test_sectors_are_those_of_the_file() -> None:
    """In reordering, a write that begins within a sector is divided where the file's sectors are."""
    disk = disk_with(b"." * 3 * SECTOR)
    disk.open(A, write=True).write(500, b"N" * 600)
    begin = {len(image) - len(image.lstrip(b".")) for image in images(disk, A, "reorder") if image}

    assert begin == {SECTOR, 2 * SECTOR}


def test_a_file_may_grow_without_its_data() -> None:
    """Where the length arrived and the data did not, the file reads as zeros; old bytes stay."""
    disk = disk_with(b"old")
    disk.open(A, write=True).write(1, b"N" * 1000)

    assert images(disk, A, "zero") == {b"old" + bytes(998)}
    assert b"old" + bytes(998) in images(disk, A)


def test_zeros_only_come_where_the_file_grew() -> None:
    """Overwriting what was durable gives old or new bytes, never zeros."""
    disk = disk_with(b"." * 2000)
    disk.open(A, write=True).write(100, b"N" * 1500)

    assert images(disk, A, "zero") == {b"." * 2000}
    assert not any(image is None or 0 in image for image in images(disk, A))


def test_a_hole_may_be_left_before_what_was_kept() -> None:
    """A later append can arrive without an earlier one; the place between reads as zeros."""
    disk = disk_with(b"old")
    file = disk.open(A, write=True)
    file.write(3, b"first")
    file.write(8, b"later")
    hole = b"old" + bytes(5) + b"later"

    assert images(disk, A, "reorder") == {hole}
    assert hole in images(disk, A)


@pytest.mark.parametrize(("first", "later"), [(A, B), (B, A)])
def test_reordering_goes_over_all_files(first: Path, later: Path) -> None:
    """A write to one file can be lost while a later one to another file is kept, never the other way round."""
    disk = SimulatedDisk()
    for path in (A, B):
        disk.write_all(path, b"")
    disk.open(first, write=True).write(0, b"data")
    disk.open(later, write=True).write(0, b"data")

    for seed in SEEDS:
        assert disk.after_crash("reorder", seed=seed).tree() == {first: b"", later: b"data"}


def test_reordering_one_write_keeps_its_end() -> None:
    """With a single pending write of several sectors, its later sectors arrive without the earlier."""
    disk = disk_with(b"")
    disk.open(A, write=True).write(0, b"N" * 3 * SECTOR)

    assert images(disk, A, "reorder") == {bytes(n * SECTOR) + b"N" * (3 - n) * SECTOR for n in (1, 2)}


def test_a_large_write_is_scattered_quickly() -> None:
    """Megabytes that were not synced are kept in some sectors, lost in others, for some seed."""
    disk = disk_with(b"")
    disk.open(A, write=True).write(0, b"N" * (4 << 20))

    found = [disk.after_crash(seed=seed).read_all(A) for seed in range(20)]

    assert any(b"N" in image and 0 in image for image in found)


Change = tuple[str, int, bytes]
changes = st.lists(
    st.tuples(st.sampled_from(["write", "write", "truncate", "sync"]), st.integers(0, 1400), st.binary(max_size=900)),
    max_size=12,
)


@given(changes, st.sampled_from(CRASH_MODES), st.integers(0, 1000))
def test_a_byte_is_old_or_new_or_a_zero_where_the_file_grew(course: list[Change], mode: CrashMode, seed: int) -> None:
    """Whatever was done to a file, each byte after a crash is one that was put there since it was last durable."""
    disk = disk_with(b"")
    file = disk.open(A, write=True)
    durable, pending = b"", list[Change]()
    for what, number, data in course:
        if what == "sync":
            file.sync()
            durable, pending = disk.read_all(A), []
        else:
            file.write(number, data) if what == "write" else file.truncate(number)
            pending.append((what, number, data))
    length_min = min([len(durable), *(number for what, number, _ in pending if what == "truncate")])

    image = disk.after_crash(mode, seed=seed).read_all(A)

    assert len(image) >= length_min
    for at, byte in enumerate(image):
        possible = {durable[at]} if at < len(durable) else set()
        possible |= {0} if at >= length_min else set()
        possible |= {data[at - n] for what, n, data in pending if what == "write" and n <= at < n + len(data)}
        assert byte in possible


# --- Names ---


def synced_file(disk: SimulatedDisk, path: Path, data: bytes) -> None:
    file = disk.open(path, create=True)
    file.write(0, data)
    file.sync()
    file.close()


def test_a_synced_file_without_a_synced_name_may_be_gone() -> None:
    """Syncing a new file's data does not keep its name."""
    disk = SimulatedDisk()
    synced_file(disk, A, b"data")

    assert disk.after_crash("lose_all").tree() == {}
    assert disk.after_crash("zero").tree() == {A: b"data"}
    assert images(disk, A) == {None, b"data"}


def test_a_synced_name_does_not_keep_the_data() -> None:
    """Syncing the folder does not bring a file's bytes to the disk."""
    disk = SimulatedDisk()
    disk.open(A, create=True).write(0, b"data")
    disk.sync_folder(Path())

    assert disk.after_crash("lose_all").tree() == {A: b""}


def test_a_folder_is_a_name_in_the_folder_above() -> None:
    """A file is only as durable as every folder on its path."""
    disk, path = SimulatedDisk(), Path("/ws/wal/a")
    disk.make_folder(path.parent)
    synced_file(disk, path, b"data")
    disk.sync_folder(path.parent)
    disk.sync_folder(Path("/"))
    assert disk.after_crash("lose_all").exists(Path("/ws"))
    assert not disk.after_crash("lose_all").exists(Path("/ws/wal"))

    disk.sync_folder(Path("/ws"))

    assert disk.after_crash("lose_all").tree() == {path: b"data"}


def test_a_removed_file_may_come_back() -> None:
    """Until its folder is synced, a removed file can be there again after a crash."""
    disk = disk_with(b"data")
    disk.remove(A)
    assert images(disk, A) == {None, b"data"}

    disk.sync_folder(Path())

    assert images(disk, A) == {None}


def test_names_survive_in_any_selection() -> None:
    """Of several new names any may survive, not only those made first."""
    disk = SimulatedDisk()
    for name in "abc":
        synced_file(disk, Path(name), b"")

    found = {tuple(disk.after_crash(seed=seed).names(Path())) for seed in SEEDS}

    assert found == {(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")}


@every_mode
def test_a_rename_shows_the_old_or_the_new(mode: CrashMode) -> None:
    """A file that is replaced is never gone and never mixed, though its folder was not synced."""
    disk = disk_with(b"old")
    synced_file(disk, B, b"new")
    disk.rename(B, A)
    found = {tuple(sorted(disk.after_crash(mode, seed=seed).tree().items())) for seed in SEEDS}

    assert found <= {((A, b"old"),), ((A, b"old"), (B, b"new")), ((A, b"new"),)}
    assert len(found) == {"random": 3, "reorder": 2}.get(mode, 1)


@every_mode
def test_a_file_moved_out_of_the_way_is_never_lost(mode: CrashMode) -> None:
    """When a name is taken over by another file, the one that had it is found under its old or its new name."""
    disk = disk_with(b"first")
    disk.rename(A, B)
    synced_file(disk, A, b"second")

    for seed in SEEDS:
        tree = disk.after_crash(mode, seed=seed).tree()
        assert list(tree.values()).count(b"first") == 1
        assert tree.get(B, b"first") == b"first"


@every_mode
def test_a_move_between_folders_is_one_change(mode: CrashMode) -> None:
    """A file moved to another folder is in one of the two, and in the new one once either is synced."""
    there = Path("f/a")
    disk = disk_with(b"data")
    disk.write_all(Path("f/other"), b"")
    disk.rename(A, there)
    for seed in SEEDS:
        tree = disk.after_crash(mode, seed=seed).tree()
        assert [path for path in tree if tree[path] == b"data"] in ([A], [there])

    for folder in (Path(), there.parent):
        synced = disk.clone()
        synced.sync_folder(folder)
        assert images(synced, there, mode) == {b"data"}
        assert images(synced, A, mode) == {None}


def test_a_late_sync_does_not_bring_back_what_was_replaced() -> None:
    """Syncing the second folder of a move does not undo what the first one's sync made durable."""
    there = Path("f/a")
    disk = disk_with(b"moved")
    disk.write_all(Path("f/other"), b"")
    synced_file(disk, there, b"replaced")
    disk.rename(A, there)

    disk.sync_folder(Path())
    disk.sync_folder(there.parent)

    assert disk.after_crash("lose_all").read_all(there) == b"moved"


NAMES = [Path(text) for text in ("a", "b", "f/a", "f/b")]
Naming = tuple[str, Path, Path]
namings = st.lists(
    st.tuples(
        st.sampled_from(["create", "rename", "rename", "remove", "sync_folder"]),
        st.sampled_from(NAMES),
        st.sampled_from(NAMES),
    ),
    max_size=15,
)


@given(namings, st.sampled_from(CRASH_MODES), st.integers(0, 1000))
def test_no_file_is_doubled_or_lost_without_cause(course: list[Naming], mode: CrashMode, seed: int) -> None:
    """A file is found at most once after a crash, and surely once if it was durable and nothing took its place."""
    disk = SimulatedDisk()
    disk.write_all(Path("a"), b"0")
    disk.write_all(Path("f/b"), b"1")
    durable, endangered = {b"0", b"1"}, set[bytes]()
    for number, (what, path, other) in enumerate(course, 2):
        tree = disk.tree()
        if what == "create":
            if path not in tree:
                synced_file(disk, path, str(number).encode())
        elif what == "sync_folder":
            for folder in (Path(), Path("f")):
                disk.sync_folder(folder)
            assert disk.after_crash(mode, seed=seed).tree() == disk.tree()
            durable, endangered = set(disk.tree().values()), set()
        elif path in tree and (what == "remove" or path != other):
            if what == "remove":
                disk.remove(path)
                endangered.add(tree[path])
            else:
                disk.rename(path, other)
                endangered.add(tree.get(other, b"nobody"))

    survivors = list(disk.after_crash(mode, seed=seed).tree().values())

    assert len(survivors) == len(set(survivors))
    assert set(survivors) >= durable - endangered
    assert disk.after_crash("keep_all").tree() == disk.tree()
    assert set(disk.after_crash("lose_all").tree().values()) == durable


# --- Stopping ---


def replacing(disk: Disk) -> None:
    replace_file(disk, A, b"new" * 500)


OLD, NEW = b"old" * 500, b"new" * 500


@pytest.mark.parametrize("within", [False, True])
@every_mode
def test_replacing_a_file_is_safe_wherever_it_stops(mode: CrashMode, within: bool) -> None:
    """Stopped after or within any of its calls, replacing a file leaves the old content or the new, whole."""
    whole = disk_with(OLD)
    replacing(whole)
    assert whole.calls == 5

    for stop in range(1, whole.calls + 1):
        disk = disk_with(OLD)
        disk.crash_after, disk.crash_within = stop, within
        with pytest.raises(SimulatedCrash):
            replacing(disk)
        found = {disk.after_crash(mode, seed=seed).read_all(A) for seed in range(20)}
        assert found <= {OLD, NEW}
        if stop == whole.calls and not within:
            assert found == {NEW}


def test_the_call_it_stops_after_is_carried_out() -> None:
    """A crash after a sync finds the data durable, though the caller was never told."""
    disk = disk_with(b"old")
    disk.crash_after = 2
    file = disk.open(A, write=True)
    file.write(0, b"new")

    with pytest.raises(SimulatedCrash, match="stopped at disk call 2: sync a") as crash:
        file.sync()

    assert crash.value.last == (2, "sync", A)
    assert disk.is_crashed
    assert disk.after_crash("lose_all").read_all(A) == b"new"


def test_the_call_it_stops_within_is_not_finished() -> None:
    """A crash within a sync leaves the data to chance, and one within a rename leaves the old name."""
    disk = disk_with(b"old")
    disk.crash_within = True
    file = disk.open(A, write=True)
    file.write(0, b"new")
    other = disk.clone()

    disk.crash_after = 2
    with pytest.raises(SimulatedCrash):
        file.sync()
    other.crash_after = 2
    with pytest.raises(SimulatedCrash):
        other.rename(A, B)

    assert images(disk, A) >= {b"old", b"new"}
    assert set(other.tree()) == {A}


def test_a_write_it_stops_within_is_partly_done() -> None:
    """A crash within a write gets some of the bytes out, but not all, and not always as many."""
    found = set()
    for seed in SEEDS:
        disk = SimulatedDisk(seed, crash_after=1, crash_within=True)
        disk.write_all(A, b"")
        with pytest.raises(SimulatedCrash):
            disk.open(A, write=True).write(0, b"abcd")
        found.add(disk.after_crash("keep_all").read_all(A))

    assert found == {b"a", b"ab", b"abc"}


def test_folders_it_stops_within_are_partly_made() -> None:
    """A crash within making several folders leaves the upper ones without the lower ones."""
    disk = SimulatedDisk(crash_after=1, crash_within=True)
    with pytest.raises(SimulatedCrash):
        disk.make_folder(Path("a/b/c/d"))

    after = disk.after_crash("keep_all")

    assert after.exists(Path("a/b"))
    assert not after.exists(Path("a/b/c"))


def test_nothing_works_after_a_crash() -> None:
    """A stopped machine neither reads nor writes; only letting go of what was held is allowed."""
    disk = disk_with(b"data")
    file = disk.open(A, write=True)
    lock = disk.lock(Path("lock"))
    assert not isinstance(lock, str)
    disk.crash_after = disk.calls
    calls: list[Callable[[], object]] = [
        lambda: file.read(0, 1),
        lambda: file.write(0, b"x"),
        lambda: file.truncate(0),
        lambda: file.sync(),
        lambda: file.size(),
        lambda: disk.open(A),
        lambda: disk.names(Path()),
        lambda: disk.exists(A),
        lambda: disk.make_folder(B),
        lambda: disk.rename(A, B),
        lambda: disk.remove(A),
        lambda: disk.sync_folder(Path()),
        lambda: disk.lock(B),
    ]

    for call in calls:
        with pytest.raises(SimulatedCrash):
            call()
    file.close()
    lock.release()

    assert disk.calls == 1
    assert disk.read_all(A) == b"data"


def test_a_handler_for_errors_does_not_catch_a_crash() -> None:
    """A crash is no ``Exception``: code that lives with faults does not live through it."""
    disk = SimulatedDisk(crash_after=0)
    survived = []

    def careful() -> None:
        try:
            disk.exists(A)
        except Exception:  # noqa: BLE001 (the handler that must not catch it)
            survived.append("the crash")

    with pytest.raises(SimulatedCrash, match="before its first disk call"):
        careful()
    assert not survived


def busy(disk: SimulatedDisk) -> None:
    for number in range(6):
        path = Path(f"f{number}")
        file = disk.open(path, create=True)
        file.write(0, bytes([number]) * 3000)
        if number % 2:
            file.sync()
        file.write(1500, b"again" * 100)
    disk.rename(Path("f1"), Path("f2"))


@every_mode
def test_everything_follows_from_the_seed(mode: CrashMode) -> None:
    """Two disks with one seed and one course of calls are the same after a crash, and after the next one."""
    trees = []
    for _ in range(2):
        disk = SimulatedDisk(seed=11, crash_after=15, crash_within=True)
        with pytest.raises(SimulatedCrash):
            busy(disk)
        again = disk.after_crash(mode)
        busy(again)
        trees.append((disk.after_crash(mode).tree(), again.after_crash(mode).tree(), again.seed))

    assert trees[0] == trees[1]


def test_other_seeds_give_other_crashes() -> None:
    """The outcome of a random crash depends on the disk's seed, and on one given for that crash."""
    disks = [SimulatedDisk(seed) for seed in range(20)]
    for disk in disks:
        busy(disk)

    assert len({str(disk.after_crash().tree()) for disk in disks}) > 10
    assert len({str(disks[0].after_crash(seed=seed).tree()) for seed in SEEDS}) > 100


def test_a_crash_leaves_the_crashed_disk_as_it_is() -> None:
    """Asking what a crash would leave changes nothing, so that many outcomes can be looked at."""
    disk = SimulatedDisk(seed=5)
    busy(disk)
    before, calls = disk.tree(), disk.calls

    outcomes = [disk.after_crash(mode).tree() for mode in CRASH_MODES]
    after = disk.after_crash("keep_all")
    after.write_all(Path("f3"), b"changed")
    after.open(Path("f5"), write=True).write(0, b"changed")

    assert (disk.tree(), disk.calls) == (before, calls)
    assert [disk.after_crash(mode).tree() for mode in CRASH_MODES] == outcomes


def test_after_a_crash_all_that_is_there_is_durable() -> None:
    """What one crash has left, a second one right after does not take away."""
    disk = SimulatedDisk(seed=5)
    busy(disk)

    for seed in SEEDS:
        once = disk.after_crash(seed=seed)
        assert once.after_crash("lose_all").tree() == once.tree()


@every_mode
def test_what_comes_after_a_crash_is_pending_again(mode: CrashMode) -> None:
    """On the disk that a crash has left, new writes are lost like any others until they are synced."""
    disk = disk_with(b"old")
    disk.open(A, write=True).write(3, b" and new")
    after = disk.after_crash(mode)
    left = after.read_all(A)
    file = after.open(A, write=True)

    file.write(0, b"again")
    assert after.after_crash("lose_all").read_all(A) == left
    file.sync()
    assert after.after_crash("lose_all").read_all(A) == after.read_all(A) == b"again" + left[5:]
    assert disk.read_all(A) == b"old and new"


def test_an_unknown_mode_is_refused() -> None:
    """A misspelt mode is an error, not some crash."""
    with pytest.raises(ValueError, match="no such crash mode"):
        SimulatedDisk().after_crash("lose-all")  # type: ignore[arg-type]
