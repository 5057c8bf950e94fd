"""
The sync endpoint under whatever clients do: no crash, every answer typed, nothing shown to those who may not see it, nothing lost.

Clients of all dialects come and go, submit (also the same again, also for others), sync from anywhere, send broken frames,
lose rights and get them back, in any order; the log and a small model say what should have come of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tests.access_events import grant_event, revoke_event
from tests.unit.sync.support import OPEN_SCHEMAS, Peer, World, event, open_world, project_item, tree_item
from tidings.access.context import TokenClaims
from tidings.access.resources import Action, partition
from tidings.log.interface import Query
from tidings.sync.session import SyncSession
from tidings.sync.settings import SyncSettings

PARTITIONS = ["P1", "P2", "P3", "P4"]
RIGHTS = {"C1": {"P1", "P2"}, "C2": {"P2", "P3"}, "C3": {"P1", "P2", "P3", "P4"}, "T1": {"P1", "P3"}}
CODES = {
    *("auth_failed", "bad_request", "forbidden", "rate_limited", "server_error"),
    *("protocol_version_unsupported", "profile_unsupported", "protocolVersion_unsupported"),
}
TYPES = {
    *("connected", "submit_events_result", "event_broadcast", "sync_response", "heartbeat_ack", "error"),
    "version_changed",
}
SETTINGS = SyncSettings(schemas=OPEN_SCHEMAS, page_items_min=1, batch_items_max=6, held_bytes_max=1024)

clients = st.sampled_from(sorted(RIGHTS))
names = st.lists(st.sampled_from([*PARTITIONS, "P\u0301", ""]), max_size=3)
item_names = st.lists(st.sampled_from(PARTITIONS), min_size=1, max_size=2) | names
ids = st.sampled_from([f"e{n}" for n in range(24)])
seqs = st.sampled_from([0, 0, 1, 3, 10, 1000])
canonical_items = st.builds(
    lambda id, parts, n: event(id, data={"n": n}) | {"partitions": parts}, ids, item_names, st.integers(0, 1)
)
tree_items = st.builds(
    lambda id, parts, name: tree_item(id, "treePush", {"target": "t", "value": {"id": name}}) | {"partitions": parts},
    ids,
    item_names,
    st.sampled_from(["x", "y"]),
)
project_items = st.builds(lambda id, n: project_item(id, payload={"n": n}), ids, st.integers(0, 2))
actions = st.one_of(
    st.tuples(st.just("connect"), clients),
    st.tuples(st.just("connect_project"), st.sampled_from(["B1", "B2"])),
    st.tuples(st.just("submit"), clients, st.lists(canonical_items, max_size=4)),
    st.tuples(st.just("submit"), st.just("T1"), st.lists(tree_items, max_size=4)),
    st.tuples(st.just("submit_project"), st.sampled_from(["B1", "B2"]), st.lists(project_items, max_size=4)),
    st.tuples(st.just("sync"), clients, names, st.none() | names, seqs, st.integers(-1, 5)),
    st.tuples(st.just("sync_project"), st.sampled_from(["B1", "B2"]), seqs, st.integers(1, 3)),
    st.tuples(st.just("revoke"), clients, st.sampled_from(PARTITIONS)),
    st.tuples(st.just("grant"), clients, st.sampled_from(PARTITIONS)),
    st.tuples(st.just("broken"), clients, st.integers(0, 400), st.integers(0, 255)),
    st.tuples(st.just("disconnect"), clients),
    st.tuples(st.just("cut"), clients),
    st.tuples(st.just("pass"), st.integers(1, 20)),
)


class Model:
    """What the clients of one run may see, and what they were told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.peers: dict[str, Peer] = {}
        self.rights = {client: set(given) for client, given in RIGHTS.items()}
        self.told: dict[str, int] = {}
        self.shown_count = 0

    async def act(self, action: tuple[Any, ...]) -> None:
        verb, who, *rest = action
        match verb:
            case "connect":
                await self._connect(who)
            case "connect_project":
                self.peers[who] = self.world.peer(who)
                token = self.world.token(who)
                self.peers[who].say_camel("connect", {"token": token, "clientId": who, "projectId": "proj"})
            case "revoke":
                await self._change(who, rest[0], is_granted=False)
            case "grant":
                await self._change(who, rest[0], is_granted=True)
            case "pass":
                await self.world.clock.advance(who)
            case _ if who in self.peers:
                self._say(self.peers[who], verb, rest)
        await self.world.settle()
        for client, peer in self.peers.items():
            self._look_at(client, peer)

    async def _connect(self, who: str) -> None:
        claims = TokenClaims(partitions=frozenset(RIGHTS[who]))
        profile = "compatibility" if who == "T1" else "canonical"
        self.peers[who] = self.world.peer(who)
        payload = {"token": self.world.token(who, claims), "client_id": who, "supported_profiles": [profile]}
        self.peers[who].say("connect", payload)

    async def _change(self, who: str, name: str, *, is_granted: bool) -> None:
        make = grant_event if is_granted else revoke_event
        await self.world.log.append(make(f"user-of-{who}", Action.SYNC, partition(name), actor="test"))
        if is_granted:
            self.rights[who].add(name)
        else:
            self.rights[who].discard(name)
        # Something right behind it, by somebody who may: the change must be in force before this is told.
        if "C3" in self.peers:
            item = event(f"behind-{self.world.log.position.seq}", name)
            self.peers["C3"].say("submit_events", {"events": [item]})

    @staticmethod
    def _say(peer: Peer, verb: str, rest: list[Any]) -> None:
        match verb:
            case "submit":
                peer.say("submit_events", {"events": rest[0]})
            case "submit_project":
                peer.say_camel("submit_events", {"events": rest[0]})
            case "sync":
                wanted, subscriptions, since, limit = rest
                more = {} if subscriptions is None else {"subscription_partitions": subscriptions}
                peer.say("sync", {"partitions": wanted, "since_committed_id": since, "limit": limit} | more)
            case "sync_project":
                peer.say_camel("sync", {"projectId": "proj", "sinceCommittedId": rest[0], "limit": rest[1]})
            case "broken":
                whole = bytearray(orjson.dumps({"type": "submit_events", "payload": {"events": [event("broken")]}}))
                whole[rest[0] % len(whole)] = rest[1]
                peer.throw(bytes(whole))
            case "disconnect":
                peer.say("disconnect")
            case "cut":
                peer.leave()

    def _look_at(self, client: str, peer: Peer) -> None:
        for message in peer.take():
            assert message["type"] in TYPES
            payload = message["payload"]
            match message["type"]:
                case "error":
                    assert payload["code"] in CODES
                    assert payload["code"] != "server_error", payload
                case "submit_events_result":
                    for result in payload["results"]:
                        self._note(result)
                case "event_broadcast" if client in RIGHTS:
                    self._check_sight(client, payload)
                case "sync_response" if client in RIGHTS:
                    seqs = [each["committed_id"] for each in payload["events"]]
                    assert seqs == sorted(set(seqs))
                    for each in payload["events"]:
                        self._check_sight(client, each)

    def _check_sight(self, client: str, shown: dict[str, Any]) -> None:
        self.shown_count += 1
        assert set(shown["partitions"]) & self.rights[client], f"{client} was shown {shown}"

    def _note(self, result: dict[str, Any]) -> None:
        if result["status"] == "committed":
            seq: int = result["committed_id"] if "committed_id" in result else result["committedId"]
            assert self.told.setdefault(result["id"], seq) == seq, "one id, one commit"

    async def check_the_log(self) -> None:
        """Every commit that was told is stored, once, where it was said to be; and nothing else was stored."""
        records = (await self.world.log.read(Query(), limit=10_000)).records
        stored = {r.meta.event_id: r.seq for r in records if r.topic.startswith("sync")}
        assert len(stored) == sum(r.topic.startswith("sync") for r in records)
        assert self.told.items() <= stored.items()
        for record in records:
            if record.topic == "sync":
                assert set(record.meta.partitions) <= RIGHTS[record.meta.actor], "nobody writes where it may not"


async def run(steps: list[tuple[Any, ...]]) -> None:
    async with open_world(SETTINGS) as world:
        model = Model(world)
        for who in RIGHTS:
            await model.act(("connect", who))
            await model.act(("sync", who, sorted(RIGHTS[who]), sorted(RIGHTS[who]), 0, 5))
        for who in ("B1", "B2"):
            await model.act(("connect_project", who))
        await model.act(("submit", "C3", [event(f"first-{name}", name) for name in PARTITIONS]))
        for step in steps:
            await model.act(step)
        await model.check_the_log()


class Noticing(logging.Handler):
    """Keeps errors that the server logs: none of them is the clients' doing."""

    def __init__(self, noticed: list[logging.LogRecord]) -> None:
        super().__init__(logging.ERROR)
        self.noticed = noticed

    def emit(self, record: logging.LogRecord) -> None:
        self.noticed.append(record)


@given(st.lists(actions, min_size=10, max_size=60))
def test_no_sequence_of_actions_breaks_the_promises(steps: list[tuple[Any, ...]]) -> None:
    """Whatever happens in whatever order: typed answers, no leak, no lost or doubled commit, no unexpected failure."""
    noticed: list[logging.LogRecord] = []
    handler = Noticing(noticed)
    logger = logging.getLogger("tidings.sync")
    logger.addHandler(handler)
    try:
        asyncio.run(run(steps))
    finally:
        logger.removeHandler(handler)
    assert not noticed, noticed[0].getMessage()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    [
        *("token", "client_id", "clientId", "projectId", "events", "partitions", "subscription_partitions", "limit"),
        *("since_committed_id", "sinceCommittedId", "reason", "supported_profiles", "partition", "want_snapshot"),
    ]
)
kinds = st.sampled_from(["connect", "submit_events", "sync", "heartbeat", "disconnect", "error", ""])
version_keys = st.sampled_from(["protocol_version", "protocolVersion"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Something like a frame: a known type, known fields, any values; sometimes with bytes changed."""
    payload = draw(st.dictionaries(fields, json_values, max_size=4) | json_values)
    message = {"type": draw(kinds), "msg_id": "m", "timestamp": 1, draw(version_keys): "1.0", "payload": payload}
    text = bytearray(json.dumps(message, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass"))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=2)):
        text[place % len(text)] = value
    return bytes(text)


@given(st.lists(messages() | st.binary(max_size=40), max_size=6))
def test_a_session_never_raises_over_what_it_is_sent(sent: list[bytes]) -> None:
    """Any bytes at all yield effects, and after a close nothing."""
    session = SyncSession(SyncSettings())
    for message in sent:
        effects = session.receive(message, 1)
        assert isinstance(effects, list)
        for effect in effects:
            frame = getattr(effect, "frame", None)
            if frame is not None:
                assert orjson.loads(frame)["type"] in TYPES
