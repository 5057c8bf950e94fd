"""Durable groups as the command line shows them: their status, and how many dead letters they have."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tidings.bus.admin import GroupAdmin, GroupStatus
from tidings.bus.store.files import FileGroupStore
from tidings.log.interface import Log, Query

from .session import Session

__all__ = ["GroupFacts", "OffsetsKeyOption", "admin_of", "gather", "store_of"]

OffsetsKeyOption = Annotated[
    Path | None,
    typer.Option("--offsets-key", metavar="FILE", help="The key that seals the offset files, where the bus has one."),
]


class GroupFacts(msgspec.Struct, frozen=True):
    """One group, as operators see it."""

    status: GroupStatus
    dead_letters: int

    @property
    def state(self) -> str:
        """In a word: ``ready``, ``paused``, or what keeps it from starting."""
        if self.status.obstacle is not None:
            return self.status.obstacle.replace("_", " ")
        return "paused" if self.status.is_paused else "ready"

    def to_dict(self) -> dict[str, Any]:
        """The facts of a list's line, as plain values."""
        status = self.status
        return {
            "topic": status.topic,
            "group": status.group,
            "state": self.state,
            "committed": status.committed,
            "next_offset": status.next_offset,
            "lag": status.lag,
            "acknowledged_early": status.acknowledged_early,
            "failed_attempts": status.failed_attempts,
            "paused": status.is_paused,
            "oldest_unacked_age_s": status.oldest_unacked_age_s,
            "dead_letters": self.dead_letters,
            "problem": None if status.error is None else status.error.describe(),
        }

    def details(self) -> dict[str, Any]:
        """What only a look at one group shows."""
        attempts = self.status.attempts
        return {
            "acknowledged_ranges": [list(each) for each in self.status.acknowledged_ranges],
            "failed_attempts_by_offset": {str(offset): count for offset, count in sorted(attempts.items())},
        }


def admin_of(session: Session, log: Log, key_file: Path | None) -> GroupAdmin:
    """The workspace's groups as they are stored; with a key, only positions with a good seal can be read."""
    return GroupAdmin(log, store_of(session, log, key_file), session.clock)


def store_of(session: Session, log: Log, key_file: Path | None) -> FileGroupStore:
    """The workspace's offsets and dead letters."""
    key = None if key_file is None else key_file.read_bytes()
    return FileGroupStore(session.workspace, log, clock=session.clock, offsets_key=key)


async def gather(
    session: Session, log: Log, key_file: Path | None, topic: str | None = None, group: str | None = None
) -> list[GroupFacts]:
    """The facts of every group, or of those asked for, by topic and name."""
    await log.read(Query(since=log.position.seq), limit=1)  # a follower looks at the files anew when it reads
    store, admin = store_of(session, log, key_file), admin_of(session, log, key_file)
    dead: dict[str, Counter[str]] = {}
    found: list[GroupFacts] = []
    for each_topic, name in await store.groups(topic):
        if group not in (None, name):
            continue
        if each_topic not in dead:  # a topic's file is read once, however many groups it has
            dead[each_topic] = Counter(letter.group for letter in await store.dead_letters(each_topic))
        found.append(GroupFacts(await admin.status(each_topic, name), dead[each_topic][name]))
    return found
