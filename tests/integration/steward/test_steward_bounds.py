"""The steward's socket under bad peers: those that never read, never speak, vanish, or send half of something."""

from __future__ import annotations

import asyncio
import resource
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.callbacks import CALLBACK_S_MAX, measured_callbacks
from tests.integration.node_support import until
from tidings.core.errors import TidingsError
from tidings.happenings import HappeningFilter
from tidings.happenings.happening import UnknownHappening
from tidings.happenings.variants import PluginEvent
from tidings.ledger import Command, PluginRequest
from tidings.ledger.claims import AnnounceSubject, ClaimRelation
from tidings.ledger.marks import EmitHappenings
from tidings.ledger.subjects import Addressing
from tidings.testing.node import RunningNode

from .support import SocketClient, client_of, refused_with, stewarding


def event(number: int, size: int = 10) -> PluginEvent:
    return PluginEvent(at_ms=1, plugin="p", event_type="e", payload={"n": number, "text": "x" * size})


@pytest.mark.req("H6")
async def test_a_subscriber_that_does_not_read_is_told_exactly_what_it_missed_and_goes_on(tmp_path: Path) -> None:
    """Its frames wait up to a bound; what does not fit is missed and counted; nothing else is held up, and the stream goes on."""
    async with stewarding(tmp_path, steward={"unsent_bytes_max": 4096}, ledger={"buffer_count_max": 16}) as node:
        happenings, slow = node.ledger.happenings, await SocketClient.connect(tmp_path)
        first = (await slow.ask("subscribe_happenings"))["current_seq"] + 1
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        count = 3_000
        for number in range(count):
            happenings.emit(event(number, 20_000))
            if number % 16 == 0:
                await asyncio.sleep(0)
        await until(lambda: happenings.last_seq == first + count - 1)
        [connection] = node._parts.steward_socket.endpoint.connections  # type: ignore[union-attr]
        assert connection.transport.buffered_bytes < 10_000_000
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        missed = 0
        seqs: list[int] = []
        while not seqs or seqs[-1] < first + count - 1:
            frame = await slow.receive()
            if "lagged" in frame:
                assert list(frame["lagged"]) == ["missed_count", "oldest_available_seq", "current_seq"]
                missed += frame["lagged"]["missed_count"]
            else:
                seqs.append(frame["seq"])
        assert missed > 0
        assert len(seqs) + missed == count
        assert seqs == sorted(seqs)
        await slow.close()


@pytest.mark.bound("ledger.settings.LedgerSettings.buffer_count_max")
@pytest.mark.req("H1")
@crossed
async def test_a_client_that_reads_has_a_large_command_whole(tmp_path: Path, beyond: Beyond) -> None:
    """A command with more happenings than the buffer holds, also with more than are held in memory: a client that waits is sent all, in order."""
    async with stewarding(tmp_path, ledger={"buffer_count_max": 64}) as node:
        client = await SocketClient.connect(tmp_path)
        seq = (await client.ask("subscribe_happenings"))["current_seq"]
        count = beyond(64) * 8  # more than is held in memory for a single command
        await node.ledger.execute(EmitHappenings(happenings=[event(number, 0) for number in range(count)]))
        frames = [await client.receive() for _ in range(count)]
        await client.close()

    assert [frame.get("seq") for frame in frames] == list(range(seq + 1, seq + count + 1))


@pytest.mark.req("H71")
async def test_a_subscriber_that_goes_is_noticed_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """Without anything to send its receiver, its connection and its tasks are gone; a plugin that it served is called no more."""
    async with stewarding(tmp_path) as node:
        endpoint = node._parts.steward_socket.endpoint  # type: ignore[union-attr]
        before = node.ledger.happenings.receiver_count
        subscribers = [await SocketClient.connect(tmp_path) for _ in range(3)]
        for each in subscribers[:2]:
            await each.ask("subscribe_happenings")
        plugin = subscribers[2]
        await plugin.ask("negotiate", capabilities=["plugins"])
        manifest = {"shelves": ["audio.playback"]}
        await plugin.ask("load_plugin", plugin="p", interaction_kind="respondent", manifest=manifest)
        assert node.ledger.happenings.receiver_count == before + 2
        assert node.ledger.plugins.is_loaded("p")

        await subscribers[0].close()
        subscribers[1].writer.transport.abort()
        await plugin.close()
        await until(lambda: not endpoint.connections)
        assert node.ledger.happenings.receiver_count == before
        assert not node.ledger.plugins.is_loaded("p")
        await until(lambda: not endpoint._tasks)


async def test_a_thousand_idle_clients_are_cheap_and_all_are_served(tmp_path: Path) -> None:
    """Each costs some kilobytes; others are answered meanwhile; when they go nothing is left."""
    async with stewarding(tmp_path) as node:
        endpoint = node._parts.steward_socket.endpoint  # type: ignore[union-attr]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loop = asyncio.get_running_loop()
        idle = [await loop.create_unix_connection(asyncio.Protocol, str(tmp_path / "s")) for _ in range(1_000)]
        await until(lambda: len(endpoint.connections) == 1_000)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 40_000  # both ends are in this process
        other = await SocketClient.connect(tmp_path)
        assert (await other.ask("list_plugins"))["plugins_inventory"]
        await other.close()
        for transport, _ in idle:
            transport.close()
        await until(lambda: not endpoint.connections)


async def test_more_connections_than_allowed_are_closed_at_once(tmp_path: Path) -> None:
    """The bound of the settings holds, and one that goes makes room."""
    async with stewarding(tmp_path, steward={"connections_max": 1}) as node:
        endpoint = node._parts.steward_socket.endpoint  # type: ignore[union-attr]
        first = await SocketClient.connect(tmp_path)
        assert await first.ask("list_plugins")
        second = await SocketClient.connect(tmp_path)
        assert await second.receive() is None
        await first.close()
        await until(lambda: not endpoint.connections)
        third = await SocketClient.connect(tmp_path)
        assert await third.ask("list_plugins")
        for each in (second, third):
            await each.close()


async def test_halves_of_frames_are_bounded_over_all_peers(tmp_path: Path) -> None:
    """Who sends more of an incomplete frame than there is room for, together with the others, is closed; what it held is free again."""
    bound = 65 << 20
    async with stewarding(tmp_path, steward={"partial_bytes_max": bound}) as node:
        server = node._parts.steward_socket  # type: ignore[union-attr]
        assert server is not None
        first, second = await SocketClient.connect(tmp_path), await SocketClient.connect(tmp_path)
        half = struct.pack(">I", 64 << 20) + bytes(40 << 20)
        first.writer.write(half)
        await until(lambda: server.partial_bytes == len(half))
        second.writer.write(half)
        assert await second.receive() is None
        await until(lambda: server.partial_bytes == len(half))
        await first.close()
        await until(lambda: server.partial_bytes == 0)
        await second.close()


@pytest.mark.req("H11")
async def test_a_cursor_from_before_the_window_is_answered_with_the_oldest_seq(tmp_path: Path) -> None:
    """One error frame that names what there is, no acknowledgement, and the connection ends."""
    async with stewarding(tmp_path, ledger={"history_count_max": 5}) as node:
        for number in range(30):
            await node.ledger.happenings.emit_durable(event(number))
        await node.ledger.trim_history()
        last = node.ledger.happenings.last_seq
        client = await SocketClient.connect(tmp_path)
        answer = await client.ask("subscribe_happenings", since=0)
        assert refused_with(answer) == ("contract_violation", "replay_window_exceeded")
        details = answer["error"]["details"]
        assert (details["oldest_available_seq"], details["current_seq"]) == (last - 4, last)
        assert await client.receive() is None
        again = await SocketClient.connect(tmp_path)
        assert await again.ask("subscribe_happenings", since=last - 5) == {"subscribed": True, "current_seq": last}
        assert [(await again.receive())["seq"] for _ in range(5)] == list(range(last - 4, last + 1))
        for each in (client, again):
            await each.close()


@pytest.mark.req("H13")
async def test_replay_meets_live_without_gap_or_repeat_while_others_emit(tmp_path: Path) -> None:
    """Subscribers that begin at any cursor while happenings are being told get each seq after it once, in order."""
    async with stewarding(tmp_path) as node:
        happenings = node.ledger.happenings
        count, heard = 300, dict[int, list[int]]()

        async def emit() -> None:
            for number in range(count):
                await happenings.emit_durable(event(number))

        async def listen(since: int) -> None:
            client = await SocketClient.connect(tmp_path)
            await client.ask("subscribe_happenings", since=since)
            seqs = heard[since] = []
            while not seqs or seqs[-1] < start + count:
                seqs.append((await client.receive())["seq"])
            await client.close()

        start = happenings.last_seq
        emitting = asyncio.create_task(emit())
        await until(lambda: happenings.last_seq > start + 50)
        await asyncio.gather(*(listen(start + 5 * number) for number in range(10)), emitting)
        assert heard == {since: list(range(since + 1, start + count + 1)) for since in heard}


async def test_a_command_that_the_log_would_not_take_is_refused_as_too_long(tmp_path: Path) -> None:
    """Where the log takes short payloads only, the ledger's records are shorter still, and it says so."""
    async with stewarding(tmp_path, log={"payload_bytes_max": 32_768}) as node:
        client = await SocketClient.connect(tmp_path)
        await client.ask("negotiate", capabilities=["plugins"])
        long = await client.ask("report_event", plugin="p", event_type="e", payload="x" * 20_000)
        assert refused_with(long) == ("contract_violation", "command_too_large")
        short = await client.ask("report_event", plugin="p", event_type="e", payload="x" * 5_000)
        assert short["done"] == "report_event"
        assert node.ledger.happenings.last_seq > 0
        await client.close()


@pytest.mark.req("H15")
async def test_a_variant_that_this_process_does_not_know_is_passed_on_as_it_came(tmp_path: Path) -> None:
    """A happening of a later version reaches subscribers with its type and its fields, live and from history."""
    async with stewarding(tmp_path) as node:
        unknown = UnknownHappening("moon_landed", {"at_ms": 5, "by": {"who": "eagle"}})
        seq = await node.ledger.happenings.emit_durable(unknown)
        client = await SocketClient.connect(tmp_path)
        await client.ask("subscribe_happenings", since=seq - 1)
        expected = {"type": "moon_landed", "at_ms": 5, "by": {"who": "eagle"}}
        assert await client.receive() == {"seq": seq, "happening": expected}
        node.ledger.happenings.emit(unknown)
        assert await client.receive() == {"seq": seq + 1, "happening": expected}
        await client.close()


async def test_names_are_hidden_behind_tokens_that_are_resolved_with_the_right_and_on_record(tmp_path: Path) -> None:
    """With ``claimants = "tokens"`` nothing shows a plugin's name; resolving takes the capability, tells nothing and is on record."""
    async with stewarding(tmp_path, steward={"claimants": "tokens"}) as node:
        plugin = node.ledger.plugin("org.example.secret")
        await plugin.announce_subject("track", [("id", "1")])
        client, subscriber = await SocketClient.connect(tmp_path), await SocketClient.connect(tmp_path)
        await subscriber.ask("subscribe_happenings", filter={"plugins": ["org.example.secret"]})
        await plugin.report_event("e")
        told = (await subscriber.receive())["happening"]
        shown: Any = (await client.ask("list_subjects"))["subjects"]
        token = told["claimant_token"]
        assert shown[0]["addressings"] == [{"scheme": "id", "value": "1", "claimant_token": token}]
        canonical_id = shown[0]["canonical_id"]
        projected = await client.ask("project_subject", canonical_id=canonical_id)
        assert projected["claimant_tokens"] == [token]
        follower = await SocketClient.connect(tmp_path)
        await follower.ask("subscribe_subject", canonical_id=canonical_id)
        followed = (await follower.receive())["projection"]
        assert followed["addressings"] == projected["addressings"]
        assert "org.example" not in str((told, shown, projected, followed))

        seq = node.ledger.happenings.last_seq
        refused = await client.ask("resolve_claimants", tokens=[token])
        assert refused_with(refused) == ("permission_denied", "resolve_claimants_not_granted")
        await client.ask("negotiate", capabilities=["resolve_claimants", "ledger_admin"])
        found = await client.ask("resolve_claimants", tokens=[token, "unknown"])
        assert found == {"resolutions": [{"token": token, "plugin_name": "org.example.secret", "plugin_version": None}]}
        assert node.ledger.happenings.last_seq == seq
        [entry] = (await client.ask("list_admin_entries"))["admin_entries"]
        assert entry["kind"] == "resolve_claimants"
        for each in (client, subscriber, follower):
            await each.close()


async def test_a_stopping_node_waits_neither_for_a_subscriber_that_does_not_read_nor_for_a_call(tmp_path: Path) -> None:
    """Who asked a plugin that has not answered is told that it is gone; what waits for a peer that takes nothing is given up."""
    async with stewarding(tmp_path, steward={"unsent_bytes_max": 4096}, stop_deadline_s=20.0) as node:
        slow, plugin, asker = [await SocketClient.connect(tmp_path) for _ in range(3)]
        await slow.ask("subscribe_happenings")
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        endpoint = node._parts.steward_socket.endpoint  # type: ignore[union-attr]
        subscriber = next(each for each in endpoint.connections if each.is_output_only)
        number = 0
        while not subscriber.is_full:
            node.ledger.happenings.emit(event(number, 20_000))
            number += 1
            await asyncio.sleep(0)
        await plugin.ask("negotiate", capabilities=["plugins"])
        await plugin.ask(
            "load_plugin", plugin="p", interaction_kind="respondent", manifest={"shelves": ["audio.playback"]}
        )
        asker.send("request", shelf="audio.playback", request_type="say")
        assert (await plugin.receive())["kind"] == "request"
        clock = asyncio.get_running_loop()
        started = clock.time()
        await node.stop()
        assert clock.time() - started < node.settings.server.stop_deadline_s / 2
        assert refused_with(await asker.receive()) == ("unavailable", "plugin_unloaded")
        for each in (slow, plugin, asker):
            await each.close()


async def announce_chain(node: RunningNode, subject_count: int) -> str:
    """Tracks that all belong to albums, each of which belongs to the next one; returns the id of the first album."""
    plugin = "org.example.chain"
    commands: list[Command] = [
        AnnounceSubject(plugin=plugin, subject_type="thing", addressings=(Addressing("n", name),), new_id=name)
        for name in (f"t{number:05}" for number in range(subject_count))
    ]
    commands += [
        ClaimRelation(plugin=plugin, source=f"t{number // 8:05}", predicate="has", target=f"t{number:05}")
        for number in range(1, subject_count)
    ]
    await node.ledger.execute_many(commands)
    return "t00000"


CHAIN_CATALOGUE = """
schema_version = 1
[[subjects]]
name = "thing"
[[relation]]
predicate = "has"
source_type = "thing"
target_type = "thing"
"""


@pytest.mark.parametrize("subject_count", [4_000, pytest.param(60_000, marks=pytest.mark.heavy)])
async def test_readers_of_large_projections_do_not_block_the_node(
    tmp_path: Path, subject_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight clients project with the largest scope in a loop: no callback takes 50 ms, and others are answered."""
    async with stewarding(tmp_path, catalogue=CHAIN_CATALOGUE) as node:
        root = await announce_chain(node, subject_count)
        scope = {"relation_predicates": ["has"], "max_depth": 32, "max_visits": 100_000}
        readers = [await SocketClient.connect(tmp_path) for _ in range(8)]
        other = await SocketClient.connect(tmp_path)
        shown = await readers[0].ask("project_subject", canonical_id=root, scope=scope)
        assert shown["walk_truncated"] == (subject_count > 5_000)

        async def project_often(client: SocketClient) -> None:
            for _ in range(3):
                client.send("project_subject", canonical_id=root, scope=scope)
                (size,) = struct.unpack(">I", await client.reader.readexactly(4))
                assert size > 100_000
                for _ in range(size // 10_000):
                    await client.reader.readexactly(10_000)
                await client.reader.readexactly(size % 10_000)

        with measured_callbacks(monkeypatch) as measured:
            reading = asyncio.gather(*map(project_often, readers))
            answered = 0
            while not reading.done():
                assert "flight_modes" in await other.ask("list_flight_modes")
                answered += 1
            await reading
        assert answered > 24
        assert measured.longest_s < CALLBACK_S_MAX, measured
        for client in (*readers, other):
            await client.close()


@pytest.mark.bound("steward.settings.StewardSettings.projection_relations_max")
@crossed
async def test_a_projection_over_the_socket_is_limited_by_its_relations(tmp_path: Path, beyond: Beyond) -> None:
    """With 20 relations allowed, a subject with more shows the nearest 20 and is truncated; with 20 it is not."""
    async with stewarding(tmp_path, catalogue=CHAIN_CATALOGUE, steward={"projection_relations_max": 20}) as node:
        client = await SocketClient.connect(tmp_path)
        scope = {"relation_predicates": ["has"], "max_depth": 32, "max_visits": 100_000}
        for relation_count, is_truncated in ((20, False), (beyond(20), True)):
            root = await announce_chain(node, relation_count + 1)
            shown = await client.ask("project_subject", canonical_id=root, scope=scope)
            count, level = 0, [shown]
            while level:
                count += sum(len(subject["related"]) for subject in level)
                level = [other["nested"] for subject in level for other in subject["related"] if other["nested"]]
            assert (count, shown["walk_truncated"]) == (20, is_truncated)
        await client.close()


@pytest.mark.bound("steward.settings.StewardSettings.projection_bytes_max")
@crossed
async def test_a_projection_over_the_socket_is_limited_by_its_bytes(tmp_path: Path, beyond: Beyond) -> None:
    """States of 60,000 bytes, and a setting that admits one: more are refused with the limit, and the connection stays open."""
    async with stewarding(tmp_path, catalogue=CHAIN_CATALOGUE, steward={"projection_bytes_max": 65_536}) as node:
        root = await announce_chain(node, beyond(1))
        for number in range(beyond(1)):
            await node.ledger.plugin("org.example.chain").update_state(f"t{number:05}", "x" * 60_000)
        client = await SocketClient.connect(tmp_path)
        scope = {"relation_predicates": ["has"], "max_depth": 32}
        answer = await client.ask("project_subject", canonical_id=root, scope=scope)
        assert refused_with(answer) == ("resource_exhausted", "answer_too_large")
        assert "65536 bytes" in answer["error"]["message"]
        assert len((await client.ask("project_subject", canonical_id=root))["state"]) == 60_000
        await client.close()


@pytest.mark.bound("steward.settings.StewardSettings.filter_values_max")
@crossed
async def test_the_names_in_a_filter_are_limited_in_number(tmp_path: Path, beyond: Beyond) -> None:
    """100 names over all lists are accepted; more are refused with the setting."""
    async with stewarding(tmp_path, steward={"filter_values_max": 100}) as node:
        for count, is_refused in ((100, False), (beyond(100), True)):
            client = await SocketClient.connect(tmp_path)
            names = [f"n{number}" for number in range(count)]
            answer = await client.ask("subscribe_happenings", filter={"variants": names[:9], "subjects": names[9:]})
            if is_refused:
                assert refused_with(answer)[0] == "protocol_violation"
                assert "steward.filter_values_max" in answer["error"]["message"]
            else:
                assert answer["subscribed"]
            await client.close()
        assert node.ledger.is_available


@pytest.mark.bound("steward.settings.StewardSettings.filter_bytes_max")
@crossed
async def test_the_names_in_a_filter_are_limited_in_bytes(tmp_path: Path, beyond: Beyond) -> None:
    """Names of 2,000 bytes together are accepted, counted in UTF-8; longer ones are refused with the setting."""
    async with stewarding(tmp_path, steward={"filter_bytes_max": 2000}):
        for size, is_refused in ((2000, False), (beyond(2000), True)):
            client = await SocketClient.connect(tmp_path)
            answer = await client.ask("subscribe_happenings", filter={"plugins": ["é" * 500, "x" * (size - 1000)]})
            if is_refused:
                assert refused_with(answer)[0] == "protocol_violation"
                assert "steward.filter_bytes_max" in answer["error"]["message"]
            else:
                assert answer["subscribed"]
            await client.close()


async def test_a_filter_is_charged_to_the_memory_of_its_connection(tmp_path: Path) -> None:
    """At /happenings the names count as held by the connection, and end the subscription where there is no memory left."""
    async with stewarding(tmp_path, memory_bytes_per_connection_max=1 << 20) as node:
        token = node.token("org.example.reader", topics=["ledger"])
        async with client_of(node, token) as client:
            async with client.subscribe(filter=HappeningFilter(subjects=("x",) * 100)) as happenings:
                assert happenings.current_seq >= 0
            with pytest.raises(TidingsError, match=r"scope .connection.: 1048576 bytes"):
                async with client.subscribe(
                    filter=HappeningFilter(subjects=tuple(f"n{number}" for number in range(9_000)))
                ):
                    pass


async def test_only_its_connection_or_an_administrator_unloads_a_served_plugin(tmp_path: Path) -> None:
    """A plugin that another connection serves, or the node itself, is refused; the one that serves it, and an administrator, may."""
    async with stewarding(tmp_path) as node:
        here, there = await SocketClient.connect(tmp_path), await SocketClient.connect(tmp_path)
        for client in (here, there):
            await client.ask("negotiate", capabilities=["plugins"])
        await here.ask("load_plugin", plugin="served", interaction_kind="respondent")
        node.ledger.plugin("of.the.node", EchoRespondent())
        for plugin in ("served", "of.the.node"):
            refused = await there.ask("unload_plugin", plugin=plugin)
            assert refused_with(refused) == ("permission_denied", "served_elsewhere")
            assert node.ledger.plugins.is_loaded(plugin)

        assert (await here.ask("unload_plugin", plugin="served"))["done"] == "unload_plugin"
        assert not node.ledger.plugins.is_loaded("served")
        await here.ask("load_plugin", plugin="served")
        assert refused_with(await there.ask("unload_plugin", plugin="served"))[1] == "served_elsewhere"
        await there.ask("negotiate", capabilities=["plugins", "ledger_admin"])
        for plugin in ("served", "of.the.node"):
            assert (await there.ask("unload_plugin", plugin=plugin))["done"] == "unload_plugin"
        await there.ask(
            "announce_subject", plugin="nobodys", subject_type="track", addressings=[{"scheme": "n", "value": "1"}]
        )
        await here.ask("negotiate", capabilities=["plugins"])
        assert (await here.ask("unload_plugin", plugin="nobodys"))["done"] == "unload_plugin"
        for client in (here, there):
            await client.close()


class EchoRespondent:
    """A plugin in the node."""

    async def handle_request(self, request: PluginRequest) -> bytes:
        return request.payload
