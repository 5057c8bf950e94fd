"""
Tidings: a durable event platform that runs inside a Python process.

    from tidings import Ack, Bus, Event, EventMeta, Nack

The names below are what most programs need. Each is loaded when it is first used: ``import tidings`` takes no time, and a small
client or a Spark executor pays only for what it uses. ``Bus`` is ``tidings.bus.EventBus``. ``Client`` is
``tidings.client.RemoteBus``, which publishes to a node and handles events of its groups as a ``Bus`` does in its own process;
``HttpClient`` (plain HTTP), ``EventStream`` (what happens, as it happens) and ``SyncClient`` (offline drafts and a local view) have their own
names.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidings.bus import (
        Ack,
        Backoff,
        BusSettings,
        DeadLetter,
        EventBus,
        Nack,
        Publisher,
        PublishResult,
        ReceivedEvent,
        Subscription,
        SubscriptionSettings,
        once,
    )
    from tidings.bus import EventBus as Bus
    from tidings.client import RemoteBus as Client
    from tidings.client import SyncClient
    from tidings.client.events import EventStream
    from tidings.client.http import HttpClient
    from tidings.core.errors import TidingsError
    from tidings.core.events import Event, EventMeta, EventType
    from tidings.log.settings import LogSettings
    from tidings.middleware import MetricsMiddleware, Middleware, TracingMiddleware
    from tidings.server.node import Node

__all__ = [
    "Ack",
    "Backoff",
    "Bus",
    "BusSettings",
    "Client",
    "DeadLetter",
    "Event",
    "EventBus",
    "EventMeta",
    "EventStream",
    "EventType",
    "HttpClient",
    "LogSettings",
    "MetricsMiddleware",
    "Middleware",
    "Nack",
    "Node",
    "PublishResult",
    "Publisher",
    "ReceivedEvent",
    "Subscription",
    "SubscriptionSettings",
    "SyncClient",
    "TidingsError",
    "TracingMiddleware",
    "__version__",
    "once",
]

__version__: Final = "0.1.0"

_MODULES: Final = {
    "tidings.bus": (
        *("Ack", "Backoff", "BusSettings", "DeadLetter", "EventBus", "Nack", "PublishResult", "Publisher"),
        *("ReceivedEvent", "Subscription", "SubscriptionSettings", "once"),
    ),
    "tidings.core.errors": ("TidingsError",),
    "tidings.core.events": ("Event", "EventMeta", "EventType"),
    "tidings.log.settings": ("LogSettings",),
    "tidings.middleware": ("MetricsMiddleware", "Middleware", "TracingMiddleware"),
    "tidings.client": ("SyncClient",),
    "tidings.client.events": ("EventStream",),
    "tidings.client.http": ("HttpClient",),
    "tidings.server.node": ("Node",),
}
_PLACES: Final = {
    "Bus": ("tidings.bus", "EventBus"),
    "Client": ("tidings.client", "RemoteBus"),
    **{name: (module, name) for module, names in _MODULES.items() for name in names},
}
"""For each name the module that has it, and its name there."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'tidings' has no attribute {name!r}")
    import importlib

    module, own_name = _PLACES[name]
    try:
        found = getattr(importlib.import_module(module), own_name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tidings"):
            raise
        from tidings.core.installing import install_line

        raise ImportError(
            f"tidings.{name} needs the package {error.name}: {install_line(module.split('.')[1])}", name=error.name
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
