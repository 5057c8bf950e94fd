"""Looking after topics, groups and dead letters over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tidings.server.settings import ApiSettings
from tidings.testing.node import RunningNode, node_settings
from tidings.types import Ack, Event, EventMeta, ReceivedEvent

from .api_support import api, event, until


async def publish(node: RunningNode, count: int, name: str = "demo") -> None:
    for n in range(count):
        await node.bus.publish(Event(EventMeta(topic=name, type="NOTED", space_id="home"), {"n": n}))


async def audits(client: httpx.AsyncClient) -> list[tuple[str, dict[str, Any]]]:
    """What was begun; each of it must have ended well."""
    found = (await client.get("/v1/events?topic=audit")).json()["events"]
    begun = [each for each in found if not each["meta"]["type"].endswith(".ended")]
    ends = [(each["meta"]["type"], each["payload"]) for each in found if each not in begun]
    assert sorted(ends, key=lambda end: end[1]["audit_seq"]) == [
        (f"{each['meta']['type']}.ended", {"outcome": "done", "audit_seq": each["seq"]}) for each in begun
    ]
    return [(each["meta"]["type"], each["payload"]) for each in begun]


async def acknowledge(received: ReceivedEvent) -> Ack:
    return Ack()


async def refuse(received: ReceivedEvent) -> Ack:
    raise ValueError(f"no good: {received.payload['n']}")


async def test_topics_are_listed_with_their_bounds(tmp_path: Path) -> None:
    """Each topic shows where it begins and ends, and which groups have a place in it."""
    async with api(tmp_path) as (node, client):
        await publish(node, 3)
        await node.bus.subscribe("demo", "g", acknowledge)
        listed = (await client.get("/v1/topics")).json()
        one = (await client.get("/v1/topics/demo")).json()
        missing = await client.get("/v1/topics/nothing")

    assert listed["topics"] == [one]
    assert (one["first_offset"], one["next_offset"], one["last_seq"], one["groups"]) == (0, 3, 3, ["g"])
    assert (missing.status_code, missing.json()["code"]) == (404, "log.unknown_topic")


async def test_groups_show_where_they_stand(tmp_path: Path) -> None:
    """A running group shows its lag and members, one that nobody runs what was last stored of it."""
    async with api(tmp_path) as (node, client):
        await publish(node, 5)
        member = await node.bus.join("demo", "shared", acknowledge)
        own = await node.bus.subscribe("demo", "own", acknowledge)
        await until(lambda: node.bus.lag("demo", "shared") == node.bus.lag("demo", "own") == 0)
        running = {each["group"]: each for each in (await client.get("/v1/groups?topic=demo")).json()["groups"]}
        await node.bus.leave(member)
        await node.bus.unsubscribe(own)
        await publish(node, 2)
        idle = (await client.get("/v1/groups/demo/own")).json()
        unknown = await client.get("/v1/groups/demo/nobody")

    assert {name: (each["state"], each["lag"], each["members"]) for name, each in running.items()} == {
        "own": ("running", 0, None),
        "shared": ("running", 0, 1),
    }
    assert running["shared"]["acked"] == 5
    assert (idle["state"], idle["lag"], idle["committed"], idle["members"]) == ("idle", 2, 4, 0)
    assert idle["oldest_unacked_age_s"] >= 0
    assert (unknown.status_code, unknown.json()["code"]) == (404, "bus.unknown_group")
    assert "own" in unknown.json()["hint"]


async def test_a_group_is_paused_and_resumed(tmp_path: Path) -> None:
    """A paused group gets nothing until it is resumed; each change is audited with who asked, and a dry run is not one."""
    async with api(tmp_path) as (node, client):
        await node.bus.subscribe("demo", "g", acknowledge)
        dry = (await client.post("/v1/groups/demo/g/pause", json={"dry_run": True})).json()
        done = (await client.post("/v1/groups/demo/g/pause")).json()
        again = (await client.post("/v1/groups/demo/g/pause")).json()
        await publish(node, 1)
        paused = (await client.get("/v1/groups/demo/g")).json()
        await client.post("/v1/groups/demo/g/resume")
        await until(lambda: node.bus.lag("demo", "g") == 0)
        recorded = await audits(client)
        unknown = await client.post("/v1/groups/demo/h/pause")

    assert (dry["carried_out"], dry["changes"]) == (False, True)
    assert (done["carried_out"], done["audit_seq"]) == (True, 1)
    assert (again["carried_out"], again["changes"]) == (False, False)
    assert (paused["state"], paused["lag"]) == ("paused", 1)
    assert [kind for kind, _ in recorded] == ["api.group.pause", "api.group.resume"]
    assert unknown.status_code == 404


async def test_a_group_that_nobody_runs_is_paused(tmp_path: Path) -> None:
    """It stays so, and gets nothing when it is subscribed again, until it is resumed."""
    async with api(tmp_path) as (node, client):
        await node.bus.unsubscribe(await node.bus.subscribe("demo", "g", acknowledge))
        answer = (await client.post("/v1/groups/demo/g/pause")).json()
        idle = (await client.get("/v1/groups/demo/g")).json()
        again = await node.bus.subscribe("demo", "g", acknowledge)
        assert again.group_state is not None
        is_paused = again.group_state.is_paused

    assert (answer["carried_out"], answer["changes"], idle["state"], idle["paused"]) == (True, True, "paused", True)
    assert is_paused


async def test_a_group_is_moved(tmp_path: Path) -> None:
    """A dry seek says what comes again and what never comes; the real one does it, running or not, and is audited."""
    async with api(tmp_path) as (node, client):
        await publish(node, 10)
        seen: list[int] = []

        async def note(received: ReceivedEvent) -> Ack:
            seen.append(received.offset)
            return Ack()

        own = await node.bus.subscribe("demo", "g", note)
        await until(lambda: len(seen) == 10)
        dry = (await client.post("/v1/groups/demo/g/seek", json={"to_offset": 7, "dry_run": True})).json()
        done = (await client.post("/v1/groups/demo/g/seek", json={"to_offset": 7})).json()
        await until(lambda: len(seen) == 13)
        await until(lambda: node.bus.lag("demo", "g") == 0)
        await node.bus.unsubscribe(own)
        back = (await client.post("/v1/groups/demo/g/seek", json={"to": "earliest"})).json()
        place = (await client.get("/v1/groups/demo/g")).json()
        written = (await client.get("/v1/events?topic=demo&from_offset=4")).json()["events"][0]["meta"]["written_at"]
        timed = (await client.post("/v1/groups/demo/g/seek", json={"to_time": written, "dry_run": True})).json()
        recorded = await audits(client)
        refused = [
            await client.post("/v1/groups/demo/g/seek", json={}),
            await client.post("/v1/groups/demo/g/seek", json={"to": "latest", "to_offset": 1}),
            await client.post("/v1/groups/demo/g/seek", json={"to_offset": 11}),
            await client.post("/v1/groups/demo/g/seek", json={"to_ofset": 1}),
        ]

    assert (dry["carried_out"], dry["redelivered"], dry["skipped"]) == (False, 3, 0)
    assert (done["carried_out"], done["next_offset"]) == (True, 7)
    assert seen[10:] == [7, 8, 9]
    assert back["redelivered"] == 10
    assert (place["lag"], place["committed"]) == (10, -1)
    assert timed["next_offset"] == 4
    assert [kind for kind, _ in recorded] == ["api.group.seek"] * 2
    assert recorded[0][1]["next_offset"] == 7
    assert {answer.status_code for answer in refused} == {400}


async def test_moving_a_shared_group_does_not_wait_for_those_that_wait(tmp_path: Path) -> None:
    """Events that wait for a free member hold up no seek; only what a member is really at is waited for."""
    gate = asyncio.Event()
    seen: list[int] = []

    async def hold(received: ReceivedEvent) -> Ack:
        seen.append(received.offset)
        await gate.wait()
        return Ack()

    async with api(tmp_path) as (node, client):
        await publish(node, 20)
        await node.bus.join("demo", "g", hold)
        await until(lambda: seen == [0])
        (subscription,) = node.bus.get_subscriptions("demo")
        group = subscription.group_state
        assert group is not None
        await until(lambda: group.pending == 20)
        assert group.handling == 1
        seeking = asyncio.ensure_future(client.post("/v1/groups/demo/g/seek", json={"to_offset": 18}))
        async with asyncio.timeout(5):  # the bus would wait for its workers twice as long
            await until(lambda: group.is_closing)
            gate.set()
            done = (await seeking).json()
        await until(lambda: seen == [0, 18, 19])

    assert done["carried_out"]


async def bury(node: RunningNode, count: int) -> None:
    await publish(node, count)
    await node.bus.subscribe("demo", "failing", refuse, max_retries=0)
    await until(lambda: node.bus.lag("demo", "failing") == 0)


async def test_dead_letters_are_listed_narrowed_and_shown(tmp_path: Path) -> None:
    """Letters come in pages, by group, state and error; one is shown with its event and its history."""
    async with api(tmp_path) as (node, client):
        await bury(node, 5)
        listed = (await client.get("/v1/dead-letters?limit=2")).json()
        rest = (await client.get(f"/v1/dead-letters?limit=10&skip={listed['next_skip']}")).json()
        narrowed = (await client.get("/v1/dead-letters?topic=demo&group=failing&error_contains=good: 3")).json()
        none = (await client.get("/v1/dead-letters?state=dropped&state=redriven")).json()
        one = (await client.get("/v1/dead-letters/demo/failing-3")).json()
        missing = await client.get("/v1/dead-letters/demo/failing-99")

    assert (len(listed["dead_letters"]), listed["count"], listed["next_skip"]) == (2, 5, 2)
    assert (len(rest["dead_letters"]), rest["next_skip"]) == (3, None)
    assert [each["id"] for each in narrowed["dead_letters"]] == ["failing-3"]
    assert none["dead_letters"] == []
    assert one["event"]["payload"] == {"n": 3}
    assert one["error"] == "no good: 3"
    assert (missing.status_code, missing.json()["code"]) == (404, "bus.unknown_dead_letter")


async def test_dead_letters_are_tried_again_and_dropped(tmp_path: Path) -> None:
    """Re-driving and dropping work one by one and in bulk, dry first, and each is audited before it is done."""
    async with api(tmp_path) as (node, client):
        await bury(node, 4)
        for subscription in node.bus.get_subscriptions("demo"):
            await node.bus.unsubscribe(subscription)
        await node.bus.subscribe("demo", "failing", acknowledge)
        dry = (
            await client.post("/v1/dead-letters/redrive", json={"topic": "demo", "all": True, "dry_run": True})
        ).json()
        one = (await client.post("/v1/dead-letters/demo/failing-0/redrive")).json()
        dropped = (await client.post("/v1/dead-letters/demo/failing-1/drop")).json()
        bulk = {"topic": "demo", "group": "failing"}
        many = (await client.post("/v1/dead-letters/redrive", json=bulk)).json()
        letters: list[dict[str, Any]] = []
        async with asyncio.timeout(20):
            while len(letters) < 3:
                letters = (await client.get("/v1/dead-letters?state=redriven")).json()["dead_letters"]
        nothing = (await client.post("/v1/dead-letters/drop", json=bulk)).json()
        vague = await client.post("/v1/dead-letters/drop", json={"topic": "demo"})
        unknown = await client.post("/v1/dead-letters/drop", json={"topic": "demo", "ids": ["failing-99"]})
        recorded = await audits(client)

    assert (dry["carried_out"], dry["count"]) == (False, 4)
    assert (one["carried_out"], one["count"]) == (True, 1)
    assert dropped["dead_letters"][0]["id"] == "failing-1"
    assert many["count"] == 2
    assert {each["id"] for each in letters} == {"failing-0", "failing-2", "failing-3"}
    assert (nothing["carried_out"], nothing["count"]) == (False, 0)
    assert (vague.status_code, unknown.status_code) == (400, 404)
    assert [kind for kind, _ in recorded] == ["api.dlq.redrive", "api.dlq.drop", "api.dlq.redrive"]


async def test_a_full_window_is_told_and_may_be_tried_again(tmp_path: Path) -> None:
    """A publish that a full group holds up for too long is refused as retryable; in a batch, only where it is so."""
    settings = msgspec.structs.replace(node_settings(), api=ApiSettings(publish_timeout_s=0.02))
    gate = asyncio.Event()

    async def hold(received: ReceivedEvent) -> Ack:
        await gate.wait()
        return Ack()

    async with api(tmp_path, settings) as (node, client):
        await node.bus.subscribe("demo", "g", hold, max_inflight=1)
        assert (await client.post("/v1/events", json=event(0))).status_code == 201
        full = await client.post("/v1/events", json=event(1))
        many = (await client.post("/v1/events", json=[event(2), event(3, topic="free")])).json()
        gate.set()

    assert (full.status_code, full.json()["code"], full.json()["retryable"]) == (503, "bus.publish_timeout", True)
    assert full.headers["retry-after"] == "1"
    assert [each["verdict"] for each in many["verdicts"]] == ["refused", "appended"]
    assert many["verdicts"][0]["error"]["retryable"]


async def test_a_parameter_that_a_request_does_not_have_is_refused(tmp_path: Path) -> None:
    """``?dry_run=true`` where the body would say it changes nothing, instead of being passed over."""
    changes: tuple[tuple[str, str, Any], ...] = (
        ("DELETE", "/v1/groups/demo/g", None),
        ("POST", "/v1/groups/demo/g/seek", {"to": "latest"}),
        ("POST", "/v1/groups/demo/g/pause", {}),
        ("POST", "/v1/dead-letters/drop", {"topic": "demo", "all": True}),
    )
    async with api(tmp_path) as (node, client):
        subscription = await node.bus.subscribe("demo", "g", acknowledge)
        await publish(node, 1)
        await until(lambda: node.bus.lag("demo", "g") == 0)
        await node.bus.unsubscribe(subscription)
        before = node.log.position.seq
        answers = [
            await client.request(method, path, json=body, params={"dryrun" if body is None else "dry_run": "true"})
            for method, path, body in changes
        ]
        dry = await client.delete("/v1/groups/demo/g", params={"dry_run": "true"})
        assert node.log.position.seq == before
        assert await node.bus.groups("demo") == [("demo", "g")]

    assert [(each.status_code, each.json()["code"]) for each in answers] == [(400, "api.invalid_request")] * 4
    assert (dry.status_code, dry.json()["carried_out"]) == (200, False)
    assert all("dry" in each.json()["detail"] for each in answers)
