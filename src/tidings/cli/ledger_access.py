"""
The ledger, for commands: through the node that holds the workspace, or opened in this process if nobody does.

Both ways end in ``tidings.steward.operations``. Opened here the tool is trusted, as whoever may write the files is. A node is asked over its steward
socket, where it has one and no token is given: the kernel says who asks. Otherwise a token is shown, and its rights count.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from tidings.server.address import NodeAddress
from tidings.wire.steward import frames, requests

from .administration import node_address_of
from .node_log import NodeTarget
from .output import UsageProblem
from .session import Session, read_text

if TYPE_CHECKING:
    from tidings.steward.authority import Authority
    from tidings.steward.operations import Operations
    from tidings.steward.serving import ServedPlugin

_JSON_BYTES_MAX: Final = 1 << 20


class LedgerAccess(Protocol):
    """A ledger to ask."""

    async def call(self, request: requests.StewardRequest, /) -> dict[str, Any]:
        """The answer, as JSON has it."""
        ...

    def frames(self, request: requests.SubscribeRequest, /) -> AsyncIterator[dict[str, Any]]:
        """The frames of a subscription, the acknowledgement first."""
        ...


@contextlib.asynccontextmanager
async def ledger_of(
    session: Session, *, capabilities: Sequence[str] = (), may_create: bool = False
) -> AsyncIterator[LedgerAccess]:
    """
    The workspace's ledger.

    Args:
        session: The workspace, or the node.
        capabilities: What the requests take.
        may_create: Whether a folder without a log gets one.

    Raises:
        WorkspaceBusy: Another process that is no node holds the workspace.
        UsageProblem: There is nothing to show to the node.
        RemoteUnavailable: The node did not answer.
    """
    address = node_address_of(session)
    if address is None:
        async with _opened(session, may_create=may_create) as access:
            yield access
        return
    from tidings.client.ledger import LedgerClient

    if session.token is None and address.steward is not None:
        node = NodeTarget(address, None)
        opened = LedgerClient.unix(address.steward, capabilities=capabilities, patience_s=0)
    else:
        node, trusted = session.target(address), trusting(address)
        opened = LedgerClient(
            address.url, token=node.token, capabilities=capabilities, ssl_context=trusted, patience_s=0
        )
    with node.naming_token():
        async with opened as client:
            yield _Node(client)


def trusting(address: NodeAddress) -> ssl.SSLContext | None:
    """How to be sure of a node of this machine: the file that the workspace names is trusted, and nothing else; the name in it is the one that others know."""
    if address.certificate is None:
        return None
    context = ssl.create_default_context(cafile=address.certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class _Node:
    """Through the node."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, request: requests.StewardRequest) -> dict[str, Any]:
        answer: dict[str, Any] = await self._client.call(request)
        return answer

    async def frames(self, request: requests.SubscribeRequest) -> AsyncIterator[dict[str, Any]]:
        from tidings.client.ledger import RemoteHappenings

        async with RemoteHappenings(self._client, request) as stream:
            yield {"current_seq": stream.current_seq}
            async for frame in stream:
                yield frame


@contextlib.asynccontextmanager
async def _opened(session: Session, *, may_create: bool) -> AsyncIterator[LedgerAccess]:
    from tidings.ledger.settings import LedgerSettings
    from tidings.steward.service import open_ledger_service

    settings = LedgerSettings(instance_grace_s=None)  # no plugin comes here to announce its instances again
    async with (
        session.writing(may_create=may_create) as log,
        await open_ledger_service(log, session.workspace, settings=settings, clock=session.clock) as ledger_service,
    ):
        yield _Opened(ledger_service.operations)


class _Owner:
    """The rights of whoever may write the files: all."""

    expires_at_ns = None
    is_revoked = False

    def __init__(self) -> None:
        self.subject = f"cli:uid-{os.getuid()}"

    def require(self, need: str) -> None:
        """It may."""

    def require_publishing(self, topic_name: str, space_name: str) -> None:
        """Anywhere."""

    def require_name(self, name: str) -> None:
        """In any name."""

    def may_have(self, capability: str) -> bool:
        """All of them."""
        return True

    def settled(self) -> None:
        """There is nothing to wait for."""


class _Opened:
    """In this process: a ``Caller`` that nobody is at the other end of."""

    def __init__(self, operations: Operations) -> None:
        from tidings.steward.capabilities import CAPABILITIES

        self._operations = operations
        self.authority: Authority | None = _Owner()
        self.granted = frozenset(CAPABILITIES)
        self.served: ServedPlugin | None = None
        self.is_full = False

    def hold_memory(self, size: int) -> None:
        pass

    def send(self, messages: Sequence[bytes]) -> None:
        """Nobody is there."""

    async def call(self, request: requests.StewardRequest) -> dict[str, Any]:
        answer: dict[str, Any] = msgspec.json.decode(frames.encode(await self._operations.perform(request, self)))
        return answer

    async def frames(self, request: requests.SubscribeRequest) -> AsyncIterator[dict[str, Any]]:
        stream = await self._operations.perform(request, self)
        async with contextlib.aclosing(stream.frames()) as batches:
            async for messages in batches:
                for message in messages:
                    yield msgspec.json.decode(message)


def parsed_json(option: str, text: str) -> Any:
    """
    JSON given on the command line, or ``@FILE`` for what a file holds.

    Raises:
        UsageProblem: It is no JSON.
    """
    if text.startswith("@"):
        text = read_text(Path(text[1:]), _JSON_BYTES_MAX)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UsageProblem(f"{option} is no JSON: {error}", "give JSON, or @FILE for a file that holds it") from None
