"""
The graph envelopes of committed records, made again for those who read what they missed.

After a restart, or a break in the network, many come back at once and read the same records. So what was made of a stretch of the log is kept for a
while, for all of them: an envelope and its encoding are made once. Whether a reader may see one is decided for each reader, each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from tidings.access.visibility import ReadCapsule
from tidings.gateway.envelopes import encode
from tidings.gateway.errors import DescriptorRefused
from tidings.gateway.filters import AudienceKey, key_of
from tidings.gateway.gateway import Gateway
from tidings.gateway.names import EventClass
from tidings.gateway.resume_index import Retained
from tidings.log.interface import Log, Query
from tidings.log.record import Record

from .graph_source import descriptors_of

_BLOCK_SEQS: Final = 64
"""Seqs of a block: it is filled without a pause."""
_BLOCKS_MAX: Final = 2_048
_KEPT_BYTES_MAX: Final = 4 << 20
"""What is kept, as envelopes are encoded; in memory they take about four times as much."""


class Told(NamedTuple):
    """An envelope, with whom it is for."""

    seq: int
    kind: AudienceKey
    """The same object for neighbours that are for the same audience, but for their objects."""
    retained: Retained
    encoded: bytes


class HistoryPage(NamedTuple):
    """All envelopes from where it was asked up to a seq, in order, and how to go on."""

    told: Sequence[Told]
    through_seq: int
    next: Query
    at_end: bool
    """Nothing more was there to read."""
    effort: int
    """Envelopes that were looked at, and records that had to be read for them."""


class _Block:
    """The envelopes of neighbouring seqs, as far as those were read."""

    __slots__ = ("silent_through_seq", "size_bytes", "through_seq", "told")

    def __init__(self, after_seq: int) -> None:
        self.told: list[Told] = []
        self.through_seq = after_seq
        self.silent_through_seq = 0
        """If it is whole and holds nothing: up to where nothing was told, as far as that is known."""
        self.size_bytes = 0


class EnvelopeHistory:
    """
    Reads envelopes by seq.

    Args:
        log: Where the records are.
        gateway: Makes their envelopes.
        default_app: The app of records that name none.
    """

    def __init__(self, log: Log, gateway: Gateway, default_app: str) -> None:
        self._log = log
        self._gateway = gateway
        self._default_app = default_app
        self._blocks: dict[int, _Block] = {}  # the one used last is the last
        self._size_bytes = 0

    async def read(self, query: Query, *, bytes_max: int) -> HistoryPage:
        """
        Some envelopes with a seq above ``query.since`` and not above ``query.until``, whoever may see them.

        Raises:
            PositionTrimmed, EpochMismatch, CorruptLog: See ``Log.read``.
            AccessUnavailable: It cannot be decided who may see them.
        """
        log, since = self._log, query.since
        end = log.position.seq if query.until is None else min(query.until, log.position.seq)
        if since is None or since < log.dropped_through_seq:
            # Only the log can say that it is gone, or where it still is.
            page = await log.read(query, limit=_BLOCK_SEQS, bytes_max=bytes_max)
            through_seq = end if page.at_end else page.records[-1].seq if page.records else 0
            told = self._told(page.records)
            effort = len(page.records) + len(told)
            return HistoryPage(told, max(through_seq, since or 0), page.next, page.at_end, effort)
        since = self._skip_silent(since, end)
        through_seq, told, effort = since, [], 0
        if since < end:
            block, effort = await self._filled(since, end, bytes_max)
            through_seq = min(block.through_seq, end)
            told = [each for each in block.told if since < each.seq <= through_seq]
        next_query = replace(query, since=through_seq)
        return HistoryPage(told, through_seq, next_query, through_seq >= end, effort + len(told))

    def _skip_silent(self, since: int, end: int) -> int:
        """A place behind which something may have been told: what is known to have told nothing is passed over."""
        at, first = since, self._blocks.get(since // _BLOCK_SEQS)
        block = first
        while at < end and block is not None and block.silent_through_seq:
            at = block.silent_through_seq
            block = self._blocks.get(at // _BLOCK_SEQS)
        if at > since and first is not None:
            first.silent_through_seq = at  # the next one who comes by makes it in one step
        return max(since, min(at, end))

    async def _filled(self, since: int, end: int, bytes_max: int) -> tuple[_Block, int]:
        """The block that a place is in, with everything behind that place, up to the end or its own; and how many records were read for it."""
        number = since // _BLOCK_SEQS
        last_seq = (number + 1) * _BLOCK_SEQS
        block = self._blocks.pop(number, None) or _Block(number * _BLOCK_SEQS)
        self._blocks[number] = block
        read_count = 0
        while block.through_seq < min(end, last_seq):
            before_seq = block.through_seq
            # What was dropped before the place that is read from is missed by nobody.
            start = max(before_seq, min(since, self._log.dropped_through_seq))
            page = await self._log.read(Query(since=start), limit=last_seq - start, bytes_max=bytes_max)
            read_count += len(page.records)
            if block.through_seq == before_seq:  # no other reader was here meanwhile
                told = self._told(page.records)
                reached = min(end, last_seq) if page.at_end else start
                block.through_seq = max(reached, page.records[-1].seq if page.records else 0)
                block.told += told
                if block.through_seq == last_seq and not block.told:
                    block.silent_through_seq = last_seq
                self._grow(number, block, sum(len(each.encoded) for each in told))
        return block, read_count

    def _grow(self, number: int, block: _Block, size_bytes: int) -> None:
        """A block holds more; of all of them those go that were not read for longest, if it is too much."""
        block.size_bytes += size_bytes
        if self._blocks.get(number) is block:
            self._size_bytes += size_bytes
        while self._size_bytes > _KEPT_BYTES_MAX or len(self._blocks) > _BLOCKS_MAX:
            self._size_bytes -= self._blocks.pop(next(iter(self._blocks))).size_bytes

    def _told(self, records: Sequence[Record]) -> list[Told]:
        """What the gateway would have told of the records; nothing of those that it would have refused."""
        gateway = self._gateway
        declared = [
            (descriptor, declaration)
            for record in records
            for descriptor in descriptors_of(record, self._default_app)
            if (declaration := gateway.declarations.get(descriptor.event_type)) is not None
        ]
        capsules = gateway.issuer.issue([gateway.builder.request_for(*each) for each in declared])
        told: list[Told] = []
        kinds: dict[AudienceKey, AudienceKey] = {}
        for (descriptor, declaration), capsule in zip(declared, capsules, strict=True):
            if not isinstance(capsule, ReadCapsule):
                continue
            seq = descriptor.sequence_anchor_hint
            try:
                envelope = gateway.builder.rebuild(descriptor, declaration)
            except DescriptorRefused:  # so it was when it was committed
                continue
            retained = Retained(EventClass.GRAPH, descriptor.event_class, envelope, seq)
            retained.capsule = capsule
            kind = key_of(envelope, capsule)
            told.append(Told(seq, kinds.setdefault(kind, kind), retained, encode(envelope)))
        return told
