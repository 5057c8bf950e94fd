"""
Publishing the pipeline's events: to the log itself or, when a node holds the workspace, through that node's API.

Their ids follow from their content, so what is sent twice, also once to the log and once through a node, is a duplicate and
stored once. What cannot be published now waits for the next run, and a line says why and what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from tidings.access.administration import Request, send
from tidings.access.errors import NodeRefused, NodeUnreachable, TokenInvalid
from tidings.core.events import Event
from tidings.log.errors import WorkspaceBusy
from tidings.log.interface import Refused
from tidings.server.address import NodeAddress, read_address, read_token
from tidings.wire.events import event_to_wire

from .administration import event_requests
from .session import Session

PublishTokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        envvar="TIDINGS_TOKEN",
        help="A token that may publish what there is to tell, for when a node holds the workspace.",
    ),
]


class SummaryPublisher:
    """
    Publishes for one command.

    Args:
        session: The workspace, and where to say that something waits.
        token: For the node, if one holds the workspace.
    """

    def __init__(self, session: Session, token: str | None) -> None:
        self._session = session
        self._token = token
        self.waits_for: list[str] = []
        """Why something was not published, each reason once."""

    def publish(self, events: Sequence[Event]) -> bool:
        """
        Take summaries to the log; whether it has them all now. If not, a line says why, and the next run is to try again.

        Raises:
            TidingsError: The log that was opened for it refused one.
        """
        reason = self.try_publish(events)
        if reason is None:
            return True
        if reason not in self.waits_for:  # one line for all the jobs that wait for the same
            self.waits_for.append(reason)
            self._session.out.note(f"{len(events)} summaries wait for the next run: {reason}")
        return False

    def try_publish(self, events: Sequence[Event]) -> str | None:
        """
        Take events to the log; ``None`` if it has them all now, otherwise why not and what to do.

        Raises:
            TidingsError: The log that was opened for it refused one.
        """
        try:
            asyncio.run(self._append(events))
        except WorkspaceBusy as busy:
            # Its address counts only while the lock is held: a killed node leaves the file behind.
            address = read_address(self._session.workspace)
            if busy.node_url is None or address is None:
                return str(busy)
            token = self._token or read_token(self._session.workspace)
            if token is None:
                return (
                    f"the node at {address.url} holds the workspace, and there is no token to publish with; "
                    f"give one that may publish to {_topics(events)} by TIDINGS_TOKEN or --token"
                )
            return self._send(events, address, token)
        return None

    async def _append(self, events: Sequence[Event]) -> None:
        async with self._session.writing() as log:
            for answer in await log.append_many(list(events)):
                if isinstance(answer, Refused):
                    raise answer.error

    def _send(self, events: Sequence[Event], address: NodeAddress, token: str) -> str | None:
        for _, body in event_requests(events, _wire_of):
            try:
                answer = send(address.url, Request("POST", "/v1/events", body), token, address.certificate)
            except (NodeUnreachable, NodeRefused, TokenInvalid) as error:
                return str(error)
            if (refusal := _first_refusal(answer)) is not None:
                return f"the node at {address.url} refused: {refusal}"
        return None


def _topics(events: Sequence[Event]) -> str:
    return ", ".join(sorted({str.__str__(event.meta.topic) for event in events}))


def _wire_of(event: Event) -> bytes:
    """An event without its actor: through a node that is whose token it is, and nobody else."""
    shown = msgspec.json.decode(event_to_wire(event))
    shown["meta"].pop("actor", None)
    return msgspec.json.encode(shown)


def _first_refusal(answer: dict[str, Any]) -> str | None:
    """What the node says of the first event that it did not take; ``None`` if it took all."""
    verdicts = answer.get("verdicts")
    if not isinstance(verdicts, list):
        return "its answer has no verdicts"
    for verdict in verdicts:
        if verdict.get("verdict") not in ("appended", "duplicate"):
            error = verdict.get("error") or {}
            hint = f"; {error['hint']}" if error.get("hint") else ""
            return f"{error.get('detail') or verdict.get('verdict')}{hint}"
    return None
