"""A permission is a position: nothing committed after a revocation reaches the one who lost it."""

from __future__ import annotations

import pytest

from tests.access_events import grant_event, revoke_event
from tests.unit.sync.support import OPEN_SCHEMAS, TroubledLog, World, event, open_world, project_item, tree_item, types
from tidings.access.administration import SubjectRevoked, TokenRevocation, event_of
from tidings.access.context import TokenClaims
from tidings.access.resources import Action, partition, project
from tidings.sync.settings import SyncSettings
from tidings.testing import VirtualClock

BOTH = TokenClaims(partitions=frozenset({"P1", "P2"}))


async def revoke(world: World, client_id: str, name: str = "P1", action: Action = Action.SYNC) -> None:
    await world.log.append(revoke_event(f"user-of-{client_id}", action, partition(name), actor="test"))
    await world.settle()


async def test_a_revoked_partition_falls_silent_at_once() -> None:
    """The client is told which one; its other subscriptions and its connection stay."""
    async with open_world() as world:
        writer, reader = await world.client("C1"), await world.client("C2", BOTH)
        await reader.sync("P1", "P2")

        await revoke(world, "C2")
        await writer.submit(event("a", "P1"), event("b", "P2"), event("c", "P1", "P2"))

        told, *heard = reader.take()
        assert told["payload"]["code"] == "forbidden"
        assert told["payload"]["details"] == {"partitions": ["P1"]}
        assert [message["payload"]["id"] for message in heard] == ["b", "c"]
        assert reader.transport.code is None


async def test_nothing_above_the_revocation_is_delivered_even_in_one_commit() -> None:
    """Revocation and event that are read together: the book is asked after it was changed."""
    async with open_world() as world:
        reader = await world.client("C2", BOTH)
        await reader.sync("P1")
        writer = await world.client("C1")

        writer.say("submit_events", {"events": [event("before")]})
        await world.settle()
        gone = revoke_event("user-of-C2", Action.SYNC, partition("P1"), actor="test")
        await world.log.append(gone)  # not published yet: no settling in between
        writer.say("submit_events", {"events": [event("after")]})
        await world.settle()

        assert [m["payload"].get("id", m["type"]) for m in reader.take()] == ["before", "error"]


async def test_a_page_is_authorised_by_what_it_reaches_up_to() -> None:
    """A revocation committed just before a sync refuses it, although it was not published when the sync came in."""
    async with open_world() as world:
        writer, reader = await world.client("C1"), await world.client("C2", BOTH)
        await writer.submit(event("a"))

        await world.log.append(revoke_event("user-of-C2", Action.SYNC, partition("P1"), actor="test"))
        reader.say("sync", {"partitions": ["P1"], "subscription_partitions": ["P1"], "since_committed_id": 0})
        await world.settle()

        (answer,) = reader.take()
        assert answer["payload"]["code"] == "forbidden"
        await writer.submit(event("b"))
        assert reader.take() == []


async def test_a_partition_that_is_granted_again_is_heard_again() -> None:
    """What was asked for goes on without asking again; what was missed meanwhile comes by sync."""
    async with open_world() as world:
        writer, reader = await world.client("C1"), await world.client("C2", BOTH)
        await reader.sync("P1")
        await revoke(world, "C2")
        await writer.submit(event("a"))
        reader.take()

        await world.log.append(grant_event("user-of-C2", Action.SYNC, partition("P1"), actor="test"))
        await world.settle()
        await writer.submit(event("b"))
        assert [message["payload"]["id"] for message in reader.take()] == ["b"]
        page = await reader.sync("P1")

        assert [each["id"] for each in page["events"]] == ["a", "b"]
        assert page["effective_subscriptions"] == ["P1"]


@pytest.mark.parametrize("kind", ["subject", "token"])
async def test_a_revoked_subject_or_token_ends_the_connection(kind: str) -> None:
    """auth_failed and closed, before anything above the revocation is delivered."""
    async with open_world() as world:
        writer = await world.client("C1")
        reader = world.peer("C2")
        token = world.token("C2", token_id="t-1")
        await reader.ask("connect", {"token": token, "client_id": "C2", "supported_profiles": ["canonical"]})
        await reader.sync("P1")

        change = SubjectRevoked(subject="user-of-C2") if kind == "subject" else TokenRevocation(token_id="t-1")
        await world.log.append(event_of(change, actor="test"))
        await writer.submit(event("a"))

        (answer,) = reader.take()
        assert answer["payload"]["code"] == "auth_failed"
        assert reader.transport.code == 1008
        again = world.peer("C2")
        assert (await again.ask("connect", {"token": token, "client_id": "C2"}))["payload"]["code"] == "auth_failed"


async def test_submitting_ends_with_the_right_to_it() -> None:
    """After the revocation an item is forbidden, on the connection that was open before."""
    async with open_world() as world:
        client = await world.client("C1", BOTH)
        assert (await client.submit(event("a")))[0]["status"] == "committed"

        await revoke(world, "C1", action=Action.SUBMIT)

        assert (await client.submit(event("b")))[0]["reason"] == "forbidden"
        assert (await client.sync("P1"))["events"]


async def test_a_batch_that_waits_for_its_turn_is_judged_by_the_rights_it_has_then() -> None:
    """Tree batches are stored one after another: what is revoked while one waits is not stored any more."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(log=log, clock=clock) as world:
        first, second = [await world.client(name, BOTH, supported_profiles=["compatibility"]) for name in ("C1", "C2")]
        log.may_commit.clear()
        for client, id in ((first, "a"), (second, "b")):
            client.say("submit_events", {"events": [tree_item(id, "set", {"target": id, "value": 1})]})
        await world.settle()

        await revoke(world, "C2", action=Action.SUBMIT)
        log.may_commit.set()
        await world.settle()

        (stored,), (refused,) = [client.take()[-1]["payload"]["results"] for client in (first, second)]
        assert stored["status"] == "committed"
        assert (refused["status"], refused["reason"]) == ("rejected", "forbidden")
    await log.close()


@pytest.mark.parametrize("asks", [True, False])
async def test_broadcasts_are_not_held_back_for_a_page_that_never_comes(asks: bool) -> None:
    """Dialect B: a right goes between two pages and comes back; what is committed then is heard at once."""
    async with open_world() as world:
        reader, writer = await world.project_client("B1"), await world.project_client("B2")
        for n in range(3):
            await writer.ask_camel("submit_events", {"events": [project_item(f"e{n}")]})
        reader.take()
        page = await reader.ask_camel("sync", {"projectId": "proj", "sinceCommittedId": 0, "limit": 1})
        assert page["payload"]["hasMore"]

        await world.log.append(revoke_event("user-of-B1", Action.SYNC, project("proj"), actor="test"))
        await world.settle()
        assert [m["payload"]["code"] for m in reader.take()] == ["forbidden"]
        if asks:
            refused = await reader.ask_camel("sync", {"projectId": "proj", "sinceCommittedId": 1, "limit": 1})
            assert refused["payload"]["code"] == "forbidden"
        await world.log.append(grant_event("user-of-B1", Action.SYNC, project("proj"), actor="test"))
        await world.settle()
        await writer.ask_camel("submit_events", {"events": [project_item("due")]})

        assert [m["payload"]["id"] for m in reader.take()] == ["due"]


async def test_a_revoked_project_falls_silent() -> None:
    """Dialect B: the connection stays, hears nothing, and its items and syncs are forbidden."""
    async with open_world() as world:
        reader, writer = await world.project_client("B1"), await world.project_client("B2")
        for action in (Action.SYNC, Action.SUBMIT):
            await world.log.append(revoke_event("user-of-B1", action, project("proj"), actor="test"))
        await world.settle()
        assert [m["payload"]["code"] for m in reader.take()] == ["forbidden"]

        await writer.ask_camel("submit_events", {"events": [project_item("a")]})

        assert reader.take() == []
        answer = await reader.ask_camel("sync", {"projectId": "proj", "sinceCommittedId": 0, "limit": 500})
        assert answer["payload"]["code"] == "forbidden"
        answer = await reader.ask_camel("submit_events", {"events": [project_item("b")]})
        assert answer["payload"]["results"][0]["reason"] == "forbidden"
        assert reader.transport.code is None
        assert types([answer]) == ["submit_events_result"]


@pytest.mark.parametrize("profile", ["canonical", "project"])
async def test_what_is_revoked_while_a_batch_waits_for_the_log_is_not_stored(profile: str) -> None:
    """The right is checked in the step in which the log accepts an event: items of other partitions are committed."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(log=log, clock=clock) as world:
        log.may_commit.clear()
        if profile == "canonical":
            peer = await world.client("C1", BOTH)
            peer.say("submit_events", {"events": [event("a", "P1"), event("b", "P2")]})
            lost = revoke_event("user-of-C1", Action.SUBMIT, partition("P1"), actor="test")
        else:
            peer = await world.project_client("C1")
            peer.say_camel("submit_events", {"events": [project_item("a")]})
            lost = revoke_event("user-of-C1", Action.SUBMIT, project("proj"), actor="test")
        await world.settle()
        await log.append(lost)
        await world.settle()
        log.may_commit.set()
        await world.settle()

        results = [each for message in peer.take() for each in message["payload"].get("results", ())]
        assert [(each["id"], each["status"]) for each in results] == [
            ("a", "rejected"),
            *([("b", "committed")] if profile == "canonical" else []),
        ]
        assert results[0]["reason"] == "forbidden"
    await log.close()


async def test_an_expired_token_ends_the_connection_with_the_next_message() -> None:
    """No sweep is needed: what comes after the expiry is not worked on."""
    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, sweep_interval_ms=60_000)) as world:
        peer = world.peer()
        token = world.token("C1", lifetime_s=10)
        await peer.ask("connect", {"token": token, "client_id": "C1", "supported_profiles": ["canonical"]})
        await world.clock.advance(10.5)
        peer.say("submit_events", {"events": [event("late")]})
        await world.settle()

        (told,) = peer.take()
        assert told["payload"]["code"] == "auth_failed"
        assert peer.transport.code == 4003
        assert world.stats.committed == 0
