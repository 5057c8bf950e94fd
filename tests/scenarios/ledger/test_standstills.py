"""Large commands and long lists do not hold up the event loop: what no callback may take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.beyond import Beyond, crossed
from tests.callbacks import CALLBACK_S_MAX, measured_callbacks
from tests.scenarios.ledger.test_large_commands import CATALOGUE, hubs, read, subject
from tidings.happenings.variants import PluginEvent
from tidings.ledger import commands as commands_module
from tidings.ledger import open_ledger
from tidings.ledger.claims import RetractAddressing
from tidings.ledger.errors import CommandTooLarge
from tidings.ledger.merging import MergeSubjects, SplitSubject
from tidings.ledger.subjects import Addressing
from tidings.log.memory import MemoryLog


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.heavy)])
async def test_large_commands_leave_the_loop_to_others(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of announcements, a merge of two hubs, their split, the end of one and the unloading of its plugin: no callback takes 50 ms."""
    async with await open_ledger(tmp_path, catalogue=CATALOGUE) as ledger:
        with measured_callbacks(monkeypatch) as measured:
            await hubs(ledger, count, "a", "b")
            with ledger.happenings.subscribe() as stream:
                await ledger.execute(MergeSubjects(admin="adm", a="a", b="b", new_id="c"))
                await read(stream, ledger.happenings.last_seq)
            groups = ((Addressing("n", "a"),), (Addressing("n", "b"),))
            await ledger.execute(SplitSubject(admin="adm", source="c", partition=groups, new_ids=("d", "e")))
            await ledger.execute(RetractAddressing(plugin="p", addressing=Addressing("n", "a")))
            await ledger.plugin("p").unload()
        assert measured.longest_s < CALLBACK_S_MAX, measured


async def test_plain_emits_keep_their_order_beside_a_large_command() -> None:
    """What is emitted while a large command is executed elsewhere comes after it, in order, and no seq is given twice."""
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE) as ledger:
        await hubs(ledger, 1_500, "a", "b")
        happenings = ledger.happenings
        with happenings.subscribe() as stream:
            merging = asyncio.create_task(ledger.execute(MergeSubjects(admin="adm", a="a", b="b", new_id="c")))
            emitted = 0
            while not merging.done():
                happenings.emit(PluginEvent(at_ms=emitted, plugin="p", event_type="beside", payload=None))
                emitted += 1
                await asyncio.sleep(0.001)
            await merging
            last_seq = await happenings.emit_durable(PluginEvent(at_ms=0, plugin="p", event_type="last", payload=None))
            found = await read(stream, last_seq)

    assert [each.seq for each in found] == list(range(found[0].seq, last_seq + 1))
    kinds = [each.happening.variant for each in found]
    merged = kinds.index("subject_merged")
    assert set(kinds[:merged]) <= {"plugin_event"}
    assert kinds[merged : merged + 6_003].count("plugin_event") == 0
    moments = [each.happening.at_ms for each in found if each.happening.variant == "plugin_event"][:-1]
    assert moments == list(range(emitted))


@pytest.mark.bound("ledger.commands.HAPPENINGS_COUNT_MAX")
@crossed
async def test_a_command_that_would_emit_too_much_is_refused_before(
    monkeypatch: pytest.MonkeyPatch, beyond: Beyond
) -> None:
    """With 100 happenings allowed, a merge that would emit more and the end of a hub with more relations are refused and change nothing."""
    relations = beyond(25)  # a merge emits four happenings for each
    monkeypatch.setattr(commands_module, "HAPPENINGS_COUNT_MAX", 100)
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE) as ledger:
        await hubs(ledger, relations, "a", "b")
        await hubs(ledger, 101, "hub")
        seq = ledger.happenings.last_seq
        admin = ledger.admin("adm")
        with pytest.raises(CommandTooLarge, match="happenings; at most 100"):
            await admin.merge_subjects("a", "b")
        with pytest.raises(CommandTooLarge):
            await admin.force_retract_addressing("p", ("n", "hub"))
        with pytest.raises(CommandTooLarge):
            await ledger.execute(RetractAddressing(plugin="p", addressing=Addressing("n", "hub")))
        assert ledger.happenings.last_seq == seq
        assert await admin.entries() == ()
        monkeypatch.setattr(commands_module, "HAPPENINGS_COUNT_MAX", 4 * relations)
        await ledger.execute(subject("other"))
        await admin.merge_subjects("a", "b")
