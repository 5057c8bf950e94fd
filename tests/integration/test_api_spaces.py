"""Spaces over HTTP: a token that names some is bound to them, to publish, to read, and to look at dead letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidings.testing.node import RunningNode
from tidings.types import Ack, ReceivedEvent

from .api_support import api, check, event, until
from .node_support import until_answered

STRUCTURED = {"content-type": "application/cloudevents+json"}


def bound(node: RunningNode, *spaces: str, **claims: Any) -> httpx.AsyncClient:
    """A client whose token is for the topic ``demo`` in these spaces."""
    headers = node.headers("alice", topics=["demo"], spaces=spaces, **claims)
    return httpx.AsyncClient(base_url=node.url, headers=headers, event_hooks={"response": [check]})


def cloudevent(space: str, number: int) -> dict[str, Any]:
    attributes = {"specversion": "1.0", "id": f"{space}-{number}", "source": "/s", "type": "NOTED"}
    return {**attributes, "topic": "demo", "spaceid": space, "data": {"n": number}}


@pytest.mark.parametrize("shape", ["one", "default", "cloudevent", "binary"])
async def test_one_event_goes_into_a_space_of_the_token_only(tmp_path: Path, shape: str) -> None:
    """However the space is said, one that the token does not name is refused by name, and nothing is stored."""
    async with api(tmp_path) as (node, _), bound(node, "home") as alice:

        async def send(space: str) -> httpx.Response:
            match shape:
                case "one":
                    return await alice.post("/v1/events", json=event(space_id=space))
                case "default":
                    body = {"meta": {"topic": "demo", "type": "NOTED"}, "payload": {}}
                    return await alice.post(f"/v1/events?space_id={space}", json=body)
                case "cloudevent":
                    return await alice.post("/v1/events", content=json.dumps(cloudevent(space, 1)), headers=STRUCTURED)
            given = {f"ce-{name}": str(value) for name, value in cloudevent(space, 1).items() if name != "data"}
            return await alice.post("/v1/events", content=b"{}", headers={"content-type": "application/json", **given})

        refused, taken = await send("work"), await send("home")
        assert node.log.position.seq == 1

    assert (refused.status_code, refused.json()["code"]) == (403, "access.forbidden")
    assert "space:work" in refused.json()["detail"]
    assert taken.status_code == 201


async def test_in_a_batch_each_event_is_judged_by_its_own_space(tmp_path: Path) -> None:
    """A foreign space keeps none of the others from being stored, as JSON or as CloudEvents; a prefix covers what begins so."""
    async with api(tmp_path) as (node, _), bound(node, "home", space_prefixes=["team:"]) as alice:
        spaces = ["home", "work", "team:a"]
        many = await alice.post("/v1/events", json=[event(n, space_id=name) for n, name in enumerate(spaces)])
        batch = json.dumps([cloudevent(name, 1) for name in spaces])
        headers = {"content-type": "application/cloudevents-batch+json"}
        clouds = await alice.post("/v1/events", content=batch, headers=headers)

    for answer in (many, clouds):
        assert [each["verdict"] for each in answer.json()["verdicts"]] == ["appended", "refused", "appended"]
        assert answer.json()["verdicts"][1]["error"]["code"] == "access.forbidden"


async def test_only_events_of_the_tokens_spaces_are_read(tmp_path: Path) -> None:
    """Pages in every form pass over other spaces, one event of them is not said to exist, and a revocation ends what is left."""
    async with api(tmp_path) as (node, admin), bound(node, "home") as alice:
        await admin.post("/v1/events", json=[event(n, space_id=("work", "home")[n % 2]) for n in range(6)])
        page = (await alice.get("/v1/events?topic=demo")).json()
        lines = (await alice.get("/v1/events", headers={"accept": "application/x-ndjson"})).text.splitlines()
        accept = {"accept": "application/cloudevents-batch+json"}
        clouds = (await alice.get("/v1/events", headers=accept)).json()
        ones = [(await alice.get(f"/v1/events/{seq}")).status_code for seq in (1, 2)]
        await admin.post(
            "/v1/access/revocations", json={"subject": "alice", "action": "read", "resource": "space:home"}
        )
        after = (await alice.get("/v1/events?topic=demo")).json()
        everything = (await admin.get("/v1/events?topic=demo")).json()

    assert [each["payload"]["n"] for each in page["events"]] == [1, 3, 5]
    assert [json.loads(line)["payload"]["n"] for line in lines] == [1, 3, 5]
    assert [each["data"]["n"] for each in clouds] == [1, 3, 5]
    assert ones == [404, 200]
    assert after["events"] == []
    assert len(everything["events"]) == 6


async def test_dead_letters_of_other_spaces_are_not_shown(tmp_path: Path) -> None:
    """A letter holds its event: the list leaves out those of other spaces and does not count them, and one is 404."""

    async def refuse(received: ReceivedEvent) -> Ack:
        raise ValueError("no good")

    async with api(tmp_path) as (node, admin), bound(node, "home") as alice:
        await admin.post("/v1/events", json=[event(n, space_id=("work", "home")[n % 2]) for n in range(4)])
        await node.bus.subscribe("demo", "g", refuse, max_retries=0)
        await until(lambda: node.bus.lag("demo", "g") == 0)
        everything = (await admin.get("/v1/dead-letters?topic=demo")).json()
        seen = (await alice.get("/v1/dead-letters?topic=demo")).json()
        unnamed = (await alice.get("/v1/dead-letters")).json()
        statuses = [
            (await alice.get(f"/v1/dead-letters/demo/{each['id']}")).status_code for each in everything["dead_letters"]
        ]

    assert everything["count"] == 4
    assert {each["space_id"] for each in seen["dead_letters"]} == {"home"}
    assert (seen["count"], unnamed["count"]) == (2, 2)
    assert statuses == [404, 200, 404, 200]


async def test_a_caller_sees_which_spaces_its_token_names(tmp_path: Path) -> None:
    """Names and prefixes are both in what the node makes of a token."""
    async with api(tmp_path) as (node, _), bound(node, "home", space_prefixes=["team:"]) as alice:
        me = (await alice.get("/v1/whoami")).json()

    assert (me["spaces"], me["space_prefixes"]) == (["home"], ["team:"])


@pytest.mark.parametrize("by", ["claim", "revocation", "policy", "partition claim"])
async def test_figures_of_a_topic_and_its_groups_tell_nothing_of_other_spaces(tmp_path: Path, by: str) -> None:
    """An event in a space that a reader may not read changes nothing of what it is shown; who may read all is shown the figures."""
    async with api(tmp_path) as (node, root):
        await node.services.bus.subscribe("demo", "g", _acknowledge)
        claims: dict[str, Any] = {"topics": ["demo"]}
        match by:
            case "claim":
                claims["spaces"] = ["home"]
            case "partition claim":
                claims["partitions"] = ["p1"]
            case "revocation":
                change = {"subject": "alice", "action": "read", "resource": "space:vault"}
                assert (await root.post("/v1/access/revocations", json=change)).status_code == 201
            case "policy":
                text = 'forbid (principal == Subject::"alice", action, resource == Space::"vault");'
                put = await root.post("/v1/access/policies", json={"policy_id": "a", "text": text})
                assert put.status_code == 201
        await root.post("/v1/events", json=event(1, space_id="home"))

        async def shown(headers: dict[str, str]) -> list[Any]:
            paths = ("/v1/topics", "/v1/topics/demo", "/v1/groups", "/v1/groups/demo/g", "/v1/topics?segments=true")
            async with httpx.AsyncClient(
                base_url=node.url, headers=headers, event_hooks={"response": [check]}
            ) as reader:
                answers = [(await reader.get(path)).json() for path in paths]
            answers[0].pop("seq")
            answers[4].pop("seq")
            return answers

        alice, bob = node.headers("alice", **claims), node.headers("bob", topics=["demo"])
        before, before_bob = await shown(alice), await shown(bob)
        await root.post("/v1/events", json=event(2, space_id="vault", partitions=["p2"]))
        report = "demo", "g"
        await until_answered(lambda: _lag(node, *report), 0)
        after, after_bob = await shown(alice), await shown(bob)

    assert after == before
    assert (before_bob[1]["next_offset"], after_bob[1]["next_offset"]) == (1, 2)
    assert after_bob[3]["next_offset"] == 2


async def _acknowledge(_: ReceivedEvent) -> Ack:
    return Ack()


async def _lag(node: RunningNode, topic: str, group: str) -> int | None:
    return (await node.services.bus.admin.report(topic, group)).lag
