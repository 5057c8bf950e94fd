"""Ids of a batch are looked up at once, and what was not there then is found when it is there."""

from __future__ import annotations

from pathlib import Path

from tidings.core.events import Event, EventMeta
from tidings.log import LogSettings
from tidings.log.embedded import open_log
from tidings.log.interface import Appended, Duplicate


def events(names: list[str], size: int = 1) -> list[Event]:
    """Events with these ids."""
    return [Event(EventMeta("demo", "MADE", "shared:home", name), {"text": "x" * size}) for name in names]


async def test_ids_that_were_absent_are_found_once_they_are_indexed(tmp_path: Path) -> None:
    """
    A batch whose ids were new is told to be a repetition when it comes again, also after the index has taken them over.
    """
    log = await open_log(tmp_path, LogSettings(journal_bytes=1 << 20))
    first = await log.append_many(events(["a", "b"]))
    for number in range(40):  # fills the journal several times over, and each checkpoint feeds the index
        await log.append_many(events([f"{number}-1", f"{number}-2"], 40_000))

    again = await log.append_many(events(["a", "c", "b", "c"]))

    await log.close()
    assert all(isinstance(each, Appended) for each in first)
    assert [type(each) for each in again] == [Duplicate, Appended, Duplicate, Duplicate]
    assert [again[0].seq, again[2].seq] == [each.seq for each in first]  # type: ignore[union-attr]
