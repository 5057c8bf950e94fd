"""Find event ids that come twice among more of them than memory should hold."""

from __future__ import annotations

import hashlib
import heapq
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Final

__all__ = ["IdRuns"]

_RUN_IDS: Final = 500_000
_ID_BYTES: Final = 16
_READ_IDS: Final = 4096


class IdRuns:
    """
    Finds ids that come twice: their digests in sorted runs, merged at the end.

    The runs lie in a temporary file, which is made when the first one is full: a small log needs none.
    """

    def __init__(self, run_ids: int = _RUN_IDS) -> None:
        self._run_ids = run_ids
        self._file: IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []
        self._fresh: list[bytes] = []

    def __enter__(self) -> IdRuns:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, seqs: Iterable[int], event_ids: Iterable[str]) -> None:
        """Take in the ids of these records."""
        blake2b = hashlib.blake2b
        self._fresh += [
            blake2b(event_id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest() + seq.to_bytes(8)
            for seq, event_id in zip(seqs, event_ids, strict=True)
        ]
        if len(self._fresh) >= self._run_ids:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._fresh.sort()
        start = self._file.seek(0, 2)
        self._file.write(b"".join(self._fresh))
        self._runs.append((start, len(self._fresh)))
        self._fresh = []

    def _run(self, file: IO[bytes], start: int, count: int) -> Iterator[bytes]:
        width = _ID_BYTES + 8
        for at in range(0, count, _READ_IDS):
            file.seek(start + at * width)
            data = file.read(min(_READ_IDS, count - at) * width)
            yield from (data[i : i + width] for i in range(0, len(data), width))

    def twice(self) -> Iterator[tuple[int, int]]:
        """Pairs of seqs with the same id."""
        self._fresh.sort()
        file = self._file
        spilled = [] if file is None else [self._run(file, start, count) for start, count in self._runs]
        before = b""
        for entry in heapq.merge(self._fresh, *spilled):
            if entry[:_ID_BYTES] == before[:_ID_BYTES]:
                yield int.from_bytes(before[_ID_BYTES:], "big"), int.from_bytes(entry[_ID_BYTES:], "big")
            before = entry
