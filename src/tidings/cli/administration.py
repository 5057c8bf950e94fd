"""
Looking at a log's groups and dead letters and changing them, appending, dropping: in the files of a workspace, or through a node.

``looking`` and ``changing`` give whichever is to be asked, with the same methods. A node is asked if one was named (``--node``, a context) and,
to change something, if one holds the workspace. Both ways end in ``tidings.bus.admin.GroupAdmin`` and the log, answer the same and raise
errors of the same code. In the files the tool is trusted, as whoever may write them is; a node asks for a token with the right to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec

from tidings.access.audit import audited_drops
from tidings.access.errors import NodeRefused
from tidings.bus.admin import DeadLetterVerb, GroupAdmin, GroupChange, GroupDetails, GroupReport, SeekTarget
from tidings.bus.store.dead_letters import DeadLetter, DeadLetterFilter
from tidings.bus.store.files import FileGroupStore
from tidings.core.clock import datetime_of
from tidings.core.events import Event
from tidings.log.embedded.disk import OsDisk
from tidings.log.errors import WorkspaceBusy
from tidings.log.interface import Appended, Duplicate, Log, Query, Refused, Verdict
from tidings.log.retention import RetentionPlan, plan_retention
from tidings.log.settings import TopicRetention
from tidings.pipeline.archived import held_by_lake
from tidings.server.address import NodeAddress, read_address
from tidings.wire.events import event_to_wire

from .node_log import NodeTarget
from .output import UsageProblem
from .session import Session, confirm, encryptor_of, refuse_keys, user_audit

_EVENTS_PER_REQUEST_MAX: Final = 200
_REQUEST_BYTES_MAX: Final = 1 << 20
_TOO_LARGE: Final = 413


class Administration(Protocol):
    """What can be asked for. Each change returns what was done, or would be; see ``GroupAdmin`` for what it raises."""

    async def groups(self, topic: str | None, /) -> Sequence[GroupReport]:
        """The groups, as they are now."""

    async def group(self, topic: str, group: str, /) -> GroupDetails:
        """One group."""

    async def pause(self, topic: str, group: str, /, *, dry_run: bool = False) -> GroupChange:
        """Deliver nothing more to a group until it is resumed."""

    async def resume(self, topic: str, group: str, /, *, dry_run: bool = False) -> GroupChange:
        """Go on delivering to a group."""

    async def seek(self, topic: str, group: str, target: SeekTarget, /, *, dry_run: bool = False) -> GroupChange:
        """Set a group's position."""

    async def delete(self, topic: str, group: str, /, *, dry_run: bool = False) -> GroupChange:
        """Forget a group's position."""

    async def dead_letters(
        self, topic: str | None, ids: Sequence[str] | None, wanted: DeadLetterFilter, /
    ) -> Sequence[DeadLetter]:
        """The dead letters that match; with ids, of those."""

    async def dead_letter(self, topic: str, letter_id: str, /) -> DeadLetter:
        """One dead letter."""

    async def change_dead_letters(self, verb: DeadLetterVerb, topic: str, ids: Sequence[str], /) -> int | None:
        """Redrive dead letters or drop them; the seq of the record of that, ``None`` if there was nothing to do."""

    async def append(self, event: Event, /) -> Appended | Duplicate:
        """Store an event; returns when it is durable."""

    async def append_many(self, events: Sequence[Event], /) -> Sequence[Verdict]:
        """Store events; a verdict each."""

    async def retention(self, rules: Mapping[str, TopicRetention], /, *, dry_run: bool = False) -> RetentionPlan:
        """Drop the segments that these rules let go of."""


class _Files:
    """In the files: beside the log's writer to look, as its one writer to change."""

    def __init__(self, session: Session, log: Log, store: FileGroupStore) -> None:
        self._session = session
        self._log = log
        self._store = store
        self._admin = GroupAdmin(log, store, session.clock)

    async def groups(self, topic: str | None) -> Sequence[GroupReport]:
        await self._log.read(
            Query(since=self._log.position.seq), limit=1
        )  # a follower reads the files again on each read
        return await self._admin.reports(topic)

    async def group(self, topic: str, group: str) -> GroupDetails:
        return await self._admin.report(topic, group)

    async def pause(self, topic: str, group: str, *, dry_run: bool = False) -> GroupChange:
        return await self._admin.pause(topic, group, dry_run=dry_run, audit=user_audit())

    async def resume(self, topic: str, group: str, *, dry_run: bool = False) -> GroupChange:
        return await self._admin.resume(topic, group, dry_run=dry_run, audit=user_audit())

    async def seek(self, topic: str, group: str, target: SeekTarget, *, dry_run: bool = False) -> GroupChange:
        return await self._admin.seek(topic, group, target, dry_run=dry_run, audit=user_audit())

    async def delete(self, topic: str, group: str, *, dry_run: bool = False) -> GroupChange:
        return await self._admin.delete(topic, group, dry_run=dry_run, audit=user_audit())

    async def dead_letters(
        self, topic: str | None, ids: Sequence[str] | None, wanted: DeadLetterFilter
    ) -> Sequence[DeadLetter]:
        topics = await self._store.dead_letter_topics() if topic is None else [topic]
        return [letter for each in topics for letter in await self._store.dead_letters(each, ids, wanted)]

    async def dead_letter(self, topic: str, letter_id: str) -> DeadLetter:
        return await self._store.dead_letter(topic, letter_id)

    async def change_dead_letters(self, verb: DeadLetterVerb, topic: str, ids: Sequence[str]) -> int | None:
        change = self._admin.redrive if verb == "redrive" else self._admin.drop
        return (await change(topic, ids, audit=user_audit())).audit_seq

    async def append(self, event: Event) -> Appended | Duplicate:
        return await self._log.append(event)

    async def append_many(self, events: Sequence[Event]) -> Sequence[Verdict]:
        return await self._log.append_many(events)

    async def retention(self, rules: Mapping[str, TopicRetention], *, dry_run: bool = False) -> RetentionPlan:
        session, log = self._session, self._log
        epoch = session.layout.read_meta(OsDisk()).epoch
        archived = held_by_lake(session.lake, epoch, is_kept=session.lake_place is not None)
        plan = plan_retention(
            [segment for info in log.topics().values() for segment in info.segments],
            rules,
            now=datetime_of(session.clock.now_ns()),
            needs=await self._store.needs(),
            archived_through=archived,
        )
        if plan.drops and not dry_run:
            async with user_audit().of(log, "retention", audited_drops(plan), frees_space=True):
                plan = await log.drop(plan, self._store)
        return plan


class _Node:
    """Through a node, over HTTP."""

    def __init__(self, node: NodeTarget) -> None:
        self._ask = node.ask

    async def groups(self, topic: str | None) -> Sequence[GroupReport]:
        return msgspec.convert((await self._ask("GET", "/v1/groups", topic=topic))["groups"], list[GroupReport])

    async def group(self, topic: str, group: str) -> GroupDetails:
        found = await self._ask("GET", _path("groups", topic, group))
        return msgspec.convert(found, GroupDetails, strict=False)

    async def pause(self, topic: str, group: str, *, dry_run: bool = False) -> GroupChange:
        return await self._change(topic, group, "pause", {"dry_run": dry_run})

    async def resume(self, topic: str, group: str, *, dry_run: bool = False) -> GroupChange:
        return await self._change(topic, group, "resume", {"dry_run": dry_run})

    async def seek(self, topic: str, group: str, target: SeekTarget, *, dry_run: bool = False) -> GroupChange:
        name = "to_time" if isinstance(target, datetime) else "to_offset" if isinstance(target, int) else "to"
        return await self._change(topic, group, "seek", {name: target, "dry_run": dry_run})

    async def delete(self, topic: str, group: str, *, dry_run: bool = False) -> GroupChange:
        done = await self._ask("DELETE", _path("groups", topic, group), dry_run="true" if dry_run else None)
        return msgspec.convert(done, GroupChange)

    async def _change(self, topic: str, group: str, verb: str, body: dict[str, Any]) -> GroupChange:
        return msgspec.convert(await self._ask("POST", f"{_path('groups', topic, group)}/{verb}", body), GroupChange)

    async def dead_letters(
        self, topic: str | None, ids: Sequence[str] | None, wanted: DeadLetterFilter
    ) -> Sequence[DeadLetter]:
        if ids is not None and topic is not None:
            named = [await self.dead_letter(topic, each) for each in dict.fromkeys(ids)]
            return [letter for letter in named if wanted.matches(letter)]
        conditions = {name: value for name, value in msgspec.to_builtins(wanted).items() if name != "states"}
        found: list[DeadLetter] = []
        skip: int | None = 0
        while skip is not None:
            page = await self._ask("GET", "/v1/dead-letters", topic=topic, state=wanted.states, skip=skip, **conditions)
            found += msgspec.convert(page["dead_letters"], list[DeadLetter])
            skip = page["next_skip"]
        return found

    async def dead_letter(self, topic: str, letter_id: str) -> DeadLetter:
        return msgspec.convert(await self._ask("GET", _path("dead-letters", topic, letter_id)), DeadLetter)

    async def change_dead_letters(self, verb: DeadLetterVerb, topic: str, ids: Sequence[str]) -> int | None:
        while True:
            done = await self._ask("POST", f"/v1/dead-letters/{verb}", {"topic": topic, "ids": list(ids)})
            if not done["has_more"]:
                seq: int | None = done["audit_seq"]
                return seq

    async def append(self, event: Event) -> Appended | Duplicate:
        done = await self._ask("POST", "/v1/events", event_to_wire(event))
        kind = Appended if done["verdict"] == "appended" else Duplicate
        return kind(done["seq"], done["offset"], done["event_id"])

    async def append_many(self, events: Sequence[Event]) -> Sequence[Verdict]:
        verdicts: list[Verdict] = []
        for count, body in event_requests(events):
            try:
                answer = await self._ask("POST", "/v1/events", body)
            except NodeRefused as error:
                if count > 1 or error.status != _TOO_LARGE:
                    raise
                verdicts.append(Refused(error))
            else:
                verdicts += map(_verdict_of, answer["verdicts"])
        return verdicts

    async def retention(self, rules: Mapping[str, TopicRetention], *, dry_run: bool = False) -> RetentionPlan:
        body = {"rules": dict(rules), "dry_run": dry_run}
        return msgspec.convert(await self._ask("POST", "/v1/retention", body), RetentionPlan)


def _verdict_of(shown: dict[str, Any]) -> Verdict:
    if (error := shown.get("error")) is not None:
        told = (error["detail"], error.get("hint"), error["code"], bool(error.get("retryable")))
        return Refused(NodeRefused(200, *told))
    kind = Appended if shown["verdict"] == "appended" else Duplicate
    return kind(shown["seq"], shown["offset"], shown["event_id"])


def event_requests(
    events: Sequence[Event], encode: Callable[[Event], bytes] = event_to_wire
) -> Iterator[tuple[int, bytes]]:
    """The events as bodies of requests, each within what a node takes in one, and how many each holds."""
    items: list[bytes] = []
    size = 0
    for event in events:
        item = encode(event)
        if items and (len(items) == _EVENTS_PER_REQUEST_MAX or size + len(item) > _REQUEST_BYTES_MAX):
            yield len(items), b"[%b]" % b",".join(items)
            items, size = [], 0
        items.append(item)
        size += len(item) + 1
    if items:
        yield len(items), b"[%b]" % b",".join(items)


def _path(noun: str, topic: str, name: str) -> str:
    return f"/v1/{noun}/{quote(topic, safe='')}/{quote(name, safe='')}"


@contextlib.asynccontextmanager
async def looking(
    session: Session, *, offsets_key: Path | None = None, key_file: Path | None = None
) -> AsyncIterator[Administration]:
    """
    Look, and try changes dry, within this: in the files, beside whoever writes them, or at the node that was named.

    Args:
        session: What to look at.
        offsets_key: The key of the offset files, where they are sealed.
        key_file: Keys, with which what dead letters of encrypted spaces say can be read.
    """
    if session.node is not None:
        refuse_keys(session.node, key_file)
        yield _Node(session.target(session.node))
        return
    async with session.following() as log:
        yield _Files(session, log, store_of(session, log, offsets_key=offsets_key, key_file=key_file))


@contextlib.asynccontextmanager
async def changing(
    session: Session,
    *,
    offsets_key: Path | None = None,
    key_file: Path | None = None,
    may_create: bool = False,
    question: str | None = None,
    show: Callable[[], None] = lambda: None,
    is_yes: bool = False,
) -> AsyncIterator[Administration]:
    """
    Ask the person first if there is a question, then make changes within this.

    Args:
        session: What to change.
        offsets_key: The key of the offset files, where they are sealed.
        key_file: Keys of spaces that are sealed, for what is appended.
        may_create: Whether a missing log is made.
        question: What to ask.
        show: Shows what the question is about.
        is_yes: Ask nobody.

    Raises:
        WorkspaceBusy: Another process that is no node holds the workspace.
        UsageProblem: Nobody is there to be asked, or there is no token to ask the node with, or keys that a node does not take.
        NodeUnreachable, NodeRefused: A node was asked, and did not do it.
    """
    node = node_of(session)  # before anybody is asked about what cannot be done
    if node is not None:
        refuse_keys(node.address, key_file)
    if node is not None and session.lake_place is not None:
        raise UsageProblem(
            f"the node at {node.address.url} has a lake of its own",
            "leave out --lake; see its setting server.lake_path",
        )
    if question is not None:
        if not is_yes and not session.out.is_json:
            show()
            session.out.flush()
        confirm(session.out, question, is_yes=is_yes)
    if node is not None:
        yield _Node(node)
        return
    async with session.writing(key_file, may_create=may_create) as log:
        yield _Files(session, log, store_of(session, log, offsets_key=offsets_key))


def node_of(session: Session) -> NodeTarget | None:
    """
    The node to change something through: the one that was named, else the one that holds the workspace; ``None`` if nobody holds it.

    Raises:
        WorkspaceBusy: Another process that is no node does.
        UsageProblem: There is no token, and the node wants one.
        NodeUnreachable: It does not answer.
    """
    address = node_address_of(session)
    return None if address is None else session.target(address)


def node_address_of(session: Session) -> NodeAddress | None:
    """Where the node is that ``node_of`` finds. Raises ``WorkspaceBusy`` as that does."""
    if session.node is not None:
        return session.node
    writer = session.writer()
    if writer is None:
        return None
    address = read_address(session.workspace)
    if address is None:
        busy = WorkspaceBusy(session.workspace, writer)
        busy.hint = "that is no node; stop it, start `tidings serve --dev`, and `tidings work` and this go through that"
        raise busy
    return address


def running_node_of(session: Session) -> NodeTarget:
    """
    The node, for what only a node can do. Raises as ``node_of`` does.

    Raises:
        UsageProblem: There is none.
    """
    node = node_of(session)
    if node is None:
        raise UsageProblem(
            f"no node holds the workspace {session.workspace}",
            "start one with `tidings serve --dev`, or name one with --node",
        )
    return node


def store_of(
    session: Session, log: Log, *, offsets_key: Path | None = None, key_file: Path | None = None
) -> FileGroupStore:
    """
    The workspace's offsets and dead letters.

    Args:
        session: The workspace.
        log: Its log.
        offsets_key: If given, only positions with a good seal can be read.
        key_file: Keys, with which what dead letters of encrypted spaces say can be read.
    """
    key = None if offsets_key is None else offsets_key.read_bytes()
    return FileGroupStore(
        session.workspace, log, clock=session.clock, offsets_key=key, encryptor=encryptor_of(key_file)
    )
