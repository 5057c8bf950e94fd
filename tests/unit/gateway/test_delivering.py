"""From a bound envelope to the frames of its subscribers: order, pace, buffers, acknowledgements, heartbeats."""

from __future__ import annotations

import msgspec
import pytest

from tests.gateway_world import GatewayWorld, settings_of
from tidings.access.visibility import CapsuleIssuer
from tidings.gateway.descriptors import SummaryValue
from tidings.gateway.envelopes import encode
from tidings.gateway.refusals import SubscriptionClosed
from tidings.wire.gateway import CloseReason

PEER: dict[str, SummaryValue] = {"connection_id": "c", "path": "/"}
HEALTH: dict[str, SummaryValue] = {
    "component": "log",
    "state": "healthy",
    "reasons": (),
    "previous_state": "unknown",
    "health_seq": 1,
}


@pytest.mark.req("R82", "R81", "R190", "R106")
async def test_an_envelope_comes_once_to_everybody_who_is_meant_and_is_counted() -> None:
    """Each subscriber gets one frame with the envelope and its resume token, its buffer one entry, the counters one delivery."""
    async with GatewayWorld.running() as world:
        readers = [await world.subscribe(f"r{number}") for number in range(3)]
        world.commit("order:1")
        await world.settle()

        for reader in readers:
            assert reader.seqs == [1]
            assert reader.envelopes[0]["resume_token"]
            assert len(reader.open) == 1
        assert world.gateway.telemetry.delivered_by_class["graph"] == 3
        assert world.gateway.telemetry.produced_by_class["graph"] == 1


@pytest.mark.req("R194", "R103", "R42")
async def test_all_subscribers_share_the_bytes_of_one_encoding() -> None:
    """What each is handed is the same object: the envelope is encoded once and not touched again."""
    async with GatewayWorld.running() as world:
        one, two = await world.subscribe("one"), await world.subscribe("two")
        world.commit()
        await world.settle()

        assert one.frames[0] is two.frames[0]
        (point,) = one.envelopes
        kept = world.gateway.index.find(point["event_id"], 1)
        assert kept is not None
        assert msgspec.json.decode(encode(kept.envelope)) == point


@pytest.mark.req("R78", "R168", "R77")
async def test_graph_events_come_by_seq_and_parts_of_one_commit_by_their_order() -> None:
    """However they are bundled, a connection sees rising seqs, and the parts of one record in theirs."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe()
        for number in range(30):
            world.commit(f"order:{number}", parts=1 + number % 3)
            if number % 4 == 0:
                await world.settle()
        await world.settle()

        places = [
            (each["sequence_anchor"]["global_seq"], each["payload_summary"]["object_ids"]) for each in reader.envelopes
        ]
        assert places == sorted(places)
        assert len(places) == 60


@pytest.mark.req("R79", "R8")
async def test_other_events_come_in_the_order_of_their_source() -> None:
    """Two sources of one class: each one's count rises by one from event to event."""
    async with GatewayWorld.running() as world:
        root = await world.administrator(subscription_type="system")
        for number in range(10):
            world.tell("config_manager", "system.config_changed", {"cfg_seq": number, "keys": ("k",)})
            world.tell("health_manager", "system.health_state_changed", HEALTH)
        await world.settle()

        for source in ("config_manager", "health_manager"):
            found = [
                each["sequence_anchor"]["event_seq"] for each in root.envelopes if each["source_manager"] == source
            ]
            assert found == list(range(1, 11))


@pytest.mark.req("R186", "R187")
async def test_classes_take_turns_by_weight_and_none_starves() -> None:
    """With everything waiting at once, a turn has eight graph events, four of security, two of network and one of system."""
    async with GatewayWorld.running(settings_of(delivery__max_msgs_per_sec=1000)) as world:
        channels = ("graph.*", "security.authentication_failed", "network.*", "system.config_changed")
        root = await world.administrator(channels=channels)
        await world.settle()
        for number in range(40):
            world.tell("config_manager", "system.config_changed", {"cfg_seq": number, "keys": ("k",)})
            world.tell("network_manager", "network.peer_admitted", PEER, scope_hint={"peer_identity_id": "p"})
            world.tell("auth_manager", "security.authentication_failed", {"reason": "r", "path": "/"})
            world.commit(f"order:{number}")
        await world.settle()

        classes = [name.partition(".")[0] for name in root.types]
        for turn in (classes[:15], classes[15:30]):
            assert [turn.count(name) for name in ("graph", "security", "network", "system")] == [8, 4, 2, 1]
        assert [classes.count(name) for name in ("graph", "security", "network", "system")] == [40] * 4


@pytest.mark.req("R76", "R188", "R72", "R73")
async def test_frames_ask_the_access_layer_nothing() -> None:
    """A capsule is issued for each envelope and never again: neither for the number of subscribers, nor when somebody comes back."""
    async with GatewayWorld.running() as world:
        asked: list[int] = []
        issue = world.gateway.issuer.issue

        class Counted(CapsuleIssuer):
            def issue(self, batch):  # type: ignore[no-untyped-def]
                asked.extend(len(each.object_ids) for each in batch if each.subscription_type == "graph")
                return issue(batch)

        world.gateway.issuer.issue = Counted(world.book).issue  # type: ignore[method-assign]
        readers = [await world.subscribe(f"r{number}") for number in range(8)]
        for number in range(5):
            world.commit(f"order:{number}")
        await world.settle()
        token = readers[0].tokens[0]
        again = await world.subscribe("r0", resume=token)
        await world.settle()

        assert asked == [1] * 5
        assert [reader.seqs for reader in readers] == [[1, 2, 3, 4, 5]] * 8
        assert again.seqs == [2, 3, 4, 5]


@pytest.mark.req("R80", "R216", "R233")
async def test_a_revocation_bites_with_the_next_envelope() -> None:
    """What was delivered below the revocation's seq is there; nothing above it comes, until it is granted again."""
    async with GatewayWorld.running() as world:
        world.grant("bob", "topic:orders")
        bob = await world.subscribe("bob", claims={"topics": frozenset({"none"}), "space_prefixes": ("m",)})
        first = world.commit()
        await world.settle()
        world.revoke("bob", "topic:orders")
        world.commit()
        await world.settle()
        world.grant("bob", "topic:orders")
        last = world.commit()
        await world.settle()

        assert bob.seqs == [first, last]


@pytest.mark.req("R233", "R52", "R29")
async def test_space_partition_and_topic_are_asked_for_as_in_a_read() -> None:
    """Who may read the topic but not the space, or none of the partitions, gets nothing; no hint changes that."""
    async with GatewayWorld.running() as world:
        topics = frozenset({"orders"})
        spaced = await world.subscribe("spaced", claims={"topics": topics, "spaces": frozenset({"other"})})
        parted = await world.subscribe("parted", claims={"topics": topics, "partitions": frozenset({"p1"})})
        for place in (("p1",), ("p2",), ("p1", "p2")):
            world.commit(partitions=place, audience_hint={"allow": ["spaced", "parted"]})
        await world.settle()

        assert (spaced.seqs, parted.seqs) == ([], [1, 3])


@pytest.mark.req("R185")
async def test_a_step_ends_before_it_keeps_the_loop_for_long() -> None:
    """A backlog for many subscribers is delivered in several steps, between which others get their turn; in order, and all of it."""
    settings = settings_of(websocket__max_connections_per_identity=256, delivery__max_msgs_per_sec=100_000)
    async with GatewayWorld.running(settings) as world:
        readers = [await world.subscribe() for _ in range(200)]
        await world.settle(1.0)
        for _ in range(120):
            world.commit()
        world.gateway.step()
        first = len(readers[0].frames)
        await world.settle()

        assert first == 50
        assert readers[0].seqs == readers[-1].seqs == list(range(1, 121))


# Buffers and acknowledgements


@pytest.mark.req("R105", "R110", "R111", "R112", "R191", "R14")
async def test_a_buffer_takes_its_number_and_the_next_closes() -> None:
    """With four unacknowledged the fifth is one too many: ``buffer_overflow``, told and on record, and the memory is free."""
    async with GatewayWorld.running(settings_of(queue__per_connection=4)) as world:
        root = await world.administrator(event_type="security.subscription_dropped")
        slow, well = await world.subscribe("slow"), await world.subscribe("well")
        for number in range(6):
            world.commit(f"order:{number}")
            await world.settle()
            well.ack()
        assert slow.seqs == [1, 2, 3, 4]
        assert slow.reason is CloseReason.BUFFER_OVERFLOW
        assert well.seqs == [1, 2, 3, 4, 5, 6]
        await world.settle()

        assert [each["payload_summary"]["reason"] for each in root.envelopes] == ["buffer_overflow"]
        assert [each["reason"] for each in await world.audited("subscription_dropped")] == ["buffer_overflow"]
        assert world.gateway.ceiling.used < 3


@pytest.mark.req("R105", "R129")
async def test_a_burst_fills_a_buffer_to_its_bound_before_it_closes() -> None:
    """Of ten at once four fit: they are sent, and then the connection ends."""
    async with GatewayWorld.running(settings_of(queue__per_connection=4)) as world:
        reader = await world.subscribe()
        for number in range(10):
            world.commit(f"order:{number}")
        await world.settle()

        assert reader.seqs == [1, 2, 3, 4]
        assert reader.reason is CloseReason.BUFFER_OVERFLOW


@pytest.mark.req("R107", "R109")
async def test_an_acknowledgement_frees_everything_up_to_it() -> None:
    """The token of the third envelope acknowledges the first three; the window has room for as many again."""
    async with GatewayWorld.running(settings_of(queue__per_connection=4)) as world:
        reader = await world.subscribe()
        for number in range(4):
            world.commit(f"order:{number}")
        await world.settle()
        reader.ack(2)
        assert len(reader.open) == 1
        for number in range(3):
            world.commit(f"order:{number}")
        await world.settle()

        assert reader.reason is None
        assert len(reader.seqs) == 7
        assert reader.open.last_ack_token == reader.tokens[2]


@pytest.mark.req("R108")
async def test_only_what_was_sent_here_and_waits_can_be_acknowledged() -> None:
    """A token that is made up, another connection's, acknowledged before, passed over or still to come is ``frame_invalid``."""
    async with GatewayWorld.running(settings_of(delivery__max_msgs_per_sec=3)) as world:
        reader = await world.subscribe("one")
        other = await world.subscribe("two", domain_id="orders")
        for number in range(5):
            world.commit(f"order:{number}")
        await world.settle()
        assert reader.seqs == [1, 2, 3]
        waiting = [each.envelope.resume_token for each in reader.open.unsent or ()]
        reader.ack(1)

        assert other.tokens[2] == reader.tokens[2]
        for token in ("made up", reader.tokens[1], reader.tokens[0], *waiting):
            with pytest.raises(SubscriptionClosed) as caught:
                reader.open.ack(token)
            assert caught.value.close_reason is CloseReason.FRAME_INVALID
        reader.ack(2)


# The pace


@pytest.mark.req("R126", "R127", "R128")
async def test_a_pace_delays_and_neither_drops_nor_reorders() -> None:
    """At ten a second, thirty-five take three and a half: a second's worth at once, then ten each second, in order."""
    async with GatewayWorld.running(settings_of(delivery__max_msgs_per_sec=10)) as world:
        reader = await world.subscribe()
        for number in range(35):
            world.commit(f"order:{number}")
        counts = []
        for _ in range(4):
            await world.settle()
            counts.append(len(reader.seqs))
            await world.settle(1.0)

        assert counts == [10, 20, 30, 35]
        assert reader.seqs == list(range(1, 36))


@pytest.mark.req("R127")
async def test_what_comes_while_others_wait_does_not_overtake() -> None:
    """A live event goes behind those that the pace holds back."""
    async with GatewayWorld.running(settings_of(delivery__max_msgs_per_sec=5)) as world:
        reader = await world.subscribe()
        for number in range(8):
            world.commit(f"order:{number}")
        await world.settle(0.3)
        world.commit("order:late")
        await world.settle(3.0)

        assert reader.seqs == list(range(1, 10))


async def test_a_transport_without_room_is_not_sent_to_until_it_has_some() -> None:
    """What a full transport does not take stays in the buffer, which is bounded; then it goes on where it stopped."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe()
        reader.has_room = False
        for number in range(3):
            world.commit(f"order:{number}")
            await world.settle()
        assert reader.seqs == [1]
        reader.has_room = True
        reader.open.resume_sending()
        await world.settle()

        assert reader.seqs == [1, 2, 3]


@pytest.mark.req("R192", "R193", "R190")
async def test_failing_sends_are_counted_never_repeated_and_end_the_connection() -> None:
    """Two failed sends of a lower class are borne, a third in a row ends the connection; none of it is sent later."""
    async with GatewayWorld.running() as world:
        root = await world.administrator(subscription_type="system", event_type="system.config_changed")

        async def told(number: int) -> None:
            world.tell("config_manager", "system.config_changed", {"cfg_seq": number, "keys": ("k",)})
            await world.settle()

        await told(1)
        root.fails = True
        await told(2)
        root.fails = False
        await told(3)
        assert [each["payload_summary"]["cfg_seq"] for each in root.envelopes] == [1, 3]
        root.fails = True
        for number in range(4, 7):
            await told(number)

        assert root.reason is CloseReason.INTERNAL_ERROR
        assert world.gateway.telemetry.send_failures == 4
        assert len(root.frames) == 2


@pytest.mark.req("R193")
async def test_a_graph_event_that_was_not_sent_ends_the_connection_at_once() -> None:
    """Whoever would go on without it could not know that something is missing."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe()
        reader.fails = True
        world.commit()
        await world.settle()

        assert reader.reason is CloseReason.INTERNAL_ERROR
        assert world.gateway.ceiling.used < 3


# Heartbeats


@pytest.mark.req("R88", "R113")
async def test_an_accepted_connection_has_its_id_and_is_pinged_at_the_interval() -> None:
    """A connection id of 128 bits, an entry in the registry, and a ping of eight bytes each interval, counting up."""
    async with GatewayWorld.running(settings_of(delivery__heartbeat_interval_ms=5000)) as world:
        reader = await world.subscribe()
        (info,) = world.gateway.registry.connections()
        assert info.connection_id == reader.open.connection_id
        assert len(info.connection_id) == 32
        await world.settle(21.0)

        assert reader.pings == [number.to_bytes(8, "big") for number in range(1, 5)]


@pytest.mark.req("R114", "R115", "R230")
@pytest.mark.parametrize("answer", [None, b"", (9).to_bytes(8, "big"), b"\x01"])
async def test_two_intervals_without_the_answer_end_a_connection(answer: bytes | None) -> None:
    """Silence, and pongs that answer no ping of ours, are the same: closed, with a drop event and on record."""
    async with GatewayWorld.running(settings_of(delivery__heartbeat_interval_ms=5000)) as world:
        root = await world.administrator(event_type="security.subscription_dropped")
        reader = await world.subscribe()
        reader.answers_pings = False
        for _ in range(99):
            await world.settle(0.1)
            if answer is not None:
                reader.open.ponged(answer)
            world.commit()  # what is sent to it does not keep it open
            if reader.frames:
                reader.ack()
        assert reader.reason is None
        await world.settle(0.4)

        assert reader.reason is CloseReason.HEARTBEAT_TIMEOUT
        assert [each["payload_summary"]["reason"] for each in root.envelopes] == ["heartbeat_timeout"]
        assert world.gateway.telemetry.heartbeat_failures == 1


# Without access


@pytest.mark.req("R173", "R174", "R231", "R224", "R226")
async def test_while_access_cannot_be_decided_nothing_is_delivered_and_nothing_is_lost() -> None:
    """A record that nobody can read closes the book: not ready, no frame, heartbeats go on. When it is dismissed everything comes, in order."""
    async with GatewayWorld.running(settings_of(delivery__heartbeat_interval_ms=5000)) as world:
        reader = await world.subscribe()
        world.commit("order:1")
        await world.settle()
        doubt = world.doubtful_access_record()
        for number in range(3):
            world.commit(f"order:{number}")
        await world.settle(12.0)

        assert reader.seqs == [1]
        assert reader.reason is None
        assert len(reader.pings) == 2
        assert world.gateway.readiness() == ("acl_unavailable",)
        assert world.health[-1] == ("degraded", ("acl_unavailable",))

        world.dismiss(doubt)
        await world.settle(1.0)
        assert reader.seqs == [1, 3, 4, 5]
        assert world.gateway.readiness() == ()


@pytest.mark.req("R175", "R83", "R159")
async def test_an_envelope_that_no_capsule_is_made_for_is_seen_by_nobody_and_on_record() -> None:
    """Of more partitions than a capsule holds: no subscriber gets it, the next one comes, the failure is told."""
    async with GatewayWorld.running() as world:
        root = await world.administrator(event_type="security.audience_binding_failed")
        reader = await world.subscribe(claims={"roles": frozenset({"admin"})})
        world.commit(partitions=("p" * 250,) * 10)
        good = world.commit()
        await world.settle()

        assert reader.seqs == [good]
        assert root.types == ["security.audience_binding_failed"]
        assert len(await world.audited("audience_binding_failed")) == 1
        assert world.gateway.telemetry.dropped_per_class()["graph"] == 1
