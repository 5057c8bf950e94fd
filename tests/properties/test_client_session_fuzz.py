"""Whatever a server sends, and whenever: the client's session answers with effects, keeps to its rules and never raises."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.client.support import body, connected, error, frame, item
from tidings.sync.client_effects import CaughtUp, Effect, Ended, ResetHistory, SendMessage, StorePage
from tidings.sync.client_session import ClientSession, Phase
from tidings.sync.settings import ClientSettings
from tidings.wire.sync_frames import (
    CommittedEvent,
    Connect,
    EventBroadcast,
    HeartbeatAck,
    ItemResult,
    SubmitEvents,
    SubmitResult,
    Sync,
    SyncResponse,
    VersionChanged,
    encode,
)

PARTITIONS = ("a", "b", "c")
SETTINGS = ClientSettings(page_events=50, buffer_events_max=3, refresh_events=4, cursor_gap_max=5)

ids = st.integers(-1, 40) | st.sampled_from([2**63, 10**30])
names = st.lists(st.sampled_from(PARTITIONS), max_size=3)
events = st.builds(
    lambda committed_id, partitions: CommittedEvent(
        id=f"e{committed_id}",
        client_id="x",
        partitions=partitions,
        committed_id=committed_id,
        event=body("noted", {}),
        status_updated_at=0,
    ),
    ids,
    names,
)
codes = st.sampled_from(
    [
        *("bad_request", "forbidden", "rate_limited", "validation_failed", "unheard_of"),
        *("auth_failed", "server_error", "profile_unsupported"),
    ]
)
pages = st.builds(
    SyncResponse,
    partitions=names,
    effective_subscriptions=names,
    events=st.lists(events, max_size=3),
    next_since_committed_id=ids,
    sync_to_committed_id=ids,
    has_more=st.booleans(),
    model_version=st.sampled_from([msgspec.UNSET, 1, 2]),
    pruned_through_committed_id=st.sampled_from([msgspec.UNSET, 7]),
).map(frame)
results = st.builds(
    lambda results: frame(SubmitResult(results=results)),
    st.lists(
        st.builds(
            ItemResult,
            id=st.sampled_from(["d0", "d1", "d2", "other"]),
            status=st.sampled_from(["committed", "rejected"]),
            status_updated_at=st.just(0),
            committed_id=ids | st.just(msgspec.UNSET),
        ),
        max_size=3,
    ),
)
messages = (
    pages
    | results
    | events.map(lambda event: frame(EventBroadcast(**msgspec.structs.asdict(event))))
    | st.builds(error, codes)
    | names.map(lambda given: error("forbidden", partitions=given))
    | st.sampled_from([0, -5, "soon", 400]).map(lambda delay: error("rate_limited", retry_after_ms=delay))
    | st.sampled_from([connected(3), connected(9, model_version=2), frame(HeartbeatAck())])
    | st.just(frame(VersionChanged(old_model_version=1, new_model_version=2)))
)


def honest_page(asked: Sync, draw: Any) -> bytes:
    """A page that answers the request, so that runs get further than the first breach."""
    found = sorted(draw(st.sets(st.integers(asked.since_committed_id + 1, asked.since_committed_id + 5), max_size=3)))
    return frame(
        SyncResponse(
            partitions=asked.partitions,
            effective_subscriptions=list(PARTITIONS),
            events=[
                CommittedEvent(
                    id=f"e{each}",
                    client_id="x",
                    partitions=["a"],
                    committed_id=each,
                    event=body("noted", {}),
                    status_updated_at=0,
                )
                for each in found
            ],
            next_since_committed_id=found[-1] if found else asked.since_committed_id,
            sync_to_committed_id=draw(st.integers(0, 3)) + (found[-1] if found else asked.since_committed_id),
            has_more=bool(found) and draw(st.booleans()),
        )
    )


class Watch:
    """Checks every effect against the rules."""

    def __init__(self) -> None:
        self.cursors = dict.fromkeys(PARTITIONS, 0)
        self.asked: Connect | Sync | SubmitEvents | None = None
        self.is_over = False

    def see(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.is_over, "nothing comes after the end"
            match effect:
                case SendMessage(payload):
                    if isinstance(payload, Connect | Sync | SubmitEvents):
                        self.asked = payload
                    assert len(encode(payload, msg_id="c", timestamp=0)) <= SETTINGS.batch_bytes_max
                case StorePage(_, cursors):
                    for name, since in cursors.items():
                        assert since >= self.cursors[name], "a cursor moves forward"
                        self.cursors[name] = since
                case ResetHistory():
                    self.cursors = dict.fromkeys(PARTITIONS, 0)
                case CaughtUp(sync_to):
                    assert sync_to >= 0
                case Ended():
                    self.is_over = True


@given(st.data())
def test_a_session_never_raises_and_keeps_to_its_rules(data: st.DataObject) -> None:
    """Any messages at any moment: cursors only rise between resets, and nothing follows the end."""
    session = ClientSession("me", dict.fromkeys(PARTITIONS, 0), settings=SETTINGS, model_version=1)
    watch, now = Watch(), 0.0
    watch.see(session.start("token", now))
    watch.see(session.received(connected(3, model_version=1), now))
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.0, 0.3, 11.0]))
        match data.draw(
            st.sampled_from(["answer", "answer", "message", "tick", "submit", "follow", "replaced", "noise"])
        ):
            case "answer":
                if isinstance(watch.asked, Sync):
                    watch.see(session.received(honest_page(watch.asked, data.draw), now))
                elif isinstance(watch.asked, SubmitEvents) and not session.can_submit:
                    answer = [
                        ItemResult(id=each.id, status="committed", committed_id=50 + n, status_updated_at=0)
                        for n, each in enumerate(watch.asked.events)
                    ]
                    watch.see(session.received(frame(SubmitResult(results=answer)), now))
            case "message":
                watch.see(session.received(data.draw(messages), now))
            case "tick":
                watch.see(session.tick(now))
            case "submit":
                if session.can_submit:
                    watch.see(session.submit([item(f"d{n}") for n in range(3)], now))
            case "follow":
                if session.phase not in (Phase.NEW, Phase.ENDED):
                    watch.see(session.follow(watch.cursors, now))
            case "replaced":
                watch.see(session.history_replaced(now))
            case "noise":
                watch.see(session.received(data.draw(st.binary(max_size=30)), now))
        due = session.next_due()
        assert (due is None) == (session.phase is Phase.ENDED)
    assert watch.is_over == (session.phase is Phase.ENDED)
