"""The rules that every endpoint keeps, whatever it speaks: limits before and after authentication, queues, rights, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tidings.access.endpoint import UNLIMITED_MEMORY, Connection, ConnectionLimits, Endpoint, EndReason, Peer, Transport
from tidings.testing import VirtualClock


class Wire:
    """A transport that keeps what it is given."""

    memory = UNLIMITED_MEMORY

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed: tuple[int, str] | None = None
        self.is_reading = True
        self.buffered_bytes = 0

    def send(self, messages: Sequence[bytes]) -> None:
        self.sent += messages

    def send_shared(self, prefixes: tuple[bytes, ...], suffix: bytes) -> None:
        self.send([prefix + suffix for prefix in prefixes])

    def ping(self, payload: bytes) -> None:
        pass

    def close(self, code: int, reason: str = "") -> None:
        self.closed = self.closed or (code, reason)

    def authenticated(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Key:
    """Rights that can be taken back."""

    subject = "somebody"

    def __init__(self, expires_at_ns: int | None = None) -> None:
        self.expires_at_ns = expires_at_ns
        self.is_revoked = False


class Echo(Connection[bytes]):
    """Says the same; what begins with ``slow`` when it is let."""

    def __init__(self, endpoint: Echoes, transport: Transport) -> None:
        super().__init__(endpoint, transport)
        self.echoes = endpoint
        self.ends: list[int | None] = []
        self.abandoned_requests: list[bytes] = []

    def handle(self, message: bytes) -> None:
        if message.startswith(b"slow"):
            self.enqueue(message)
        else:
            self.send([message])

    async def work(self, request: bytes) -> None:
        await self.echoes.may_work.wait()
        if request == b"slow failure":
            raise RuntimeError("as the test wanted")
        self.send([request])

    def abandoned(self, request: bytes) -> None:
        self.abandoned_requests.append(request)

    def has_backlog(self) -> bool:
        return self.queued >= 3

    def ended(self, code: int | None) -> None:
        self.ends.append(code)


class Echoes(Endpoint[Echo]):
    """An endpoint of such connections."""

    unsent_bytes_max = 100
    connections_max = 2

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__("/echo", clock)
        self.may_work = asyncio.Event()
        self.may_work.set()

    def connect(self, transport: Transport, peer: Peer) -> Echo:
        return Echo(self, transport)

    def opened(self, key: Key | None = None) -> tuple[Echo, Wire]:
        wire = Wire()
        connection = self.open(wire, Peer("/echo", {}))
        if key is not None:
            connection.authenticated(key)
        return connection, wire


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_a_stranger_has_seconds_and_a_few_messages(clock: VirtualClock) -> None:
    """Without authentication a connection ends after its time, or with one message too many."""
    endpoint = Echoes(clock)
    endpoint.limits = ConnectionLimits(unauthenticated_messages_max=2)
    talking, talked = endpoint.opened()
    _, silent = endpoint.opened()
    for message in (b"a", b"b", b"c"):
        talking.received(message)
    await clock.advance(endpoint.authentication_timeout_s + 1)

    assert (talked.sent, talked.closed) == ([b"a", b"b"], (1008, "too many messages before a token was shown"))
    assert silent.closed is not None
    assert silent.closed[0] == EndReason.NOT_AUTHENTICATED.value[0]
    await clock.run_until(endpoint.stop(0.0))


async def test_a_connection_ends_with_its_rights(clock: VirtualClock) -> None:
    """Revoked or expired, with the next message or by the sweep: nothing is handled after that, and it ends once."""
    endpoint = Echoes(clock)
    revoked, expiring = Key(), Key(clock.now_ns() + 5_000_000_000)
    first, first_wire = endpoint.opened(revoked)
    _, second_wire = endpoint.opened(expiring)
    revoked.is_revoked = True
    first.received(b"too late")
    first.closed(1006)
    await clock.advance(6)

    assert (first_wire.sent, first.ends) == ([], [None])
    assert first_wire.closed == EndReason.REVOKED.value
    assert second_wire.closed == EndReason.EXPIRED.value
    await clock.run_until(endpoint.stop(0.0))


async def test_what_waits_is_bounded_and_kept_in_order(clock: VirtualClock) -> None:
    """With a full queue nothing is read; what had arrived already is held, up to a limit, and handled later."""
    endpoint = Echoes(clock)
    endpoint.limits = ConnectionLimits(held_messages_max=3)
    endpoint.may_work.clear()
    connection, wire = endpoint.opened(Key())
    other, other_wire = endpoint.opened(Key())
    said = [b"slow %d" % number for number in range(6)]
    for message in said:
        connection.received(message)
    for number in range(8):
        other.received(b"slow %d" % number)
    await clock.advance(0)

    assert not wire.is_reading
    assert other_wire.closed == (1008, "too many messages at once")

    endpoint.may_work.set()
    await clock.advance(0)
    assert (wire.sent, wire.is_reading) == (said, True)
    await clock.run_until(endpoint.stop(0.0))


async def test_a_peer_that_takes_nothing_is_not_read_from(clock: VirtualClock) -> None:
    """Until it has taken what was sent, neither its messages nor its requests are worked on."""
    endpoint = Echoes(clock)
    connection, wire = endpoint.opened(Key())
    wire.buffered_bytes = 101
    for message in (b"a", b"slow b", b"c"):
        connection.received(message)
    await clock.advance(0)
    assert (wire.sent, wire.is_reading) == ([b"a"], False)

    wire.buffered_bytes = 0
    connection.drained()
    await clock.advance(0)
    assert (sorted(wire.sent), wire.is_reading) == ([b"a", b"c", b"slow b"], True)
    await clock.run_until(endpoint.stop(0.0))


async def test_a_request_that_fails_ends_its_connection_only(clock: VirtualClock) -> None:
    """The peer is told; what waited behind it is abandoned."""
    endpoint = Echoes(clock)
    failing, wire = endpoint.opened(Key())
    good, good_wire = endpoint.opened(Key())
    for message in (b"slow failure", b"slow next"):
        failing.received(message)
    good.received(b"slow but fine")
    await clock.advance(0)

    assert wire.closed == EndReason.FAILED.value
    assert failing.abandoned_requests == [b"slow next"]
    assert good_wire.sent == [b"slow but fine"]
    await clock.run_until(endpoint.stop(0.0))


async def test_stopping_finishes_what_was_begun_and_takes_nobody_new(clock: VirtualClock) -> None:
    """A request under way is answered before the close; a connection too many, or one that comes while stopping, ends at once."""
    endpoint = Echoes(clock)
    endpoint.may_work.clear()
    connection, wire = endpoint.opened(Key())
    endpoint.opened(Key())
    _, one_too_many = endpoint.opened()
    connection.received(b"slow")
    stopping = asyncio.ensure_future(endpoint.stop(10.0))
    await clock.advance(1)
    connection.received(b"more")
    _, late = endpoint.opened()
    endpoint.may_work.set()
    await clock.run_until(stopping)

    assert one_too_many.closed == EndReason.FULL.value
    assert late.closed == EndReason.STOPPING.value
    assert (wire.sent, wire.closed) == ([b"slow"], EndReason.STOPPING.value)
