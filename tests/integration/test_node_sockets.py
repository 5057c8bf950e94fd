"""Sockets of a node, over real loopback connections: messages pass whole, limits hold, goodbyes carry codes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest
from picows import WSInvalidStatusError, WSMsgType, ws_connect

from tests.integration.node_support import (
    Client,
    ListeningEndpoint,
    Talk,
    TalkEndpoint,
    connect,
    connected,
    on_both_loops,
    until,
)
from tidings.access.endpoint import Peer
from tidings.core.events import Event, EventMeta
from tidings.server.errors import NodeError
from tidings.sync.settings import SyncSettings
from tidings.testing.node import RunningNode, node_settings, running_node


@on_both_loops
async def test_http_and_sockets_share_a_port(tmp_path: Path) -> None:
    """The same port answers a request and carries a conversation, messages of every size whole and in order."""
    endpoint = TalkEndpoint()
    sizes = [0, 1, 125, 126, 65_535, 65_536, 200_000]
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
        httpx.AsyncClient(base_url=node.url) as http,
    ):
        for size in sizes:
            client.say(b"x" * size)
        heard = await client.hear(len(sizes))
        alive = await http.get("/healthz")

    assert [len(each) for each in heard] == sizes
    assert alive.status_code == 200


@on_both_loops
async def test_the_endpoint_sees_the_request(tmp_path: Path) -> None:
    """Path, query, headers and peer of the request reach the endpoint."""
    endpoint = TalkEndpoint()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}) as node:
        async with connected(f"{node.ws_url}/echo?token=t", extra_headers={"X-Thing": "one"}):
            await until(lambda: endpoint.talks)

        peer = endpoint.talks[0].peer
        assert (peer.path, peer.query, peer.headers["x-thing"]) == ("/echo", "token=t", "one")
        assert peer.address.startswith("127.0.0.1:")


@on_both_loops
async def test_fragments_make_one_message(tmp_path: Path) -> None:
    """A message that comes in parts, with a ping between them, is delivered once and whole."""
    endpoint = TalkEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        client.say(b"one ", fin=False)
        client.transport.send_ping(b"there?")
        client.say(b"two ", WSMsgType.CONTINUATION, fin=False)
        client.say(b"three", WSMsgType.CONTINUATION)

        assert await client.hear(1) == [b"one two three"]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        pytest.param([(b"x" * 5000, WSMsgType.TEXT, {})], 1009, id="too long"),
        pytest.param(
            [(b"x" * 1000, WSMsgType.TEXT, {"fin": False})]
            + [(b"x" * 1000, WSMsgType.CONTINUATION, {"fin": False})] * 4,
            1009,
            id="too long in parts",
        ),
        pytest.param(
            [(b"", WSMsgType.TEXT, {"fin": False})] + [(b"", WSMsgType.CONTINUATION, {"fin": False})] * 100,
            1009,
            id="parts without end",
        ),
        pytest.param([(b"x", WSMsgType.CONTINUATION, {})], 1002, id="a part of nothing"),
        pytest.param(
            [(b"x", WSMsgType.TEXT, {"fin": False}), (b"x", WSMsgType.TEXT, {})], 1002, id="a message in another"
        ),
        pytest.param([(b"x", WSMsgType.TEXT, {"rsv1": True})], 1002, id="reserved bits"),
        pytest.param([(b"\xff\xfe", WSMsgType.TEXT, {})], 1007, id="text that is not UTF-8"),
    ],
)
@on_both_loops
async def test_a_breach_closes_with_its_code(
    tmp_path: Path, frames: list[tuple[bytes, WSMsgType, dict[str, bool]]], code: int
) -> None:
    """A peer that breaks the protocol or a limit is told with the right code, and the endpoint hears nothing of it."""
    endpoint = TalkEndpoint()
    small = msgspec.structs.replace(node_settings(), sync=SyncSettings(message_bytes_max=4096))
    async with (
        running_node(tmp_path, small, endpoints={"/echo": endpoint}, message_bytes_max=4096) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        for payload, kind, flags in frames:
            client.say(payload, kind, **flags)

        assert await client.ended() == code
        await until(lambda: endpoint.talks[0].closed_with is not None)
        assert (endpoint.talks[0].closed_with, endpoint.talks[0].heard) == (code, [])


@on_both_loops
async def test_binary_messages_pass(tmp_path: Path) -> None:
    """A binary message reaches the endpoint as it is, UTF-8 or not."""
    endpoint = TalkEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        client.say(b"\xff\x00", WSMsgType.BINARY)
        await until(lambda: endpoint.talks and endpoint.talks[0].heard)

        assert endpoint.talks[0].heard == [b"\xff\x00"]


@on_both_loops
async def test_what_was_sent_arrives_before_the_goodbye(tmp_path: Path) -> None:
    """An endpoint that sends and closes in one breath is heard to the end, and its code arrives."""

    def answer(talk: Talk, message: bytes) -> None:
        talk.transport.send([b"%d" % number for number in range(1000)])
        talk.transport.close(4001, "enough")
        talk.transport.close(4002, "twice is fine")
        talk.transport.send([b"too late"])

    endpoint = TalkEndpoint(answer)
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        client.say(b"go")

        assert await client.ended() == 4001
        assert client.close_reason == "enough"
        assert client.heard == [b"%d" % number for number in range(1000)]
        await until(lambda: endpoint.talks[0].closed_with is not None)
        assert endpoint.talks[0].closed_with == 4001


@on_both_loops
async def test_a_peer_that_says_goodbye_is_answered(tmp_path: Path) -> None:
    """The endpoint learns the peer's code; a peer that just vanishes gives 1006."""
    endpoint = TalkEndpoint()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}) as node:
        polite, rude = await connect(f"{node.ws_url}/echo"), await connect(f"{node.ws_url}/echo")
        await until(lambda: len(endpoint.talks) == 2)
        polite.transport.send_close(4321, b"bye")  # type: ignore[arg-type]
        rude.transport.disconnect(False)
        await until(lambda: all(talk.closed_with is not None for talk in endpoint.talks))

        assert sorted(talk.closed_with or 0 for talk in endpoint.talks) == [1006, 4321]
        assert await polite.ended() == 4321


@on_both_loops
async def test_an_endpoint_that_fails_ends_one_conversation_only(tmp_path: Path) -> None:
    """An error in a conversation closes it with 1011; the node and others go on."""

    def answer(talk: Talk, message: bytes) -> None:
        if message == b"fail":
            raise RuntimeError("as the test wanted")
        talk.transport.send([message])

    endpoint = TalkEndpoint(answer)
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as bad,
        connected(f"{node.ws_url}/echo") as good,
    ):
        bad.say(b"fail")
        assert await bad.ended() == 1011
        good.say(b"still there")
        assert await good.hear(1) == [b"still there"]


@on_both_loops
async def test_a_paused_endpoint_gets_nothing_until_it_resumes(tmp_path: Path) -> None:
    """Messages that came with the same read as the one that made the endpoint pause wait, in order."""

    def answer(talk: Talk, message: bytes) -> None:
        if message == b"0":
            talk.is_busy = True

    endpoint = TalkEndpoint(answer)
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        for number in range(100):
            client.say(b"%d" % number)
        await until(lambda: endpoint.talks and endpoint.talks[0].heard)
        for _ in range(20):
            await asyncio.sleep(0)
        assert endpoint.talks[0].heard == [b"0"]

        endpoint.talks[0].is_busy = False
        endpoint.talks[0].throttle()
        await until(lambda: len(endpoint.talks[0].heard) == 100)
        assert endpoint.talks[0].heard == [b"%d" % number for number in range(100)]


@on_both_loops
async def test_a_slow_reader_is_seen_and_told_when_it_caught_up(tmp_path: Path) -> None:
    """What a peer does not take is counted as buffered; when it has taken it, the endpoint is told once."""
    endpoint = TalkEndpoint()
    endpoint.unsent_bytes_max = 1
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        await until(lambda: endpoint.talks)
        talk = endpoint.talks[0]
        client.transport.underlying_transport.pause_reading()
        block = b"x" * 100_000
        talk.transport.send([block] * 100)
        assert talk.transport.buffered_bytes > 9_000_000
        await asyncio.sleep(0.05)
        assert talk.transport.buffered_bytes > 100_000
        assert talk.drained_count == 0

        client.transport.underlying_transport.resume_reading()
        await client.hear(100)
        await until(lambda: talk.drained_count)
        assert (talk.drained_count, talk.transport.buffered_bytes) == (1, 0)


@on_both_loops
async def test_small_sends_are_drained_too(tmp_path: Path) -> None:
    """An endpoint that held back because of a few pending bytes is told when they have left; one that did not is not."""
    endpoint = TalkEndpoint()
    endpoint.unsent_bytes_max = 1
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        await until(lambda: endpoint.talks)
        talk = endpoint.talks[0]
        talk.transport.send([b"one"])
        assert talk.transport.buffered_bytes > 0
        await until(lambda: talk.drained_count)
        endpoint.unsent_bytes_max = 1_000
        talk.transport.send([b"two"])
        assert talk.transport.buffered_bytes > 0

        assert await client.hear(2) == [b"one", b"two"]
        assert talk.drained_count == 1


@on_both_loops
async def test_a_peer_that_never_reads_is_cut(tmp_path: Path) -> None:
    """Over the node's own bound on what waits for one peer, its connection ends and the memory is free."""
    endpoint = TalkEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}, write_buffer_bytes_max=1 << 20) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        await until(lambda: endpoint.talks)
        client.transport.underlying_transport.pause_reading()
        talk = endpoint.talks[0]
        for _ in range(200):
            talk.transport.send([b"x" * 100_000])
            await asyncio.sleep(0)
        await until(lambda: talk.closed_with is not None)

        assert talk.closed_with == 1013
        assert talk.transport.buffered_bytes == 0
        client.transport.underlying_transport.resume_reading()


@on_both_loops
async def test_a_silent_peer_is_pinged_and_then_cut(tmp_path: Path) -> None:
    """A peer that answers pings stays; one that does not is cut at the sweep after."""
    endpoint = TalkEndpoint()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}) as node, connected(f"{node.ws_url}/echo"):
        dead = await connect(f"{node.ws_url}/echo", enable_auto_pong=False)
        await until(lambda: len(endpoint.talks) == 2)
        for _ in range(3):
            await node.connections.sweep()
            await asyncio.sleep(0.05)

        assert [talk.closed_with for talk in endpoint.talks] == [None, 1006]
        await dead.ended()


@on_both_loops
async def test_limits_refuse_with_503(tmp_path: Path) -> None:
    """A connection over the limit is refused before the endpoint hears of it; when one leaves, there is room."""
    endpoint = TalkEndpoint()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}, connections_max=2) as node:
        first, second = await connect(f"{node.ws_url}/echo"), await connect(f"{node.ws_url}/echo")
        with pytest.raises(WSInvalidStatusError) as refused:
            await connect(f"{node.ws_url}/echo")
        assert refused.value.response is not None
        assert refused.value.response.status == 503
        assert b"node.too_many_connections" in (refused.value.raw_body or b"")
        assert len(endpoint.talks) == 2

        first.transport.disconnect(False)
        await until(lambda: len(node.connections) == 1)
        async with connected(f"{node.ws_url}/echo"):
            pass
        second.transport.disconnect(False)
        await until(lambda: second.is_gone)


@on_both_loops
async def test_the_limit_per_address(tmp_path: Path) -> None:
    """One address cannot take all connections; another still gets in."""
    endpoint = TalkEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}, connections_per_address_max=1) as node,
        connected(f"{node.ws_url}/echo"),
    ):
        with pytest.raises(WSInvalidStatusError) as refused:
            await connect(f"{node.ws_url}/echo")
        assert b"from this address" in (refused.value.raw_body or b"")
        async with connected(f"{node.ws_url}/echo", local_addr=("127.0.0.2", 0)):
            pass


@pytest.mark.parametrize(
    ("origin", "status"), [("https://app.example", None), ("https://evil.example", 403), (None, None)]
)
@on_both_loops
async def test_origins(tmp_path: Path, origin: str | None, status: int | None) -> None:
    """A web page of an origin that is not allowed gets no connection; a client that is no web page does."""
    headers = {} if origin is None else {"Origin": origin}
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}, origins=("https://app.example",)) as node:
        if status is None:
            async with connected(f"{node.ws_url}/echo", extra_headers=headers):
                pass
        else:
            with pytest.raises(WSInvalidStatusError) as refused:
                await connect(f"{node.ws_url}/echo", extra_headers=headers)
            assert refused.value.response is not None
            assert refused.value.response.status == status


@on_both_loops
async def test_an_unknown_path_is_refused(tmp_path: Path) -> None:
    """No endpoint, no upgrade: 404."""
    async with running_node(tmp_path) as node:
        with pytest.raises(WSInvalidStatusError) as refused:
            await ws_connect(Client, f"{node.ws_url}/nowhere")
        assert refused.value.response is not None
        assert refused.value.response.status == 404


@on_both_loops
async def test_a_broken_handshake_is_answered(tmp_path: Path) -> None:
    """An upgrade without a key gets 400, and counts as no connection."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        host, port = "127.0.0.1", int(node.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /echo HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()

        assert b" 400 " in answer
        assert len(node.connections) == 0


@pytest.mark.slow
@on_both_loops
async def test_a_thousand_connections(tmp_path: Path) -> None:
    """A thousand sockets at once talk and leave, and nothing of them stays counted."""
    endpoint = TalkEndpoint()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}, connections_per_address_max=1_000) as node:
        clients: list[Client] = []
        for _ in range(20):
            clients += await asyncio.gather(*(connect(f"{node.ws_url}/echo") for _ in range(50)))
        for client in clients:
            client.say(b"here")
        await until(lambda: all(client.heard == [b"here"] for client in clients))
        assert len(node.connections) == 1000
        for client in clients:
            client.transport.disconnect(False)
        await until(lambda: not len(node.connections) and all(client.is_gone for client in clients))

        assert node.connections.counts()["/echo"] == 0
        assert all(talk.closed_with is not None for talk in endpoint.talks)


class Doorkeeper(TalkEndpoint):
    """An endpoint that lets in who has the word."""

    def __init__(self) -> None:
        super().__init__()
        self.places = self.admitted = 0

    def admit(self, peer: Peer) -> Peer:
        if peer.query != "word=friend":
            raise NoPlace("for strangers")
        self.places += 1
        self.admitted += 1
        return msgspec.structs.replace(peer, address="a friend")

    def abandon(self, peer: Peer) -> None:
        self.places -= 1


class NoPlace(NodeError):
    """There is none."""

    code = "test.no_place"
    status = 403
    text = "there is no place {why}"
    why: str


async def test_an_endpoint_refuses_before_the_upgrade(tmp_path: Path) -> None:
    """Who is not admitted gets a problem document with the error's own status and code, and no connection; who is, connects as admitted."""
    endpoint = Doorkeeper()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}) as node:
        with pytest.raises(WSInvalidStatusError) as refused:
            await connect(f"{node.ws_url}/echo")
        async with connected(f"{node.ws_url}/echo?word=friend"):
            await until(lambda: endpoint.talks)

        assert refused.value.raw_body is not None
        assert refused.value.response is not None
        problem = msgspec.json.decode(refused.value.raw_body)
        assert (int(refused.value.response.status), problem["code"]) == (403, "test.no_place")
        assert node.connections.refused["test.no_place"] == 1
        assert [talk.peer.address for talk in endpoint.talks] == ["a friend"]


async def upgraded(node: RunningNode, path: str, connection: str = "Upgrade", more: str = "") -> bytes:
    """The first line of the answer to a handshake, written by hand."""
    host, _, port = node.url.rpartition("/")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: {connection}\r\n{more}Upgrade: websocket\r\n{key}\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(10):
        line = await reader.readline()
    writer.close()
    return line


async def test_a_browser_may_ask_to_keep_alive_and_upgrade(tmp_path: Path) -> None:
    """A handshake whose ``Connection`` names more than the upgrade, as Firefox's does, is taken."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        lines = [await upgraded(node, "/echo", each) for each in ("Upgrade", "keep-alive, Upgrade", "upgrade")]

    assert {line.split()[1] for line in lines} == {b"101"}


async def test_a_handshake_that_will_fail_takes_no_place(tmp_path: Path) -> None:
    """A handshake is checked as a whole before its endpoint admits the peer."""
    endpoint = Doorkeeper()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}) as node:
        line = await upgraded(node, "/echo?word=friend", more="Upgrade: something\r\n")

    assert (line.split()[1], endpoint.admitted, endpoint.places, endpoint.talks) == (b"400", 0, 0, [])


@on_both_loops
async def test_a_ping_of_an_endpoint_is_answered_to_it(tmp_path: Path) -> None:
    """What an endpoint pings with comes back to the same connection, and binary messages can be told from text."""
    endpoint = TalkEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        await until(lambda: endpoint.talks)
        endpoint.talks[0].transport.ping(b"12345678")
        endpoint.talks[0].transport.send_shared((b"a", b"b"), b"!")

        assert await client.hear(2) == [b"a!", b"b!"]
        await until(lambda: endpoint.talks[0].ponged_with)
        assert endpoint.talks[0].ponged_with == [b"12345678"]


@on_both_loops
async def test_what_is_committed_closely_together_is_told_together(tmp_path: Path) -> None:
    """The first commit after a silence is told at once, what follows within the interval together; a request that must see it does not wait."""
    endpoint = ListeningEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}, dispatch_interval_s=1.0) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        await until(lambda: endpoint.talks)
        first, *others = [Event(EventMeta("demo", "NOTED", "shared:home"), {}) for _ in range(4)]
        told = [await node.bus.publish(first)]
        at_once = list(await client.hear(1))
        told += [await node.bus.publish(each) for each in others]
        waiting = node.services.dispatcher.lag
        await node.services.dispatcher.reached(told[-1].seq)

        assert at_once == [b"%d" % told[0].seq]
        assert waiting == 3
        assert await client.hear(4) == [b"%d" % each.seq for each in told]
