"""Repair keeps the longest whole history, destroys nothing, and says so when history was replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.conformance.support import append_all, drop_sealed, event, read_all, until
from tidings.log import LogSettings, Query
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.index import MemoryIndex
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.repair import RepairOutdated, RepairResult, carry_out
from tidings.log.embedded.repair_plan import RepairPlan, plan_repair
from tidings.log.embedded.verify import verify
from tidings.log.errors import CorruptLog, WorkspaceBusy
from tidings.log.segment import CRC_HEAD_BYTES, encode_line, is_whole
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk, VirtualClock

ROOT: Final = Path("/w")
LAYOUT: Final = Layout(ROOT)
SETTINGS: Final = LogSettings(journal_bytes=1 << 20, segment_lines_max=4)
SPACES: Final = LogSettings(journal_bytes=1 << 20, segment_lines_max=4, layout="space")
A: Final = StreamKey("a")
B: Final = StreamKey("b")


async def open_on(disk: SimulatedDisk, settings: LogSettings = SETTINGS) -> EmbeddedLog:
    """Open a log in the simulated world."""
    return await open_log(ROOT, settings, clock=VirtualClock(), disk=disk, index=MemoryIndex())


async def make_healthy(settings: LogSettings = SETTINGS) -> SimulatedDisk:
    """A closed log: ten records in topic a (two sealed segments and an open one), three in b, interleaved."""
    disk = SimulatedDisk()
    log = await open_on(disk, settings)
    for n in range(10):
        await append_all(log, [event("a", {"n": n}, event_id=f"a{n}")])
        if n % 4 == 0:
            await append_all(log, [event("b", {"n": n})])
    await log.close()
    return disk


async def make_crashed() -> SimulatedDisk:
    """The same, with records in the journal only: two batches of each topic."""
    disk = await make_healthy()
    log = await open_on(disk)
    for n in (10, 11):
        await append_all(log, [event("a", {"n": n}), event("b", {"n": n})])
    return disk.after_crash("lose_all")


def lines_of(disk: SimulatedDisk, path: Path) -> list[bytes]:
    """The lines of a file, with their newlines."""
    return disk.read_all(path).splitlines(keepends=True)


def flip_line(disk: SimulatedDisk, path: Path, line: int) -> None:
    """Damage one line of a file."""
    disk.flip(path, sum(map(len, lines_of(disk, path)[:line])) + 60, 0x04)


def journal_of(disk: SimulatedDisk) -> Path:
    """The journal file that holds something."""
    return next(p for p, data in disk.tree().items() if p.parent == LAYOUT.journal and data.rstrip(b"\0"))


def flip_journal(disk: SimulatedDisk, text: bytes) -> None:
    """Damage the journal's line with this text."""
    path = journal_of(disk)
    disk.flip(path, disk.read_all(path).index(text) + 3, 0x01)


def append_bytes(disk: SimulatedDisk, path: Path, data: bytes) -> None:
    """Add bytes that nobody asked for."""
    disk.write_all(path, disk.read_all(path) + data)


def set_cursor(disk: SimulatedDisk, committed: int, name: str = "a__workers.json", **more: Any) -> None:
    """Give topic a a group."""
    cursor = {"committed": committed, "segment": 3, "ts": "2026-01-01T00:00:00Z", **more}
    disk.write_all(LAYOUT.offsets / name, encode_line(msgspec.json.encode(cursor)[1:]))


def cursor_of(disk: SimulatedDisk, name: str = "a__workers.json") -> dict[str, Any]:
    """What a cursor file says; its checksum must match."""
    data = disk.read_all(LAYOUT.offsets / name)
    assert is_whole(data.removesuffix(b"\n"))
    cursor: dict[str, Any] = msgspec.json.decode(data)
    del cursor["crc"]
    return cursor


def flip_seal(disk: SimulatedDisk) -> None:
    """Damage the first seal of topic a."""
    disk.flip(LAYOUT.seal_file(A), 40, 0x01)


def tamper(disk: SimulatedDisk) -> None:
    """Rewrite a sealed line together with its checksum."""
    path = LAYOUT.segment(A, 1)
    first, *rest = lines_of(disk, path)
    body = first[CRC_HEAD_BYTES:-1].replace(b'{"n":0}', b'{"n":7}')
    disk.write_all(path, encode_line(body) + b"".join(rest))


Damage = Callable[[SimulatedDisk], None]

LOSSLESS: Final[dict[str, tuple[bool, Damage]]] = {
    "damaged checkpoint": (False, lambda disk: disk.flip(LAYOUT.checkpoint, 30, 0x01)),
    "bytes behind a sealed segment": (False, lambda disk: append_bytes(disk, LAYOUT.segment(A, 1), b"junk\n")),
    "bytes behind an open segment": (False, lambda disk: append_bytes(disk, LAYOUT.segment(A, 3), b"junk")),
    "a repeated line": (
        False,
        lambda disk: append_bytes(disk, LAYOUT.segment(B, 1), lines_of(disk, LAYOUT.segment(B, 1))[0]),
    ),
    "a broken seal": (False, flip_seal),
}
"""Kinds of damage that cost no record: whether a journal is there, and how to do it."""

LOSSY: Final[dict[str, tuple[bool, Damage, int, list[int], int]]] = {
    # what is left of topic a: its payloads; and how many of topic b
    "a line of the first segment": (False, lambda d: flip_line(d, LAYOUT.segment(A, 1), 1), 4, [4, 5, 6, 7, 8, 9], 3),
    "a line of a later segment": (False, lambda d: flip_line(d, LAYOUT.segment(A, 2), 2), 4, [0, 1, 2, 3, 4, 5], 3),
    "a line of the open segment": (False, lambda d: flip_line(d, LAYOUT.segment(A, 3), 1), 1, list(range(9)), 3),
    "a missing sealed segment": (False, lambda d: d.remove(LAYOUT.segment(A, 1)), 4, [4, 5, 6, 7, 8, 9], 3),
    "a missing segment in between": (False, lambda d: d.remove(LAYOUT.segment(A, 2)), 6, [0, 1, 2, 3], 3),
    "a missing open segment": (False, lambda d: d.remove(LAYOUT.segment(A, 3)), 2, list(range(8)), 3),
    "a missing topic": (False, lambda d: d.remove(LAYOUT.segment(B, 1)), 3, list(range(10)), 0),
    "a rewritten line": (False, tamper, 4, [4, 5, 6, 7, 8, 9], 3),
    "a cursor ahead": (False, lambda d: set_cursor(d, 12), 0, list(range(10)), 3),
    "a damaged frame": (True, lambda d: flip_journal(d, b'{"n":10}'), 2, list(range(10)), 5),
}
"""Kinds of damage that cost records: also how many, and what topics a and b still hold."""


async def damaged(has_journal: bool, damage: Damage) -> SimulatedDisk:
    """A log with one kind of damage."""
    disk = await (make_crashed() if has_journal else make_healthy())
    damage(disk)
    return disk


def plan_on(disk: SimulatedDisk, settings: LogSettings = SETTINGS) -> RepairPlan:
    """Plan, and see that nothing was changed by it."""
    before, calls = disk.tree(), disk.calls
    plan = plan_repair(disk, LAYOUT, settings)
    assert (disk.tree(), disk.calls) == (before, calls)
    return plan


def repair(disk: SimulatedDisk, settings: LogSettings = SETTINGS) -> tuple[RepairPlan, RepairResult]:
    """Plan and carry out; check the copies, and that the log is clean afterwards."""
    before = disk.tree()
    plan = plan_on(disk, settings)
    result = carry_out(disk, LAYOUT, plan, VirtualClock())
    assert result.folder is not None
    for each in plan.aside:
        original = before[LAYOUT.root / each.path][each.byte_offset : each.byte_offset + each.size]
        assert disk.read_all(ROOT / result.folder / each.copy_name) == original
    assert nothing_is_lost(before, disk)
    assert verify(disk, LAYOUT, settings, ids=True).findings == ()
    return plan, result


def nothing_is_lost(before: dict[Path, bytes], disk: SimulatedDisk) -> bool:
    """Whether every byte of the files there were is where it was, or in a copy that its manifest describes."""
    after = disk.tree()
    manifests = [path for path in after if path.name == "manifest.json"]
    copies: dict[Path, list[tuple[int, bytes]]] = {}
    for manifest in manifests:
        for each in msgspec.json.decode(after[manifest])["aside"]:
            copy = (each["byte_offset"], after[manifest.parent / each["copy"]])
            copies.setdefault(LAYOUT.root / each["path"], []).append(copy)
    for path, data in before.items():
        if path == LAYOUT.lock or data == after.get(path):
            continue
        held = bytearray(after.get(path, b"")[: len(data)].ljust(len(data), b"\0"))
        is_same = held == data
        for offset, piece in copies.get(path, []):
            trial = bytearray(held)
            trial[offset : offset + len(piece)] = piece
            is_same = is_same or trial == data
        if not is_same:
            return False
    return True


async def contents(disk: SimulatedDisk, settings: LogSettings = SETTINGS) -> dict[str, list[Any]]:
    """Open the log, read everything, and see that it takes events; the payloads by topic."""
    log = await open_on(disk, settings)
    found: dict[str, list[Any]] = {"a": [], "b": []}
    for topic in log.topics():
        info = log.topics()[topic]
        records = await read_all(log, Query(topic=topic, from_offset=info.first_offset)) if info.segments else []
        found[topic] = [record.payload["n"] for record in records]
    await append_all(log, [event("a", {"n": "new"}), event("b", {"n": "new"})])
    await log.close()
    return found


def epoch_of(disk: SimulatedDisk) -> str:
    """The log's epoch."""
    return LAYOUT.read_meta(disk).epoch


CRASHED_REPAIRS: Final = ["a line of the first segment", "a line of a later segment", "a damaged frame"]


async def crash_and_repair_again(kind: str, mode: CrashMode, *, first: int, step: int) -> None:
    """Stop a repair at every ``step``-th of its disk calls, repair what is left, and compare with one that ran through."""
    has_journal, damage, _, left_of_a, left_of_b = LOSSY[kind]
    start = await damaged(has_journal, damage)
    before, epoch, calls = start.tree(), epoch_of(start), start.calls
    plan = plan_on(start)
    whole = start.clone()
    carry_out(whole, LAYOUT, plan, VirtualClock())
    assert calls + first <= whole.calls
    for stop in range(calls + first, whole.calls + 1, step):
        crash_within = bool((stop + CRASH_MODES.index(mode)) % 2)
        disk = start.clone()
        disk.crash_after, disk.crash_within = stop, crash_within
        with pytest.raises(SimulatedCrash):
            carry_out(disk, LAYOUT, plan, VirtualClock())
        left = disk.after_crash(mode, seed=stop)
        assert nothing_is_lost(before, left), (stop, crash_within)
        again = plan_repair(left, LAYOUT, SETTINGS)
        if again.is_needed:
            carry_out(left, LAYOUT, again, VirtualClock())
        assert nothing_is_lost(before, left), (stop, crash_within)
        assert epoch_of(left) != epoch, (stop, crash_within)
        assert verify(left, LAYOUT, SETTINGS).is_sound, (stop, crash_within)
        found = await contents(left)
        assert (found["a"], len(found["b"])) == (left_of_a, left_of_b), (stop, crash_within)


class TestNothingToDo:
    @pytest.mark.parametrize("has_journal", [False, True])
    async def test_a_sound_log_is_left_alone(self, has_journal: bool) -> None:
        """A healthy log, and one that recovery can handle, need no repair; carrying that out changes nothing."""
        disk = await (make_crashed() if has_journal else make_healthy())
        plan = plan_on(disk)
        before = disk.tree()
        result = carry_out(disk, LAYOUT, plan, VirtualClock())

        assert not plan.is_needed
        assert not plan.loses_records
        assert (result.folder, result.epoch) == (None, epoch_of(disk))
        assert {path: data for path, data in disk.tree().items() if path != LAYOUT.lock} == {
            path: data for path, data in before.items() if path != LAYOUT.lock
        }

    @pytest.mark.req("F71")
    async def test_a_torn_tail_is_left_to_recovery(self) -> None:
        """What opening the log mends by itself is no matter for repair."""
        disk = await make_crashed()
        append_bytes(disk, LAYOUT.segment(A, 3), b'{"crc":"0000')

        assert not plan_on(disk).is_needed
        assert (await contents(disk))["a"] == list(range(12))


class TestDamage:
    @pytest.mark.req("F71")
    @pytest.mark.parametrize("kind", LOSSLESS)
    async def test_damage_that_costs_no_record(self, kind: str) -> None:
        """Every record stays, and so does the epoch."""
        disk = await damaged(*LOSSLESS[kind])
        epoch = epoch_of(disk)
        plan, result = repair(disk)

        assert (plan.is_needed, plan.loses_records, plan.lost_count) == (True, False, 0)
        assert (result.is_new_epoch, result.epoch, epoch_of(disk)) == (False, epoch, epoch)
        assert await contents(disk) == {"a": list(range(10)), "b": [0, 4, 8]}
        assert verify(disk, LAYOUT, SETTINGS).findings == ()

    @pytest.mark.req("F71")
    @pytest.mark.parametrize("kind", LOSSY)
    async def test_damage_that_costs_records(self, kind: str) -> None:
        """The longest whole run of the topic stays, others are untouched, the plan counts, the epoch changes."""
        has_journal, damage, lost, left_of_a, left_of_b = LOSSY[kind]
        disk = await damaged(has_journal, damage)
        epoch = epoch_of(disk)
        last_seq = plan_on(disk).last_seq
        plan, result = repair(disk)

        assert (plan.is_needed, plan.loses_records, plan.lost_count) == (True, True, lost)
        assert result.is_new_epoch
        assert epoch_of(disk) == result.epoch != epoch
        left = await contents(disk)
        assert left["a"] == left_of_a
        assert len(left["b"]) == left_of_b
        assert verify(disk, LAYOUT, SETTINGS).last_seq == last_seq + 2
        assert verify(disk, LAYOUT, SETTINGS).findings == ()

    @pytest.mark.parametrize("kind", LOSSY)
    async def test_the_plan_says_what_is_left(self, kind: str) -> None:
        """Where a stream changes, the plan's counts and bounds are what the log then shows."""
        has_journal, damage, *_ = LOSSY[kind]
        disk = await damaged(has_journal, damage)
        plan, _ = repair(disk)
        log = await open_on(disk)
        for stream in plan.streams:
            info = log.topics()[stream.topic]
            assert (info.first_offset, info.next_offset) == (stream.first_offset, stream.last_offset + 1)
            assert stream.kept == stream.last_offset - stream.first_offset + 1
        await log.close()

    @pytest.mark.req("F38")
    async def test_records_behind_a_lost_one_are_set_aside_whole(self) -> None:
        """They are counted in the plan, and the copies hold them as they were: lines of plain JSON."""
        disk = await damaged(False, lambda d: flip_line(d, LAYOUT.segment(A, 2), 2))
        behind = lines_of(disk, LAYOUT.segment(A, 2))[3:] + lines_of(disk, LAYOUT.segment(A, 3))
        plan, result = repair(disk)

        (stream,) = plan.streams
        assert (stream.kept, stream.set_aside, stream.cut_segment, stream.removed_segments) == (6, 3, 2, (3,))
        assert result.folder is not None
        copies = b"".join(data for path, data in disk.tree().items() if path.is_relative_to(ROOT / result.folder))
        assert all(line in copies for line in behind)
        assert [json.loads(line)["payload"]["n"] for line in behind] == [7, 8, 9]

    async def test_a_frame_is_saved_but_for_its_damaged_line(self) -> None:
        """Of an acknowledged batch only the line that cannot be read is lost, and what follows it in its topic."""
        disk = await make_healthy()
        log = await open_on(disk)
        await append_all(log, [event(topic, {"n": n}) for n in (10, 11) for topic in ("b", "a")])
        await append_all(log, [event("b", {"n": 12})])
        disk = disk.after_crash("lose_all")
        path = journal_of(disk)
        disk.flip(path, disk.read_all(path).rindex(b'{"n":11}') + 3, 0x01)

        plan, _ = repair(disk)
        assert plan.lost == ((17, 17),)
        assert await contents(disk) == {"a": [*range(11)], "b": [0, 4, 8, 10, 11, 12]}

    async def test_the_journal_fills_a_hole(self) -> None:
        """A damaged line that a journal still holds comes back, and nothing is lost."""
        disk = await make_healthy()
        log = await open_on(disk)
        await append_all(log, [event("a", {"n": n}) for n in (10, 11, 12)])
        path = LAYOUT.segment(A, 3)
        await until(lambda: len(lines_of(disk, path)) == 4)  # the log stays open, so its journal stays
        left = disk.after_crash("keep_all")
        flip_line(left, path, 2)
        flip_seal(left)

        plan, _ = repair(left)
        assert not plan.loses_records
        assert (await contents(left))["a"] == list(range(13))

    async def test_damaged_tombstones_are_taken_out(self) -> None:
        """A kept id that cannot be read goes; the others stay, and no record is lost."""
        disk = await make_healthy()
        log = await open_on(disk)
        await drop_sealed(log, "a", keep_ids=True)
        await log.close()
        path = LAYOUT.id_file(A, 1)
        kept = lines_of(disk, path)
        flip_line(disk, path, 1)
        plan, _ = repair(disk)

        assert not plan.loses_records
        assert lines_of(disk, path) == [kept[0], *kept[2:]]

    async def test_a_broken_seal_of_a_dropped_segment(self) -> None:
        """What its neighbours say is put in its place; the drop stays a drop."""
        disk = await make_healthy()
        log = await open_on(disk)
        await drop_sealed(log, "a")
        await log.close()
        flip_seal(disk)
        plan, _ = repair(disk)

        assert not plan.loses_records
        assert await contents(disk) == {"a": [8, 9], "b": [0, 4, 8]}

    async def test_damaged_meta_gives_a_new_epoch(self) -> None:
        """Which life of the log this was is not known any more, so it is a new one."""
        disk = await make_healthy()
        disk.write_all(LAYOUT.meta, b"{")
        _, result = repair(disk)

        assert result.is_new_epoch
        assert (await contents(disk))["a"] == list(range(10))

    async def test_a_cursor_is_set_back_to_the_end(self) -> None:
        """A group that was ahead goes on with the next record there is; what else its file says stays."""
        disk = await damaged(False, lambda d: set_cursor(d, 12))
        repair(disk)

        assert cursor_of(disk) == {"committed": 9, "segment": 3, "ts": "2026-01-01T00:00:00Z"}

    async def test_a_cursor_and_its_backup_are_set_back_alike(self) -> None:
        """A group may go on from either file, so neither stays ahead; one that is not ahead stays as it is."""
        disk = await make_healthy()
        set_cursor(disk, 14)
        set_cursor(disk, 12, "a__workers.json.bak")
        set_cursor(disk, 5, "a__others.json.bak")
        untouched = disk.read_all(LAYOUT.offsets / "a__others.json.bak")
        repair(disk)

        assert [cursor_of(disk, name)["committed"] for name in ("a__workers.json", "a__workers.json.bak")] == [9, 9]
        assert disk.read_all(LAYOUT.offsets / "a__others.json.bak") == untouched

    async def test_a_backup_ahead_alone_is_reason_enough(self) -> None:
        """With the cursor itself damaged, its backup is what the group has acknowledged."""
        disk = await make_healthy()
        disk.write_all(LAYOUT.offsets / "a__workers.json", b"damaged")
        set_cursor(disk, 12, "a__workers.json.bak")
        plan = plan_on(disk)
        carry_out(disk, LAYOUT, plan, VirtualClock())

        assert plan.loses_records
        assert cursor_of(disk, "a__workers.json.bak")["committed"] == 9
        assert (await contents(disk))["a"] == list(range(10))

    async def test_what_a_group_noted_beyond_the_end_is_forgotten(self) -> None:
        """Islands and attempts beyond the end would be taken for those of the records that come next."""
        disk = await make_healthy()
        set_cursor(disk, 5, islands=[[7, 7], [9, 12], [14, 15]], attempts={"6": 2, "13": 1}, paused=True)
        repair(disk)

        cursor = cursor_of(disk)
        assert (cursor["committed"], cursor["segment"], cursor["paused"]) == (5, 3, True)
        assert (cursor["islands"], cursor["attempts"]) == ([[7, 7], [9, 9]], {"6": 2})

    async def test_a_cursor_of_another_epoch_is_left_alone(self) -> None:
        """What a group acknowledged in another life of the log asks for no repair, and a repair does not touch it."""
        disk = await make_healthy()
        set_cursor(disk, 50, epoch="another")
        before = cursor_of(disk)
        assert not plan_on(disk).is_needed

        flip_line(disk, LAYOUT.segment(A, 3), 1)
        repair(disk)
        assert cursor_of(disk) == before

    async def test_groups_of_the_ended_epoch_do_not_hinder_opening(self) -> None:
        """After records were lost the old cursors are of another epoch, and prove nothing about the new one."""
        disk = await make_healthy()
        set_cursor(disk, 9, epoch=epoch_of(disk))
        flip_line(disk, LAYOUT.segment(A, 2), 2)
        repair(disk)

        assert (await contents(disk))["a"] == list(range(6))

    @pytest.mark.req("F71")
    async def test_a_damaged_format_number_is_damage(self) -> None:
        """A digit that turned makes no newer version: the log is repaired, with a new epoch and all its records."""
        disk = await make_healthy()
        at = disk.read_all(LAYOUT.meta).index(b'"format":1') + len(b'"format":')
        disk.flip(LAYOUT.meta, at, 0x08)
        plan, result = repair(disk)

        assert [problem.code for problem in plan.problems] == ["meta.damaged"]
        assert result.is_new_epoch
        assert (await contents(disk))["a"] == list(range(10))

    async def test_damage_in_several_places(self) -> None:
        """Two topics and a checkpoint at once: each stream is planned by itself."""
        disk = await make_healthy()
        flip_line(disk, LAYOUT.segment(A, 1), 0)
        flip_line(disk, LAYOUT.segment(A, 3), 1)
        flip_line(disk, LAYOUT.segment(B, 1), 2)
        disk.flip(LAYOUT.checkpoint, 30, 0x01)
        plan, _ = repair(disk)

        assert {stream.topic for stream in plan.streams} == {"a", "b"}
        assert await contents(disk) == {"a": [4, 5, 6, 7, 8], "b": [0, 4]}

    async def test_the_space_layout(self) -> None:
        """One space's damage leaves the other spaces of the topic whole."""
        disk = SimulatedDisk()
        log = await open_on(disk, SPACES)
        for n in range(12):
            await append_all(log, [event("a", {"n": n}, space_id=f"s:{n % 2}")])
        await log.close()
        flip_line(disk, LAYOUT.segment(StreamKey("a", "s:0"), 1), 3)
        plan, _ = repair(disk, SPACES)

        assert plan.loses_records
        log = await open_on(disk, SPACES)
        left = [record.payload["n"] for record in await read_all(log, Query(since=plan.last_seq - 7))]
        assert [n for n in left if n % 2] == [5, 7, 9, 11]
        await log.close()

    async def test_a_second_repair_has_nothing_to_do(self) -> None:
        """A repaired log is sound, and stays so when more is written and damaged elsewhere."""
        disk = await damaged(False, lambda d: flip_line(d, LAYOUT.segment(A, 2), 2))
        repair(disk)
        assert not plan_on(disk).is_needed

        await contents(disk)
        flip_line(disk, LAYOUT.segment(B, 1), 3)
        plan, _ = repair(disk)
        assert plan.lost_count == 1
        assert len(disk.names(LAYOUT.aside)) == 2


class TestCarryingOut:
    async def test_an_open_log_is_refused(self) -> None:
        """Repair needs the writer's lock."""
        disk = await make_healthy()
        plan = plan_on(disk)
        log = await open_on(disk)
        with pytest.raises(WorkspaceBusy):
            carry_out(disk, LAYOUT, plan, VirtualClock())
        await log.close()

    async def test_a_plan_for_other_files_is_refused(self) -> None:
        """If the files have changed since the plan, nothing is touched."""
        disk = await damaged(False, lambda d: flip_line(d, LAYOUT.segment(A, 2), 2))
        plan = plan_on(disk)
        flip_line(disk, LAYOUT.segment(A, 2), 3)
        before = disk.tree()

        with pytest.raises(RepairOutdated):
            carry_out(disk, LAYOUT, plan, VirtualClock())
        assert {p: d for p, d in disk.tree().items() if p != LAYOUT.lock} == {
            p: d for p, d in before.items() if p != LAYOUT.lock
        }

    async def test_the_manifest_tells_what_and_why(self) -> None:
        """It names each copy with place, digest and reason, and the seqs that are lost."""
        disk = await damaged(False, lambda d: flip_line(d, LAYOUT.segment(A, 3), 1))
        plan, result = repair(disk)
        assert result.folder is not None
        manifest = msgspec.json.decode(disk.read_all(ROOT / result.folder / "manifest.json"))

        cut = next(each for each in manifest["aside"] if each["path"] == "wal/a.00000003.jsonl")
        assert (cut["why"], cut["byte_offset"]) == ("a line's checksum does not match", plan.cuts[0].size)
        assert manifest["lost"] == [[13, 13]]
        assert manifest["problems"][0]["code"] == "seq.gap"
        assert msgspec.json.encode(plan.to_dict())

    @pytest.mark.crash
    @pytest.mark.parametrize("mode", CRASH_MODES)
    @pytest.mark.parametrize("kind", CRASHED_REPAIRS)
    async def test_a_crash_at_a_call_loses_nothing(self, kind: str, mode: CrashMode) -> None:
        """Stopped here and there, every byte is in place or aside; the modes together stop at every call."""
        await crash_and_repair_again(kind, mode, first=1 + CRASH_MODES.index(mode), step=len(CRASH_MODES))

    @pytest.mark.heavy
    @pytest.mark.parametrize("mode", CRASH_MODES)
    @pytest.mark.parametrize("kind", CRASHED_REPAIRS)
    async def test_a_crash_at_any_call_loses_nothing(self, kind: str, mode: CrashMode) -> None:
        """Stopped anywhere, every byte is in place or aside; repairing again ends where one repair would have."""
        await crash_and_repair_again(kind, mode, first=1, step=1)


async def test_any_flipped_byte_can_be_repaired() -> None:
    """Wherever one bit turns, repair makes a log that opens, copies what leaves it, and counts what is lost."""
    start = await make_crashed()
    epoch = epoch_of(start)
    for path, data in start.tree().items():
        if path == LAYOUT.lock:
            continue
        for at in range(0, len(data.rstrip(b"\0")), 89):
            disk = start.clone()
            disk.flip(path, at, 0x02)
            before = disk.tree()
            plan = plan_repair(disk, LAYOUT, SETTINGS)
            carry_out(disk, LAYOUT, plan, VirtualClock())
            assert nothing_is_lost(before, disk), (path, at)
            left = sum(map(len, (await contents(disk)).values()))
            assert verify(disk, LAYOUT, SETTINGS).is_sound, (path, at)
            if plan.is_needed and path != LAYOUT.meta:
                assert left == 17 - plan.lost_count, (path, at)
                assert plan.loses_records == bool(plan.lost_count) == (epoch_of(disk) != epoch), (path, at)


async def test_a_real_folder_is_repaired(tmp_path: Path) -> None:
    """On real files: damaged, refused, repaired, and opened with a rebuilt index."""
    layout = Layout(tmp_path)
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, [event("a", {"n": n}, event_id=f"a{n}") for n in range(10)])
    await log.close()
    path = layout.segment(A, 3)
    path.write_bytes(path.read_bytes().replace(b'{"n":9}', b'{"n":8}'))
    with pytest.raises(CorruptLog):
        await open_log(tmp_path, SETTINGS)

    plan = plan_repair(OsDisk(), layout, SETTINGS)
    carry_out(OsDisk(), layout, plan, VirtualClock())
    log = await open_log(tmp_path, SETTINGS)
    verdicts = await log.append_many([event("a", {"n": n}, event_id=f"a{n}") for n in (8, 9)])
    await log.close()
    assert [type(verdict).__name__ for verdict in verdicts] == ["Duplicate", "Appended"]
    assert verify(OsDisk(), layout, SETTINGS, ids=True).findings == ()
