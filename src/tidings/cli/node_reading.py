"""Reading records through a node, in pages over HTTP: what ``log read`` and ``log tail`` show when a node is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import quote

import msgspec

from tidings.log.interface import Query
from tidings.log.record import Record

from .administration import NodeTarget

_PAGE_COUNT: Final = 500
_WAIT_S: Final = 2.0
"""How long the node keeps an empty read open; Ctrl-C waits for its end."""


async def check_topic_there(node: NodeTarget, topic: str) -> None:
    """
    Make sure that there is a topic.

    Raises:
        NodeRefused: There is not, or it may not be read.
    """
    await node.ask("GET", f"/v1/topics/{quote(topic, safe='')}")


async def records_of(node: NodeTarget, query: Query) -> AsyncIterator[Record]:
    """The records that a query asks for and that may be read, oldest first."""
    async for record in _paged(node, query):
        yield record


async def last_of(node: NodeTarget, count: int, query: Query) -> AsyncIterator[Record]:
    """The last so many of them, oldest first."""
    found: list[Record] = []
    async for record in _paged(node, msgspec.structs.replace(query, backwards=True)):
        if len(found) >= count:
            break
        found.append(record)
    for record in reversed(found):
        yield record


async def follow(node: NodeTarget, query: Query, *, is_from_start: bool, last: int) -> AsyncIterator[Record]:
    """The records to begin with, then every later one as it is committed: the border is a seq, so none is missed or shown twice."""
    border = 0 if is_from_start else (await node.ask("GET", "/v1/topics"))["seq"]
    if last:
        async for record in last_of(node, last, msgspec.structs.replace(query, until=border)):
            yield record
    async for record in _paged(node, msgspec.structs.replace(query, since=border or None), wait_s=_WAIT_S):
        yield record


async def _paged(node: NodeTarget, query: Query, *, wait_s: float | None = None) -> AsyncIterator[Record]:
    given: dict[str, Any] = {
        name: getattr(query, name) for name in ("topic", "since", "until", "from_offset", "to_offset")
    }
    given |= {
        name: None if (at := getattr(query, name)) is None else at.isoformat() for name in ("from_time", "to_time")
    }
    given |= {"partition": list(query.partitions) or None, "backwards": "true" if query.backwards else None}
    page = await node.ask("GET", "/v1/events", limit=_PAGE_COUNT, wait=wait_s, **given)
    while True:
        for each in page["events"]:
            yield msgspec.json.decode(msgspec.json.encode(each), type=Record)
        if page["at_end"] and wait_s is None:
            return
        page = await node.ask("GET", page["next"])
