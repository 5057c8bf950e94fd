"""
Changing groups and dead letters: in the files, or through the node that holds the workspace.

``administering`` gives whichever is there, with the same methods. Both ways end in ``tidings.bus.admin.GroupAdmin``, and leave a record
in the topic ``audit``. In the files the tool is trusted, as whoever may write them is; a node asks for a token with the right to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from tidings.access.administration import Request, send
from tidings.bus.admin import DeadLetterVerb, GroupAdmin, GroupChange, SeekTarget
from tidings.bus.store.files import FileGroupStore
from tidings.log.errors import WorkspaceBusy
from tidings.log.interface import Log
from tidings.server.address import NodeAddress, read_address

from .output import UsageProblem
from .session import Session, confirm, encryptor_of, user_audit


class Administration(Protocol):
    """What can be changed. Each returns what was done; see ``GroupAdmin`` for what it raises."""

    async def pause(self, topic: str, group: str, /) -> GroupChange:
        """Deliver nothing more to a group until it is resumed."""

    async def resume(self, topic: str, group: str, /) -> GroupChange:
        """Go on delivering to a group."""

    async def seek(self, topic: str, group: str, target: SeekTarget, /) -> GroupChange:
        """Set a group's position."""

    async def delete(self, topic: str, group: str, /) -> GroupChange:
        """Forget a group's position."""

    async def change_dead_letters(self, verb: DeadLetterVerb, topic: str, ids: Sequence[str], /) -> int | None:
        """Redrive dead letters or drop them; the seq of the record of that, ``None`` if there was nothing to do."""


class _Files:
    """In the files, as the log's one writer."""

    def __init__(self, admin: GroupAdmin) -> None:
        self._admin = admin

    async def pause(self, topic: str, group: str) -> GroupChange:
        return await self._admin.pause(topic, group, audit=user_audit())

    async def resume(self, topic: str, group: str) -> GroupChange:
        return await self._admin.resume(topic, group, audit=user_audit())

    async def seek(self, topic: str, group: str, target: SeekTarget) -> GroupChange:
        return await self._admin.seek(topic, group, target, audit=user_audit())

    async def delete(self, topic: str, group: str) -> GroupChange:
        return await self._admin.delete(topic, group, audit=user_audit())

    async def change_dead_letters(self, verb: DeadLetterVerb, topic: str, ids: Sequence[str]) -> int | None:
        change = self._admin.redrive if verb == "redrive" else self._admin.drop
        return (await change(topic, ids, audit=user_audit())).audit_seq


class _Node:
    """Through the node, over HTTP."""

    def __init__(self, address: NodeAddress, token: str) -> None:
        self._address = address
        self._token = token

    async def pause(self, topic: str, group: str) -> GroupChange:
        return await self._change(topic, group, "pause", {})

    async def resume(self, topic: str, group: str) -> GroupChange:
        return await self._change(topic, group, "resume", {})

    async def seek(self, topic: str, group: str, target: SeekTarget) -> GroupChange:
        name = "to_time" if isinstance(target, datetime) else "to_offset" if isinstance(target, int) else "to"
        return await self._change(topic, group, "seek", {name: target})

    async def delete(self, topic: str, group: str) -> GroupChange:
        return msgspec.convert(await self._send("DELETE", _path(topic, group)), GroupChange)

    async def change_dead_letters(self, verb: DeadLetterVerb, topic: str, ids: Sequence[str]) -> int | None:
        while True:
            done = await self._send("POST", f"/v1/dead-letters/{verb}", {"topic": topic, "ids": list(ids)})
            if not done["has_more"]:
                seq: int | None = done["audit_seq"]
                return seq

    async def _change(self, topic: str, group: str, verb: str, body: dict[str, Any]) -> GroupChange:
        return msgspec.convert(await self._send("POST", f"{_path(topic, group)}/{verb}", body), GroupChange)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = Request(method, path, b"" if body is None else msgspec.json.encode(body))
        return await asyncio.to_thread(send, self._address.url, request, self._token, self._address.certificate)


def _path(topic: str, group: str) -> str:
    return f"/v1/groups/{quote(topic, safe='')}/{quote(group, safe='')}"


@contextlib.asynccontextmanager
async def administering(
    session: Session,
    *,
    token: str | None,
    offsets_key: Path | None = None,
    question: str | None = None,
    show: Callable[[], None] = lambda: None,
    is_yes: bool = False,
) -> AsyncIterator[Administration]:
    """
    Ask the person first if there is a question, then make changes within this.

    Args:
        session: The workspace.
        token: What to show to a node.
        offsets_key: The key of the offset files, where they are sealed.
        question: What to ask.
        show: Shows what the question is about.
        is_yes: Ask nobody.

    Raises:
        WorkspaceBusy: Another process that is no node holds the workspace.
        UsageProblem: Nobody is there to be asked, or there is no token to ask the node with.
        NodeUnreachable, NodeRefused: A node holds the workspace, and did not do it.
    """
    node = node_of(session, token)  # before anybody is asked about what cannot be done
    if question is not None:
        if not is_yes and not session.out.is_json:
            show()
            session.out.flush()
        confirm(session.out, question, is_yes=is_yes)
    if node is not None:
        yield _Node(*node)
        return
    async with session.writing() as log:
        yield _Files(admin_of(session, log, offsets_key))


def node_of(session: Session, token: str | None) -> tuple[NodeAddress, str] | None:
    """
    The node that holds the workspace, and the token to show it; ``None`` if nobody holds it.

    Raises:
        WorkspaceBusy: Another process that is no node does.
        UsageProblem: There is no token.
    """
    writer = session.writer()
    if writer is None:
        return None
    address = read_address(session.workspace)
    if address is None:
        raise WorkspaceBusy(session.workspace, writer)
    if token is None:
        raise UsageProblem(
            f"the node at {address.url} holds the workspace, and there is no token to ask it with",
            "give a token that may do this by TIDINGS_TOKEN or --token",
        )
    return address, token


def admin_of(session: Session, log: Log, offsets_key: Path | None) -> GroupAdmin:
    """The workspace's groups as they are stored."""
    return GroupAdmin(log, store_of(session, log, offsets_key=offsets_key), session.clock)


def store_of(
    session: Session, log: Log | None = None, *, offsets_key: Path | None = None, key_file: Path | None = None
) -> FileGroupStore:
    """
    The workspace's offsets and dead letters.

    Args:
        session: The workspace.
        log: Its log; without it there are dead letters only.
        offsets_key: If given, only positions with a good seal can be read.
        key_file: Keys, with which what dead letters of encrypted spaces say can be read.
    """
    session.settings()  # a workspace that is missing is said to be, not shown as an empty one
    key = None if offsets_key is None else offsets_key.read_bytes()
    return FileGroupStore(
        session.workspace, log, clock=session.clock, offsets_key=key, encryptor=encryptor_of(key_file)
    )
