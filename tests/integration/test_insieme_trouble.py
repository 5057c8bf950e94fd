"""The public JavaScript client when things go wrong: offline, cut off, unanswered, restarted, revoked, and far behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.access_events import revoke_event
from tests.integration.test_node_sync import JumpingClock
from tests.node.driving import JsFailed, javascript
from tests.node.line import line_to
from tests.node.world import PROJECT, event, joined, made, stored_ids, submit_many, token_of, world
from tidings.access.administration import SubjectRevoked, event_of
from tidings.access.resources import Action, project
from tidings.testing.node import running_node

EAGER = {"enabled": True, "initialDelayMs": 1, "maxDelayMs": 20, "jitter": 0}


@pytest.mark.req("S12", "S14", "S15")
@pytest.mark.parametrize("pages_count", [10, pytest.param(200, marks=pytest.mark.heavy)])
async def test_a_client_catches_up_in_pages(tmp_path: Path, pages_count: int) -> None:
    """Pages of 500, each event once, in order, all up to the end that the first page named."""
    async with world(tmp_path / "node") as (node, js):
        await submit_many(node, "writer", 500 * pages_count)
        alice = await made(node, js, "alice", path=str(tmp_path / "alice.db"))
        await alice.do("start")
        await alice.heard("synced")
        pages, count, cursor = alice.all("sync_page"), await alice.do("count"), await alice.do("cursor")
        position = node.log.position.seq

    assert count == 500 * pages_count
    assert [page["count"] for page in pages] == [500] * pages_count
    assert [page["hasMore"] for page in pages] == [True] * (pages_count - 1) + [False]
    assert {page["syncToCommittedId"] for page in pages} == {position}
    assert cursor == pages[-1]["nextSinceCommittedId"] == position
    assert alice.all("error") == []


async def test_what_was_written_offline_is_drained_in_order(tmp_path: Path) -> None:
    """Drafts of two applications' lives, made without a connection, are committed in the order they were made."""
    path = str(tmp_path / "alice.db")
    async with running_node(tmp_path / "node") as node:
        for life in range(2):
            async with javascript() as js:
                alice = await made(node, js, "alice", path=path, url="ws://127.0.0.1:1/sync")
                with pytest.raises(JsFailed, match="connect"):
                    await alice.do("start")
                await alice.submit(*(event(f"life{life}-{number:02}") for number in range(40)))
        async with javascript() as js:
            bob = await joined(node, js, "bob")
            alice = await made(node, js, "alice", path=path)
            await alice.online()
            verdicts = await alice.heard("committed", 80)
            told = await bob.heard("broadcast", 80)
            drafts = await alice.do("drafts")

    expected = [f"life{life}-{number:02}" for life in range(2) for number in range(40)]
    assert [verdict["id"] for verdict in verdicts] == expected
    assert [each["id"] for each in told] == expected
    assert drafts == []


@pytest.mark.req("S27", "SC13")
async def test_a_lost_answer_costs_nothing_but_time(tmp_path: Path) -> None:
    """Committed, but the answer never arrived: after a new start the draft is gone and the event is there, once."""
    async with world(tmp_path) as (node, js), line_to(node.ws_url) as line:
        bob = await joined(node, js, "bob")
        alice = await joined(node, js, "alice", url=line.url, path=str(tmp_path / "alice.db"))
        line.is_deaf = True
        await alice.submit(event("e1"), event("e2"))
        await asyncio.wait_for(line.lost.wait(), 20)
        line.cut()
        await alice.heard("socket_closed")
        in_doubt = await alice.do("drafts")
        # A submit was under way when the line broke: this client then waits for its application to start it anew.
        await alice.do("stop")
        await alice.online()
        await alice.submit(event("e3"))
        await alice.heard("committed")
        told = await bob.heard("broadcast", 3)
        ids, drafts, kept = await alice.ids(), await alice.do("drafts"), await stored_ids(node)

    assert in_doubt == ["e1", "e2"]
    assert ids == kept == [each["id"] for each in told] == ["e1", "e2", "e3"]
    assert drafts == []
    assert alice.all("rejected") == []


async def test_an_unanswered_batch_is_sent_again_and_stays_one(tmp_path: Path) -> None:
    """The batch goes out a second time before the client knows of the first: the same verdicts, and one record each."""
    async with world(tmp_path) as (node, js), line_to(node.ws_url) as line:
        alice = await joined(node, js, "alice", url=line.url)
        line.is_deaf = True
        await alice.submit(*(event(f"e{number}") | {"meta": {"clientTs": number}} for number in range(1, 4)))
        await asyncio.wait_for(line.lost.wait(), 20)
        line.cut()
        await alice.heard("socket_closed")
        first = await stored_ids(node)
        # The same client id on another device, with the same drafts and nothing else.
        twin = await joined(node, js, "twin", clientId="alice", token=token_of(node, "alice"))
        await twin.submit(*(event(f"e{number}") | {"meta": {"clientTs": number}} for number in range(1, 4)))
        verdicts = await twin.heard("committed", 3)
        kept = await stored_ids(node)

    assert first == kept == ["e1", "e2", "e3"]
    assert [verdict["id"] for verdict in verdicts] == kept


async def test_a_cut_line_is_taken_up_again(tmp_path: Path) -> None:
    """The client notices at its next send, connects again by itself, fetches what it missed and sends what it has."""
    async with world(tmp_path) as (node, js), line_to(node.ws_url) as line:
        bob = await joined(node, js, "bob")
        alice = await joined(node, js, "alice", url=line.url, reconnect=EAGER)
        for number in range(3):
            line.cut()
            await alice.heard("socket_closed", number + 1)
            await bob.submit(event(f"bob{number}"))
            await bob.heard("committed", number + 1)
            await alice.submit(event(f"alice{number}"))
            await alice.heard("committed", number + 1)
        ids, drafts, kept = await alice.ids(), await alice.do("drafts"), await stored_ids(node)

    assert sorted(ids) == sorted(kept)
    assert kept == ["bob0", "alice0", "bob1", "alice1", "bob2", "alice2"]
    assert drafts == []
    assert {error["code"] for error in alice.all("error")} == {"transport_disconnected"}


@pytest.mark.req("S22")
async def test_what_is_committed_while_a_client_pages_reaches_it_without_another_sync(tmp_path: Path) -> None:
    """Events of others during paging are kept back and come right after the last page, lowest first, as broadcasts."""
    async with world(tmp_path) as (node, js):
        await submit_many(node, "writer", 1_200)
        bob = await joined(node, js, "bob", path=str(tmp_path / "bob.db"))
        alice = await made(node, js, "alice", path=str(tmp_path / "alice.db"))
        await alice.do("hold")
        await alice.do("start")
        await alice.heard("sync_requested")
        await bob.submit(*(event(f"late{number}") for number in range(10)))
        await bob.heard("committed", 10)
        await alice.do("release")
        await alice.heard("synced")
        told = await alice.heard("broadcast", 10)
        syncs, count = alice.all("sync_requested"), await alice.do("count")
        order = [name for name, _ in alice.said if name in ("synced", "broadcast")]

    assert [each["id"] for each in told] == [f"late{number}" for number in range(10)]
    assert len(syncs) == 3
    assert count == 1_210
    assert order == ["synced"] + ["broadcast"] * 10


@pytest.mark.req("S26")
async def test_clients_outlive_a_restart_of_the_node(tmp_path: Path) -> None:
    """The node says server_error before it goes; the clients come back by themselves, lose nothing and go on."""
    async with javascript() as js, line_to("ws://127.0.0.1:1") as line:
        async with running_node(tmp_path) as node:
            line.upstream = node.ws_url
            alice = await joined(node, js, "alice", url=line.url, reconnect=EAGER)
            bob = await joined(node, js, "bob", url=line.url, reconnect=EAGER)
            await alice.submit(event("before"))
            await bob.heard("broadcast")
        (error, *_) = await alice.heard("error")
        await bob.heard("error")
        await alice.submit(event("meanwhile"))
        async with running_node(tmp_path) as node:
            line.upstream = node.ws_url
            await bob.heard("synced", 2)
            await alice.heard("committed", 2)
            await bob.submit(event("after"))
            await alice.heard("broadcast")
            await bob.do("sync")
            await bob.heard("synced", 3)
            ids, kept = await bob.ids(), await stored_ids(node)

    assert error["code"] == "server_error"
    assert ids == kept == ["before", "meanwhile", "after"]


async def test_a_node_stops_without_waiting_for_its_clients(tmp_path: Path) -> None:
    """The clients' goodbyes are read, so that nobody waits until the time for them is up."""
    async with javascript() as js:
        async with running_node(tmp_path, close_timeout_s=60.0, stop_deadline_s=60.0) as node:
            alice = await joined(node, js, "alice")
            async with asyncio.timeout(20):
                await node.stop()
        (error,) = await alice.heard("error")

    assert error["code"] == "server_error"


async def test_a_revoked_project_goes_silent_at_once(tmp_path: Path) -> None:
    """From the revocation's seq on the client hears nothing of the project, is told so, and may not write to it either."""
    async with world(tmp_path) as (node, js):
        alice, bob = await joined(node, js, "alice"), await joined(node, js, "bob")
        await alice.submit(event("before"))
        await bob.heard("broadcast")
        for action in (Action.SYNC, Action.SUBMIT):
            await node.log.append(revoke_event("user-of-bob", action, project(PROJECT), actor="root"))
        await alice.submit(event("after"))
        await alice.heard("committed", 2)
        (error, *_) = await bob.heard("error")
        await bob.submit(event("bobs"))
        (refused,) = await bob.heard("rejected")
        kept = await stored_ids(node)

    assert error["code"] == "forbidden"
    assert [each["id"] for each in bob.all("broadcast")] == ["before"]
    assert refused["reason"] == "forbidden"
    assert kept == ["before", "after"]


async def test_a_revoked_subject_is_sent_away_for_good(tmp_path: Path) -> None:
    """The client is told auth_failed and does not come back, though it would after other errors."""
    async with world(tmp_path) as (node, js):
        alice, bob = await joined(node, js, "alice"), await joined(node, js, "bob", reconnect=EAGER)
        await node.log.append(event_of(SubjectRevoked(subject="user-of-bob"), actor="root"))
        (error,) = await bob.heard("error")
        await alice.submit(event("after"))
        await alice.heard("committed")
        status = await bob.do("status")

    assert error["code"] == "auth_failed"
    assert status["connected"] is False
    assert status["reconnectInFlight"] is False
    assert bob.all("broadcast") == []


async def test_a_token_that_runs_out_ends_the_connection(tmp_path: Path) -> None:
    """When its hour is over the client is told auth_failed, and does not come back with the same token."""
    clock = JumpingClock()
    async with running_node(tmp_path, clock=clock) as node, javascript() as js:
        alice = await joined(node, js, "alice", reconnect=EAGER)
        clock.leap(2 * 3600)
        (error,) = await alice.heard("error")
        status = await alice.do("status")

    assert error["code"] == "auth_failed"
    assert "expired" in error["message"]
    assert status["connected"] is False
    assert status["reconnectInFlight"] is False


async def test_two_connections_of_one_client_both_stay(tmp_path: Path) -> None:
    """An application open in two tabs under one client id: neither is thrown out, and each hears of the other."""
    async with world(tmp_path) as (node, js):
        token = token_of(node, "alice")
        tabs = [await joined(node, js, f"tab{n}", clientId="alice", token=token) for n in range(2)]
        await tabs[0].submit(event("e1"))
        await tabs[1].heard("broadcast")
        await tabs[1].submit(event("e2"))
        await tabs[0].heard("broadcast")

    assert [each.all("socket_closed") for each in tabs] == [[], []]
    assert [len(each.all("committed")) for each in tabs] == [1, 1]
