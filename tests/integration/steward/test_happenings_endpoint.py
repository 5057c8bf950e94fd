"""``/happenings``: the same operations under the node's tokens and policies; and the Python client over it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.access_events import grant_event, revoke_event
from tests.integration.node_support import until
from tidings.access.resources import Action, actor, topic
from tidings.client.errors import ConnectFailed, LedgerRefused, LinkClosed, RemoteUnavailable
from tidings.client.ledger import LedgerClient
from tidings.client.websocket import WebSocketConnector
from tidings.happenings.filters import HappeningFilter
from tidings.ledger.errors import ErrorClass, PluginFailure
from tidings.ledger.handlers import Assignment, Correction, Manifest, PluginRequest
from tidings.testing.node import RunningNode
from tidings.wire.steward import requests

from .support import client_of, stewarding

SHELF = "audio.playback"


async def kind_of_refusal(client: LedgerClient, request: requests.StewardRequest) -> str:
    with pytest.raises(LedgerRefused) as refused:
        await client.call(request)
    return refused.value.kind


async def commit(node: RunningNode, event: Any) -> None:
    """Append an access record, and wait until the node knows it."""
    done = await node.log.append(event)
    await node.services.dispatcher.reached(done.seq)


async def test_nobody_gets_in_without_a_token_that_is_believed(tmp_path: Path) -> None:
    """Without a token, with a bad one, or with something else before it, the connection is refused and closed with 4401."""
    async with stewarding(tmp_path) as node:
        for first in (
            b'{"op":"list_plugins"}',
            b'{"op":"authenticate","token":"nonsense"}',
            b'{"op":"negotiate","capabilities":[]}',
        ):
            link = await WebSocketConnector().connect(node.url.replace("http", "ws") + "/happenings")
            link.send(first)
            assert b"trust_violation" in b"".join(await link.receive())
            with pytest.raises(LinkClosed) as closed:
                await link.receive()
            assert closed.value.close_code == 4401


async def test_a_token_in_the_upgrade_is_verified_before_the_first_message(tmp_path: Path) -> None:
    """A bad one is refused with 401; with a good one the first message may be as long as any other."""
    async with stewarding(tmp_path) as node:
        url = node.url.replace("http", "ws") + "/happenings"
        with pytest.raises(ConnectFailed) as refused:
            await WebSocketConnector(headers={"authorization": "Bearer bad"}).connect(url)
        headers = node.headers("root", roles=["admin"])
        link = await WebSocketConnector(headers=headers).connect(url)
        link.send(b'{"op":"list_plugins"' + b" " * 200_000 + b"}")
        answer = b"".join(await link.receive())
        await link.close()

    assert refused.value.status == 401
    assert b"plugins_inventory" in answer


async def test_each_right_opens_its_operations_and_no_others(tmp_path: Path) -> None:
    """Reading, subscribing, acting and administering each take their own right on the topic ``ledger``."""
    reads, acts = requests.ListPluginsRequest(), requests.RequestRequest(shelf=SHELF, request_type="x")
    async with stewarding(tmp_path) as node:
        everything = node.token("root", roles=["admin"])
        for action in (Action.READ, Action.SUBSCRIBE, Action.PUBLISH, Action.ADMINISTER):
            subject = f"only-{action}"
            await commit(node, grant_event(subject, action, topic("ledger"), actor="root"))
            await commit(node, grant_event(subject, action, actor("nobody"), actor="root"))
            every = ("plugins", "ledger_admin", "appointments_admin", "watches_admin", "grammar_admin")
            token = node.token(subject, spaces=["system"])
            async with client_of(node, token, *every) as client:
                forbidden = "permission_denied/forbidden"
                if action is Action.READ:
                    assert (await client.call(reads))["plugins_inventory"]
                else:
                    assert await kind_of_refusal(client, reads) == forbidden
                if action is Action.PUBLISH:
                    assert await kind_of_refusal(client, acts) == "not_found/shelf_empty"
                else:
                    assert await kind_of_refusal(client, acts) == forbidden
                await client.describe_capabilities()
                assert client.granted == {
                    Action.PUBLISH: {"plugins"},
                    Action.ADMINISTER: set(every) - {"plugins"},
                }.get(action, set())
                if action is Action.SUBSCRIBE:
                    async with client.subscribe() as happenings:
                        assert happenings.current_seq == node.ledger.happenings.last_seq
                else:
                    with pytest.raises(LedgerRefused):
                        await client.subscribe().__aenter__()
        async with client_of(node, everything, "ledger_admin") as client:
            assert "admin_entries" in await client.call(requests.ListAdminEntriesRequest())


async def test_a_plugin_is_the_bearer_itself_or_one_it_may_speak_for(tmp_path: Path) -> None:
    """Another plugin's name takes the right to publish for that actor; an administrator's name does too."""
    async with stewarding(tmp_path) as node:
        token = node.token("org.example.a", topics=["ledger"])
        async with client_of(node, token, "plugins") as client:
            track = await client.plugin("org.example.a").announce_subject("track", [("id", "1")])
            assert track is not None
            with pytest.raises(LedgerRefused) as refused:
                await client.plugin("org.example.b").announce_subject("track", [("id", "2")])
            assert refused.value.kind == "permission_denied/forbidden"
            await commit(node, grant_event("org.example.a", Action.PUBLISH, actor("org.example.b"), actor="root"))
            assert await client.plugin("org.example.b").announce_subject("track", [("id", "2")])
        async with client_of(node, node.token("root", roles=["admin"]), "ledger_admin") as admin:
            merge = requests.MergeSubjectsRequest(
                a=requests.AddressingArgument("id", "1"), b=requests.AddressingArgument("id", "2")
            )
            merged = (await admin.call(merge))["result"]["new_id"]
            [entry] = (await admin.call(requests.ListAdminEntriesRequest()))["admin_entries"]
            assert (entry["kind"], entry["admin_plugin"], entry["target_subject"]) == ("subject_merge", "root", merged)
            assert (await admin.describe_alias(track))["result"]["terminal"]["canonical_id"] == merged


async def test_nothing_after_a_revocation_reaches_a_live_subscriber(tmp_path: Path) -> None:
    """A right that is taken back ends the subscription before anything that was committed later is sent; a capability goes at once."""
    async with stewarding(tmp_path) as node:
        token = node.token("alice", topics=["ledger"])
        plugin = node.ledger.plugin("org.example.p")
        await node.ledger.finish_waiting()
        async with client_of(node, token, "plugins") as client, client.subscribe() as happenings:
            await plugin.report_event("before")
            assert (await anext(happenings))["happening"]["event_type"] == "before"
            await node.log.append(revoke_event("alice", Action.SUBSCRIBE, topic("ledger"), actor="root"))
            await plugin.report_event("after")
            with pytest.raises(LedgerRefused) as refused:
                await anext(happenings)
            assert refused.value.kind == "permission_denied/forbidden"
            event = requests.ReportEventRequest(plugin="alice", event_type="mine")
            await client.call(event)
            await commit(node, revoke_event("alice", Action.PUBLISH, topic("ledger"), actor="root"))
            assert await kind_of_refusal(client, event) == "permission_denied/plugins_not_granted"


async def test_a_plugin_that_lost_its_right_is_called_no_more(tmp_path: Path) -> None:
    """Its connection is closed with the reason; what it had not answered has failed, and the shelf is empty."""
    async with stewarding(tmp_path) as node:
        token = node.token("org.example.player", topics=["ledger"])
        player, manifest = Player(), Manifest(shelves=(SHELF,))
        async with (
            client_of(node, token, "plugins") as its,
            LedgerClient.unix(tmp_path / "s") as asker,
            its.serve_plugin("org.example.player", player, manifest),
        ):
            asking = asyncio.create_task(asker.request(SHELF, "wait"))
            await until(lambda: player.seen == ["waiting"])
            await commit(node, revoke_event("org.example.player", Action.PUBLISH, topic("ledger"), actor="root"))
            with pytest.raises(LedgerRefused) as refused:
                await asking
            assert refused.value.kind == "unavailable/plugin_unloaded"
            with pytest.raises(LedgerRefused) as refused:
                await asker.request(SHELF, "say", b"hello")
            assert refused.value.kind == "not_found/shelf_empty"


async def test_an_action_publishes_where_its_maker_may(tmp_path: Path) -> None:
    """Who may administer the ledger cannot have the node publish to topics that are closed to them; what was refused is not on record."""
    async with stewarding(tmp_path) as node:
        for action in (Action.READ, Action.ADMINISTER):
            await commit(node, grant_event("clockmaker", action, topic("ledger"), actor="root"))
        token = node.token("clockmaker", topics=["alarms"])
        spec = {"appointment_id": "a", "recurrence": {"kind": "periodic", "interval_ms": 60_000}}
        condition = {"kind": "happening_match", "filter": {"variants": ["plugin_event"]}}
        async with client_of(node, token, "appointments_admin", "watches_admin", "ledger_admin") as client:
            for name, kind in (
                ("orders", "permission_denied/forbidden"),
                ("sync", "contract_violation/bad_spec"),
                ("sync.projects", "contract_violation/bad_spec"),
            ):
                act = {"topic": name, "event_type": "ring", "space": "shared:house", "payload": {}}
                for request in (
                    requests.CreateAppointmentRequest(creator="c", spec=spec, action=act),
                    requests.CreateWatchRequest(
                        creator="c", spec={"watch_id": "w", "condition": condition}, action=act
                    ),
                ):
                    assert await kind_of_refusal(client, request) == kind
            act = {"topic": "alarms", "event_type": "ring", "space": "shared:house", "payload": {}}
            never = {"appointment_id": "b", "recurrence": {"kind": "cron", "expr": "0 0 30 2 *"}}
            refused = requests.CreateAppointmentRequest(creator="c", spec=never, action=act)
            assert await kind_of_refusal(client, refused) == "contract_violation/bad_recurrence"
            await client.call(requests.CreateAppointmentRequest(creator="c", spec=spec, action=act))
            for _ in range(2):
                await client.call(requests.CancelAppointmentRequest(creator="c", appointment_id="a"))
            entries = (await client.call(requests.ListAdminEntriesRequest()))["admin_entries"]
            assert [(each["kind"], each["admin_plugin"], each["target_addressing"]["value"]) for each in entries] == [
                ("appointment_create", "clockmaker", "c/a"),
                ("appointment_cancel", "clockmaker", "c/a"),
            ]


async def test_what_a_revoked_reader_asked_for_is_not_shown(tmp_path: Path) -> None:
    """Rights are asked again when the answer is there, as of everything that it shows."""
    async with stewarding(tmp_path) as node, client_of(node, node.token("alice", topics=["ledger"])) as client:
        assert await client.plugins() == []
        await node.log.append(revoke_event("alice", Action.READ, topic("ledger"), actor="root"))
        assert await kind_of_refusal(client, requests.ListPluginsRequest()) == "permission_denied/forbidden"


class Player:
    """A warden in another process."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.never = asyncio.Event()

    async def handle_request(self, request: PluginRequest) -> bytes:
        if request.request_type == "refuse":
            raise PluginFailure(ErrorClass.RESOURCE_EXHAUSTED, "too much", "full")
        if request.request_type == "fail":
            raise ZeroDivisionError
        if request.request_type == "wait":
            self.seen.append("waiting")
            try:
                await self.never.wait()
            finally:
                self.seen.append("withdrawn")
        return request.payload.upper()

    async def take_custody(self, assignment: Assignment) -> None:
        self.seen.append(assignment.custody_type)

    async def correct_course(self, correction: Correction) -> None:
        raise PluginFailure(ErrorClass.UNAVAILABLE, "stuck", "stuck")

    async def release_custody(self, handle_id: str) -> None:
        self.seen.append("released")


@pytest.mark.parametrize("way", ["websocket", "unix"])
async def test_a_plugin_in_another_process_works_like_one_in_process(tmp_path: Path, way: str) -> None:
    """The same handler answers over a connection: requests, refusals, custody with its failure modes, calls that take too long."""
    async with stewarding(tmp_path) as node:

        def client() -> LedgerClient:
            if way == "unix":
                return LedgerClient.unix(tmp_path / "s", capabilities=["plugins"])
            return client_of(node, node.token("root", roles=["admin"]), "plugins")

        player, manifest = Player(), Manifest(shelves=(SHELF,), request_ms_max=300)
        async with client() as its, client() as asker:
            async with its.serve_plugin("org.example.player", player, manifest) as plugin:
                assert await asker.request(SHELF, "say", b"hello") == b"HELLO"
                for wanted, kind in (
                    ("refuse", "resource_exhausted/full"),
                    ("fail", "contract_violation/handler_failed"),
                    ("wait", "unavailable/timed_out"),
                ):
                    with pytest.raises(LedgerRefused) as refused:
                        await asker.request(SHELF, wanted)
                    assert refused.value.kind == kind
                await until(lambda: player.seen == ["waiting", "withdrawn"])
                handle = await asker.take_custody(SHELF, "playback")
                await plugin.report_custody_state(handle, "degraded", b"half")
                with pytest.raises(LedgerRefused) as refused:
                    await asker.correct_course(SHELF, handle, "louder")
                assert refused.value.kind == "unavailable/stuck"
                [record] = [each async for each in asker.custodies()]
                assert record["state"] == {"kind": "aborted", "reason": "stuck"}
                assert record["last_state"]["health"] == "degraded"
                await asker.release_custody(SHELF, handle)
                assert [each async for each in asker.custodies()] == []
                assert player.seen[2:] == ["playback", "released"]
                with pytest.raises(LedgerRefused) as refused:
                    async with asker.serve_plugin("org.example.player", player):
                        pass
                assert refused.value.subclass == "plugin_already_loaded"
            await until(lambda: not node.ledger.plugins.is_loaded("org.example.player"))
            with pytest.raises(LedgerRefused) as refused:
                await asker.request(SHELF, "say")
            assert refused.value.kind == "not_found/shelf_empty"


async def test_a_plugin_is_let_alone_when_whoever_asked_has_gone(tmp_path: Path) -> None:
    """The call is withdrawn with the connection of whoever asked; the plugin does not work on for nobody, and answers the next."""
    async with stewarding(tmp_path) as node:
        token, player = node.token("root", roles=["admin"]), Player()
        manifest = Manifest(shelves=(SHELF,), request_ms_max=60_000)
        async with (
            client_of(node, token, "plugins") as its,
            its.serve_plugin("org.example.player", player, manifest),
            client_of(node, token, "plugins") as asker,
        ):
            asking = asyncio.create_task(asker.request(SHELF, "wait"))
            await until(lambda: player.seen == ["waiting"])
            asking.cancel()  # which closes its connection
            await until(lambda: player.seen == ["waiting", "withdrawn"])
            assert await asker.request(SHELF, "say", b"hello") == b"HELLO"


async def test_the_client_pages_follows_and_resumes(tmp_path: Path) -> None:
    """Lists come whole, subscriptions have a cursor to come back with, and what only reads is asked again on a new connection."""
    async with stewarding(tmp_path) as node:
        plugin = node.ledger.plugin("org.example.p")
        for number in range(5):
            await plugin.announce_subject("track", [("id", str(number))])
        async with client_of(node, node.token("root", roles=["admin"])) as client:
            client_pages = [each["canonical_id"] async for each in client.subjects()]
            assert client_pages == sorted(client_pages)
            assert len(client_pages) == 5
            assert [each["value"] async for each in client.addressings()] == [str(number) for number in range(5)]
            assert (await client.project_subject(client_pages[0]))["canonical_id"] == client_pages[0]
            assert (await client.project_rack("audio"))["charter"] == "plays sound"
            wanted = HappeningFilter(variants=("plugin_event",))
            async with client.subscribe(filter=wanted) as happenings:
                await plugin.report_event("one")
                assert (await anext(happenings))["happening"]["event_type"] == "one"
                resume = happenings.resume_seq
            await plugin.report_event("two")
            async with client.subscribe(since=resume, filter=wanted) as happenings:
                assert (await anext(happenings))["happening"]["event_type"] == "two"
            async with client.subscribe_subject(client_pages[0]) as changes:
                assert (await anext(changes))["projection"]["canonical_id"] == client_pages[0]

            for entrance in (client.subscribe(since=1 << 64), client.subscribe_subject(client_pages[0], since=1 << 64)):
                with pytest.raises(LedgerRefused, match="is no seq") as refused:
                    await entrance.__aenter__()
                assert refused.value.kind == "protocol_violation/invalid_json"

            [connection] = node.connections.endpoints["/happenings"].connections
            connection.close(1011, "cut")
            assert await client.plugins() != []
        with pytest.raises(RemoteUnavailable, match="nowhere"):
            await LedgerClient.unix(tmp_path / "nowhere", patience_s=0).plugins()


async def test_appointments_and_watches_come_in_pages_that_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Asked for by page, each entry comes once, in order, also if some are made and forgotten in between; the client goes through them all."""
    bell = {"target_shelf": SHELF, "request_type": "ring"}
    later = {"kind": "one_shot", "fire_at_ms": 1 << 45}
    match = {"kind": "happening_match", "filter": {"plugins": ["p"]}}
    names = ("appointments_admin", "watches_admin")
    async with stewarding(tmp_path) as node, client_of(node, node.token("root", roles=["admin"]), *names) as client:

        async def make(creator: str, name: str) -> None:
            spec = {"appointment_id": name, "recurrence": later}
            await client.call(requests.CreateAppointmentRequest(creator=creator, spec=spec, action=bell))
            spec = {"watch_id": name, "condition": match}
            await client.call(requests.CreateWatchRequest(creator=creator, spec=spec, action=bell))

        before = [("b", "1"), ("a", "2"), ("a", "1"), ("b", "2"), ("ab", "0")]
        for creator, name in before:
            await make(creator, name)
        for kind, every, id_field in (
            (requests.ListAppointmentsRequest, client.appointments, "appointment_id"),
            (requests.ListWatchesRequest, client.watches, "watch_id"),
        ):
            got, cursor = [], None
            while True:
                page = await client.call(kind(cursor=cursor, page_size=2))
                assert page["current_seq"] == node.ledger.happenings.last_seq
                got += [(each["creator"], each["spec"][id_field]) for each in page["entries"]]
                if (cursor := page["next_cursor"]) is None:
                    break
                await make("a", f"0 {len(got)}")  # those that lie before the page are not seen any more
                await make("c", "new")
            assert got == sorted(set(got))
            assert [each for each in got if each in before] == sorted(before)
            assert got[-1] == ("c", "new")
            whole = await client.call(kind())
            assert "next_cursor" not in whole
            assert whole["entries"] == [each async for each in every()]
            with pytest.raises(LedgerRefused, match="cursor"):
                await client.call(kind(cursor="nonsense"))


async def test_a_stopping_node_gives_what_it_coalesces_and_ends_the_stream(tmp_path: Path) -> None:
    """Frames that are held back for a window are sent before the connection is closed."""
    async with stewarding(tmp_path) as node:
        client = client_of(node, node.token("root", roles=["admin"]), patience_s=0)
        plugin = node.ledger.plugin("org.example.p")
        await node.ledger.finish_waiting()
        async with client.subscribe(coalesce_labels=["variant"], coalesce_window_ms=5000) as happenings:
            await plugin.report_event("held")
            await until(lambda: node.ledger.happenings.last_seq > happenings.current_seq)
            stopping = asyncio.create_task(node.stop())
            assert (await anext(happenings))["happening"]["event_type"] == "held"
            with pytest.raises((StopAsyncIteration, LinkClosed)):
                await anext(happenings)
            await stopping
