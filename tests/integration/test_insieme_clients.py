"""The public JavaScript client, unmodified and as npm has it, against a whole node: what applications do every day."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.node.driving import FOLDER, NODE
from tests.node.world import PROJECT, event, joined, made, stored_ids, token_of, world
from tidings.core.events import Event, EventMeta
from tidings.log import Query
from tidings.log.reading import records
from tidings.testing.node import running_node


async def test_a_client_connects_to_an_empty_project(tmp_path: Path) -> None:
    """The first contact: connected with the project's own watermark of 0, one empty page, synced."""
    async with world(tmp_path) as (node, js):
        # What else there is in the log is not the project's: an application seeds a project whose watermark is 0.
        await node.log.append(Event(EventMeta("elsewhere", "NOISE", "test"), {}))
        alice = await joined(node, js, "alice")
        (hello,) = alice.all("connected")
        (page,) = alice.all("sync_page")
        status = await alice.do("status")

    assert hello == {"clientId": "alice", "projectId": PROJECT, "projectLastCommittedId": 0}
    assert page == {"ids": [], "count": 0, "hasMore": False, "nextSinceCommittedId": 0, "syncToCommittedId": 0}
    assert status["connected"] is True
    assert status["lastError"] is None


async def test_an_event_is_committed_and_its_draft_is_gone(tmp_path: Path) -> None:
    """The sender gets one verdict with the seq of the log, keeps the event as committed and no draft."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice")
        await alice.submit(event("e1", text="grüße, 世界 \u2028", deep={"list": [1, 2.5, None, True, -0.0, 1e21]}))
        (verdict,) = await alice.heard("committed")
        kept, drafts = await alice.do("committed"), await alice.do("drafts")
        (record,) = [record async for record in records(node.log, Query(topic="sync.projects"))]

    assert verdict["id"] == "e1"
    assert verdict["status"] == "committed"
    assert verdict["committedId"] == record.seq
    assert verdict["serverTs"] > 1_700_000_000_000
    assert [each["committedId"] for each in kept] == [record.seq]
    assert drafts == []
    assert record.meta.partitions == (PROJECT,)
    assert record.meta.actor == "alice"


@pytest.mark.req("SC10")
async def test_a_peer_hears_the_broadcast_and_the_sender_does_not(tmp_path: Path) -> None:
    """Two clients of a project: the sender hears its verdict only, the other the event as it was submitted."""
    async with world(tmp_path) as (node, js):
        alice, bob = await joined(node, js, "alice"), await joined(node, js, "bob")
        await alice.submit(event("e1", partition="lists/1", text="milk") | {"userId": "u-7"})
        (told,) = await bob.heard("broadcast")
        (verdict,) = await alice.heard("committed")
        await bob.submit(event("e2"))
        await alice.heard("broadcast")

    assert told["id"] == "e1"
    assert told["partition"] == "lists/1"
    assert told["projectId"] == PROJECT
    assert told["userId"] == "u-7"
    assert told["type"] == "note.put"
    assert told["schemaVersion"] == 1
    assert told["payload"] == {"text": "milk"}
    assert told["meta"]["clientId"] == "alice"
    assert (told["committedId"], told["serverTs"]) == (verdict["committedId"], verdict["serverTs"])
    assert [each["id"] for each in alice.all("broadcast")] == ["e2"]


async def test_other_projects_hear_nothing(tmp_path: Path) -> None:
    """Scope is the project: a client of another one gets neither broadcast nor page of it."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice")
        carol = await made(node, js, "carol", token=token_of(node, "carol", "other"), projectId="other")
        await carol.online()
        await alice.submit(event("e1"))
        await alice.heard("committed")
        await carol.submit(event("e2"))
        await carol.heard("committed")
        await carol.do("sync")
        pages = await carol.heard("sync_page", 2)

    assert carol.all("broadcast") == []
    assert [page["ids"] for page in pages] == [[], ["e2"]]
    assert alice.all("broadcast") == []


async def test_a_batch_over_several_partitions_is_committed_in_order(tmp_path: Path) -> None:
    """More events than fit in one batch, of several partitions: committed in order, and heard in that order."""
    async with world(tmp_path) as (node, js):
        alice, bob = await joined(node, js, "alice"), await joined(node, js, "bob")
        ids = [f"e{number:03}" for number in range(120)]
        await alice.submit(*(event(id, partition=f"p{number % 7}") for number, id in enumerate(ids)))
        verdicts = await alice.heard("committed", 120)
        told = await bob.heard("broadcast", 120)
        batches = alice.all("submit_sent")

    assert [verdict["id"] for verdict in verdicts] == ids
    assert [each["id"] for each in told] == ids
    assert [each["partition"] for each in told[:8]] == ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p0"]
    seqs = [verdict["committedId"] for verdict in verdicts]
    assert seqs == sorted(set(seqs))
    assert [batch["batchSize"] for batch in batches] == [50, 50, 20]


async def test_a_client_that_comes_back_gets_its_own_events_unchanged(tmp_path: Path) -> None:
    """The stores compare what comes back with what was sent, and break off over any difference: there is none."""
    odd: dict[str, Any] = {
        "a": 0.1,
        "b": 1e-7,
        "c": 12345678901234567890,
        "d": "\u0000\ud83d\ude00",
        "e": {},
        "f": [[]],
        "": " ",
    }
    async with world(tmp_path) as (node, js):
        for path in (None, str(tmp_path / "alice.db")):
            options = {} if path is None else {"path": path}
            alice = await joined(node, js, f"alice-{len(options)}", **options)
            await alice.submit(event(f"odd-{len(options)}", **odd), event(f"plain-{len(options)}"))
            await alice.heard("committed", 2)
            await alice.do("stop")
            await alice.online()
            await alice.do("sync", since=0)
            await alice.heard("synced", 3)

            assert alice.all("error") == []
            assert await alice.do("drafts") == []


@pytest.mark.req("SC03")
async def test_the_same_event_again_gets_the_first_verdict(tmp_path: Path) -> None:
    """Another client sends an event that is committed already: same seq, same time, one record, no second broadcast."""
    same = event("e1", text="once") | {"meta": {"clientTs": 1_000}}
    async with world(tmp_path) as (node, js):
        alice, bob = await joined(node, js, "alice"), await joined(node, js, "bob")
        await alice.submit(same)
        (first,) = await alice.heard("committed")
        await bob.heard("broadcast")
        carol = await joined(node, js, "carol")
        await carol.submit(same)
        (again,) = await carol.heard("committed")
        kept = await stored_ids(node)

    assert (again["committedId"], again["serverTs"]) == (first["committedId"], first["serverTs"])
    assert kept == ["e1"]
    assert [each["id"] for each in bob.all("broadcast")] == ["e1"]


@pytest.mark.req("SC09")
async def test_a_known_id_with_other_content_is_rejected(tmp_path: Path) -> None:
    """The first content stays; the second is refused with a reason that the application can show."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice")
        await alice.submit(event("e1", text="first"))
        await alice.heard("committed")
        bob = await joined(node, js, "bob")
        await bob.submit(event("e1", text="second"))
        (refused,) = await bob.heard("rejected")
        drafts = await bob.do("drafts")
        (record,) = [record async for record in records(node.log, Query(topic="sync.projects"))]

    assert refused["reason"] == "validation_failed"
    assert "different" in refused["errors"][0]["message"]
    assert drafts == []
    assert record.payload["payload"] == {"text": "first"}


@pytest.mark.req("S2")
async def test_a_refused_item_stops_its_batch_and_the_rest_goes_again(tmp_path: Path) -> None:
    """After a refusal the later items are not looked at; the client sends them again by itself, and all are committed."""
    async with world(tmp_path) as (node, js):
        alice, bob = await joined(node, js, "alice"), await joined(node, js, "bob")
        await alice.submit(event("e1"), event("e2", partition="x" * 200), event("e3"), event("e4"))
        await alice.heard("committed", 3)
        (refused,) = alice.all("rejected")
        later = alice.all("not_processed")
        told = await bob.heard("broadcast", 3)
        drafts, kept = await alice.do("drafts"), await stored_ids(node)

    assert refused["id"] == "e2"
    assert refused["reason"] == "validation_failed"
    assert [(each["id"], each["reason"], each["blockedById"]) for each in later] == [
        ("e3", "prior_item_failed", "e2"),
        ("e4", "prior_item_failed", "e2"),
    ]
    assert drafts == []
    assert kept == ["e1", "e3", "e4"]
    assert [each["id"] for each in told] == ["e1", "e3", "e4"]


async def test_an_item_for_another_project_is_forbidden(tmp_path: Path) -> None:
    """The connection's project is the only one it can write to, even if the token names more."""
    async with world(tmp_path) as (node, js):
        alice = await joined(node, js, "alice", token=token_of(node, "alice", PROJECT, "other"))
        await alice.submit(event("e1") | {"projectId": "other"})
        (refused,) = await alice.heard("rejected")
        kept = await stored_ids(node)

    assert refused["reason"] == "forbidden"
    assert kept == []


@pytest.mark.parametrize(
    ("token", "project", "code"),
    [("not a token", PROJECT, "auth_failed"), (None, "foreign", "forbidden")],
    ids=["bad-token", "foreign-project"],
)
async def test_whoever_may_not_come_in_is_told_so(tmp_path: Path, token: str | None, project: str, code: str) -> None:
    """A token that is not believed, or a project that it does not name: an error with its code, then the socket is closed."""
    async with world(tmp_path) as (node, js):
        alice = await made(node, js, "alice", token=token or token_of(node, "alice"), projectId=project)
        await alice.do("start")
        (error,) = await alice.heard("error")
        if code == "forbidden":  # after the other the client itself hangs up
            (closed,) = await alice.heard("socket_closed")
            assert closed["code"] == 1008

    assert error["code"] == code
    assert alice.all("connected") == []


async def test_a_token_of_another_client_is_refused(tmp_path: Path) -> None:
    """A client id that is not the token's is as bad as no token."""
    async with world(tmp_path) as (node, js):
        alice = await made(node, js, "alice", token=token_of(node, "bob"))
        await alice.do("start")
        (error,) = await alice.heard("error")

    assert error["code"] == "auth_failed"


async def test_a_version_that_we_do_not_speak_is_refused(tmp_path: Path) -> None:
    """The client stops for good, since the code is spelled as its dialect spells it."""
    async with world(tmp_path) as (node, js):
        alice = await made(node, js, "alice", alter={"protocolVersion": "99.0"}, reconnect={"enabled": True})
        await alice.do("start")
        (error,) = await alice.heard("error")
        status = await alice.do("status")

    assert error["code"] == "protocolVersion_unsupported"
    assert status["connected"] is False
    assert status["reconnectInFlight"] is False


async def test_the_example_of_the_how_to_page_works(tmp_path: Path) -> None:
    """What the page tells an application to write connects, and commits its event."""
    page = (FOLDER.parents[1] / "docs" / "howto" / "insieme.md").read_text()
    example = page.partition("```js\n")[2].partition("```")[0]
    assert example.count("ws://127.0.0.1:8787") == 1
    async with running_node(tmp_path) as node:
        token = node.token("alice", client_id="alice-laptop", projects=[PROJECT])
        process = await asyncio.create_subprocess_exec(
            *(NODE, "--input-type=module", "--eval", example.replace("ws://127.0.0.1:8787", node.ws_url)),
            cwd=FOLDER,
            env={"TOKEN": token},
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(20):
            said, _ = await process.communicate()
        assert b"\ncommitted {" in said
        kept = [record.payload["payload"] async for record in records(node.log, Query(topic="sync.projects"))]

    assert kept == [{"text": "milk"}]
