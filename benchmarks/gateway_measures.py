"""
What is measured of the gateway: functions from a case to a result, each the clients' side of one question.

The server runs in a process of its own, so its CPU time is taken from outside. Every measurement checks that what it counted is what
was asked for.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, Literal

import msgspec

from tidings.core.clock import datetime_of

from .gateway_clients import TOPIC, EventsClient, GatewayFailed, Publisher, SocketPublisher, connect, connect_many
from .latency import AtRate, SteadyRate, times_between
from .measuring import Percentiles, Taken, Window, one_core, run_on
from .sync_measures import written_ns
from .sync_serving import Server, cpu_s_of, rss_of, token_for

__all__ = [
    "Broadcast",
    "Crowd",
    "Published",
    "Rate",
    "Rated",
    "Return",
    "measure_broadcast",
    "measure_crowd",
    "measure_published",
    "measure_rate",
    "measure_return",
]

_BATCH: Final = 100
_SAMPLED: Final = 10
_TICK_S: Final = 0.001
_UNDER_WAY_MAX: Final = 100
_PUBLISHERS: Final = 4
_ID_DIGITS: Final = 7
_RETURNING: Final = 64
_WARM: Final = 100
_EACH: Final = 5
"""Connections of one identity."""


class Broadcast(msgspec.Struct, frozen=True, kw_only=True):
    """Many who hear, and events for all of them."""

    server: Server
    kind: Literal["gateway", "bare"]
    subscribers: int
    events: int
    text: str = ""
    """For a bare server: what it sends."""
    run: str
    is_one_core: bool = False


class Fanned(msgspec.Struct, frozen=True):
    """So many deliveries, and what they took."""

    deliveries: int
    taken: Taken
    server_cpu_s: float
    frame: str
    """One of the frames, so that others can send the same."""


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Subscribers who are connected, and silent."""

    server: Server
    connections: int
    is_one_core: bool = False


class Crowded(msgspec.Struct, frozen=True):
    """What the server keeps for them."""

    bytes_each: float
    connect_s: float


class Rate(SteadyRate, frozen=True, kw_only=True):
    """Events of a topic, and subscribers of the gateway."""

    via: Literal["socket", "http"]
    """How events are published: over a connection of programs that publish often, or each by a request of its own."""


class Rated(AtRate, frozen=True, kw_only=True):
    """How long single events took to a sample of those who hear of them."""

    committed_to_frame: Percentiles
    """Counted from when the commit began (the record's ``written_at``): the sync of the disk is part of it."""
    published_to_frame: Percentiles
    """Counted from when the event was due to be sent."""


class Return(msgspec.Struct, frozen=True, kw_only=True):
    """Clients of a node that was restarted come back, all at once."""

    server: Server
    clients: int
    missed: int
    knows_by: Literal["farewell", "life", "refusal"]
    """
    How they know that their resume tokens are of no use: the node said that it stops; the new connection says that it is another life; or, of a
    client that looks at neither, the token is refused.
    """
    is_one_core: bool = False


class Returned(msgspec.Struct, frozen=True):
    """How long it took until all were up to date and subscribed."""

    wall_s: float
    taken: Taken
    server_cpu_s: float


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Events of which nobody wants to hear, beside subscribers of other things."""

    server: Server
    others: int
    events: int
    rounds: int
    run: str
    is_one_core: bool = False


class PublishCost(msgspec.Struct, frozen=True):
    """The server's CPU for an event, the least of the rounds: alone, and with the others there."""

    alone_us: float
    beside_us: float


def measure_broadcast(case: Broadcast) -> Fanned:
    """Have everything sent to all, and wait until it has come."""

    async def main() -> Fanned:
        clients = await connect_many(case.server.url, "hearer", case.subscribers, kind=case.kind)
        publisher = Publisher(case.server.url)
        frames: list[bytes] = []
        clients[0].listener = frames.append
        requests = [publisher.request(case.run, first, _BATCH) for first in range(0, case.events, _BATCH)]

        async def send(count: int, warm: bool) -> None:
            for each in clients:
                each.aim(each.count + count)
            if case.kind == "bare":
                clients[0].say(f"broadcast {count} {case.text}".encode())
            elif warm:
                await publisher.publish(publisher.request(f"{case.run}w", 0, count))
            else:
                for request in requests:
                    await publisher.publish(request)
            for each in clients:
                await each.reached()

        await send(_WARM, True)
        clients[0].listener = None
        cpu_s, window = cpu_s_of(case.server.pid), Window()
        await send(case.events, False)
        taken = window.take()
        used_s = cpu_s_of(case.server.pid) - cpu_s
        publisher.close()
        for each in clients:
            each.close()
        return Fanned(case.events * case.subscribers, taken, used_s, frames[0].decode())

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def measure_crowd(case: Crowd) -> Crowded:
    """Connect them all, and see what the server has grown by."""

    async def main() -> Crowded:
        # What the first connections make the server load and allocate is not theirs.
        for client in await connect_many(case.server.url, "early", max(2, case.connections // 20)):
            client.close()
        before, began = rss_of(case.server.pid), time.perf_counter()
        clients = await connect_many(case.server.url, "idle", case.connections)
        connect_s = time.perf_counter() - began
        after = rss_of(case.server.pid)
        for client in clients:
            client.close()
        return Crowded((after - before) / case.connections, connect_s)

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def measure_rate(case: Rate) -> Rated:
    """Publish at the rate, whatever becomes of earlier events, and note when each came where."""
    count = max(20, round(case.per_s * case.seconds))

    async def main() -> Rated:
        clients = await connect_many(case.server.url, "hearer", case.subscribers)
        publisher = Publisher(case.server.url)
        sent = [0] * count
        heard: list[list[int]] = [[0] * count for _ in clients[:_SAMPLED]]
        began_at, wall_less_perf_ns = datetime_of(time.time_ns()), time.time_ns() - time.perf_counter_ns()
        requests = [publisher.request(case.run, number) for number in range(count if case.via == "http" else 0)]
        sockets = [await SocketPublisher.connected(case.server.url) for _ in range(_PUBLISHERS)]

        def note_arrival(client: EventsClient, times: list[int]) -> None:
            mark = f'"item:{case.run}-'.encode()

            def note(message: bytes) -> None:
                place = message.index(mark) + len(mark)
                times[int(message[place : place + _ID_DIGITS])] = time.perf_counter_ns()

            client.listener = note

        for client, times in zip(clients, heard, strict=False):
            note_arrival(client, times)
        for client in clients:
            client.aim(count)
        under_way: set[asyncio.Task[None]] = set()

        def answered() -> int:
            return n - len(under_way) if case.via == "http" else sum(each.published for each in sockets)

        cpu_s, window = cpu_s_of(case.server.pid), Window()
        start_ns, n = time.perf_counter_ns(), 0
        while n < count:
            due = min(count, (time.perf_counter_ns() - start_ns) * case.per_s // 1_000_000_000 + 1)
            # A server that falls behind keeps the next ones waiting; they are counted from when they were due.
            while n < due and n - answered() < _UNDER_WAY_MAX:
                sent[n] = start_ns + n * 1_000_000_000 // case.per_s
                if case.via == "socket":
                    sockets[n % _PUBLISHERS].publish(case.run, n)
                else:
                    task = asyncio.create_task(publisher.publish(requests[n]))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                n += 1
            await asyncio.sleep(_TICK_S)
        await asyncio.gather(*under_way)
        for client in clients:
            await client.reached()
        taken = window.take()
        used_s = cpu_s_of(case.server.pid) - cpu_s
        publisher.close()
        for client in clients:
            client.close()
        for each in sockets:
            each.close()
        times_ns = await written_ns(case.workspace, TOPIC, began_at, count)
        written = [times_ns[f"{case.run}-{number:0{_ID_DIGITS}d}"] - wall_less_perf_ns for number in range(count)]
        return Rated(
            committed_to_frame=times_between(written, heard),
            published_to_frame=times_between(sent, heard),
            reached_per_s=count / taken.wall_s,
            taken=taken,
            server_cpu_s=used_s,
        )

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def measure_return(case: Return) -> Returned:
    """Each reads over HTTP what it missed, before or after it subscribes again, as clients do."""
    # A few of each identity: of one that shows many tokens that are not good the node thinks ill.
    tokens = [token_for(f"hearer-{number}") for number in range(-(-case.clients // _EACH))]
    # Well made and of another life of the node, as those of its clients are.
    foreign = "AQ" + "A" * 86

    async def main() -> Returned:
        gate, publisher = asyncio.Semaphore(_RETURNING), Publisher(case.server.url)
        since = (await publisher.envelopes(0, tokens[0], 1_000))[-1 - case.missed]

        async def one(number: int) -> EventsClient:
            token = tokens[number // _EACH]
            async with gate:
                client = None
                if case.knows_by == "life":
                    client = await connect(case.server.url, "hearer", token=token)
                    if not client.life:
                        raise GatewayFailed("the node does not name its life")
                elif case.knows_by == "refusal":
                    await connect(case.server.url, "hearer", token=token, resume_token=foreign)
                found = await publisher.envelopes(since, token)
                if len(found) != case.missed:
                    raise GatewayFailed(f"{len(found)} envelopes of {case.missed}")
                return client or await connect(case.server.url, "hearer", token=token)

        cpu_s, window = cpu_s_of(case.server.pid), Window()
        clients = await asyncio.gather(*(one(number) for number in range(case.clients)))
        taken = window.take()
        used_s = cpu_s_of(case.server.pid) - cpu_s
        publisher.close()
        for each in clients:
            each.close()
        return Returned(taken.wall_s, taken, used_s)

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def measure_published(case: Published) -> PublishCost:
    """Publish with and without the others there, in turns."""

    async def main() -> PublishCost:
        publisher = Publisher(case.server.url)
        number = 0

        async def cost_us() -> float:
            nonlocal number
            requests = [
                publisher.request(f"{case.run}{number}", first, _BATCH) for first in range(0, case.events, _BATCH)
            ]
            number += 1
            cpu_s = cpu_s_of(case.server.pid)
            for request in requests:
                await publisher.publish(request)
            return (cpu_s_of(case.server.pid) - cpu_s) / case.events * 1e6

        await cost_us()
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(case.rounds):
            alone.append(await cost_us())
            others = [
                await connect(case.server.url, "other", filters={"object_ids": [f"thing:{each}"]})
                for each in range(case.others)
            ]
            beside.append(await cost_us())
            for each in others:
                each.close()
        publisher.close()
        return PublishCost(min(alone), min(beside))

    with one_core(case.is_one_core):
        return run_on("uvloop", main)
