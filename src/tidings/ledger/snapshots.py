"""
Snapshots: all of the ledger's state as of one record, so that opening need not go through all records again.

A snapshot is a row of blocks. The first is its header; then come the parts, each in pieces of some thousand entries; an empty block
ends it. Every block has its length and checksum, so half a snapshot, or an altered one, is told from a whole one. Pieces are small so
that writing one, beside a ledger that goes on, never keeps the event loop waiting for long.

``SnapshotStore`` is where they are kept: in memory here, in files in ``snapshot_files``. Two are kept. The records that the older one
covers may be dropped from the log; so a snapshot that turns out to be damaged costs time only.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar, get_type_hints

import msgspec

from .errors import SnapshotDamaged, SnapshotUnsupported
from .state import LedgerState, Part

_T = TypeVar("_T")
FORMAT: Final = 1
KEPT: Final = 2
_PIECE_ENTRIES: Final = 2000
_BLOCK: Final = struct.Struct(">II")
"""Length and CRC-32 of what follows."""
_END: Final = _BLOCK.pack(0, 0)
_encode: Final = msgspec.msgpack.Encoder().encode


class SnapshotHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot covers: everything up to one record."""

    format: int = FORMAT
    offset: int
    """The record's offset in the topic ``ledger``."""
    event_id: str
    """The record's id: a log that has another record at this offset is another log."""
    epoch: str
    taken_at_ms: int
    parts: tuple[str, ...]
    """Their names, in the order they follow in."""


class FrozenPart(msgspec.Struct, frozen=True):
    """A part as it was at one moment."""

    name: str
    kind: Any
    value: Any


class SnapshotStore(Protocol):
    """Where snapshots are kept, by the offset they cover. All but ``run`` may block."""

    async def run(self, job: Callable[[], _T]) -> _T:
        """Do blocking work beside the event loop."""
        ...

    def offsets(self) -> list[int]:
        """Those there are, newest first."""
        ...

    def save(self, offset: int, blocks: Iterable[bytes]) -> None:
        """Keep one; whole and durable when this returns, and nothing of it is left if it raises."""
        ...

    def load(self, offset: int) -> bytes:
        """One as it was saved, as far as it is there."""
        ...

    def remove(self, offset: int) -> None:
        """Forget one; one that is not there is fine."""
        ...


class MemorySnapshots:
    """Snapshots that end with the process."""

    def __init__(self) -> None:
        self._kept: dict[int, bytes] = {}

    async def run(self, job: Callable[[], _T]) -> _T:
        """Do it at once."""
        return job()

    def offsets(self) -> list[int]:
        """Those there are, newest first."""
        return sorted(self._kept, reverse=True)

    def save(self, offset: int, blocks: Iterable[bytes]) -> None:
        """Keep one."""
        self._kept[offset] = b"".join(blocks)

    def load(self, offset: int) -> bytes:
        """One as it was saved."""
        return self._kept[offset]

    def remove(self, offset: int) -> None:
        """Forget one."""
        self._kept.pop(offset, None)


def frozen_parts(state: LedgerState) -> list[FrozenPart]:
    """All parts as they are now."""
    return [FrozenPart(part.name, part.frozen_type, part.freeze()) for part in state.parts]


def blocks_of(header: SnapshotHeader, parts: Sequence[FrozenPart]) -> Iterator[bytes]:
    """A snapshot's blocks, made one by one."""
    yield _block(msgspec.json.encode(header))
    for part in parts:
        for piece in _pieces(part.value):
            yield _block(piece)
        yield _END
    yield _END


def _block(data: bytes) -> bytes:
    return _BLOCK.pack(len(data), zlib.crc32(data)) + data


def _pieces(value: Any) -> Iterator[bytes]:
    """
    A value in pieces that can be put together again: a mapping or list by its entries, the fields of a structure each so, anything else whole.
    """
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from (_encode((name, msgspec.Raw(piece))) for piece in _pieces_of_field(getattr(value, name)))
    else:
        yield from _pieces_of_field(value)


def _pieces_of_field(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict) and len(value) > _PIECE_ENTRIES:
        entries = iter(value.items())
        while piece := dict(itertools.islice(entries, _PIECE_ENTRIES)):
            yield _encode(piece)
    elif isinstance(value, list | tuple) and len(value) > _PIECE_ENTRIES:
        for at in range(0, len(value), _PIECE_ENTRIES):
            yield _encode(value[at : at + _PIECE_ENTRIES])
    else:
        yield _encode(value)


def header_of(offset: int, data: bytes) -> SnapshotHeader:
    """
    The header of a snapshot.

    Raises:
        SnapshotDamaged: It cannot be read.
        SnapshotUnsupported: A newer version wrote it.
    """
    header, _ = _header_and_end(offset, data)
    return header


def _header_and_end(offset: int, data: bytes) -> tuple[SnapshotHeader, int]:
    block, end = _read_block(offset, data, 0)
    try:
        version = msgspec.json.decode(block, type=dict[str, Any]).get("format")
        if isinstance(version, int) and version > FORMAT:
            raise SnapshotUnsupported(offset, f"it has format {version}; this version knows formats up to {FORMAT}")
        return msgspec.json.decode(block, type=SnapshotHeader), end
    except msgspec.DecodeError as error:
        raise SnapshotDamaged(offset, str(error)) from None


def _read_block(offset: int, data: bytes, at: int) -> tuple[memoryview, int]:
    if at + _BLOCK.size > len(data):
        raise SnapshotDamaged(offset, "it ends too early")
    length, crc = _BLOCK.unpack_from(data, at)
    start = at + _BLOCK.size
    block = memoryview(data)[start : start + length]
    if len(block) < length or zlib.crc32(block) != crc:
        raise SnapshotDamaged(offset, f"the block at byte {at} is not whole")
    return block, start + length


def restore(offset: int, data: bytes, parts: Sequence[Part]) -> SnapshotHeader:
    """
    Have empty parts become what a snapshot has of them.

    Args:
        offset: Which snapshot it is.
        data: Its bytes.
        parts: Every part of the ledger. One that the snapshot does not know stays empty: it is new.

    Raises:
        SnapshotDamaged: It is not whole. The parts are not to be used.
        SnapshotUnsupported: A newer version wrote it, or it has a part that is not among these.
    """
    header, at = _header_and_end(offset, data)
    by_name = {part.name: part for part in parts}
    unknown = sorted(set(header.parts) - by_name.keys())
    if unknown:
        raise SnapshotUnsupported(offset, f"it has a part {unknown[0]!r}, and this ledger has none of that name")
    frozen: list[tuple[Part, Any]] = []
    for name in header.parts:
        part = by_name[name]
        pieces: list[memoryview] = []
        while True:
            block, at = _read_block(offset, data, at)
            if not block:
                break
            pieces.append(block)
        try:
            frozen.append((part, _joined(part.frozen_type, pieces)))
        except (msgspec.DecodeError, TypeError, KeyError, IndexError) as error:
            raise SnapshotUnsupported(offset, f"its part {name!r} has another form: {error}") from None
    block, at = _read_block(offset, data, at)
    if block or at != len(data):
        raise SnapshotDamaged(offset, "it does not end where it should")
    for part, value in frozen:
        part.restore(value)
    return header


def _joined(kind: Any, pieces: Sequence[memoryview]) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        by_field: dict[str, list[memoryview]] = {}
        opened = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        for piece in pieces:
            name, raw = opened.decode(piece)
            by_field.setdefault(name, []).append(memoryview(raw))
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{name: _joined_field(hints[name], found) for name, found in by_field.items()})
    return _joined_field(kind, pieces)


def _joined_field(kind: Any, pieces: Sequence[memoryview]) -> Any:
    decoder = msgspec.msgpack.Decoder(kind)
    first = decoder.decode(pieces[0])
    if len(pieces) == 1:
        return first
    if isinstance(first, dict):
        for piece in pieces[1:]:
            first.update(decoder.decode(piece))
        return first
    joined = list(first)
    for piece in pieces[1:]:
        joined.extend(decoder.decode(piece))
    return type(first)(joined)
