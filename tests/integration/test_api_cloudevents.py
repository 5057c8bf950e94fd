"""CloudEvents over HTTP: in, out, and back to what they were."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from .api_support import api, event

STRUCTURED = {"content-type": "application/cloudevents+json"}
BATCH = {"content-type": "application/cloudevents-batch+json"}


def cloudevent(number: int = 1, **attributes: Any) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": f"id-{number}",
        "source": "/sensors/kitchen",
        "type": "com.example.measured",
        "time": "2026-03-01T12:00:00Z",
        "subject": "oven",
        "topic": "demo",
        "spaceid": "home",
        "data": {"n": number},
        **attributes,
    }


async def test_a_structured_event_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every attribute that went in comes out again, extensions included, beside the log's own."""
    given = cloudevent(
        partitions="a b",
        objects="order:1 order:2",
        app="shop",
        traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01",
        shade="blue",
        count=3,
    )
    async with api(tmp_path) as (_, client):
        done = await client.post("/v1/events", content=json.dumps(given), headers=STRUCTURED)
        seq = done.json()["seq"]
        out = (await client.get(f"/v1/events/{seq}", headers={"accept": "application/cloudevents+json"})).json()
        stored = (await client.get(f"/v1/events/{seq}")).json()

    assert done.status_code == 201
    assert {name: out[name] for name in given if name != "time"} == {k: v for k, v in given.items() if k != "time"}
    assert out["time"] == "2026-03-01T12:00:00.000000Z"
    assert (out["seq"], out["offset"]) == (seq, 0)
    assert stored["meta"]["event_id"] == "/sensors/kitchen#id-1"
    assert stored["meta"]["trace_id"] == "ab" * 16
    assert stored["meta"]["partitions"] == ["a", "b"]
    assert (stored["meta"]["objects"], stored["meta"]["app"]) == (["order:1", "order:2"], "shop")
    assert stored["payload"] == {"n": 1}


async def test_source_and_id_together_are_what_is_unique(tmp_path: Path) -> None:
    """The same id from another source is another event; the same pair again is a duplicate, and other content a conflict."""
    async with api(tmp_path) as (_, client):

        async def send(**attributes: Any) -> int:
            body = json.dumps(cloudevent(**attributes))
            return (await client.post("/v1/events", content=body, headers=STRUCTURED)).status_code

        assert await send() == 201
        assert await send(source="/other") == 201
        assert await send() == 200
        assert await send(data={"n": "else"}) == 409
        assert await send(source="/" + "long" * 100) == 201
        assert await send(source="/" + "long" * 100) == 200


async def test_a_batch_has_a_verdict_each(tmp_path: Path) -> None:
    """In a batch a bad CloudEvent is refused for itself; what is stored can be read as a batch."""
    batch = [
        cloudevent(1),
        cloudevent(2, specversion="0.3"),
        cloudevent(3, data=[1, 2]),
        "no event",
        cloudevent(4, id=""),
    ]
    async with api(tmp_path) as (_, client):
        answer = (await client.post("/v1/events", content=json.dumps(batch), headers=BATCH)).json()
        read = await client.get("/v1/events?topic=demo", headers={"accept": "application/cloudevents-batch+json"})

    assert [each["verdict"] for each in answer["verdicts"]] == ["appended", "refused", "appended", "refused", "refused"]
    assert read.headers["content-type"] == "application/cloudevents-batch+json"
    assert [each["data"] for each in read.json()] == [{"n": 1}, [1, 2]]
    assert "next" in read.links


async def test_a_binary_event_has_its_attributes_in_headers(tmp_path: Path) -> None:
    """Attributes come from ce-headers, percent-decoded; the body is the data, JSON or not."""
    headers = {
        "ce-specversion": "1.0",
        "ce-id": "b-1",
        "ce-source": "/s",
        "ce-type": "measured",
        "ce-subject": "caf%C3%A9",
        "ce-topic": "demo",
        "ce-spaceid": "home",
        "ce-ttlsec": "60",
    }
    as_cloudevent = {"accept": "application/cloudevents+json"}
    async with api(tmp_path) as (_, client):
        one = await client.post("/v1/events", json={"n": 1}, headers=headers)
        raw = {**headers, "ce-id": "b-2", "content-type": "application/octet-stream"}
        two = await client.post("/v1/events", content=b"\x00\xff", headers=raw)
        bad = await client.post("/v1/events", content=b"{", headers={**headers, "content-type": "application/json"})
        shown = [
            (await client.get(f"/v1/events/{each.json()['seq']}", headers=as_cloudevent)).json() for each in (one, two)
        ]

    assert (shown[0]["data"], shown[0]["subject"], shown[0]["ttlsec"]) == ({"n": 1}, "café", 60)
    assert base64.b64decode(shown[1]["data_base64"]) == b"\x00\xff"
    assert shown[1]["datacontenttype"] == "application/octet-stream"
    assert (bad.status_code, bad.json()["code"]) == (400, "event.invalid_payload")


async def test_topic_and_space_may_come_from_the_address(tmp_path: Path) -> None:
    """A producer that knows nothing of topics posts to an address that names one; without any, the event is refused."""
    given = {name: value for name, value in cloudevent().items() if name not in ("topic", "spaceid")}
    async with api(tmp_path) as (_, client):
        refused = await client.post("/v1/events", content=json.dumps(given), headers=STRUCTURED)
        done = await client.post("/v1/events?topic=demo&space_id=home", content=json.dumps(given), headers=STRUCTURED)

    assert (refused.status_code, refused.json()["detail"]) == (400, "meta.topic: is missing")
    assert done.status_code == 201


async def test_an_event_of_ours_is_a_cloudevent_too(tmp_path: Path) -> None:
    """What was not published as a CloudEvent reads as one: its id, its topic as the source, its payload as the data."""
    async with api(tmp_path) as (_, client):
        await client.post("/v1/events", json=event(7, event_id="mine"))
        read = await client.get("/v1/events", headers={"accept": "application/cloudevents-batch+json"})

    (shown,) = read.json()
    assert (shown["id"], shown["source"], shown["data"]) == ("mine", "/topics/demo", {"n": 7})


async def test_a_bad_cloudevent_is_refused_by_attribute(tmp_path: Path) -> None:
    """Each thing that can be wrong with a CloudEvent is named."""
    wrong: dict[str, dict[str, Any]] = {
        "specversion": {"specversion": "2.0"},
        "source": {"source": None},
        "id": {"id": 7},
        "Shade": {"Shade": "blue"},
        "shade": {"shade": {"deep": True}},
        "data_base64": {"data_base64": "***", "data": None},
        "meta.ts": {"time": "yesterday"},
    }
    async with api(tmp_path) as (_, client):
        fields = []
        for attributes in wrong.values():
            given = {
                name: value
                for name, value in cloudevent(**attributes).items()
                if not (name == "data" and value is None)
            }
            answer = await client.post("/v1/events", content=json.dumps(given), headers=STRUCTURED)
            assert answer.status_code == 400
            fields.append(answer.json()["detail"].partition(":")[0])

    assert fields == list(wrong)
