"""Durable groups shared by processes through a node: who gets what, and what a lost member leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.access_events import revoke_event
from tidings.access.administration import SubjectRevoked, event_of
from tidings.access.context import TokenClaims
from tidings.access.resources import Action, topic
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.client.errors import LinkClosed, RemoteClosed, RemoteRefused, RemoteStopped, RemoteUnavailable
from tidings.client.groups import RemoteBus
from tidings.client.websocket import WebSocketConnector
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded import open_log
from tidings.log.errors import WorkspaceBusy
from tidings.log.interface import Appended, Duplicate
from tidings.server.groups_endpoint import GroupsEndpoint
from tidings.testing.node import TEST_SECRET, RunningNode, node_settings, running_node
from tidings.types import Ack, Event, EventMeta, ReceivedEvent
from tidings.wire import groups as wire
from tidings.wire.events import event_to_wire

from .api_support import until

CHILD = Path(__file__).with_name("remote_group_child.py")


def event(number: int, *, name: str = "demo", **meta: Any) -> Event:
    return Event(EventMeta(topic=name, type="NOTED", space_id="home", **meta), {"n": number})


def remote(node: RunningNode, subject: str = "worker", **claims: Any) -> RemoteBus:
    return RemoteBus(node.url, node.token(subject, **(claims or {"topics": ["demo"], "group_prefixes": ["demo/"]})))


def endpoint_of(node: RunningNode) -> GroupsEndpoint:
    endpoint = node.connections.endpoints["/groups"]
    assert isinstance(endpoint, GroupsEndpoint)
    return endpoint


class Handler:
    """Notes what it gets; holds each event until it is let go, if told to."""

    def __init__(self, answer: object = None, *, is_holding: bool = False) -> None:
        self.seen: list[int] = []
        self.attempts: list[int] = []
        self.gate = asyncio.Event()
        self.answer = Ack() if answer is None else answer
        if not is_holding:
            self.gate.set()

    async def __call__(self, received: ReceivedEvent) -> object:
        self.seen.append(received.payload["n"])
        self.attempts.append(received.attempt)
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_publishing_through_the_node(tmp_path: Path) -> None:
    """An event published remotely is durable at the node; the same one again is a duplicate; a bad one is refused."""
    async with running_node(tmp_path) as node, remote(node) as bus:
        sent = event(1, event_id="e-1")
        first = await bus.publish(sent)
        again = await bus.publish(sent)
        with pytest.raises(RemoteRefused) as refused:
            await bus.publish(event(2, event_id="e-1"))
        with pytest.raises(RemoteRefused) as forbidden:
            await bus.publish(event(3, name="secret"))
        with pytest.raises(RemoteRefused) as reserved:
            await bus.publish(event(3, name="access"))
        with pytest.raises(RemoteRefused, match="the node takes at most"):
            await bus.publish(Event(EventMeta("demo", "NOTED", "home"), {"text": "x" * (3 << 20)}))

        assert isinstance(first, Appended)
        assert isinstance(again, Duplicate)
        assert first.seq == again.seq == node.log.position.seq == 1
    assert refused.value.error_code == "log.id_conflict"
    assert forbidden.value.error_code == "access.forbidden"
    assert reserved.value.error_code == "api.reserved_topic"


async def test_members_share_a_group(tmp_path: Path) -> None:
    """Each event of a group goes to one of its members, remote or local, and every group sees every event."""
    async with running_node(tmp_path) as node, remote(node) as one, remote(node) as two:
        handlers = [Handler() for _ in range(4)]
        await one.subscribe("demo", "shared", handlers[0], workers=2)
        await two.subscribe("demo", "shared", handlers[1], workers=2)
        local = await node.bus.join("demo", "shared", handlers[2], workers=2)
        await two.subscribe("demo", "other", handlers[3], workers=2)
        await asyncio.gather(*(one.publish(event(n)) for n in range(60)))
        await until(lambda: sum(len(each.seen) for each in handlers) == 120)
        await until(lambda: node.bus.lag("demo", "shared") == node.bus.lag("demo", "other") == 0)
        metrics = {name: value for name, _, value in endpoint_of(node).metrics()}
        await node.bus.leave(local)

    assert Counter(handlers[0].seen + handlers[1].seen + handlers[2].seen) == Counter(range(60))
    assert min(len(each.seen) for each in handlers[:3]) > 0
    assert sorted(handlers[3].seen) == list(range(60))
    assert metrics["tidings_groups_connections"] == 2
    assert (metrics["tidings_groups_shared"], metrics["tidings_groups_members"]) == (2, 4)


async def test_a_member_never_has_more_than_it_asked_for(tmp_path: Path) -> None:
    """With two places and no answer, two events are sent; each answer makes room for one more."""
    async with running_node(tmp_path) as node, remote(node) as publisher:
        link = await WebSocketConnector().connect(f"{node.ws_url}/groups")
        delivered: list[wire.Deliver] = []
        heard: list[wire.NodeFrame] = []

        async def hear(count: int) -> None:
            while len(heard) < count:
                heard.extend(wire.decode_from_node(message) for message in await link.receive())
            delivered[:] = [frame for frame in heard if isinstance(frame, wire.Deliver)]

        link.send(wire.encode(wire.Hello(token=node.token("worker", topics=["demo"], group_prefixes=["demo/"]))))
        link.send(wire.encode(wire.Subscribe(id=7, topic="demo", group="slow", max_inflight=2)))
        for n in range(10):
            await publisher.publish(event(n))
        await hear(4)  # welcome, subscribed, two events
        link.send(wire.encode(wire.Publish(ref=1, event=msgspec.Raw(event_to_wire(event(10))))))
        await hear(5)

        assert [type(frame).__name__ for frame in heard] == ["Welcome", "Subscribed", "Deliver", "Deliver", "Published"]
        link.send(wire.encode(wire.AckFrame(tags=[delivered[0].tag])))
        await hear(6)
        link.send(wire.encode(wire.Credit(id=7, max_inflight=4)))
        await hear(8)
        assert len(delivered) == 5
        assert len({frame.tag for frame in delivered}) == 5
        await link.close()


async def test_a_nack_brings_the_event_again(tmp_path: Path) -> None:
    """A remote handler's Nack or error is a failed attempt; after the last one the event is a dead letter with the reason."""
    async with running_node(tmp_path) as node, remote(node) as bus:
        handler = Handler(ValueError("no good"))
        await bus.subscribe("demo", "failing", handler, max_retries=2, backoff_base=0.0)
        await bus.publish(event(5))
        await until(lambda: node.bus.lag("demo", "failing") == 0)
        (letter,) = await node.bus.dead_letters("demo")

    assert handler.attempts == [1, 2, 3]
    assert (letter.error_type, letter.error) == ("builtins.ValueError", "no good")
    assert len(letter.attempts) == 3


async def test_a_remote_handler_whose_own_work_is_cancelled_has_failed(tmp_path: Path) -> None:
    """It is answered like any other failure, in a member elsewhere and in one of the node's own process."""

    async def cancelled(_: ReceivedEvent) -> Ack:
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited
        return Ack()

    async with running_node(tmp_path) as node, remote(node) as bus:
        await bus.subscribe("demo", "failing", cancelled, max_retries=1, backoff_base=0.0)
        await bus.publish(event(5))
        await bus.publish(event(6))
        await until(lambda: node.bus.lag("demo", "failing") == 0)
        letters = await node.bus.dead_letters("demo")

    assert [letter.error for letter in letters] == ["CancelledError"] * 2
    assert {letter.error_type.rpartition(".")[2] for letter in letters} == {"CancelledError"}


async def test_a_cut_connection_gives_its_events_to_others(tmp_path: Path) -> None:
    """What a member had not answered when its connection broke is tried by another, as the next attempt."""
    async with running_node(tmp_path) as node, remote(node) as doomed, remote(node) as other:
        holding, taking = Handler(is_holding=True), Handler()
        await doomed.subscribe("demo", "shared", holding, workers=3)
        for n in range(3):
            await doomed.publish(event(n))
        await until(lambda: len(holding.seen) == 3)
        await other.subscribe("demo", "shared", taking, workers=3)
        doomed._link._transport.underlying_transport.abort()  # type: ignore[union-attr]
        await until(lambda: len(taking.seen) == 3)
        await until(lambda: node.bus.lag("demo", "shared") == 0)
        holding.gate.set()

    assert sorted(taking.seen) == [0, 1, 2]
    assert taking.attempts == [2, 2, 2]


async def test_a_member_that_leaves_properly_is_not_held_against_the_event(tmp_path: Path) -> None:
    """Closing gives unfinished events back untried: the next member gets them as their first attempt."""
    async with running_node(tmp_path) as node, remote(node) as leaving, remote(node) as staying:
        holding, taking = Handler(is_holding=True), Handler()
        await leaving.subscribe("demo", "shared", holding)
        await leaving.publish(event(1))
        await until(lambda: holding.seen == [1])
        await staying.subscribe("demo", "shared", taking)
        await leaving.close(timeout_s=0.01)
        await until(lambda: taking.seen == [1])

    assert taking.attempts == [1]


async def test_a_group_without_members_waits(tmp_path: Path) -> None:
    """When the last member is gone the group keeps its place, and a member that comes later gets the rest."""
    async with running_node(tmp_path) as node:
        first, second = Handler(), Handler()
        async with remote(node) as bus:
            await bus.subscribe("demo", "shared", first)
            await bus.publish(event(0))
            await until(lambda: node.bus.lag("demo", "shared") == 0)
        await until(lambda: not node.bus.get_subscriptions("demo"))
        async with remote(node) as bus:
            await bus.publish(event(1))
            await bus.subscribe("demo", "shared", second)
            await until(lambda: second.seen == [1])
    assert first.seen == [0]


async def test_an_answer_after_the_deadline_does_not_count(tmp_path: Path) -> None:
    """An event that is not answered in time goes round again; the slow handler is told to stop."""
    async with running_node(tmp_path) as node, remote(node) as slow, remote(node) as quick:
        holding, taking = Handler(is_holding=True), Handler()
        await slow.subscribe("demo", "timed", holding, ack_deadline_ms=60, backoff_base=0.0)
        await slow.publish(event(1))
        await until(lambda: len(holding.seen) >= 1)
        await quick.subscribe("demo", "timed", taking)
        await until(lambda: taking.seen == [1])
        await until(lambda: node.bus.lag("demo", "timed") == 0)

    assert taking.attempts[0] > 1


async def test_order_holds_across_members(tmp_path: Path) -> None:
    """With strict order one event is out at a time, whoever has it."""
    async with running_node(tmp_path) as node, remote(node) as one, remote(node) as two:
        seen: list[int] = []
        at_once = 0

        async def handle(received: ReceivedEvent) -> Ack:
            nonlocal at_once
            at_once += 1
            assert at_once == 1
            seen.append(received.payload["n"])
            await asyncio.sleep(0)
            at_once -= 1
            return Ack()

        await one.subscribe("demo", "ordered", handle, workers=4, order="strict")
        await two.subscribe("demo", "ordered", handle, workers=4, order="strict")
        await asyncio.gather(*(one.publish(event(n)) for n in range(30)))
        await until(lambda: len(seen) == 30)
        offsets = [record.payload["n"] async for record in node.bus.replay("demo")]

    assert seen == offsets


async def test_without_the_right_there_is_no_membership(tmp_path: Path) -> None:
    """No token, a forged one, or a topic that was not given: each is refused, with its code."""
    async with running_node(tmp_path) as node:
        for token in (None, "not.a.token"):
            nobody = RemoteBus(node.url, token)
            with pytest.raises(RemoteStopped, match="4401"):
                await nobody.start()
            await nobody.close()
        async with remote(node) as bus:
            with pytest.raises(RemoteRefused) as refused:
                await bus.subscribe("secret", "g", Handler())
            with pytest.raises(TypeError):
                await bus.subscribe("demo", "g", Handler(), no_such_option=1)  # type: ignore[call-arg]
    assert refused.value.error_code == "access.forbidden"


async def test_a_revocation_ends_a_membership_before_the_next_event(tmp_path: Path) -> None:
    """Nothing that was committed after the revocation reaches the one who lost the right, on a live connection too."""
    async with running_node(tmp_path) as node, remote(node) as bus:
        handler = Handler()
        subscription = await bus.subscribe("demo", "g", handler, workers=8)
        await bus.publish(event(0))
        await until(lambda: handler.seen == [0])
        # One batch: the revocation, and events right behind it.
        revocation = revoke_event("worker", Action.SUBSCRIBE, topic("demo"), actor="test")
        await node.log.append_many([revocation, *(event(n) for n in range(1, 20))])
        await until(lambda: subscription.problem is not None)
        await until(lambda: not node.bus.get_subscriptions("demo"))

        assert handler.seen == [0]
        assert subscription.problem is not None
        assert subscription.problem.error_code == "access.forbidden"


async def test_a_revoked_subject_is_cut_off(tmp_path: Path) -> None:
    """When the subject itself is revoked the connection is closed with its own code, and not tried again."""
    async with running_node(tmp_path) as node, remote(node) as bus:
        await node.log.append(event_of(SubjectRevoked(subject="worker"), actor="test"))
        await until(lambda: bus._problem is not None)
        with pytest.raises(RemoteStopped, match="4403"):
            await bus.publish(event(1))


async def test_the_bus_comes_back_after_the_node_was_restarted(tmp_path: Path) -> None:
    """Subscriptions are taken up again on the new connection, and an event whose answer was lost is stored once."""
    async with running_node(tmp_path) as node:
        bus = remote(node)
        handler = Handler()
        await bus.start()
        await bus.subscribe("demo", "g", handler)
        await bus.publish(event(0))
        await until(lambda: handler.seen == [0])
        number = int(node.url.rpartition(":")[2])
    publishing = asyncio.create_task(bus.publish(event(1)))
    with pytest.raises(RemoteUnavailable):
        await bus.publish(event(2), timeout_s=0.01)
    settings = node_settings()
    server = msgspec.structs.replace(settings.server, port=number)
    async with RunningNode(tmp_path, msgspec.structs.replace(settings, server=server)):
        assert isinstance(await publishing, Appended)
        await until(lambda: 1 in handler.seen)
        assert bus.connection_count == 2
        await bus.close()
        with pytest.raises(RemoteClosed):
            await bus.publish(event(3))


@pytest.mark.slow
async def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """Two processes share a group; one is killed with SIGKILL in the middle: every event is handled, none is lost."""
    async with running_node(tmp_path) as node, remote(node) as bus:
        children = [await _child(node, tmp_path / f"handled-{n}", delay_s=0.01) for n in range(2)]
        try:
            files = [tmp_path / "handled-0", tmp_path / "handled-1"]
            await until(lambda: [len(each.members) for each in node.bus.get_subscriptions("demo")] == [2])
            publishing = asyncio.gather(*(bus.publish(event(n)) for n in range(300)))
            await until(lambda: all(len(_lines(file)) >= 20 for file in files))
            children[0].send_signal(signal.SIGKILL)
            await children[0].wait()
            await publishing
            await until(lambda: node.bus.lag("demo", "shared") == 0, 60)
            handled = [_lines(file) for file in files]
            assert not await node.bus.dead_letters("demo")
        finally:
            for child in children:
                if child.returncode is None:
                    child.send_signal(signal.SIGTERM)
                    await child.wait()

    counts = Counter(handled[0] + handled[1])
    assert set(counts) == set(range(300))
    # Only what the killed one was at may have been handled twice.
    assert sum(counts.values()) - 300 <= 4


@pytest.mark.slow
async def test_a_killed_node_loses_nothing(tmp_path: Path) -> None:
    """The node is killed with SIGKILL while members are at work: they come back, and every event is handled, uncounted."""
    workspace = tmp_path / "workspace"
    seen: list[tuple[int, int]] = []
    gate = asyncio.Event()

    async def handle(received: ReceivedEvent) -> Ack:
        seen.append((received.payload["n"], received.attempt))
        await gate.wait()
        return Ack()

    server = await _serve(workspace, 0)
    try:
        url = json.loads((workspace / ".bus" / "node.json").read_text())["url"]
        issuer = TokenIssuer(TokenSettings(secret=TEST_SECRET), SYSTEM_CLOCK)
        bus = RemoteBus(
            url, issuer.issue("worker", claims=TokenClaims(topics=frozenset({"demo"}), group_prefixes=("demo/",)))
        )
        await bus.start()
        for n in range(10):
            await bus.publish(event(n))
        await bus.subscribe("demo", "g", handle, workers=4)
        await until(lambda: len(seen) == 4)
        server.send_signal(signal.SIGKILL)
        await server.wait()
        publishing = asyncio.create_task(bus.publish(event(10)))
        server = await _serve(workspace, int(url.rpartition(":")[2]))
        await until(lambda: len(seen) == 8)
        gate.set()
        await publishing
        await until(lambda: {n for n, _ in seen} == set(range(11)))
        await bus.close()
    finally:
        if server.returncode is None:
            server.send_signal(signal.SIGTERM)
            await server.wait()

    assert {attempt for _, attempt in seen} == {1}
    assert Counter(n for n, _ in seen) == Counter([*range(11), *range(4)])


async def _serve(workspace: Path, port: int) -> asyncio.subprocess.Process:
    address = workspace / ".bus" / "node.json"
    address.unlink(missing_ok=True)
    command = ("-m", "tidings.cli", "serve", "--workspace", str(workspace), "--port", str(port))
    environment = {**os.environ, "TIDINGS_JWT_SECRET": TEST_SECRET, "TIDINGS_SERVER__LOG_LEVEL": "error"}
    server = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    await until(lambda: address.exists() or server.returncode is not None, 60)
    return server


async def _child(node: RunningNode, out: Path, *, delay_s: float) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(CHILD),
        node.url,
        node.token("worker", topics=["demo"], group_prefixes=["demo/"]),
        str(out),
        str(delay_s),
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )


def _lines(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


async def test_bypassing_the_node_is_refused(tmp_path: Path) -> None:
    """A second process that opens the workspace itself is told that a node owns it, and where that is."""
    async with running_node(tmp_path) as node:
        program = (
            "import asyncio, sys\n"
            "from tidings.bus import EventBus\n"
            "async def main():\n"
            "    bus = EventBus(workspace=sys.argv[1])\n"
            "    try:\n        await bus.start()\n"
            "    except Exception as error:\n        print(type(error).__name__, '|', error.hint)\n"
            "asyncio.run(main())\n"
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await child.communicate()
        with pytest.raises(WorkspaceBusy):
            await open_log(tmp_path)
        url = node.url

    assert out.decode().startswith("WorkspaceBusy")
    assert url in out.decode()


async def test_a_wrong_first_message_is_answered_and_closed(tmp_path: Path) -> None:
    """Whoever does not say hello first is told what is wrong and closed with the protocol's code."""
    async with running_node(tmp_path) as node:
        two_tokens = b'{"type":"hello","token":"a","token":"b"}'
        unknown = (b'{"type":"dance"}', b'{"type":"hello","version":9}', b'{"type":"hello","tokn":"a"}')
        for message in (b'{"type":"ack","tags":[1]}', b"{", *unknown, two_tokens):
            link = await WebSocketConnector().connect(f"{node.ws_url}/groups")
            link.send(message)
            (answer,) = await link.receive()
            frame = wire.decode_from_node(answer)
            assert isinstance(frame, wire.Problem)
            assert frame.error.code == "groups.malformed_frame"
            with pytest.raises(LinkClosed, match="4400"):
                await link.receive()
            await link.close()


@pytest.mark.parametrize(
    "message",
    [
        '{"type":"subscribe","id":1,"topic":"demo","group":"g","option":{}}',
        '{"type":"subscribe","id":1,"topic":"demo","group":"g","options":{"max_retry":1}}',
        '{"type":"publish","ref":1,"event":{},"delay":5}',
    ],
)
def test_a_field_that_a_frame_does_not_have_is_refused_by_name(message: str) -> None:
    """A mistyped option is no default in silence."""
    unknown = ("option", "max_retry", "delay")
    with pytest.raises(wire.FrameInvalid, match=rf"unknown field `({'|'.join(unknown)})`"):
        wire.decode_from_client(message.encode())
