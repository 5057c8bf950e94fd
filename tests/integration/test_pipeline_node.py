"""What the pipeline tells the log while a node holds the workspace: through the node's door, once, or not yet and said so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from tests.integration.cli.support import invoke
from tests.integration.pipeline_support import environment, tool
from tests.unit.pipeline.support import SMALL, Workspace, event
from tidings.cli.output import Output
from tidings.cli.pipeline_publisher import SummaryPublisher
from tidings.cli.session import Session
from tidings.cognition.jobs.consolidation_memories import CONSOLIDATION_ERASURES_JOBS
from tidings.cognition.jobs.consolidation_retention import CONSOLIDATION_SCRUB_JOBS
from tidings.core.events import Event
from tidings.log.embedded import open_log
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.pipeline.jobs.registry import all_jobs
from tidings.pipeline.schemas import BRONZE_EVENTS, SILVER_EVENTS, arrow_schema
from tidings.testing.node import RunningNode, running_node

PUBLISHES = ["temporal", "consolidation"]
NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


def summary(number: int, topic: str = "temporal", **meta: Any) -> Event:
    return event(number, topic, type="TEMPORAL_PATTERNS", payload={"n": number, "share": 0.5}, **meta)


async def publish(workspace: Path, events: Sequence[Event], token: str | None = None) -> bool:
    """Publish as a command does, which has a loop of its own."""
    publisher = SummaryPublisher(Session(workspace, Output(is_json=False)), token)
    return await asyncio.to_thread(publisher.publish, events)


async def told(node: RunningNode, topic: str = "temporal") -> list[str]:
    """The ids that a topic holds."""
    if topic not in node.log.topics():
        return []
    return [record.meta.event_id async for record in records(node.log, Query(topic=topic))]


async def test_through_the_log_or_the_node_an_event_is_stored_once(tmp_path: Path) -> None:
    """
    The same summaries, published to the log itself, through a node twice, and to the log again, are stored once.
    """
    events = [summary(1), summary(2, actor="pipeline:learning"), summary(3, "consolidation")]
    await asyncio.to_thread(Workspace(tmp_path).append, [event(100)])
    assert await publish(tmp_path, events[:1])
    async with running_node(tmp_path) as node:
        token = node.token("pipeline", topics=PUBLISHES)
        assert await publish(tmp_path, events, token)
        assert await publish(tmp_path, events, token)
        assert await told(node) == ["ev-1", "ev-2"]
        assert await told(node, "consolidation") == ["ev-3"]
    assert await publish(tmp_path, events)
    async with running_node(tmp_path) as node:
        assert node.log.position.seq == 4


async def test_without_a_token_they_wait_and_it_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    With a node in the way and no token, nothing is published, and one line says who holds the workspace and what to give.
    """
    async with running_node(tmp_path) as node:
        publisher = SummaryPublisher(Session(tmp_path, Output(is_json=False)), None)
        answers = [await asyncio.to_thread(publisher.publish, [summary(number)]) for number in range(3)]

        said = capsys.readouterr().err.splitlines()
        assert answers == [False, False, False]
        assert await told(node) == []
        assert len(said) == 1
        for part in ("1 summaries wait", node.url, "TIDINGS_TOKEN", "--token", "temporal"):
            assert part in said[0]


@pytest.mark.parametrize("kind", ["forbidden", "nonsense", "unsendable"])
async def test_a_token_that_does_not_do_lets_them_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """
    A token that may not publish there, or is none, publishes nothing; the node's own words are passed on.
    """
    async with running_node(tmp_path) as node:
        token = {"forbidden": node.token("pipeline", topics=["other"]), "nonsense": "x.y.z", "unsendable": "a\nb"}[kind]

        assert not await publish(tmp_path, [summary(1)], token)
        assert await told(node) == []
    assert "wait for the next run" in capsys.readouterr().err


async def test_more_than_one_request_holds_is_sent_in_several(tmp_path: Path) -> None:
    """
    Many summaries, and long ones, reach a node that takes no large requests, each of them and in order.
    """
    events = [summary(number) for number in range(450)]
    events += [
        event(number, "temporal", type="TEMPORAL_PATTERNS", payload={"t": "x" * 400_000}) for number in (900, 901, 902)
    ]
    async with running_node(tmp_path, body_bytes_max=1_300_000) as node:
        assert await publish(tmp_path, events, node.token("pipeline", topics=PUBLISHES))
        assert await told(node) == [each.meta.event_id for each in events]


async def test_a_workspace_that_is_busy_without_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Where another process that is no node has the log, summaries wait, whatever token there is.
    """
    log = await open_log(tmp_path, SMALL)
    try:
        assert not await publish(tmp_path, [summary(1)], "token")
    finally:
        await log.close()
    assert "wait for the next run" in capsys.readouterr().err


def listed_by_hand(workspace: Workspace) -> None:
    """A lake with one event in it, which is listed as erased."""
    event_row = {"topic": "hippo", "offset": 0, "seq": 1, "event_id": "gone", "type": "HIPPO_ENCODE", "space_id": "s:a"}
    event_row |= {
        "ts": NOW,
        "written_at": NOW,
        "date": NOW.date(),
        "payload": '{"text":"umbrella"}',
        "is_sealed": False,
    }
    listed = {"table": "silver.events", "space_id": "s:a", "row_key": "gone", "erased_by": "tombstone", "erased_seq": 2}
    tombstone = {"seq": 2, "event_id": "tombstone", "space_id": "s:a", "type": "TOMBSTONE_PROPAGATE"}
    (scrub_list,) = CONSOLIDATION_SCRUB_JOBS[0].writes
    workspace.lake.begin(workspace.epoch)
    for table, ddl, found in (
        (BRONZE_EVENTS.name, BRONZE_EVENTS.schema, [event_row, tombstone | {"payload": '{"object_id":"gone"}'}]),
        (SILVER_EVENTS.name, SILVER_EVENTS.schema, [event_row]),
        (scrub_list.table, scrub_list.schema, [listed]),
    ):
        rows = pa.Table.from_pylist(found, schema=arrow_schema(ddl))
        note = {"epoch": workspace.epoch, "seq": 2, "batch": 1}
        workspace.lake.write_rows(rows, table, ddl, app="hand", version=1, note=note, run="hand")


async def test_a_scrub_beside_a_node_is_on_record_there_or_not_done(tmp_path: Path) -> None:
    """
    Where a node holds the workspace, a scrub leaves its record through the node before it changes anything; if it may not,
    nothing is changed, and it says what to give.
    """
    workspace = Workspace(tmp_path / "ws")
    await asyncio.to_thread(workspace.append, [event(1)])
    listed_by_hand(workspace)
    scrub = ("pipeline", "scrub", "--yes", "--json", "-w", workspace.folder)
    async with running_node(workspace.folder) as node:
        refused = await asyncio.to_thread(invoke, *scrub, env={"TIDINGS_TOKEN": ""})
        assert refused.exit_code == 2
        assert "TIDINGS_TOKEN" in json.loads(refused.stderr)["error"]["message"]
        assert workspace.column("silver.events", "event_id") == ["gone"]
        assert "umbrella" in str(workspace.column("bronze.events", "payload"))
        assert await told(node, "consolidation") == []

        token = node.token("keeper", topics=PUBLISHES)
        done = await asyncio.to_thread(invoke, *scrub, env={"TIDINGS_TOKEN": token})
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["waits_for"] is None
        assert workspace.column("silver.events", "event_id") == []
        assert workspace.column("bronze.events", "payload") == ['{"object_id":"gone"}', None]
        kept = [record async for record in records(node.log, Query(topic="consolidation"))]
        assert [record.meta.type for record in kept] == ["SCRUB_BEGUN", "SCRUB_APPLIED"]
        assert {record.meta.actor for record in kept} == {"keeper"}
        assert kept[1].payload["tables"] == [
            {"table": "bronze.events", "rows": 1},
            {"table": "silver.events", "rows": 1},
        ]


ERASING = {"type": "TOMBSTONE_PROPAGATE", "space_id": "personal:mallory"}


async def attacked(folder: Path) -> Workspace:
    """A workspace in which a token of one space published erasures through a node: of another space, and of its own."""
    workspace = Workspace(folder)
    memories = [
        event(number, "hippo", {"text": name}, type="HIPPO_ENCODE", space_id=f"personal:{name}", event_id=f"mem-{name}")
        for number, name in enumerate(("victim", "mallory"))
    ]
    await asyncio.to_thread(workspace.append, memories)
    async with running_node(folder) as node, httpx.AsyncClient(base_url=node.url) as client:
        headers = node.headers("mallory", topics=["notes"], spaces=["personal:mallory"])

        async def post(event_id: str, payload: dict[str, str], **meta: str) -> int:
            body = {"meta": {"topic": "notes", **ERASING, **meta, "event_id": event_id}, "payload": payload}
            answer = await client.post("/v1/events", json=body, headers=headers)
            return answer.status_code

        stranger = {"space_id": "personal:victim", "object_id": "mem-victim"}
        assert await post("t0", stranger, space_id="personal:victim") == 403
        assert await post("t1", stranger) == 201
        assert await post("t2", {"object_id": "mem-mallory"}) == 201
    return workspace


async def test_a_token_of_one_space_erases_nothing_of_another_in_exports(tmp_path: Path) -> None:
    """
    What a publisher of one space says is to be erased in another is exported all the same; in its own it is left out.
    """
    workspace = await attacked(tmp_path / "ws")

    done = await asyncio.to_thread(
        invoke, "pipeline", "export", "-o", tmp_path / "out", "--json", "-w", workspace.folder
    )

    found = json.loads(done.stdout)
    assert (found["left_out"], found["refused_erasures"]) == (1, 1)
    kept = [json.loads(line)["meta"]["event_id"] for line in (tmp_path / "out").read_text().splitlines()]
    assert {"mem-victim", "t1", "t2"} <= set(kept)
    assert "mem-mallory" not in kept


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_token_of_one_space_has_nothing_of_another_scrubbed(tmp_path: Path) -> None:
    """
    The job lists the publisher's own row for the scrub and not the other space's, which the scrub leaves as it is.
    """
    workspace = await attacked(tmp_path / "ws")
    options = ("--master", "local[2]", "-w", workspace.folder)
    jobs = "erasures,consolidation_scrub"
    erasures = CONSOLIDATION_ERASURES_JOBS[0].writes[0]
    workspace.lake.begin(workspace.epoch)
    for job in all_jobs():  # the tables that the list is made from, without rows
        for output in job.writes:
            if output.table in set(CONSOLIDATION_SCRUB_JOBS[0].reads) - {erasures.table}:
                none = pa.Table.from_pylist([], schema=arrow_schema(output.schema))
                workspace.lake.write_rows(none, output.table, output.schema, app="hand", version=1, note={}, run="hand")

    await asyncio.to_thread(tool, "pipeline", "run", "--once", "--jobs", jobs, *options, env=environment(tmp_path))

    assert workspace.rows("gold.scrub_list", "space_id", "row_key") == [("personal:mallory", "mem-mallory")]
    assert workspace.rows("gold.refused_erasures", "named_space", "erased_by") == [("personal:victim", "t1")]
    scrubbed = await asyncio.to_thread(invoke, "pipeline", "scrub", "--yes", "--json", "-w", workspace.folder)
    assert scrubbed.exit_code == 0, scrubbed.stderr
    payloads = dict(workspace.rows("bronze.events", "event_id", "payload"))
    assert (payloads["mem-victim"], payloads["mem-mallory"]) == ('{"text":"victim"}', None)


def published(report: dict[str, Any]) -> int:
    """How many events a run told the log."""
    return sum(job["published"] for job in report["jobs"])


@pytest.mark.heavy
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_run_beside_a_node_tells_the_log_through_it(tmp_path: Path) -> None:
    """
    With a token, a run beside a node publishes its jobs' summaries through the node; said again, they are duplicates.
    """
    workspace = Workspace(tmp_path / "ws")
    encoded = {"content": {"text": "soccer"}}
    memories = [event(number, "hippo", encoded, type="HIPPO_ENCODE") for number in range(3)]
    await asyncio.to_thread(workspace.append, memories)
    run = ("pipeline", "run", "--once", "--jobs", "temporal_index", "--master", "local[2]", "-w", workspace.folder)
    env = environment(tmp_path)
    async with running_node(workspace.folder) as node:
        waiting = await asyncio.to_thread(tool, *run, env=env)
        assert published(waiting) == 0
        assert "TIDINGS_TOKEN" in waiting["waits_for"][0]
        assert await told(node) == []

        env["TIDINGS_TOKEN"] = node.token("pipeline", topics=PUBLISHES)
        spoken = await asyncio.to_thread(tool, *run, env=env)
        once = await told(node)
        assert spoken["waits_for"] == []
        assert published(spoken) == len(once) == 5  # one a granularity
        kept = [record async for record in records(node.log, Query(topic="temporal"))]
        assert {record.meta.type for record in kept} == {"TEMPORAL_INDEX_BUILT"}
        assert {record.meta.actor for record in kept} == {"pipeline"}
        assert sum(json.loads(bytes(record.payload_json))["written"] for record in kept) == 15

        (workspace.lake.storage.path / "jobs.json").unlink()
        again = await asyncio.to_thread(tool, *run, env=env)
        assert published(again) == 5
        assert await told(node) == once
