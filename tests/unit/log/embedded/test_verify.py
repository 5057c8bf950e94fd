"""Verify finds a healthy log healthy, in every state it can be in, and names the place of any damage."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.conformance.support import append_all, drop_sealed, event, numbered
from tidings.core.ids import LogIdMaker
from tidings.log import LogSettings
from tidings.log.embedded import EmbeddedLog, open_log, staging
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.index import IndexEntry, MemoryIndex
from tidings.log.embedded.layout import Layout, StreamKey, WorkspaceMeta, encode_meta
from tidings.log.embedded.seq_set import SeqSet
from tidings.log.embedded.verify import DuplicateIds, Finding, VerifyProgress, VerifyReport, verify
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import CorruptLog, LogFenced, UnsupportedFormat, WorkspaceError, WorkspaceMissing
from tidings.log.keys import DerivedKeys
from tidings.log.segment import CRC_HEAD_BYTES, encode_line
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk, VirtualClock

ROOT: Final = Path("/w")
LAYOUT: Final = Layout(ROOT)
SETTINGS: Final = LogSettings(journal_bytes=1 << 20, segment_lines_max=4)
SPACES: Final = LogSettings(journal_bytes=1 << 20, segment_lines_max=4, layout="space")
A: Final = StreamKey("a")
B: Final = StreamKey("b")


async def open_on(disk: SimulatedDisk, settings: LogSettings = SETTINGS, **more: Any) -> EmbeddedLog:
    """Open a log in the simulated world."""
    more.setdefault("index", MemoryIndex())
    return await open_log(ROOT, settings, clock=VirtualClock(), disk=disk, **more)


async def healthy(settings: LogSettings = SETTINGS, **more: Any) -> SimulatedDisk:
    """A closed log: ten records in topic a (two sealed segments and an open one), three in b, interleaved."""
    disk = SimulatedDisk()
    log = await open_on(disk, settings, **more)
    for n in range(10):
        await append_all(log, [event("a", {"n": n}, event_id=f"a{n}")])
        if n % 4 == 0:
            await append_all(log, [event("b", {"n": n})])
    await log.close()
    return disk


async def crashed() -> SimulatedDisk:
    """The same, with three more records in the journal only: the machine stopped before they were settled."""
    disk = await healthy()
    log = await open_on(disk)
    for n in range(3):
        await append_all(log, [event("a", {"late": n})])
    return disk.after_crash("lose_all")


def check(disk: SimulatedDisk, settings: LogSettings = SETTINGS, **more: Any) -> VerifyReport:
    """Verify, and see that nothing was changed by it."""
    before, calls = disk.tree(), disk.calls
    report = verify(disk, LAYOUT, settings, **more)
    assert (disk.tree(), disk.calls) == (before, calls)
    return report


def places(report: VerifyReport, *, severity: str = "error") -> list[tuple[str, str, int]]:
    """Code, file and byte of what was found."""
    return [
        (found.code, Path(found.path).name, found.byte_offset)
        for found in report.findings
        if found.severity == severity
    ]


def twins(report: VerifyReport) -> list[tuple[int, int, str]]:
    """All that was found, which is pairs of seqs with one event id, and what is said of their contents."""
    said = [
        re.fullmatch(r"the records at seq (\d+) and seq (\d+) have .* id, and (.*)", f.message) for f in report.findings
    ]
    assert {found.code for found in report.findings} == {"id.twice"}
    return [(int(each[1]), int(each[2]), each[3]) for each in said if each is not None]


def lines_of(disk: SimulatedDisk, path: Path) -> list[bytes]:
    """The lines of a file, with their newlines."""
    return disk.read_all(path).splitlines(keepends=True)


def forged(line: bytes, old: bytes, new: bytes) -> bytes:
    """The line with other content and a checksum that matches it."""
    assert old in line
    return encode_line(line[CRC_HEAD_BYTES:-1].replace(old, new))


class TestHealthy:
    async def test_a_healthy_log_is_clean(self) -> None:
        """Nothing is found in a log that was closed, and everything was looked at."""
        report = check(await healthy(), ids=True)

        assert report.findings == ()
        assert report.is_sound
        assert not report.was_written
        assert (report.segments, report.lines, report.last_seq, report.journal_lines) == (4, 13, 13, 0)
        assert set(report.chain_heads) == {"a"}

    async def test_a_payload_that_looks_like_a_frame_is_no_damage(self) -> None:
        """A payload that reads like the head of a journal frame does not end the frame that holds it."""
        disk = await healthy()
        log = await open_on(disk)
        looks_so = {"crc": "00000000", "frame": {"first": 90, "last": 91, "bytes": 10, "durable": 89}}
        await append_all(log, [event("a", looks_so), event("a", {"n": 1})])
        report = check(disk.after_crash("lose_all"))

        assert report.findings == ()
        assert report.journal_lines == 2

    async def test_an_empty_log_is_clean(self) -> None:
        """A log without a record has nothing to find."""
        disk = SimulatedDisk()
        await (await open_on(disk)).close()

        assert check(disk).findings == ()

    async def test_a_living_writer_is_no_damage(self) -> None:
        """With the log open and nothing closed or settled, everything committed is accounted for."""
        disk = await healthy()
        log = await open_on(disk)
        await append_all(log, numbered("a", 3))

        report = check(disk)
        assert report.findings == ()
        assert report.last_seq == 16
        assert report.lines + report.journal_lines == 16
        await log.close()

    async def test_what_is_written_meanwhile_is_said_and_not_blamed(self) -> None:
        """Records that come while segments are read make no findings of damage, and the report tells of them."""
        disk = await healthy()
        ahead = disk.clone()
        log = await open_on(ahead)
        await append_all(log, numbered("a", 9))
        await log.close()
        later = ahead.tree()

        def write(progress: VerifyProgress) -> None:
            if progress.segments == 1:
                for path, data in later.items():
                    disk.write_all(path, data)

        report = verify(disk, LAYOUT, SETTINGS, progress=write)
        assert report.was_written
        assert report.is_sound
        assert report.last_seq == 13

    @pytest.mark.parametrize("keep_ids", [False, True])
    async def test_dropped_segments_are_explained(self, keep_ids: bool) -> None:
        """What retention dropped is no gap, whether ids were kept or not."""
        disk = await healthy()
        log = await open_on(disk)
        await drop_sealed(log, "a", keep_ids=keep_ids)
        await append_all(log, numbered("b", 2))
        await log.close()

        report = check(disk, ids=True)
        assert report.findings == ()
        assert report.lines == 7
        assert bool(disk.names(LAYOUT.ids)) is keep_ids

    async def test_the_space_layout_is_clean(self) -> None:
        """One folder a space, with offsets that skip those of other spaces."""
        disk = SimulatedDisk()
        log = await open_on(disk, SPACES)
        for n in range(12):
            await append_all(log, [event("a", {"n": n}, space_id=f"s:{n % 2}")])
        await log.close()

        report = check(disk, SPACES, ids=True)
        assert report.findings == ()
        assert report.lines == 12

    async def test_sealed_payloads_are_checked_without_a_key(self) -> None:
        """Encryption hides payloads from verify and nothing else."""
        disk = await healthy(encryptor=AesGcmEncryptor(DerivedKeys(bytes(range(32)))))

        assert b'"sealed"' in disk.read_all(LAYOUT.segment(A, 1))
        assert check(disk, ids=True).findings == ()

    @pytest.mark.parametrize("mode", CRASH_MODES)
    @pytest.mark.req("F71")
    async def test_what_a_crash_leaves_is_sound(self, mode: CrashMode) -> None:
        """After a stop at any disk call, verify finds damage exactly where recovery would: nowhere."""
        whole = await self._calls()
        for calls in range(20, whole, 3):
            disk = SimulatedDisk(seed=calls, crash_after=calls)
            with contextlib.suppress(SimulatedCrash, LogFenced):
                await self._write(disk)
            assert disk.is_crashed
            left = disk.after_crash(mode)
            if not left.exists(LAYOUT.meta):
                continue
            report = check(left)
            assert report.is_sound, (calls, report.findings)

    async def _calls(self) -> int:
        disk = SimulatedDisk()
        await self._write(disk)
        return disk.calls

    async def _write(self, disk: SimulatedDisk) -> None:
        log = await open_on(disk)
        for n in range(10):
            await append_all(log, [event("a", {"n": n}), event("b")])
        await log.close()

    async def test_a_journal_tail_counts(self) -> None:
        """Records that only the journal holds are part of the log."""
        report = check(await crashed())

        assert report.findings == ()
        assert (report.last_seq, report.journal_lines) == (16, 3)

    async def test_progress_reaches_the_whole(self) -> None:
        """Every segment is told, and the last call says that all of it is done."""
        seen: list[VerifyProgress] = []
        check(await healthy(), progress=seen.append)

        assert [each.segments for each in seen] == [1, 2, 3, 4]
        assert (seen[-1].bytes, seen[-1].segments) == (seen[-1].bytes_total, seen[-1].segments_total)


class TestDamagedSegments:
    @pytest.mark.parametrize(("number", "line"), [(1, 0), (1, 2), (2, 3), (3, 0)])
    async def test_a_changed_byte_is_named_with_its_line(self, number: int, line: int) -> None:
        """A flipped bit is found in sealed and open segments, at the byte its line begins at."""
        disk = await healthy()
        path = LAYOUT.segment(A, number)
        at = sum(map(len, lines_of(disk, path)[:line]))
        disk.flip(path, at + 60, 0x04)

        report = check(disk)
        assert ("line.checksum", path.name, at) in places(report)
        assert ("segment.digest", path.name, at) in places(report) or number == 3
        assert [found.code for found in report.findings if found.code.startswith("line")] == ["line.checksum"]

    async def test_every_flipped_byte_is_found(self) -> None:
        """There is no byte in the segments that can change unnoticed."""
        disk = await healthy()
        for path in (LAYOUT.segment(A, 1), LAYOUT.segment(A, 3)):
            for at in range(0, len(disk.read_all(path)), 7):
                damaged = disk.clone()
                damaged.flip(path, at, 0x10)
                found = places(verify(damaged, LAYOUT, SETTINGS))
                assert any(name == path.name for _, name, _ in found), at

    async def test_a_rewritten_line_is_tampering(self) -> None:
        """A line replaced together with its checksum breaks its segment's seal, and the segment is named."""
        disk = await healthy()
        path = LAYOUT.segment(A, 2)
        first, *rest = lines_of(disk, path)
        disk.write_all(path, forged(first, b'{"n":4}', b'{"n":9}') + b"".join(rest))

        report = check(disk)
        assert places(report) == [("segment.digest", path.name, 0)]
        assert "segment 2" in report.findings[0].message

    async def test_a_rewritten_seal_breaks_the_chain(self) -> None:
        """Rewriting a segment and its seal is seen in the chain, at the first seal that does not follow."""
        disk = await healthy()
        path, seals = LAYOUT.segment(A, 1), LAYOUT.seal_file(A)
        first, second = lines_of(disk, seals)
        sha256 = msgspec.json.decode(first)["sha256"].encode()
        disk.write_all(seals, forged(first, b'"sha256":"%b"' % sha256, b'"sha256":"%b"' % (b"0" * 64)) + second)

        report = check(disk)
        assert ("seal.chain", seals.name, 0) in places(report)
        assert ("segment.digest", path.name, 0) in places(report)

    async def test_a_missing_sealed_segment(self) -> None:
        """A segment without its file is named, with the first seq that went with it."""
        disk = await healthy()
        disk.remove(LAYOUT.segment(A, 1))

        report = check(disk)
        assert places(report)[-1] == ("segment.missing", "a.00000001.jsonl", 0)
        assert {found.code for found in report.findings} == {"segment.missing", "seq.gap"}

    async def test_a_missing_open_segment(self) -> None:
        """The checkpoint knows the open segment, so it cannot vanish; not even a topic's only one."""
        for key, number in ((A, 3), (B, 1)):
            disk = await healthy()
            disk.remove(LAYOUT.segment(key, number))

            assert ("segment.missing", LAYOUT.segment(key, number).name, 0) in places(check(disk))

    async def test_bytes_appended_to_a_sealed_segment(self) -> None:
        """Foreign bytes behind a sealed end are found at that end."""
        disk = await healthy()
        path = LAYOUT.segment(A, 1)
        data = disk.read_all(path)
        disk.write_all(path, data + b"junk\n")

        assert places(check(disk)) == [("segment.size", path.name, len(data))]

    async def test_bytes_appended_to_an_open_segment(self) -> None:
        """Foreign bytes behind the last line are found where they begin."""
        disk = await healthy()
        path = LAYOUT.segment(A, 3)
        data = disk.read_all(path)
        disk.write_all(path, data + b"junk")

        assert places(check(disk)) == [("line.unfinished", path.name, len(data))]

    async def test_a_cut_segment(self) -> None:
        """A file shorter than its seal or the checkpoint says is found at its end."""
        for number, code in ((1, "segment.size"), (3, "segment.short")):
            disk = await healthy()
            path = LAYOUT.segment(A, number)
            kept = b"".join(lines_of(disk, path)[:-1])
            disk.write_all(path, kept)

            assert (code, path.name, len(kept)) in places(check(disk))

    async def test_a_line_twice_or_in_another_topic(self) -> None:
        """Whole lines in the wrong place are found: repeated, and of another topic."""
        disk = await healthy()
        path = LAYOUT.segment(B, 1)
        data = disk.read_all(path)
        for line, code in (
            (lines_of(disk, path)[0], "line.order"),
            (lines_of(disk, LAYOUT.segment(A, 1))[0], "line.misplaced"),
        ):
            disk.write_all(path, data + line)

            assert places(check(disk)) == [(code, path.name, len(data))]

    async def test_a_line_that_is_no_record(self) -> None:
        """A line with a good checksum must still be a record with its head in order."""
        disk = await healthy()
        path = LAYOUT.segment(B, 1)
        data = disk.read_all(path)
        body = lines_of(disk, path)[-1][CRC_HEAD_BYTES:-1].replace(b'"offset":2,"seq":12,', b'"seq":14,"offset":3,')
        for line in (encode_line(b'"offset":1}'), encode_line(body)):
            disk.write_all(path, data + line)

            assert places(check(disk)) == [("line.format", path.name, len(data))]

    async def test_text_that_is_no_unicode_is_told(self) -> None:
        """A line with a good checksum whose strings are not UTF-8 is a finding, not an exception."""
        disk = await healthy()
        path = LAYOUT.segment(B, 1)
        *rest, last = lines_of(disk, path)
        disk.write_all(path, b"".join(rest) + forged(last, b'"topic":"b"', b'"topic":"\xff"'))

        assert ("line.format", path.name, sum(map(len, rest))) in places(check(disk))

    @pytest.mark.parametrize("kind", ["two on one line", "one over two lines", "both, so that the numbers are right"])
    async def test_a_line_is_one_record(self, kind: str) -> None:
        """Two records on one line, or one over two, are found though every line passes its checksum."""
        disk = await healthy()
        path = LAYOUT.segment(B, 1)
        *rest, last = lines_of(disk, path)
        body = last[CRC_HEAD_BYTES:-1]
        head, payload = body.split(b'"payload":')
        following = body.replace(b'"offset":2,"seq":12,', b'"offset":3,"seq":14,')
        forgery = {
            "two on one line": encode_line(body + b" {" + following),
            "one over two lines": encode_line(head + b'"payload":') + encode_line(b'"x":' + payload + b"}"),
            "both, so that the numbers are right": encode_line(head + b'"payload":')
            + encode_line(following + b"} {" + following),
        }[kind]
        disk.write_all(path, b"".join(rest) + forgery)

        assert ("line.format", path.name, sum(map(len, rest))) in places(check(disk))

    async def test_lines_are_found_across_blocks(self) -> None:
        """In a segment larger than what is read at once, and with a line larger still, each damage has its place."""
        disk = SimulatedDisk()
        settings = LogSettings(journal_bytes=8 << 20, segment_lines_max=10_000)
        log = await open_on(disk, settings)
        await append_all(log, [event("a", {"n": n, "text": "x" * (700_000 if n == 200 else 900)}) for n in range(900)])
        await log.close()
        assert check(disk, settings, ids=True).lines == 900
        path = LAYOUT.segment(A, 1)
        starts = [0]
        for line in lines_of(disk, path):
            starts.append(starts[-1] + len(line))
        wrong = (0, 199, 200, 201, 550, 899)
        for n in wrong:
            disk.flip(path, starts[n] + 50, 0x01)

        report = check(disk, settings)
        flawed = [(found.code, found.byte_offset) for found in report.findings if found.code.startswith("line")]
        assert flawed == [("line.checksum", starts[n]) for n in wrong]
        assert report.lines == 900 - len(wrong)

    async def test_a_write_time_that_goes_back_is_told(self) -> None:
        """Times that fall within a stream are a warning at their line."""
        disk = await healthy()
        path = LAYOUT.segment(B, 1)
        *rest, last = lines_of(disk, path)
        disk.write_all(path, b"".join(rest) + forged(last, b'"written_at":"2026', b'"written_at":"2025'))

        report = check(disk)
        assert report.is_sound
        assert places(report, severity="warning") == [("line.time", path.name, sum(map(len, rest)))]


class TestTheWhole:
    async def test_a_seq_that_is_nowhere(self) -> None:
        """A record taken out without a trace in its own topic still leaves its seq open."""
        disk = await healthy()
        disk.remove(LAYOUT.segment(B, 1))
        disk.remove(LAYOUT.checkpoint)

        gaps = [(found.code, found.seq) for found in check(disk).findings]
        assert gaps == [("seq.gap", 2), ("seq.gap", 7), ("seq.gap", 12)]

    async def test_a_record_missing_among_dropped_ones_is_counted(self) -> None:
        """Drops explain as many seqs as they held, and no more."""
        disk = await healthy()
        log = await open_on(disk)
        await drop_sealed(log, "a")
        await log.close()
        disk.remove(LAYOUT.segment(B, 1))
        disk.remove(LAYOUT.checkpoint)

        assert ("seq.count", "wal", 0) in places(check(disk))

    async def test_a_seq_given_twice(self) -> None:
        """Two topics cannot both hold one seq."""
        disk = await healthy()
        path = LAYOUT.segment(B, 1)
        *rest, last = lines_of(disk, path)
        disk.write_all(path, b"".join(rest) + forged(last, b'"seq":12', b'"seq":13'))

        assert {code for code, _, _ in places(check(disk))} == {"seq.twice", "seq.gap"}

    async def test_an_id_given_twice(self) -> None:
        """Two records with one event id are found; who does not ask for ids is not told."""
        disk = await healthy()
        path = LAYOUT.segment(A, 3)
        first, second = lines_of(disk, path)
        disk.write_all(path, first + forged(second, b'"event_id":"a9"', b'"event_id":"a0"'))

        assert check(disk, ids=False).is_sound
        assert twins(check(disk)) == [(1, 13, "different contents")]

    @pytest.mark.parametrize("same", [False, True])
    @pytest.mark.parametrize("first", ["in the topic", "in another topic", "dropped, its id kept"])
    @pytest.mark.parametrize("second", ["in a segment", "in the journal"])
    async def test_an_id_that_was_taken_in_advance(
        self, same: bool, first: str, second: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """
        An id that a producer chose is found when the log made the same one for a later record, wherever the two are and
        whatever they say.
        """
        monkeypatch.setattr(staging, "LogIdMaker", lambda: LogIdMaker(bytes))  # what cannot be foreseen, foreseen
        disk = SimulatedDisk()
        log = await open_on(disk)
        topic = "b" if first == "in another topic" else "a"
        await append_all(log, [event(topic, {"n": 0}, event_id=f"ev-{9:032x}"), *numbered("a", 7)])
        if first.startswith("dropped"):
            await drop_sealed(log, "a", keep_ids=True)
            assert log.topics()["a"].first_offset == 4
        (last,) = await append_all(log, [event("a", {"n": 0 if same else 1})])
        assert (last.seq, last.event_id) == (9, f"ev-{9:032x}")
        if second == "in a segment":
            await log.close()
        else:
            disk = disk.after_crash("lose_all")
            assert check(disk).journal_lines

        says = "the same content" if same and topic == "a" else "different contents"
        assert twins(check(disk)) == [(1, 9, says)]

    async def test_sealed_records_with_one_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of sealed records it is said that nobody can compare them."""
        monkeypatch.setattr(staging, "LogIdMaker", lambda: LogIdMaker(bytes))
        disk = SimulatedDisk()
        encryptor = AesGcmEncryptor(DerivedKeys(bytes(32)))
        log = await open_on(disk, encryptor=encryptor)
        await append_all(log, [event("a", {"n": 0}, event_id=f"ev-{2:032x}")])
        await append_all(log, [event("a", {"n": 0})])
        await log.close()

        assert twins(check(disk)) == [(1, 2, "contents that cannot be compared, as one is sealed or gone")]

    async def test_the_index_is_compared(self) -> None:
        """An index that lacks an id, or does not cover the log, is told of."""
        index = MemoryIndex()
        disk = await healthy()
        log = await open_on(disk)
        await log.close()
        entries = [IndexEntry(seq, "a", 0, f"a{n}", None, "s", ()) for n, seq in enumerate((1, 3, 4, 5, 6, 8, 9))]
        index.add(entries, 10)

        report = check(disk, ids=True, index=index)
        assert report.is_sound
        assert [(found.code, found.seq) for found in report.findings if found.code != "index.covers"] == [
            ("index.unknown_id", 10)
        ]
        assert [found.severity for found in report.findings if found.code == "index.covers"] == ["info"]

    async def test_ids_make_a_temporary_file_only_when_there_are_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither a check without ids nor one of a few asks for room elsewhere."""

        def refuse() -> None:
            raise AssertionError("a temporary file was made")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        disk = await healthy()

        assert check(disk).findings == ()
        assert check(disk, ids=True).findings == ()

    def test_ids_are_compared_across_runs(self) -> None:
        """Ids that come twice are found wherever they stand, in memory or in runs that were put aside."""
        with DuplicateIds(run_ids=4) as runs:
            for seq in range(1, 31):
                runs.add([(seq, f"id-{seq % 27}")])

            assert sorted(runs.twice()) == [(1, 28), (2, 29), (3, 30)]

    def test_a_set_of_seqs_knows_what_it_holds(self) -> None:
        """Close together, far apart, over pages and again: what was in is told, and what is missing."""
        chance = random.Random(7)
        for spread in (1, 2, 50, 5_000, 900_000):
            seqs, model, edge = SeqSet(), set[int](), (1 << 20) - 20  # where a page ends
            for _ in range(30):
                base = chance.choice((0, edge))
                some = sorted({base + chance.randint(1, 40 * spread) for _ in range(20)})
                assert seqs.add_rising(some) == [seq for seq in some if seq in model]
                model.update(some)
                one = chance.randint(1, 40 * spread)
                assert seqs.add(one) is (one not in model)
                model.add(one)
            for last in (max(model), max(model) + 3, max(model) - 1, 1):
                gaps = {(first, end) for first, end in seqs.missing(last)}
                edges = [0, *sorted(seq for seq in model if seq <= last), last + 1]
                pairs = itertools.pairwise(edges)
                assert gaps == {(low + 1, high - 1) for low, high in pairs if high - low > 1}


class TestCursors:
    @staticmethod
    def put(disk: SimulatedDisk, name: str, committed: int, **more: Any) -> None:
        """Write a group's file the way the bus does."""
        body = msgspec.json.encode({"committed": committed, "segment": 1, "ts": "2026-01-01T00:00:00Z", **more})
        disk.write_all(LAYOUT.offsets / name, encode_line(body[1:]))

    @staticmethod
    async def is_refused(disk: SimulatedDisk) -> bool:
        """Whether the log does not open because of a cursor."""
        try:
            await (await open_on(disk.clone())).close()
        except CorruptLog as error:
            return Path(error.path).parent == LAYOUT.offsets
        return False

    @pytest.mark.parametrize("name", ["a__workers.json", "a__workers.json.bak", "a__in_two.words.json"])
    async def test_a_cursor_ahead_of_its_topic(self, name: str) -> None:
        """A group cannot have acknowledged what the log does not have, says file or backup; the end itself is fine."""
        disk = await healthy()
        self.put(disk, name, 9)
        assert check(disk).findings == ()
        assert not await self.is_refused(disk)
        self.put(disk, name, 10)

        assert places(check(disk)) == [("cursor.ahead", name, 0)]
        assert await self.is_refused(disk)

    async def test_an_island_beyond_the_end_is_ahead_too(self) -> None:
        """Acknowledged out of order is acknowledged."""
        disk = await healthy()
        self.put(disk, "a__workers.json", 3, islands=[[5, 6], [9, 10]])

        assert [(found.code, found.offset) for found in check(disk).findings] == [("cursor.ahead", 10)]
        assert await self.is_refused(disk)

    async def test_only_a_cursor_of_this_epoch_is_evidence(self) -> None:
        """One of another life of the log counts other records, and is passed over."""
        disk = await healthy()
        self.put(disk, "a__workers.json", 99, epoch="another")
        assert check(disk).findings == ()
        assert not await self.is_refused(disk)
        self.put(disk, "a__workers.json", 99, epoch=LAYOUT.read_meta(disk).epoch)

        assert places(check(disk)) == [("cursor.ahead", "a__workers.json", 0)]
        assert await self.is_refused(disk)

    @pytest.mark.parametrize("topic", ["a", "a_b", "a.b"])
    async def test_the_topic_is_read_from_the_name(self, topic: str) -> None:
        """A cursor speaks of the topic in its file's name, whatever underscores the names have."""
        disk = SimulatedDisk()
        log = await open_on(disk)
        await append_all(log, [event(topic, {"n": n}) for n in range(3)])
        await log.close()
        for group in ("g", "g_h", "_g"):
            self.put(disk, f"{topic}__{group}.json", 2)

        assert check(disk).findings == ()
        assert not await self.is_refused(disk)

    async def test_a_damaged_cursor_is_told_and_proves_nothing(self) -> None:
        """A file that fails its checksum is a warning; the hint depends on whether its twin can be read."""
        disk = await healthy()
        self.put(disk, "b__workers.json", 1)
        path = LAYOUT.offsets / "b__workers.json"
        disk.flip(path, disk.read_all(path).index(b'"committed":1') + len(b'"committed":'), 0x08)  # now it says 9
        (alone,) = check(disk).findings
        self.put(disk, "b__workers.json.bak", 0)
        (backed,) = check(disk).findings

        assert (alone.code, alone.severity, backed.code) == ("cursor.damaged", "warning", "cursor.damaged")
        assert alone.hint != backed.hint
        assert not await self.is_refused(disk)


class TestOtherFiles:
    async def test_a_damaged_checkpoint_is_a_warning(self) -> None:
        """The log does not need it to be whole, so nothing is lost."""
        disk = await healthy()
        disk.flip(LAYOUT.checkpoint, 30, 0x01)

        report = check(disk)
        assert report.is_sound
        assert places(report, severity="warning") == [("checkpoint.damaged", "checkpoint.json", 0)]

    async def test_a_damaged_seal(self) -> None:
        """A seal before the last that does not match its checksum is named at its byte."""
        disk = await healthy()
        disk.flip(LAYOUT.seal_file(A), 40, 0x01)

        assert ("seal.checksum", "a.jsonl", 0) in places(check(disk))

    async def test_a_torn_last_seal_is_mended_by_opening(self) -> None:
        """What a crash may do to the last seal is told as information."""
        disk = await healthy()
        first, second = lines_of(disk, LAYOUT.seal_file(A))
        disk.write_all(LAYOUT.seal_file(A), first + second[:50])

        report = check(disk)
        assert report.is_sound
        assert places(report, severity="info") == [("seal.torn", "a.jsonl", len(first))]

    async def test_a_journal_damaged_though_acknowledged(self) -> None:
        """A frame that a later one vouches for is no torn tail; the place in the journal is named."""
        disk = await crashed()
        path = next(path for path in disk.tree() if path.parent == LAYOUT.journal)
        first = disk.read_all(path).index(b'"offset":10')
        disk.flip(path, first + 5, 0x01)

        found = [found for found in check(disk).findings if found.code == "journal.lost"]
        assert [(Path(each.path).name, each.byte_offset, each.seq) for each in found] == [
            (path.name, first - CRC_HEAD_BYTES, 14)
        ]

    @pytest.mark.req("F71")
    async def test_a_torn_journal_tail_is_no_damage(self) -> None:
        """The last frame, that nobody vouches for, may be torn at any byte."""
        disk = await crashed()
        path = next(path for path in disk.tree() if path.parent == LAYOUT.journal)
        data = disk.read_all(path)
        start = data.rindex(b'{"crc":"', 0, data.rindex(b'"frame"'))
        for cut in range(start, len(data.rstrip(b"\0")), 11):
            disk.write_all(path, data[:cut] + bytes(len(data) - cut))
            report = check(disk)
            assert report.findings == ()
            assert report.last_seq == 15

    async def test_a_torn_segment_that_the_journal_fills(self) -> None:
        """Bytes past the checkpoint may be torn as long as the journal holds the records."""
        disk = await crashed()
        path = LAYOUT.segment(A, 3)
        data = disk.read_all(path)
        disk.write_all(path, data + b'{"crc":"0000')

        report = check(disk)
        assert report.is_sound
        assert places(report, severity="info") == [("segment.torn", path.name, len(data))]

    async def test_a_damaged_tombstone(self) -> None:
        """A kept id that cannot be read is named with its file and byte."""
        disk = await healthy()
        log = await open_on(disk)
        await drop_sealed(log, "a", keep_ids=True)
        await log.close()
        path = LAYOUT.id_file(A, 1)
        at = len(lines_of(disk, path)[0])
        disk.flip(path, at + 50, 0x01)

        assert places(check(disk)) == [("tombstone.damaged", path.name, at)]

    async def test_damaged_meta_is_told_and_the_rest_is_checked(self) -> None:
        """A description that cannot be read does not keep the lines from being checked."""
        disk = await healthy()
        disk.write_all(LAYOUT.meta, b"{")

        report = check(disk)
        assert places(report) == [("meta.damaged", "meta.json", 0)]
        assert report.lines == 13

    async def test_a_missing_or_newer_workspace_is_refused(self) -> None:
        """Only what is no log of ours raises."""
        with pytest.raises(WorkspaceMissing):
            verify(SimulatedDisk(), LAYOUT, SETTINGS)
        disk = await healthy()
        disk.write_all(LAYOUT.meta, encode_meta(WorkspaceMeta(format=99, epoch="x", created_at="")))
        with pytest.raises(UnsupportedFormat, match="format 99"):
            verify(disk, LAYOUT, SETTINGS)

    @pytest.mark.req("F71")
    async def test_every_flipped_byte_of_the_meta_file_is_damage(self) -> None:
        """Whatever bit of it turns, the digit of the format too, it is damage and never a newer version."""
        disk = await healthy()
        data = disk.read_all(LAYOUT.meta)
        for at in range(len(data)):
            for bit in range(8):
                disk.write_all(LAYOUT.meta, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
                with pytest.raises(WorkspaceError) as caught:
                    LAYOUT.read_meta(disk)
                assert type(caught.value) is WorkspaceError, (at, bit)
        assert places(check(disk)) == [("meta.damaged", "meta.json", 0)]

    async def test_a_meta_file_that_is_whole_but_says_nothing_is_refused(self) -> None:
        """A description must have a format this version knows, and what that format asks for."""
        disk = await healthy()
        disk.write_all(LAYOUT.meta, encode_line(b'"format":1}'))
        assert places(check(disk)) == [("meta.damaged", "meta.json", 0)]
        disk.write_all(LAYOUT.meta, encode_line(b'"format":"two"}'))
        with pytest.raises(UnsupportedFormat, match="format two"):
            LAYOUT.read_meta(disk)

    async def test_findings_are_bounded_and_in_file_order(self) -> None:
        """Beyond the limit findings are counted; those kept stand by file and byte, and are plain values."""
        disk = await healthy()
        for number in (1, 2):
            for line in range(4):
                at = sum(map(len, lines_of(disk, LAYOUT.segment(A, number))[:line]))
                disk.flip(LAYOUT.segment(A, number), at + 30, 0x01)

        report = check(disk)
        order = [(found.path, found.byte_offset) for found in report.findings]
        assert order == sorted(order)
        assert len(check(disk, findings_max=3).findings) == 3
        assert check(disk, findings_max=3).omitted == len(report.findings) - 3
        assert msgspec.convert(report.to_dict()["findings"], list[Finding]) == list(report.findings)


async def test_a_real_folder_is_verified_beside_its_writer(tmp_path: Path) -> None:
    """On real files and real threads too, a log that is open and written to has nothing to blame."""
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, numbered("a", 50))
    report = verify(OsDisk(), Layout(tmp_path), SETTINGS, ids=True)
    await log.close()

    assert report.is_sound
    assert verify(OsDisk(), Layout(tmp_path), SETTINGS).findings == ()


async def test_verify_and_recovery_agree_on_damage() -> None:
    """Whatever byte of the open segments and the journal is damaged: if recovery refuses, verify has an error."""
    disk = await crashed()
    paths = [path for path in disk.tree() if path.parent in (LAYOUT.journal, LAYOUT.wal)]
    for path in paths:
        for at in range(0, len(disk.read_all(path).rstrip(b"\0")), 97):
            damaged = disk.clone()
            damaged.flip(path, at, 0x20)
            report = verify(damaged, LAYOUT, SETTINGS)
            try:
                await (await open_on(damaged)).close()
            except CorruptLog:
                assert not report.is_sound, (path, at)
