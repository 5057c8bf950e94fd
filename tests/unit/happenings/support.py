"""What the tests of happenings share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from tidings.happenings import AnyHappening, Envelope
from tidings.happenings.errors import CursorTooOld
from tidings.happenings.variants import CustodyReleased, CustodyTaken

AT_MS: Final = 1_767_225_600_000


def released(handle_id: object, plugin: str = "org.example.player") -> CustodyReleased:
    return CustodyReleased(at_ms=AT_MS, plugin=plugin, handle_id=str(handle_id))


def taken(handle_id: object, plugin: str = "org.example.player", shelf: str = "audio.playback") -> CustodyTaken:
    return CustodyTaken(at_ms=AT_MS, plugin=plugin, handle_id=str(handle_id), shelf=shelf, custody_type="track")


class ListedHistory:
    """
    A history in a list.

    Args:
        meanwhile: Called in the midst of every read, with what the read has found already: time for others to emit, store and trim.
    """

    epoch = "e1"

    def __init__(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        self.kept: list[Envelope] = []
        self.trimmed_through = 0
        self.meanwhile = meanwhile
        self.reads: list[int] = []

    @property
    def oldest_seq(self) -> int:
        return self.kept[0].seq if self.kept else 0

    def store(self, seq: int, happening: AnyHappening) -> None:
        self.kept.append(Envelope(seq, happening))

    def trim_through(self, seq: int) -> None:
        self.kept = [each for each in self.kept if each.seq > seq]
        self.trimmed_through = max(self.trimmed_through, seq)

    async def read(self, since: int, limit: int) -> list[Envelope]:
        self.reads.append(since)
        if since < self.trimmed_through:
            raise CursorTooOld(since, self.oldest_seq, 0)
        found = [each for each in self.kept if each.seq > since][:limit]
        if self.meanwhile is not None:
            await self.meanwhile()
        return found

    archive = read
