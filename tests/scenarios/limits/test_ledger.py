"""Limits of ledger commands, pages, projections and subscriptions: at the limit they work; beyond it they are rejected or cut."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.scenarios.ledger.support import CATALOGUE, PLAYBACK
from tidings.happenings import filters
from tidings.happenings.coalescing import Coalescing
from tidings.happenings.errors import CursorTooOld, InvalidCoalescing, InvalidHappeningFilter, Lagged
from tidings.happenings.filters import filter_from_json
from tidings.happenings.variants import PluginEvent
from tidings.ledger import (
    Ledger,
    LedgerSettings,
    Manifest,
    PluginRequest,
    catalogue,
    commands,
    grammar,
    handlers,
    open_ledger,
    paging,
    predicates,
)
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.claims import AnnounceSubject
from tidings.ledger.errors import CommandTooLarge, InvalidCommand, LedgerError
from tidings.ledger.plugins import Plugin
from tidings.ledger.predicates import predicate_test
from tidings.ledger.subjects import Addressing
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

NAME = ("id", "1")


@pytest.fixture
async def ledger() -> AsyncIterator[Ledger]:
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, clock=VirtualClock()) as opened:
        yield opened


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


Call = Callable[[Plugin, int], Awaitable[object]]
CALLS: dict[str, tuple[int, Call]] = {
    "a text": (commands.TEXT_BYTES_MAX, lambda plugin, size: plugin.announce_subject("track", [("id", "x" * size)])),
    "a state": (
        commands.JSON_BYTES_MAX,
        lambda plugin, size: plugin.announce_subject("track", [NAME], state="x" * (size - 2)),
    ),
    "a state's depth": (
        commands.JSON_DEPTH_MAX,
        lambda plugin, size: plugin.announce_subject("track", [NAME], state=nested(size)),
    ),
    "an instance's payload": (
        commands.PAYLOAD_BYTES_MAX,
        lambda plugin, size: plugin.announce_instance("one", b"x" * size, shelf=PLAYBACK),
    ),
}


@pytest.mark.bound(
    "ledger.commands.TEXT_BYTES_MAX",
    "ledger.commands.JSON_BYTES_MAX",
    "ledger.commands.JSON_DEPTH_MAX",
    "ledger.commands.PAYLOAD_BYTES_MAX",
)
@crossed
@pytest.mark.parametrize(("limit", "call"), list(CALLS.values()), ids=list(CALLS))
async def test_a_command_beyond_its_limit_is_rejected_and_stores_nothing(
    ledger: Ledger, limit: int, call: Call, beyond: Beyond
) -> None:
    """``InvalidCommand`` names the part; the ledger's position does not move, and the same call at the limit works."""
    plugin = ledger.plugin("org.example.player")
    await ledger.finish_waiting()
    before = ledger.happenings.last_seq
    with pytest.raises((InvalidCommand, CommandTooLarge)):
        await call(plugin, beyond(limit))
    assert ledger.happenings.last_seq == before
    await call(plugin, limit)


@pytest.mark.bound("ledger.settings.LedgerSettings.record_bytes_max")
@crossed
async def test_a_command_larger_than_a_record_is_rejected(beyond: Beyond) -> None:
    """A command beyond ``record_bytes_max`` raises; one within it is stored."""
    settings = LedgerSettings(record_bytes_max=4096)
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, settings=settings) as ledger:
        plugin = ledger.plugin("p")
        with pytest.raises(LedgerError):
            await plugin.announce_subject("track", [NAME], state="x" * beyond(4096))
        assert await plugin.announce_subject("track", [NAME], state="x" * 3000)


@pytest.mark.bound("ledger.settings.LedgerSettings.batch_count_max", "ledger.settings.LedgerSettings.waiting_count_max")
@crossed
async def test_a_longer_list_takes_several_commits(beyond: Beyond) -> None:
    """Every command of a list beyond a commit, and beyond what may wait, is executed in order."""
    settings = LedgerSettings(batch_count_max=5, waiting_count_max=5)
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, settings=settings) as ledger:
        results = await ledger.execute_many(
            [
                AnnounceSubject(
                    plugin="p", subject_type="track", addressings=(Addressing("id", str(number)),), new_id=f"s{number}"
                )
                for number in range(beyond(5))
            ]
        )
        assert not [result for result in results if isinstance(result, BaseException)]


@pytest.mark.bound("ledger.paging.PAGE_SIZE_MAX")
@crossed
async def test_a_larger_page_is_cut(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, beyond: Beyond) -> None:
    """A page never has more entries than the limit, and its cursor leads to the others."""
    monkeypatch.setattr(paging, "PAGE_SIZE_MAX", 5)
    plugin = ledger.plugin("p")
    for number in range(beyond(5)):
        await plugin.announce_subject("track", [("id", str(number))])
    page = await ledger.projections.list_subjects(page_size=beyond(5))
    assert (len(page.items), page.next_cursor is not None) == (5, True)


@pytest.mark.bound("ledger.settings.LedgerSettings.buffer_count_max")
@crossed
async def test_a_subscriber_beyond_its_buffer_learns_how_many_it_missed(beyond: Beyond) -> None:
    """Separate happenings beyond the buffer and history raise ``Lagged`` with their number; the rest follows."""
    settings = LedgerSettings(buffer_count_max=4)
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, settings=settings, clock=VirtualClock()) as ledger:
        subscription = ledger.happenings.subscribe()
        for number in range(beyond(4)):
            ledger.happenings.emit(PluginEvent(at_ms=0, plugin="p", event_type=str(number), payload=None))
        with pytest.raises(Lagged) as lagged:
            await subscription.recv()
        assert lagged.value.missed_count == beyond(4) - 4
        rest = [(await subscription.recv()).happening for _ in range(4)]
        assert [getattr(happening, "event_type", "") for happening in rest] == [
            str(number) for number in range(beyond(4) - 4, beyond(4))
        ]


@pytest.mark.bound(
    "ledger.settings.LedgerSettings.history_count_max", "ledger.settings.LedgerSettings.history_age_s_max"
)
@crossed
@pytest.mark.parametrize("kind", ["count", "age"])
async def test_a_cursor_behind_history_is_too_old(kind: str, beyond: Beyond) -> None:
    """Subscribing since a position that history has dropped, by number or by age, raises ``CursorTooOld``."""
    clock = VirtualClock()
    settings = LedgerSettings(
        history_count_max=5 if kind == "count" else None,
        history_age_s_max=60.0 if kind == "age" else None,
        janitor_interval_s=1.0,
    )
    async with await open_ledger(MemoryLog(clock=clock), catalogue=CATALOGUE, settings=settings, clock=clock) as ledger:
        first = await ledger.happenings.emit_durable(_event())
        if kind == "age":
            await clock.advance(beyond(60))
        for _ in range(beyond(5) if kind == "count" else 1):
            await ledger.happenings.emit_durable(_event())
        await clock.advance(2)
        ledger.happenings.subscribe(since=ledger.happenings.last_seq)
        with pytest.raises(CursorTooOld):
            ledger.happenings.subscribe(since=first - 1)


@pytest.mark.bound("happenings.coalescing._LABELS_COUNT_MAX", "happenings.coalescing._WINDOW_MS_MAX")
@crossed
async def test_coalescing_is_limited_in_labels_and_time(beyond: Beyond) -> None:
    """More labels raise ``InvalidCoalescing``; a longer window ends when the longest allowed one does."""
    clock = VirtualClock()
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, clock=clock) as ledger:
        with pytest.raises(InvalidCoalescing):
            ledger.happenings.subscribe(coalesce=Coalescing(tuple(f"l{number}" for number in range(beyond(64)))))
        subscription = ledger.happenings.subscribe(coalesce=Coalescing(("plugin",), window_ms=beyond(5000)))
        await ledger.happenings.emit_durable(_event())
        received = asyncio.ensure_future(subscription.recv())
        await clock.advance(5.1)
        assert received.done()
        assert received.result().seq == ledger.happenings.last_seq


@pytest.mark.bound("happenings.coalescing._WINDOWS_COUNT_MAX")
@crossed
async def test_more_open_windows_deliver_the_oldest(beyond: Beyond) -> None:
    """With more different happenings than windows, the oldest window ends early: nothing is lost."""
    clock = VirtualClock()
    settings = LedgerSettings(buffer_count_max=100_000)
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, settings=settings, clock=clock) as ledger:
        subscription = ledger.happenings.subscribe(coalesce=Coalescing(("event_type",), window_ms=5000))
        for number in range(beyond(1024)):
            ledger.happenings.emit(_event(str(number)))
        early = [(await subscription.recv()).happening for _ in range(beyond(1024) - 1024)]
        assert [getattr(happening, "event_type", "") for happening in early] == [str(n) for n in range(len(early))]


@pytest.mark.bound("ledger.catalogue._NAME_CHARS_MAX")
@crossed
def test_a_catalogue_with_a_longer_name_is_rejected(beyond: Beyond) -> None:
    """A type's name at the limit is taken; a longer one raises."""
    parse_catalogue(f'schema_version = 1\n[[subjects]]\nname = "{"n" * catalogue._NAME_CHARS_MAX}"\n')
    with pytest.raises(LedgerError):
        parse_catalogue(f'schema_version = 1\n[[subjects]]\nname = "{"n" * beyond(catalogue._NAME_CHARS_MAX)}"\n')


@pytest.mark.bound("ledger.predicates._PATTERN_MEMORY_BYTES")
@crossed
def test_a_pattern_that_needs_too_much_memory_is_rejected(beyond: Beyond) -> None:
    """RE2 compiles a pattern of bounded size only: a repetition whose program would be larger raises ``ValueError``."""

    def is_rejected(count: int) -> bool:
        try:
            predicate_test(predicates.Regex(field="name", pattern=f"(a{{40}}){{{min(count, 1000)}}}"))
        except ValueError:
            return True
        return False

    limit = bisect_left(range(1000), True, key=is_rejected) - 1
    assert limit > 1
    assert is_rejected(beyond(limit))


def _event(event_type: str = "e") -> PluginEvent:
    return PluginEvent(at_ms=0, plugin="p", event_type=event_type, payload=None)


@pytest.mark.bound("ledger.predicates._PATTERN_CHARS_MAX", "ledger.grammar.BATCH_COUNT_MAX")
@crossed
@pytest.mark.parametrize("kind", ["pattern", "batch"])
async def test_a_migration_with_a_longer_pattern_or_batch_is_rejected(kind: str, beyond: Beyond) -> None:
    """At the limit the migration is done; beyond it raises and changes nothing."""
    tracks, tunes = (
        parse_catalogue(f'schema_version = 1\n[[subjects]]\nname = "{name}"\n') for name in ("track", "tune")
    )
    log = MemoryLog()
    async with await open_ledger(log, catalogue=tracks, clock=VirtualClock()) as ledger:
        await ledger.plugin("library").announce_subject("track", [NAME], state={"name": "a"})

    def strategy(size: int) -> dict[str, Any]:
        predicate = {"kind": "regex", "field": "name", "pattern": "a" * size}
        return {"kind": "filter", "to_type": "tune", "predicate": predicate}

    async with await open_ledger(log, catalogue=tunes, clock=VirtualClock()) as ledger:
        limit = predicates._PATTERN_CHARS_MAX if kind == "pattern" else grammar.BATCH_COUNT_MAX

        async def migrate(size: int) -> object:
            if kind == "pattern":
                return await ledger.grammar.migrate("track", strategy(size), admin="root")
            rename = {"kind": "rename", "to_type": "tune"}
            return await ledger.grammar.migrate("track", rename, admin="root", batch_size=size)

        with pytest.raises(InvalidCommand):
            await migrate(beyond(limit))
        await migrate(limit)


@pytest.mark.bound("happenings.filters._VALUES_COUNT_MAX")
@crossed
def test_a_filter_with_more_values_is_rejected(beyond: Beyond) -> None:
    """A filter from elsewhere with as many names as allowed is read; one with more raises."""
    limit = filters._VALUES_COUNT_MAX
    filter_from_json({"variants": ["a"] * limit})
    with pytest.raises(InvalidHappeningFilter):
        filter_from_json({"variants": ["a"] * beyond(limit)})


class Failing:
    """A plugin whose every request fails."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def handle_request(self, request: PluginRequest) -> bytes:
        raise ValueError(self.text)


@pytest.mark.bound("ledger.handlers._PROBLEM_CHARS_MAX")
@crossed
async def test_a_longer_error_text_of_a_plugin_is_truncated(ledger: Ledger, beyond: Beyond) -> None:
    """The caller gets as much of it as allowed."""
    ledger.plugin("p", Failing("x" * beyond(handlers._PROBLEM_CHARS_MAX)), Manifest(shelves=(PLAYBACK,)))
    with pytest.raises(LedgerError) as caught:
        await ledger.plugins.request(PLAYBACK, "volume", b"")
    assert str(caught.value).count("x" * handlers._PROBLEM_CHARS_MAX) == 1
    assert "x" * (handlers._PROBLEM_CHARS_MAX + 1) not in str(caught.value)
