"""Durable groups as the command line shows them: where they stand, and their dead letters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tidings.bus.dead_letters import DeadLetterStore
from tidings.bus.offsets import OffsetStore
from tidings.bus.standing import Standing, stand, stored_place, unknown_group
from tidings.log.embedded.disk import OsDisk
from tidings.log.interface import Log, Query

from .session import Session

__all__ = ["GroupFacts", "OffsetsKeyOption", "gather", "known_group", "offsets_of"]

OffsetsKeyOption = Annotated[
    Path | None,
    typer.Option("--offsets-key", metavar="FILE", help="The key that seals the offset files, where the bus has one."),
]


class GroupFacts(msgspec.Struct, frozen=True):
    """One group, as operators see it."""

    standing: Standing
    dead_letters: int

    @property
    def state(self) -> str:
        """In a word: ``ready``, ``paused``, or what keeps it from starting."""
        if self.standing.obstacle is not None:
            return self.standing.obstacle.replace("_", " ")
        return "paused" if self.standing.is_paused else "ready"

    def to_dict(self) -> dict[str, Any]:
        """The facts of a list's line, as plain values."""
        standing = self.standing
        return {
            "topic": standing.topic,
            "group": standing.group,
            "state": self.state,
            "committed": standing.committed,
            "next_offset": standing.next_offset,
            "lag": standing.lag,
            "islands": standing.early_count,
            "attempts": standing.failed_deliveries,
            "paused": standing.is_paused,
            "oldest_unacked_age_s": standing.oldest_unacked_age_s,
            "dead_letters": self.dead_letters,
            "problem": standing.problem,
        }

    def details(self) -> dict[str, Any]:
        """What only a look at one group shows."""
        attempts = self.standing.attempts
        return {
            "island_ranges": [list(island) for island in self.standing.islands],
            "attempts_by_offset": {str(offset): count for offset, count in sorted(attempts.items())},
        }


def offsets_of(session: Session, log: Log, key_file: Path | None) -> OffsetStore:
    """The workspace's offset files, counted in the log's epoch; with a key, those with a good seal only."""
    key = None if key_file is None else key_file.read_bytes()
    return OffsetStore(session.progress_disk, session.layout.offsets, session.clock, log.position.epoch, key)


def known_group(store: OffsetStore, topic: str, group: str) -> None:
    """
    Make sure that there is such a group.

    Raises:
        UnknownGroup: There is not; the hint names some that there are.
    """
    groups = store.groups()
    if (topic, group) not in groups:
        raise unknown_group(topic, group, groups)


async def gather(
    session: Session, log: Log, store: OffsetStore, topic: str | None = None, group: str | None = None
) -> list[GroupFacts]:
    """The facts of every group, or of those asked for, by topic and name."""
    await log.read(Query(since=log.position.seq), limit=1)  # a follower looks at the files anew when it reads
    letters = DeadLetterStore(OsDisk(), session.layout.dlq, session.clock)
    with_letters = set(letters.topics())
    dead: dict[str, Counter[str]] = {}
    found: list[GroupFacts] = []
    for each_topic, name in store.groups():
        if topic not in (None, each_topic) or group not in (None, name):
            continue
        if each_topic not in dead:  # a topic's file is read once, however many groups it has
            is_read = each_topic in with_letters
            dead[each_topic] = Counter(letter.group for letter in letters.letters(each_topic)) if is_read else Counter()
        standing = await stand(log, session.clock, each_topic, name, stored_place(store, each_topic, name))
        found.append(GroupFacts(standing, dead[each_topic][name]))
    return found
