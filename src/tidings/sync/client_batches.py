"""How many drafts go into one submission: as many as the limits allow, and fewer while a bad one is looked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from tidings.wire.sync_frames import Limits, SubmitItem

from .client_settings import ClientSettings

__all__ = ["Batcher"]

_BATCH_SIZE_UNSAID: Final = 100
_ENVELOPE_BYTES: Final = 512
"""More than the envelope around a batch ever takes."""


class Batcher:
    """
    Chooses batches for one connection.

    A server that refuses a batch as a whole took nothing of it, and need not say which draft is at fault. Halving finds it,
    and those that are fine get through on the way.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._limits = Limits()
        self._count_max = settings.batch_events_max

    def advertised(self, limits: Limits) -> None:
        """The server has told its limits."""
        self._limits = limits

    def choose(self, items: Iterable[SubmitItem]) -> tuple[list[SubmitItem], list[SubmitItem]]:
        """The drafts from the front that fit into one message, and those before them that no message could hold."""
        own = self._settings.batch_bytes_max
        largest = room = min(own, self._limits.max_message_bytes or own) - _ENVELOPE_BYTES
        count_max = self._count_now()
        batch: list[SubmitItem] = []
        too_large: list[SubmitItem] = []
        for item in items:
            size = len(msgspec.json.encode(item)) + 1
            if size > largest:
                too_large.append(item)
                continue
            if size > room or len(batch) == count_max:
                break
            room -= size
            batch.append(item)
        return batch, too_large

    def refused(self, count: int) -> bool:
        """A batch of ``count`` was refused as a whole; says whether a smaller one is worth trying."""
        self._count_max = max(1, count // 2)
        return count > 1

    def answered(self) -> None:
        """A batch was taken: larger ones may go again."""
        self._count_max = min(self._count_max * 2, self._settings.batch_events_max)

    def _count_now(self) -> int:
        size_max = self._limits.max_batch_size or _BATCH_SIZE_UNSAID
        in_flight_max = self._limits.max_in_flight_drafts or self._settings.batch_events_max
        return max(1, min(self._count_max, size_max, in_flight_max))
