"""
Lines cut into columns by what stands between their values, without parsing them.

The log writes every line in one form: the same keys in the same order, times of the same length, no spaces. So a few searches
for what separates the values give all of a line, at the speed of copying. Whether a line has the form is checked piece by piece;
one that has not (somebody else wrote it, or a name in it needed an escape) is left out, for a parser.

Runs on executors: no Spark, no loop, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

__all__ = ["CutLines", "cut_lines", "lines_of"]

_TIME_BYTES: Final = len(b"2026-11-15T10:11:35.725499Z")
_TIME: Final = pa.timestamp("us", tz="UTC")
_LINE_BYTES_MAX: Final = 1 << 31
_NAMES: Final = ("topic", "type", "space_id", "event_id")


@dataclass(frozen=True, slots=True)
class CutLines:
    """
    Lines in columns: ``topic``, ``type``, ``space_id``, ``event_id``, ``offset``, ``seq``, ``ts``, ``written_at`` and ``payload``
    as in bronze, and ``rest``: the envelope's other keys as they stand, each with a comma before it.
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]
    """Which of the lines these are."""
    columns: dict[str, pa.Array]

    def where(self, mask: pa.Array) -> CutLines:
        """Only those for which ``mask`` is true."""
        if pc.all(mask, min_count=0).as_py():
            return self
        columns = {name: column.filter(mask) for name, column in self.columns.items()}
        return CutLines(self.rows[mask.to_numpy(zero_copy_only=False)], columns)

    def split(self, name: str, separator: bytes, into: tuple[str, ...]) -> CutLines:
        """
        Cut a column into several; lines that have another number of parts are left out, and so are parts without a name. The
        last part is not cut further.
        """
        cut = pc.split_pattern(self.columns[name], separator, max_splits=len(into) - 1)
        offsets = cut.offsets.to_numpy()
        is_whole = np.diff(offsets) == len(into)
        firsts = offsets[:-1][is_whole]
        kept = self.where(pa.array(is_whole))
        parts = {part: cut.values.take(pa.array(firsts + number)) for number, part in enumerate(into) if part}
        return CutLines(kept.rows, {**kept.columns, **parts})

    def framed(self, name: str, before: bytes, after: bytes = b"") -> CutLines:
        """Only lines whose column begins and ends so (the two must not overlap); what it begins and ends with is taken off."""
        kept = self
        for frame, look in ((before, pc.starts_with), (after, pc.ends_with)):
            if frame:
                kept = kept.where(look(kept.columns[name], frame))
        return kept.having(name, _part(kept.columns[name], len(before), -len(after) or None))

    def having(self, name: str, column: pa.Array) -> CutLines:
        """With another column, or one in its place."""
        return CutLines(self.rows, {**self.columns, name: column})


def lines_of(data: bytes) -> pa.Array:
    """The lines of ``data``, which ends with a newline, each with its own; nothing is copied."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends + 1
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def cut_lines(lines: pa.Array) -> CutLines:
    """Those of the lines (each with its newline) that have the log's own form."""
    try:
        return _cut(lines)
    except pa.ArrowInvalid:
        # A value that looked right and is not, or bytes that are no text: rare enough to have all of them parsed.
        return _cut(lines[:0])


def _cut(lines: pa.Array) -> CutLines:
    lines.cast(pa.string())  # for its check: what is cut out of text is text
    cut = CutLines(np.arange(len(lines), dtype=np.int64), {"line": lines})
    cut = cut.where(pc.starts_with(lines, b'{"crc":"')).split("line", b'","', ("", "place", *_NAMES, "last"))
    cut = cut.framed("place", b'offset":').framed("last", b'ts":"', b"}\n")
    for name in _NAMES:
        cut = cut.framed(name, b'%b":"' % name.encode())
        if _holds(cut.columns[name], b"\\"):
            cut = cut.where(pc.invert(pc.match_substring(cut.columns[name], b"\\")))
    cut = cut.having("written_at", _part(cut.columns["place"], -_TIME_BYTES, None))
    cut = cut.having("place", _part(cut.columns["place"], 0, -_TIME_BYTES))
    cut = cut.framed("place", b"", b',"meta":{"written_at":"').split("place", b',"seq":', ("offset", "seq"))
    cut = cut.having("ts", _part(cut.columns["last"], 0, _TIME_BYTES))
    cut = cut.having("last", _part(cut.columns["last"], _TIME_BYTES, None))
    cut = cut.framed("last", b'"').split("last", b'},"payload":', ("rest", "payload"))
    cut = cut.where(pc.greater(pc.binary_length(cut.columns["payload"]), 0))
    for name in ("offset", "seq"):
        text = _as_text(cut.columns[name])
        number = text.cast(pa.int64())
        cut = cut.having(name, number).where(pc.equal(number.cast(pa.string()), text))
    columns = {name: _as_text(cut.columns[name]) for name in (*_NAMES, "payload", "rest")}
    times = {name: _as_text(cut.columns[name]).cast(_TIME) for name in ("ts", "written_at")}
    return CutLines(cut.rows, {**columns, **times, "offset": cut.columns["offset"], "seq": cut.columns["seq"]})


def _holds(column: pa.Array, byte: bytes) -> bool:
    """Whether any value may hold this byte: one look at all of them, which is much cheaper than one at each."""
    values = column.buffers()[2]
    return values is not None and bool((np.frombuffer(values, np.uint8) == ord(byte)).any())


def _as_text(column: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(column), column.buffers(), column.null_count, column.offset)


def _part(column: pa.Array, start: int, stop: int | None) -> pa.Array:
    # Without an end its room is reckoned wrongly, and refused; this is more than a line can have.
    return pc.binary_slice(column, start, _LINE_BYTES_MAX if stop is None else stop)
