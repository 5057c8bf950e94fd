"""How long callbacks of the event loop take, in CPU time of its thread: a busy machine changes nothing about it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

CALLBACK_S_MAX = 0.05
"""What one callback may take, within the documented limits."""


class Callbacks:
    """The longest callback so far. ``what`` is its representation."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.what = ""

    def __repr__(self) -> str:
        return f"{self.longest_s * 1e3:.1f} ms: {self.what}"


@contextlib.contextmanager
def measured_callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callbacks]:
    """Measure every callback of this thread's loops; garbage of the tests before is not collected meanwhile."""
    measured = Callbacks()
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        started_s = time.thread_time()
        try:
            run(handle)
        finally:
            took_s = time.thread_time() - started_s
            if took_s > measured.longest_s:
                measured.longest_s, measured.what = took_s, repr(handle)

    gc.collect()
    gc.freeze()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield measured
    gc.unfreeze()
