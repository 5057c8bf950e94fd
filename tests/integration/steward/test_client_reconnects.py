"""A client of the ledger whose connection breaks: it goes on by itself where that is safe, and says so where it is not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.node_support import until
from tests.integration.steward.support import client_of, stewarding
from tidings.client.errors import AnswerLost, LedgerRefused, RemoteStopped
from tidings.client.ledger import LedgerClient, RemoteHappenings
from tidings.ledger import Manifest, PluginRequest
from tidings.testing.node import RunningNode
from tidings.wire.steward import requests

SHELF = "audio.player"


class Hasty(random.Random):
    """Draws pauses of no length."""

    def uniform(self, a: float, b: float) -> float:
        return a


def connections(node: RunningNode) -> list[Any]:
    """The connections at ``/happenings``."""
    return list(node.connections.endpoints["/happenings"].connections)


async def events(happenings: RemoteHappenings, count: int) -> list[str]:
    """What the next events of plugins are called."""
    found: list[str] = []
    while len(found) < count:
        happening = (await anext(happenings))["happening"]
        if happening["type"] == "plugin_event":
            found.append(happening["event_type"])
    return found


async def test_a_subscription_goes_on_after_the_last_happening_without_gap_or_repeat(tmp_path: Path) -> None:
    """Through cuts and a restart of the node, in which more happens, each happening comes once and in order."""
    async with LedgerClient.unix(tmp_path / "s") as client:
        async with stewarding(tmp_path) as node:
            plugin = node.ledger.plugin("org.example.p")
            subscription = client.subscribe()
            await subscription.__aenter__()
            await plugin.report_event("one")
            assert await events(subscription, 1) == ["one"]
            for name in ("two", "three"):  # sent, perhaps, but not taken by anybody
                await plugin.report_event(name)
            assert subscription._talk is not None
            subscription._talk.link._transport.abort()  # type: ignore[attr-defined]
            assert await events(subscription, 2) == ["two", "three"]
            waiting = asyncio.create_task(events(subscription, 3))
        async with stewarding(tmp_path) as node:
            plugin = node.ledger.plugin("org.example.p")
            for name in ("four", "five", "six"):
                await plugin.report_event(name)
            got = await waiting
            assert got == ["four", "five", "six"]
            assert subscription.resume_seq == node.ledger.happenings.last_seq
            await subscription.__aexit__(None, None, None)


async def test_a_subject_is_followed_through_a_break_to_what_it_was_merged_into(tmp_path: Path) -> None:
    """After a break the projection comes as it is then, of the subject that it was merged into meanwhile."""
    async with stewarding(tmp_path) as node:
        plugin = node.ledger.plugin("org.example.p")
        one, two = [await plugin.announce_subject("track", [("id", name)]) for name in ("one", "two")]
        async with (
            client_of(node, node.token("root", roles=["admin"])) as client,
            client.subscribe_subject(str(one.canonical_id)) as changes,
        ):
            assert (await anext(changes))["canonical_id"] == one.canonical_id
            for connection in connections(node):
                connection.close(1011, "cut")
            merged_id = await node.ledger.admin("adm").merge_subjects(str(one.canonical_id), str(two.canonical_id))
            async with asyncio.timeout(30):
                while (await anext(changes))["canonical_id"] != merged_id:
                    pass


async def test_a_verb_whose_answer_was_lost_says_whether_it_may_be_repeated(tmp_path: Path) -> None:
    """What was sent and not answered is not sent again: it was done once, and the error says what asking again would do."""
    async with stewarding(tmp_path) as node:
        asked: list[bytes] = []

        class Cutting:
            async def handle_request(self, request: PluginRequest) -> bytes:
                asked.append(request.payload)
                for connection in connections(node):
                    connection.close(1011, "cut")
                return b""

        node.ledger.plugin("org.example.player", Cutting(), Manifest(shelves=(SHELF,)))
        async with client_of(node, node.token("root", roles=["admin"]), "plugins") as client:
            with pytest.raises(AnswerLost, match="whether request was done") as lost:
                await client.request(SHELF, "say", b"hello")
            assert not lost.value.may_repeat
            assert asked == [b"hello"]

            execute, plugin = node.ledger.execute, client.plugin("org.example.q")

            async def cut_off(*commands: Any) -> Any:
                done = await execute(*commands)
                for connection in connections(node):
                    connection.close(1011, "cut")
                return done

            await plugin.announce_subject("track", [("id", "1")])
            node.ledger.execute = cut_off  # type: ignore[assignment, method-assign]
            with pytest.raises(AnswerLost, match="whether update_state was done") as lost:
                await plugin.update_state(("id", "1"), {"volume": 3})
            assert lost.value.may_repeat
            node.ledger.execute = execute  # type: ignore[method-assign]
            await plugin.update_state(("id", "1"), {"volume": 3})  # on a connection of its own accord


async def test_a_connection_that_ended_while_idle_costs_no_verb(tmp_path: Path) -> None:
    """The end was known before anything was sent, so a new connection is opened and the verb is done, once."""
    async with (
        stewarding(tmp_path) as node,
        client_of(node, node.token("root", roles=["admin"]), "plugins") as client,
    ):
        plugin = client.plugin("org.example.q")
        await plugin.announce_subject("track", [("id", "1")])
        for connection in connections(node):
            connection.close(1001, "the node is stopping")
        await until(lambda: client._talk is not None and not client._talk.is_open)
        await plugin.announce_subject("track", [("id", "2")])
        assert len([each async for each in client.subjects()]) == 2


async def test_a_fresh_token_is_tried_a_few_times_and_another_log_is_not_followed(tmp_path: Path) -> None:
    """A source of tokens is asked again after a refusal; a cursor of another life of the log is refused, not misread."""
    tokens = iter(["bad", "bad"])
    async with stewarding(tmp_path) as node:
        good = node.token("root", roles=["admin"])
        async with LedgerClient(node.url, token=lambda: next(tokens, good), rng=Hasty()) as client:
            assert await client.plugins() == []
        async with LedgerClient(node.url, token=lambda: "bad", rng=Hasty()) as client:
            with pytest.raises(RemoteStopped):
                await client.plugins()
        async with client_of(node, good) as client, client.subscribe() as happenings:
            happenings.epoch = "another"
            for connection in connections(node):
                connection.close(1011, "cut")
            with pytest.raises(LedgerRefused, match="another"):
                await anext(happenings)


def test_what_changes_something_is_not_taken_for_a_read() -> None:
    """Only operations that list, show, follow or say who one is are asked again by themselves."""
    reading = ("list_", "project_", "describe_", "subscribe_", "resolve_", "enumerate_", "negotiate", "authenticate")
    for op, request in requests.REQUESTS.items():
        assert (request.twice == "read") == op.startswith(reading), op
