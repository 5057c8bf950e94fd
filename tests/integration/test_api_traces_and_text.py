"""What other makers' tools expect of the HTTP API: traces that go on, lines that stay whole, CloudEvents as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.beyond import Beyond, crossed
from tidings.server.api.cloudevents import name_of_type
from tidings.server.api.envelopes import _event as server_sent_event
from tidings.testing.node import running_node

from .api_support import api, event

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
STRUCTURED = {"content-type": "application/cloudevents+json"}
TEXT = "a\u2028b\u2029c\u0085d"


async def stored(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    return [each["meta"] for each in (await client.get("/v1/events?topic=demo")).json()["events"]]


async def test_an_event_gets_the_trace_of_its_request(tmp_path: Path) -> None:
    """Alone or in a list, an event without a trace is in that of the headers; one with a trace of its own keeps it."""
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    own = f"00-{'1' * 32}-{'2' * 16}-01"
    async with api(tmp_path) as (_, client):
        await client.post("/v1/events", json=event(event_id="one"), headers=headers)
        drafts = [event(event_id="two"), event(trace_id="mine"), event(extra={"traceparent": own})]
        await client.post("/v1/events", json=drafts, headers=headers)
        again = await client.post("/v1/events", json=event(event_id="one"), headers={"traceparent": own})
        metas = await stored(client)

    assert again.status_code == 200
    assert [(meta.get("trace_id"), (meta.get("extra") or {}).get("traceparent")) for meta in metas] == [
        (TRACE, PARENT),
        (TRACE, PARENT),
        ("mine", None),
        (None, own),
    ]
    assert metas[0]["extra"]["tracestate"] == "vendor=1"


@pytest.mark.bound("server.api.publishing._TRACESTATE_CHARS_MAX")
@crossed
@pytest.mark.parametrize(
    "parent",
    ["", "nonsense", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", PARENT.upper()],
)
async def test_a_header_that_is_no_trace_is_left_out(tmp_path: Path, parent: str, beyond: Beyond) -> None:
    """An invalid ``traceparent`` does not refuse the event, and is not stored; a ``tracestate`` that is too long is left out."""
    async with api(tmp_path) as (_, client):
        await client.post("/v1/events", json=event(), headers={"traceparent": parent, "tracestate": "a=1"})
        long = {"traceparent": PARENT, "tracestate": "x" * beyond(512)}
        await client.post("/v1/events", json=event(), headers=long)
        first, second = await stored(client)

    assert "trace_id" not in first
    assert "extra" not in first
    assert second["extra"] == {"traceparent": PARENT}


async def test_line_separators_are_escaped_on_the_way_out(tmp_path: Path) -> None:
    """NDJSON, JSON, CloudEvents and event streams have no character that splits text into lines; the text is the same."""
    async with running_node(tmp_path) as node:
        headers = node.headers(roles=["admin"])
        async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=20) as client:
            body = {**event(), "payload": {"text": TEXT}}
            assert (await client.post("/v1/events", json=body)).status_code == 201
            await client.post("/v1/events", json=event())
            lines = await client.get("/v1/events?topic=demo", headers={"accept": "application/x-ndjson"})
            page = await client.get("/v1/events?topic=demo")
            one = await client.get("/v1/events/1")
            clouds = await client.get("/v1/events?topic=demo", headers={"accept": "application/cloudevents-batch+json"})
    block = server_sent_event(json.dumps({"text": TEXT}, ensure_ascii=False).encode(), 1).decode()

    assert len(lines.text.splitlines()) == 2
    assert json.loads(lines.text.splitlines()[0])["payload"] == {"text": TEXT}
    for text in (page.text, one.text, clouds.text, block):
        assert not {"\u2028", "\u2029", "\u0085"} & set(text)
    assert page.json()["events"][0]["payload"] == {"text": TEXT}
    assert one.json()["payload"] == {"text": TEXT}
    assert clouds.json()[0]["data"] == {"text": TEXT}
    assert "\\u2028" in block


async def test_an_event_stream_has_no_id_after_the_event_of_that_id(tmp_path: Path) -> None:
    """Its first block says when to connect again; a block without data comes only where no event has its id."""
    async with running_node(tmp_path) as node:
        headers = {**node.headers(roles=["admin"]), "accept": "text/event-stream"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=20) as client:
            for number in range(3):
                await client.post("/v1/events", json=event(objects=[f"order:{number}"]))
            async with client.stream("GET", "/v1/envelopes?since=0&domain_id=demo") as response:
                text, posted = "", False
                async for part in response.aiter_text():
                    text += part
                    if text.count("data:") == 3 and not posted:
                        posted = True
                        await client.post("/v1/events", json=event())
                        await client.post("/v1/events", json=event(objects=["order:9"]))
                    if text.count("data:") == 4:
                        break

    blocks = [block.splitlines() for block in text.strip("\n").split("\n\n")]
    assert blocks[0][0] == "retry: 3000"
    assert [[line.partition(":")[0] for line in block] for block in blocks] == [["retry", "id", "data"]] + [
        ["id", "data"]
    ] * 3


def cloudevent(**attributes: Any) -> dict[str, Any]:
    given = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "topic": "demo", "spaceid": "home"}
    return {name: value for name, value in (given | attributes).items() if value is not None}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("com.example.measured", "com.example.measured"),
        ("https://example.com/events/order.placed", "https.example.com.events.order.placed"),
        ("Object Created", "Object.Created"),
        ("Bestellung ge\u00e4ndert", "Bestellung.geandert"),
        ("_a__b_", "a.b"),
        ("\u6ce8\u6587", None),
        ("x" * 500, None),
        ("-", None),
        (". .", None),
    ],
)
async def test_a_type_that_is_no_name_is_kept_beside_one(tmp_path: Path, kind: str, name: str | None) -> None:
    """Any text is a CloudEvent's type: the event is stored under a name made from it, and comes out with its own."""
    async with api(tmp_path) as (_, client):
        answer = await client.post("/v1/events", content=json.dumps(cloudevent(type=kind)), headers=STRUCTURED)
        assert answer.status_code == 201, answer.text
        (meta,) = await stored(client)
        shown = (await client.get("/v1/events/1", headers={"accept": "application/cloudevents+json"})).json()

    assert shown["type"] == kind
    assert meta["type"] == name_of_type(kind)
    assert name in (None, meta["type"])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("subject", ""),
        ("datacontenttype", ""),
        ("dataschema", ""),
        ("dataschema", "a b"),
        ("source", "a b"),
        ("source", "a\nb"),
        ("number", 2**31),
        ("number", -(2**31) - 1),
        ("number", 2**40),
    ],
)
async def test_an_invalid_cloudevent_is_refused(tmp_path: Path, attribute: str, value: object) -> None:
    """Empty optional texts, URIs with blanks, and integers beyond 32 bits: the answer names the attribute."""
    async with api(tmp_path) as (_, client):
        given = json.dumps(cloudevent(**{attribute: value}))
        answer = await client.post("/v1/events", content=given, headers=STRUCTURED)

    assert answer.status_code == 400
    assert attribute in answer.json()["detail"]


async def test_an_integer_of_32_bits_is_taken(tmp_path: Path) -> None:
    """The largest and the smallest come back as they were."""
    async with api(tmp_path) as (_, client):
        given = json.dumps(cloudevent(most=2**31 - 1, least=-(2**31)))
        assert (await client.post("/v1/events", content=given, headers=STRUCTURED)).status_code == 201
        shown = (await client.get("/v1/events/1", headers={"accept": "application/cloudevents+json"})).json()

    assert (shown["most"], shown["least"]) == (2**31 - 1, -(2**31))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (r'"say \"hi\""', 'say "hi"'),
        (r'"back\\slash"', r"back\slash"),
        ('"plain"', "plain"),
        ("plain", "plain"),
        ('say "hi"', 'say "hi"'),
        ("%22hi%22", '"hi"'),
        ("Euro%20%E2%82%AC", "Euro \u20ac"),
    ],
)
async def test_a_quoted_header_is_unquoted(tmp_path: Path, header: str, text: str) -> None:
    """One pair of quotes and the backslashes within go, then percent escapes: section 3.1.3.2 of the HTTP binding."""
    headers = {f"ce-{name}": value for name, value in cloudevent().items()}
    async with api(tmp_path) as (_, client):
        answer = await client.post("/v1/events", json={}, headers={**headers, "ce-subject": header})
        assert answer.status_code == 201, answer.text
        shown = (await client.get("/v1/events/1", headers={"accept": "application/cloudevents+json"})).json()

    assert shown["subject"] == text
