"""
The connection of a ``RemoteBus`` to its node: opened, watched, and opened again when it breaks, after a random delay that grows.

A node that is gone without a goodbye is noticed by its silence. A node that says that it does not want us is believed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from tidings.core.clock import Clock, within
from tidings.wire import groups as wire

from .errors import ConnectFailed, LinkClosed
from .link import Connector, Link
from .remote_errors import RemoteStopped
from .timing import full_jitter

__all__ = ["NodeConnection", "Token", "retry_delay_s"]

logger = logging.getLogger(__name__)

Token = str | Callable[[], str | Awaitable[str]] | None
_RECONNECT_S_MIN: Final = 0.2
_RECONNECT_S_MAX: Final = 15.0
_AUTH_TRIES_MAX: Final = 5
_CONNECT_S_MAX: Final = 10.0
_SILENCE_S: Final = 15.0
"""After so long without a word from the node it is asked whether it is there; after three times as long it is not."""
_NOT_HEARD: Final = 1006


def retry_delay_s(failures: int, rng: random.Random) -> float:
    """How long to wait before asking the node again."""
    return full_jitter(failures, _RECONNECT_S_MIN, _RECONNECT_S_MAX, rng)


class NodeConnection:
    """
    One connection after another.

    Args:
        url, token, name: Where to, who we are (or what makes a fresh token for each connection), what the node's log calls us.
        connector, clock, rng: The world.
        on_frame: Told what the node says, and on which connection.
        on_lost: Told when a connection has ended.
    """

    def __init__(
        self,
        url: str,
        token: Token,
        name: str,
        *,
        connector: Connector,
        clock: Clock,
        rng: random.Random,
        on_frame: Callable[[Link, wire.NodeFrame], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._url = url
        self._token = token
        self._name = name
        self._connector = connector
        self._clock = clock
        self._rng = rng
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._heard_at = 0.0
        self.welcome_count = 0
        """How often the node has welcomed us; whoever hears it counts it here."""

    async def keep(self) -> RemoteStopped:
        """Stay connected, until the node does not want us, and will not."""
        failures = refusals = 0
        while True:
            before = self.welcome_count
            problem = await self._connect_once()
            if self.welcome_count > before:
                failures = refusals = 0
            if isinstance(problem, LinkClosed):
                refusals += problem.close_code == wire.CLOSE_AUTH_FAILED
                may_differ = callable(self._token) and refusals < _AUTH_TRIES_MAX
                if problem.close_code in (wire.CLOSE_PROTOCOL, wire.CLOSE_REVOKED) or (refusals and not may_differ):
                    return RemoteStopped(self._url, str(problem))
            delay_s = retry_delay_s(failures, self._rng)
            failures += 1
            logger.warning("%s; connecting again in %.1f s", problem, delay_s)
            await self._clock.sleep(delay_s)

    async def _connect_once(self) -> LinkClosed | ConnectFailed:
        """One connection from its beginning to its end; how it ended."""
        link: Link | None = None
        watching: asyncio.Task[None] | None = None
        try:
            token = self._token() if callable(self._token) else self._token
            if inspect.isawaitable(token):
                token = await token
            opening = asyncio.ensure_future(self._connector.connect(self._url))
            if not await within(self._clock, _CONNECT_S_MAX, opening):
                opening.cancel()
                return ConnectFailed(self._url, f"no answer within {_CONNECT_S_MAX:g} s")
            link = await opening
            watching = asyncio.create_task(self._watch(link), name="tidings-remote-bus-watch")
            link.send(wire.encode(wire.Hello(token=token or "", name=self._name)))
            while True:
                messages = await link.receive()
                self._heard_at = self._clock.monotonic()
                for message in messages:
                    self._on_frame(link, wire.decode_from_node(message))
        except (LinkClosed, ConnectFailed) as error:
            return error
        except wire.FrameInvalid as error:
            return LinkClosed(wire.CLOSE_PROTOCOL, str(error))
        finally:
            self._on_lost()
            if watching is not None:
                watching.cancel()
            if link is not None:
                await link.close()

    async def _watch(self, link: Link) -> None:
        """Notice a node that is gone without a goodbye: a machine that lost its power sends none."""
        self._heard_at = self._clock.monotonic()
        while (silence_s := self._clock.monotonic() - self._heard_at) < 3 * _SILENCE_S:
            if silence_s >= _SILENCE_S:
                link.send(wire.encode(wire.Ping()))
            await self._clock.sleep(_SILENCE_S)
        logger.warning("nothing was heard from %s for %.0f s", self._url, silence_s)
        await link.close(_NOT_HEARD)
