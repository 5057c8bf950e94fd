"""What the node's doors and its HTTP API are given: one of each part, put together by ``node``, and nothing global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidings.log.errors import StorageFull

if TYPE_CHECKING:
    from tidings.access.book import AccessBook
    from tidings.access.tokens import TokenVerifier
    from tidings.bus.eventbus import EventBus
    from tidings.core.clock import Clock
    from tidings.log.dispatcher import Dispatcher
    from tidings.log.interface import Log

    from .health import Readiness
    from .settings import NodeSettings

__all__ = ["Services", "refuse_when_full"]


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


def refuse_when_full(log: Log) -> None:
    """
    Tell a publisher at the other end of a connection at once that the disk is full: to wait is for those in this process, as who waits
    here takes the place of others.

    Raises:
        StorageFull: It is.
    """
    if log.health().is_storage_full:
        raise StorageFull("the node's workspace")
