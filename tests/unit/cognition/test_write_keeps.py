"""What is written is kept: merging costs nothing but a text said twice, lowers no band, and episodes count what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cognition.support import START, Bus, make_event
from tidings.cognition.write import (
    ConsolidationSettings,
    Memory,
    MemoryStore,
    MergeStrategy,
    WriteHandler,
    WriteSettings,
)
from tidings.cognition.write.store import CommittedWrite
from tidings.core.events import SecurityBand
from tidings.testing import VirtualClock

WALK = "We walked along the shore until the lighthouse came into view, and then the rain began to fall on us all."
NEARLY_WALK = WALK.replace("on us all", "on us")
SCALE = {"device": "bathroom scale, upstairs, the white one", "unit": "kilogram", "person": "alice in the morning"}
MERGING = [MergeStrategy.MERGE_CONTENT, MergeStrategy.APPEND_CONTEXT, MergeStrategy.TEMPORAL_UPDATE]


class Diary:
    """A store and its handler, in which things are written one after another."""

    def __init__(self, path: Path | str = ":memory:", **settings: Any) -> None:
        self.bus, self.clock = Bus(), VirtualClock()
        self.store = MemoryStore(path, WriteSettings(**settings))
        self.handler = WriteHandler(self.store, self.bus.publish, self.clock)
        self._count = 0

    async def write(self, content: Any, **more: Any) -> CommittedWrite:
        self._count += 1
        return await self.handler.write(make_event({"content": content}, event_id=f"w{self._count}", **more))

    def memory(self, done: CommittedWrite) -> Memory:
        found = self.store.memory(done.receipt.memory_id)
        assert found is not None
        return found


@pytest.mark.parametrize("strategy", MERGING)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"text": WALK, "kg": 80}, {"text": WALK, "kg": 93}),
        ({"text": WALK, "kg": 80}, {"text": WALK}),
        ({"text": WALK}, {"text": WALK, "kg": 93}),
        ({"text": WALK, "is_far": True}, {"text": WALK, "is_far": 1}),
        ({"text": WALK, "context": "at home"}, {"text": WALK}),
        ({"text": WALK}, {"text": WALK, "context": "at work"}),
        ({**SCALE, "kg": 80.1}, {**SCALE, "kg": 80.2}),
        (SCALE, SCALE),
    ],
)
async def test_only_the_same_said_again_is_merged(
    strategy: MergeStrategy, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Two memories that differ beside the text, or have none, are both kept as they are, and linked."""
    diary = Diary(strategy=strategy)
    first, second = await diary.write(one), await diary.write(other)

    assert second.receipt.operation == "link"
    assert (diary.memory(first).content, diary.memory(second).content) == (one, other)
    assert diary.store.links(first.receipt.memory_id).keys() == {second.receipt.memory_id}


@pytest.mark.parametrize("text", ["", "   "])
async def test_an_empty_text_is_like_nothing(text: str) -> None:
    """Two pictures without words are two memories."""
    diary = Diary()
    first, second = [await diary.write({"text": text, "image": f"blob:{name}"}) for name in ("left", "right")]

    assert second.receipt.operation == "create"
    assert diary.memory(first).content["image"] == "blob:left"
    assert diary.memory(second).content["image"] == "blob:right"


async def test_the_likest_that_may_be_merged_is_merged_with() -> None:
    """Of two memories with the same text, the one that is alike in all else."""
    diary = Diary()
    first, second = await diary.write({"text": WALK, "kg": 80}), await diary.write({"text": WALK, "kg": 93})
    third = await diary.write({"text": WALK, "kg": 93})

    assert (third.receipt.operation, third.receipt.memory_id) == ("merge", second.receipt.memory_id)
    assert diary.memory(first).said_count == 1
    assert diary.memory(second).said_count == 2


async def test_a_memory_is_merged_into_more_than_once() -> None:
    """The context that merging has appended is no difference."""
    diary = Diary(strategy=MergeStrategy.APPEND_CONTEXT)
    for text in (WALK, NEARLY_WALK, WALK):
        done = await diary.write({"text": text, "kg": 80})

    memory = diary.memory(done)
    assert (memory.said_count, memory.content["kg"]) == (3, 80)
    assert [each["text"] for each in memory.content["context"]] == [NEARLY_WALK, WALK]


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": MergeStrategy.MERGE_CONTENT, "text_chars_max": len(WALK) + 10},
        {"strategy": MergeStrategy.APPEND_CONTEXT, "text_chars_max": len(WALK) + 10},
        {"strategy": MergeStrategy.APPEND_CONTEXT, "context_count_max": 1},
    ],
)
async def test_what_does_not_fit_into_a_memory_is_kept_beside_it(settings: dict[str, Any]) -> None:
    """Memories are bounded; what would overflow one is stored for itself and linked."""
    diary = Diary(**settings)
    texts = [WALK, NEARLY_WALK, WALK.replace("on us all", "upon us all")]
    done = [await diary.write({"text": text}) for text in texts]
    kept = str([diary.memory(each).content for each in done])

    assert all(text in kept for text in texts)
    assert "link" in {each.receipt.operation for each in done}


@pytest.mark.parametrize(
    ("before", "now"), [(SecurityBand.RED, SecurityBand.GREEN), (SecurityBand.GREEN, SecurityBand.RED)]
)
async def test_bands_are_not_mixed(before: SecurityBand, now: SecurityBand) -> None:
    """A memory has the band of all that went into it: across bands there is a link, within one a merge."""
    diary = Diary()
    first, second = await diary.write(WALK, band=before), await diary.write(NEARLY_WALK, band=now)
    third = await diary.write(NEARLY_WALK, band=before)

    assert (second.receipt.operation, diary.memory(second).security_band) == ("link", now)
    assert third.receipt.memory_id == first.receipt.memory_id
    assert diary.memory(first).security_band is before
    told = [event for event in diary.bus.on("hippo") if event.meta.type == "HIPPO_ENCODE"]
    assert [event.meta.band for event in told] == [before, now, before]


async def test_an_older_file_is_brought_up_to_date(tmp_path: Path) -> None:
    """Its memories are there; their bands are not known, so that nothing is merged into them."""
    path = tmp_path / "m.db"
    diary = Diary(path)
    old = await diary.write(WALK)
    diary.store.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("ALTER TABLE memories DROP COLUMN security_band")
        file.execute("PRAGMA user_version = 1")
        file.commit()
    diary = Diary(path)
    found = diary.memory(old)
    again = await diary.handler.write(make_event({"text": WALK}, event_id="later"))
    diary.store.close()

    assert (found.content, found.security_band) == ({"text": WALK}, None)
    assert again.receipt.operation == "link"


class NoRedactions:
    """A policy that can say who may write, and not what is kept."""

    def may_write(self, actor_id: str, space_id: str) -> bool:
        return True

    def shared_space(self, actor_id: str, participants: tuple[str, ...]) -> str | None:
        return None

    def redactions(self, space_id: str) -> frozenset[str]:
        raise RuntimeError("policy service gone")


async def test_what_was_wholly_redacted_is_like_nothing() -> None:
    """Two memories of which nothing is left are two memories."""
    store = MemoryStore(":memory:")
    handler = WriteHandler(store, Bus().publish, VirtualClock(), NoRedactions())
    done = [await handler.write(make_event({"text": text}, event_id=text)) for text in (WALK, "figures")]

    assert [each.receipt.operation for each in done] == ["create", "create"]
    assert [each.encoding.flags for each in done] == [("conservative_redaction",)] * 2


@pytest.mark.req("F117")
async def test_an_episode_counts_the_memories_it_holds() -> None:
    """The same said the next evening is merged into the first evening's memory, and begins no episode of its own."""
    diary = Diary()
    evening = datetime(2025, 9, 6, 18, tzinfo=UTC)
    first = await diary.write(WALK, ts=evening)
    for ts in (evening + timedelta(hours=1.5), evening + timedelta(days=1)):
        again = await diary.write(WALK, ts=ts)
        assert (again.receipt.operation, again.encoding.episode_id) == ("merge", first.encoding.episode_id)
    other = await diary.write("Something else was seen three hours on.", ts=evening + timedelta(hours=3))

    assert again.encoding.bucket == "2025-09-07-evening"
    assert other.encoding.episode_id == first.encoding.episode_id
    assert [(each.bucket, each.memories) for each in diary.store.episodes("personal:alice")] == [
        ("2025-09-06-evening", 2)
    ]


@pytest.mark.req("F116")
async def test_a_space_that_falls_silent_is_consolidated_all_the_same() -> None:
    """Its age calls for it, without a later write, once."""
    diary = Diary(consolidation=ConsolidationSettings(age_s=6 * 3600))
    await diary.write(WALK)
    running = asyncio.create_task(diary.handler.run())

    async def hours(count: int) -> int:
        for _ in range(60 * count):
            await diary.clock.sleep(60)
            # The store works in a thread, for which virtual time does not wait.
            await diary.handler.outbox.rows()
        return len(diary.bus.on("consolidation"))

    assert await diary.clock.run_until(hours(5), outside_seconds_max=30) == 0
    assert await diary.clock.run_until(hours(15), outside_seconds_max=30) == 1
    (tick,) = diary.bus.on("consolidation")
    assert tick.payload["reason"] == ["age"]
    assert tick.payload["scope"]["from"] == START.isoformat().replace("+00:00", "Z")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
