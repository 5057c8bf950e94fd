"""The whole client against a server in memory, in virtual time: offline work, verdicts, reconnecting, listening."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.beyond import Beyond, crossed
from tests.unit.client.support import SETTINGS, ModelServer, Network, body, memory_store, numbers
from tidings.client import (
    ChangesMissed,
    ClientSettings,
    ClientStore,
    Committed,
    DraftRejected,
    EventCommitted,
    HistoryReset,
    ItemError,
    LocalEvent,
    NewEvent,
    Pending,
    Rejected,
    ResetReason,
    State,
    SyncClient,
)
from tidings.client.database import Database
from tidings.client.errors import (
    ClientClosed,
    ClientStopped,
    DraftQueueFull,
    InvalidDraft,
    StoreBusy,
    StoreMismatch,
    StoreUnusable,
)
from tidings.core.errors import SettingsError
from tidings.testing import VirtualClock
from tidings.wire.sync_frames import Heartbeat, Limits, SubmitItem, Sync

T = TypeVar("T")


class World:
    """A server, a network and a clock; makes clients."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.server = ModelServer()
        self.network = Network(self.server)

    def client(self, name: str = "ana", **details: Any) -> SyncClient[list[int]]:
        given: dict[str, Any] = {
            "token": f"token of {name}",
            "client_id": name,
            "store": memory_store(),
            "partitions": ["P1"],
            "view": numbers(),
            "settings": SETTINGS,
            "connector": self.network,
            "clock": self.clock,
            "rng": random.Random(7),
        }
        return SyncClient("ws://server/sync", **{**given, **details})

    async def run(self, awaitable: Awaitable[T]) -> T:
        return await self.clock.run_until(awaitable, seconds_max=600)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Let time pass until something holds."""
        for _ in range(600):
            if is_so():
                return
            await self.clock.advance(0.25)
        raise AssertionError("it never came to hold")


@pytest.fixture
def world() -> World:
    return World()


async def note(client: SyncClient[list[int]], n: int, partition: str = "P1", **details: Any) -> Any:
    return await client.submit([partition], "noted", {"n": n}, **details)


async def ids_of(client: SyncClient[list[int]]) -> list[int | None]:
    return [event.committed_id async for event in client.events()]


# Verdicts


async def test_a_submitted_event_is_committed(world: World) -> None:
    """The draft is in the view at once, and its verdict names its place."""
    async with world.client() as client:
        draft = await note(client, 5)
        assert client.view == [5]
        assert draft.verdict == Pending()

        verdict = await world.run(draft.settled())

        assert verdict == Committed(1)
        assert client.view == client.confirmed_view == [5]
        assert client.status.pending_count == 0


@pytest.mark.req("SC02")
async def test_a_rejected_draft_leaves_the_view_and_is_kept_in_quarantine(world: World) -> None:
    """The verdict says why, the view forgets the draft, and quarantine has it whole."""
    wrong = [ItemError(field="event.payload.n", message="too large")]
    world.server.reject = lambda item: ("validation_failed", wrong) if b"99" in bytes(item.event) else None
    async with world.client() as client:
        changes = client.changes()
        bad = await note(client, 99)

        verdict = await world.run(bad.settled())

        assert verdict == Rejected("validation_failed", tuple(wrong))
        assert client.view == []
        (kept,) = await client.quarantine()
        assert (kept.event.id, kept.event.payload, kept.verdict) == (bad.id, {"n": 99}, verdict)
        change = await world.run(anext(changes))
        assert isinstance(change, DraftRejected)
        assert change.event.id == bad.id


async def test_one_bad_draft_blocks_nobody(world: World) -> None:
    """A draft that the server cannot even read is found out; the others of its batch are committed, in order."""
    world.server.refuse_batch = lambda item: b'"n":3' in bytes(item.event)
    async with world.client() as client:
        drafts = await client.submit_many([NewEvent(["P1"], "noted", {"n": n}) for n in range(6)])

        verdicts = [await world.run(draft.settled()) for draft in drafts]

        assert [type(verdict) for verdict in verdicts].count(Committed) == 5
        assert isinstance(verdicts[3], Rejected)
        assert verdicts[3].code == "bad_request"
        assert client.view == [0, 1, 2, 4, 5]


async def test_a_released_draft_is_sent_again(world: World) -> None:
    """What was rejected can be sent again as it is, once the server would take it."""
    world.server.reject = lambda item: ("forbidden", [])
    async with world.client() as client:
        draft = await note(client, 1)
        assert await world.run(draft.settled()) == Rejected("forbidden")
        world.server.reject = lambda item: None

        again = await client.release(draft.id)
        assert again is not None
        assert again.id == draft.id
        assert await world.run(draft.settled()) == Committed(1)
        assert await client.quarantine() == []
        assert await client.release(draft.id) is None


async def test_a_discarded_draft_is_gone(world: World) -> None:
    """Discarding empties the quarantine of it, once."""
    world.server.reject = lambda item: ("forbidden", [])
    async with world.client() as client:
        draft = await note(client, 1)
        await world.run(draft.settled())

        assert await client.discard(draft.id)
        assert not await client.discard(draft.id)
        assert client.status.quarantined_count == 0


async def test_waiting_for_a_verdict_can_have_an_end(world: World) -> None:
    """When the time is up the answer is Pending, which is neither of the other two."""
    world.network.is_up = False
    async with world.client() as client:
        draft = await note(client, 1)

        assert await world.run(draft.settled(timeout_s=3.0)) == Pending()


async def test_closing_the_client_ends_the_wait(world: World) -> None:
    """Whoever waits for a verdict hears Pending when the client closes; the draft stays in the store."""
    world.network.is_up = False
    async with world.client() as client:
        draft = await note(client, 1)
        waiting = asyncio.create_task(draft.settled())
        await asyncio.sleep(0)

    assert await waiting == Pending()


@pytest.mark.req("S27", "SC13")
async def test_a_lost_answer_is_resolved_by_sync_or_by_sending_again(world: World) -> None:
    """The server committed, the answer was lost: the client learns the same id, and the event exists once."""
    world.server.lose_results = 1
    async with world.client() as client:
        draft = await note(client, 1)

        verdict = await world.run(draft.settled())

        assert verdict == Committed(1, was_duplicate=True)
        assert len(world.server.events) == 1
        assert client.view == [1]


@pytest.mark.req("SC13")
async def test_a_lost_answer_outside_the_partitions_followed_is_resolved_by_sending_again(world: World) -> None:
    """No page can bring the event back; the same id is sent again and gets the first verdict."""
    world.server.lose_results = 1
    async with world.client() as client:
        draft = await note(client, 1, partition="elsewhere")

        verdict = await world.run(draft.settled())

        assert verdict == Committed(1, was_duplicate=True)
        assert world.server.sent_drafts() == [[draft.id], [draft.id]]
        assert len(world.server.events) == 1


async def test_a_lost_request_is_sent_again(world: World) -> None:
    """The line broke before the server saw the batch; the next connection sends it."""
    world.server.lose_requests = 2
    async with world.client() as client:
        draft = await note(client, 1)

        assert await world.run(draft.settled()) == Committed(1)


async def test_the_time_to_wait_for_a_verdict_is_the_whole_time(world: World) -> None:
    """However often the draft is sent meanwhile: each try used to begin the time anew."""
    world.server.rate_limits = 1000
    async with world.client() as client:
        draft = await note(client, 1)
        begun = world.clock.monotonic()

        assert isinstance(await world.run(draft.settled(timeout_s=20.0)), Pending)

        assert world.clock.monotonic() - begun == pytest.approx(20.0)
        assert draft.verdict.attempts > 1
        assert await draft.settled(timeout_s=0.0) == draft.verdict


async def test_a_rate_limited_batch_is_committed_in_the_end(world: World) -> None:
    """The batch waits as long as the server asked, on the same connection, and then gets through."""
    world.server.rate_limits = 3
    async with world.client() as client:
        draft = await note(client, 1)

        assert await world.run(draft.settled()) == Committed(1)
        assert world.clock.monotonic() >= 6.0
        assert world.network.attempts == 1


async def test_the_same_event_again_is_the_same_draft(world: World) -> None:
    """Submitting twice with one id changes nothing, before the verdict and after."""
    async with world.client() as client:
        first = await note(client, 1, id="my-own-id")
        assert await note(client, 1, id="my-own-id") is first
        await world.run(first.settled())

        again = await note(client, 1, id="my-own-id")

        assert again.verdict == Committed(1)
        assert client.view == [1]
        assert len(world.server.events) == 1


async def test_other_content_with_a_known_id_is_refused_here(world: World) -> None:
    """An id stands for one event: the second one is not even stored."""
    async with world.client() as client:
        await note(client, 1, id="my-own-id")

        with pytest.raises(InvalidDraft, match="belongs to another event"):
            await note(client, 2, id="my-own-id")
        assert client.view == [1]


# What never leaves


@pytest.mark.req("SC08")
@pytest.mark.parametrize(
    ("partitions", "kind", "payload", "field"),
    [
        ([], "noted", {}, "partitions"),
        (["P" * 129], "noted", {}, "partitions"),
        ([f"P{n}" for n in range(65)], "noted", {}, "partitions"),
        (["P1"], "", {}, "event.type"),
        (["P1"], "init", {}, "event.type"),
        (["P1"], "noted", {"n": float("nan")}, "event.payload"),
        (["P1"], "noted", {"n": 2**60}, "event.payload"),
        (["P1"], "noted", {"n": {1, 2}}, "event.payload"),
        (["P1"], "noted", {"n": "\ud800"}, "event.payload"),
        (["P1"], "noted", {"n": "x" * (1 << 20)}, "event.payload"),
    ],
)
async def test_what_no_server_takes_is_neither_stored_nor_sent(
    world: World, partitions: list[str], kind: str, payload: dict[str, Any], field: str
) -> None:
    """An event that breaks the protocol's own rules raises an error that names the field, and leaves no trace."""
    async with world.client() as client:
        with pytest.raises(InvalidDraft) as caught:
            await client.submit(partitions, kind, payload)

        assert [error.field for error in caught.value.errors] == [field]
        await world.run(client.caught_up())
        assert client.status.pending_count == 0
        assert world.server.sent_drafts() == []


@pytest.mark.req("SC08")
async def test_a_users_own_check_stops_a_draft(world: World) -> None:
    """What the model's own rules refuse is neither stored nor sent; a batch with it is refused whole."""

    def positive(event: LocalEvent) -> list[ItemError]:
        return [] if event.payload["n"] > 0 else [ItemError(field="event.payload.n", message="must be positive")]

    async with world.client(validate=positive) as client:
        with pytest.raises(InvalidDraft, match=r"event\.payload\.n: must be positive"):
            await client.submit_many([NewEvent(["P1"], "noted", {"n": 1}), NewEvent(["P1"], "noted", {"n": -1})])

        assert client.view == []
        assert await world.run((await note(client, 2)).settled()) == Committed(1)


@pytest.mark.bound("sync.settings.ClientSettings.drafts_count_max")
@crossed
async def test_the_local_queue_is_bounded(world: World, beyond: Beyond) -> None:
    """A full queue refuses more drafts with an error of its own, keeps what it has, and takes more when some went."""
    world.network.is_up = False
    async with world.client(settings=ClientSettings(drafts_count_max=2)) as client:
        await note(client, 1)
        await note(client, 2)
        for _ in range(2, beyond(2)):
            with pytest.raises(DraftQueueFull) as caught:
                await note(client, 3)
            assert caught.value.waiting == 2

        assert client.view == [1, 2]
        world.network.is_up = True
        await world.run(client.drained())
        await note(client, 3)
        assert client.view == [1, 2, 3]


@pytest.mark.bound("sync.settings.ClientSettings.drafts_bytes_max")
@crossed
async def test_the_local_queue_is_bounded_in_bytes(world: World, beyond: Beyond) -> None:
    """Few but large drafts fill the queue too: a draft that fills it to the byte is taken, and none beyond."""
    world.network.is_up = False
    async with world.client(settings=ClientSettings(drafts_bytes_max=1024)) as client:
        size = 1024
        while True:
            try:
                await client.submit(["P1"], "noted", {"n": "x" * size})
                break
            except DraftQueueFull:
                size -= 1
        assert size > 512
    async with world.client("bob", settings=ClientSettings(drafts_bytes_max=1024)) as client:
        with pytest.raises(DraftQueueFull, match="1024 bytes"):
            await client.submit(["P1"], "noted", {"n": "x" * (size + beyond(1024) - 1024)})
        assert client.status.pending_count == 0


async def test_quarantine_counts_as_part_of_the_queue(world: World) -> None:
    """Rejected drafts take up room until somebody discards them, so they cannot pile up unseen."""
    world.server.reject = lambda item: ("forbidden", [])
    async with world.client(settings=ClientSettings(drafts_count_max=1)) as client:
        draft = await note(client, 1)
        await world.run(draft.settled())
        with pytest.raises(DraftQueueFull) as caught:
            await note(client, 2)

        assert caught.value.quarantined == 1
        await client.discard(draft.id)
        await note(client, 2)


# Offline and back


async def test_two_clients_that_were_offline_meet(world: World) -> None:
    """Both work without a connection, and end with the same view, in the server's order."""
    world.network.is_up = False
    async with world.client("ana") as ana, world.client("ben") as ben:
        for n in (1, 2):
            await note(ana, n)
            await note(ben, 10 * n)
        assert (ana.view, ben.view) == ([1, 2], [10, 20])

        world.network.is_up = True
        await world.run(asyncio.gather(ana.drained(), ben.drained()))
        await world.until(lambda: len(ana.view) == len(ben.view) == 4)

        assert ana.view == ben.view
        assert sorted(ana.view) == [1, 2, 10, 20]


async def test_it_comes_back_with_growing_random_pauses(world: World) -> None:
    """While the server is away attempts become rarer, at most ``retry_s_max`` apart; the pauses are not the same."""
    world.network.is_up = False
    async with world.client() as client:
        await world.clock.advance(100)
        attempts = world.network.attempts

        assert 20 <= attempts <= 120
        assert client.status.state is State.WAITING
        assert client.status.attempts == attempts
        assert "network is down" in (client.status.problem or "")
        world.network.is_up = True
        await world.run(client.caught_up())
        assert client.status.problem is None
        assert client.status.attempts == 0


async def test_pauses_differ_from_client_to_client(world: World) -> None:
    """Clients that lost their server together do not come back together."""
    world.network.is_up = False
    moments: dict[str, list[float]] = {"a": [], "b": []}
    for seed, name in enumerate(moments):
        network = Network(world.server)
        network.is_up = False
        async with world.client(name, connector=network, rng=random.Random(seed)) as client:
            seen = 0
            for _ in range(40):
                await world.clock.advance(0.05)
                if client.status.attempts != seen:
                    seen = client.status.attempts
                    moments[name].append(world.clock.monotonic())

    assert [round(b - a, 2) for a, b in zip(moments["a"], moments["a"][1:], strict=False)] != [
        round(b - a, 2) for a, b in zip(moments["b"], moments["b"][1:], strict=False)
    ]


async def test_it_need_not_wait_when_the_network_is_known_to_be_back(world: World) -> None:
    """``connect_now`` ends the pause."""
    world.network.is_up = False
    async with world.client(settings=ClientSettings(retry_s_min=3000, retry_s_max=3000)) as client:
        await world.clock.advance(1)
        world.network.is_up = True

        client.connect_now()
        await world.run(client.caught_up())

        assert world.clock.monotonic() < 100


async def test_a_connection_that_is_never_answered_is_given_up(world: World) -> None:
    """A server that accepts and says nothing is left, and tried again."""
    world.server.is_silent = True
    async with world.client() as client:
        await world.clock.advance(40)
        world.server.is_silent = False

        await world.run(client.caught_up())

        assert world.network.attempts >= 2


async def test_an_idle_client_keeps_its_connection_with_heartbeats(world: World) -> None:
    """Minutes without events do not cost the connection."""
    async with world.client() as client:
        await world.run(client.caught_up())
        await world.clock.advance(300)

        assert world.network.attempts == 1
        assert sum(isinstance(request, Heartbeat) for request in world.server.requests) == 30


async def test_an_expired_token_is_replaced_by_a_fresh_one(world: World) -> None:
    """``auth_failed`` asks the callable for another token at once, and work goes on."""
    world.server.tokens = {"second"}
    tokens = iter(["first", "second"])

    async def token() -> str:
        return next(tokens)

    async with world.client(token=token) as client:
        draft = await note(client, 1)

        assert await world.run(draft.settled()) == Committed(1)
        assert [hello.token for hello in world.server.connects] == ["first", "second"]
        assert world.clock.monotonic() < 1


async def test_a_fixed_token_that_is_refused_stops_the_client(world: World) -> None:
    """Without another token there is no point in trying: the client stops, says so, and keeps the drafts."""
    world.server.tokens = set()
    async with world.client() as client:
        await note(client, 1)

        with pytest.raises(ClientStopped) as caught:
            await world.run(client.drained())

        assert caught.value.reason == "auth_failed"
        assert client.status.state is State.STOPPED
        assert client.view == [1]


async def test_a_token_source_that_fails_is_asked_again(world: World) -> None:
    """A token service that cannot be reached is like a server that cannot be reached."""
    answers: list[Exception | str] = [OSError("no route"), OSError("no route"), "good"]

    def token() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with world.client(token=token) as client:
        await world.run(client.caught_up())

        assert answers == []


async def test_a_replaced_client_stays_away(world: World) -> None:
    """Another client with the same id took over: coming back would start an endless fight."""
    async with world.client() as client:
        await world.run(client.caught_up())
        world.server.cut(4001)

        await world.until(lambda: client.status.state is State.STOPPED)

        with pytest.raises(ClientStopped, match="another client connected"):
            await client.caught_up()
        await world.clock.advance(100)
        assert world.network.attempts == 1


# Following


@pytest.mark.req("S15", "S22", "SC05")
async def test_a_paged_catch_up_while_events_are_committed(world: World) -> None:
    """Events committed during the catch-up are in the view after it, in order, and nothing is missing or twice."""
    for _ in range(120):
        world.server.commit()

    def commit_one(request: Sync) -> None:
        world.server.commit()

    world.server.before_page = commit_one
    async with world.client() as client:
        await world.run(client.caught_up())
        await world.until(lambda: len(client.view) == len(world.server.events))

        assert client.view == list(range(1, len(world.server.events) + 1))
        assert await ids_of(client) == client.view
        assert sum(isinstance(request, Sync) for request in world.server.requests) >= 3


@pytest.mark.req("SC06")
async def test_broadcasts_in_the_wrong_order_end_in_the_right_one(world: World) -> None:
    """Whatever order they arrive in, the view is in the server's order."""
    async with world.client() as client:
        await world.run(client.caught_up())
        world.server.held = []
        for _ in range(5):
            world.server.commit()
        world.server.tell_held(lambda held: held[::-1])

        await world.until(lambda: len(client.view) == 5)

        assert client.view == [1, 2, 3, 4, 5]


@pytest.mark.req("SC01", "SC10")
async def test_the_sender_hears_the_result_and_the_peer_the_broadcast(world: World) -> None:
    """One event, one row on each side."""
    async with world.client("ana") as ana, world.client("ben") as ben:
        await world.run(asyncio.gather(ana.caught_up(), ben.caught_up()))
        at_ana, at_ben = ana.changes(), ben.changes()

        await world.run((await note(ana, 1)).settled())
        told = [await world.run(anext(each)) for each in (at_ana, at_ben)]

        assert all(isinstance(change, EventCommitted) for change in told)
        assert [change.is_own for change in told if isinstance(change, EventCommitted)] == [True, False]
        assert await ids_of(ana) == await ids_of(ben) == [1]


@pytest.mark.req("SC12")
async def test_following_one_more_partition_brings_its_history(world: World) -> None:
    """Older events of the new partition are folded in their places, and both keep arriving."""
    for n in range(6):
        world.server.commit(partitions=["P1"] if n % 2 else ["P2"])
    async with world.client() as client:
        await world.run(client.caught_up())
        assert client.view == [2, 4, 6]

        await client.follow(["P1", "P2"])
        await world.until(lambda: len(client.view) == 6)
        world.server.commit(partitions=["P2"])
        world.server.commit(partitions=["P1"])
        await world.until(lambda: len(client.view) == 8)

        assert client.view == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_following_less_shows_less(world: World) -> None:
    """A partition that is no longer followed leaves the view, and its events are no longer sent."""
    world.server.commit(partitions=["P1"])
    world.server.commit(partitions=["P2"])
    async with world.client(partitions=["P1", "P2"]) as client:
        await world.run(client.caught_up())

        await client.follow(["P2"])
        await world.until(lambda: world.server.conversations[0].subscriptions == {"P2"})
        world.server.commit(partitions=["P1"])
        world.server.commit(partitions=["P2"])
        await world.until(lambda: len(client.view) == 2)

        assert client.view == [2, 4]


@pytest.mark.req("S13")
async def test_a_partition_that_is_forbidden_is_named_and_the_rest_works(world: World) -> None:
    """The status names what this client may not see; everything else is synced and live."""
    world.server.forbidden = {"P2"}
    world.server.commit(partitions=["P1"])
    async with world.client(partitions=["P1", "P2", "P3"]) as client:
        await world.run(client.caught_up())
        world.server.commit(partitions=["P3"])
        await world.until(lambda: len(client.view) == 2)

        assert client.status.refused_partitions == {"P2"}
        assert client.view == [1, 2]


async def test_a_refresh_moves_the_cursor_past_what_came_live(world: World) -> None:
    """After enough broadcasts a page moves the stored cursor, so that the next connection repeats little."""
    async with world.client(settings=ClientSettings(refresh_events=10)) as client:
        await world.run(client.caught_up())
        for _ in range(25):
            world.server.commit()
        await world.until(lambda: len(client.view) == 25)
        world.server.cut()
        await world.until(lambda: world.network.attempts == 2)
        await world.run(client.caught_up())

        last = [request for request in world.server.requests if isinstance(request, Sync)][-1]
        assert last.since_committed_id >= 10
        assert client.view == list(range(1, 26))


@pytest.mark.req("S24")
async def test_a_server_that_lost_its_history_is_read_from_the_beginning(world: World) -> None:
    """The cursor is ahead of the server: everything is read again, and what the server lacks is kept as orphans."""
    async with world.client() as client:
        for n in range(5):
            await note(client, n, id=f"id-{n}")
        await world.run(client.drained())
        world.server.commit()
        await world.until(lambda: len(client.view) == 6)
        world.server.cut()
        await world.until(lambda: world.network.attempts == 2)
        await world.run(client.caught_up())
        changes = client.changes()

        world.server.replace_history()
        world.server.commit(SubmitItem(id="id-3", partitions=["P1"], event=body("noted", {"n": 3})))
        world.server.cut()
        reset = await world.run(anext(changes))
        await world.run(client.caught_up())

        assert reset == HistoryReset(ResetReason.FUTURE_CURSOR)
        assert client.view == [3]
        assert [event.payload["n"] for event in await client.orphans()] == [0, 1, 2, 4, 6]
        assert client.status.orphan_count == 5
        await note(client, 0, id="id-0")
        await world.run(client.drained())
        assert client.view == [3, 0]
        assert client.status.orphan_count == 4


async def test_another_history_is_noticed_although_the_server_is_ahead(world: World) -> None:
    """The server has more events than the cursor, but others: the first contradiction starts over."""
    async with world.client() as client:
        await world.run(client.caught_up())
        for _ in range(3):
            world.server.commit()
        await world.until(lambda: client.view == [1, 2, 3])
        changes = client.changes()

        world.server.cut()
        world.server.replace_history()
        for n in range(10):
            world.server.commit(SubmitItem(id=f"new-{n}", partitions=["P1"], event=body("noted", {"n": 100 + n})))

        assert await world.run(anext(changes)) == HistoryReset(ResetReason.HISTORY_REPLACED)
        await world.run(client.caught_up())
        assert client.view == list(range(100, 110))
        assert [event.payload["n"] for event in await client.orphans()] == [1, 2, 3]


@pytest.mark.req("SC18")
async def test_a_new_model_version_has_everything_read_again(world: World) -> None:
    """The client compares versions at connecting, and reads the whole history again under the new one."""
    async with world.client() as client:
        for _ in range(3):
            world.server.commit()
        await world.run(client.caught_up())
        changes = client.changes()
        world.server.model_version = 2
        world.server.cut()

        assert await world.run(anext(changes)) == HistoryReset(ResetReason.MODEL_CHANGED)
        await world.run(client.caught_up())

        assert client.view == [1, 2, 3]
        syncs = [request for request in world.server.requests if isinstance(request, Sync)]
        assert syncs[-1].since_committed_id == 0


@pytest.mark.bound("sync.settings.ClientSettings.changes_count_max")
@crossed
async def test_a_slow_listener_is_told_what_it_missed(world: World, beyond: Beyond) -> None:
    """The oldest changes go when a listener does not keep up, and their number comes in their place."""
    async with world.client(settings=ClientSettings(changes_count_max=3)) as client:
        await world.run(client.caught_up())
        changes = client.changes()
        count = beyond(3)
        for _ in range(count):
            world.server.commit()
        await world.until(lambda: len(client.view) == count)

        first = await anext(changes)
        rest = [await anext(changes) for _ in range(3)]

        assert first == ChangesMissed(count - 3)
        assert [change.event.committed_id for change in rest if isinstance(change, EventCommitted)] == [
            count - 2,
            count - 1,
            count,
        ]


async def test_listening_ends_with_the_client(world: World) -> None:
    """The iterator stops when the client closes."""
    async with world.client() as client:
        changes = client.changes()
        await note(client, 1)
        await world.run(client.drained())

    assert [type(change) async for change in changes] == [EventCommitted]


async def test_events_can_be_read_by_place_and_partition(world: World) -> None:
    """Reading takes bounds and partitions, and crosses pages."""
    for n in range(1200):
        world.server.commit(partitions=["P1"] if n % 3 else ["P1", "P2"])
    async with world.client(partitions=["P1", "P2"], settings=ClientSettings(page_events=1000)) as client:
        await world.run(client.caught_up())

        everything = [event.committed_id async for event in client.events()]
        some = [event.committed_id async for event in client.events(since=3, until=10, partitions=["P2"])]

        assert everything == list(range(1, 1201))
        assert some == [4, 7, 10]


# Restarts


async def test_drafts_and_events_survive_a_restart(world: World, tmp_path: Path) -> None:
    """A new client on the same store shows the same view, and sends what the old one had not."""
    path = tmp_path / "ana.db"
    world.server.commit()
    async with world.client(store=ClientStore(path, is_inline=True)) as client:
        await world.run(client.caught_up())
        world.network.go_down()
        await world.until(lambda: client.status.state is State.WAITING)
        draft = await note(client, 7)

    async with world.client(store=ClientStore(path, is_inline=True)) as client:
        assert client.view == [1, 7]
        found = await client.draft(draft.id)
        assert found is not None
        assert found.verdict == Pending()
        assert await client.draft("unknown") is None
        world.network.is_up = True
        client.connect_now()
        assert await world.run(found.settled()) == Committed(2)

    async with world.client(store=ClientStore(path, is_inline=True)) as client:
        found = await client.draft(draft.id)
        assert found is not None
        assert found.verdict == Committed(2)
        assert client.view == [1, 7]


@pytest.mark.req("S18")
async def test_a_restart_goes_on_from_the_stored_cursor(world: World, tmp_path: Path) -> None:
    """What is stored is not asked for again."""
    for _ in range(10):
        world.server.commit()
    for _ in range(2):
        async with world.client(store=ClientStore(tmp_path / "ana.db", is_inline=True)) as client:
            await world.run(client.caught_up())

    assert [request.since_committed_id for request in world.server.requests if isinstance(request, Sync)] == [0, 10]


@pytest.mark.req("SC07")
async def test_a_snapshot_and_what_came_after_make_the_view(world: World, tmp_path: Path) -> None:
    """After pruning, the view comes from the snapshot, later events and drafts, and is what a full replay gives."""
    path = tmp_path / "ana.db"
    async with world.client(store=ClientStore(path, is_inline=True)) as client:
        for _ in range(500):
            world.server.commit()
        await world.run(client.caught_up())
        assert await client.prune() == 500
        for _ in range(5):
            world.server.commit()
        await world.until(lambda: len(client.view) == 505)
        world.network.go_down()
        await note(client, 1000)

    async with world.client(store=ClientStore(path, is_inline=True)) as client:
        assert [event.committed_id async for event in client.events()] == [501, 502, 503, 504, 505]
        assert client.view == [*range(1, 506), 1000]


@pytest.mark.req("SC07")
async def test_an_unusable_snapshot_means_a_full_replay(world: World, tmp_path: Path) -> None:
    """A snapshot of another version of the view is not used: what was pruned is fetched again, and the view is whole."""
    path = tmp_path / "ana.db"
    for _ in range(20):
        world.server.commit()
    async with world.client(store=ClientStore(path, is_inline=True)) as client:
        await world.run(client.caught_up())
        await client.prune()

    changed = numbers()
    changed.version = "2"
    async with world.client(store=ClientStore(path, is_inline=True), view=changed) as client:
        await world.run(client.caught_up())

        assert client.view == list(range(1, 21))


async def test_history_below_a_pruned_view_is_fetched_again(world: World, tmp_path: Path) -> None:
    """Following another partition after pruning brings back everything that the view needs."""
    for n in range(20):
        world.server.commit(partitions=["P1"] if n % 2 else ["P2"])
    async with world.client(store=ClientStore(tmp_path / "ana.db", is_inline=True)) as client:
        await world.run(client.caught_up())
        assert await client.prune() == 10

        await client.follow(["P1", "P2"])
        await world.until(lambda: len(client.view) == 20)

        assert client.view == list(range(1, 21))


async def test_a_store_has_one_client_at_a_time(world: World, tmp_path: Path) -> None:
    """A second client on the same store is refused, also within one process."""
    path = tmp_path / "ana.db"
    async with world.client(store=path):
        with pytest.raises(StoreBusy):
            async with world.client(store=path):
                pass


async def test_a_store_belongs_to_one_client_id(world: World, tmp_path: Path) -> None:
    """Drafts of one client are never sent in the name of another."""
    path = tmp_path / "ana.db"
    async with world.client("ana", store=path):
        pass

    with pytest.raises(StoreMismatch, match="ana"):
        async with world.client("ben", store=path):
            pass


@pytest.mark.parametrize(
    "content", [b"this is no database, whatever its name says" * 50, b"SQLite format 3\0" + b"\0" * 500]
)
async def test_a_file_that_is_no_store_is_left_alone(world: World, tmp_path: Path, content: bytes) -> None:
    """Another file, or a damaged one, is refused by its path and stays as it is."""
    path = tmp_path / "letter.txt"
    path.write_bytes(content)

    with pytest.raises(StoreUnusable, match=r"letter\.txt"):
        async with world.client(store=path):
            pass

    assert path.read_bytes() == content


async def test_a_place_that_cannot_be_written_is_refused(world: World, tmp_path: Path) -> None:
    """A store in a folder that is not there is refused, with its path."""
    with pytest.raises(StoreUnusable, match="nowhere"):
        async with world.client(store=tmp_path / "nowhere" / "ana.db"):
            pass


# The client itself


async def test_a_closed_client_does_nothing(world: World) -> None:
    """Outside its context the client refuses to work."""
    client = world.client()
    with pytest.raises(ClientClosed):
        await note(client, 1)
    async with client:
        pass

    with pytest.raises(ClientClosed):
        await note(client, 1)
    assert client.status.state is State.CLOSED


async def test_settings_that_do_not_fit_are_refused(world: World) -> None:
    """A value out of its range, or two that contradict each other, are named before anything is opened."""
    with pytest.raises(SettingsError, match="silence_s_max"):
        world.client(settings=ClientSettings(heartbeat_s=30, silence_s_max=20))
    with pytest.raises(SettingsError, match="page_events"):
        world.client(settings=ClientSettings(page_events=0))
    with pytest.raises(SettingsError, match="retry_s_max"):
        world.client(settings=ClientSettings(retry_s_min=5, retry_s_max=1))


async def test_a_reducer_that_fails_is_heard_of(world: World) -> None:
    """An error of the user's reducer comes out where the view is read; what is stored is safe."""
    async with world.client() as client:
        await client.submit(["P1"], "noted", {"other": 1})

        with pytest.raises(KeyError):
            _ = client.view


async def test_a_reducer_that_fails_while_folding_stops_the_client_loudly(world: World) -> None:
    """The event is stored, the client stops and says so, and leaving the client raises the reducer's own error."""
    client = await world.client().__aenter__()
    await world.run(client.caught_up())
    world.server.commit(payload={"other": 1})
    world.server.cut()
    await world.until(lambda: client.status.state is State.STOPPED)
    with pytest.raises(ClientStopped, match="its log says why"):
        await client.caught_up()
    assert await ids_of(client) == [1]

    with pytest.raises(KeyError):
        await client.__aexit__(None, None, None)


async def test_a_client_is_entered_once(world: World) -> None:
    """Coming back takes another client on the same store."""
    client = world.client()
    async with client:
        pass

    with pytest.raises(ClientClosed):
        async with client:
            pass


async def test_pruning_goes_by_what_was_saved(world: World, tmp_path: Path) -> None:
    """While a snapshot is being saved the view moves on; what is in neither snapshot nor store is not pruned."""
    path = tmp_path / "ana.db"
    store = SlowStore(path, is_inline=True)
    async with world.client(store=store, settings=ClientSettings(refresh_events=1)) as client:
        world.server.commit()
        await world.run(client.view_when(lambda view: view == [1]))
        await world.run(client.caught_up())
        pruning = asyncio.create_task(client.prune())
        await world.until(lambda: store.is_saving)
        for _ in range(3):
            world.server.commit()
        await world.until(lambda: len(client.view) == 4)
        store.may_go_on.set()
        await pruning
        killed = tmp_path / "killed.db"
        shutil.copyfile(path, killed)
        shutil.copyfile(f"{path}-wal", f"{killed}-wal")

    async with world.client(store=ClientStore(killed, is_inline=True)) as client:
        assert client.view == [1, 2, 3, 4]


class SlowStore(ClientStore):
    """A store whose disk is slow to say that a snapshot is saved."""

    def __init__(self, path: Path, *, is_inline: bool) -> None:
        super().__init__(path, is_inline=is_inline)
        self.is_saving = False
        self.may_go_on = asyncio.Event()

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = await super().call(method, *args, **kwargs)
        if method is Database.save_snapshot and not self.is_saving:
            self.is_saving = True
            await self.may_go_on.wait()
        return result


async def test_batches_respect_the_servers_limits(world: World) -> None:
    """Many drafts go out in as many batches as the server's size asks for, each id once."""
    world.server.limits = Limits(max_batch_size=7)
    async with world.client() as client:
        drafts = await client.submit_many([NewEvent(["P1"], "noted", {"n": n}) for n in range(20)])
        await world.run(client.drained())

        batches = world.server.sent_drafts()
        assert [len(batch) for batch in batches] == [7, 7, 6]
        assert [id for batch in batches for id in batch] == [draft.id for draft in drafts]


async def test_a_fact_is_an_event_of_the_canonical_profile(world: World) -> None:
    """``submit_fact`` wraps schema and data as that profile has them."""
    async with world.client(view=None) as client:
        await client.submit_fact(["P1"], "list.item", {"text": "milk"}, meta={"by": "ana"})
        await world.run(client.drained())

    assert bytes(world.server.events[0].event) == bytes(
        body("event", {"schema": "list.item", "data": {"text": "milk"}, "meta": {"by": "ana"}})
    )


async def test_an_event_that_turns_up_below_the_cursor_is_folded_in_its_place(world: World) -> None:
    """A server that shows an older event late does not get its order wrong here."""
    world.server.commit(payload={"n": 1})
    world.server.last_id = 4
    world.server.commit(payload={"n": 5})
    async with world.client() as client:
        await world.run(client.caught_up())
        assert client.view == [1, 5]

        world.server.last_id = 2
        world.server.commit(payload={"n": 3})
        await world.run(client.view_when(lambda view: len(view) == 3))

        assert client.view == [1, 3, 5]


async def test_history_can_be_bounded(world: World, tmp_path: Path) -> None:
    """With a bound, old events go when a snapshot covers them, and the view stays whole, also after a restart."""
    settings = ClientSettings(page_events=50, snapshot_events=50, history_events_max=20)
    for _ in range(500):
        world.server.commit()
    for _ in range(2):
        store = ClientStore(tmp_path / "ana.db", is_inline=True)
        async with world.client(store=store, settings=settings) as client:
            await world.run(client.caught_up())

            assert 20 <= len(await ids_of(client)) <= 120
            assert client.view == list(range(1, 501))
