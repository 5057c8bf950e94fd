"""The client's end of a connection: pages, broadcasts, submissions, errors and time, without any I/O."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec import Raw

from tests.beyond import Beyond, crossed
from tests.unit.client.support import SETTINGS, broadcast, committed, connected, error, frame, item, page, sent
from tidings.sync.client_effects import (
    AdoptSnapshot,
    CaughtUp,
    Delayed,
    Effect,
    End,
    Ended,
    GapFound,
    ItemCommitted,
    ItemRejected,
    ModelNoted,
    PartitionRefused,
    PartitionRestored,
    ResetHistory,
    ResetReason,
    StoreEvents,
    StorePage,
    StoreVerdicts,
)
from tidings.sync.client_planning import plan_cycles
from tidings.sync.client_session import ClientSession, Phase
from tidings.sync.settings import ClientSettings
from tidings.wire.sync_frames import (
    Connect,
    Disconnect,
    ErrorFrame,
    Heartbeat,
    HeartbeatAck,
    ItemError,
    ItemResult,
    Limits,
    StateSnapshot,
    SubmitEvents,
    SubmitResult,
    Sync,
    SyncResponse,
    VersionChanged,
    encode,
)


def session(cursors: dict[str, int] | None = None, **details: Any) -> ClientSession:
    """A session that has said hello."""
    made = ClientSession("me", {"P1": 0} if cursors is None else cursors, **{"settings": SETTINGS, **details})
    made.start("token", 0.0)
    return made


def live(
    cursors: dict[str, int] | None = None, last: int = 0, limits: Limits | None = None, **details: Any
) -> ClientSession:
    """A session that has caught up with a server that holds nothing for it."""
    made = session(cursors, **details)
    effects = made.received(connected(last, limits=limits), 0.0)
    while made.phase is Phase.SYNCING:
        asked = sent(effects)[0]
        assert isinstance(asked, Sync)
        answer = page(sync_to=last, next_since=asked.since_committed_id, partitions=asked.partitions)
        effects = made.received(answer, 0.0)
    return made


def stored(effects: list[Effect]) -> list[list[int]]:
    """The committed ids that each storing effect stores."""
    return [
        [event.committed_id for event in effect.events]
        for effect in effects
        if isinstance(effect, StorePage | StoreEvents)
    ]


def result(*items: ItemResult) -> bytes:
    return frame(SubmitResult(results=list(items)))


def accepted(id: str, committed_id: int) -> ItemResult:
    return ItemResult(id=id, status="committed", committed_id=committed_id, status_updated_at=7)


# Connecting


def test_it_introduces_itself_with_the_highest_cursor() -> None:
    """The first message carries token, client id, profiles and the last committed id that is known."""
    made = ClientSession("me", {"P1": 3, "P2": 9}, settings=SETTINGS)

    (hello,) = sent(made.start("secret", 0.0))

    assert hello == Connect(
        token="secret", client_id="me", last_committed_id=9, supported_profiles=["canonical", "compatibility"]
    )


def test_first_contact_asks_for_everything_and_subscribes() -> None:
    """After the answer it syncs from its cursor, with a page size within the server's range, and subscribes."""
    made = session({"P2": 0, "P1": 0})

    asked = sent(made.received(connected(), 0.0))

    assert asked == [
        Sync(partitions=["P1", "P2"], since_committed_id=0, subscription_partitions=["P1", "P2"], limit=50)
    ]


@pytest.mark.req("S32")
@pytest.mark.parametrize(("low", "high", "asked"), [(1, 10, 10), (80, 900, 80), (1, 1000, 50)])
def test_the_page_size_stays_within_the_advertised_range(low: int, high: int, asked: int) -> None:
    """The size asked for is the client's own, moved into the range that the server gave."""
    effects = session().received(connected(limits=Limits(sync_limit_min=low, sync_limit_max=high)), 0.0)

    (request,) = sent(effects)
    assert isinstance(request, Sync)
    assert request.limit == asked


def test_a_server_that_takes_it_for_another_client_is_left() -> None:
    """The answer must name this client; else the token is somebody else's."""
    (effect,) = session().received(connected(client_id="you"), 0.0)

    assert isinstance(effect, Ended)
    assert effect.end is End.AUTH_FAILED


def test_a_client_that_follows_nothing_may_submit_at_once() -> None:
    """Without partitions there is nothing to sync, and drafts can be sent."""
    made = session({})

    effects = made.received(connected(4), 0.0)

    assert effects == [CaughtUp(4)]
    assert made.can_submit


# Pages


@pytest.mark.req("S15", "S17", "S18")
def test_pages_are_stored_with_their_cursor_before_the_next_is_asked_for() -> None:
    """It asks for one page at a time until none is left, and each is stored with its cursor before the next request."""
    made = session({"P1": 120})
    made.received(connected(125), 0.0)

    first = made.received(page(121, 122, sync_to=125, more=True), 0.0)
    second = made.received(page(123, 124, sync_to=125, more=True), 0.0)
    last = made.received(page(125, sync_to=125), 0.0)

    assert first[0] == StorePage([committed(121), committed(122)], {"P1": 122})
    assert sent(first[1:]) == [Sync(partitions=["P1"], since_committed_id=122, limit=50)]
    assert second[0] == StorePage([committed(123), committed(124)], {"P1": 124})
    assert sent(second[1:]) == [Sync(partitions=["P1"], since_committed_id=124, limit=50)]
    assert last == [StorePage([committed(125)], {"P1": 125}), CaughtUp(125)]


def test_after_the_last_page_the_cursor_covers_the_whole_cycle() -> None:
    """A partition at rest is complete up to the cycle's end, not only up to its own last event."""
    made = session()
    made.received(connected(800), 0.0)

    effects = made.received(page(50, 350, sync_to=800), 0.0)

    assert effects[0] == StorePage([committed(50), committed(350)], {"P1": 800})


def test_cursors_far_apart_get_cycles_of_their_own() -> None:
    """A new partition's history is fetched for itself; those whose cursors are close share one cycle."""
    cycles = plan_cycles({"a": 5000, "b": 5900, "new": 0, "c": 6001}, 1000)

    assert [(cycle.since, cycle.partitions) for cycle in cycles] == [
        (0, ("new",)),
        (5000, ("a", "b")),
        (6001, ("c",)),
    ]


@pytest.mark.req("SC12")
def test_adding_a_partition_fetches_its_history_and_keeps_the_others() -> None:
    """The new partition is asked for from 0, with the union as subscription; then the rest goes on from its cursor."""
    made = live({"P1": 5000}, last=5000)

    (history,) = sent(made.follow({"P1": 5000, "P2": 0}, 0.0))
    effects = made.received(page(50, 120, sync_to=5000, partitions=["P2"], subscriptions=("P1", "P2")), 0.0)

    assert history == Sync(partitions=["P2"], since_committed_id=0, subscription_partitions=["P1", "P2"], limit=50)
    assert sent(effects) == [Sync(partitions=["P1"], since_committed_id=5000, limit=50)]
    assert made.received(page(sync_to=5000, next_since=5000, subscriptions=("P1", "P2")), 0.0)[-1] == CaughtUp(5000)


def test_a_page_that_does_not_move_on_ends_the_session() -> None:
    """A server that says there is more and repeats the cursor would be asked for ever."""
    made = session()
    made.received(connected(9), 0.0)

    (effect,) = made.received(page(sync_to=9, next_since=0, more=True), 0.0)

    assert isinstance(effect, Ended)
    assert effect.end is End.PROTOCOL


@pytest.mark.req("S24")
def test_a_cursor_ahead_of_the_server_starts_over() -> None:
    """If the server's last id is below the cursor, its history is another one: everything is fetched from 0."""
    made = session({"P1": 500})
    made.received(connected(100), 0.0)

    effects = made.received(page(sync_to=100, next_since=100), 0.0)

    assert effects[0] == ResetHistory(ResetReason.FUTURE_CURSOR)
    assert sent(effects) == [Sync(partitions=["P1"], since_committed_id=0, limit=50)]


def test_a_later_cursor_of_the_same_cycle_is_checked_too() -> None:
    """The lowest cursor of a shared cycle is within the server's history, another one is not."""
    made = session({"P1": 90, "P2": 500})
    made.received(connected(100), 0.0)

    effects = made.received(page(sync_to=100, next_since=90, partitions=["P1", "P2"]), 0.0)

    assert effects[0] == ResetHistory(ResetReason.FUTURE_CURSOR)


def test_pruned_history_is_told() -> None:
    """When the server says that it dropped events the client never had, that is reported with its bounds."""
    made = session({"P1": 10})
    made.received(connected(100), 0.0)

    effects = made.received(page(60, sync_to=100, pruned=50), 0.0)

    assert effects[0] == GapFound(("P1",), 10, 50)


def test_a_snapshot_is_asked_for_only_at_the_very_beginning() -> None:
    """A client that wants one asks when all that it follows is new, and not for one partition beside others."""
    new, grown, plain = (
        session({"P1": 0, "P2": 0}, wants_snapshot=True),
        session({"P1": 5000, "P2": 0}, wants_snapshot=True),
        session({"P1": 0}),
    )

    asked = [sent(each.received(connected(9000), 0.0))[0] for each in (new, grown, plain)]

    assert [each.want_snapshot for each in asked if isinstance(each, Sync)] == [True, False, False]


def test_a_snapshot_comes_before_the_page_it_is_in() -> None:
    """The server's state is adopted first, then the events after it are stored."""
    made = session(wants_snapshot=True)
    made.received(connected(9), 0.0)
    state = {"P1": Raw(b'{"a":1}')}
    answer = SyncResponse(
        partitions=["P1"],
        effective_subscriptions=["P1"],
        events=[committed(9)],
        next_since_committed_id=9,
        sync_to_committed_id=9,
        has_more=False,
        snapshot=StateSnapshot(committed_id=8, state=state),
    )

    effects = made.received(frame(answer), 0.0)

    assert isinstance(effects[0], AdoptSnapshot)
    assert (effects[0].committed_id, bytes(effects[0].state["P1"])) == (8, b'{"a":1}')
    assert stored(effects) == [[9]]


# Broadcasts during a cycle


@pytest.mark.req("S19", "S20")
def test_a_broadcast_within_the_range_is_stored_at_once() -> None:
    """Between two pages, a broadcast up to the cycle's end is stored as it comes, repeated or not."""
    made = session({"P1": 120})
    made.received(connected(125), 0.0)
    made.received(page(121, 122, sync_to=125, more=True), 0.0)

    assert stored(made.received(broadcast(124), 0.0)) == [[124]]
    assert stored(made.received(broadcast(122), 0.0)) == [[122]]


@pytest.mark.req("S21", "S22", "SC05")
def test_broadcasts_beyond_the_range_wait_and_then_come_in_order() -> None:
    """What is committed during a paged catch-up is stored after the last page, lowest id first."""
    made = session({"P1": 120})
    made.received(connected(125), 0.0)
    made.received(page(121, 122, sync_to=125, more=True), 0.0)

    assert made.received(broadcast(128), 0.0) == []
    assert made.received(broadcast(126), 0.0) == []
    assert stored(made.received(page(123, 124, sync_to=125, more=True), 0.0)) == [[123, 124]]
    effects = made.received(page(125, sync_to=125), 0.0)

    assert stored(effects) == [[125], [126, 128]]
    assert effects[0] == StorePage([committed(125)], {"P1": 125}), "what waited moves no cursor"


@pytest.mark.req("S20", "S21")
def test_before_the_first_page_all_broadcasts_wait() -> None:
    """The range is unknown until the first page; then those within it are stored and the others wait on."""
    made = session()
    made.received(connected(10), 0.0)

    assert made.received(broadcast(11), 0.0) == []
    assert made.received(broadcast(9), 0.0) == []
    effects = made.received(page(1, sync_to=10, more=True), 0.0)

    assert stored(effects) == [[1], [9]]
    assert stored(made.received(page(9, 10, sync_to=10), 0.0)) == [[9, 10], [11]]


@pytest.mark.req("S23")
@pytest.mark.bound("sync.settings.ClientSettings.buffer_events_max")
@crossed
def test_lost_broadcasts_are_fetched_by_another_cycle(beyond: Beyond) -> None:
    """When more wait than there is room for, they are dropped and the cycle is followed by one from the stored cursor."""
    made = session(settings=ClientSettings(page_events=50, buffer_events_max=3))
    made.received(connected(10), 0.0)
    for committed_id in range(11, 11 + beyond(3)):
        made.received(broadcast(committed_id), 0.0)

    effects = made.received(page(10, sync_to=10), 0.0)

    # Those that came after the drop wait again, in the room that it made.
    assert stored(effects)[0] == [10]
    assert sum(map(len, stored(effects)[1:])) <= 3
    assert all(11 not in ids for ids in stored(effects))
    assert not any(isinstance(effect, CaughtUp) for effect in effects)
    assert sent(effects) == [Sync(partitions=["P1"], since_committed_id=10, limit=50)]


@pytest.mark.req("S23", "S18")
def test_a_new_session_begins_at_the_stored_cursor() -> None:
    """Broadcasts that waited when a client died were in memory only; the next session asks from the stored cursor."""
    before = session({"P1": 120})
    before.received(connected(125), 0.0)
    before.received(page(121, 122, sync_to=125, more=True), 0.0)
    before.received(broadcast(130), 0.0)

    (asked,) = sent(session({"P1": 122}).received(connected(130), 0.0))

    assert isinstance(asked, Sync)
    assert asked.since_committed_id == 122


@pytest.mark.req("SC06")
def test_live_broadcasts_are_stored_in_whatever_order_they_come() -> None:
    """Two broadcasts in the wrong order are both stored, and neither moves a cursor."""
    made = live(last=128)

    assert stored(made.received(broadcast(130), 0.0)) == [[130]]
    assert stored(made.received(broadcast(129), 0.0)) == [[129]]


def test_many_live_events_are_followed_by_a_cycle_that_moves_the_cursor() -> None:
    """After ``refresh_events`` broadcasts the cursor is moved by a page, so that a reconnect does not repeat them all."""
    made = live(settings=ClientSettings(page_events=50, refresh_events=3))

    effects = list(itertools.chain.from_iterable(made.received(broadcast(each), 0.0) for each in (1, 2, 3)))

    assert sent(effects) == [Sync(partitions=["P1"], since_committed_id=0, limit=50)]


# Submitting


@pytest.mark.req("SC11")
def test_results_are_matched_by_id() -> None:
    """Verdicts belong to the drafts whose ids they name, in whatever order they come."""
    made = live()
    made.submit([item("a"), item("b")], 0.0)

    effects = made.received(result(accepted("b", 1), accepted("a", 2)), 0.0)

    assert effects == [StoreVerdicts([ItemCommitted("b", 1, 7, False), ItemCommitted("a", 2, 7, False)])]
    assert made.can_submit


def test_one_batch_at_a_time() -> None:
    """While a batch is under way nothing else may be sent."""
    made = live()

    (batch,) = sent(made.submit([item("a"), item("b")], 0.0))

    assert isinstance(batch, SubmitEvents)
    assert [each.id for each in batch.events] == ["a", "b"]
    assert not made.can_submit


@pytest.mark.parametrize("limits", [Limits(max_batch_size=2), Limits(max_in_flight_drafts=2)])
def test_a_batch_stays_within_the_servers_count(limits: Limits) -> None:
    """No more drafts are sent at once than the server takes."""
    (batch,) = sent(live(limits=limits).submit([item("a"), item("b"), item("c")], 0.0))

    assert isinstance(batch, SubmitEvents)
    assert [each.id for each in batch.events] == ["a", "b"]


@pytest.mark.req("S30")
def test_a_batch_stays_within_the_largest_message() -> None:
    """Drafts are sent as far as one message holds them; one that no message holds is rejected and blocks nobody."""
    made = live(limits=Limits(max_message_bytes=4096))

    effects = made.submit([item("huge", 5000), item("a", 1500), item("b", 1500), item("c", 1500)], 0.0)

    assert effects[0] == StoreVerdicts([ItemRejected("huge", "too_large", ())])
    (batch,) = sent(effects)
    assert isinstance(batch, SubmitEvents)
    assert [each.id for each in batch.events] == ["a", "b"]
    assert len(frame_of(batch)) <= 4096


def frame_of(batch: SubmitEvents) -> bytes:
    return encode(batch, msg_id="c1", timestamp=1_700_000_000_000)


def test_a_rejection_carries_reason_and_errors() -> None:
    """A rejected item is settled with its reason and what the server found wrong."""
    made = live()
    made.submit([item("a")], 0.0)
    wrong = ItemError(field="event.payload.n", message="is no number")

    effects = made.received(
        result(ItemResult(id="a", status="rejected", reason="validation_failed", errors=[wrong], status_updated_at=1)),
        0.0,
    )

    assert effects == [StoreVerdicts([ItemRejected("a", "validation_failed", (wrong,))])]


@pytest.mark.req("SC13")
def test_a_commit_from_before_the_submission_is_known_as_a_duplicate() -> None:
    """A committed id that the server had reached before the draft was sent shows that an earlier one got through."""
    made = live(last=410)
    made.submit([item("a")], 0.0)

    effects = made.received(result(accepted("a", 410)), 0.0)

    assert effects == [StoreVerdicts([ItemCommitted("a", 410, 7, True)])]


def test_a_refused_batch_is_halved_until_the_culprit_is_found() -> None:
    """One draft that the server cannot read is found by halving; all others get through."""
    made = live()
    waiting = [item(f"d{number}") for number in range(16)]
    settled: list[str] = []
    requests = 0
    while waiting:
        effects = made.submit(waiting, 0.0)
        requests += 1
        (batch,) = sent(effects)
        assert isinstance(batch, SubmitEvents)
        ids = [each.id for each in batch.events]
        if "d5" in ids:
            effects = made.received(error("bad_request"), 0.0)
        else:
            effects = made.received(result(*(accepted(each, 1 + int(each[1:])) for each in ids)), 0.0)
        for effect in effects:
            if isinstance(effect, StoreVerdicts):
                settled += [f"{each.id} {type(each).__name__}" for each in effect.verdicts]
        done = {each.split()[0] for each in settled}
        waiting = [each for each in waiting if each.id not in done]

    assert settled.count("d5 ItemRejected") == 1
    assert len(settled) == 16
    assert sum(each.endswith("ItemRejected") for each in settled) == 1
    assert requests <= 14


def test_a_result_that_decides_nothing_ends_the_session() -> None:
    """An answer about other drafts would otherwise be followed by the same batch at once, for ever."""
    made = live()
    made.submit([item("a")], 0.0)

    (effect,) = made.received(result(accepted("other", 1)), 0.0)

    assert isinstance(effect, Ended)
    assert effect.end is End.PROTOCOL


def test_a_commit_without_a_place_is_not_taken_for_a_rejection() -> None:
    """A result that says committed and not where ends the session; the draft is asked about again, not put away."""
    made = live()
    made.submit([item("a")], 0.0)

    (effect,) = made.received(result(ItemResult(id="a", status="committed", status_updated_at=1)), 0.0)

    assert isinstance(effect, Ended)
    assert effect.end is End.PROTOCOL


def test_a_rate_limited_batch_is_sent_again_after_the_delay_that_the_server_named() -> None:
    """The same batch goes out again, a random while after that delay and never before it."""
    made = live()
    first = sent(made.submit([item("a")], 0.0))

    (delayed,) = made.received(error("rate_limited", retry_after_ms=1500), 1.0)

    assert isinstance(delayed, Delayed)
    assert 1.5 < delayed.delay_s <= 1.75
    assert made.next_due() == 1.0 + delayed.delay_s
    assert made.tick(2.5) == []
    assert sent(made.tick(1.0 + delayed.delay_s)) == first


# The seventh delay against the first, at the least that jitter leaves: 8 s against 0.25 s; 0.25 s more on both if a delay is named.
@pytest.mark.parametrize(("hint", "ratio"), [({}, 32), ({"retry_after_ms": 250}, 16.5)])
def test_a_server_that_stays_overloaded_is_given_more_time_each_time(hint: dict[str, int], ratio: float) -> None:
    """Whether or not it names a delay: the time doubles up to a bound, and no two clients wait for the same time."""
    delays: list[list[float]] = []
    for seed in range(2):
        made = live(rng=random.Random(seed))
        made.submit([item("a")], 0.0)
        delays.append([])
        for _ in range(12):
            (effect,) = made.received(error("rate_limited", **hint), 0.0)
            assert isinstance(effect, Delayed)
            delays[-1].append(effect.delay_s)

    for one in delays:
        assert one[:7] == sorted(one[:7])
        assert one[6] >= ratio * one[0]
        assert max(one) <= 30.25
    assert delays[0] != delays[1]


def test_a_partition_that_is_allowed_again_is_fetched_from_where_it_was_left() -> None:
    """A broadcast of a refused partition brings it back, and what was committed meanwhile comes before that broadcast."""
    made = live()
    assert made.received(error("forbidden", partitions=["P1"]), 0.0) == [PartitionRefused("P1")]

    restored, asking = made.received(broadcast(9), 1.0)

    assert restored == PartitionRestored("P1")
    (page_asked,) = sent([asking])
    assert isinstance(page_asked, Sync)
    assert page_asked.partitions == ["P1"]
    assert page_asked.since_committed_id < 9


# Errors, versions, refusals


@pytest.mark.req("SC18")
@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("auth_failed", End.AUTH_FAILED),
        ("protocol_version_unsupported", End.UNSUPPORTED),
        ("profile_unsupported", End.UNSUPPORTED),
        ("server_error", End.SERVER_ERROR),
    ],
)
def test_a_closing_error_ends_the_session_with_its_meaning(code: str, end: End) -> None:
    """Each error that closes a connection tells the client whether, and how, to come back."""
    (effect,) = live().received(error(code), 0.0)

    assert isinstance(effect, Ended)
    assert (effect.end, effect.code) == (end, code)


def test_an_error_that_answers_nothing_is_passed_over() -> None:
    """A request error while nothing is under way leaves the session as it is."""
    made = live()

    assert made.received(error("bad_request"), 0.0) == []
    assert made.can_submit


def test_a_message_of_an_unknown_type_is_passed_over() -> None:
    """What a newer server says beyond this protocol is ignored and counted."""
    made = live()
    message = b'{"type":"weather","msg_id":"1","timestamp":0,"payload":{},"protocol_version":"1.3"}'

    assert made.received(message, 0.0) == []
    assert made.ignored_messages == 1


@pytest.mark.parametrize("message", [b"", b"{", b"[]", b'{"type":"connected"}', b"\xff"])
def test_a_message_that_is_none_ends_the_session(message: bytes) -> None:
    """Bytes that are no message end the session; they do not raise."""
    (effect,) = live().received(message, 0.0)

    assert isinstance(effect, Ended)
    assert effect.end is End.PROTOCOL


@pytest.mark.parametrize("message", [result(accepted("a", 1)), connected()])
def test_an_answer_that_nobody_asked_for_ends_the_session(message: bytes) -> None:
    """A result or a greeting out of turn is a breach."""
    (effect,) = live().received(message, 0.0)

    assert isinstance(effect, Ended)
    assert effect.end is End.PROTOCOL


@pytest.mark.req("S13")
def test_a_forbidden_partition_does_not_take_the_others_with_it() -> None:
    """When a sync is forbidden, partitions are tried one by one; those allowed are subscribed, the other is told."""
    made = session({"a": 0, "b": 0, "c": 0})
    effects = made.received(connected(5), 0.0)
    refused = []
    subscribed: list[str] = []
    for _ in range(10):
        requests = [each for each in sent(effects) if isinstance(each, Sync)]
        if not requests:
            break
        (asked,) = requests
        wanted = asked.subscription_partitions if isinstance(asked.subscription_partitions, list) else subscribed
        if "b" in asked.partitions or "b" in wanted:
            effects = made.received(error("forbidden"), 0.0)
        else:
            subscribed = wanted
            effects = made.received(
                page(sync_to=5, next_since=0, partitions=asked.partitions, subscriptions=subscribed), 0.0
            )
        refused += [effect.partition for effect in effects if isinstance(effect, PartitionRefused)]

    assert made.phase is Phase.LIVE
    assert refused == ["b"]
    assert subscribed == ["a", "c"]


def test_a_server_that_names_what_is_forbidden_is_taken_at_its_word() -> None:
    """The named partitions are given up, and the others are asked for at once."""
    made = session({"a": 0, "b": 0, "c": 0})
    made.received(connected(5), 0.0)

    effects = made.received(error("forbidden", partitions=["b"]), 0.0)

    assert effects[0] == PartitionRefused("b")
    assert sent(effects) == [
        Sync(partitions=["a", "c"], since_committed_id=0, subscription_partitions=["a", "c"], limit=50)
    ]


def test_a_right_lost_while_live_is_told_and_disturbs_nothing() -> None:
    """A revocation that comes on its own is no answer to the drafts under way: they keep waiting for theirs."""
    made = live({"a": 0, "b": 0})
    made.submit([item("d1")], 0.0)

    assert made.received(error("forbidden", partitions=["b"]), 0.0) == [PartitionRefused("b")]
    assert made.received(result(accepted("d1", 1)), 0.0) == [StoreVerdicts([ItemCommitted("d1", 1, 7, False)])]


def test_the_late_answer_to_a_request_that_was_given_up_is_passed_over() -> None:
    """A right was lost while a page was on its way: the rest is asked for again, and the old page changes nothing."""
    made = session({"a": 0, "b": 0})
    made.received(connected(5), 0.0)
    made.received(error("forbidden", partitions=["b"]), 0.0)

    assert made.received(page(1, sync_to=5, partitions=["a", "b"]), 0.0) == []
    assert made.received(error("forbidden", partitions=["b"]), 0.0) == []
    assert stored(made.received(page(1, sync_to=5, partitions=["a"], subscriptions=["a"]), 0.0)) == [[1]]


@pytest.mark.parametrize(
    ("code", "end"),
    [(4001, End.REPLACED), (1008, End.AUTH_FAILED), (4003, End.AUTH_FAILED), (1012, End.LOST), (None, End.LOST)],
)
def test_a_close_code_says_what_to_do_next(code: int | None, end: End) -> None:
    """Even without an error message before it, the close code tells whether to come back and how."""
    (effect,) = live().closed(code)

    assert isinstance(effect, Ended)
    assert effect.end is end


@pytest.mark.req("SC18")
def test_another_model_version_starts_over() -> None:
    """A model version other than the stored one sets the history aside and fetches all of it again."""
    made = session({"P1": 40}, model_version=3)

    effects = made.received(connected(50, model_version=4), 0.0)

    assert effects[:2] == [ResetHistory(ResetReason.MODEL_CHANGED), ModelNoted(4)]
    (asked,) = sent(effects)
    assert isinstance(asked, Sync)
    assert asked.since_committed_id == 0


def test_a_model_version_that_changes_between_pages_starts_over() -> None:
    """The page that shows the new version is not stored: the cursor it continues from is of the old one."""
    made = session({"P1": 40}, model_version=3)
    made.received(connected(50, model_version=3), 0.0)

    effects = made.received(page(41, sync_to=50, model_version=4), 0.0)

    assert stored(effects) == []
    assert effects[0] == ResetHistory(ResetReason.MODEL_CHANGED)


def test_a_model_change_told_during_a_request_is_acted_on_after_its_answer() -> None:
    """With a page under way, the reset comes at once and the new cycle after the old answer, which is dropped."""
    made = session({"P1": 40}, model_version=3)
    made.received(connected(50, model_version=3), 0.0)

    told = made.received(frame(VersionChanged(old_model_version=3, new_model_version=4)), 0.0)
    effects = made.received(page(41, sync_to=50, model_version=4), 0.0)

    assert told == [ResetHistory(ResetReason.MODEL_CHANGED), ModelNoted(4)]
    assert stored(effects) == []
    assert sent(effects) == [Sync(partitions=["P1"], since_committed_id=0, limit=50)]


def test_a_contradicted_history_is_reset_once_and_then_given_up() -> None:
    """Another event at a known id starts over; a server that contradicts itself again is left."""
    made = live()

    assert made.history_replaced(0.0)[0] == ResetHistory(ResetReason.HISTORY_REPLACED)
    (effect,) = made.history_replaced(0.0)

    assert isinstance(effect, Ended)


# Time


@pytest.mark.req("SC17")
def test_a_silent_client_sends_heartbeats() -> None:
    """After ``heartbeat_s`` without a message of its own it sends one, and again after that."""
    made = live()

    assert made.next_due() == 10.0
    assert made.tick(9.9) == []
    assert sent(made.tick(10.0)) == [Heartbeat()]
    made.received(frame(HeartbeatAck()), 10.1)
    assert made.tick(15.0) == []
    assert sent(made.tick(20.0)) == [Heartbeat()]


@pytest.mark.bound("sync.settings.ClientSettings.silence_s_max")
@crossed
def test_a_silent_server_is_given_up(beyond: Beyond) -> None:
    """Without any message for ``silence_s_max`` the connection counts as gone."""
    made = live()
    made.tick(10.0)
    made.tick(20.0)
    assert not any(isinstance(effect, Ended) for effect in made.tick(29.9))

    (effect,) = made.tick(float(beyond(30)))

    assert isinstance(effect, Ended)
    assert effect.end is End.SILENT
    assert made.next_due() is None


@pytest.mark.bound("sync.settings.ClientSettings.answer_s_max")
@crossed
def test_an_unanswered_request_is_given_up_although_the_server_lives(beyond: Beyond) -> None:
    """Heartbeats are answered but the batch is not: the connection is given up and the drafts are sent on another."""
    made = live()
    made.submit([item("a")], 0.0)
    for now in (10.0, 20.0):
        made.tick(now)
        made.received(frame(HeartbeatAck()), now)
    assert not any(isinstance(effect, Ended) for effect in made.tick(29.9))
    made.received(frame(HeartbeatAck()), beyond(30) - 1.0)

    (effect,) = made.tick(float(beyond(30)))

    assert isinstance(effect, Ended)
    assert effect.end is End.SILENT


def test_leaving_says_goodbye() -> None:
    """Leaving sends a disconnect and ends the session; after that nothing has any effect."""
    made = live()

    effects = made.leave("closed", 1.0)

    assert sent(effects) == [Disconnect(reason="closed")]
    assert isinstance(effects[-1], Ended)
    assert made.received(broadcast(1), 2.0) == made.tick(99.0) == made.closed() == []


def test_an_overloaded_server_says_when_to_come_back() -> None:
    """A rate limit in place of the greeting ends the session with the server's delay."""
    (effect,) = session().received(error("rate_limited", retry_after_ms=3000), 0.0)

    assert isinstance(effect, Ended)
    assert (effect.end, effect.retry_after_s) == (End.OVERLOADED, 3.0)


def test_details_of_the_wrong_type_do_no_harm() -> None:
    """A retry delay that is no number is passed over."""
    made = live()
    made.submit([item("a")], 0.0)
    message = frame(ErrorFrame(code="rate_limited", message="", details={}))

    (with_text,) = made.received(error("rate_limited", retry_after_ms="soon"), 0.0)
    (without,) = made.received(message, 0.0)

    assert isinstance(with_text, Delayed)
    assert isinstance(without, Delayed)
