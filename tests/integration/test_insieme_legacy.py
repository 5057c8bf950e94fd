"""Version 1.3.0 of the public JavaScript client, unmodified: partitions instead of a project, one event a submit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.node.driving import JavaScript, JsClient
from tests.node.world import stored_ids, world
from tidings.log import Query
from tidings.log.reading import records
from tidings.testing.node import RunningNode

TOPIC = "sync.legacy"


async def joined(
    node: RunningNode, js: JavaScript, name: str, *partitions: str, allowed: tuple[str, ...] = (), **options: Any
) -> JsClient:
    client = await js.client(
        name,
        url=f"{node.ws_url}/sync",
        token=node.token(f"user-of-{name}", client_id=name, partitions=allowed or partitions),
        partitions=partitions,
        **options,
    )
    await client.do("start")
    return client


def event(id: str, *partitions: str, **payload: Any) -> dict[str, Any]:
    return {"id": id, "partitions": partitions, "type": "note.put", "payload": payload or {"text": id}}


async def test_a_client_connects_syncs_and_commits(tmp_path: Path) -> None:
    """The whole watermark at connect, an empty page, then a commit that comes back unchanged when asked for again."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice", "p1", "p2")
        await alice.heard("synced")
        (hello,) = alice.all("connected")
        await alice.do("submitOne", event=event("e1", "p2", "p1", odd=[1.5, None, {"": "ü"}]) | {"userId": "u-7"})
        (verdict,) = await alice.heard("committed")
        await alice.do("sync", since=0)
        await alice.heard("synced", 2)
        kept, drafts = await alice.do("committed"), await alice.do("drafts")
        (record,) = [record async for record in records(node.log, Query(topic=TOPIC))]

    assert hello == {"clientId": "alice", "globalLastCommittedId": 0}
    assert verdict["committedId"] == record.seq
    assert verdict["created"] > 1_700_000_000_000
    assert record.meta.partitions == ("p1", "p2")
    assert [each["id"] for each in kept] == ["e1"]
    assert drafts == []
    assert alice.all("error") == []


async def test_peers_hear_by_partition(tmp_path: Path) -> None:
    """What a client syncs is what it hears of: an event in two partitions comes once to each who asked for either."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice", "p1", allowed=("p1", "p2", "p3"))
        bob, carol = await joined(node, js, "bob", "p2"), await joined(node, js, "carol", "p1", "p2")
        dave = await joined(node, js, "dave", "p3")
        for each in (alice, bob, carol, dave):
            await each.heard("synced")
        await alice.do("submitOne", event=event("both", "p1", "p2"))
        await alice.do("submitOne", event=event("third", "p3"))
        await alice.heard("committed", 2)
        told = [await each.heard("broadcast") for each in (bob, carol, dave)]

    assert [[each["id"] for each in heard] for heard in told] == [["both"], ["both"], ["third"]]
    assert told[0][0]["partitions"] == ["p1", "p2"]
    assert told[0][0]["meta"]["clientId"] == "alice"
    assert told[0][0]["created"] > 0
    assert alice.all("broadcast") == []


async def test_other_partitions_replace_the_earlier_ones(tmp_path: Path) -> None:
    """A sync of other partitions brings their history and their broadcasts, and ends those of the earlier ones."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice", "p1", allowed=("p1", "p2"))
        bob = await joined(node, js, "bob", "p1", allowed=("p1", "p2"))
        await alice.heard("synced")
        await bob.heard("synced")
        await alice.do("submitOne", event=event("old", "p2"))
        await alice.heard("committed")
        await bob.do("setPartitions", partitions=["p2"], since=0)
        await bob.heard("synced", 2)
        await alice.do("submitOne", event=event("unheard", "p1"))
        await alice.do("submitOne", event=event("heard", "p2"))
        await alice.heard("committed", 3)
        told = await bob.heard("broadcast")
        pages = bob.all("sync_page")

    assert [page["ids"] for page in pages] == [[], ["old"]]
    assert [each["id"] for each in told] == ["heard"]


async def test_refusals_are_the_items_own(tmp_path: Path) -> None:
    """A foreign partition is forbidden, a known id with other content is not valid, and the client goes on."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice", "p1")
        await alice.heard("synced")
        await alice.do("submitOne", event=event("e1", "p1"))
        await alice.heard("committed")
        bob = await joined(node, js, "bob", "p1")
        await bob.heard("synced")
        await bob.do("submitOne", event=event("e1", "p1", text="other"))
        await bob.do("submitOne", event=event("e2", "p1", "foreign"))
        refused = await bob.heard("rejected", 2)
        await bob.do("submitOne", event=event("e3", "p1"))
        await bob.heard("committed")
        kept = await stored_ids(node, TOPIC)

    assert [(each["id"], each["reason"]) for each in refused] == [("e1", "validation_failed"), ("e2", "forbidden")]
    assert kept == ["e1", "e3"]


async def test_a_foreign_partition_cannot_be_synced(tmp_path: Path) -> None:
    """One name without permission and there is no data at all."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice", "p1", "foreign", allowed=("p1",))
        (error,) = await alice.heard("error")

    assert error["code"] == "forbidden"
    assert alice.all("sync_page") == []


async def test_what_was_written_offline_is_drained(tmp_path: Path) -> None:
    """Drafts made while the client was stopped go out one by one when it starts, in their order."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice", "p1")
        await alice.heard("synced")
        await alice.do("stop")
        for number in range(20):
            await alice.do("submitOne", event=event(f"e{number:02}", "p1"))
        await alice.do("start")
        verdicts = await alice.heard("committed", 20)
        kept, drafts = await stored_ids(node, TOPIC), await alice.do("drafts")

    assert [verdict["id"] for verdict in verdicts] == kept == [f"e{number:02}" for number in range(20)]
    assert drafts == []
