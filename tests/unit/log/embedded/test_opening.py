"""What a log is opened with is checked first, and what it is told to keep it can say."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import msgspec
import pytest

from tests.conformance.support import event
from tidings.core.errors import InvalidName, SettingsError
from tidings.core.settings import checked
from tidings.log import Appended, Duplicate, LogSettings, Query, TopicRetention
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import File, OsDisk
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.verify import verify
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import WorkspaceBusy, WorkspaceError, WorkspaceUnusable
from tidings.log.keys import DerivedKeys


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (LogSettings(segment_bytes_max=999_999), "segment_bytes_max"),
        (LogSettings(segment_bytes_max=100_000_001), "segment_bytes_max"),
        (LogSettings(segment_lines_max=-5), "segment_lines_max"),
        (LogSettings(durability="eventually"), "durability"),  # type: ignore[arg-type]
        (LogSettings(retention={"a": TopicRetention(age_days_max=-1)}), "retention[...].age_days_max"),
    ],
)
@pytest.mark.req("F30")
async def test_a_setting_out_of_its_range_is_refused_by_name(tmp_path: Path, settings: LogSettings, path: str) -> None:
    """Nothing is opened or made with a setting that cannot be right."""
    with pytest.raises(SettingsError) as caught:
        await open_log(tmp_path / "new", settings)

    assert caught.value.path == path
    assert not (tmp_path / "new").exists()


@pytest.mark.req("F39")
async def test_a_space_that_cannot_be_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """In the layout with a folder for each space, a name too long for one does not reach the log."""
    log = await open_log(tmp_path, LogSettings(layout="space"))
    with pytest.raises(InvalidName) as caught:
        await log.append(event("a", {}, space_id="é" * 60))
    assert caught.value.field == "meta.space_id"

    await log.append(event("a", {}, space_id="shared:household"))
    await log.close()
    log = await open_log(tmp_path, LogSettings(layout="space"))
    assert [record.seq for record in (await log.read(Query())).records] == [1]
    assert sorted(path.name for path in (tmp_path / ".bus" / "wal").iterdir()) == ["shared%3Ahousehold"]
    await log.close()


async def test_a_retry_in_a_sealed_space_is_told_while_its_first_is_on_its_way(tmp_path: Path) -> None:
    """What is compared is what was sent, not how it was encrypted."""
    encryptor = AesGcmEncryptor(DerivedKeys(b"k" * 32))
    log = await open_log(tmp_path, encryptor=encryptor)

    answers = await asyncio.gather(*(log.append(event("a", {"n": 1}, event_id="e1")) for _ in range(3)))
    many = await log.append_many([event("a", {"n": 2}, event_id="e2"), event("a", {"n": 2}, event_id="e2")])

    assert sorted(type(answer).__name__ for answer in answers) == ["Appended", "Duplicate", "Duplicate"]
    assert [type(answer) for answer in many] == [Appended, Duplicate]
    await log.close()
    stored = (tmp_path / ".bus" / "wal" / "a.00000001.jsonl").read_bytes()
    assert b'"n":1' not in stored
    assert msgspec.json.decode(stored.splitlines()[0])["meta"]["sealed"]["alg"]


@pytest.mark.req("F31")
def test_segments_are_small_enough_for_flash_by_default() -> None:
    """By default a segment is rewritten by nobody and sealed at 16 MB or 50,000 lines, well within the range of 1 to 100 MB."""
    assert (LogSettings().segment_bytes_max, LogSettings().segment_lines_max) == (16_000_000, 50_000)
    assert checked(LogSettings()) == LogSettings()


async def test_an_index_that_cannot_be_used_is_made_anew_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged index costs a rebuild and a warning, and dedupe goes on as if it had been whole."""
    log = await open_log(tmp_path)
    await log.append(event("a", {"n": 1}, event_id="e1"))
    await log.close()
    (tmp_path / ".bus" / "index" / "data.mdb").write_bytes(b"not an index" * 1000)

    log = await open_log(tmp_path)
    again = await log.append(event("a", {"n": 1}, event_id="e1"))
    await log.close()

    assert isinstance(again, Duplicate)
    assert "made anew" in caplog.text


async def test_whoever_comes_second_is_told_where_the_node_is(tmp_path: Path) -> None:
    """A workspace that a node owns is refused with the node's address, and with what can be done there."""
    log = await open_log(tmp_path)
    (tmp_path / ".bus" / "node.json").write_text('{"url":"http://127.0.0.1:8787","pid":1}')

    with pytest.raises(WorkspaceBusy) as refused:
        await open_log(tmp_path)
    (tmp_path / ".bus" / "node.json").write_text("{")
    with pytest.raises(WorkspaceBusy) as refused_again:
        await open_log(tmp_path)
    await log.close()

    assert refused.value.node_url == "http://127.0.0.1:8787"
    assert "http://127.0.0.1:8787" in str(refused.value.hint)
    assert refused_again.value.node_url is None


class WatchedDisk(OsDisk):
    """Notes which files are opened, and how many syncs are under way at once."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.syncs = 0
        self.under_way = 0
        self.under_way_max = 0
        self.guard = threading.Lock()

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        self.opened.append(path.name)
        file: File = WatchedFile(super().open(path, create=create, write=write), self)  # type: ignore[assignment]
        return file


class WatchedFile:
    def __init__(self, file: File, disk: WatchedDisk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def sync(self) -> None:
        disk = self._disk
        with disk.guard:
            disk.syncs += 1
            disk.under_way += 1
            disk.under_way_max = max(disk.under_way_max, disk.under_way)
        self._file.sync()
        with disk.guard:
            disk.under_way -= 1


async def test_many_topics_are_closed_together_and_opened_without_a_sync(tmp_path: Path) -> None:
    """
    Closing a log with news in hundreds of topics waits for many files at a time. Opening it again, as nothing is to be
    mended, reads each topic's file once and syncs none of them.
    """
    disk = WatchedDisk()
    log = await open_log(tmp_path, LogSettings(journal_bytes=1 << 20), disk=disk)
    await log.append_many([event(f"t{n}", {"n": n}) for n in range(400)])
    await log.close()
    assert disk.under_way_max > 4
    assert disk.syncs >= 400

    disk = WatchedDisk()
    log = await open_log(tmp_path, LogSettings(journal_bytes=1 << 20), disk=disk)

    opened = [name for name in disk.opened if name.startswith("t")]
    assert len(opened) == len(set(opened)) == 400
    assert disk.syncs < 5
    assert (await log.append(event("t7", {"more": 1}))).offset == 1
    await log.close()
    assert verify(OsDisk(), Layout(tmp_path), LogSettings()).findings == ()


def test_one_of_many_syncs_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If files are synced together and one fails, the error is raised, and the others were synced all the same."""
    disk = WatchedDisk()
    files = [disk.open(tmp_path / f"{n}", create=True) for n in range(20)]

    def fail() -> None:
        raise OSError(errno.EIO, "no such luck")

    monkeypatch.setattr(files[3], "sync", fail)
    with pytest.raises(OSError, match="no such luck"):
        disk.sync_files(files)
    assert disk.syncs == 19


@pytest.mark.parametrize("name", ["journal", "ids", "seals"])
async def test_an_empty_folder_that_a_copy_left_out_is_made(tmp_path: Path, name: str) -> None:
    """The log opens and goes on; verify says before that what opening will make."""
    log = await open_log(tmp_path)
    await log.append(event("a", {"n": 1}))
    await log.close()
    (tmp_path / ".bus" / name).rmdir()

    findings = verify(OsDisk(), Layout(tmp_path), LogSettings()).findings
    assert [(each.severity, each.code, each.path) for each in findings] == [("info", "folder.missing", f".bus/{name}")]
    log = await open_log(tmp_path)
    assert (await log.append(event("a", {"n": 2}))).seq == 2
    await log.close()
    assert verify(OsDisk(), Layout(tmp_path), LogSettings()).findings == ()


async def test_a_log_whose_description_is_missing_says_why_its_epoch_is_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new workspace says nothing; one with records names the file, the new epoch and what follows."""
    log = await open_log(tmp_path)
    await log.append(event("a", {"n": 1}))
    await log.close()
    assert not caplog.records
    (tmp_path / ".bus" / "meta.json").unlink()

    log = await open_log(tmp_path)
    said = next(record.message for record in caplog.records if "meta.json was missing" in record.message)
    assert log.position.epoch in said
    assert "group seek" in said
    await log.close()


async def test_a_description_that_was_altered_has_a_hint(tmp_path: Path) -> None:
    """It names the copy to put back and the command that gives the log a new epoch."""
    await (await open_log(tmp_path)).close()
    path = tmp_path / ".bus" / "meta.json"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":7'))

    with pytest.raises(WorkspaceError) as caught:
        await open_log(tmp_path)

    assert "log repair" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["lock", "reserve"])
async def test_a_file_that_is_a_symbolic_link_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing is written through it."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"keep me")
    (tmp_path / "w" / ".bus").mkdir(parents=True)
    (tmp_path / "w" / ".bus" / name).symlink_to(mine)

    with pytest.raises(WorkspaceUnusable, match="symbolic link"):
        await open_log(tmp_path / "w")

    assert mine.read_bytes() == b"keep me"
