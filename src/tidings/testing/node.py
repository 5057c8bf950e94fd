"""
A node in process, for tests and examples: on a free port of the loopback, with a secret of its own and tokens at hand.

    async with running_node(tmp_path) as node:
        token = node.token("alice", topics=["demo"])
        async with httpx.AsyncClient(base_url=node.url) as client: ...

It is a real node over real sockets; only its settings are smaller than a server's.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.access.context import TokenClaims
from tidings.access.settings import AccessSettings, TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.log.embedded.disk import Disk
from tidings.log.encryption import Encryptor
from tidings.log.settings import LogSettings
from tidings.server.node import EndpointMaker, Node
from tidings.server.settings import NodeSettings, ServerSettings

TEST_SECRET: Final = "a secret for tests, known to everybody, 32 bytes and more"
_JOURNAL_BYTES: Final = 1 << 20


def node_settings(settings: NodeSettings | None = None, **server: Any) -> NodeSettings:
    """
    Settings for a node in a test: loopback, any free port, a small journal, a known secret, nothing in the access log.

    Args:
        settings: To begin with instead of the defaults.
        server: Values of ``server``, by name.
    """
    given = settings or NodeSettings(
        log=LogSettings(journal_bytes=_JOURNAL_BYTES),
        access=AccessSettings(tokens=TokenSettings(secret=TEST_SECRET)),
        server=ServerSettings(access_log=False, stop_deadline_s=5.0),
    )
    return msgspec.structs.replace(given, server=msgspec.structs.replace(given.server, port=0, **server))


class RunningNode(Node):
    """A node with a maker of tokens beside it."""

    def token(
        self,
        subject: str = "tester",
        *,
        client_id: str | None = None,
        roles: list[str] | None = None,
        lifetime_s: int = 3600,
        **claims: Any,
    ) -> str:
        """
        A token that this node believes.

        Args:
            subject: Who it speaks for.
            client_id: The client it is made out to.
            roles: ``["admin"]`` may do everything.
            lifetime_s: How long it lives.
            claims: Further claims of ``access.context.TokenClaims``, by field.
        """
        given = TokenClaims(
            roles=frozenset(roles or ()), **{name: _as_claim(name, value) for name, value in claims.items()}
        )
        issuer = TokenIssuer(self.settings.access.tokens, self._clock)
        return issuer.issue(subject, client_id=client_id, claims=given, lifetime_s=lifetime_s)

    def headers(self, subject: str = "tester", **options: Any) -> dict[str, str]:
        """Headers for a request with such a token."""
        return {"authorization": f"Bearer {self.token(subject, **options)}"}

    @property
    def ws_url(self) -> str:
        """The node's address for sockets; add an endpoint's path."""
        return self.url.replace("http", "ws", 1)


def _as_claim(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    return tuple(value) if name.endswith("_prefixes") else frozenset(value)


@contextlib.asynccontextmanager
async def running_node(
    workspace: Path | str,
    settings: NodeSettings | None = None,
    *,
    endpoints: Mapping[str, EndpointMaker] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
    encryptor: Encryptor | None = None,
    **server: Any,
) -> AsyncIterator[RunningNode]:
    """
    A started node, stopped at the end.

    Args:
        workspace: Its folder.
        settings: All settings; the port is chosen anyway.
        endpoints: Further endpoints by path.
        clock, disk: Replaceable for tests.
        encryptor: Seals payloads at rest.
        server: Values of ``server``, by name: ``running_node(path, connections_max=3)``.
    """
    chosen = node_settings(settings, **server)
    async with RunningNode(workspace, chosen, endpoints=endpoints, clock=clock, disk=disk, encryptor=encryptor) as node:
        assert isinstance(node, RunningNode)
        yield node
