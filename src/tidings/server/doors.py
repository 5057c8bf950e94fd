"""The doors and routes that every node has: the one place that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from starlette.routing import BaseRoute

from tidings.sync.service import SyncService
from tidings.wire.transport import Door

from .api import routes
from .groups_door import GroupsDoor, groups_door
from .services import Services
from .settings import NodeSettings

__all__ = ["api_routes", "counts_of", "reload_door", "standard_doors", "tell_of_rights"]


def standard_doors() -> dict[str, Callable[[Services], Door]]:
    """What makes the door at each path."""
    return {
        "/sync": _sync_door,
        "/groups": lambda services: groups_door(services, services.settings.groups),
    }


def _sync_door(services: Services) -> Door:
    return SyncService(
        services.log,
        services.book,
        services.verifier,
        services.settings.sync,
        services.clock,
        reached=services.dispatcher.reached,
    )


def reload_door(door: Door, settings: NodeSettings) -> None:
    """
    Have a door take over new settings, if it can.

    Raises:
        InvalidSchema: A schema cannot be compiled; the door keeps what it has.
    """
    if isinstance(door, SyncService):
        door.reload(settings.sync)


def tell_of_rights(door: Door) -> None:
    """Have a door look again at who may stay."""
    if isinstance(door, SyncService | GroupsDoor):
        door.rights_changed()


def counts_of(door: Door) -> Iterator[tuple[str, str, float]]:
    """What a door has to say for ``/metrics``: names, descriptions, values."""
    if isinstance(door, SyncService):
        stats = door.stats
        yield "tidings_sync_connections", "Open connections of sync clients.", stats.connections
        yield "tidings_sync_subscriptions", "Partitions and projects that they subscribe to.", stats.subscriptions
        yield "tidings_sync_committed_total", "Submitted events that were committed.", stats.committed
        yield "tidings_sync_rejected_total", "Submitted events that were rejected.", stats.rejected
        yield "tidings_sync_deliveries_total", "Broadcasts delivered.", stats.deliveries
        yield "tidings_sync_frames_built_total", "Broadcast frames built, each for all who get it.", stats.frames_built
        yield "tidings_sync_slow_closed_total", "Clients closed because they did not read.", stats.slow_closed
    elif isinstance(door, GroupsDoor):
        yield from door.metrics()


def api_routes(services: Services) -> list[BaseRoute]:
    """The routes of the HTTP API."""
    return routes(services, services.settings.api)
