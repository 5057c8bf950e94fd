"""What the node's endpoints and its HTTP API are given: one of each part, put together by ``node``, and nothing global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidings.log.errors import StorageFull

if TYPE_CHECKING:
    from tidings.access.apps import AppRegistry
    from tidings.access.audit import AuditLog
    from tidings.access.authentication import Authenticator
    from tidings.access.book import AccessBook
    from tidings.access.guard import DosGuard
    from tidings.access.tokens import TokenVerifier
    from tidings.bus.eventbus import EventBus
    from tidings.core.clock import Clock
    from tidings.gateway.gateway import Gateway
    from tidings.log.dispatcher import Dispatcher
    from tidings.log.interface import Log
    from tidings.steward.service import LedgerService

    from .configuration import ConfigManager
    from .health import HealthManager
    from .retention import NodeRetention
    from .settings import NodeSettings


@dataclass(frozen=True, slots=True)
class Services:
    """
    The parts of a running node.

    ``log``, ``bus`` and ``ledger_service`` (the ledger) are open; all use the same log. ``book`` has been given every record of topic ``access`` up
    to ``dispatcher.seq``; ``apps`` every one of topic ``apps``. ``settings`` are those at the start; ``config`` has those in force.
    """

    log: Log
    bus: EventBus
    book: AccessBook
    verifier: TokenVerifier
    dispatcher: Dispatcher
    settings: NodeSettings
    clock: Clock
    ledger_service: LedgerService
    audit: AuditLog
    guard: DosGuard
    apps: AppRegistry
    authenticator: Authenticator
    health: HealthManager
    config: ConfigManager
    gateway: Gateway
    retention: NodeRetention


def refuse_when_full(log: Log) -> None:
    """
    Refuse a remote publisher at once when the disk is full: only publishers in this process may wait, as each that waits takes the place of
    another.

    Raises:
        StorageFull: The disk is full.
    """
    if log.health().is_storage_full:
        raise StorageFull("the node's workspace")
