"""The endpoint of the groups in a simulated world: virtual time, a disk in memory, and peers that are lists of frames."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from tidings.access.administration import ACCESS_TOPIC
from tidings.access.authentication import Authenticator
from tidings.access.book import AccessBook
from tidings.access.context import TokenClaims
from tidings.access.endpoint import UNLIMITED_MEMORY
from tidings.access.endpoint import Peer as RemotePeer
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer, TokenVerifier
from tidings.bus.eventbus import EventBus
from tidings.bus.settings import BusSettings
from tidings.bus.store.files import FileGroupStore
from tidings.bus.store.memory import MemoryClaims
from tidings.core.events import Event, EventMeta
from tidings.log.dispatcher import Dispatcher
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.index import MemoryIndex
from tidings.log.settings import LogSettings
from tidings.server.group_settings import GroupsSettings
from tidings.server.groups_endpoint import GroupsEndpoint
from tidings.testing import SimulatedDisk, VirtualClock
from tidings.wire import groups as wire
from tidings.wire.events import event_to_wire

T = TypeVar("T")
_TOKENS: Final = TokenSettings(secret="a secret of the tests that is long enough", leeway_s=0)
_WORKSPACE: Final = Path("/data/workspace")


class Peer:
    """The other end of one connection: what it was sent, and how it was closed."""

    memory = UNLIMITED_MEMORY

    def __init__(self, world: World, headers: dict[str, str] | None = None) -> None:
        self.frames: list[wire.NodeFrame] = []
        self.closed_with: tuple[int, str] | None = None
        self.is_reading_paused = False
        self.buffered_bytes = 0
        self.world = world
        self.talk = world.endpoint.open(self, RemotePeer("/groups", headers or {}))

    # What the endpoint calls

    def send(self, messages: Sequence[bytes]) -> None:
        assert self.closed_with is None
        self.frames += [wire.decode_from_node(message) for message in messages]

    def send_shared(self, prefixes: tuple[bytes, ...], suffix: bytes) -> None:
        self.send([prefix + suffix for prefix in prefixes])

    def ping(self, payload: bytes) -> None:
        pass

    def close(self, code: int, reason: str = "") -> None:
        self.closed_with = (code, reason)

    def authenticated(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    # What a test calls

    def say(self, *frames: wire.ClientFrame) -> None:
        for frame in frames:
            self.talk.received(wire.encode(frame))

    def hello(self, subject: str = "worker", lifetime_s: int = 3600, spaces: Sequence[str] = ()) -> Peer:
        self.say(wire.Hello(token=self.world.token(subject, lifetime_s, spaces)))
        return self

    def heard(self, kind: type[T]) -> list[T]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    @property
    def tags(self) -> list[int]:
        return [frame.tag for frame in self.heard(wire.Deliver)]

    async def joined(
        self,
        group: str = "g",
        max_inflight: int = 4,
        *,
        subject: str = "worker",
        spaces: Sequence[str] = (),
        **options: Any,
    ) -> Peer:
        """Said hello and became a member of a group of ``demo``."""
        self.hello(subject, spaces=spaces)
        subscribe = wire.Subscribe(
            id=1, topic="demo", group=group, max_inflight=max_inflight, options=wire.GroupOptions(**options)
        )
        self.say(subscribe)
        await self.world.until(lambda: self.heard(wire.Subscribed))
        return self


class World:
    """Log, bus, access book, dispatcher and endpoint, with nothing real below them."""

    clock: VirtualClock
    log: EmbeddedLog
    bus: EventBus
    endpoint: GroupsEndpoint

    async def open(
        self,
        settings: GroupsSettings | None = None,
        bus_settings: BusSettings | None = None,
        *,
        is_followed: bool = True,
    ) -> World:
        self.clock = VirtualClock(wakes_max=10_000_000)
        self.claimed: dict[int, tuple[int, int]] = {}
        disk = SimulatedDisk(0)
        self.log = await open_log(
            _WORKSPACE,
            LogSettings(journal_bytes=1 << 20, journal_count_max=2),
            disk=disk,
            index=MemoryIndex(),
            clock=self.clock,
        )
        self.bus = EventBus(
            log=self.log,
            store=FileGroupStore(
                _WORKSPACE,
                self.log,
                disk=disk,
                clock=self.clock,
                claims=lambda topic, group: MemoryClaims(self.claimed),
            ),
            clock=self.clock,
            rng=random.Random(0),
            settings=bus_settings,
        )
        await self.bus.start()
        self.book = AccessBook()
        self.dispatcher = Dispatcher(self.log)
        self.dispatcher.add("access", self.book, decides_by=ACCESS_TOPIC)
        dispatcher = self.dispatcher
        authenticator = Authenticator(TokenVerifier(_TOKENS, self.clock), self.book, self.clock)
        self.endpoint = GroupsEndpoint(
            self.bus,
            authenticator,
            self.book,
            clock=self.clock,
            epoch=self.log.position.epoch,
            settings=settings,
            reached=lambda seq: None if dispatcher.seq >= seq else dispatcher.reached(seq),
        )
        self.dispatcher.add("/groups", self.endpoint, on_failure=self.endpoint.failed)
        if is_followed:
            self.dispatcher.start()
        return self

    async def close(self) -> None:
        await self.run(self.endpoint.stop(0.0))
        await self.run(self.bus.close(0.0))
        await self.dispatcher.close()
        await self.log.close()

    def token(self, subject: str, lifetime_s: int = 3600, spaces: Sequence[str] = ()) -> str:
        claims = TokenClaims(topics=frozenset({"demo"}), group_prefixes=("demo/",), spaces=frozenset(spaces))
        return TokenIssuer(_TOKENS, self.clock).issue(subject, claims=claims, lifetime_s=lifetime_s)

    def peer(self, headers: dict[str, str] | None = None) -> Peer:
        return Peer(self, headers)

    async def run(self, job: Coroutine[Any, Any, T]) -> T:
        return await self.clock.run_until(job, outside_seconds_max=30.0)

    async def until(self, condition: Callable[[], object], seconds_max: float = 3600.0, step_s: float = 0.001) -> None:
        async def poll() -> None:
            while not condition():
                await self.clock.sleep(step_s)

        await self.clock.run_until(poll(), seconds_max=seconds_max)

    async def pass_time(self, seconds: float) -> None:
        await self.run(self.clock.sleep(seconds))

    def event(self, n: int = 0, topic: str = "demo", space: str = "home", **meta: Any) -> Event:
        return Event(EventMeta(topic=topic, type="NOTED", space_id=space, **meta), {"n": n})

    def wire_event(self, n: int = 0, topic: str = "demo", **meta: Any) -> bytes:
        return event_to_wire(self.event(n, topic, **meta))

    async def publish(self, count: int = 1) -> None:
        async def job() -> None:
            for n in range(count):
                await self.bus.publish(self.event(n))

        await self.run(job())

    def lag(self, group: str = "g") -> int:
        return self.bus.lag("demo", group)

    def members(self) -> dict[tuple[str, str], int]:
        """How many members each group has."""
        return {(each.topic, each.group): len(each.members) for each in self.bus.get_subscriptions()}
