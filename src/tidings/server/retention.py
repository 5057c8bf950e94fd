"""
Retention while a node runs, and the lake behind its log.

Periodically what the log's own rules no longer keep is dropped, and a record of it is kept. A segment stays while a group has not passed it, while
a dead letter needs an event in it, while it names partitions (sync clients may still ask for them) and, where a lake is kept, while the
lake does not hold it. A node without rules drops nothing. With a lake, what retention has dropped is read from there; readers notice
nothing but the time it takes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tidings.access.audit import Audit, audited_drops
from tidings.core.clock import Clock, datetime_of
from tidings.core.errors import SettingsError, TidingsError
from tidings.core.installing import install_line
from tidings.log.encryption import Encryptor
from tidings.log.interface import Log
from tidings.log.retention import RecordHolders, RetentionPlan, plan_retention
from tidings.log.settings import TopicRetention
from tidings.pipeline.archived import held_by_lake
from tidings.pipeline.storage import LAKE_FOLDER, Storage

_NEEDED: Final = ("pyarrow", "deltalake")


def with_lake(log: Log, path: str | None, *, clock: Clock, encryptor: Encryptor | None) -> Log:
    """
    The log, with the lake behind it if there is to be one. The lake's folder need not exist yet.

    Raises:
        SettingsError: What reading a lake takes is not installed.
    """
    if path is None:
        return log
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError("server.lake_path", f"needs {', '.join(missing)}", install_line("pipeline"))
    # Only here: a node without a lake must not pay for loading all that.
    from tidings.pipeline.lake import Lake
    from tidings.pipeline.serving import ArchivedLog, LakeArchive

    return ArchivedLog(log, LakeArchive(Lake(path, clock), encryptor=encryptor))


logger = logging.getLogger(__name__)

_ACTOR: Final = "node:retention"


class NodeRetention:
    """
    Keeps one node's log within its rules.

    Args:
        log: The node's log.
        holders: Those who may need records: the groups and dead letters of the node's bus.
        workspace: Where the lake is, unless ``lake`` says otherwise.
        rules: The rules, by topic.
        lake: The lake that the pipeline writes, if the settings name one.
    """

    def __init__(
        self,
        log: Log,
        holders: RecordHolders,
        workspace: Path,
        rules: Mapping[str, TopicRetention],
        *,
        lake: str | None,
        clock: Clock,
    ) -> None:
        self._log = log
        self._holders = holders
        self._rules = rules
        self._lake = Storage.of(workspace / LAKE_FOLDER if lake is None else lake)
        self._is_lake_kept = lake is not None
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self, interval_s: float) -> None:
        """Run periodically, if there is a rule."""
        if self._rules:
            self._task = asyncio.get_running_loop().create_task(self._keep(interval_s), name="retention")

    async def stop(self) -> None:
        """Stop; a drop that is under way is finished by the log."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self, interval_s: float) -> None:
        while True:
            await self._clock.sleep(interval_s)
            try:
                await self.run()
            except (TidingsError, OSError) as error:
                logger.error("retention did not run: %s", error)

    async def run(
        self, rules: Mapping[str, TopicRetention] | None = None, *, audit: Audit | None = None, dry_run: bool = False
    ) -> RetentionPlan:
        """
        Drop what may be dropped now, or say only what that is. The audit record is written before.

        Args:
            rules: For this once, in the place of the node's own.
            audit: Who asks for it, if it is not the node itself.
            dry_run: Drop nothing.
        """
        epoch = self._log.position.epoch
        archived = await asyncio.to_thread(held_by_lake, self._lake, epoch, is_kept=self._is_lake_kept)
        plan = plan_retention(
            [segment for info in self._log.topics().values() for segment in info.segments],
            self._rules if rules is None else rules,
            now=datetime_of(self._clock.now_ns()),
            needs=await self._holders.needs(),
            partition_floors={},
            archived_through=archived,
        )
        if plan.drops and not dry_run:
            async with (audit or Audit(_ACTOR, "node")).of(
                self._log, "retention", audited_drops(plan), frees_space=True
            ):
                plan = await self._log.drop(plan, self._holders)
            logger.info("retention dropped %d segments, %d bytes", len(plan.drops), plan.freed_bytes)
        return plan
