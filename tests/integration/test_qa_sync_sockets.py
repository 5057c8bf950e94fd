"""Bad input at /sync over real sockets: each answer is typed, nobody else notices, nothing is stored that should not be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec
import orjson
import pytest

from tests.integration.node_support import SECONDS_MAX, Client, connect, until, until_answered
from tidings.access.administration import SubjectRevoked, event_of
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.server.settings import NodeSettings
from tidings.sync.settings import SyncSettings
from tidings.testing.node import RunningNode, node_settings, running_node

CODES: Final = {
    *("auth_failed", "bad_request", "validation_failed", "forbidden", "rate_limited", "server_error"),
    *("protocol_version_unsupported", "profile_unsupported"),
}
COMPOSED: Final = "caf\u00e9"
DECOMPOSED: Final = unicodedata.normalize("NFD", COMPOSED)


def message(type: str, payload: Any, /, **envelope: Any) -> bytes:
    return orjson.dumps(
        {"type": type, "msg_id": "m", "timestamp": 0, "protocol_version": "1.0", "payload": payload} | envelope
    )


def item(id: str, *partitions: str, **more: Any) -> dict[str, Any]:
    event = {"type": "event", "payload": {"schema": "note", "data": {"of": id}}}
    return {"id": id, "partitions": list(partitions) or ["P1"], "event": event} | more


def settings(**sync: Any) -> NodeSettings:
    return msgspec.structs.replace(node_settings(), sync=SyncSettings(schemas={"*": {}}, **sync))


class Talker:
    """A client of dialect A that says what it likes."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._taken = 0

    def say(self, *messages: bytes) -> None:
        for each in messages:
            if not self.client.is_gone:
                self.client.say(each)

    async def hear(self, count: int = 1) -> list[dict[str, Any]]:
        """So many messages more, or those that came before the end."""
        await self.client.hear(self._taken + count)
        found = [orjson.loads(each) for each in self.client.heard[self._taken :]]
        self._taken = len(self.client.heard)
        return found

    async def ask(self, *asked: bytes) -> dict[str, Any]:
        self.say(*asked)
        (answer,) = await self.hear()
        assert isinstance(answer, dict)
        return answer

    async def is_alive(self) -> bool:
        return bool((await self.ask(message("heartbeat", {})))["type"] == "heartbeat_ack")

    async def submit(self, *items: dict[str, Any]) -> list[dict[str, Any]]:
        answer = await self.ask(message("submit_events", {"events": list(items)}))
        results: list[dict[str, Any]] = answer["payload"]["results"]
        return results

    async def sync(self, *partitions: str, since: int = 0) -> dict[str, Any]:
        names = {"partitions": list(partitions), "subscription_partitions": list(partitions)}
        answer = await self.ask(message("sync", names | {"since_committed_id": since}))
        payload: dict[str, Any] = answer["payload"]
        return payload


class Place:
    """A node, and who talks to it."""

    def __init__(self, node: RunningNode) -> None:
        self.node = node
        self._clients: list[Client] = []

    async def line(self) -> Talker:
        client = await connect(f"{self.node.ws_url}/sync")
        self._clients.append(client)
        return Talker(client)

    def connect_message(self, name: str, **claims: Any) -> bytes:
        token = self.node.token(f"user-of-{name}", client_id=name, **({"partition_prefixes": ["P"]} | claims))
        return message("connect", {"token": token, "client_id": name, "supported_profiles": ["canonical"]})

    async def talker(self, name: str, **claims: Any) -> Talker:
        talker = await self.line()
        answer = await talker.ask(self.connect_message(name, **claims))
        assert answer["type"] == "connected", answer
        return talker

    async def stored(self) -> list[str]:
        return [record.meta.event_id async for record in records(self.node.log, Query(topic="sync"))]

    async def leave(self) -> None:
        for client in self._clients:
            client.transport.disconnect(False)
        await until(lambda: all(client.is_gone for client in self._clients))


@contextlib.asynccontextmanager
async def place(workspace: Path, given: NodeSettings | None = None, **server: Any) -> AsyncIterator[Place]:
    async with asyncio.timeout(SECONDS_MAX * 3), running_node(workspace, given or settings(), **server) as node:
        here = Place(node)
        try:
            yield here
        finally:
            await here.leave()


def whole_messages(here: Place) -> dict[str, bytes]:
    names = {"partitions": ["P1"], "subscription_partitions": ["P1"], "since_committed_id": 0, "limit": 50}
    return {
        "connect": here.connect_message("C1"),
        "submit_events": message("submit_events", {"events": [item("a")]}),
        "sync": message("sync", names),
        "heartbeat": message("heartbeat", {}),
        "disconnect": message("disconnect", {"reason": "x"}),
    }


@pytest.mark.parametrize("type", ["connect", "submit_events", "sync", "heartbeat", "disconnect"])
async def test_a_message_that_is_cut_or_mistyped_is_answered_by_type(tmp_path: Path, type: str) -> None:
    """Each prefix, and each field with a value of each wrong type: one typed error each, and the line stays."""
    async with place(tmp_path, unauthenticated_messages_max=1_000, unauthenticated_bytes_max=1 << 20) as here:
        wrongs: list[Any] = [None, 1.5, {"a": []}, [[]], True]
        whole = whole_messages(here)[type]
        bad = [whole[:cut] for cut in range(1, len(whole), 7)]
        read = orjson.loads(whole)
        for name in ("type", "msg_id", "timestamp", "payload", "protocol_version"):
            bad += [orjson.dumps({key: value for key, value in read.items() if key != name})]
        for name in read["payload"]:
            if name not in ("reason", "supported_profiles"):
                bad += [message(type, read["payload"] | {name: wrong}) for wrong in wrongs]
        talker = await (here.line() if type == "connect" else here.talker("C1"))

        for each in bad:
            answer = await talker.ask(each)
            assert answer["type"] == "error", (each, answer)
            assert answer["payload"]["code"] == "bad_request"
        assert await talker.is_alive()
        assert await here.stored() == []


@pytest.mark.req("S30")
async def test_a_message_that_is_too_large_is_refused_and_a_huge_one_ends_the_line(tmp_path: Path) -> None:
    """Above the advertised size it is a bad request; above what the node reads at all the line is closed with 1009."""
    async with place(tmp_path, settings(message_bytes_max=4096), message_bytes_max=16384) as here:
        talker = await here.talker("C1")
        answer = await talker.ask(message("submit_events", {"events": [item("a", more="x" * 5000)]}))
        assert answer["payload"]["code"] == "bad_request"
        assert answer["payload"]["details"] == {"max_message_bytes": 4096}
        assert await talker.is_alive()

        talker.say(message("submit_events", {"events": [item("a", more="x" * 20_000)]}))
        assert await talker.client.ended() == 1009
        assert await here.stored() == []


async def test_messages_repeated_and_out_of_order_do_no_harm(tmp_path: Path) -> None:
    """Work before connect, connect twice, everything in one go, work after goodbye: one commit, each answer typed."""
    async with place(tmp_path) as here:
        whole = whole_messages(here)
        early = await here.line()
        for type in ("submit_events", "sync", "disconnect"):
            assert (await early.ask(whole[type]))["payload"]["code"] == "bad_request"
        assert await here.stored() == []

        early.say(*[whole["connect"]] * 3, *[whole["submit_events"]] * 3, *[whole["sync"]] * 3, whole["heartbeat"])
        answers = await early.hear(10)
        found = [(each["type"], each["payload"].get("code")) for each in answers]
        # Whatever came with the first connect was said before it was answered.
        assert ("connected", None) in found
        assert all(code in CODES for type, code in found if type == "error")
        assert len(await here.stored()) <= 1

        assert (await early.submit(item("a")))[0]["committed_id"] == (await early.submit(item("a")))[0]["committed_id"]
        early.say(whole["disconnect"], message("submit_events", {"events": [item("late")]}))
        assert await early.client.ended() == 1000
        assert await here.stored() == ["a"]


async def test_ten_thousand_partitions(tmp_path: Path) -> None:
    """An event that names them is rejected by itself, a sync is a bad request; neither takes the line down."""
    names = [f"P{number}" for number in range(10_000)]
    async with place(tmp_path) as here:
        talker = await here.talker("C1")
        rejected, committed = await talker.submit(item("many", *names), item("one"))
        assert (rejected["reason"], rejected["errors"][0]["field"]) == ("validation_failed", "partitions")
        assert committed["status"] == "committed"
        answer = await talker.ask(message("sync", {"partitions": names, "since_committed_id": 0}))
        assert answer["payload"]["code"] == "bad_request"
        subscribing = {"partitions": ["P1"], "subscription_partitions": names, "since_committed_id": 0}
        assert (await talker.ask(message("sync", subscribing)))["payload"]["code"] == "bad_request"
        assert (await talker.sync("P1"))["effective_subscriptions"] == ["P1"]
        assert await here.stored() == ["one"]


async def test_names_that_differ_in_unicode_form_only_are_one_name(tmp_path: Path) -> None:
    """Rights, storage, subscription and equality all see the composed form; a look-alike is another name and forbidden."""
    async with place(tmp_path) as here:
        writer = await here.talker("C1", partition_prefixes=[], partitions=[COMPOSED])
        reader = await here.talker("C2", partition_prefixes=[], partitions=[DECOMPOSED])
        assert (await reader.sync(DECOMPOSED))["effective_subscriptions"] == [COMPOSED]
        first, again = [await writer.submit(item("a", name)) for name in (DECOMPOSED, COMPOSED)]
        assert first == again
        (told,) = await reader.hear()
        assert (told["payload"]["id"], told["payload"]["partitions"]) == ("a", [COMPOSED])
        both = await writer.submit(item("b", COMPOSED, DECOMPOSED), item("c", "cafe"), item("d", "\uff43af\u00e9"))
        assert [each.get("reason") for each in both] == [None, "forbidden", "forbidden"]
        assert [each["payload"]["id"] for each in await reader.hear()] == ["b"]
        assert [each["partitions"] for each in (await reader.sync(COMPOSED))["events"]] == [[COMPOSED]] * 2


@pytest.mark.parametrize("claimed", [COMPOSED, DECOMPOSED], ids=["composed", "decomposed"])
async def test_a_client_is_itself_in_every_unicode_form(tmp_path: Path, claimed: str) -> None:
    """Token and message may spell one id in two ways; it is one client, with one connection, under one stored name."""
    async with place(tmp_path) as here:
        token = here.node.token("u", client_id=claimed, partitions=["P1"])
        lines: list[Talker] = []
        for spelled in (COMPOSED, DECOMPOSED):
            line = await here.line()
            connecting = {"token": token, "client_id": spelled, "supported_profiles": ["canonical"]}
            answer = await line.ask(message("connect", connecting))
            assert (answer["type"], answer["payload"].get("client_id")) == ("connected", spelled)
            for number, other in enumerate((COMPOSED, DECOMPOSED)):
                (result,) = await line.submit(item(f"{len(lines)}-{number}", client_id=other))
                assert result["status"] == "committed"
            lines.append(line)
        assert await lines[0].client.ended() == 4001
        assert {each["client_id"] for each in (await lines[1].sync("P1"))["events"]} == {COMPOSED}


async def test_nobody_speaks_for_another(tmp_path: Path) -> None:
    """Another's id in connect, in a message or on an item, another's token, a token of before: auth_failed and closed."""
    async with place(tmp_path) as here:
        victim = await here.talker("C1")
        token = here.node.token("user-of-C2", client_id="C2", partitions=["P1"])
        old = here.node.token("user-of-C1", client_id="C1", partitions=["P1"], lifetime_s=-3600)
        none = here.node.token("user-of-C1", partitions=["P1"])
        forged = token[:-6] + ("AAAAAA" if token[-6:] != "AAAAAA" else "BBBBBB")
        for given, name in ((token, "C1"), (old, "C1"), (none, "C1"), (forged, "C2"), ("", "C1"), ("a.b.c", "C1")):
            line = await here.line()
            answer = await line.ask(message("connect", {"token": given, "client_id": name}))
            assert answer["payload"]["code"] in ("auth_failed", "bad_request")
            if answer["payload"]["code"] == "auth_failed":
                assert await line.client.ended() == 1008
        for said in (
            message("submit_events", {"events": [item("x"), item("y", client_id="C1")]}),
            message("submit_events", {"events": [item("x")], "client_id": "C1"}),
            message("sync", {"partitions": ["P1"], "since_committed_id": 0, "client_id": "C1"}),
            message("heartbeat", {"client_id": "C1"}),
        ):
            intruder = await here.talker("C2")
            assert (await intruder.ask(said))["payload"]["code"] == "auth_failed"
            assert await intruder.client.ended() == 1008
        assert await here.stored() == []
        assert await victim.is_alive()


@pytest.mark.req("S24")
@pytest.mark.parametrize("since", [10, 2**53, 2**63 - 1, 2**63, 2**64, 10**40])
async def test_a_cursor_from_the_future_gets_the_true_maximum(tmp_path: Path, since: int) -> None:
    """However far ahead it is, also beyond what a machine's integers hold: an empty page, its end, and the last id."""
    async with place(tmp_path) as here:
        talker = await here.talker("C1")
        await talker.submit(item("a"), item("b"))
        asked = b'{"type":"sync","msg_id":"m","timestamp":0,"protocol_version":"1.0","payload":%b}'
        answer = await talker.ask(asked % (b'{"partitions":["P1"],"since_committed_id":%d}' % since))

        page = answer["payload"]
        assert (page["events"], page["has_more"]) == ([], False)
        assert (page["next_since_committed_id"], page["sync_to_committed_id"]) == (2, 2)


@pytest.mark.req("S33")
async def test_a_peer_that_never_reads_is_closed_and_the_others_are_not(tmp_path: Path) -> None:
    """Its socket fills, then the endpoint's bound; it is closed, and meanwhile each commit reaches who does read."""
    async with place(tmp_path, settings(write_buffer_bytes_max=65_536)) as here:
        writer, reader = await here.talker("W"), await here.talker("R")
        await reader.sync("P1")
        deaf = await here.talker("D")
        await deaf.sync("P1")
        deaf.client.transport.underlying_transport.pause_reading()
        for number in range(100):
            made = item(f"e{number}")
            made["event"]["payload"]["data"] = "x" * 200_000
            assert (await writer.submit(made))[0]["status"] == "committed"
            if b"tidings_sync_slow_closed_total 1.0" in await _metrics(here):
                break
        else:
            pytest.fail("it was never closed")
        count = number + 1
        assert [each["payload"]["id"] for each in await reader.hear(count)] == [f"e{n}" for n in range(count)]
        assert await writer.is_alive()


async def _is_in_progress(here: Place, count: int) -> bool:
    return b"tidings_http_requests_in_progress %d.0" % count in await _metrics(here)


async def _metrics(here: Place) -> bytes:
    async with httpx.AsyncClient(base_url=here.node.url) as http:
        return (await http.get("/metrics")).content


@pytest.mark.heavy
async def test_a_thousand_connections_and_one_more(tmp_path: Path) -> None:
    """All of them are served; the next is refused with 503 before it costs anything; when one leaves there is room."""
    async with place(
        tmp_path, connections_max=1_000, connections_per_address_max=1_000, unauthenticated_per_address_max=1_000
    ) as here:
        url = f"{here.node.ws_url}/sync"
        talkers: list[Talker] = []
        for start in range(0, 1_000, 100):
            opened = await asyncio.gather(*(here.line() for _ in range(100)))
            for number, talker in enumerate(opened, start):
                talker.say(here.connect_message(f"C{number}"))
            assert all([(await talker.hear())[0]["type"] == "connected" for talker in opened])
            talkers += opened
        with pytest.raises(Exception, match="503"):
            await connect(url)
        assert await talkers[0].is_alive()
        assert b'tidings_connections_refused_total{code="node.too_many_connections"} 1.0' in await _metrics(here)
        talkers[5].client.transport.disconnect(False)
        await until(lambda: len(here.node.connections) == 999)
        await here.talker("C5")


@pytest.mark.req("S33")
async def test_ten_thousand_batches_at_once_are_refused_not_stored_up(tmp_path: Path) -> None:
    """What is under way is bounded; the rest is rate_limited by type; what was committed is committed once; others are served."""
    async with place(tmp_path) as here:
        flooder, other = await here.talker("F"), await here.talker("O")
        sent = 10_000
        for start in range(0, sent, 500):
            flooder.say(*(message("submit_events", {"events": [item(f"e{n}")]}) for n in range(start, start + 500)))
            await asyncio.sleep(0)
        assert await other.is_alive()
        answers = await flooder.hear(sent)

        kinds = {each["payload"].get("code", each["type"]) for each in answers}
        committed = [
            result["id"] for each in answers if "results" in each["payload"] for result in each["payload"]["results"]
        ]
        assert len(answers) == sent
        assert kinds == {"rate_limited", "submit_events_result"}
        assert sorted(committed) == sorted(await here.stored())
        assert await flooder.is_alive()


async def test_a_token_that_expires_ends_the_line_with_its_own_code(tmp_path: Path) -> None:
    """auth_failed and 4003 while the connection is silent; what it had submitted stays, and a fresh token goes on."""
    base = settings(sweep_interval_ms=50)
    tokens = msgspec.structs.replace(base.access.tokens, leeway_s=0)
    given = msgspec.structs.replace(base, access=msgspec.structs.replace(base.access, tokens=tokens))
    async with place(tmp_path, given) as here:
        talker = await here.talker("C1", lifetime_s=2)
        await talker.submit(item("a"))
        (told,) = await talker.hear()
        assert told["payload"]["code"] == "auth_failed"
        assert await talker.client.ended() == 4003
        again = await here.talker("C1")
        assert [each["id"] for each in (await again.sync("P1"))["events"]] == ["a"]


async def test_a_revoked_subject_is_sent_away_from_every_endpoint_with_one_commit(tmp_path: Path) -> None:
    """The line at /sync ends, a long poll shows nothing, and each further request is refused: from that seq on."""
    async with place(tmp_path) as here:
        node = here.node
        talker, writer = await here.talker("C1", topics=["demo"]), await here.talker("C2")
        await talker.sync("P1")
        headers = node.headers("user-of-C1", topics=["demo"])
        async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=20) as http:
            polling = asyncio.create_task(http.get("/v1/events?topic=demo&wait=10"))
            await until_answered(lambda: _is_in_progress(here, 2), True)  # the poll, and the one who asks
            revocation = event_of(SubjectRevoked(subject="user-of-C1"), actor="test")
            await node.log.append(revocation)
            await writer.submit(item("after"))
            async with httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"])) as root:
                meta = {"topic": "demo", "type": "NOTED", "space_id": "home"}
                assert (await root.post("/v1/events", json={"meta": meta, "payload": {}})).status_code == 201
            polled = await polling
            assert (polled.status_code, polled.json()["code"]) == (401, "access.token_revoked")
            assert (await http.get("/v1/events")).status_code == 401
        (told,) = await talker.hear()
        assert told["payload"]["code"] == "auth_failed"
        assert await talker.client.ended() == 1008
        answer = await (await here.line()).ask(here.connect_message("C1"))
        assert answer["payload"]["code"] == "auth_failed"


async def test_without_claims_nothing_is_given(tmp_path: Path) -> None:
    """A token that is believed and gives nothing connects, and may neither sync, nor subscribe, nor submit."""
    async with place(tmp_path) as here:
        talker = await here.talker("C1", partition_prefixes=[])
        writer, name = await here.talker("C2"), "P1"
        answer = await talker.ask(message("sync", {"partitions": [name], "since_committed_id": 0}))
        assert answer["payload"]["code"] == "forbidden"
        assert (await talker.submit(item("a")))[0]["reason"] == "forbidden"
        await writer.submit(item("b"))
        assert await talker.is_alive()  # and nothing else was heard
        line = await here.line()
        token = here.node.token("user-of-C3", client_id="C3")
        connecting = {"token": token, "clientId": "C3", "projectId": "proj"}
        line.say(orjson.dumps({"type": "connect", "protocolVersion": "1.0", "payload": connecting}))
        assert (await line.hear())[0]["payload"]["code"] == "forbidden"
        assert await line.client.ended() == 1008


async def test_what_is_no_websocket_leaves_the_node_alone(tmp_path: Path) -> None:
    """Garbage after the upgrade, unmasked frames, a socket that is shut in the midst of a frame: the others are served."""
    async with place(tmp_path) as here:
        talker = await here.talker("C1")
        port = urlsplit(here.node.url).port
        head = (
            b"GET /sync HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        for rest in (
            b"\x00" * 100,
            b"\xff" * 4096,
            b"\x81\x05hello",
            b"\x81\xfe\x0f",
            b"\x8b\x80\x00\x00\x00\x00",
            b"",
        ):
            raw = socket.create_connection(("127.0.0.1", port or 0))
            try:
                await asyncio.to_thread(raw.sendall, head + rest)
                assert (await asyncio.to_thread(raw.recv, 12)).startswith(b"HTTP/1.1 101")
            finally:
                raw.close()
            assert await talker.is_alive()
        await until(lambda: len(here.node.connections) == 1)


def camel(type: str, payload: Any, /, **envelope: Any) -> bytes:
    return orjson.dumps(
        {"type": type, "msgId": "m", "timestamp": 0, "protocolVersion": "1.0", "payload": payload} | envelope
    )


@pytest.mark.parametrize("dialect", ["b", "c"])
async def test_the_javascript_dialects_are_answered_by_type_too(tmp_path: Path, dialect: str) -> None:
    """Each message cut or with a field of a wrong type: an item's own rejection, a typed error, or server_error and the end."""
    async with place(tmp_path) as here:
        token = here.node.token("u", client_id="J", partition_prefixes=["P"], projects=["proj"])
        scope: dict[str, Any] = {"projectId": "proj"} if dialect == "b" else {}
        connecting = camel("connect", {"token": token, "clientId": "J"} | scope)
        content = {"type": "t", "payload": {"n": 1}, "meta": {"clientTs": 1}}
        own = {"partition": "main", "schemaVersion": 1} | scope if dialect == "b" else {"partitions": ["P1"]}
        made = {"id": "a"} | own | content
        syncing = ({"projectId": "proj"} if dialect == "b" else {"partitions": ["P1"]}) | {"sinceCommittedId": 0}
        whole = [camel("submit_events", {"events": [made]}), camel("sync", syncing | {"limit": 500})]
        bad = [each[:cut] for each in whole for cut in range(1, len(each), 11)]
        wrongs: list[Any] = [None, 1.5, [[]], {"a": []}]
        bad += [camel("submit_events", {"events": [made | {name: wrong}]}) for name in made for wrong in wrongs]
        bad += [camel("sync", syncing | {name: wrong}) for name in syncing for wrong in wrongs]
        bad += [
            camel("dance", {}),
            camel("connect", {}),
            camel("submit_events", {"events": 1}),
            camel("submit_events", []),
        ]
        talker = await here.line()
        assert (await talker.ask(connecting))["type"] == "connected"
        ends = 0

        for each in bad:
            answer = await talker.ask(each)
            kind, payload = answer["type"], answer["payload"]
            assert kind in ("error", "submit_events_result", "sync_response"), (each, answer)
            if kind == "error":
                assert payload["code"] in CODES
            elif kind == "submit_events_result":
                # `payload: {...}` of any shape is an event of its own; everything else that is wrong is the item's.
                assert payload["results"][0]["status"] in ("rejected", "committed")
            if kind == "error" and payload["code"] == "server_error":
                await talker.client.ended()
                ends += 1
                talker = await here.line()
                assert (await talker.ask(connecting))["type"] == "connected"
        assert (await talker.ask(whole[1]))["type"] == "sync_response"
        assert ends == 2  # the two batches that could not be answered item by item
        topic = "sync.projects" if dialect == "b" else "sync.legacy"
        found = [record async for record in records(here.node.log, Query(topic=topic))]
        assert len(found) <= 1
