"""What the node's doors and its HTTP API are given: one of each part, put together by ``node``, and nothing global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidings.access.book import AccessBook
    from tidings.access.tokens import TokenVerifier
    from tidings.bus.eventbus import EventBus
    from tidings.core.clock import Clock
    from tidings.log.interface import Log

    from .dispatcher import Dispatcher
    from .health import Readiness
    from .settings import NodeSettings

__all__ = ["Services"]


@dataclass(frozen=True, slots=True)
class Services:
    """
    The parts of a running node.

    ``log`` and ``bus`` are open; the bus stands on the same log. ``book`` has been given every record of topic ``access`` up
    to ``dispatcher.seq``. ``health`` answers at once and never raises.
    """

    log: Log
    bus: EventBus
    book: AccessBook
    verifier: TokenVerifier
    dispatcher: Dispatcher
    settings: NodeSettings
    clock: Clock
    health: Callable[[], Readiness]
