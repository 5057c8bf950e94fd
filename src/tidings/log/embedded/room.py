"""Whether there is room to publish: the reserve is whole, and the journal has a file for what comes next."""

from __future__ import annotations

from ..errors import StorageFull
from .journal import Journal
from .reserve import Reserve

__all__ = ["Room"]


class Room:
    """
    What must be there before events are accepted.

    Args:
        reserve, reserve_bytes: The reserve, and how large it is when it is whole.
        journal: Where events are committed.
    """

    def __init__(self, reserve: Reserve, reserve_bytes: int, journal: Journal) -> None:
        self._reserve = reserve
        self._reserve_bytes = reserve_bytes
        self._journal = journal

    def make(self, *, needs_spare: bool) -> str | None:
        """
        Make what is missing, the reserve first. Blocks.

        Args:
            needs_spare: Whether the journal must have a file ready.

        Returns:
            What there is no room for; ``None`` if all is there.
        """
        while not self._reserve.make_whole(self._reserve_bytes):
            if not self._journal.give_up_settled():
                return str(self._reserve.path)
        if needs_spare:
            try:
                self._journal.prepare_spare()
            except StorageFull as error:
                return error.path
        return None
