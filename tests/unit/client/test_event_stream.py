"""A program that follows a node's events sees each once, in order, whatever becomes of the connections and of the node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.client.fake_gateway import EagerClock, FakeGateway
from tidings.client.errors import RemoteClosed, RemoteRefused, RemoteStopped, RemoteUnavailable
from tidings.client.events import EventStream
from tidings.client.http import ReceivedEnvelope
from tidings.core.errors import SettingsError
from tidings.wire.gateway import AckEvent, CloseReason, ResumeEvents, SubscribeEvents


def stream(node: FakeGateway, **options: Any) -> EventStream:
    """A stream of that node."""
    return EventStream(
        "http://node",
        connector_for=node.connector_for,
        rng=random.Random(1),
        **{"token": "secret", "http_transport": node.http(), "clock": EagerClock(), **options},
    )


def place(envelope: ReceivedEnvelope) -> tuple[int, int]:
    """Where an envelope stands."""
    assert envelope.seq is not None
    return envelope.seq, envelope.payload_summary.get("part", 1)


async def take(events: EventStream, count: int) -> list[tuple[int, int]]:
    """The next few."""
    return [place(await anext(events)) for _ in range(count)]


async def until_subscribed(node: FakeGateway, events: EventStream) -> None:
    """Take what comes until a connection is there again."""
    while not any(link.is_open and link.is_subscribed for link in node.links):
        node.commit()
        await anext(events)


async def until(condition: Callable[[], object]) -> None:
    """Let others run until something holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 3)),
        st.tuples(st.just("take"), st.integers(1, 12)),
        st.tuples(st.just("cut"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 1)),
        st.tuples(st.just("no http"), st.integers(1, 3)),
        st.tuples(st.just("no socket"), st.integers(1, 3)),
        st.tuples(st.just("again"), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.req("R101")
@given(STEPS, st.integers(1, 20), st.integers(1, 40), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_envelope_once_in_order(
    steps: list[tuple[str, int]], per_connection: int, window: int, is_from_start: bool, tells_life: bool
) -> None:
    """
    Whatever mixture of commits, cuts, restarts of the node, refusals and restarts of the program there is, and however small buffer and window are:
    what was given is everything, in order, without a repeat but for a record that the program had only a part of when it was restarted.
    """

    async def run() -> None:
        node = FakeGateway(per_connection=per_connection, window=window, tells_life=tells_life)
        events = await stream(node, since=0 if is_from_start else None).__aenter__()
        got: list[tuple[int, int]] = []
        for what, count in steps:
            match what:
                case "commit":
                    node.commit(count)
                case "take":
                    got += await take(events, min(count, len(node.places()) - len(got)))
                case "cut":
                    node.cut()
                case "restart":
                    node.restart(is_orderly=bool(count))
                case "no http":
                    node.refusals += [(503, "node.stopping")] * count
                case "no socket":
                    node.upgrades += [503] * count
                case _:
                    position = events.position
                    assert position is not None
                    await events.close()
                    got = [each for each in got if each[0] <= position]
                    events = await stream(node, since=position).__aenter__()
        got += await take(events, len(node.places()) - len(got))
        await events.close()
        assert got == node.places()

    asyncio.run(run())


async def test_a_broken_connection_is_resumed() -> None:
    """The node is shown the token of the last envelope that came, not of the last that the program took; what came already is not asked for again."""
    node = FakeGateway()
    async with stream(node) as events:
        for _ in range(3):
            node.commit()
        first = await take(events, 1)
        node.cut()
        node.commit()
        assert first + await take(events, 3) == node.places()

    resumed = [frame.resume_token for frame in node.frames if isinstance(frame, ResumeEvents)]
    assert (resumed, node.pages, events.gap_count) == (["1/2"], 0, 0)


async def test_where_it_cannot_be_resumed_the_rest_is_read_over_http() -> None:
    """A node that was restarted knows no token; what happened meanwhile is read in pages and joined with what the new connection brings."""
    node = FakeGateway(tells_life=False)
    async with stream(node) as events:
        node.commit()
        await take(events, 1)
        node.restart(is_orderly=False)
        for _ in range(12):
            node.commit()
        assert await take(events, 12) == node.places()[1:]
        assert events.position == node.places()[-1][0]
        waiting = asyncio.ensure_future(take(events, 1))
        await until(lambda: node.links)
        node.commit()
        assert await waiting == node.places()[-1:]
        assert events.gap_count == 1


async def test_a_token_is_not_shown_to_another_life_of_the_gateway() -> None:
    """A node that says it is in another life is subscribed to anew on the same connection; what was missed is read up to where that begins."""
    node, connections = FakeGateway(), 0
    async with stream(node) as events:
        node.commit()
        await take(events, 1)
        node.restart(is_orderly=False)
        for _ in range(12):
            node.commit()
        connections = len(node.tokens)
        assert await take(events, 12) == node.places()[1:]
        node.commit()
        assert await take(events, 1) == node.places()[-1:]
        assert events.gap_count == 1

    assert not [frame for frame in node.frames if isinstance(frame, ResumeEvents)]
    assert len(node.tokens) == connections + 1


async def test_only_what_comes_from_now_on_unless_since_is_given() -> None:
    """Entering without ``since`` takes the place of now."""
    node = FakeGateway()
    node.commit()
    async with stream(node) as events:
        assert events.position == node.places()[-1][0]
        node.commit()
        assert await take(events, 1) == node.places()[1:]


async def test_an_envelope_is_acknowledged_when_the_next_is_asked_for() -> None:
    """The last one that the program has is not; leaving is being done with it."""
    node = FakeGateway(per_connection=4)
    async with stream(node) as events:
        node.commit()
        node.commit()
        await take(events, 2)
        assert [link.acked for link in node.links] == [1]
        link = node.links[0]
    assert link.acked == 2
    assert sum(isinstance(frame, AckEvent) for frame in node.frames) == 2


async def test_a_slow_program_loses_its_connection_and_no_envelope() -> None:
    """More than the node's buffer happens while the program is busy: it goes on with what it has, then with the rest."""
    node = FakeGateway(per_connection=4, window=1000)
    async with stream(node) as events:
        node.commit()
        got = await take(events, 1)
        for _ in range(50):
            node.commit()
        assert not node.links[0].is_open
        assert got + await take(events, 50) == node.places()


async def test_a_slow_program_waits_longer_each_time_before_it_subscribes_again() -> None:
    """1, 2, 4 seconds and so on up to 30 at least: a node denies subscriptions to whoever comes back at once, again and again."""
    node, clock = FakeGateway(), EagerClock()
    async with stream(node, clock=clock) as events:
        pauses = []
        for _ in range(8):
            node.cut(CloseReason.BUFFER_OVERFLOW.code)
            before_s = clock.now_s
            node.commit()
            await anext(events)
            await until_subscribed(node, events)
            pauses.append(clock.now_s - before_s)
        clock.now_s += 61.0
        before_s = clock.now_s
        node.cut(CloseReason.BUFFER_OVERFLOW.code)
        await until_subscribed(node, events)
        again_s = clock.now_s - before_s

    for pause_s, least_s in zip([*pauses, again_s], [1, 2, 4, 8, 16, 30, 30, 30, 1], strict=True):
        assert least_s <= pause_s <= least_s + 0.3


async def test_a_part_of_a_record_is_not_taken_for_the_whole() -> None:
    """A record of several envelopes is behind the position only when all of them were given, and none is given twice."""
    node = FakeGateway()
    async with stream(node) as events:
        node.commit()
        node.commit(parts=3)
        got = await take(events, 2)
        assert events.position == node.places()[0][0]
        node.restart()
        got += await take(events, 2)
        assert got == node.places()
        assert events.position == node.places()[-1][0]


async def test_filters_are_the_same_at_the_socket_and_over_http() -> None:
    """What the subscription asks for is asked for in pages too."""
    node = FakeGateway()
    async with stream(
        node, app="shop", domain="orders", objects=["order:1"], event_type="graph.acl_changed", since=0
    ) as events:
        node.commit()
        await take(events, 1)
        waiting = asyncio.ensure_future(take(events, 1))
        await until(lambda: node.links)
        node.commit()
        await waiting

    assert [frame for frame in node.frames if isinstance(frame, SubscribeEvents)][:1] == [
        SubscribeEvents(
            app_id="shop",
            subscription_type="graph",
            event_type="graph.acl_changed",
            domain_id="orders",
            object_ids=("order:1",),
        )
    ]
    params = node.asked
    assert (params["app"], params["domain_id"], params["object_id"], params["event_type"]) == (
        "shop",
        "orders",
        "order:1",
        "graph.acl_changed",
    )


@pytest.mark.parametrize("reason", [each for each in CloseReason if each.reconnect.value == "no"])
async def test_it_is_given_up_where_the_node_says_so(reason: CloseReason) -> None:
    """A filter that makes no sense, a right that is missing, a place that was taken over: connecting again does not help."""
    node = FakeGateway()
    async with stream(node) as events:
        node.links[0].refuse(reason)
        with pytest.raises(RemoteStopped, match=f"{reason.reason}: because"):
            await anext(events)


@pytest.mark.parametrize("status", [400, 403, 404])
async def test_an_upgrade_that_is_refused_for_good_is_not_tried_again(status: int) -> None:
    """What is wrong with it would be wrong the next time."""
    node = FakeGateway()
    node.upgrades = [status]
    with pytest.raises(RemoteStopped, match=f"answered {status}"):
        await stream(node).__aenter__()
    assert node.links == []


async def test_a_token_that_has_run_out_is_made_afresh() -> None:
    """A function of tokens is asked for each connection; a token that is fixed ends the stream."""
    node = FakeGateway()
    fresh = iter(["one", "two", "three", "four"])
    async with stream(node, token=lambda: next(fresh)) as events:
        node.commit()
        await take(events, 1)
        node.links[0].refuse(CloseReason.AUTH_FAILED)
        node.links.clear()
        node.upgrades = [401]
        node.commit()
        assert await take(events, 1) == node.places()[1:]
        assert node.tokens == ["one", "two", "three"]
    async with stream(node) as events:
        node.links[-1].refuse(CloseReason.AUTH_FAILED)
        with pytest.raises(RemoteStopped):
            await anext(events)


async def test_what_is_gone_is_said() -> None:
    """If the records after the position were dropped, or the node has begun another log, the program is told."""
    node = FakeGateway()
    node.refusals = [(410, "log.position_trimmed")]
    async with stream(node, since=3) as events:
        with pytest.raises(RemoteRefused) as caught:
            await anext(events)
    assert caught.value.error_code == "log.position_trimmed"


async def test_patience_ends() -> None:
    """A node that cannot be reached is given up when the patience is over, over HTTP as at the socket."""
    node = FakeGateway()
    node.upgrades = [503] * 100
    with pytest.raises(RemoteUnavailable):
        await stream(node, patience_s=5.0).__aenter__()
    node.refusals = [(503, "node.stopping")] * 100
    async with stream(node, since=0, patience_s=5.0) as events:
        with pytest.raises(RemoteUnavailable):
            await anext(events)


async def test_events_of_other_classes_are_not_looked_for_over_http() -> None:
    """They are nowhere; that some may be missing is counted."""
    node = FakeGateway()
    node.commit()
    async with stream(node, subscription_type="system", since=0) as events:
        waiting = asyncio.ensure_future(anext(events))
        await until(lambda: node.frames)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        node.restart()
        waiting = asyncio.ensure_future(anext(events))
        await until(lambda: events.gap_count)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert (node.pages, events.gap_count) == (0, 1)


async def test_waiting_can_be_cut_short_anywhere_without_losing_anything() -> None:
    """A program that gives up waiting and asks again later sees everything."""
    node = FakeGateway()
    got: list[tuple[int, int]] = []
    async with stream(node, since=0) as events:
        for turn in range(40):
            if turn % 5 == 0:
                node.commit(parts=2)
            if turn % 7 == 0:
                node.restart()
            waiting = asyncio.ensure_future(anext(events))
            for _ in range(turn % 6):
                await asyncio.sleep(0)
            waiting.cancel()
            (found,) = await asyncio.gather(waiting, return_exceptions=True)
            if isinstance(found, ReceivedEnvelope):
                got.append(place(found))
        got += await take(events, len(node.places()) - len(got))
    assert got == node.places()


async def test_a_program_that_waits_for_short_times_only_gets_everything() -> None:
    """What a program stopped waiting for goes on, so that a page that takes longer than it ever waits is read once, and comes."""
    node = FakeGateway()
    for _ in range(4):
        node.commit()
    inner = node.http()

    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            for _ in range(50):
                await asyncio.sleep(0)
            return await inner.handle_async_request(request)

    got: list[tuple[int, int]] = []
    async with stream(node, since=0, http_transport=Slow()) as events:
        for _ in range(200):
            waiting = asyncio.ensure_future(anext(events))
            for _ in range(3):
                await asyncio.sleep(0)
            waiting.cancel()
            (found,) = await asyncio.gather(waiting, return_exceptions=True)
            if isinstance(found, ReceivedEnvelope):
                got.append(place(found))
    assert (got, node.pages) == (node.places(), 1)


async def test_two_who_wait_at_once_get_one_each() -> None:
    """Two tasks of a program may take from one stream; no envelope goes to both, and none is left out."""
    node = FakeGateway()
    async with stream(node) as events:
        waiting = [asyncio.ensure_future(anext(events)) for _ in range(2)]
        await asyncio.sleep(0)
        node.commit(parts=2)
        got = await asyncio.gather(*waiting)
    assert sorted(map(place, got)) == node.places()


async def test_the_connection_for_catching_up_ends_with_it() -> None:
    """Whoever has caught up holds one connection to the node, the socket's."""
    node = FakeGateway()

    class Counting(httpx.AsyncBaseTransport):
        open_count = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.open_count = 1
            return await node.http().handle_async_request(request)

        async def aclose(self) -> None:
            self.open_count = 0

    node.commit()
    transport = Counting()
    async with stream(node, since=0, http_transport=transport) as events:
        await anext(events)
        node.commit()
        await anext(events)

        assert (len(node.tokens), transport.open_count) == (1, 0)


async def test_a_node_that_answers_pages_and_refuses_sockets_is_given_up_too() -> None:
    """A page that was read does not make the next refusal of the socket the first: pauses grow, and patience ends."""
    node = FakeGateway()
    node.commit()
    node.upgrades = [503] * 500
    async with stream(node, since=0, patience_s=20) as events:
        await anext(events)
        with pytest.raises(RemoteUnavailable):
            await anext(events)
    assert 5 < len(node.tokens) < 100


async def test_a_token_that_is_refused_costs_no_pause() -> None:
    """After a restart of the node there is one pause, for the connection that broke, and none for the token that nobody knows any more."""

    class CountingClock(EagerClock):
        pauses = 0

        async def sleep(self, seconds: float) -> None:
            self.pauses += seconds != 10.0
            await super().sleep(seconds)

    node, clock = FakeGateway(tells_life=False), CountingClock()
    async with stream(node, clock=clock) as events:
        node.commit()
        await anext(events)
        node.restart(is_orderly=False)
        node.commit()
        await anext(events)
    assert (clock.pauses, sum(isinstance(each, ResumeEvents) for each in node.frames)) == (1, 1)


def test_a_stream_of_no_object_is_refused_at_once() -> None:
    """An empty list of objects is a mistake, and not everything."""
    with pytest.raises(SettingsError, match="objects"):
        stream(FakeGateway(), objects=[])


async def test_closing_ends_whoever_waits() -> None:
    """A stream that is closed gives nothing more, and does not connect again."""
    node = FakeGateway()
    events = await stream(node).__aenter__()
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await events.close()
    with pytest.raises(RemoteClosed):
        await waiting
    with pytest.raises(RemoteClosed):
        await anext(events)
    assert len(node.tokens) == 1
