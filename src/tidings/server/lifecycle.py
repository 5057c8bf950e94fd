"""
A node as a process: signals, and the tuning that only the owner of a process may do.

SIGTERM and SIGINT stop it in order; a second one stops it without waiting for anybody. SIGHUP reads the settings again and says what
was changed and what needs a restart.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tidings.core.errors import TidingsError

from .node import Node
from .settings import NodeSettings

logger = logging.getLogger(__name__)

_GC_THRESHOLD: Final = 100_000
_SWITCH_INTERVAL_S: Final = 0.001
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_MIB: Final = 1 << 20


async def serve_until_signalled(
    node: Node,
    reload_settings: Callable[[], NodeSettings] | None = None,
    *,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """
    Start a node, and stop it when the process is asked to end.

    Args:
        node: The node, not started yet.
        reload_settings: Reads the settings anew, for SIGHUP.
        beside: What to do beside serving, from when the node listens until it is asked to stop. If it fails, the node stops too.
    """
    loop = asyncio.get_running_loop()
    requested = asyncio.Event()

    def stop(name: str) -> None:
        if requested.is_set():
            logger.warning("%s again: not waiting any longer", name)
            node.stop_now()
        else:
            logger.info("%s", name)
            requested.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop, each.name)
    loop.add_signal_handler(signal.SIGHUP, _reload, node, reload_settings)
    try:
        await node.start()
        try:
            await _until_requested(requested, beside)
        finally:
            await node.stop()
    finally:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(each)


async def _until_requested(requested: asyncio.Event, beside: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    if beside is None:
        await requested.wait()
        return
    order = asyncio.ensure_future(requested.wait())
    work = asyncio.ensure_future(beside())
    try:
        await asyncio.wait({order, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            await order
    finally:
        for each in (order, work):
            each.cancel()
        await asyncio.gather(order, work, return_exceptions=True)


def _reload(node: Node, reload_settings: Callable[[], NodeSettings] | None) -> None:
    if reload_settings is None:
        logger.info("SIGHUP: this node has no settings to read again")
        return
    try:
        found = node.reload(reload_settings())
    except TidingsError as error:
        logger.error("SIGHUP: nothing was changed: %s", error)
        return
    logger.info("SIGHUP: changed %s", ", ".join(found.applied) or "nothing new")
    if found.kept:
        logger.warning("SIGHUP: these need a restart: %s", ", ".join(found.kept))


def tune_process() -> None:
    """
    Make the process fit for long service: fewer and cheaper collections, threads that do not wait long for one another, and a heap that is
    not given back after every batch.

    Without the second, a commit that is on the disk waits for a busy event loop to let its thread say so. Without the third, each kept line of a
    batch can cost a page fault. A C library without ``mallopt`` does not have that habit.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 512 * _MIB)
    mallopt(_M_TOP_PAD, 64 * _MIB)
