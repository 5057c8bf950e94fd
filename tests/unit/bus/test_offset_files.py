"""Offset files: atomic, with a backup that a crash spares, and sealed against other hands."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.bus.errors import CursorDamaged
from tidings.bus.store import Cursor, GroupPosition
from tidings.bus.store.offset_files import OffsetFiles
from tidings.core.errors import InvalidName
from tidings.log.embedded.disk import read_file, replace_file
from tidings.log.errors import EpochMismatch
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk, VirtualClock

FOLDER = Path("/data/offsets")
FILE = FOLDER / "actions__learner.json"
BACKUP = FOLDER / "actions__learner.json.bak"
KEY = b"a key of this device"


def store(disk: SimulatedDisk, *, epoch: str = "e1", key: bytes | None = None) -> OffsetFiles:
    return OffsetFiles(disk, FOLDER, VirtualClock(), epoch, key)


def content_of(disk: SimulatedDisk, path: Path = FILE) -> dict[str, Any]:
    data = read_file(disk, path)
    assert data is not None
    content: dict[str, Any] = json.loads(data)
    return content


def edit(disk: SimulatedDisk, path: Path = FILE, **changes: Any) -> None:
    """Change a file by hand, with a checksum that fits."""
    content = content_of(disk, path) | changes
    del content["crc"]
    body = json.dumps({name: value for name, value in content.items() if value is not None}).encode()[1:]
    replace_file(disk, path, b'{"crc":"%08x",%b\n' % (zlib.crc32(body), body))


@pytest.mark.parametrize("mode", CRASH_MODES)
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "of another process"])
def test_a_group_can_be_loaded_wherever_the_power_goes_while_it_is_stored_first(
    mode: CrashMode, is_known: bool
) -> None:
    """A group that is being created does not exist, or has a whole file; so has one that a killed process stored."""
    for seed in range(8):
        for calls in range(1, 40):
            disk = SimulatedDisk(seed)
            if is_known:
                store(disk).save("actions", "learner", GroupPosition(Cursor(3), {}), sync=False)
            disk.crash_after = disk.calls + calls
            try:
                store(disk).save("actions", "learner", GroupPosition(Cursor(7), {}), sync=False)
            except SimulatedCrash:
                place = store(disk.after_crash(mode, seed=seed)).load("actions", "learner")
                assert place is None or place.cursor.committed in (3, 7)


@pytest.mark.req("F33")
def test_a_place_comes_back_whole() -> None:
    """Committed offset, ranges, attempts and the pause come back; the file has the document's three fields."""
    disk = SimulatedDisk(0)
    store(disk).save("actions", "learner", GroupPosition(Cursor(7, [(9, 11)]), {8: 2}, True), segment=3)

    place = store(disk).load("actions", "learner")

    assert place is not None
    assert (place.cursor.committed, place.cursor.ranges, place.attempts, place.paused) == (7, [(9, 11)], {8: 2}, True)
    content = content_of(disk)
    assert (content["committed"], content["segment"]) == (7, 3)
    assert re.fullmatch(r"2026-01-01T00:00:00\.\d{6}Z", content["ts"])


def test_a_new_group_has_no_place() -> None:
    """Nothing stored is not the same as the beginning."""
    assert store(SimulatedDisk(0)).load("actions", "learner") is None


def test_groups_are_told_by_their_names() -> None:
    """Every stored group is listed once, under the names it was stored by; other files are none."""
    disk = SimulatedDisk(0)
    offsets = store(disk)
    pairs = [("a", "b"), ("a", "b.c"), ("a.b", "c"), ("a_b", "c_d")]
    for topic, group in pairs:
        offsets.save(topic, group, GroupPosition(Cursor(1), {}))
        offsets.save(topic, group, GroupPosition(Cursor(2), {}))
    disk.write_all(FOLDER / "a__x.json.new", b"cut off")
    disk.write_all(FOLDER / "README", b"")

    assert sorted(offsets.groups()) == sorted(pairs)


@pytest.mark.parametrize("name", ["../up", "a/b", "a__b", "", "."])
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    """A name with a path in it is refused for topics and groups alike."""
    offsets = store(SimulatedDisk(0))

    with pytest.raises(InvalidName):
        offsets.save("actions", name, GroupPosition(Cursor(), {}))
    with pytest.raises(InvalidName):
        offsets.load(name, "learner")


def test_a_removed_group_is_new_again() -> None:
    """Nothing is left of a group that was removed, its backup neither."""
    disk = SimulatedDisk(0)
    offsets = store(disk)
    for n in range(3):
        offsets.save("actions", "learner", GroupPosition(Cursor(n), {}))

    offsets.remove("actions", "learner")

    assert offsets.load("actions", "learner") is None
    assert offsets.groups() == []


@pytest.mark.req("F69")
@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_cut_file_leads_to_the_backup(cut: int) -> None:
    """Cut anywhere, the file is passed over for the last place that was synced."""
    disk = SimulatedDisk(0)
    offsets = store(disk)
    offsets.save("actions", "learner", GroupPosition(Cursor(3), {}))
    offsets.save("actions", "learner", GroupPosition(Cursor(5), {}), sync=False)
    data = read_file(disk, FILE)
    assert data is not None
    replace_file(disk, FILE, data[: min(cut, len(data) - 1)])

    place = store(disk).load("actions", "learner")

    assert place is not None
    assert place.cursor.committed == 3


def test_a_damaged_file_never_pushes_out_the_good_backup() -> None:
    """Saving after a fall-back keeps the backup until there is another whole file, also if that save is cut short."""
    disk = SimulatedDisk(0)
    offsets = store(disk)
    offsets.save("actions", "learner", GroupPosition(Cursor(3), {}))
    offsets.save("actions", "learner", GroupPosition(Cursor(5), {}), sync=False)
    replace_file(disk, FILE, b"gone")
    for calls in range(12):
        world = disk.clone()
        fresh = store(world)
        assert fresh.load("actions", "learner") is not None
        world.crash_after = world.calls + calls
        try:
            fresh.save("actions", "learner", GroupPosition(Cursor(4), {}))
        except SimulatedCrash:
            world = world.after_crash("keep_all")
        place = store(world).load("actions", "learner")
        assert place is not None
        assert place.cursor.committed in (3, 4)


def test_without_any_whole_file_the_place_is_not_guessed() -> None:
    """If file and backup are both damaged the group is refused by name; its place can be set anew."""
    disk = SimulatedDisk(0)
    for n in range(2):
        store(disk).save("actions", "learner", GroupPosition(Cursor(n), {}))
    replace_file(disk, FILE, b"")
    replace_file(disk, BACKUP, b"")

    with pytest.raises(CursorDamaged) as caught:
        store(disk).load("actions", "learner")
    assert caught.value.path == str(FILE)

    store(disk).save("actions", "learner", GroupPosition(Cursor(0), {}))
    assert store(disk).load("actions", "learner") is not None


def test_another_epochs_place_is_refused() -> None:
    """Offsets of another life of the log mean nothing in this one."""
    disk = SimulatedDisk(0)
    store(disk, epoch="e1").save("actions", "learner", GroupPosition(Cursor(3), {}))

    with pytest.raises(EpochMismatch):
        store(disk, epoch="e2").load("actions", "learner")


@pytest.mark.req("F69", "F131")
@given(
    syncs=st.lists(st.booleans(), min_size=1, max_size=8),
    calls=st.integers(1, 80),
    within=st.booleans(),
    mode=st.sampled_from(CRASH_MODES),
    seed=st.integers(0, 100),
)
def test_a_power_cut_leaves_at_least_the_last_synced_place(
    syncs: list[bool], calls: int, within: bool, mode: CrashMode, seed: int
) -> None:
    """Stopped at any call, the next process finds a place that was saved, and none older than the last that was synced."""
    disk = SimulatedDisk(seed)
    disk.make_folder(FOLDER)
    for folder in (Path("/"), Path("/data")):
        disk.sync_folder(folder)
    disk.crash_after, disk.crash_within = disk.calls + calls, within
    offsets = store(disk)
    synced, saved = -1, -1
    try:
        for n, sync in enumerate(syncs):
            saved = n
            offsets.save("actions", "learner", GroupPosition(Cursor(n), {}), sync=sync)
            synced = n if sync else synced
    except SimulatedCrash:
        pass

    after = disk.after_crash(mode, seed=seed)
    try:
        place = store(after).load("actions", "learner")
    except CursorDamaged:
        assert synced == -1, "a place that was synced is lost"
        return

    found = -1 if place is None else place.cursor.committed
    assert synced <= found <= saved


# Seals


@pytest.mark.req("F137")
@pytest.mark.parametrize("key", [None, KEY])
def test_each_save_vouches_for_the_one_before(key: bytes | None) -> None:
    """Every file carries the seal of the file that it replaced, also across a restart."""
    disk = SimulatedDisk(0)
    seals = [""]
    for n in range(4):
        offsets = store(disk, key=key)
        offsets.load("actions", "learner")
        offsets.save("actions", "learner", GroupPosition(Cursor(n), {}))
        offsets.save("actions", "learner", GroupPosition(Cursor(n), {}), sync=False)
        assert content_of(disk, BACKUP)["seal"] == content_of(disk)["seal_before"]
        assert content_of(disk, BACKUP).get("seal_before", "") == seals[-1]
        seals.append(content_of(disk)["seal"])

    assert len(set(seals)) == 5


@pytest.mark.req("F137")
@pytest.mark.parametrize(
    "changes",
    [
        {"committed": 9},
        {"committed": 2},
        {"islands": [[7, 9]]},
        {"attempts": {"6": 0}},
        {"paused": False},
        {"epoch": ""},
        {"seal": "0" * 32},
        {"seal": None},
        {"seal_before": "0" * 32},
    ],
    ids=str,
)
def test_with_a_key_an_edited_file_is_refused(changes: dict[str, Any]) -> None:
    """Whoever edits the file and recomputes its checksum cannot make its seal: the file is named, nothing is guessed."""
    disk = SimulatedDisk(0)
    sealed = store(disk, key=KEY)
    for n in (4, 5):
        sealed.save("actions", "learner", GroupPosition(Cursor(n), {6: 1}, True))
    edit(disk, **changes)

    with pytest.raises(CursorDamaged, match="seal") as caught:
        store(disk, key=KEY).load("actions", "learner")

    assert caught.value.path == str(FILE)


@pytest.mark.req("F137")
def test_with_a_key_an_edited_backup_is_refused_too() -> None:
    """Damaging the file to have an edited backup taken does not help."""
    disk = SimulatedDisk(0)
    sealed = store(disk, key=KEY)
    for n in (4, 5):
        sealed.save("actions", "learner", GroupPosition(Cursor(n), {}))
    edit(disk, BACKUP, committed=6)
    replace_file(disk, FILE, b"")

    with pytest.raises(CursorDamaged) as caught:
        store(disk, key=KEY).load("actions", "learner")

    assert caught.value.path == str(BACKUP)


@pytest.mark.req("F137")
def test_another_key_does_not_fit() -> None:
    """A file sealed with one key, or with none, is refused with another; with its own it is taken."""
    disk = SimulatedDisk(0)
    store(disk, key=KEY).save("actions", "learner", GroupPosition(Cursor(4), {}))
    with pytest.raises(CursorDamaged):
        store(disk, key=b"another").load("actions", "learner")
    assert store(disk, key=KEY).load("actions", "learner") is not None
    store(disk).save("actions", "learner", GroupPosition(Cursor(4), {}))
    with pytest.raises(CursorDamaged):
        store(disk, key=KEY).load("actions", "learner")


def test_without_a_key_an_edited_file_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The checksum decides; that somebody else wrote the file is said, because repairing the log does so too."""
    disk = SimulatedDisk(0)
    store(disk).save("actions", "learner", GroupPosition(Cursor(4), {}))
    edit(disk, committed=3)

    place = store(disk).load("actions", "learner")

    assert place is not None
    assert place.cursor.committed == 3
    assert "changed by other hands" in caplog.text


def copy_group(disk: SimulatedDisk, source: str, target: str) -> None:
    for end in (".json", ".json.bak"):
        data = read_file(disk, FOLDER / f"{source}{end}")
        assert data is not None
        replace_file(disk, FOLDER / f"{target}{end}", data)


@pytest.mark.parametrize("target", ["actions__slow", "other__learner"])
def test_the_file_of_another_group_is_refused(target: str) -> None:
    """A good file of one group, put in the place of another's, of its topic or not, has no good seal there."""
    disk = SimulatedDisk(0)
    sealed = store(disk, key=KEY)
    topic, group = target.split("__")
    for n in range(2):
        sealed.save("actions", "learner", GroupPosition(Cursor(50 + n), {}))
        sealed.save(topic, group, GroupPosition(Cursor(n), {}))
    copy_group(disk, "actions__learner", target)

    after = store(disk, key=KEY)
    with pytest.raises(CursorDamaged, match="seal"):
        after.load(topic, group)
    assert after.acknowledged(topic)[topic][group] is None
    position = after.load("actions", "learner")
    assert position is not None
    assert position.cursor.committed == 51


def old_seals(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Seal as earlier versions did: the content only."""
    seal_of = OffsetFiles._seal_of
    monkeypatch.setattr(OffsetFiles, "_seal_of", lambda self, stored, *_: seal_of(self, stored))
    return monkeypatch


def test_files_of_earlier_versions_are_accepted_until_the_group_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old seal is good where no new file of the group is, and in the backup that the new file follows; elsewhere it is refused."""
    disk = SimulatedDisk(0)
    with old_seals(monkeypatch).context() as patch:
        old_seals(patch)
        before = store(disk, key=KEY)
        for n in range(2):
            before.save("actions", "learner", GroupPosition(Cursor(n), {}))
            before.save("actions", "slow", GroupPosition(Cursor(40 + n), {}))
    monkeypatch.undo()

    after = store(disk, key=KEY)
    position = after.load("actions", "learner")
    assert position is not None
    assert position.cursor.committed == 1
    after.save("actions", "learner", GroupPosition(Cursor(2), {}))
    assert after.acknowledged("actions")["actions"]["learner"] is not None
    old = read_file(disk, FOLDER / "actions__slow.json")
    assert old is not None
    replace_file(disk, FILE, old)
    after.save("actions", "slow", GroupPosition(Cursor(42), {}))
    replace_file(disk, BACKUP, read_file(disk, FOLDER / "actions__slow.json") or b"")

    assert store(disk, key=KEY).acknowledged("actions")["actions"]["learner"] is None


def test_a_file_with_an_old_seal_is_refused_beside_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a group was stored with the new seal, a file with an old one, even of its own, is refused unless it is the backup before."""
    disk = SimulatedDisk(0)
    with pytest.MonkeyPatch.context() as patch:
        old_seals(patch)
        store(disk, key=KEY).save("actions", "slow", GroupPosition(Cursor(40), {}))
        store(disk, key=KEY).save("actions", "learner", GroupPosition(Cursor(1), {}))
    old = read_file(disk, FOLDER / "actions__slow.json")
    assert old is not None
    sealed = store(disk, key=KEY)
    sealed.load("actions", "learner")
    for n in range(3):
        sealed.save("actions", "learner", GroupPosition(Cursor(2 + n), {}))
    replace_file(disk, FILE, old)

    with pytest.raises(CursorDamaged, match="seal"):
        store(disk, key=KEY).load("actions", "learner")
