"""Workspaces that were recorded with the code of commit 2824fe7, whose rules emit nothing when something is made: they open and go on."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tidings.happenings.variants import SubjectAnnounced
from tidings.ledger.errors import UnknownCommand
from tidings.testing import VirtualClock

from .recorded.recording import announce, contents, opened

RECORDED: Final = Path(__file__).parent / "recorded"


@pytest.fixture(params=["closed", "closed, snapshots removed", "killed in the middle of a command"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    case: str = request.param
    with tarfile.open(RECORDED / f"{case.partition(',')[0].partition(' ')[0]}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "workspace"
    if "removed" in case:
        shutil.rmtree(folder / ".bus" / "ledger")
    return folder


def expected() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((RECORDED / "contents.json").read_bytes())
    return found


async def test_a_recorded_workspace_opens_as_it_was_and_goes_on(workspace: Path) -> None:
    """
    State, seqs and history are those that the code of the recording saw; new commands emit, and both survive the next opening.
    """
    clock = VirtualClock()
    ledger = await opened(workspace, clock)
    try:
        assert ledger.problems == []
        assert await contents(ledger) == expected()
        seq = ledger.happenings.last_seq
        await ledger.execute(announce("new"))
        [made] = [each async for each in ledger.happenings.history(seq)]
        assert made.seq == seq + 1
        assert isinstance(made.happening, SubjectAnnounced)
        before = await contents(ledger)
    finally:
        await ledger.close()
    shutil.rmtree(workspace / ".bus" / "ledger", ignore_errors=True)  # old and new commands are executed again
    ledger = await opened(workspace, clock)
    try:
        assert await contents(ledger) == before
    finally:
        await ledger.close()


async def test_a_record_of_newer_rules_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A command that a newer version decided is not executed by the rules of this one: opening says so.
    """
    clock = VirtualClock()
    with monkeypatch.context() as newer:
        newer.setattr("tidings.ledger.records.RULES", 3)
        ledger = await opened(workspace, clock)
        await ledger.execute(announce("new"))
        await ledger.close()
    shutil.rmtree(workspace / ".bus" / "ledger", ignore_errors=True)

    with pytest.raises(UnknownCommand, match="version 3 of the rules"):
        await opened(workspace, clock)
