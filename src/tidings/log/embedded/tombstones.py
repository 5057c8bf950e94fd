"""
Dedupe tombstones: what stays of a dropped record whose id must not be forgotten.

A tombstone is a line of the usual format whose payload is only a digest of the one that was there. Those of a dropped segment
lie in ``ids/`` under the segment's own name, so a late retry can still be told from a new event, and from a misuse of
the id, for as long as the rule asks for it. They are not derived from anything: the index is rebuilt from them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from ..encoding import EventDraft, content_digest, unsealed
from ..encryption import Encryptor
from ..record import Record
from ..segment import encode_line
from .disk import Disk, replace_file
from .index import RecordLocation
from .inspect import FileProblem, read_tombstones
from .layout import Layout, StreamKey


class Tombstones:
    """The dedupe tombstones of one log."""

    def __init__(self, disk: Disk, layout: Layout, encryptor: Encryptor | None) -> None:
        self._disk = disk
        self._encryptor = encryptor
        self._layout = layout
        self._files = {key: set(numbers) for key, numbers in layout.id_files(disk).items()}
        self._ranges: dict[tuple[StreamKey, int], tuple[int, int]] = {}

    def keep(self, key: StreamKey, number: int, records: Iterable[Record]) -> None:
        """Keep the tombstones of a segment's records; on disk when this returns."""
        tombstones = b"".join(map(self._tombstone_of, records))
        path = self._layout.id_file(key, number)
        self._disk.make_folder(path.parent)
        self._disk.sync_folder(self._layout.ids)  # a space's folder may be new, and its name must last too
        replace_file(self._disk, path, tombstones)
        self._files.setdefault(key, set()).add(number)

    def discard(self, key: StreamKey, number: int) -> None:
        """Take back what was kept of a segment, which is not dropped after all."""
        self._disk.remove(self._layout.id_file(key, number))
        self._files.get(key, set()).discard(number)
        self._ranges.pop((key, number), None)

    def _tombstone_of(self, record: Record) -> bytes:
        record = unsealed(record, self._encryptor)
        meta = record.meta
        kept = msgspec.structs.replace(
            meta,
            actor=None,
            device=None,
            trace_id=None,
            qos=None,
            extra=None,
            band=None,
            priority=None,
            ttl_sec=None,
            sealed=None,
        )
        # Without the key nobody can say what the payload was: then any content counts as the same.
        digest = b"" if meta.sealed is not None else content_digest(record).hex().encode()
        return encode_line(
            b'"offset":%d,"seq":%d,"meta":%b,"payload":{"digest":"%b"}}'
            % (record.offset, record.seq, msgspec.json.encode(kept), digest)
        )

    def at(self, places: list[RecordLocation]) -> list[Record]:
        """The tombstones at these places."""
        found: list[Record] = []
        for key, numbers in self._files.items():
            wanted = {place.offset for place in places if place.topic == key.topic}
            for number in sorted(numbers) if wanted else ():
                low, high = self._range(key, number)
                if any(low <= offset <= high for offset in wanted):
                    found += [tombstone for tombstone in self._read(key, number) if tombstone.offset in wanted]
        return found

    def _range(self, key: StreamKey, number: int) -> tuple[int, int]:
        if (key, number) not in self._ranges:
            offsets = [tombstone.offset for tombstone in self._read(key, number)]
            self._ranges[key, number] = (min(offsets, default=0), max(offsets, default=-1))
        return self._ranges[key, number]

    def _read(self, key: StreamKey, number: int) -> Iterator[Record]:
        for _, found in read_tombstones(self._disk, self._layout, key, number):
            if isinstance(found, FileProblem):
                raise found.as_error()
            yield found

    def all(self) -> Iterator[Record]:
        """Every tombstone, for building the index anew."""
        for key, numbers in sorted(self._files.items(), key=lambda item: item[0].path):
            for number in sorted(numbers):
                yield from self._read(key, number)

    @staticmethod
    def same_content(draft: EventDraft, tombstone: Record) -> bool:
        """Whether the draft repeats the record that the tombstone is left of."""
        digest = tombstone.payload["digest"]
        return not digest or digest == content_digest(draft).hex()
