"""
Whose cancellation a ``CancelledError`` is.

Handlers and hooks await things of their own, which may be cancelled by others; what they raise then looks like the end of the
worker that called them, and is a failure like any other.
"""

from __future__ import annotations

import asyncio

__all__ = ["is_being_cancelled"]


def is_being_cancelled() -> bool:
    """Whether the task that runs this was told to stop; if not, a ``CancelledError`` is somebody else's."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
