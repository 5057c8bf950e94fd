"""A node that is asked over HTTP: what to show it, and its log, which is read as one in files is (``tidings.log.reading``)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from tidings.access.administration import Request, send
from tidings.access.errors import NodeRefused
from tidings.core.errors import TidingsError
from tidings.log.interface import Page, Position, Query, TopicInfo
from tidings.log.record import Record
from tidings.log.retention import SegmentInfo
from tidings.server.address import NodeAddress

T = TypeVar("T")

_UNAUTHORIZED: Final = 401
_PAGE_COUNT: Final = 500
_WAIT_S: Final = 2.0
"""How long the node keeps an empty read open; Ctrl-C waits for its end."""


class Token(NamedTuple):
    """What to show a node, and where it was found."""

    text: str
    origin: str
    """As in "the token shown was ...": ``TIDINGS_TOKEN``."""
    instead: str | None = None
    """What to do to have another one shown, where there is one."""


class NodeTarget(NamedTuple):
    """A node to ask, and what to show it."""

    address: NodeAddress
    shown: Token | None

    @property
    def token(self) -> str | None:
        """What to show it."""
        return None if self.shown is None else self.shown.text

    async def ask(self, method: str, path: str, body: object = None, **query: object) -> dict[str, Any]:
        """
        The node's answer; of the query what is not ``None`` is asked.

        Raises:
            NodeUnreachable, NodeRefused: It did not do it.
        """
        answer: dict[str, Any] = await self.ask_for(dict, method, path, body, **query)
        return answer

    async def ask_for(self, kind: type[T], method: str, path: str, body: object = None, **query: object) -> T:
        """The node's answer, as a type. Raises as ``ask`` does."""
        given = {name: value for name, value in query.items() if value is not None}
        where = f"{path}?{urlencode(given, doseq=True)}" if given else path
        data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        request, address = Request(method, where, data), self.address
        with self.naming_token():
            answer: T = await asyncio.to_thread(send, address.url, request, self.token, address.certificate, kind)
        return answer

    @contextlib.contextmanager
    def naming_token(self) -> Iterator[None]:
        """Around what asks the node, in whatever way: if it does not believe the token, the hint says which one that was."""
        try:
            yield
        except TidingsError as error:
            if self.shown is not None and _is_token_refused(error):
                instead = "" if self.shown.instead is None else f"; {self.shown.instead}"
                error.hint = f"the token that was shown is {self.shown.origin}{instead}"
            raise


def _is_token_refused(error: TidingsError) -> bool:
    """Whether it says so over HTTP, over the ledger's connection, or by closing that of events."""
    if isinstance(error, NodeRefused):
        return error.status == _UNAUTHORIZED
    return getattr(error, "subclass", "") == "not_authenticated" or "code 4401" in str(getattr(error, "problem", ""))


class _Topic(msgspec.Struct, frozen=True):
    """A topic as the node shows it; the figures are null if the token may not read all of it."""

    topic: str
    first_offset: int | None
    next_offset: int | None
    first_seq: int | None
    last_seq: int | None
    size_bytes: int | None
    segments: tuple[SegmentInfo, ...] = ()

    def info(self) -> TopicInfo:
        return TopicInfo(
            self.topic,
            self.first_offset or 0,
            self.next_offset or 0,
            self.first_seq or 0,
            self.last_seq or 0,
            self.size_bytes or 0,
            self.segments,
        )


class _Topics(msgspec.Struct, frozen=True):
    topics: list[_Topic]
    epoch: str
    seq: int


class _Events(msgspec.Struct, frozen=True):
    events: list[Record]
    next: str
    at_end: bool
    epoch: str
    seq: int


class _Place(msgspec.Struct, frozen=True):
    """What the address of a next page says of where it begins."""

    since: int | None = None
    until: int | None = None
    from_offset: int | None = None
    to_offset: int | None = None
    known_drops: int = 0


class NodeLog:
    """What of a node's log its token may read: a ``ReadableLog``. Made by ``open_node_log``."""

    def __init__(self, node: NodeTarget, found: _Topics) -> None:
        self._node = node
        self._topics = {each.topic: each.info() for each in found.topics}
        self.position = Position(found.epoch, found.seq)
        """As of the node's last answer."""

    def topics(self) -> dict[str, TopicInfo]:
        """The topics, as of when this was opened."""
        return self._topics

    def topic(self, name: str) -> TopicInfo | None:
        """See ``topics``."""
        return self._topics.get(name)

    async def read(self, query: Query, *, limit: int = _PAGE_COUNT, bytes_max: int = 0) -> Page:
        """One page. The node bounds its bytes. Raises ``NodeUnreachable`` and ``NodeRefused``."""
        page = await self._ask(query, limit=min(limit, _PAGE_COUNT))
        place = msgspec.convert(dict(parse_qsl(urlsplit(page.next).query)), _Place, strict=False)
        following = msgspec.structs.replace(query, epoch=page.epoch, **msgspec.structs.asdict(place))
        return Page(page.events, following, page.at_end)

    async def wait(self, after: int, topic: str | None = None) -> int:
        """Wait until something is committed after a seq that may be read. Raises as ``read`` does."""
        query = Query(topic=topic, since=after)
        while not (await self._ask(query, limit=1, wait=_WAIT_S)).events:
            query = msgspec.structs.replace(query, since=self.position.seq)
        return self.position.seq

    async def close(self) -> None:
        """There is nothing to let go of."""

    async def _ask(self, query: Query, **more: object) -> _Events:
        given: dict[str, object] = {
            name: getattr(query, name)
            for name in ("topic", "since", "until", "from_offset", "to_offset", "known_drops", "epoch")
        }
        given |= {
            name: None if (at := getattr(query, name)) is None else at.isoformat() for name in ("from_time", "to_time")
        }
        given |= {"partition": query.partitions or None, "backwards": "true" if query.backwards else None}
        page = await self._node.ask_for(_Events, "GET", "/v1/events", **given, **more)
        self.position = Position(page.epoch, page.seq)
        return page


async def open_node_log(node: NodeTarget, *, has_segments: bool = False) -> NodeLog:
    """
    The log of a node.

    Args:
        node: The node.
        has_segments: Whether its topics are to have their segments.

    Raises:
        NodeUnreachable, NodeRefused: It did not answer.
    """
    found = await node.ask_for(_Topics, "GET", "/v1/topics", segments="true" if has_segments else None)
    return NodeLog(node, found)
