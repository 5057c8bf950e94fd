"""Limits of the HTTP API at a node's socket: at the limit a request is answered; beyond it the answer says so, or is cut to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.integration.api_support import api, event
from tests.integration.node_support import until
from tidings import Nack
from tidings.access import administration, resources
from tidings.access.context import TokenClaims
from tidings.access.settings import AccessSettings, TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.events import Event, EventMeta
from tidings.server.api import publishing
from tidings.server.settings import NodeSettings
from tidings.testing.node import TEST_SECRET, RunningNode, node_settings
from tidings.wire.events import EventDefaults


@asynccontextmanager
async def node_with(
    folder: Path, settings: NodeSettings | None = None, **limits: Any
) -> AsyncIterator[tuple[RunningNode, httpx.AsyncClient]]:
    """A node whose API has these limits, and an administrator's client."""
    given = settings or node_settings()
    changed = msgspec.structs.replace(given, api=msgspec.structs.replace(given.api, **limits))
    async with api(folder, changed) as pair:
        yield pair


async def fill(node: RunningNode, count: int, topic: str = "demo", **payload: Any) -> None:
    events = [Event(EventMeta(topic, "NOTED", "home"), {"n": number, **payload}) for number in range(count)]
    await node.bus.publish_many(events)


async def pages_of(client: httpx.AsyncClient, url: str) -> list[int]:
    """Follow pages to the end. Return the number of events of each."""
    counts = []
    for _ in range(100):
        page = (await client.get(url)).json()
        counts.append(len(page["events"]))
        if page["at_end"]:
            return counts
        url = page["next"]
    raise AssertionError("no end after 100 pages")


@pytest.mark.bound("server.settings.ApiSettings.events_count_max")
@crossed
async def test_a_request_with_more_events_is_refused_whole(tmp_path: Path, beyond: Beyond) -> None:
    """As many events as allowed are stored; a longer list is answered with 4xx, and nothing of it is stored."""
    async with node_with(tmp_path, events_count_max=5) as (node, client):
        before = node.bus.log.position.seq
        answer = await client.post("/v1/events", json=[event(number) for number in range(beyond(5))])
        assert (answer.status_code // 100, node.bus.log.position.seq) == (4, before)
        assert (await client.post("/v1/events", json=[event(number) for number in range(5)])).status_code < 300


@pytest.mark.bound("server.settings.ApiSettings.page_count_max")
@crossed
async def test_a_larger_page_is_cut(tmp_path: Path, beyond: Beyond) -> None:
    """A page has at most as many events as allowed, and ``next_since`` leads through all of them once."""
    async with node_with(tmp_path, page_count_max=5) as (node, client):
        await fill(node, beyond(5))
        pages = await pages_of(client, f"/v1/events?topic=demo&since=0&limit={beyond(5)}")
        assert (max(pages), sum(pages)) == (5, beyond(5))


@pytest.mark.bound("server.settings.ApiSettings.page_bytes_max")
@crossed
async def test_a_page_ends_at_its_bytes(tmp_path: Path, beyond: Beyond) -> None:
    """Pages of large events are about as large as allowed; one larger event is a page of its own."""
    async with node_with(tmp_path, page_bytes_max=10_000) as (node, client):
        await fill(node, 3, text="x" * (beyond(10_000) // 2))
        pages = await pages_of(client, "/v1/events?topic=demo&since=0&limit=100")
        assert (max(pages) < 3, sum(pages)) == (True, 3)


@pytest.mark.bound("server.settings.ApiSettings.scan_count_max")
@crossed
async def test_a_search_ends_after_the_records_it_may_look_at(tmp_path: Path, beyond: Beyond) -> None:
    """A page whose filter matches nothing for long ends early with the place to continue from; the match is found in the end."""
    async with node_with(tmp_path, scan_count_max=512) as (node, client):
        await fill(node, beyond(512) + 512)  # a page may look at as many more
        await node.bus.publish("demo", {}, type="RARE", space="home")
        pages = await pages_of(client, "/v1/events?topic=demo&type=RARE&since=0&limit=64")
        assert (sum(pages), len(pages) > 1) == (1, True)


@pytest.mark.bound("server.settings.ApiSettings.wait_s_max")
@crossed
async def test_a_read_waits_no_longer_than_allowed(tmp_path: Path, beyond: Beyond) -> None:
    """A read that asks to wait longer is answered, empty, after the longest time."""
    async with node_with(tmp_path, wait_s_max=0.2) as (node, client):
        since = node.bus.log.position.seq
        started_s = time.monotonic()
        params: dict[str, Any] = {"topic": "demo", "since": since, "wait": 0.2 * beyond(1)}
        page = (await client.get("/v1/events", params=params)).json()
        assert page["events"] == []
        assert 0.15 < time.monotonic() - started_s < 10.0


@pytest.mark.bound("server.settings.ApiSettings.publish_timeout_s")
@crossed
async def test_a_publish_that_waits_too_long_is_refused(tmp_path: Path, beyond: Beyond) -> None:
    """A publish for which a window stays full is answered with 503 and ``Retry-After``; nothing of it is stored."""
    opened = asyncio.Event()

    async def handle(received: object) -> None:
        await asyncio.wait_for(opened.wait(), 30)

    async with node_with(tmp_path, publish_timeout_s=0.1) as (node, client):
        await node.bus.subscribe("demo", "slow", handle, max_inflight=1, stall_timeout_s=3_600)
        await node.bus.publish("demo", {}, type="NOTED", space="home")
        for number in range(beyond(1) - 1):
            answer = await client.post("/v1/events", json=event(number))
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
        assert node.bus.log.topics()["demo"].next_offset == 1
        opened.set()


@pytest.mark.bound("server.settings.ApiSettings.letters_count_max")
@crossed
async def test_a_page_and_a_change_of_dead_letters_are_limited(tmp_path: Path, beyond: Beyond) -> None:
    """A page lists at most as many letters as allowed; dropping more takes several requests or is refused, and none is lost count of."""
    async with node_with(tmp_path, letters_count_max=5) as (node, client):
        await node.bus.subscribe("demo", "g", lambda received: Nack(), max_retries=0, workers=8)
        await fill(node, beyond(5))
        await until(lambda: node.bus.lag("demo", "g") == 0)
        page = (await client.get("/v1/dead-letters", params={"topic": "demo", "limit": beyond(5)})).json()
        assert (len(page["dead_letters"]), page["count"]) == (5, beyond(5))
        dropped = 0
        for _ in range(20):
            answer = await client.post("/v1/dead-letters/drop", json={"topic": "demo", "group": "g"})
            if answer.status_code != 200:
                assert answer.status_code in (400, 413, 422)
                break
            dropped += len(answer.json()["dead_letters"])
            assert len(answer.json()["dead_letters"]) <= 5
            if not answer.json()["dead_letters"]:
                break
        left = (await client.get("/v1/dead-letters", params={"topic": "demo"})).json()["count"]
        assert left + dropped == beyond(5)


# Access


@pytest.mark.bound("access.settings.TokenSettings.token_bytes_max")
@crossed
async def test_a_longer_token_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """A good token within the limit is accepted; a longer one is answered with 401."""
    given = node_settings()
    tokens = TokenSettings(secret=TEST_SECRET, token_bytes_max=1_000)
    settings = msgspec.structs.replace(given, access=AccessSettings(tokens=tokens))
    async with node_with(tmp_path, settings) as (node, client):
        good = node.token("ana", roles=["admin"])
        assert len(good) <= 1_000
        issuer = TokenIssuer(TokenSettings(secret=TEST_SECRET), SYSTEM_CLOCK)
        claims = TokenClaims(roles=frozenset({"admin"}), topics=frozenset(f"topic{n}" for n in range(beyond(100))))
        long = issuer.issue("ana", claims=claims)
        assert len(long) > 1_000
        for token, status in ((good, 200), (long, 401)):
            answer = await client.get("/v1/topics", headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == status


@pytest.mark.bound(
    "access.settings.AccessSettings.policies_count_max", "access.settings.AccessSettings.policy_bytes_max"
)
@crossed
async def test_policies_are_limited_in_number_and_size(tmp_path: Path, beyond: Beyond) -> None:
    """One more policy, and a longer one, are refused; those in force stay."""
    given = node_settings()
    access = AccessSettings(tokens=TokenSettings(secret=TEST_SECRET), policies_count_max=3, policy_bytes_max=1_000)
    async with node_with(tmp_path, msgspec.structs.replace(given, access=access)) as (_, client):

        async def put(name: str, size: int = 0) -> int:
            text = 'forbid (principal, action, resource == Topic::"hidden");'
            text += "//" + "x" * (size - len(text) - 2) if size else ""
            body = {"type": "access.policy_put", "policy_id": name, "text": text}
            return (await client.post("/v1/access/policies", json=body)).status_code

        assert [await put(f"p{number}") for number in range(3)] == [201] * 3
        assert {await put(f"p{number}") // 100 for number in range(3, beyond(3))} == {4}
        assert await put("p0", 1_000) == 201
        assert await put("p0", beyond(1_000)) // 100 == 4
        assert len((await client.get("/v1/access/policies")).json()["policies"]) == 3


@pytest.mark.bound("access.resources.NAME_BYTES_MAX", "access.administration.REASON_BYTES_MAX")
@crossed
async def test_a_longer_name_or_reason_is_refused(tmp_path: Path, beyond: Beyond) -> None:
    """A grant whose subject or reason is longer is answered with 400, and no grant is in force."""
    async with node_with(tmp_path) as (_, client):

        async def grant(subject: str, reason: str) -> int:
            body = {
                "type": "access.grant",
                "subject": subject,
                "action": "read",
                "resource": "topic:demo",
                "reason": reason,
            }
            return (await client.post("/v1/access/grants", json=body)).status_code

        assert await grant("s" * beyond(resources.NAME_BYTES_MAX), "why") == 400
        assert await grant("ana", "r" * beyond(administration.REASON_BYTES_MAX)) == 400
        assert (await client.get("/v1/access/grants")).json()["rules"] == []
        assert await grant("s" * resources.NAME_BYTES_MAX, "r" * administration.REASON_BYTES_MAX) == 201


@pytest.mark.bound("server.api.publishing._BLANK_LINES_MAX")
@crossed
async def test_a_body_of_far_more_lines_is_refused_before_it_is_split(tmp_path: Path, beyond: Beyond) -> None:
    """Blank lines are skipped up to the limit; a body of more lines is 413, though none of them holds an event."""
    async with node_with(tmp_path, events_count_max=5) as (node, client):
        headers = {"content-type": "application/x-ndjson"}
        line = msgspec.json.encode(event())
        good = await client.post("/v1/events", content=line + b"\n" * (16 * 5), headers=headers)
        assert good.status_code == 200
        before = node.bus.log.position.seq
        more = await client.post("/v1/events", content=b"\n" * beyond(16 * 5), headers=headers)
        assert (more.status_code, node.bus.log.position.seq) == (413, before)


async def test_a_list_of_large_events_is_decoded_in_slices() -> None:
    """Between events of a long list, other requests get their turn: no callback decodes more than one large event."""
    payload = {"numbers": [0.5] * 20_000}
    item = msgspec.json.encode({"meta": event()["meta"], "payload": payload})
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    decoded = await publishing._drafts([item] * 40, EventDefaults(actor="tester"))
    counting.cancel()
    assert (len(decoded), turns >= 30) == (40, True)
