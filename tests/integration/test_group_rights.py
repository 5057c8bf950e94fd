"""Rights on groups at every way in: the socket ``/groups``, HTTP, dead letters; and how many groups there may be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.access_events import grant_event, policy_event, revoke_event
from tests.conformance.support import read_all
from tidings.access.resources import Action, group_of
from tidings.bus.events import Nack
from tidings.client.errors import RemoteRefused
from tidings.client.groups import RemoteBus
from tidings.log.interface import Query
from tidings.server.group_settings import GroupsSettings
from tidings.server.settings import ApiSettings
from tidings.testing.node import RunningNode, node_settings, running_node
from tidings.types import Ack, Event, EventMeta, ReceivedEvent

from .api_support import until


def event(number: int) -> Event:
    return Event(EventMeta("demo", "NOTED", "home"), {"n": number})


async def take(received: ReceivedEvent) -> Ack:
    return Ack()


async def refuse(received: ReceivedEvent) -> Nack:
    return Nack("no", delay_s=0.0)


def remote(node: RunningNode, subject: str, **claims: Any) -> RemoteBus:
    return RemoteBus(node.url, node.token(subject, **{"topics": ["demo"], **claims}))


async def test_reading_a_topic_gives_no_group_of_it(tmp_path: Path) -> None:
    """A token that may read, publish and subscribe to a topic can neither join another team's group nor make one."""
    async with running_node(tmp_path) as node:
        billing = await node.bus.subscribe("demo", "billing", take)
        await node.bus.publish(event(0))
        await until(lambda: node.bus.lag("demo", "billing") == 0)
        await node.bus.unsubscribe(billing)
        async with remote(node, "reader") as bus:
            for name in ("billing", "mine"):
                with pytest.raises(RemoteRefused) as refused:
                    await bus.subscribe("demo", name, take)
                assert refused.value.error_code == "access.forbidden"
                assert f"group:demo/{name}" in str(refused.value)
        known = await node.bus.groups("demo")

    assert known == [("demo", "billing")]


async def test_joining_and_creating_are_two_rights(tmp_path: Path) -> None:
    """Who may join takes part in a group that is there; bringing one into being takes more, and is on record."""
    async with running_node(tmp_path) as node, remote(node, "worker") as bus:
        await node.log.append(grant_event("worker", Action.JOIN, group_of("demo", "g"), actor="test"))
        with pytest.raises(RemoteRefused, match="create"):
            await bus.subscribe("demo", "g", take)
        await node.log.append(grant_event("worker", Action.CREATE, group_of("demo", "g"), actor="test"))
        await bus.subscribe("demo", "g", take)
        made = [
            each for each in await read_all(node.log, Query(topic="audit")) if each.meta.type == "groups.group.create"
        ]

    assert [(each.meta.actor, each.payload["group"]) for each in made] == [("worker", "g")]


async def test_losing_the_right_on_a_group_ends_the_membership(tmp_path: Path) -> None:
    """A revocation of ``join`` counts on a live connection, before what is committed after it."""
    seen: list[int] = []

    async def note(received: ReceivedEvent) -> Ack:
        seen.append(int(received.payload["n"]))
        return Ack()

    async with running_node(tmp_path) as node, remote(node, "worker", groups=["demo/g"]) as bus:
        subscription = await bus.subscribe("demo", "g", note)
        await bus.publish(event(0))
        await until(lambda: seen == [0])
        gone = revoke_event("worker", Action.JOIN, group_of("demo", "g"), actor="test")
        await node.log.append_many([gone, *(event(n) for n in range(1, 10))])
        await until(lambda: subscription.problem is not None)
        await until(lambda: not node.bus.get_subscriptions("demo"))

    assert seen == [0]


async def test_policies_see_groups_within_their_topic(tmp_path: Path) -> None:
    """Cedar permits and forbids by the group, its name's parts and its topic."""
    text = """
        permit (principal in Role::"team", action in [Action::"join", Action::"create"], resource in Topic::"demo");
        forbid (principal, action == Action::"join", resource is Group) when { resource.group like "billing*" };
    """
    async with running_node(tmp_path) as node, remote(node, "worker", roles=["team"]) as bus:
        await node.log.append(policy_event("teams", text, actor="test"))
        await bus.subscribe("demo", "mailing", take)
        with pytest.raises(RemoteRefused, match="join"):
            await bus.subscribe("demo", "billing-eu", take)


@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        ({"groups_count_max": 2}, "at this node"),
        ({"groups_per_topic_max": 2}, "of topic"),
        ({"groups_per_subject_max": 2}, "made by"),
    ],
)
async def test_the_number_of_groups_is_bounded(tmp_path: Path, limits: dict[str, int], scope: str) -> None:
    """Beyond the bound no further group is made, also after a restart; one that is there can still be joined."""
    settings = msgspec.structs.replace(node_settings(), groups=GroupsSettings(**limits))
    for round_ in range(2):
        async with running_node(tmp_path, settings) as node:
            async with remote(node, "maker", group_prefixes=["demo/"]) as bus:
                for name in ("a", "b"):
                    await bus.subscribe("demo", name, take)
                with pytest.raises(RemoteRefused, match=scope) as refused:
                    await bus.subscribe("demo", f"c{round_}", take)
            known = await node.bus.groups("demo")

        assert refused.value.error_code == "groups.too_many_groups"
        assert known == [("demo", "a"), ("demo", "b")]


OPERATIONS = [
    ("POST", "/v1/groups/demo/g/pause", {}, "pause"),
    ("POST", "/v1/groups/demo/g/resume", {}, "pause"),
    ("POST", "/v1/groups/demo/g/seek", {"to": "earliest"}, "move"),
    ("POST", "/v1/groups/demo/g/seek", {"to": "earliest", "dry_run": True}, "move"),
    ("DELETE", "/v1/groups/demo/g", None, "delete"),
    ("POST", "/v1/dead-letters/redrive", {"topic": "demo", "all": True}, "redrive"),
    ("POST", "/v1/dead-letters/drop", {"topic": "demo", "ids": ["g-0"]}, "drop"),
    ("POST", "/v1/dead-letters/demo/g-0/redrive", {}, "redrive"),
    ("POST", "/v1/dead-letters/demo/g-0/drop", {}, "drop"),
]


@pytest.mark.parametrize(("method", "path", "body", "action"), OPERATIONS)
async def test_changing_a_group_over_http_takes_the_right_on_it(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None, action: str
) -> None:
    """Reading the topic, joining the group and the same right on another group are not enough; the right on this one is."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        running = await node.bus.subscribe("demo", "g", refuse, max_retries=0)
        await node.bus.publish(event(0))
        await until(lambda: running.group_state is not None and running.group_state.stats.dead_lettered == 1)
        if method == "DELETE":
            await node.bus.unsubscribe(running)
        headers = node.headers("worker", topics=["demo"], groups=["demo/g"])
        await node.log.append(grant_event("worker", Action(action), group_of("demo", "other"), actor="test"))
        refused = await client.request(method, path, json=body, headers=headers)
        await node.log.append(grant_event("worker", Action(action), group_of("demo", "g"), actor="test"))
        await node.services.dispatcher.reached(node.log.position.seq)
        done = await client.request(method, path, json=body, headers=headers)

    assert (refused.status_code, refused.json()["code"]) == (403, "access.forbidden")
    assert done.status_code == 200, done.text


async def test_letters_of_another_group_are_not_dropped_along(tmp_path: Path) -> None:
    """Who may drop letters of one group only is refused a request that would drop those of another too."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        groups = [await node.bus.subscribe("demo", name, refuse, max_retries=0) for name in ("mine", "yours")]
        await node.bus.publish(event(0))
        await until(
            lambda: all(each.group_state is not None and each.group_state.stats.dead_lettered for each in groups)
        )
        await node.log.append(grant_event("worker", Action.DROP, group_of("demo", "mine"), actor="test"))
        await node.services.dispatcher.reached(node.log.position.seq)
        headers = node.headers("worker", topics=["demo"])
        all_ = await client.post("/v1/dead-letters/drop", json={"topic": "demo", "all": True}, headers=headers)
        own = await client.post("/v1/dead-letters/drop", json={"topic": "demo", "group": "mine"}, headers=headers)
        left = await node.bus.dead_letters("demo")

    assert all_.status_code == 403
    assert own.json()["count"] == 1
    assert [letter.group for letter in left] == ["yours"]


async def test_letters_that_may_not_be_read_are_dropped_without_being_named(tmp_path: Path) -> None:
    """The right to drop a group's letters covers all of them; the answer names those whose events the caller may read."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        group = await node.bus.subscribe("demo", "g", refuse, max_retries=0)
        await node.bus.publish(event(0))
        await node.bus.publish(Event(EventMeta("demo", "NOTED", "secret"), {"n": 1}))
        await until(lambda: group.group_state is not None and group.group_state.stats.dead_lettered == 2)
        await node.log.append(grant_event("worker", Action.DROP, group_of("demo", "g"), actor="test"))
        await node.services.dispatcher.reached(node.log.position.seq)
        headers = node.headers("worker", topics=["demo"], spaces=["home"])
        done = await client.post("/v1/dead-letters/drop", json={"topic": "demo", "all": True}, headers=headers)

    assert done.json()["count"] == 2
    assert [each["offset"] for each in done.json()["dead_letters"]] == [0]


async def test_a_group_with_members_is_not_deleted(tmp_path: Path) -> None:
    """It is refused with 409; without members its place goes, and the audit says who had it done."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        admin = node.headers("root", roles=["admin"])
        running = await node.bus.subscribe("demo", "g", take)
        busy = await client.delete("/v1/groups/demo/g", headers=admin)
        await node.bus.unsubscribe(running)
        done = await client.delete("/v1/groups/demo/g", headers=admin)
        gone = await client.delete("/v1/groups/demo/g", headers=admin)
        audited = [(each.meta.type, each.meta.actor) for each in await read_all(node.log, Query(topic="audit"))]

    assert (busy.status_code, done.status_code, gone.status_code) == (409, 200, 404)
    assert audited == [("api.group.delete", "root"), ("api.group.delete.ended", "root")]


async def test_a_damaged_group_does_not_tell_where_the_nodes_files_are(tmp_path: Path) -> None:
    """Readers of the topic and members are told that a group's place cannot be read, and no path of the machine."""
    async with running_node(tmp_path) as node:
        await node.bus.subscribe("demo", "g", take)
        await node.bus.publish(event(0))
        await until(lambda: node.bus.lag("demo", "g") == 0)
    for file in (tmp_path / ".bus" / "offsets").glob("demo__g.json*"):
        file.write_bytes(b"nothing whole")
    async with running_node(tmp_path) as node, remote(node, "worker", groups=["demo/g"]) as bus:
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("reader", topics=["demo"])) as http:
            shown = (await http.get("/v1/groups/demo/g")).json()
            listed = (await http.get("/v1/groups")).text
        with pytest.raises(RemoteRefused) as refused:
            await bus.subscribe("demo", "g", take)

    assert (shown["state"], shown["problem"]) == ("damaged", "the group's stored place cannot be read")
    assert refused.value.error_code == "bus.cursor_damaged"
    for text in (listed, str(refused.value)):
        assert str(tmp_path) not in text


async def test_a_publisher_is_not_told_which_group_is_behind(tmp_path: Path) -> None:
    """A full window is told by its topic and the time; the name of the group takes the right to read."""
    held = asyncio.Event()

    async def wait(received: ReceivedEvent) -> Ack:
        await held.wait()
        return Ack()

    settings = msgspec.structs.replace(node_settings(), api=ApiSettings(publish_timeout_s=0.1))
    async with running_node(tmp_path, settings) as node:
        await node.bus.subscribe("demo", "billing", wait, max_inflight=1)
        await node.bus.publish(event(0))
        body = {"meta": {"topic": "demo", "type": "NOTED", "space_id": "home"}, "payload": {}}
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("p", topics=["demo"])) as http:
            answer = await http.post("/v1/events", json=body)
        held.set()

    assert (answer.status_code, answer.json()["code"]) == (503, "bus.publish_timeout")
    assert "billing" not in answer.text


async def test_a_caller_sees_which_groups_its_token_names(tmp_path: Path) -> None:
    """Names and prefixes of groups are in what the node makes of a token."""
    async with running_node(tmp_path) as node:
        headers = node.headers("worker", groups=["demo/g"], group_prefixes=["jobs/"])
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as http:
            me = (await http.get("/v1/whoami")).json()

    assert (me["groups"], me["group_prefixes"]) == (["demo/g"], ["jobs/"])
