"""What can be said of a group from the outside: its stored place, against the log's own bounds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from tidings.bus.cursor import Cursor
from tidings.bus.dead_letters import DeadLetterStore
from tidings.bus.errors import CursorDamaged, UnknownGroup
from tidings.bus.offsets import GroupPlace, OffsetStore
from tidings.core.clock import ns_of
from tidings.core.errors import TidingsError
from tidings.log.embedded.disk import OsDisk
from tidings.log.errors import EpochMismatch, PositionTrimmed
from tidings.log.interface import Log, Query

from .session import Session

__all__ = ["GroupFacts", "OffsetsKeyOption", "gather", "known_group", "load_if_readable", "offsets_of"]

GroupState = Literal["ready", "paused", "damaged", "other epoch", "trimmed"]
"""``damaged`` and ``other epoch``: the group cannot start. ``trimmed``: records it had yet to see were dropped."""

OffsetsKeyOption = Annotated[
    Path | None,
    typer.Option("--offsets-key", metavar="FILE", help="The key that seals the offset files, where the bus has one."),
]
_NAMED_COUNT_MAX = 10


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as operators see it. What cannot be known is ``None``."""

    topic: str
    group: str
    state: GroupState
    committed: int | None
    next_offset: int
    """The topic's: the offset that its next event will get."""
    lag: int | None
    early_count: int = 0
    islands: list[tuple[int, int]] = []
    attempts: dict[int, int] = {}
    is_paused: bool = False
    oldest_unacked_age_s: float | None = None
    """Since the oldest event that is not acknowledged was written; ``None`` if there is none."""
    dead_letters: int = 0
    problem: str | None = None

    @property
    def failed_deliveries(self) -> int:
        """Of events that are not done."""
        return sum(self.attempts.values())

    def to_dict(self) -> dict[str, Any]:
        """The facts of a list's line, as plain values."""
        return {
            "topic": self.topic,
            "group": self.group,
            "state": self.state,
            "committed": self.committed,
            "next_offset": self.next_offset,
            "lag": self.lag,
            "islands": self.early_count,
            "attempts": self.failed_deliveries,
            "paused": self.is_paused,
            "oldest_unacked_age_s": self.oldest_unacked_age_s,
            "dead_letters": self.dead_letters,
            "problem": self.problem,
        }

    def details(self) -> dict[str, Any]:
        """What only a look at one group shows."""
        return {
            "island_ranges": [list(island) for island in self.islands],
            "attempts_by_offset": {str(offset): count for offset, count in sorted(self.attempts.items())},
        }


def offsets_of(session: Session, log: Log, key_file: Path | None) -> OffsetStore:
    """The workspace's offset files, counted in the log's epoch; with a key, those with a good seal only."""
    key = None if key_file is None else key_file.read_bytes()
    return OffsetStore(OsDisk(), session.layout.offsets, session.clock, log.position.epoch, key)


def known_group(store: OffsetStore, topic: str, group: str) -> None:
    """
    Make sure that there is such a group.

    Raises:
        UnknownGroup: There is not; the hint names some that there are.
    """
    groups = store.groups()
    if (topic, group) in groups:
        return
    error = UnknownGroup(topic, group)
    of_topic = [name for each, name in groups if each == topic] or [f"{name} of {each}" for each, name in groups]
    error.hint = f"there are: {', '.join(of_topic[:_NAMED_COUNT_MAX])}" if groups else "the workspace has no groups yet"
    raise error


def load_if_readable(store: OffsetStore, topic: str, group: str) -> GroupPlace | TidingsError:
    """A group's place, or why it is not known."""
    try:
        return store.load(topic, group) or GroupPlace(Cursor(), {}, False)
    except (CursorDamaged, EpochMismatch) as error:
        return error


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
        place = load_if_readable(store, each_topic, name)
        if each_topic not in dead:  # a topic's file is read once, however many groups it has
            is_read = each_topic in with_letters
            dead[each_topic] = Counter(letter.group for letter in letters.letters(each_topic)) if is_read else Counter()
        found.append(await _facts_of(session, log, each_topic, name, place, dead[each_topic][name]))
    return found


async def _facts_of(
    session: Session, log: Log, topic: str, name: str, place: GroupPlace | TidingsError, dead: int
) -> GroupFacts:
    info = log.topics().get(topic)
    next_offset = info.next_offset if info is not None else 0
    if isinstance(place, TidingsError):
        return GroupFacts(
            topic=topic,
            group=name,
            state="other epoch" if isinstance(place, EpochMismatch) else "damaged",
            committed=None,
            next_offset=next_offset,
            lag=None,
            dead_letters=dead,
            problem=str(place),
        )
    cursor = place.cursor
    state: GroupState = "paused" if place.paused else "ready"
    age_s, problem = None, None
    try:
        age_s = await _oldest_age_s(session, log, topic, cursor.committed + 1)
    except PositionTrimmed as error:
        state, problem = "trimmed", str(error)
    return GroupFacts(
        topic=topic,
        group=name,
        state=state,
        committed=cursor.committed,
        next_offset=next_offset,
        # The cursor may have been stored after the log was looked at.
        lag=max(0, next_offset - (cursor.committed + 1) - cursor.early_count),
        early_count=cursor.early_count,
        islands=cursor.ranges,
        attempts=place.attempts,
        is_paused=place.paused,
        oldest_unacked_age_s=age_s,
        dead_letters=dead,
        problem=problem,
    )


async def _oldest_age_s(session: Session, log: Log, topic: str, offset: int) -> float | None:
    page = await log.read(Query(topic=topic, from_offset=offset), limit=1)
    if not page.records:
        return None
    return max(0.0, (session.clock.now_ns() - ns_of(page.records[0].meta.written_time)) / 1e9)
