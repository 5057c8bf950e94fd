"""
Carrying out retention: how one sealed segment goes.

The order is what makes it safe to stop at any step: first what must stay (husks, and their ids in the index), then the
line in the seals that says the segment was dropped on purpose, and only then the file. A file that outlives its line is
removed when the log is opened next; a missing file without a line would be refused as a loss. The index is told last, when
the file has made room for that: an entry that stays behind leads to nothing, and nobody believes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidings.core.ids import seq_in_event_id

from ..record import Record
from ..segment import decode
from .checkpoint import append_seal_line, encode_segment_drop
from .disk import Disk, is_full, read_file
from .husks import Husks
from .index import Index, IndexEntry, IndexFull
from .layout import Layout, StreamKey

__all__ = ["drop_segment", "entries_of", "entry_of"]

logger = logging.getLogger(__name__)


def entry_of(record: Record, *, is_husk: bool = False) -> IndexEntry | None:
    """
    What the index must know of a record; ``None`` if nothing.

    An id that the log made leads to its record by itself, but not to its husk.
    """
    meta = record.meta
    is_own_id = seq_in_event_id(meta.event_id) == record.seq and not is_husk
    if is_own_id and meta.idem_key is None and not meta.partitions:
        return None
    return IndexEntry(
        seq=record.seq,
        topic=meta.topic,
        offset=record.offset,
        event_id=None if is_own_id else meta.event_id,
        idem_key=meta.idem_key,
        space_id=meta.space_id,
        partitions=() if is_husk else meta.partitions,
    )


def entries_of(records: Iterable[Record], *, are_husks: bool = False) -> list[IndexEntry]:
    """What the index must know of these records."""
    entries = (entry_of(record, is_husk=are_husks) for record in records)
    return [entry for entry in entries if entry is not None]


def drop_segment(disk: Disk, layout: Layout, key: StreamKey, number: int, index: Index, husks: Husks | None) -> None:
    """Drop one sealed segment; with ``husks``, its ids are kept."""
    path = layout.segment(key, number)
    data = read_file(disk, path) or b""
    records = [record for line in data.splitlines() if isinstance(record := decode(line), Record)]
    if husks is not None:
        husks.keep(key, number, data)
        try:
            index.add(entries_of(records, are_husks=True), index.covers)
        except (OSError, IndexFull):
            husks.discard(key, number)  # the segment stays, and nothing has to be kept of it
            raise
    append_seal_line(disk, layout, key, encode_segment_drop(number))
    gone = entries_of(records)
    if husks is not None:
        gone = [entry._replace(event_id=None, idem_key=None) for entry in gone]
    disk.remove(path)
    disk.sync_folder(path.parent)
    try:
        index.remove(gone)
    except (OSError, IndexFull) as error:
        if isinstance(error, OSError) and not is_full(error):
            raise
        logger.warning("the index keeps the entries of %s, for want of room: %s", path, error)
