"""``tidings log read`` and ``tidings log tail``: records on the screen or into a pipe, beside a living writer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import typer

from tidings.core.names import check_topic
from tidings.log.interface import Log, Query
from tidings.log.reading import last as last_records
from tidings.log.reading import records
from tidings.log.reading import tail as tail_records
from tidings.log.record import Record

from .errors import UsageProblem
from .output import Output
from .session import KeyFileOption, Session, command, known_topic
from .values import parse_time

__all__ = ["register"]

_LAST_COUNT_MAX = 100_000

TopicArgument = Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only this topic; all of them if left out.")]
PartitionOption = Annotated[
    list[str] | None,
    typer.Option("--partition", metavar="NAME", help="Only records that name this set; may be repeated."),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Only the payloads, byte for byte as stored, one a line.")]


def register(app: typer.Typer) -> None:
    """Add the commands to their noun."""
    command(
        app,
        "read",
        examples="""
            tidings log read demo --last 10
            tidings log read --since 1000 --until 2000 --json
            tidings log read demo --from-time 15m --raw | jq .text
        """,
    )(read)
    command(
        app,
        "tail",
        ends_on_interrupt=True,
        examples="""
            tidings log tail
            tidings log tail demo --last 20
            tidings log tail demo --from-start --json | jq .payload
        """,
    )(tail)


async def read(
    session: Session,
    topic: TopicArgument = None,
    *,
    from_offset: Annotated[int | None, typer.Option(min=0, metavar="N", help="From this offset of the topic.")] = None,
    since: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="After this seq.")] = None,
    until: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="Up to and including this seq.")] = None,
    from_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Written at this time or later: a time, a date, or 15m, 2h, 7d.")
    ] = None,
    to_time: Annotated[str | None, typer.Option(metavar="TIME", help="Written before this time.")] = None,
    partition: PartitionOption = None,
    last: Annotated[
        int | None, typer.Option(min=0, max=_LAST_COUNT_MAX, metavar="N", help="The last N records.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="At most N records.")] = None,
    is_raw: RawOption = False,
    key_file: KeyFileOption = None,
) -> None:
    """
    Read records that are committed now, oldest first.

    Reading needs no pause of the writer. If records that a lower bound asks for were dropped, the command
    says so (exit code 1) and reads nothing.
    """
    bounds = (from_offset, since, until, from_time, to_time, limit)
    if last is not None and any(bound is not None for bound in bounds):
        raise UsageProblem("--last stands alone; bounds and --limit read from the other end")
    if from_offset is not None and topic is None:
        raise UsageProblem("--from-offset needs a topic: offsets count within one")
    query = Query(
        topic=None if topic is None else check_topic(topic),
        partitions=tuple(partition or ()),
        since=since,
        until=until,
        from_offset=from_offset,
        from_time=None if from_time is None else parse_time("--from-time", from_time, session.clock),
        to_time=None if to_time is None else parse_time("--to-time", to_time, session.clock),
    )
    async with session.reading(key_file) as log:
        if topic is not None:
            known_topic(log, topic)
        found = _last(log, last, query) if last is not None else records(log, query)
        count = 0
        async for record in found:
            if limit is not None and count >= limit:
                break
            _show(session.out, record, is_raw=is_raw)
            count += 1


async def tail(
    session: Session,
    topic: TopicArgument = None,
    *,
    is_from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the oldest record kept.")] = False,
    last: Annotated[
        int | None, typer.Option(min=0, max=_LAST_COUNT_MAX, metavar="N", help="Begin with the last N records.")
    ] = None,
    partition: PartitionOption = None,
    is_raw: RawOption = False,
    key_file: KeyFileOption = None,
) -> None:
    """
    Show records as they are committed, until Ctrl-C (exit code 0).

    Each record is passed on at once. A topic need not exist yet.
    """
    if is_from_start and last is not None:
        raise UsageProblem("--from-start and --last are two places to begin; give one")
    query = Query(topic=None if topic is None else check_topic(topic), partitions=tuple(partition or ()))
    async with session.reading(key_file) as log:
        async for record in _follow(log, query, is_from_start, last or 0):
            _show(session.out, record, is_raw=is_raw)
            session.out.flush()


async def _follow(log: Log, query: Query, is_from_start: bool, last: int) -> AsyncIterator[Record]:
    """The records to begin with, then every later one: the border is a seq, so none is missed or shown twice."""
    if is_from_start:
        async for record in tail_records(log, query):
            yield record
        return
    border = log.position.seq
    async for record in _last(log, last, query):
        if record.seq <= border:
            yield record
    bounded = Query(topic=query.topic, partitions=query.partitions, since=border)
    async for record in tail_records(log, bounded):
        yield record


async def _last(log: Log, count: int, query: Query) -> AsyncIterator[Record]:
    for record in await last_records(log, count, query.topic, query.partitions):
        yield record


def _show(out: Output, record: Record, *, is_raw: bool) -> None:
    if is_raw:
        out.raw(bytes(record.payload_json))
    else:
        out.record(record)
