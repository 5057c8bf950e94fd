"""A draft in a user's hand: what was submitted, and what became of it."""

from __future__ import annotations

import asyncio

from tidings.core.clock import Clock

from .timing import within
from .values import LocalEvent, Pending, Verdict

__all__ = ["Draft"]


class Draft:
    """
    An event that was handed to the client. It is stored locally by the time one holds this.

    Forgetting the draft changes nothing: it is sent all the same, and ``SyncClient.draft`` finds it again by its id.
    """

    def __init__(self, event: LocalEvent, verdict: Verdict, clock: Clock) -> None:
        self.event = event
        self._verdict = verdict
        self._clock = clock
        self._changed: list[asyncio.Future[None]] = []
        self._is_abandoned = False

    @property
    def id(self) -> str:
        """The event's id: made here, and the same on every submission."""
        return self.event.id

    @property
    def verdict(self) -> Verdict:
        """What is known now."""
        return self._verdict

    async def settled(self, timeout_s: float | None = None) -> Verdict:
        """
        The server's verdict, once there is one.

        Args:
            timeout_s: How long to wait for it at most, however often the event is sent in that time.

        Returns:
            ``Committed`` or ``Rejected``; ``Pending`` if the time was up or the client was closed before.
        """
        ends_at = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while isinstance(self._verdict, Pending) and not self._is_abandoned:
            changed = asyncio.get_running_loop().create_future()
            self._changed.append(changed)
            if ends_at is None:
                await changed
            elif not await within(self._clock, max(0.0, ends_at - self._clock.monotonic()), changed):
                break
        return self._verdict

    def note(self, verdict: Verdict) -> None:
        """For the client: note a verdict and tell those who wait for it."""
        self._verdict = verdict
        self._wake()

    def abandon(self) -> None:
        """For the client: nothing more will be heard here."""
        self._is_abandoned = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def __repr__(self) -> str:
        return f"Draft(id={self.id!r}, type={self.event.type!r}, verdict={self._verdict!r})"
