"""The dead letters' file: a small log that several threads may write, and that a crash does not spoil."""

from __future__ import annotations

import contextlib
import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.bus.errors import UnknownDeadLetter
from tidings.bus.store import Attempt, DeadLetterFilter, dead_letter_files
from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.bus.store.dead_letters import record_of
from tidings.log.embedded.disk import OsDisk, read_file
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.keys import DerivedKeys, NoSealingKey, SpaceKey
from tidings.log.record import Record, RecordMeta
from tidings.log.segment import is_whole
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk, VirtualClock

SEALING = AesGcmEncryptor(DerivedKeys(b"\x07" * 32, spaces=("person:ana",)))
FOLDER = Path("/data/.bus/dlq")
FILE = FOLDER / "actions.dlq.jsonl"
WRITTEN = "2026-01-01T00:00:00.000000Z"


def record(offset: int, space_id: str = "shared:home") -> Record:
    meta = RecordMeta(
        written_at=WRITTEN, topic="actions", type="DONE", space_id=space_id, event_id=f"ev-{offset}", ts=WRITTEN
    )
    return Record.of(offset, offset + 1, meta, msgspec.Raw(b'{"n":%d}' % offset))


def store(disk: SimulatedDisk | None = None) -> DeadLetterFiles:
    return DeadLetterFiles(disk or SimulatedDisk(0), FOLDER, VirtualClock())


def add(letters: DeadLetterFiles, offset: int, group: str = "g", error: str = "no luck") -> None:
    letters.add(record(offset), group, RuntimeError(error), [Attempt(WRITTEN, error)], "retries")


@pytest.mark.req("F35", "F36")
def test_letters_come_back_from_the_file() -> None:
    """A new store reads what another one wrote: letters, their states, and how often they were tried."""
    disk = SimulatedDisk(0)
    first = store(disk)
    for offset in range(4):
        add(first, offset)
    first.request("actions", ["g-0", "g-1", "g-2"])
    first.begin("actions", "g-0")
    first.finish("actions", "g-0")
    first.begin("actions", "g-1")
    first.finish("actions", "g-1", ValueError("worse luck"))
    first.drop("actions", ["g-3"])

    second = store(disk)

    states = {
        letter.id: letter.state
        for letter in second.find("actions", None, DeadLetterFilter(states=("dead", "requested", "redriven")))
    }
    assert states == {"g-0": "redriven", "g-1": "dead", "g-2": "requested"}
    assert second.get("actions", "g-3").state == "dropped"
    assert (second.get("actions", "g-1").error, second.get("actions", "g-1").redrives) == ("worse luck", 1)
    assert second.topics() == ["actions"]
    with pytest.raises(UnknownDeadLetter):
        second.get("actions", "g-9")


def test_adding_twice_is_adding_once() -> None:
    """The same event of a group is one letter, also for the next process; after a re-drive it may die anew."""
    disk = SimulatedDisk(0)
    add(store(disk), 5, error="first")
    add(store(disk), 5, error="second")
    assert [letter.error for letter in store(disk).find("actions")] == ["first"]

    letters = store(disk)
    letters.request("actions", ["g-5"])
    add(letters, 5)
    assert letters.get("actions", "g-5").state == "requested", "what was asked for stays asked for"
    letters.begin("actions", "g-5")
    letters.finish("actions", "g-5")
    add(letters, 5, error="third")
    assert [letter.error for letter in letters.find("actions")] == ["third"]


def test_a_letter_makes_its_record_again() -> None:
    """The record that a letter holds equals the one that was added."""
    letters = store()
    add(letters, 3)

    again = record_of(letters.get("actions", "g-3"))

    assert again is not None
    assert (again.offset, again.seq, again.meta, again.payload) == (3, 4, record(3).meta, {"n": 3})


def test_a_secret_payload_is_not_written_in_the_open() -> None:
    """The letter of a protected space has its envelope but not its payload; other spaces' letters have both."""
    disk = SimulatedDisk(0)
    letters = DeadLetterFiles(disk, FOLDER, VirtualClock(), SEALING)
    for offset, space_id in enumerate(["person:ana", "shared:home"]):
        letters.add(record(offset, space_id), "g", RuntimeError(), [], "retries")

    data = read_file(disk, FILE)

    assert data is not None
    assert b'"payload":{"n":0}' not in data
    assert b'"payload":{"n":1}' in data
    assert record_of(letters.get("actions", "g-0")) is None


def test_what_a_letter_of_an_encrypted_space_says_is_sealed() -> None:
    """Errors of attempts and of later tries are opened with the space's key, for their own letter only, and by nobody else."""
    disk = SimulatedDisk(0)
    letters = DeadLetterFiles(disk, FOLDER, VirtualClock(), SEALING)
    failed = [Attempt("2026-01-01T00:00:00Z", "bad diagnosis 1"), Attempt("", "bad diagnosis 2")]
    letters.add(record(0, "person:ana"), "g", RuntimeError("bad diagnosis 3"), failed, "retries")
    letters.request("actions", ["g-0"])
    letters.begin("actions", "g-0")
    letters.finish("actions", "g-0", RuntimeError("bad diagnosis 4"))

    data = read_file(disk, FILE)
    with_key = DeadLetterFiles(disk, FOLDER, VirtualClock(), SEALING).get("actions", "g-0")
    without = DeadLetterFiles(disk, FOLDER, VirtualClock()).get("actions", "g-0")
    other = DeadLetterFiles(disk, FOLDER, VirtualClock(), AesGcmEncryptor(DerivedKeys(b"\x08" * 32)))

    assert data is not None
    assert b"diagnosis" not in data
    assert [each.error for each in with_key.attempts] == [f"bad diagnosis {n}" for n in (1, 2, 4)]
    assert with_key.error == "bad diagnosis 4"
    assert letters.get("actions", "g-0") == with_key
    assert "not at hand" in without.error
    assert (without.state, without.error_type, len(without.attempts)) == ("dead", "builtins.RuntimeError", 3)
    assert "not at hand" in other.get("actions", "g-0").error
    assert letters.needed("actions") == [(0, "person:ana", "g-0")]
    letters.drop("actions", ["g-0"])
    assert letters.needed("actions") == []


def test_without_a_key_to_seal_with_what_a_letter_says_is_not_kept() -> None:
    """A space whose keys were taken away still has dead letters, but no text of theirs lies in the open."""
    disk = SimulatedDisk(0)

    class Keyless(DerivedKeys):
        def current(self, space_id: str) -> SpaceKey | None:
            raise NoSealingKey(space_id)

    letters = DeadLetterFiles(disk, FOLDER, VirtualClock(), AesGcmEncryptor(Keyless(b"\x07" * 32)))
    letters.add(record(0, "person:ana"), "g", RuntimeError("bad diagnosis"), [Attempt("", "diagnosis")], "retries")

    assert b"diagnosis" not in (read_file(disk, FILE) or b"")
    assert letters.get("actions", "g-0").error.startswith("not kept")


def test_threads_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """Letters that several workers add at the same time are all there."""
    letters = DeadLetterFiles(OsDisk(), tmp_path, VirtualClock())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add(letters, n // 4, f"g{n % 4}"), range(80)))

    again = DeadLetterFiles(OsDisk(), tmp_path, VirtualClock())

    assert sorted(letter.id for letter in again.find("actions")) == sorted(f"g{n % 4}-{n // 4}" for n in range(80))


@pytest.mark.parametrize("damage", ["cut", "zeros", "flip"])
def test_a_damaged_line_is_kept_and_passed_over(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """What can be read is read, what cannot is told of and stays in the file; new letters follow it."""
    disk = SimulatedDisk(0)
    letters = store(disk)
    for offset in range(3):
        add(letters, offset)
    data = read_file(disk, FILE)
    assert data is not None
    lost: int | None
    match damage:
        case "cut":
            spoilt, lost = data[:-20], 2
        case "zeros":
            spoilt, lost = data + bytes(40), None
        case _:
            at = data.index(b"\n") + 50
            spoilt, lost = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], 1
    disk.write_all(FILE, spoilt)

    fresh = store(disk)
    add(fresh, 7)

    expected = [offset for offset in (0, 1, 2, 7) if offset != lost]
    assert [letter.offset for letter in fresh.find("actions")] == expected
    assert [letter.offset for letter in store(disk).find("actions")] == expected
    assert "not whole" in caplog.text
    after = read_file(disk, FILE)
    assert after is not None
    assert after.startswith(spoilt)


@pytest.mark.req("F131")
@pytest.mark.parametrize("mode", CRASH_MODES)
@pytest.mark.parametrize("op", ["write", "sync"])
def test_a_letter_that_failed_to_be_stored_is_stored_again(op: Literal["write", "sync"], mode: CrashMode) -> None:
    """After a failed write or sync the file may read better than it is; the next try does not believe it."""
    disk = SimulatedDisk(3)
    disk.make_folder(FOLDER.parent)
    for folder in (Path("/"), Path("/data")):
        disk.sync_folder(folder)
    letters = store(disk)
    add(letters, 0)
    for offset in (1, 2):
        disk.fail_next(op, errno.EIO, path_contains="dlq")
        with pytest.raises(OSError, match="Input/output"):
            add(letters, offset)
        add(letters, offset + 10)
        add(letters, offset)

    found = store(disk.after_crash(mode)).find("actions")

    assert [letter.offset for letter in found] == [0, 1, 2, 11, 12]


@pytest.mark.req("F131")
@given(
    calls=st.integers(1, 40),
    within=st.booleans(),
    mode=st.sampled_from(CRASH_MODES),
    killed_before=st.booleans(),
    seed=st.integers(0, 50),
)
def test_a_added_letter_survives_any_crash(
    calls: int, within: bool, mode: CrashMode, killed_before: bool, seed: int
) -> None:
    """A letter that was answered for is there after a power cut at any call, also if a killed process wrote it first."""
    disk = SimulatedDisk(seed)
    disk.make_folder(FOLDER.parent)
    for folder in (Path("/"), Path("/data")):
        disk.sync_folder(folder)
    if killed_before:
        disk.crash_after = disk.calls + calls % 7
        with contextlib.suppress(SimulatedCrash):
            add(store(disk), 0)
        disk = disk.clone()
    disk.crash_after, disk.crash_within = disk.calls + calls, within
    letters = store(disk)
    answered: set[int] = set()
    with contextlib.suppress(SimulatedCrash):
        for offset in range(5):
            add(letters, offset)
            answered.add(offset)

    after = disk.after_crash(mode, seed=seed)
    found = {letter.offset for letter in store(after).find("actions")}

    assert answered <= found <= set(range(5))


@pytest.mark.parametrize("count", [20, pytest.param(2_000, marks=pytest.mark.heavy)])
def test_one_letter_of_many_costs_its_own_lines(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at one letter, to request, drop and redrive it reads the lines of that letter, however many others there are."""
    letters = store()
    for offset in range(count):
        add(letters, offset)
    letters.request("actions", ["g-3"])
    looked_at: list[bytes] = []

    def counting(line: bytes) -> bool:
        looked_at.append(line)
        return is_whole(line)

    monkeypatch.setattr(dead_letter_files, "is_whole", counting)
    (wanted,) = letters.find("actions", None, DeadLetterFilter(states=("requested", "trying")))
    (requested,) = letters.request("actions", ["g-7"])
    letters.begin("actions", "g-7")
    letters.finish("actions", "g-7", ValueError("worse luck"))
    again = letters.get("actions", "g-7")
    named = letters.find("actions", ["g-9"])

    assert (wanted.id, requested.state, again.state, again.error) == ("g-3", "requested", "dead", "worse luck")
    assert [letter.id for letter in named] == ["g-9"]
    assert len(looked_at) <= 10


def test_a_letter_added_again_is_read_from_its_last_line_on() -> None:
    """A letter that was redriven and is dead again has the state of its own life, with the lines before it or without."""
    disk = SimulatedDisk(0)
    letters = store(disk)
    add(letters, 1)
    letters.request("actions", ["g-1"])
    letters.finish("actions", "g-1")
    add(letters, 1, error="again")

    for each in (letters, store(disk)):
        letter = each.get("actions", "g-1")
        assert (letter.state, letter.error, letter.redrives) == ("dead", "again", 0)
