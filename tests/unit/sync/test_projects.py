"""Dialect B, as the JavaScript client 2.1.0 speaks it: projects, batches that stop, pages that hold broadcasts back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.sync.support import OPEN_SCHEMAS, Peer, TroubledLog, event, open_world, project_item, types
from tidings.access.context import TokenClaims
from tidings.core.clock import datetime_of
from tidings.log.errors import StorageFull
from tidings.log.memory import MemoryLog
from tidings.log.retention import plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.sync.settings import SyncSettings
from tidings.testing import VirtualClock


async def submit(peer: Peer, *items: Any) -> list[dict[str, Any]]:
    answer = await peer.ask_camel("submit_events", {"events": list(items)})
    assert answer["type"] == "submit_events_result", answer
    results: list[dict[str, Any]] = answer["payload"]["results"]
    return results


async def sync(peer: Peer, since: int = 0, limit: int = 500) -> dict[str, Any]:
    answer = await peer.ask_camel("sync", {"projectId": "proj", "sinceCommittedId": since, "limit": limit})
    assert answer["type"] == "sync_response", answer
    page: dict[str, Any] = answer["payload"]
    return page


async def test_connect_answers_in_its_own_spelling_with_the_projects_watermark() -> None:
    """The watermark is the project's, 0 while it is empty; the message id is echoed."""
    async with open_world() as world:
        await world.fill(7)
        peer = world.peer("B1")
        connect = {"token": world.token("B1"), "clientId": "B1", "projectId": "proj"}

        answer = await peer.ask_camel("connect", connect, msgId="the-id")

        assert answer == {
            "type": "connected",
            "protocolVersion": "1.0",
            "msgId": "the-id",
            "timestamp": world.clock.now_ns() // 1_000_000,
            "payload": {"clientId": "B1", "projectId": "proj", "projectLastCommittedId": 0},
        }
        await submit(peer, project_item("a"))
        await world.fill(3)
        again = world.peer("B1")
        assert (await again.ask_camel("connect", connect))["payload"]["projectLastCommittedId"] == 8
        assert peer.transport.code is None, "both connections of a client stay"


async def test_a_missing_message_id_stays_missing() -> None:
    """The client drops messages whose msgId is null."""
    async with open_world() as world:
        peer = world.peer("B1")
        peer.throw(b'{"type":"sync","protocolVersion":"1.0","payload":{"projectId":"proj","sinceCommittedId":0}}')

        (answer,) = peer.take()

        assert "msgId" not in answer
        assert "msg_id" not in answer
        assert answer["payload"]["code"] == "bad_request"


async def test_an_event_comes_back_as_it_was_submitted() -> None:
    """Results, broadcasts and pages agree; the client's own fields are untouched, its id is the authenticated one."""
    async with open_world() as world:
        one, two = await world.project_client("B1"), await world.project_client("B2")
        item = project_item(
            "a", partition="cafe\u0301", userId="u", payload={"deep": [1, 1.5, {"x": None}]}, extra="dropped"
        )
        item["meta"] = {"clientId": "B1", "clientTs": 1700000000000, "more": True}

        (result,) = await submit(one, item)

        expected = {
            "committedId": 1,
            "serverTs": result["serverTs"],
            "id": "a",
            "partition": "cafe\u0301",
            "projectId": "proj",
            "userId": "u",
            "type": "note.add",
            "schemaVersion": 1,
            "payload": {"deep": [1, 1.5, {"x": None}]},
            "meta": {"clientId": "B1", "clientTs": 1700000000000, "more": True},
        }
        assert result == {"id": "a", "status": "committed", "committedId": 1, "serverTs": result["serverTs"]}
        (heard,) = two.take()
        assert heard["type"] == "event_broadcast"
        assert heard["msgId"]
        assert heard["payload"] == expected
        assert (await sync(two))["events"] == [expected]
        assert one.take() == []


async def test_fields_of_ours_cannot_be_forged() -> None:
    """An item that brings its own committedId or serverTs does not get it back."""
    async with open_world() as world:
        peer = await world.project_client()

        await submit(peer, project_item("a", committedId=99, serverTs=1, created=2))

        (stored,) = (await sync(peer))["events"]
        assert stored["committedId"] == 1
        assert "created" not in stored


async def test_an_item_of_another_client_is_forbidden() -> None:
    """Whoever submits for others is refused, item by item."""
    async with open_world() as world:
        peer = await world.project_client("B1")

        (result,) = await submit(peer, project_item("a", meta={"clientId": "B2", "clientTs": 1}))

        assert (result["status"], result["reason"]) == ("rejected", "forbidden")
        assert world.log.position.seq == 0


@pytest.mark.parametrize(
    ("claimed", "said", "is_taken"),
    [
        ("u-7", "u-7", True),
        ("u-7", "u-8", False),
        ("u-7", None, True),
        ("caf\u00e9", "cafe\u0301", True),
        (None, "anybody", True),
    ],
)
async def test_a_user_is_the_tokens_where_the_token_names_one(
    claimed: str | None, said: str | None, *, is_taken: bool
) -> None:
    """An item of another user is forbidden by its field; where the token names no user the word is the application's own."""
    async with open_world() as world:
        peer = world.peer("B1")
        token = world.token("B1", user_id=claimed)
        await peer.ask_camel("connect", {"token": token, "clientId": "B1", "projectId": "proj"})

        (result,) = await submit(peer, project_item("a", **({} if said is None else {"userId": said})))

        if is_taken:
            assert result["status"] == "committed"
        else:
            assert (result["status"], result["reason"]) == ("rejected", "forbidden")
            assert [error["field"] for error in result["errors"]] == ["userId"]
        assert world.log.position.seq == int(is_taken)


@pytest.mark.parametrize("token_of", ["B2", None])
async def test_a_client_is_the_tokens(token_of: str | None) -> None:
    """Whoever connects as another client than the token names, or with a token that names none, is sent away."""
    async with open_world() as world:
        peer = world.peer("B1")
        token = world.issuer.issue("user-of-B1", client_id=token_of, claims=TokenClaims(projects=frozenset({"proj"})))

        answer = await peer.ask_camel("connect", {"token": token, "clientId": "B1", "projectId": "proj"})

        assert (answer["type"], answer["payload"]["code"]) == ("error", "auth_failed")
        assert peer.transport.code is not None


async def test_a_batch_stops_at_the_first_rejection() -> None:
    """What comes after it is not processed, and says what blocks it."""
    async with open_world() as world:
        peer, other = await world.project_client("B1"), await world.project_client("B2")

        results = await submit(
            peer, project_item("a"), project_item("b", schemaVersion=0), project_item("c"), project_item("d")
        )

        assert [result["status"] for result in results] == ["committed", "rejected", "not_processed", "not_processed"]
        assert results[1]["reason"] == "validation_failed"
        assert results[1]["errors"][0]["message"]
        assert results[1]["created"]
        assert results[2] == {
            "id": "c",
            "status": "not_processed",
            "reason": "prior_item_failed",
            "blockedById": "b",
            "created": results[1]["created"],
        }
        assert [message["payload"]["id"] for message in other.take()] == ["a"]
        assert [result["status"] for result in await submit(peer, project_item("c"))] == ["committed"]


async def test_a_conflict_stops_the_batch_too() -> None:
    """A known id with other content is a rejection like any other: what comes after it is not processed."""
    async with open_world() as world:
        one, two = await world.project_client("B1"), await world.project_client("B2")
        await submit(one, project_item("a"))
        two.take()

        results = await submit(two, project_item("b"), project_item("a", type="other"), project_item("c"))

        assert [result["status"] for result in results] == ["committed", "rejected", "not_processed"]
        assert world.log.position.seq == 2


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": 5},
        {"id": "x" * 300},
        {"partition": ""},
        {"partition": "x" * 200},
        {"partition": 7},
        {"type": ""},
        {"schemaVersion": "1"},
        {"schemaVersion": 1.5},
        {"payload": []},
        {"payload": None},
        {"meta": 3},
        {"meta": {}},
        {"meta": {"clientTs": "now"}},
        {"projectId": None},
        {"userId": 5},
        {"userId": ""},
    ],
)
async def test_a_broken_item_is_rejected_and_never_the_request(change: dict[str, Any]) -> None:
    """An error to the whole submit would hang the client for ever."""
    async with open_world() as world:
        peer = await world.project_client()

        (result,) = await submit(peer, project_item("a") | change)

        assert result["status"] == "rejected"
        assert result["reason"] == "validation_failed"
        assert result["errors"][0]["message"]


@pytest.mark.parametrize("item", [5, None, [], {}, "x"])
async def test_an_item_that_is_none_is_rejected_too(item: Any) -> None:
    """Also without an id there is one result an item."""
    async with open_world() as world:
        peer = await world.project_client()

        results = await submit(peer, item, project_item("b"))

        assert [result["status"] for result in results] == ["rejected", "not_processed"]
        assert results[0]["id"] == ""


async def test_payloads_are_valid_by_the_schema_of_their_type() -> None:
    """A type with a schema is checked, one without is accepted; what was committed before stays committed."""
    settings = SyncSettings(project_schemas={"note.add": {"required": ["text"]}})
    async with open_world() as world:
        peer = await world.project_client()
        (old,) = await submit(peer, project_item("old"))
        world.service.reload(settings)

        again = await submit(peer, project_item("old"), project_item("other", type="free"))
        refused = await submit(peer, project_item("a", payload={"text": "x"}), project_item("b"), project_item("c"))

        assert again[0] == old
        assert again[1]["status"] == "committed"
        assert [result["status"] for result in refused] == ["committed", "rejected", "not_processed"]
        assert refused[1]["errors"][0]["field"] == "payload"


async def test_a_repeated_id_is_settled_item_by_item() -> None:
    """In one batch: the first commits, the same again is the same, other content is rejected."""
    async with open_world() as world:
        peer = await world.project_client()

        results = await submit(
            peer, project_item("a"), project_item("a"), project_item("b"), project_item("a", type="other")
        )

        assert [result["status"] for result in results] == ["committed", "committed", "committed", "rejected"]
        assert results[0] == results[1]
        assert world.log.position.seq == 2


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        ({}, True),
        ({"meta": {"clientId": "B2", "clientTs": 17}}, True),
        ({"meta": {"clientTs": 17.0}}, True),
        ({"meta": {"clientTs": 18}}, False),
        ({"meta": {"clientTs": 17, "more": 1}}, False),
        ({"partition": "other"}, False),
        ({"userId": "u"}, False),
        ({"schemaVersion": 2}, False),
        ({"payload": {"n": "other"}}, False),
    ],
)
async def test_equality_compares_all_but_the_client(change: dict[str, Any], *, is_equal: bool) -> None:
    """The client's own time is compared; who sends it is not."""
    async with open_world() as world:
        one, two = await world.project_client("B1"), await world.project_client("B2")
        (first,) = await submit(one, project_item("a"))
        two.take()
        await world.clock.advance(2)

        (again,) = await submit(two, project_item("a") | change)

        assert (again == first) == is_equal
        assert again["status"] == ("committed" if is_equal else "rejected")


async def test_projects_do_not_see_each_other() -> None:
    """A connection hears its project and may write to no other; dialect A sees none of it."""
    claims = TokenClaims(projects=frozenset({"proj", "other"}), partitions=frozenset({"main", "P1"}))
    async with open_world() as world:
        one = await world.project_client("B1", "proj", claims)
        two = await world.project_client("B2", "other", claims)
        seed = await world.client("C1", TokenClaims(partitions=frozenset({"main", "proj"})))
        await seed.sync("main", "proj")

        results = await submit(one, project_item("a"), project_item("b", projectId="other"))

        assert [result["status"] for result in results] == ["committed", "rejected"]
        assert results[1]["reason"] == "forbidden"
        assert two.take() == seed.take() == []
        answer = await two.ask_camel("sync", {"projectId": "proj", "sinceCommittedId": 0})
        assert answer["payload"]["code"] == "forbidden"
        assert (await seed.sync("main", "proj"))["events"] == []


async def test_a_foreign_project_ends_the_connection() -> None:
    """forbidden at connect, then closed."""
    async with open_world() as world:
        peer = world.peer("B1")

        answer = await peer.ask_camel("connect", {"token": world.token("B1"), "clientId": "B1", "projectId": "secret"})

        assert answer["payload"]["code"] == "forbidden"
        assert peer.transport.code == 1008


async def test_an_unsupported_version_is_spelled_as_the_client_expects() -> None:
    """protocolVersion_unsupported, then closed."""
    async with open_world() as world:
        peer = world.peer("B1")

        answer = await peer.ask_camel("connect", {}, protocolVersion="9.0")

        assert answer["payload"]["code"] == "protocolVersion_unsupported"
        assert peer.transport.code == 1002


async def test_an_id_of_another_dialect_is_taken() -> None:
    """One index of ids for all dialects: the same id elsewhere is a conflict, not a second event."""
    async with open_world() as world:
        seed, peer = await world.client("C1"), await world.project_client("B1")
        await seed.submit(event("a"))

        (result,) = await submit(peer, project_item("a"))

        assert result["status"] == "rejected"
        assert world.log.position.seq == 1


async def test_broadcasts_wait_for_the_last_page_and_then_come() -> None:
    """What is committed while a client pages reaches it without another sync, after the last page."""
    async with open_world() as world:
        writer, reader = await world.project_client("B1"), await world.project_client("B2")
        await submit(writer, *(project_item(f"e{n}") for n in range(5)))
        reader.take()

        page = await sync(reader, 0, 2)
        assert page["hasMore"]
        await submit(writer, project_item("late"))
        assert reader.take() == []
        page = await sync(reader, page["nextSinceCommittedId"], 2)
        assert [each["id"] for each in page["events"]] == ["e2", "e3"]
        reader.say_camel("sync", {"projectId": "proj", "sinceCommittedId": 4, "limit": 2})
        await world.settle()

        last, held = reader.take()
        assert last["payload"]["hasMore"] is False
        assert last["payload"]["syncToCommittedId"] == 5
        assert [each["id"] for each in last["payload"]["events"]] == ["e4"]
        assert (held["type"], held["payload"]["id"]) == ("event_broadcast", "late")


async def test_too_much_to_hold_back_is_paged_instead() -> None:
    """Held broadcasts are bounded: beyond the bound the paging goes on until everything was given."""
    settings = SyncSettings(schemas=OPEN_SCHEMAS, held_bytes_max=2048)
    async with open_world(settings) as world:
        writer, reader = await world.project_client("B1"), await world.project_client("B2")
        await submit(writer, *(project_item(f"e{n}") for n in range(4)))
        reader.take()
        got, since, has_more = [], 0, True
        written = 0
        while has_more:
            page = await sync(reader, since, 3)
            got += [each["id"] for each in page["events"]]
            since, has_more = page["nextSinceCommittedId"], page["hasMore"]
            if written < 3:
                await submit(writer, *(project_item(f"w{written}-{n}") for n in range(30)))
                written += 1
        got += [message["payload"]["id"] for message in reader.take()]

        assert got == [f"e{n}" for n in range(4)] + [f"w{w}-{n}" for w in range(3) for n in range(30)]


async def test_a_future_cursor_is_echoed() -> None:
    """As every published server does."""
    async with open_world() as world:
        peer = await world.project_client()

        page = await sync(peer, 1000)

        assert page == {
            "projectId": "proj",
            "events": [],
            "nextSinceCommittedId": 1000,
            "hasMore": False,
            "syncToCommittedId": 0,
        }


async def test_throttling_stops_reading_instead_of_refusing() -> None:
    """With too many drafts under way the transport is paused, and resumed when they are answered."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, in_flight_drafts_max=2), log=log, clock=clock) as world:
        peer = await world.project_client()
        log.may_commit.clear()
        peer.say_camel("submit_events", {"events": [project_item("a"), project_item("b"), project_item("c")]})
        await world.settle()

        assert peer.transport.is_paused
        assert peer.take() == []
        log.may_commit.set()
        await world.settle()
        assert types(peer.take()) == ["submit_events_result"]
        assert not peer.transport.is_paused
    await log.close()


@pytest.mark.parametrize("payload", [{}, {"events": 5}, {"events": {}}])
async def test_a_submit_that_cannot_be_answered_item_by_item_ends_with_server_error(payload: dict[str, Any]) -> None:
    """The only answer that makes the client start over."""
    async with open_world() as world:
        peer = await world.project_client()

        answer = await peer.ask_camel("submit_events", payload)

        assert answer["payload"]["code"] == "server_error"
        assert peer.transport.code == 1011


async def test_a_full_disk_makes_the_client_start_over() -> None:
    """rate_limited would hang it."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(log=log, clock=clock) as world:
        peer = await world.project_client()
        log.trouble = StorageFull("somewhere")

        answer = await peer.ask_camel("submit_events", {"events": [project_item("a")]})

        assert answer["payload"]["code"] == "server_error"
        assert peer.transport.code == 1011
    await log.close()


async def test_stopping_tells_each_client_before_closing() -> None:
    """A client of this dialect does not notice a closed socket; a server_error it does."""
    async with open_world() as world:
        peer, seed = await world.project_client(), await world.client()

        await asyncio.wait_for(world.service.stop(1.0), 5)

        (last,) = peer.take()
        assert last["payload"]["code"] == "server_error"
        assert peer.transport.code == seed.transport.code == 1012
        assert seed.take() == []
        assert world.peer("late").transport.code == 1012


async def test_silence_is_no_reason_to_close() -> None:
    """Liveness is the transport's affair in this dialect."""
    async with open_world() as world:
        peer = await world.project_client()

        await world.clock.advance(300)

        assert peer.transport.code is None


async def test_pruned_history_is_refused_loudly() -> None:
    """The dialect has no word for a gap, so the page is refused instead of leaving events out in silence."""
    clock = VirtualClock()
    log = MemoryLog(LogSettings(segment_lines_max=5), clock=clock)
    async with open_world(log=log, clock=clock) as world:
        peer = await world.project_client()
        await submit(peer, *(project_item(f"e{n}") for n in range(12)))
        segments = log.topics()["sync.projects"].segments
        rules = {"*": TopicRetention(size_bytes_max=0)}
        now = datetime_of(clock.now_ns())
        await log.drop(plan_retention(segments, rules, now=now, partition_floors={"proj": 10}))

        answer = await peer.ask_camel("sync", {"projectId": "proj", "sinceCommittedId": 0})
        page = await sync(peer, 10)

        assert answer["payload"]["code"] == "bad_request"
        assert answer["payload"]["details"] == {"prunedThroughCommittedId": 10}
        assert [each["committedId"] for each in page["events"]] == [11, 12]
    await log.close()


async def test_the_watermark_does_not_fall_back_when_history_is_dropped() -> None:
    """A helper of the client seeds a project whose watermark is 0: a project that had events must not seem new."""
    clock = VirtualClock()
    log = MemoryLog(LogSettings(segment_lines_max=2), clock=clock)
    claims = TokenClaims(projects=frozenset({"proj", "other"}))
    async with open_world(log=log, clock=clock) as world:
        peer = await world.project_client("B1", "proj", claims)
        await submit(peer, project_item("a"), project_item("b"))
        other = await world.project_client("B2", "other", claims)
        await submit(other, project_item("c", projectId="other"))
        now = datetime_of(clock.now_ns())
        plan = plan_retention(
            log.topics()["sync.projects"].segments,
            {"*": TopicRetention(size_bytes_max=0)},
            now=now,
            partition_floors={"proj": 2},
        )
        await log.drop(plan)
        again = world.peer("B1")

        answer = await again.ask_camel("connect", {"token": world.token("B1"), "clientId": "B1", "projectId": "proj"})

        assert answer["payload"]["projectLastCommittedId"] == 2
    await log.close()


async def test_an_empty_batch_is_a_bad_request() -> None:
    """The answer is that of the client's own server, and the connection stays open."""
    async with open_world() as world:
        peer = world.peer("B1")
        connect = {"token": world.token("B1"), "clientId": "B1", "projectId": "proj"}
        assert (await peer.ask_camel("connect", connect))["type"] == "connected"

        answer = await peer.ask_camel("submit_events", {"events": []})

        assert answer["type"] == "error"
        assert (answer["payload"]["code"], answer["payload"]["message"]) == (
            "bad_request",
            "payload.events must contain at least one item",
        )
        assert (await submit(peer, project_item("a")))[0]["status"] == "committed"
