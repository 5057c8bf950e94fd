"""What a node says when it is up: what is exposed, to whom, and how durable it is."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from tidings import __version__

from .settings import NodeSettings

__all__ = ["NO_KEYS", "banner", "is_loopback", "warnings"]

NO_KEYS: Final = (
    "there is no secret and no key set, so every token is refused and the node is not ready; set TIDINGS_JWT_SECRET"
    " (at least 32 bytes, as `openssl rand -hex 32` makes them) or server.key_set_file"
)


def banner(
    settings: NodeSettings, *, url: str, doors: Iterable[str], workspace: str, seq: int, epoch: str
) -> list[str]:
    """The start-up lines, the most important one first."""
    server = settings.server
    transport = "TLS" if server.tls_cert_file is not None else "no TLS"
    reach = "this machine only" if is_loopback(server.host) else "reachable from other machines"
    lines = [
        f"tidings {__version__} serves {url} ({transport}, {reach}); {_authentication(settings)}; {_durability(settings)}",
        f"doors: {', '.join([*doors, '/v1', '/healthz', '/readyz', '/metrics'])}",
        f"workspace {workspace}, epoch {epoch}, seq {seq}",
    ]
    if server.unix_path is not None:
        lines.append(f"also on the Unix socket {server.unix_path}, for this user")
    return lines


def warnings(settings: NodeSettings) -> list[str]:
    """What somebody should think about before this node serves others."""
    found: list[str] = []
    server = settings.server
    is_public = not is_loopback(server.host)
    if settings.access.is_open:
        found.append("access.is_open is set: EVERYBODY who reaches this node may do everything that is not forbidden")
    elif not settings.access.can_authenticate:
        found.append(f"NOBODY CAN USE THIS NODE: {NO_KEYS}")
    if is_public and server.tls_cert_file is None:
        found.append(f"{server.host} is reachable from other machines without TLS: tokens travel in the clear")
    if settings.log.durability != "sync":
        found.append(f"log.durability is {settings.log.durability!r}: acknowledged events can be lost in a crash")
    if "*" in server.origins:
        found.append("server.origins allows every web page to open sockets and to send requests")
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _authentication(settings: NodeSettings) -> str:
    tokens = settings.access.tokens
    if settings.access.is_open:
        return "ACCESS IS OPEN TO EVERYBODY"
    ways = [name for name, value in (("a shared secret", tokens.secret), ("a key set", tokens.key_set)) if value]
    return f"tokens by {' and '.join(ways)}" if ways else "no token is accepted"


def _durability(settings: NodeSettings) -> str:
    if settings.log.durability == "sync":
        return "every event is on disk before it is acknowledged"
    return f"NOT DURABLE ({settings.log.durability})"
