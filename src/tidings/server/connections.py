"""
All sockets of a node: which door is at which path, who may come in, who is still there, and when their writes leave.

Limits hold before a connection costs anything: over all, and per address. Liveness is one sweep over all of them, not a timer
each: at ten thousand connections that is the difference between some megabytes and none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping

from tidings.core.clock import Clock
from tidings.wire.transport import Door, Upgrade

from .errors import NodeError, NodeStopping, NoSuchDoor, TooManyConnections
from .framing import Framer
from .peers import PeerCounts
from .settings import ServerSettings
from .sockets import SocketTransport

__all__ = ["Connections"]

logger = logging.getLogger(__name__)

_SWEEP_SLICE = 256
_STRANGERS_S = 1.0
_LATE_S = 1.0
"""How much later than its deadline a door may be: it says goodbye only then."""


class Connections:
    """The sockets of one node."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self.settings = settings
        self.framer = Framer()
        self.messages_in = self.messages_out = self.bytes_in = self.bytes_out = 0
        self.opened_count = 0
        self.refused: Counter[str] = Counter()
        """Connections refused, by the error's code."""
        self.closed: Counter[str] = Counter()
        """Connections that ended, by their close code's class: how many codes there are is bounded."""
        self._clock = clock
        self._doors: dict[str, Door] = {}
        self._open: set[SocketTransport] = set()
        self._by_address = PeerCounts()
        self._strangers: set[SocketTransport] = set()
        """Those that have not shown a token."""
        self._strangers_by_address = PeerCounts()
        self._by_path: Counter[str] = Counter()
        self._dirty: list[SocketTransport] = []
        self._is_flush_due = False
        self._is_stopping = False
        self._sweepers: list[asyncio.Task[None]] = []
        self._emptied: asyncio.Event = asyncio.Event()

    # Doors

    def add_door(self, path: str, door: Door) -> None:
        """Let a door answer at a path."""
        assert path not in self._doors
        self._doors[path] = door

    @property
    def doors(self) -> Mapping[str, Door]:
        """The doors by path."""
        return self._doors

    def fail_door(self, path: str, reason: str) -> None:
        """A door has missed commits: end all its conversations, so that its peers begin anew and miss nothing."""
        for each in [each for each in self._open if each.path == path]:
            each.fail(reason)

    # Coming and going

    def admit(self, upgrade: Upgrade, address: str) -> SocketTransport:
        """
        A connection for a request, if it may come in.

        Raises:
            TrafficRefused: It may not; the error says why.
        """
        try:
            door = self._check(upgrade, address)
        except NodeError as error:
            self.refused[error.code] += 1
            raise
        return SocketTransport(self, door, upgrade, address)

    def _check(self, upgrade: Upgrade, address: str) -> Door:
        if self._is_stopping:
            raise NodeStopping
        door = self._doors.get(upgrade.path)
        if door is None:
            raise NoSuchDoor(upgrade.path)
        if len(self._open) >= self.settings.connections_max:
            raise TooManyConnections(len(self._open), "at this node")
        from_address = self._by_address.count(address)
        if from_address >= self.settings.connections_per_address_max:
            raise TooManyConnections(from_address, "from this address")
        if len(self._strangers) >= self.settings.unauthenticated_max:
            raise TooManyConnections(len(self._strangers), "without a token at this node")
        strangers = self._strangers_by_address.count(address)
        if strangers >= self.settings.unauthenticated_per_address_max:
            raise TooManyConnections(strangers, "without a token from this address")
        return door

    def now_s(self) -> float:
        """Seconds by a clock that never goes back."""
        return self._clock.monotonic()

    def entered(self, each: SocketTransport) -> None:
        """A connection is open."""
        self.opened_count += 1
        self._open.add(each)
        self._by_address.entered(each.address)
        self._strangers.add(each)
        self._strangers_by_address.entered(each.address)
        self._by_path[each.path] += 1
        self._emptied.clear()

    def authenticated(self, each: SocketTransport) -> None:
        """A connection's peer has shown a token."""
        if each in self._strangers:
            self._strangers.discard(each)
            self._strangers_by_address.left(each.address)

    def left(self, each: SocketTransport, code: int) -> None:
        """A connection is gone."""
        self._open.discard(each)
        self.closed[_class_of(code)] += 1
        self._by_path[each.path] -= 1
        self._by_address.left(each.address)
        self.authenticated(each)
        if not self._open:
            self._emptied.set()

    def __len__(self) -> int:
        return len(self._open)

    def counts(self) -> dict[str, int]:
        """Open connections by path."""
        return {path: self._by_path[path] for path in self._doors}

    # Writing

    def flush_soon(self, each: SocketTransport) -> None:
        """It has something to write when this turn of the loop is over."""
        self._dirty.append(each)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        dirty, self._dirty = self._dirty, []
        for each in dirty:
            each.flush()
        self.framer.forget()

    def close_soon(self, each: SocketTransport) -> None:
        """A goodbye was said: cut the connection if the peer does not answer in time."""
        asyncio.get_running_loop().call_later(self.settings.close_timeout_s, each.cut)

    # Liveness

    def start(self) -> None:
        """Begin to look after who is still there."""
        loop = asyncio.get_running_loop()
        self._sweepers = [
            loop.create_task(self._sweep_for_ever(), name="tidings-liveness"),
            loop.create_task(self._sweep_strangers(), name="tidings-strangers"),
        ]

    async def _sweep_strangers(self) -> None:
        """Send away who has not shown a token in time."""
        while True:
            await self._clock.sleep(_STRANGERS_S)
            opened_before_s = self.now_s() - self.settings.unauthenticated_timeout_s
            for each in [each for each in self._strangers if each.limits.opened_s <= opened_before_s]:
                each.refuse("no token was shown in time")

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.ping_interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Ping who was silent since the last sweep; cut who was silent after a ping; close who takes nothing of what it is sent."""
        for number, each in enumerate(list(self._open)):
            if each.is_stuck():
                each.too_slow()
            elif each.is_heard:
                each.is_heard = each.has_ping_out = False
            elif each.has_ping_out:
                each.cut()
            else:
                each.ping()
            if number % _SWEEP_SLICE == _SWEEP_SLICE - 1:
                await asyncio.sleep(0)

    # Stopping

    async def stop(self, deadline_s: float) -> None:
        """Let nobody in any more, have the doors end their conversations, and cut what is open after the deadline."""
        self._is_stopping = True
        ended = await asyncio.gather(
            *(asyncio.wait_for(door.shut(deadline_s), deadline_s + _LATE_S) for door in self._doors.values()),
            return_exceptions=True,
        )
        for path, outcome in zip(self._doors, ended, strict=True):
            if isinstance(outcome, Exception):
                problem = str(outcome) or type(outcome).__name__
                logger.error("the door at %s was not shut in order: %s", path, problem)
        for each in list(self._open):
            each.close(1001, "the node is stopping")
        if self._open:
            with_time = max(0.0, min(deadline_s, self.settings.close_timeout_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), with_time)
        for each in list(self._open):
            each.cut()
        sweepers, self._sweepers = self._sweepers, []
        for sweeper in sweepers:
            sweeper.cancel()
        await asyncio.gather(*sweepers, return_exceptions=True)


def _class_of(code: int) -> str:
    if code in (1000, 1001, 1005):
        return "normal"
    if code == 1006:
        return "abnormal"
    return "private" if code >= 4000 else "error"
