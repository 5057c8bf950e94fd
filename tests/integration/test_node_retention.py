"""A node keeps its log within the rules of its settings, while it runs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.conformance.support import event, numbered, read_all, until
from tests.integration.cli.support import invoke
from tidings.log import LogSettings, Query, TopicRetention
from tidings.pipeline.errors import LakeDamaged
from tidings.testing.node import node_settings, running_node
from tidings.types import Ack

RULES = {
    "orders": TopicRetention(consumed=True),
    "sync": TopicRetention(consumed=True),
    "*": TopicRetention(size_bytes_max=0),
}


async def test_what_nobody_needs_is_dropped_and_on_record(tmp_path: Path) -> None:
    """Segments that the rules let go are dropped after a record in the audit topic; what a group or a partition holds stays."""
    plain = node_settings()
    log = LogSettings(journal_bytes=1 << 20, segment_lines_max=10, retention=RULES)
    settings = msgspec.structs.replace(plain, log=log)
    async with running_node(tmp_path, settings) as node:
        taken = 0

        async def handler(_: object) -> Ack:
            nonlocal taken
            taken += 1
            return Ack()

        await node.log.append_many(numbered("orders", 25))
        await node.log.append_many([event("shared", {"n": n}, partitions=["home"]) for n in range(25)])
        before = await node.run_retention()
        subscription = await node.bus.subscribe("orders", "billing", handler)
        await until(lambda: taken == 25)
        await node.bus.unsubscribe(subscription)  # its place is stored
        after = await node.run_retention()
        audited = [record.payload for record in await read_all(node.log, Query(topic="audit"))]
        left = [record.offset for record in await read_all(node.log, Query(topic="orders"))]

    assert before.drops == ()
    assert [(drop.segment.topic, drop.segment.number) for drop in after.drops] == [("orders", 1), ("orders", 2)]
    assert left == list(range(20, 25))
    (begun, ended) = audited
    assert (begun["segments"], begun["records"]) == (2, 20)
    assert ended["outcome"] == "done"


async def test_a_node_drops_nothing_on_the_word_of_a_lake_that_is_not_what_it_was(tmp_path: Path) -> None:
    """Segments that the lake holds may go; once its tables are gone, nothing does, and whoever asked is told."""
    log = LogSettings(journal_bytes=1 << 20, segment_lines_max=10, retention={"*": TopicRetention(size_bytes_max=0)})
    settings = msgspec.structs.replace(node_settings(), log=log)
    async with running_node(tmp_path, settings) as node:
        await node.log.append_many(numbered("orders", 25))
    assert invoke("pipeline", "run", "--once", "--jobs", "none", "-w", tmp_path).exit_code == 0
    await asyncio.to_thread(shutil.rmtree, tmp_path / "lake/tables")
    async with running_node(tmp_path, settings) as node:
        with pytest.raises(LakeDamaged, match="ends at seq 0"):
            await node.run_retention()
        kept = [record.offset for record in await read_all(node.log, Query(topic="orders"))]

    assert kept == list(range(25))
