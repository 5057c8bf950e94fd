"""Who may do what over HTTP: no token, no rights, lost rights, and changing rights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.access_events import revoke_event
from tidings.access.resources import Action, topic
from tidings.access.settings import AccessSettings, TokenSettings
from tidings.core.events import Event, EventMeta
from tidings.testing.node import TEST_SECRET, RunningNode, node_settings
from tidings.types import Ack, ReceivedEvent

from .api_support import api, check, event, until
from .node_support import until_answered


def as_(node: RunningNode, subject: str, **claims: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=node.url, headers=node.headers(subject, **claims), event_hooks={"response": [check]}
    )


async def test_without_a_token_nothing_is_answered(tmp_path: Path) -> None:
    """No token, another scheme, a forged token, an expired one: 401 each, with its own code; the documents stay public."""
    async with (
        api(tmp_path) as (node, _),
        httpx.AsyncClient(base_url=node.url, event_hooks={"response": [check]}) as client,
    ):
        codes = []
        for header in (
            None,
            "Basic abc",
            "Bearer",
            "Bearer not.a.token",
            node.headers(lifetime_s=-3600)["authorization"],
        ):
            headers = {} if header is None else {"authorization": header}
            answer = await client.get("/v1/events", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            codes.append(answer.json()["code"])
        public = await client.get("/v1/openapi.json")

    assert codes == [*["access.auth_failed"] * 3, "access.token_invalid", "access.token_expired"]
    assert public.status_code == 200


async def test_open_access_lets_in_those_without_a_token(tmp_path: Path) -> None:
    """Where access is open by its settings, a request without a token is nobody's in particular, and a bad token still bad."""
    access = AccessSettings(is_open=True, tokens=TokenSettings(secret=TEST_SECRET))
    settings = msgspec.structs.replace(node_settings(), access=access)
    async with api(tmp_path, settings) as (node, _), httpx.AsyncClient(base_url=node.url) as client:
        assert (await client.post("/v1/events", json=event(1))).status_code == 201
        assert (await client.get("/v1/whoami")).json()["subject"] == "anonymous"
        bad = await client.get("/v1/whoami", headers={"authorization": "Bearer x"})
    assert bad.status_code == 401


async def test_only_what_was_given_can_be_done(tmp_path: Path) -> None:
    """A caller publishes to and reads its own topics; others are refused by name and left out of what is listed."""
    async with api(tmp_path) as (node, admin):
        await admin.post("/v1/events", json=[event(0, topic="mine"), event(1, topic="theirs"), event(2, topic="mine")])
        async with as_(node, "alice", topics=["mine"]) as alice:
            refused = await alice.post("/v1/events", json=event(3, topic="theirs"))
            mixed = (await alice.post("/v1/events", json=[event(4, topic="theirs"), event(5, topic="mine")])).json()
            named = await alice.get("/v1/events?topic=theirs")
            page = (await alice.get("/v1/events")).json()
            one = await alice.get("/v1/events/2")
            topics = (await alice.get("/v1/topics")).json()
            statuses = [
                (await alice.get("/v1/topics/theirs")).status_code,
                (await alice.get("/v1/groups?topic=theirs")).status_code,
                (await alice.get("/v1/dead-letters?topic=theirs")).status_code,
                (await alice.post("/v1/groups/mine/g/seek", json={"to": "earliest"})).status_code,
                (await alice.post("/v1/dead-letters/drop", json={"topic": "mine", "all": True})).status_code,
                (await alice.get("/v1/access/grants")).status_code,
                (await alice.post("/v1/access/grants", json={})).status_code,
            ]

    assert (refused.status_code, refused.json()["code"]) == (403, "access.forbidden")
    assert [each["verdict"] for each in mixed["verdicts"]] == ["refused", "appended"]
    assert named.status_code == 403
    assert [each["payload"]["n"] for each in page["events"]] == [0, 2, 5]
    assert one.status_code == 404  # what may not be seen is not said to exist
    assert [each["topic"] for each in topics["topics"]] == ["mine"]
    assert statuses == [403] * 7


@pytest.mark.parametrize("name", ["access", "audit", "ledger", "schedule", "sync", "sync.projects", "sync.legacy"])
async def test_nobody_publishes_to_tidings_own_topics(tmp_path: Path, name: str) -> None:
    """Not even an administrator writes grants or audit records by hand, or speaks for a sync client past its endpoint."""
    async with api(tmp_path) as (node, client):
        answer = await client.post("/v1/events", json=event(1, topic=name))

        assert node.log.position.seq == 0
    assert (answer.status_code, answer.json()["code"]) == (403, "api.reserved_topic")


async def test_nothing_after_a_revocation_is_read(tmp_path: Path) -> None:
    """What is committed in one batch with a revocation, and behind it, is not shown to the one who lost the right."""
    async with api(tmp_path) as (node, _), as_(node, "alice", topics=["mine"]) as alice:
        meta = EventMeta(topic="mine", type="NOTED", space_id="home")
        revocation = revoke_event("alice", Action.READ, topic("mine"), actor="test")
        await node.log.append_many([revocation, Event(meta, {"n": 1})])
        page = (await alice.get("/v1/events")).json()
        named = await alice.get("/v1/events?topic=mine")

    assert page["events"] == []
    assert named.status_code == 403


async def test_a_grant_is_in_force_when_it_is_answered(tmp_path: Path) -> None:
    """Granting, revoking and restoring take effect with their answers; a dry run changes nothing; all is listed."""
    async with api(tmp_path) as (node, admin), as_(node, "bob", topics=["none"]) as bob:
        await admin.post("/v1/events", json=event(1))

        async def may_read() -> bool:
            return (await bob.get("/v1/events?topic=demo")).status_code == 200

        right = {"subject": "bob", "action": "read", "resource": "topic:demo"}
        dry = await admin.post("/v1/access/grants?dry_run=true", json=right)
        assert (dry.status_code, dry.json()["carried_out"], await may_read()) == (200, False, False)
        granted = await admin.post("/v1/access/grants", json=right)
        assert (granted.status_code, granted.json()["type"], await may_read()) == (201, "access.grant", True)
        grants = (await admin.get("/v1/access/grants?subject=bob")).json()
        assert [each["resource"] for each in grants["rules"]] == ["topic:demo"]
        assert (await admin.post("/v1/access/revocations", json=right)).status_code == 201
        assert not await may_read()
        assert (await admin.get("/v1/access/revocations")).json()["rules"][0]["subject"] == "bob"
        await admin.post("/v1/access/grants", json=right)
        await admin.post("/v1/access/revocations", json={"type": "access.subject_revoked", "subject": "bob"})
        revoked = await bob.get("/v1/events?topic=demo")
        assert (revoked.status_code, revoked.json()["code"]) == (401, "access.token_revoked")
        await admin.post("/v1/access/grants", json={"type": "access.subject_restored", "subject": "bob"})
        assert await may_read()


async def test_a_policy_is_checked_before_it_is_stored(tmp_path: Path) -> None:
    """A policy that cannot be read is refused and changes nothing; a good one is in force at once, until it is removed."""
    text = 'forbid (principal, action == Action::"read", resource == Topic::"demo");'
    async with api(tmp_path) as (_, admin):
        bad = await admin.post("/v1/access/policies", json={"policy_id": "p", "text": "permit everything"})
        assert (bad.status_code, bad.json()["code"]) == (400, "access.invalid_policy")
        put = await admin.post("/v1/access/policies", json={"policy_id": "p", "text": text})
        assert put.status_code == 201, put.text
        assert (await admin.get("/v1/events?topic=demo")).status_code == 403
        assert [each["policy_id"] for each in (await admin.get("/v1/access/policies")).json()["policies"]] == ["p"]
        removed = {"type": "access.policy_removed", "policy_id": "p"}
        assert (await admin.post("/v1/access/policies", json=removed)).status_code == 201
        assert (await admin.get("/v1/events?topic=demo")).status_code == 200


async def test_who_am_i(tmp_path: Path) -> None:
    """A caller sees what the node makes of its token."""
    async with api(tmp_path, topics=["demo"], partitions=["p1"]) as (_, client):
        me = (await client.get("/v1/whoami")).json()

    assert me["subject"] == "tester"
    assert (me["topics"], me["partitions"], me["roles"]) == (["demo"], ["p1"], [])
    assert me["expires_at"] is not None


async def test_a_token_for_reading_only_changes_nothing(tmp_path: Path) -> None:
    """Whatever topics, roles and grants its bearer has: it reads, and is refused what publishes, joins or administers."""
    async with api(tmp_path, topics=["demo"], roles=["admin"], is_read_only=True) as (node, client):
        await node.log.append(Event(EventMeta("demo", "T", "s"), {}))
        read = await client.get("/v1/events?topic=demo")
        refused = [
            await client.post(
                "/v1/events", json={"meta": {"topic": "demo", "type": "T", "space_id": "s"}, "payload": {}}
            ),
            await client.post("/v1/access/grants", json={}),
            await client.post("/v1/groups/demo/g/pause", json={}),
        ]
        assert (await client.get("/v1/whoami")).json()["is_read_only"] is True

    assert (read.status_code, len(read.json()["events"])) == (200, 1)
    assert [each.status_code for each in refused] == [403] * 3


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("alice", None),
        ({"user_id": "alice", "caps": ["WRITE"]}, None),
        ("bob", "api.foreign_actor"),
        ({"user_id": "bob"}, "api.foreign_actor"),
        ({"agent_id": "a-robot"}, "api.foreign_actor"),
        ({"user_id": ["alice"]}, "api.foreign_actor"),
        ("", "api.foreign_actor"),
    ],
)
async def test_an_events_actor_is_who_publishes_it(tmp_path: Path, given: Any, code: str | None) -> None:
    """Whoever names somebody else is refused with the field at fault, alone and in a batch, and nothing of it is stored."""
    async with api(tmp_path) as (node, _), as_(node, "alice", topics=["demo"]) as alice:
        one = await alice.post("/v1/events", json=event(1, actor=given))
        many = (await alice.post("/v1/events", json=[event(2, actor=given), event(3)])).json()
        (*_, last) = (await alice.get("/v1/events")).json()["events"]
        count = node.log.position.seq

    assert last["meta"]["actor"] == "alice"  # who left it out is the publisher too
    if code is None:
        assert (one.status_code, many["appended"], count) == (201, 2, 3)
    else:
        assert (one.status_code, one.json()["code"]) == (403, code)
        assert one.json()["detail"].startswith("meta.actor: ")
        assert [each["verdict"] for each in many["verdicts"]] == ["refused", "appended"]
        assert many["verdicts"][0]["error"]["code"] == code
        assert count == 1


async def test_a_cloudevents_actor_is_who_publishes_it(tmp_path: Path) -> None:
    """The extension ``actor`` is held to the same; ``source`` and ``subject`` are what the event is about, and free."""
    whole: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "/bob", "type": "NOTED", "subject": "bob"}
    whole |= {"topic": "demo", "spaceid": "home", "data": {}}
    structured = {"content-type": "application/cloudevents+json"}
    async with api(tmp_path) as (node, _), as_(node, "alice", topics=["demo"]) as alice:
        foreign = await alice.post("/v1/events", json={**whole, "actor": "bob"}, headers=structured)
        binary = {f"ce-{name}": str(value) for name, value in whole.items() if name != "data"}
        in_headers = await alice.post("/v1/events", headers={**binary, "ce-actor": "bob"})
        own = await alice.post("/v1/events", json=whole, headers=structured)
        meta = {"topic": "demo", "type": "NOTED", "space_id": "home", "actor": {"user_id": "alice"}}
        forged = {"meta": {**meta, "extra": {"cloudevents": {"actor": "bob"}}}, "payload": {}}
        assert (await alice.post("/v1/events", json=forged)).status_code == 201
        shown = (await alice.get("/v1/events", headers={"accept": "application/cloudevents-batch+json"})).json()

    assert (foreign.status_code, foreign.json()["code"]) == (403, "api.foreign_actor")
    assert (in_headers.status_code, in_headers.json()["code"]) == (403, "api.foreign_actor")
    assert own.status_code == 201
    assert [(each["actor"], each.get("subject")) for each in shown] == [("alice", "bob"), ("alice", None)]


async def test_a_grant_lets_a_gateway_publish_for_others(tmp_path: Path) -> None:
    """With publish on actors granted, by name or by prefix, their names are stored; when it is revoked, they no longer are."""
    async with api(tmp_path) as (node, admin), as_(node, "gateway", topics=["demo"]) as gateway:

        async def status(actor: str) -> int:
            return (await gateway.post("/v1/events", json=event(actor=actor))).status_code

        right = {"subject": "gateway", "action": "publish", "resource": "actor:user-*"}
        assert await status("user-7") == 403
        await admin.post("/v1/access/grants", json=right)
        assert (await status("user-7"), await status("root")) == (201, 403)
        assert await status("user-e\u0301") == 403  # another spelling of a name that may be somebody's
        await admin.post("/v1/access/revocations", json=right)
        assert await status("user-7") == 403
        page = (await admin.get("/v1/events?topic=demo")).json()

    assert [each["meta"]["actor"] for each in page["events"]] == ["user-7"]


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"subject": "alice", "action": "publish", "resource": "topic:demo"}, 403, "access.forbidden"),
        ({"subject": "alice", "action": "publish", "resource": "space:home"}, 403, "access.forbidden"),
        ({"type": "access.subject_revoked", "subject": "alice"}, 401, "access.token_revoked"),
    ],
)
async def test_a_publish_that_waited_is_asked_for_its_right_again(
    tmp_path: Path, change: dict[str, Any], status: int, code: str, is_batch: bool
) -> None:
    """A right that is revoked while a publish waits for a full window is gone when it goes on: nothing is stored."""
    has_room = asyncio.Event()

    async def handle(received: ReceivedEvent) -> Ack:
        await has_room.wait()
        return Ack()

    async with api(tmp_path) as (node, admin), as_(node, "alice", topics=["demo"]) as alice:
        await node.bus.subscribe("demo", "slow", handle, max_inflight=1)
        await admin.post("/v1/events", json=event(0))
        body = [event(1)] if is_batch else event(1)
        waiting = asyncio.ensure_future(alice.post("/v1/events", json=body))
        await until(lambda: node.bus._started_now.publishing.windows["demo"].waiting)
        revoked = await admin.post("/v1/access/revocations", json=change)
        assert revoked.status_code == 201
        has_room.set()
        answer = await waiting
        page = (await admin.get("/v1/events?topic=demo")).json()

    assert [each["payload"]["n"] for each in page["events"]] == [0]
    if is_batch:
        (verdict,) = answer.json()["verdicts"]
        assert (verdict["verdict"], verdict["error"]["code"]) == ("refused", code)
    else:
        assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize("is_whole_subject", [True, False])
async def test_a_read_that_waits_ends_when_its_right_is_revoked(tmp_path: Path, is_whole_subject: bool) -> None:
    """A revocation wakes a waiting read, which is refused at once instead of when its time is up."""
    async with api(tmp_path) as (node, admin), as_(node, "bob", topics=["demo"], spaces=["home"]) as bob:
        waiting = asyncio.create_task(bob.get("/v1/events?topic=demo&wait=30", timeout=60))
        await until_answered(lambda: requests_in_progress(node), 2.0)
        change = (
            {"type": "access.subject_revoked", "subject": "bob"}
            if is_whole_subject
            else {"subject": "bob", "action": "read", "resource": "topic:demo"}
        )
        await admin.post("/v1/access/revocations", json=change)
        async with asyncio.timeout(15):
            answer = await waiting

    assert answer.json()["code"] == ("access.token_revoked" if is_whole_subject else "access.forbidden")


async def requests_in_progress(node: RunningNode) -> float:
    async with httpx.AsyncClient(base_url=node.url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("tidings_http_requests_in_progress "))


async def test_a_policy_in_another_spelling_is_refused(tmp_path: Path) -> None:
    """A subject written with a combining accent would never match: 400, and the message has the spelling to use."""
    text = 'forbid (principal == Subject::"e\u0301ve", action, resource);'
    async with api(tmp_path) as (node, client):
        refused = await client.post("/v1/access/policies", json={"policy_id": "a", "text": text})
        taken = await client.post(
            "/v1/access/policies", json={"policy_id": "a", "text": text.replace("e\u0301", "\u00e9")}
        )
        async with as_(node, "e\u0301ve", topics=["demo"]) as eve:
            answer = await eve.get("/v1/events", params={"topic": "demo"})

    assert (refused.status_code, refused.json()["code"]) == (400, "access.invalid_policy")
    assert r"write '\xe9ve'" in refused.json()["detail"]
    assert (taken.status_code, answer.status_code) == (201, 403)


@pytest.mark.parametrize(
    ("collection", "change"),
    [
        ("grants", {"subject": "bob", "action": "read", "resource": "object:order:vault"}),
        ("revocations", {"subject": "bob", "action": "read", "resource": "object:order:vault"}),
        ("revocations", {"subject": "bob", "action": "read", "resource": "domain:*"}),
        ("policies", {"policy_id": "a", "text": 'forbid (principal, action, resource == Object::"order:vault");'}),
    ],
)
async def test_changes_that_nothing_would_ask_for_are_refused(
    collection: str, change: dict[str, Any], tmp_path: Path
) -> None:
    """Rights on objects and domains are decided nowhere: 400 instead of a change that has no effect, and nothing is stored."""
    async with api(tmp_path) as (node, client):
        answer = await client.post(f"/v1/access/{collection}", json=change)

        assert answer.status_code == 400, answer.text
        assert "no endpoint decides" in answer.json()["detail"]
        assert "access" not in node.log.topics()


@pytest.mark.parametrize("collection", ["grants", "revocations", "policies"])
@pytest.mark.parametrize(
    "body",
    [
        rb'{"subject": "a\ud800", "action": "read", "resource": "topic:x"}',
        b'{"subject": "a\xff", "action": "read", "resource": "topic:x"}',
        b'{"subject": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b"{",
        b"",
    ],
    ids=["lone surrogate", "not UTF-8", "deep", "half", "empty"],
)
async def test_a_change_that_cannot_be_read_is_refused(collection: str, body: bytes, tmp_path: Path) -> None:
    """400 and never 500, and nothing is stored."""
    async with api(tmp_path) as (node, client):
        headers = {"content-type": "application/json"}
        answer = await client.post(f"/v1/access/{collection}", content=body, headers=headers)

        assert (answer.status_code, answer.json()["code"]) == (400, "access.invalid_change")
        assert "access" not in node.log.topics()
