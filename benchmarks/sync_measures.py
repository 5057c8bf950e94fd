"""
What is measured of the sync endpoint: functions from a case to a result, each the client's side of one question.

The server runs in a process of its own, so its CPU time is taken from outside. Every measurement checks that what it counted
is what was asked for: a server that answers wrongly fails it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec
import orjson

from tidings.core.clock import datetime_of, ns_of
from tidings.log import Query
from tidings.log.embedded import open_follower

from .latency import AtRate, SteadyRate, times_between
from .measuring import Percentiles, Taken, Window, one_core, percentiles, run_on
from .sync_clients import BenchClient, Dialect, SyncFailed, connect, submit_frames
from .sync_serving import Server, cpu_s_of, rss_of

__all__ = [
    "FanOut",
    "Idle",
    "Paced",
    "Paged",
    "Paging",
    "Submit",
    "measure_fan_out",
    "measure_idle",
    "measure_pace",
    "measure_paging",
    "measure_submit",
    "written_ns",
]

_PARTITION: Final = "P-shared"
_WRITERS: Final = 20
_UNDER_WAY_MAX: Final = 30
"""Of each writer; a node takes 32 requests of one connection."""
_SAMPLED: Final = 10
_TICK_S: Final = 0.001
_CONNECTING: Final = 64
_ID_DIGITS: Final = 7


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """One client that submits batches."""

    server: Server
    dialect: Dialect
    token: str | None = None
    events: int
    batch: int = 100
    window: int = 2
    """Batches under way at a time; a node takes 200 drafts."""
    run: str
    is_one_core: bool = False


class FanOut(msgspec.Struct, frozen=True, kw_only=True):
    """One client that submits, and others that hear of it."""

    server: Server
    subscribers: int
    events: int
    run: str
    is_one_core: bool = False


class Done(msgspec.Struct, frozen=True):
    """So many, and what they took."""

    count: int
    taken: Taken
    server_cpu_s: float


class Paging(msgspec.Struct, frozen=True, kw_only=True):
    """One client that asks for everything there is of a partition."""

    server: Server
    partition: str
    events: int
    limit: int = 1000
    repeats: int = 1
    is_decoded: bool = False
    counts_connecting: bool = True
    is_one_core: bool = False


class Paged(msgspec.Struct, frozen=True):
    """The best of the repeats."""

    wall_s: float
    median_s: float
    server_cpu_s: float
    """Of one repeat, on average."""
    taken: Taken


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that are connected, subscribed, and silent."""

    server: Server
    connections: int
    is_one_core: bool = False


class Kept(msgspec.Struct, frozen=True):
    """What the server keeps for them."""

    bytes_each: float
    connect_s: float


class Paced(AtRate, frozen=True, kw_only=True):
    """How long single events took to a sample of those who hear of them."""

    committed_to_broadcast: Percentiles
    """Counted from when the commit began (the record's ``written_at``): the sync of the disk is part of it."""
    taken_up_to_broadcast: Percentiles
    """Counted from when the server took the event up, before it waited for its commit; the server says so to the millisecond."""
    told_to_broadcast: Percentiles
    """Counted from when the writer was told."""
    submitted_to_broadcast: Percentiles


def measure_submit(case: Submit) -> Done:
    """Submit, and wait for every verdict."""

    async def main() -> Done:
        client = await connect(case.server.url, case.dialect, "writer", case.token)
        warm_up = submit_frames(case.dialect, "writer", _PARTITION, 10 * case.batch, case.batch, f"{case.run}-warm")
        await client.submit(warm_up, case.window)
        frames = submit_frames(case.dialect, "writer", _PARTITION, case.events, case.batch, case.run)
        cpu_s, window = cpu_s_of(case.server.pid), Window()
        committed = await client.submit(frames, case.window)
        taken = window.take()
        client.close()
        if committed != case.events:
            raise SyncFailed(f"{committed} of {case.events} were committed")
        return Done(committed, taken, cpu_s_of(case.server.pid) - cpu_s)

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def measure_fan_out(case: FanOut) -> Done:
    """Submit, and wait until every subscriber has heard of everything."""

    async def main() -> Done:
        writer, *hearers = await _audience(case.server, 1, case.subscribers)
        await writer.submit(submit_frames("a", "writer-0", _PARTITION, 500, 100, f"{case.run}-warm"), 2)
        await _all_reach(hearers, 500)
        frames = submit_frames("a", "writer-0", _PARTITION, case.events, 100, case.run)
        cpu_s, window = cpu_s_of(case.server.pid), Window()
        await writer.submit(frames, 2)
        await _all_reach(hearers, 500 + case.events)
        taken = window.take()
        for client in (writer, *hearers):
            client.close()
        return Done(case.events * case.subscribers, taken, cpu_s_of(case.server.pid) - cpu_s)

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def measure_paging(case: Paging) -> Paged:
    """Page through the partition to its last page, and see that all of it came."""

    async def go_through(client: BenchClient) -> None:
        since, count, has_more = 0, 0, True
        while has_more:
            raw = await client.page_raw(case.partition, since, case.limit)
            if case.is_decoded:
                payload = orjson.loads(raw)["payload"]
                count += len(payload["events"])
            else:
                # Behind the events stands all that paging needs; in the events themselves these names cannot stand.
                payload = _tail_of(raw)
                count += raw.count(b',"committed_id":')
            since, has_more = payload["next_since_committed_id"], payload["has_more"]
        if count != case.events:
            raise SyncFailed(f"{count} events of {case.events} came")

    async def main() -> Paged:
        client = await connect(case.server.url, "a", "early")
        cpu_s, window, all_s = cpu_s_of(case.server.pid), Window(), []
        for number in range(case.repeats):
            began = time.perf_counter()
            if case.counts_connecting:
                client.close()
                client = await connect(case.server.url, "a", f"reader-{number}")
            await go_through(client)
            all_s.append(time.perf_counter() - began)
        cpu_s = (cpu_s_of(case.server.pid) - cpu_s) / case.repeats
        client.close()
        all_s.sort()
        return Paged(all_s[0], all_s[len(all_s) // 2], cpu_s, window.take())

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


def measure_idle(case: Idle) -> Kept:
    """Connect them all, and see what the server has grown by."""

    async def main() -> Kept:
        # What the first connections make the server load and allocate is not theirs.
        for client in await _connected(case.server, "early", max(2, case.connections // 20)):
            client.close()
        before, began = rss_of(case.server.pid), time.perf_counter()
        clients = await _connected(case.server, "idle", case.connections)
        connect_s = time.perf_counter() - began
        after = rss_of(case.server.pid)
        for client in clients:
            client.close()
        return Kept((after - before) / case.connections, connect_s)

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


_TAKEN_UP: Final = re.compile(rb'"status_updated_at":([0-9]+)')


def measure_pace(case: SteadyRate) -> Paced:
    """Submit at the rate, whatever becomes of earlier events, and note when each came where."""
    count = max(20, round(case.per_s * case.seconds))

    async def main() -> Paced:
        clients = await _audience(case.server, _WRITERS, case.subscribers)
        writers, hearers = clients[:_WRITERS], clients[_WRITERS:]
        sent, told = [0] * count, [0] * count
        heard: list[list[int]] = [[0] * count for _ in hearers[:_SAMPLED]]
        taken_up_ns: list[int] = []
        began_at, wall_less_perf_ns = datetime_of(time.time_ns()), time.time_ns() - time.perf_counter_ns()
        results, are_all_told = 0, asyncio.Event()
        under_way = dict.fromkeys(writers, 0)

        def note_result(writer: BenchClient, mine: list[int]) -> None:
            waiting = iter(mine)

            def note(message: bytes) -> None:
                nonlocal results
                if b'"status":"committed"' not in message:
                    raise SyncFailed(message[:300].decode())
                told[next(waiting)] = time.perf_counter_ns()
                under_way[writer] -= 1
                results += 1
                if results == count:
                    are_all_told.set()

            writer.answerer = note

        def note_broadcast(hearer: BenchClient, times: list[int]) -> None:
            skip = len(b'"id":"') + len(case.run) + 1

            def note(message: bytes) -> None:
                place = message.index(b'"id":"') + skip
                times[int(message[place : place + _ID_DIGITS])] = time.perf_counter_ns()
                found = _TAKEN_UP.search(message)
                assert found is not None
                taken_up_ns.append(time.time_ns() - int(found[1]) * 1_000_000)

            hearer.listener = note

        for number, writer in enumerate(writers):
            note_result(writer, list(range(number, count, len(writers))))
        for hearer, times in zip(hearers, heard, strict=False):
            note_broadcast(hearer, times)
        frames = submit_frames("a", "", _PARTITION, count, 1, case.run)
        cpu_s, window = cpu_s_of(case.server.pid), Window()
        start_ns, n = time.perf_counter_ns(), 0
        while n < count:
            due = min(count, (time.perf_counter_ns() - start_ns) * case.per_s // 1_000_000_000 + 1)
            # A server that falls behind keeps the next ones waiting; they are counted from when they were due.
            while n < due and under_way[writers[n % len(writers)]] < _UNDER_WAY_MAX:
                sent[n] = start_ns + n * 1_000_000_000 // case.per_s
                under_way[writers[n % len(writers)]] += 1
                writers[n % len(writers)].say(frames[n])
                n += 1
            await asyncio.sleep(_TICK_S)
        await _all_reach(hearers, count)
        await are_all_told.wait()
        taken = window.take()
        for client in clients:
            client.close()
        times_ns = await written_ns(case.workspace, "sync", began_at, count)
        written = [times_ns[f"{case.run}-{number:0{_ID_DIGITS}d}"] - wall_less_perf_ns for number in range(count)]
        return Paced(
            committed_to_broadcast=times_between(written, heard),
            taken_up_to_broadcast=percentiles(taken_up_ns),
            told_to_broadcast=times_between(told, heard),
            submitted_to_broadcast=times_between(sent, heard),
            reached_per_s=count / taken.wall_s,
            taken=taken,
            server_cpu_s=cpu_s_of(case.server.pid) - cpu_s,
        )

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


async def written_ns(workspace: str, topic: str, since: datetime, count: int) -> Mapping[str, int]:
    """When the commit of each event of a topic began, by its id; so many of them are to be found, a moment after they were committed."""
    found: dict[str, int] = {}
    log = await open_follower(workspace)
    try:
        query = Query(topic=topic, from_time=since)
        while True:
            page = await log.read(query)
            found |= {record.meta.event_id: ns_of(record.meta.written_time) for record in page.records}
            query = page.next
            if len(found) >= count:
                return found
            if page.at_end:
                await log.wait(log.position.seq)
    finally:
        await log.close()


async def _audience(server: Server, writers: int, subscribers: int) -> list[BenchClient]:
    """Writers, then subscribers of one partition that are up to date."""
    clients = [await connect(server.url, "a", f"writer-{number}") for number in range(writers)]
    for number in range(subscribers):
        client = await connect(server.url, "a", f"hearer-{number}")
        # From where the log stands: its history is another bench's.
        page = await client.page(_PARTITION, 1 << 50, 1, subscribes=True)
        if page["effective_subscriptions"] != [_PARTITION]:
            raise SyncFailed("it is not subscribed")
        clients.append(client)
    return clients


async def _all_reach(hearers: list[BenchClient], broadcasts: int) -> None:
    for hearer in hearers:
        await hearer.reach(broadcasts)


async def _connected(server: Server, name: str, count: int) -> list[BenchClient]:
    gate = asyncio.Semaphore(_CONNECTING)

    async def one(number: int) -> BenchClient:
        async with gate:
            client = await connect(server.url, "a", f"{name}-{number}")
            await client.page(f"P-{number}", 0, 1, subscribes=True)
            return client

    return list(await asyncio.gather(*(one(number) for number in range(count))))


def _tail_of(page: bytes) -> dict[str, int | bool]:
    tail = page[page.rindex(b'"next_since_committed_id"') :]
    found: dict[str, int | bool] = orjson.loads(b"{" + tail[: tail.index(b"}")] + b"}")
    return found
