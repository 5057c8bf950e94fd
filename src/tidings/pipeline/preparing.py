"""
Have Spark start faster on this machine: the archive of its classes (``java.ClassArchive``) is made here.

A JVM writes down the classes that it loaded when it ends. So one is started that does once what runs do: it takes a few events
of a log of their own into a lake of their own, in this process and by Spark's tasks, and runs the operational jobs.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.clock import Clock
from tidings.core.events import Event, EventMeta
from tidings.log.embedded import open_log

from .errors import SparkFailed
from .java import ClassArchive, find_java, java_cache
from .jobs.registry import jobs_in_sets
from .runner import Pipeline
from .session import start_session, stop_session
from .settings import PipelineSettings

_EVENTS: Final = 12


def make_archive(settings: PipelineSettings, clock: Clock) -> Path:
    """
    Make the archive anew for the Java that Spark runs on here, in the place of the one there may be; where it is.

    Raises:
        JavaMissing: There is no Java.
        SparkFailed: Spark does not start, or this Java makes none.
    """
    settings = msgspec.structs.replace(settings, master="local[1]")
    cache = java_cache(settings.java_cache)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as folder:
        made = Path(folder, "classes")
        session = start_session(settings, is_brief=True, archive=made)
        try:
            workspace = Path(folder, "log")
            asyncio.run(_fill(workspace))
            for number, rows_max in enumerate((_EVENTS, 0)):
                each = msgspec.structs.replace(settings, small_rows_max=rows_max, undivided_rows_max=rows_max)
                lake = Path(folder, f"lake{number}")
                Pipeline(workspace, each, clock=clock, run="prepare", lake=lake).run(lambda: session, jobs_in_sets())
        finally:
            stop_session(session)
        java = find_java(os.environ, cache)  # noqa: TID251 - where the session found it
        found = ClassArchive(cache, java).adopt(made)
    if found is None:
        raise SparkFailed("preparing", f"Java {java.version} in {java.home} made no archive of its classes")
    return found


async def _fill(workspace: Path) -> None:
    log = await open_log(workspace)
    try:
        metas = (EventMeta(topic="prepare", type="PREPARED", space_id="shared:all") for _ in range(_EVENTS))
        await log.append_many([Event(meta, {}) for meta in metas])
    finally:
        await log.close()
