"""Deciding rights never holds up the event loop, however many names one request, one batch or one change of access concerns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.callbacks import CALLBACK_S_MAX, measured_callbacks
from tests.integration.api_support import api, event
from tests.integration.test_qa_sync_sockets import item, place
from tidings.access.administration import PolicyPut, event_of
from tidings.server.settings import ApiSettings
from tidings.testing.node import node_settings

POLICY = 'forbid (principal == Subject::"eve", action, resource == Topic::"x");'


def patterns(number: int) -> str:
    """A policy with 170 patterns: about as many as one holds."""
    return "".join(
        f'forbid (principal == Subject::"eve", action, resource) when {{ resource.name like "x{number}.{at}*y" }};'
        for at in range(170)
    )


@pytest.mark.parametrize(
    ("letter", "policies"),
    [("p", [POLICY]), ("é", [POLICY]), ("x", [patterns(number) for number in range(4)])],
    ids=["ascii", "not ascii", "many patterns"],
)
async def test_a_batch_that_names_64_partitions_an_event_does_not_block_the_loop(
    letter: str, policies: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 events with 64 partitions each and stored policies: other requests are answered in between."""
    async with api(tmp_path) as (node, client):
        for number, text in enumerate(policies):
            stored = await client.post("/v1/access/policies", json={"policy_id": f"own{number}", "text": text})
            assert stored.status_code == 201, stored.text
        names = [f"{letter}{number}" for number in range(4_096)]
        batch = [
            {
                "meta": {
                    "topic": "demo",
                    "type": "N",
                    "space_id": "home",
                    "partitions": names[number % 64 * 64 :][:64],
                },
                "payload": {},
            }
            for number in range(1_000)
        ]
        body = json.dumps(batch, ensure_ascii=False, separators=(",", ":")).encode()
        with measured_callbacks(monkeypatch) as measured:
            answer = await client.post(
                "/v1/events",
                content=body,
                headers={"content-type": "application/json", **node.headers("low", topics=["demo"])},
                timeout=60,
            )
        assert answer.json()["appended"] == 1_000
        assert measured.longest_s < CALLBACK_S_MAX, measured


@pytest.mark.bound("server.settings.ApiSettings.partitions_count_max")
@crossed
async def test_a_request_may_name_a_bounded_number_of_partitions(beyond: Beyond, tmp_path: Path) -> None:
    """As many as the setting allows are taken; with more the answer is 413 with both numbers, and nothing is stored."""
    settings = msgspec.structs.replace(node_settings(), api=ApiSettings(partitions_count_max=64))
    async with api(tmp_path, settings) as (node, client):
        for count, status in ((64, 200), (beyond(64), 413)):
            names = [f"p{number}" for number in range(count)]
            batch = [event(1, partitions=names[start:][:64]) for start in range(0, count, 64)]
            answer = await client.post("/v1/events", json=batch)
            assert answer.status_code == status, answer.text
        assert answer.json()["code"] == "api.too_many_partitions"
        assert f"{count} partitions; at most 64" in answer.json()["detail"]
        assert node.log.topics()["demo"].next_offset == 1


@pytest.mark.bound("access.settings.AccessSettings.policies_bytes_max")
@crossed
async def test_the_policies_together_have_a_bounded_length(beyond: Beyond, tmp_path: Path) -> None:
    """A policy with which they would be longer is refused; one that replaces another needs no further space."""
    settings = node_settings()
    access = msgspec.structs.replace(settings.access, policies_bytes_max=1_000)
    async with api(tmp_path, msgspec.structs.replace(settings, access=access)) as (_, client):
        for name, size, status in (("a", 600, 201), ("b", beyond(400), 400), ("b", 400, 201), ("b", 399, 201)):
            text = POLICY.ljust(size)
            answer = await client.post("/v1/access/policies", json={"policy_id": name, "text": text})
            assert answer.status_code == status, answer.text
            assert status == 201 or f"{600 + size} bytes long; at most 1000" in answer.json()["detail"]


async def test_a_sync_batch_that_names_64_partitions_an_item_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 items with 64 partitions each and a stored policy."""
    async with place(tmp_path) as here:
        await here.node.log.append(event_of(PolicyPut(policy_id="own", text=POLICY), actor="test"))
        talker = await here.talker("C1")
        items = [item(f"i{n}", *(f"P{n * 64 + k}" for k in range(64))) for n in range(100)]
        with measured_callbacks(monkeypatch) as measured:
            results = await talker.submit(*items)
        assert [each["status"] for each in results] == ["committed"] * 100
        assert measured.longest_s < CALLBACK_S_MAX, measured


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.heavy)])
async def test_a_policy_that_concerns_many_subscriptions_does_not_block_the_loop(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy takes one partition from connections with 1,000 each; what is committed right behind it reaches none of them."""
    names = [f"P{number}" for number in range(1_000)]
    lost = PolicyPut(policy_id="own", text='forbid (principal, action == Action::"sync", resource == Partition::"P7");')
    async with place(tmp_path) as here:
        talkers = [await here.talker(f"C{number}") for number in range(count)]
        for talker in talkers:
            await talker.sync(*names)
        writer = await here.talker("W")
        with measured_callbacks(monkeypatch) as measured:
            putting = asyncio.ensure_future(here.node.log.append(event_of(lost, actor="test")))
            await asyncio.sleep(0)
            await writer.submit(item("hidden", "P7"), item("shown", "P8"))
            await putting
            heard = [await talker.hear(2) for talker in talkers]
        for first, second in heard:
            assert {first["type"], second["type"]} == {"error", "event_broadcast"}, (first, second)
            broadcast = first if first["type"] == "event_broadcast" else second
            assert broadcast["payload"]["id"] == "shown"
        assert measured.longest_s < CALLBACK_S_MAX, measured
