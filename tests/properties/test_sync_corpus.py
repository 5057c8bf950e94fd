"""The scenarios' own messages as a corpus: mutated, repeated, dropped and reordered, they never crash the endpoint."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tests.scenarios.sync_transcripts.player import FOLDER
from tests.unit.sync.support import OPEN_SCHEMAS, Peer, open_world
from tidings.log.interface import Query
from tidings.sync.settings import SyncSettings

CODES = {
    *("auth_failed", "bad_request", "forbidden", "rate_limited"),
    *("protocol_version_unsupported", "profile_unsupported", "protocolVersion_unsupported"),
}


def corpus() -> list[dict[str, Any]]:
    """Every message that a transcript sends, without names that only its run would know."""
    steps = [
        step
        for path in sorted(FOLDER.glob("SC*.json"))
        for step in orjson.loads(path.read_bytes())["steps"]
        if "send" in step
    ]
    return [{"type": step["send"], "payload": step.get("payload", {})} | step.get("envelope", {}) for step in steps]


MESSAGES = corpus()
mutations = st.lists(
    st.tuples(
        st.sampled_from(range(len(MESSAGES))),
        st.sampled_from(["C1", "C2", "C3"]),
        st.sampled_from(["as_is", "twice", "flip", "cut", "no_payload", "camel", "nest"]),
        st.integers(0, 5000),
    ),
    max_size=25,
)


def mutated(message: dict[str, Any], how: str, place: int) -> list[bytes]:
    whole = {"msg_id": "m", "timestamp": 1, "protocol_version": "1.0"} | message
    match how:
        case "no_payload":
            del whole["payload"]
        case "camel":
            whole["protocolVersion"] = whole.pop("protocol_version")
        case "nest":
            whole["payload"] = {"events": [whole["payload"]], "partitions": [whole["payload"]], "token": "x"}
    text = bytearray(orjson.dumps(whole))
    match how:
        case "flip":
            text[place % len(text)] ^= 1 + place % 255
        case "cut":
            del text[place % len(text) :]
    return [bytes(text)] * (2 if how == "twice" else 1)


async def run(plan: list[tuple[int, str, str, int]]) -> None:
    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, page_items_min=1)) as world:
        peers: dict[str, Peer] = {}
        for index, client, how, place in plan:
            peer = peers.get(client)
            if peer is None or peer.transport.code is not None:
                peer = peers[client] = await world.client(client, supported_profiles=["canonical", "compatibility"])
            for message in mutated(MESSAGES[index], how, place):
                peer.throw(message)
            await world.settle()
            for answer in peer.take():
                if answer["type"] == "error":
                    assert answer["payload"]["code"] in CODES, answer
        records = (await world.log.read(Query(), limit=10_000)).records
        ids = [record.meta.event_id for record in records]
        assert len(ids) == len(set(ids))


class Noticing(logging.Handler):
    """Keeps what the server logs as its own failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.noticed: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.noticed.append(record)


@given(mutations)
def test_mutated_transcripts_get_typed_answers(plan: list[tuple[int, str, str, int]]) -> None:
    """No message of the corpus, however changed, makes the server fail; ids stay unique."""
    handler = Noticing()
    logger = logging.getLogger("tidings.sync")
    logger.addHandler(handler)
    try:
        asyncio.run(run(plan))
    finally:
        logger.removeHandler(handler)

    assert not handler.noticed, handler.noticed[0].getMessage()
