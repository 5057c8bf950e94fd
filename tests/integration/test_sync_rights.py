"""One rule for partitions, whatever dialect a client speaks: tokens, revocations and policies, over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.access_events import grant_event, revoke_event
from tests.integration.test_qa_sync_sockets import Place, Talker, item, message, place
from tidings.access.administration import PolicyPut, PolicyRemoved, event_of
from tidings.access.resources import Action, Resource, partition, project
from tidings.core.events import Event

DIALECTS = ("a", "b", "c")


def camel(type: str, payload: Any, /, **envelope: Any) -> bytes:
    return orjson.dumps({"type": type, "msgId": "m-7", "protocolVersion": "1.0", "payload": payload} | envelope)


class Speaker:
    """A client that does the same things in each dialect. In B all partitions are those of one project."""

    def __init__(self, dialect: str, talker: Talker) -> None:
        self.dialect = dialect
        self.talker = talker

    @classmethod
    async def connected(cls, here: Place, dialect: str, name: str, subject: str = "", **claims: Any) -> Speaker:
        talker = await here.line()
        given: dict[str, Any] = {"projects": ["proj"]} | claims if dialect == "b" else claims
        token = here.node.token(subject or f"user-of-{name}", client_id=name, **given)
        if dialect == "a":
            payload = {"token": token, "client_id": name, "supported_profiles": ["canonical"]}
            answer = await talker.ask(message("connect", payload))
        else:
            more = {"projectId": "proj"} if dialect == "b" else {}
            answer = await talker.ask(camel("connect", {"token": token, "clientId": name} | more))
        assert answer["type"] == "connected", answer
        return cls(dialect, talker)

    def item(self, id: str, name: str) -> dict[str, Any]:
        if self.dialect == "a":
            return item(id, name)
        common = {"id": id, "type": "note", "payload": {"of": id}, "meta": {"clientTs": 1}}
        if self.dialect == "b":
            return common | {"partition": name, "projectId": "proj", "schemaVersion": 1}
        return common | {"partitions": [name]}

    async def submit(self, id: str, name: str) -> str:
        """The status, or the reason why not."""
        say = message if self.dialect == "a" else camel
        answer = await self.talker.ask(say("submit_events", {"events": [self.item(id, name)]}))
        (result,) = answer["payload"]["results"]
        return str(result.get("reason", result["status"]))

    async def sync(self, *names: str) -> list[str] | str:
        """The ids of what may be seen, or the error. In B the whole project is asked for."""
        if self.dialect == "a":
            wanted: dict[str, Any] = {"partitions": list(names), "subscription_partitions": list(names)}
            answer = await self.talker.ask(message("sync", wanted | {"since_committed_id": 0}))
        else:
            wanted = {"projectId": "proj"} if self.dialect == "b" else {"partitions": list(names)}
            answer = await self.talker.ask(camel("sync", wanted | {"sinceCommittedId": 0, "limit": 100}))
        if answer["type"] == "error":
            return str(answer["payload"]["code"])
        return [event["id"] for event in answer["payload"]["events"]]

    async def heard(self, count: int = 1) -> list[str]:
        """What was told meanwhile: ids of broadcasts, codes of errors."""
        return [each["payload"].get("id") or each["payload"]["code"] for each in await self.talker.hear(count)]


async def tell(here: Place, *events: Event) -> None:
    """Change access, and wait until it is in force."""
    for event in events:
        await here.node.log.append(event)
    await here.node.services.dispatcher.reached(here.node.log.position.seq)


def revoked(name: str, resource: Resource) -> list[Event]:
    return [revoke_event(f"user-of-{name}", action, resource, actor="t") for action in (Action.SYNC, Action.SUBMIT)]


def granted(name: str, resource: Resource) -> list[Event]:
    return [grant_event(f"user-of-{name}", action, resource, actor="t") for action in (Action.SYNC, Action.SUBMIT)]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_token_is_bound_to_the_partitions_it_names(tmp_path: Path, dialect: str) -> None:
    """Nothing is submitted to others, nothing of others is shown on a page or broadcast."""
    async with place(tmp_path) as here:
        both = await Speaker.connected(here, dialect, "both", partitions=["P1", "P2"])
        one = await Speaker.connected(here, dialect, "one", partitions=["P1"])
        assert await one.sync("P1") == []
        if dialect != "b":
            assert await one.sync("P1", "P2") == "forbidden"

        assert [await both.submit(id, name) for id, name in (("x1", "P2"), ("x2", "P1"))] == ["committed"] * 2
        assert await one.heard() == ["x2"]
        assert [await one.submit(id, name) for id, name in (("y1", "P2"), ("y2", "P1"))] == ["forbidden", "committed"]
        assert await one.sync("P1") == ["x2", "y2"]


@pytest.mark.parametrize("by", ["revocation", "policy"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_partition_is_taken_away_and_given_back_on_an_open_line(tmp_path: Path, dialect: str, by: str) -> None:
    """From that commit on nothing of it is taken or shown; after the next one everything is, on the same line."""
    async with place(tmp_path) as here:
        claims: dict[str, Any] = {} if dialect == "b" else {"partitions": ["P1", "P2"]}
        writer = await Speaker.connected(here, dialect, "writer", **claims)
        reader = await Speaker.connected(here, dialect, "reader", **claims)
        assert await reader.sync("P1", "P2") == []
        assert await writer.submit("a", "P2") == "committed"
        assert await reader.heard() == ["a"]

        policy = 'forbid (principal == Subject::"user-of-reader", action, resource == Partition::"P2");'
        away = [event_of(PolicyPut(policy_id="no", text=policy), actor="t")]
        back = [event_of(PolicyRemoved(policy_id="no"), actor="t")]
        await tell(here, *(away if by == "policy" else revoked("reader", partition("P2"))))
        assert await writer.submit("b", "P2") == "committed"
        assert await writer.submit("c", "P1") == "committed"
        # In a project nothing was asked for by the partition's name, so there is nothing to tell.
        assert await reader.heard(1 if dialect == "b" else 2) == [*([] if dialect == "b" else ["forbidden"]), "c"]
        assert await reader.submit("d", "P2") == "forbidden"
        assert await reader.sync("P1") == ["c"]

        if dialect != "b":
            assert await reader.sync("P1", "P2") == "forbidden"
        await tell(here, *(back if by == "policy" else granted("reader", partition("P2"))))
        if dialect != "b":
            # Its sync of one partition was also a subscription to that one alone.
            assert await reader.sync("P1", "P2") == ["a", "b", "c"]
        assert await writer.submit("e", "P2") == "committed"
        assert await reader.heard() == ["e"]
        assert await reader.submit("f", "P2") == "committed"
        assert await reader.sync("P1", "P2") == ["a", "b", "c", "e", "f"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_is_due_comes_after_revoke_and_grant(tmp_path: Path, dialect: str) -> None:
    """A client that says nothing in between hears what is committed after the grant, and nothing of before."""
    async with place(tmp_path) as here:
        claims: dict[str, Any] = {} if dialect == "b" else {"partitions": ["P1"]}
        writer = await Speaker.connected(here, dialect, "writer", **claims)
        reader = await Speaker.connected(here, dialect, "reader", **claims)
        assert await reader.sync("P1") == []
        resource = project("proj") if dialect == "b" else partition("P1")

        await tell(here, *revoked("reader", resource))
        assert await writer.submit("a", "P1") == "committed"
        await tell(here, *granted("reader", resource))
        assert await writer.submit("b", "P1") == "committed"

        assert await reader.heard(2) == ["forbidden", "b"]
        assert await reader.sync("P1") == ["a", "b"]


async def test_a_right_that_goes_while_pages_are_read_ends_them(tmp_path: Path) -> None:
    """In dialect B the rest of the cycle leaves the partition out; the cycle still comes to its end."""
    async with place(tmp_path) as here:
        writer = await Speaker.connected(here, "b", "writer")
        for number in range(6):
            assert await writer.submit(f"e{number}", f"P{number % 2}") == "committed"
        reader = await Speaker.connected(here, "b", "reader")
        seen: list[str] = []
        since, has_more = 0, True
        while has_more:
            asked = {"projectId": "proj", "sinceCommittedId": since, "limit": 2}
            page = (await reader.talker.ask(camel("sync", asked)))["payload"]
            seen += [event["id"] for event in page["events"]]
            since, has_more = page["nextSinceCommittedId"], page["hasMore"]
            if len(seen) == 2:
                await tell(here, *revoked("reader", partition("P1")))

        assert seen == ["e0", "e1", "e2", "e4"]


async def test_a_client_id_is_its_subjects_own(tmp_path: Path) -> None:
    """Two subjects with one client id do not end each other's connections; one subject's second one replaces the first."""
    async with place(tmp_path) as here:
        first = await Speaker.connected(here, "a", "phone", "ana", partitions=["P1"])
        second = await Speaker.connected(here, "a", "phone", "bob", partitions=["P1"])
        assert await first.talker.is_alive()
        assert await second.talker.is_alive()

        third = await Speaker.connected(here, "a", "phone", "ana", partitions=["P1"])

        assert await first.talker.client.ended() == 4001
        assert await second.talker.is_alive()
        assert await third.talker.is_alive()


@pytest.mark.parametrize("dialect", ["b", "c"])
async def test_an_answer_to_what_cannot_be_read_names_the_message(tmp_path: Path, dialect: str) -> None:
    """A wrong payload, an unknown type, a missing field of the envelope, a wrong version: each error has the msgId."""
    async with place(tmp_path) as here:
        speaker = await Speaker.connected(here, dialect, "L", partitions=["P1"])
        for bad in (
            camel("sync", {"sinceCommittedId": "x"}),
            camel("sync", []),
            camel("dance", {}),
            orjson.dumps({"type": "sync", "msgId": "m-7", "protocolVersion": "1.0"}),
            camel("sync", {}, type=5),
            camel("submit_events", {"events": 5}),
            camel("sync", {}, protocolVersion="9.0"),
        ):
            if speaker.talker.client.is_gone:
                speaker = await Speaker.connected(here, dialect, "L", partitions=["P1"])
            answer = await speaker.talker.ask(bad)
            assert (answer["type"], answer.get("msgId")) == ("error", "m-7"), bad
            if answer["payload"]["code"] in ("server_error", "protocolVersion_unsupported"):
                await speaker.talker.client.ended()


async def test_partitions_are_told_in_order(tmp_path: Path) -> None:
    """Dialect C: in the order in which they are compared, however they were given."""
    async with place(tmp_path) as here:
        reader = await Speaker.connected(here, "c", "R", partition_prefixes=["P"])
        writer = await Speaker.connected(here, "c", "W", partition_prefixes=["P"])
        await reader.sync("P3")
        given = writer.item("a", "P3") | {"partitions": ["P3", "P1", "P2"]}
        for _ in range(2):  # and once more: it is the same event
            answer = await writer.talker.ask(camel("submit_events", {"events": [given]}))
            assert answer["payload"]["results"][0]["status"] == "committed"

        (told,) = await reader.talker.hear()
        page = await writer.talker.ask(camel("sync", {"partitions": ["P1"], "sinceCommittedId": 0}))

        assert told["payload"]["partitions"] == ["P1", "P2", "P3"]
        assert page["payload"]["events"][0]["partitions"] == ["P1", "P2", "P3"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_key_given_twice_is_refused(tmp_path: Path, dialect: str) -> None:
    """The item is rejected, wherever in it the key is repeated and however it is written; nothing of it is stored."""
    async with place(tmp_path) as here:
        speaker = await Speaker.connected(here, dialect, "K", partitions=["P1"])
        whole = (message if dialect == "a" else camel)("submit_events", {"events": [speaker.item("twice", "P1")]})
        for again in (b'"of":1,"of":', b'"of":1,"\\u006ff":', b'"of":"\\u0022:","of" :'):
            answer = await speaker.talker.ask(whole.replace(b'"of":', again))
            (result,) = answer["payload"]["results"]
            assert (result["id"], result["status"], result["reason"]) == ("twice", "rejected", "validation_failed")
            assert "twice" in result["errors"][0]["message"]
        assert await speaker.sync("P1") == []
        assert await speaker.submit("twice", "P1") == "committed"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_key_given_twice_beside_the_event_is_refused_too(tmp_path: Path, dialect: str) -> None:
    """An item with two ids is rejected; with two lists of items nobody can say which is meant, and nothing is taken."""
    async with place(tmp_path) as here:
        speaker = await Speaker.connected(here, dialect, "K", partitions=["P1"])
        whole = (message if dialect == "a" else camel)("submit_events", {"events": [speaker.item("twice", "P1")]})
        two_ids = await speaker.talker.ask(whole.replace(b'"id":"twice"', b'"id":"once","id":"twice"'))
        two_lists = await speaker.talker.ask(whole.replace(b'"events":', b'"events":[],"events":'))
        assert here.node.log.position.seq == 0

    (result,) = two_ids["payload"]["results"]
    assert (result["id"], result["status"], result["reason"]) == ("twice", "rejected", "validation_failed")
    # Clients of the JavaScript dialects go on after a server_error only.
    assert two_lists["payload"]["code"] == ("bad_request" if dialect == "a" else "server_error")


async def test_a_key_given_twice_is_refused_over_http(tmp_path: Path) -> None:
    """One event, a list, lines and CloudEvents: refused by code, and nothing is stored."""
    async with place(tmp_path) as here:
        headers = here.node.headers("root", roles=["admin"])
        meta = b'{"meta":{"topic":"t","type":"A","space_id":"s"},"payload":{"n":1,"n":2}}'
        cloud = b'{"specversion":"1.0","id":"c","source":"/s","type":"A","data":{"n":1,"n":2}}'
        async with httpx.AsyncClient(base_url=here.node.url, headers=headers) as http:
            for body, kind in (
                (meta, "application/json"),
                (b"[" + meta + b"]", "application/json"),
                (meta + b"\n" + meta, "application/x-ndjson"),
                (cloud, "application/cloudevents+json"),
                (b"[" + cloud + b"]", "application/cloudevents-batch+json"),
            ):
                answer = await http.post("/v1/events?topic=t&space_id=s", content=body, headers={"content-type": kind})
                assert b"event.repeated_key" in answer.content, (kind, answer.content)
            twice = b'{"subject":"ana","action":"sync","resource":"partition:P1","resource":"partition:P2"}'
            answer = await http.post("/v1/access/grants", content=twice, headers={"content-type": "application/json"})
            assert answer.json()["code"] == "event.repeated_key"
        assert "t" not in here.node.log.topics()
        assert "access" not in here.node.log.topics()
