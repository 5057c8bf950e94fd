"""
The gateway against a model: random events, rights, readers and trouble, in virtual time, and a checker that looks at every frame.

Of each frame: the subscriber asked for it, could read it at some moment since its commit, has not had it on this connection, and it stands behind all
that came before. Of each connection: what it was sent has no gap, from where it began to where it ended. At every moment: no bound is passed, and nothing
is sent while access cannot be decided.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.gateway_world import GatewayWorld, Reader, settings_of
from tidings.access.apps import AppRegistered
from tidings.access.context import ADMIN_ROLE
from tidings.access.guard import Directive
from tidings.gateway.errors import DescriptorRefused, QueueFull
from tidings.gateway.event_types import GRAPH_MANAGER
from tidings.gateway.gateway import ReloadVetoed
from tidings.gateway.names import EventClass
from tidings.gateway.refusals import SubscriptionClosed, SubscriptionRefused
from tidings.wire.gateway import CloseReason

TOPICS = ("a", "b")
APPS = ("default", "shop")
OBJECTS = tuple(f"order:{number}" for number in range(6))
PLACES: tuple[tuple[str, ...], ...] = ((), (), (), ("p1", "p2"), ("p2",))
CLAIMS: dict[str, dict[str, Any]] = {
    "wide": {"topics": frozenset(TOPICS)},
    "spaced": {"topics": frozenset(TOPICS), "spaces": frozenset({"main"})},
    "parted": {"topics": frozenset({"a"}), "partitions": frozenset({"p1"})},
    "granted": {"space_prefixes": ("m", "o")},
    "root": {"roles": frozenset({ADMIN_ROLE})},
}
LIMITS = {
    "queue__per_connection": 24,
    "queue__total_ceiling": 200,
    "delivery__resume_window": 40,
    "delivery__max_msgs_per_sec": 8,
    "delivery__heartbeat_interval_ms": 5_000,
    "websocket__max_connections": 12,
    "websocket__max_connections_per_identity": 4,
}


class Commit(NamedTuple):
    """A committed record, as far as who may see it depends on it; a part of it is one envelope."""

    seq: int
    part: int
    topic: str
    app: str
    space: str
    partitions: tuple[str, ...]
    objects: tuple[str, ...]


class Checked(Reader):
    """A reader that checks every frame as it comes."""

    model: Model
    identity: str
    frame: dict[str, Any]
    begun: tuple[int, int]
    """Everything behind this place, of seq and part, is to come here."""
    is_lazy: bool
    """Acknowledges nothing."""

    def send(self, prefixes: tuple[bytes, ...]) -> bool:
        try:
            more = super().send(prefixes)
            self.model.check_frames(self, prefixes)
        except AssertionError as error:  # the gateway takes it for a failed engine
            self.model.violations.append(error)
            raise
        return more


class Model:
    """The world, what was done in it, and what therefore must and must not be seen."""

    def __init__(self, world: GatewayWorld, seed: int, limits: dict[str, int]) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.commits: dict[tuple[int, int], Commit] = {}
        self.rules: dict[tuple[str, str], list[tuple[int, bool]]] = {}
        self.readers: list[Checked] = []
        self.seen: dict[Checked, list[tuple[int, int]]] = {}
        self.ids: dict[Checked, set[str]] = {}
        self.counts: dict[Checked, dict[str, int]] = {}
        self.sent: dict[Checked, deque[tuple[float, int]]] = {}
        self.doubts: list[int] = []
        self.limits = limits
        self.rate_max = self.limits["delivery__max_msgs_per_sec"]
        self.frames = self.resumes = 0
        self.violations: list[AssertionError] = []

    # Who may read what, worked out apart from the access book

    def allowed(self, identity: str, commit: Commit, since_seq: int) -> list[bool]:
        """Whether the record may be read: at its own seq, and after each change since."""
        claims = CLAIMS[identity]
        if "spaces" in claims and commit.space not in claims["spaces"]:
            return [False]
        if "partitions" in claims and commit.partitions and not claims["partitions"].intersection(commit.partitions):
            return [False]
        states = [identity == "root" or commit.topic in claims.get("topics", ())]
        for seq, is_grant in self.rules.get((identity, commit.topic), ()):
            if seq <= since_seq:
                states = [is_grant]
            else:
                states.append(is_grant)
        return states

    def asks_for(self, reader: Checked, commit: Commit) -> bool:
        frame = reader.frame
        return (
            commit.app == frame["app_id"]
            and frame.get("domain_id") in (None, commit.topic)
            and ("object_ids" not in frame or not set(frame["object_ids"]).isdisjoint(commit.objects))
            and "graph.*" in frame["channels"]
        )

    # The checker

    def check_frames(self, reader: Checked, prefixes: tuple[bytes, ...]) -> None:
        assert not self.world.book.closed_by(), "nothing is sent while access cannot be decided"
        now_s = self.world.clock.monotonic()
        window = self.sent[reader]
        window.append((now_s, len(prefixes)))
        while window[0][0] <= now_s - 1.0:
            window.popleft()
        assert sum(count for _, count in window) <= 2 * self.rate_max, (
            "the pace: a second's worth at once, then the rate"
        )
        for prefix in prefixes:
            self.frames += 1
            self.check_frame(reader, msgspec.json.decode(prefix + b'"t"}')["payload"])

    def check_frame(self, reader: Checked, envelope: dict[str, Any]) -> None:
        assert envelope["event_id"] not in self.ids[reader], "at most once on one connection"
        self.ids[reader].add(envelope["event_id"])
        event_class = envelope["event_type"].partition(".")[0]
        assert f"{event_class}.*" in reader.frame["channels"]
        if event_class != "graph":
            assert reader.identity == "root", "only administrators see what the node tells"
            source = envelope["source_manager"] + event_class
            assert envelope["sequence_anchor"]["event_seq"] > self.counts[reader].get(source, 0), (
                "by each source's count"
            )
            self.counts[reader][source] = envelope["sequence_anchor"]["event_seq"]
            return
        objects = envelope["payload_summary"]["object_ids"]
        place = envelope["sequence_anchor"]["global_seq"], int(objects[0].rpartition(".")[2])
        commit = self.commits[place]
        assert tuple(objects) == commit.objects
        assert (envelope["scope"]["app_id"], envelope["scope"]["domain_id"]) == (commit.app, commit.topic)
        assert self.asks_for(reader, commit), "only what was asked for"
        assert any(self.allowed(reader.identity, commit, commit.seq)), "only what may be read since its commit"
        assert place > max(self.seen[reader], default=reader.begun), "in the order of the commits"
        self.seen[reader].append(place)

    def check_gaps(self, reader: Checked, *, is_settled: bool = False) -> None:
        """What could be read all the time came without a gap; of a settled connection, all of it."""
        wanted = [
            place
            for place, commit in self.commits.items()
            if place > reader.begun
            and self.asks_for(reader, commit)
            and all(self.allowed(reader.identity, commit, place[0]))
        ]
        came = self.seen[reader]
        if not is_settled:
            last = max(came, default=(0, 0))
            wanted = [place for place in wanted if place <= last]
        missing = set(wanted) - set(came)
        assert not missing, f"{reader.identity} lacks {sorted(missing)} ({reader.reason})"

    def check_bounds(self) -> None:
        gateway, limits = self.world.gateway, self.limits
        if self.violations:
            raise self.violations[0]
        assert "engine_failed" not in gateway.readiness()
        assert gateway.ceiling.used <= limits["queue__total_ceiling"]
        assert gateway.registry.admitted <= limits["websocket__max_connections"]
        for reader in self.open_readers():
            assert len(reader.open) <= limits["queue__per_connection"]
        for each in EventClass:
            assert len(gateway.index.after(each, 0)) <= limits["delivery__resume_window"]

    def open_readers(self) -> list[Checked]:
        return [each for each in self.readers if each.subscriber is not None and each.open.is_open]

    # What happens

    async def step(self) -> None:
        name = self.random.choices(*zip(*ACTIONS, strict=True))[0]
        await getattr(self, name)()
        if self.random.random() < 0.3:
            return  # the next thing happens before this one has had its effect
        await self.world.settle(self.random.choice((0.0, 0.0, 0.0, 0.06, 0.4)))
        self.check_bounds()
        for reader in self.open_readers():
            if reader.open.sent and self.random.random() < 0.5 and not reader.is_lazy:
                reader.open.ack(self.random.choice(list(reader.open.sent)).envelope.resume_token)

    async def commit(self) -> None:
        pick = self.random.choice
        for _ in range(pick((1, 1, 3, 10))):
            parts = pick((1, 1, 1, 3))
            seq = self.world.committed_seq + 1
            objects = tuple(self.random.sample(OBJECTS, pick((1, 2))))
            topic, app, space, partitions = (
                pick(TOPICS),
                pick(APPS[:1] * 5 + APPS),
                pick(("main", "main", "other")),
                pick(PLACES),
            )
            for part in range(parts):
                named = (f"part:{seq}.{part}", *objects)
                self.commits[seq, part] = Commit(seq, part, topic, app, space, partitions, named)
            try:
                self.world.commit_parts(
                    [self.commits[seq, part].objects for part in range(parts)],
                    topic=topic,
                    app=app,
                    space=space,
                    partitions=partitions,
                )
            except QueueFull:  # whoever wanted it was closed, and reads it over HTTP
                assert not any("graph.*" in each.frame["channels"] for each in self.open_readers())

    async def tell(self) -> None:
        with contextlib.suppress(QueueFull):
            self.world.tell("config_manager", "system.config_changed", {"cfg_seq": 1, "keys": ("k",)})

    async def tell_what_may_not_be_told(self) -> None:
        """A source that may not, a seq that is not committed or was told before, two apps, a secret: refused, and seen by nobody."""
        world, seq = self.world, self.world.committed_seq
        key = "-----BEGIN PRIVATE KEY-----"
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("config_manager", {}),
            (GRAPH_MANAGER, {"sequence_anchor_hint": seq + 1}),
            (GRAPH_MANAGER, {"sequence_anchor_hint": -1}),
            (GRAPH_MANAGER, {"app_id": "shop"}),
            (GRAPH_MANAGER, {"payload_summary": {"object_ids": (f"order:{key}",)}}),
            (GRAPH_MANAGER, {"payload_summary": {"object_ids": ("order:1",), "body": "x" * 1_000_000}}),
            (GRAPH_MANAGER, {"read_scope": None}),
            (GRAPH_MANAGER, {"event_type": "graph.never_declared"}),
        ]
        if self.world.gateway.telemetry.produced_by_class["graph"]:
            wrong.append((GRAPH_MANAGER, {"sequence_anchor_hint": min(self.commits)[0]}))
        channel, changes = self.random.choice(wrong)
        descriptor = world.graph_descriptor(seq, "order:1", **changes)
        with pytest.raises(DescriptorRefused):
            world.channels[channel].submit(descriptor, descriptor.sequence_anchor_hint)

    async def acknowledge_wrongly(self) -> None:
        """A token that does not wait here ends the connection."""
        if found := self.open_readers():
            reader = self.random.choice(found)
            others = [token for each in self.readers for token in each.tokens[-3:]]
            waiting = {each.envelope.resume_token for each in reader.open.sent or ()}
            token = self.random.choice([*set(others) - waiting, "none"])
            with pytest.raises(SubscriptionClosed) as caught:
                reader.open.ack(token)
            self.world.gateway.registry.close(reader.open, caught.value.close_reason)
            self.check_gaps(reader)

    async def change_rights(self) -> None:
        identity, topic = self.random.choice(tuple(CLAIMS)), self.random.choice(TOPICS)
        is_grant = self.random.random() < 0.6
        (self.world.grant if is_grant else self.world.revoke)(identity, f"topic:{topic}")
        self.rules.setdefault((identity, topic), []).append((self.world.committed_seq, is_grant))

    async def lose_access(self) -> None:
        if not self.doubts:
            self.doubts.append(self.world.doubtful_access_record())

    async def regain_access(self) -> None:
        while self.doubts:
            self.world.dismiss(self.doubts.pop())

    async def subscribe(self, resume: str | None = None, like: Checked | None = None) -> Checked | None:
        pick = self.random.choice
        identity = like.identity if like else pick(tuple(CLAIMS))
        frame: dict[str, Any] = (
            dict(like.frame) if like else {"app_id": pick(APPS[:1] * 5 + APPS), "channels": ("graph.*",)}
        )
        if like is None:
            if identity == "root":
                frame["channels"] = pick((("graph.*",), ("graph.*", "security.*", "system.*")))
            elif pick((True, False, False)):
                frame["domain_id"] = pick(TOPICS)
            if frame["channels"] == ("graph.*",) and pick((True, False, False)):
                frame["object_ids"] = tuple(sorted(self.random.sample(OBJECTS, 2)))
        try:
            found = self.world.admit(identity, app=frame["app_id"], **CLAIMS[identity])
        except SubscriptionRefused:
            return None
        reader = Checked(self.world, found.admission, found.rights)
        reader.model, reader.identity, reader.frame = self, identity, frame
        self.seen[reader], self.ids[reader], self.counts[reader] = [], set(), {}
        self.sent[reader] = deque()
        try:
            await self.world.open(reader, resume=resume, **frame)
        except SubscriptionClosed as error:
            is_resume = error.close_reason is CloseReason.RESUME_INVALID and resume is not None
            if not is_resume and error.close_reason is not CloseReason.PERMISSION_DENIED:
                raise
            return None
        reader.begun = (reader.open.since, 1_000)
        reader.is_lazy = pick((True, False, False, False))
        reader.answers_pings = pick((True, True, True, False))
        self.readers.append(reader)
        reader.open.resume_sending()
        return reader

    async def resume(self) -> None:
        """Somebody comes back with a token that it was sent, on a connection open or ended."""
        had = [each for each in self.readers if self.seen[each]]
        if not had:
            return
        old = self.random.choice(had)
        graph = [each for each in old.envelopes if each["event_type"].startswith("graph.")]
        envelope = self.random.choice(graph[-8:] if self.random.random() < 0.7 else graph)
        place = (
            envelope["sequence_anchor"]["global_seq"],
            int(envelope["payload_summary"]["object_ids"][0].rpartition(".")[2]),
        )
        reader = await self.subscribe(envelope["resume_token"], old)
        if reader is not None:
            assert reader.open.is_resumed
            self.resumes += 1
            reader.begun = place
            assert self.seen[reader] == [] or self.seen[reader][0] > place

    async def show_another_ones_token(self) -> None:
        """A token that somebody else was sent, or that was changed, opens nothing."""
        had = [each for each in self.readers if each.frames]
        if not had:
            return
        old = self.random.choice(had)
        token = self.random.choice(old.tokens)
        place = self.random.randrange(len(token))
        changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        assert await self.subscribe(changed, old) is None
        strangers = [name for name in CLAIMS if not any(each.identity == name for each in self.readers)]
        if strangers:
            like = Checked(self.world, old.admission, old.rights)
            like.identity, like.frame = self.random.choice(strangers), old.frame
            assert await self.subscribe(token, like) is None

    async def leave(self) -> None:
        if found := self.open_readers():
            reader = self.random.choice(found)
            reader.leave()
            self.check_gaps(reader)

    async def block(self) -> None:
        for reader in self.open_readers():
            reader.has_room = self.random.random() < 0.7
            if reader.has_room:
                reader.open.resume_sending()

    async def reload(self) -> None:
        limits = {
            **self.limits,
            "queue__per_connection": self.random.choice((8, 24, 40)),
            "delivery__resume_window": self.random.choice((10, 40)),
            "delivery__max_msgs_per_sec": self.random.choice((4, 8, 50)),
            "websocket__max_connections": self.random.choice((6, 12)),
        }
        try:
            self.world.gateway.prepare(settings_of(**limits))
        except ReloadVetoed:
            return
        self.world.gateway.commit(settings_of(**limits))
        self.limits = limits
        self.rate_max = max(self.rate_max, limits["delivery__max_msgs_per_sec"])

    async def direct(self) -> None:
        target = self.random.choice([f"identity:{name}" for name in CLAIMS])
        self.world.guard.apply(Directive(decision="deny", target=target, ttl_ms=500, close_existing=True), by="root")

    async def wait(self) -> None:
        await self.world.settle(self.random.choice((0.5, 2.0, 6.0)))

    async def settle(self) -> None:
        """Everything that can come comes; then nothing may be missing."""
        await self.regain_access()
        for _ in range(40):
            await self.world.settle(0.5)
            for reader in self.open_readers():
                reader.has_room = True
                reader.open.resume_sending()
                reader.answers_pings = True
                if reader.open.sent:
                    reader.open.ack(reader.open.sent[-1].envelope.resume_token)
        self.check_bounds()
        for reader in self.readers:
            self.check_gaps(reader, is_settled=reader.open.is_open)
        for reader in self.open_readers():
            reader.leave()
        await self.world.settle(1.0)
        assert self.world.gateway.ceiling.used == 0, "what nobody holds is not counted"


ACTIONS = (
    ("commit", 30),
    ("tell", 4),
    ("tell_what_may_not_be_told", 3),
    ("acknowledge_wrongly", 1),
    ("change_rights", 14),
    ("lose_access", 2),
    ("regain_access", 4),
    ("subscribe", 8),
    ("resume", 6),
    ("show_another_ones_token", 2),
    ("leave", 2),
    ("block", 3),
    ("reload", 2),
    ("direct", 1),
    ("wait", 3),
)


async def play(seed: int, steps: int) -> Model:
    """One life of a gateway."""
    limits = {**LIMITS, "queue__total_ceiling": 72 if seed % 2 else 200}
    async with GatewayWorld.running(settings_of(**limits), seed=seed) as world:
        world.change_app(AppRegistered(slug="shop"))
        model = Model(world, seed, limits)
        for _ in range(5):
            await model.subscribe()
        for _ in range(steps):
            await model.step()
        await model.settle()
    return model


@pytest.mark.req("R17", "R100", "R233", "R78", "R112", "R130", "R226")
async def test_every_frame_of_random_lives_is_one_that_may_be_seen_once_in_order_within_all_bounds() -> None:
    """Commits, grants, revocations, slow and hostile readers and managers, reconnects, outages of access, reloads and directives in any order."""
    models = [await play(seed, 120) for seed in range(8)]

    # So that a change of the draw does not leave it looking at nothing.
    assert sum(each.frames for each in models) > 500
    assert sum(each.resumes for each in models) > 5
    reasons = {reader.reason for each in models for reader in each.readers}
    assert {CloseReason.BUFFER_OVERFLOW, CloseReason.TAKEN_OVER} <= reasons


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(0, 200, 10))
async def test_the_same_of_many_longer_lives(first: int) -> None:
    """Two hundred lives of six hundred steps each."""
    for seed in range(1_000 + first, 1_010 + first):
        await play(seed, 600)
