"""Publishing and reading over HTTP, against a real node; every answer is held against the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tidings.server.api import reading
from tidings.server.settings import ApiSettings
from tidings.testing.node import node_settings

from .api_support import api, event, until


async def test_one_event_is_stored_and_read_back(tmp_path: Path) -> None:
    """A published event is answered with its place, and stands there when it is read."""
    async with api(tmp_path) as (_, client):
        done = await client.post("/v1/events", json=event(7, partitions=["p1"]))
        page = (await client.get("/v1/events", params={"topic": "demo"})).json()

    assert done.status_code == 201
    assert done.json()["verdict"] == "appended"
    (found,) = page["events"]
    assert (found["seq"], found["offset"]) == (done.json()["seq"], done.json()["offset"])
    assert found["payload"] == {"n": 7}
    assert found["meta"]["partitions"] == ["p1"]
    assert found["meta"]["actor"] == "tester"
    assert page["at_end"]


async def test_the_same_event_again_is_a_duplicate(tmp_path: Path) -> None:
    """An event id that is known is answered with the first place; other content under it is a conflict."""
    async with api(tmp_path) as (_, client):
        first = await client.post("/v1/events", json=event(1, event_id="e-1"))
        again = await client.post("/v1/events", json=event(1, event_id="e-1"))
        other = await client.post("/v1/events", json=event(2, event_id="e-1"))

    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert again.json()["seq"] == first.json()["seq"]
    assert other.json()["code"] == "log.id_conflict"


async def test_an_idempotency_key_makes_a_retry_harmless(tmp_path: Path) -> None:
    """A request sent twice under one key is stored once, event by event, quoted or not."""
    async with api(tmp_path) as (node, client):
        one = await client.post("/v1/events", json=event(1), headers={"idempotency-key": '"k-1"'})
        two = await client.post("/v1/events", json=event(1), headers={"idempotency-key": "k-1"})
        for _ in range(2):
            many = await client.post("/v1/events", json=[event(1), event(2)], headers={"idempotency-key": "k-2"})
        bad = await client.post("/v1/events", json=event(1), headers={"idempotency-key": "x" * 300})

        assert node.log.position.seq == 3
    assert (one.status_code, two.status_code) == (201, 200)
    assert [each["verdict"] for each in many.json()["verdicts"]] == ["duplicate", "duplicate"]
    assert bad.status_code == 400
    assert bad.json()["code"] == "api.invalid_request"


async def test_many_events_have_a_verdict_each(tmp_path: Path) -> None:
    """In a batch each bad event is refused for its own reason, and the good ones are stored in order."""
    batch = [
        event(0),
        {"meta": {"topic": "demo"}, "payload": {}},
        event(1, topic="../etc"),
        event(2, ts="yesterday"),
        event(3, partition="misspelt"),
        event(4),
    ]
    async with api(tmp_path) as (_, client):
        answer = (await client.post("/v1/events", json=batch)).json()
        page = (await client.get("/v1/events?topic=demo")).json()

    assert (answer["appended"], answer["duplicate"], answer["refused"]) == (2, 0, 4)
    codes = [each.get("error", {}).get("code") for each in answer["verdicts"]]
    assert codes == [None, "event.invalid", "event.invalid_name", "event.invalid_timestamp", "event.invalid", None]
    assert [each["payload"]["n"] for each in page["events"]] == [0, 4]


async def test_json_lines_go_in_and_out(tmp_path: Path) -> None:
    """Lines are events; what is read as lines can be told apart, and says in its headers how to go on."""
    lines = "\n".join([json.dumps(event(0)), "", "{broken", json.dumps(event(1))])
    ndjson = {"content-type": "application/x-ndjson", "accept": "application/x-ndjson"}
    async with api(tmp_path) as (_, client):
        answer = await client.post("/v1/events", content=lines, headers=ndjson)
        page = await client.get("/v1/events?limit=1", headers={"accept": "application/x-ndjson"})
        rest = await client.get(page.links["next"]["url"])

    verdicts = [json.loads(line) for line in answer.text.splitlines()]
    assert [each["verdict"] for each in verdicts] == ["appended", "refused", "appended"]
    assert [json.loads(line)["payload"]["n"] for line in page.text.splitlines()] == [0]
    assert page.headers["tidings-at-end"] == "false"
    assert [each["payload"]["n"] for each in rest.json()["events"]] == [1]


async def test_too_many_events_are_refused_as_a_whole(tmp_path: Path) -> None:
    """A batch beyond the limit stores nothing, and the answer says what the limit is."""
    settings = msgspec.structs.replace(node_settings(), api=ApiSettings(events_count_max=2))
    async with api(tmp_path, settings) as (node, client):
        answer = await client.post("/v1/events", json=[event(n) for n in range(3)])

        assert node.log.position.seq == 0
    assert answer.status_code == 413
    assert answer.json()["code"] == "api.too_many_events"


async def test_pages_follow_one_another(tmp_path: Path) -> None:
    """Following ``next`` gives every event once, forwards and backwards, and goes on with what comes later."""
    async with api(tmp_path) as (_, client):
        await client.post("/v1/events", json=[event(n) for n in range(25)])
        for direction, expected in (("false", list(range(25))), ("true", list(reversed(range(25))))):
            url, seen, at_end = f"/v1/events?topic=demo&limit=10&backwards={direction}", [], False
            while not at_end:
                page = (await client.get(url)).json()
                seen += [each["payload"]["n"] for each in page["events"]]
                url, at_end = page["next"], page["at_end"]
            assert seen == expected
            if direction == "false":
                tail = url
        await client.post("/v1/events", json=event(25))
        later = (await client.get(tail)).json()

    assert [each["payload"]["n"] for each in later["events"]] == [25]


async def test_conditions_narrow_a_read(tmp_path: Path) -> None:
    """Type, partition, seq, offset, time and id each narrow what is read."""
    async with api(tmp_path) as (_, client):
        first = (await client.post("/v1/events", json=event(0, type="A", partitions=["x"], event_id="first"))).json()
        second = (await client.post("/v1/events", json=event(1, type="B", partitions=["y"]))).json()
        await client.post("/v1/events", json=event(2, type="B", topic="other", partitions=["x", "y"]))
        written = (await client.get(f"/v1/events/{second['seq']}")).json()["meta"]["written_at"]

        async def numbers(query: str) -> list[int]:
            page = (await client.get(f"/v1/events?{query}")).json()
            return [each["payload"]["n"] for each in page["events"]]

        assert await numbers("type=A") == [0]
        assert await numbers("type=A&type=B") == [0, 1, 2]
        assert await numbers("partition=x") == [0, 2]
        assert await numbers(f"since={first['seq']}") == [1, 2]
        assert await numbers(f"until={first['seq']}") == [0]
        assert await numbers("topic=demo&from_offset=1") == [1]
        assert await numbers(f"from_time={written}&topic=demo") == [1]
        assert await numbers("event_id=first") == [0]


async def test_a_read_can_wait_for_what_comes(tmp_path: Path) -> None:
    """A read with ``wait`` is answered when something that fits is committed, and empty when the time is up."""
    async with api(tmp_path) as (_, client):
        await client.post("/v1/events", json=event(0, type="OLD"))
        empty = (await client.get("/v1/events?type=NEW&wait=0.01")).json()
        waiting = asyncio.create_task(client.get("/v1/events?type=NEW&wait=20", timeout=30))
        await client.post("/v1/events", json=event(1, type="OTHER"))
        await client.post("/v1/events", json=event(2, type="NEW"))
        page = (await waiting).json()

    assert empty["events"] == []
    assert [each["payload"]["n"] for each in page["events"]] == [2]


async def test_a_bad_question_names_what_is_wrong(tmp_path: Path) -> None:
    """Unknown, repeated and mistyped parameters are refused by name; so are other epochs and bodies of other kinds."""
    async with api(tmp_path) as (_, client):
        await client.post("/v1/events", json=event(0))
        answers = {
            "query": await client.get("/v1/events?limt=3"),
            "query.limit": await client.get("/v1/events?limit=0"),
            "query.topic": await client.get("/v1/events?from_offset=1"),
            "query.since": await client.get("/v1/events?since=1&since=2"),
            "path.seq": await client.get("/v1/events/minus"),
        }
        epoch = await client.get("/v1/events?since=0&epoch=other")
        text = await client.post("/v1/events", content="hi", headers={"content-type": "text/plain"})
        missing = await client.get("/v1/events/999")
        nowhere = await client.get("/v1/nothing")
        method = await client.delete("/v1/events")

    assert {name: answer.json()["detail"].partition(":")[0] for name, answer in answers.items()} == {
        name: name for name in answers
    }
    assert {answer.status_code for answer in answers.values()} == {400}
    assert (epoch.status_code, epoch.json()["code"]) == (409, "log.epoch_mismatch")
    assert (text.status_code, text.json()["code"]) == (415, "api.unsupported_media")
    assert (missing.status_code, missing.json()["code"]) == (404, "api.unknown_event")
    assert (nowhere.status_code, nowhere.json()["code"]) == (404, "api.unknown_path")
    assert (method.status_code, method.headers["allow"]) == (405, "POST, GET")


async def test_a_problem_carries_the_request_id(tmp_path: Path) -> None:
    """A refusal is a problem document with the id that the request was sent under."""
    async with api(tmp_path) as (_, client):
        answer = await client.post(
            "/v1/events", content=b"{", headers={"x-request-id": "rq-7", "content-type": "application/json"}
        )

    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["request_id"] == answer.headers["x-request-id"] == "rq-7"
    assert problem["type"] == "urn:tidings:error:event.invalid_payload"
    assert problem["status"] == 400


NASTY = [
    "/v1/events?topic=%00",
    "/v1/events?topic=",
    "/v1/events?topic=..%2F..%2Fetc",
    "/v1/events?partition=%00",
    "/v1/events?partition=",
    "/v1/events?partition=%ff%fe",
    "/v1/events?partition=" + "x" * 300,
    "/v1/events?" + "&".join(f"partition=p{n}" for n in range(300)),
    "/v1/events?event_id=%00",
    "/v1/events?event_id=" + "x" * 300,
    "/v1/events?since=99999999999999999999999999",
    "/v1/events?since=9223372036854775808",
    "/v1/events?since=-1",
    "/v1/events?since=1.5",
    "/v1/events?since=9007199254740993&topic=demo",
    "/v1/events?until=0&since=5",
    "/v1/events?from_offset=9223372036854775808&topic=demo",
    "/v1/events?from_offset=7&to_offset=3&topic=demo",
    "/v1/events?from_time=9999-12-31T23:59:59Z",
    "/v1/events?from_time=0001-01-01T00:00:00Z",
    "/v1/events?from_time=2026-13-01",
    "/v1/events?from_time=2026-01-01T00:00:00",
    "/v1/events?to_time=%00",
    "/v1/events?wait=nan",
    "/v1/events?wait=1e999",
    "/v1/events?wait=-1",
    "/v1/events?limit=99999999999999999999",
    "/v1/events?backwards=maybe",
    "/v1/events?backwards=true&wait=1&since=1",
    "/v1/events?epoch=%F0%9F%98%80",
    "/v1/events?known_drops=99999999999999999999",
    "/v1/events?" + "a" * 2000 + "=1",
    "/v1/events/0",
    "/v1/events/99999999999999999999999",
    "/v1/events/%00",
    "/v1/topics/%2e%2e",
    "/v1/topics/" + "x" * 500,
    "/v1/groups/demo/%00",
    "/v1/groups/..%2fx/g",
    "/v1/dead-letters/demo/%2e%2e%2f",
    "/v1/dead-letters?state=alive",
    "/v1/dead-letters?skip=99999999999999999999",
    "/v1/access/grants?subject=%00",
    "/v1/%ff",
]


async def test_no_question_breaks_the_node(tmp_path: Path) -> None:
    """Whatever is asked, the answer is a page or a problem of the caller's, and one that the document has."""
    async with api(tmp_path) as (_, client):
        await client.post("/v1/events", json=event(0))
        answers = {path: await client.get(path, timeout=10) for path in NASTY}

    assert {path: answer.text for path, answer in answers.items() if answer.status_code >= 500} == {}


BODIES = [
    b"",
    b"null",
    b"[]",
    b"[[]]",
    b"{}",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"meta":' * 3000,
    b'{"meta":{"topic":"demo","type":"T","space_id":"s"},"payload":{"n":1e999}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s"},"payload":{"n":123456789012345678901234567890}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s"},"payload":{"n":"\\ud800"}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s"},"payload":[]}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s","partitions":"p"},"payload":{}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s","qos":{"priority":"high"},"priority":1.5},"payload":{}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s","event_id":"\\u0000"},"payload":{}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s","ttl_sec":99999999999999999999},"payload":{}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s","ts":"2300-01-01T00:00:00Z"},"payload":{}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s","extra":{"topic":"other"}},"payload":{}}',
    b'{"meta":{"topic":"demo","type":"T","space_id":"s"},"payload":' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}",
]


@pytest.mark.parametrize("media", ["json", "x-ndjson", "cloudevents+json", "cloudevents-batch+json"])
async def test_no_body_breaks_the_node(tmp_path: Path, media: str) -> None:
    """Whatever is sent, the answer has verdicts or names what is wrong, and is one that the document has."""
    headers = {"content-type": f"application/{media}"}
    async with api(tmp_path) as (_, client):
        answers = [await client.post("/v1/events", content=body, headers=headers) for body in BODIES]
        after = await client.post("/v1/events", json=event(1))

    assert [answer.text for answer in answers if answer.status_code >= 500] == []
    assert all(answer.json()["detail"] for answer in answers if answer.status_code >= 400)
    assert after.status_code == 201


@pytest.mark.parametrize("backwards", ["false", "true"])
@pytest.mark.parametrize("limit", [1, 3])
async def test_a_small_page_over_hidden_records_costs_few_reads_and_misses_nothing(
    limit: int, backwards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 records that may not be read lie between those that may: pages of one or three look at many of them together."""
    async with api(tmp_path) as (node, client):
        shown = {0, 1, 5, 400, 401, 402, 403, 999}
        batch = [event(n, topic="demo" if n in shown else "secret") for n in range(1_000)]
        await client.post("/v1/events", json=batch)
        reads, read = 0, node.log.read

        async def counted(*given: Any, **options: Any) -> Any:
            nonlocal reads
            reads += 1
            return await read(*given, **options)

        monkeypatch.setattr(node.log, "read", counted)
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("low", topics=["demo"])) as low:
            url, seen, at_end = f"/v1/events?limit={limit}&backwards={backwards}", list[int](), False
            while not at_end:
                page = (await low.get(url)).json()
                assert len(page["events"]) <= limit
                seen += [each["payload"]["n"] for each in page["events"]]
                url, at_end = page["next"], page["at_end"]

    assert seen == sorted(shown, reverse=backwards == "true")
    assert reads < 50


async def test_reads_that_wait_for_any_topic_are_woken_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others publish what a waiting reader may not see, it looks at the log ten times a second and not at every commit."""
    looks, gather = 0, reading._gather

    async def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return await gather(*given)

    monkeypatch.setattr(reading, "_gather", counted)
    async with (
        api(tmp_path) as (node, client),
        httpx.AsyncClient(base_url=node.url, headers=node.headers("low", topics=["demo"])) as low,
    ):
        waiting = asyncio.ensure_future(low.get("/v1/events?wait=20"))
        await until(lambda: looks)
        started_s = asyncio.get_running_loop().time()
        for number in range(100):
            await client.post("/v1/events", json=event(number, topic="secret"))
        took_s = asyncio.get_running_loop().time() - started_s
        await client.post("/v1/events", json=event(7))
        page = (await waiting).json()

    assert [each["payload"]["n"] for each in page["events"]] == [7]
    assert looks <= 5 + took_s * 10
