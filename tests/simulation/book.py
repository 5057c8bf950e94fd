"""
What a simulated bus has promised, and the checks that it keeps its promises.

Publishers and handlers tell the book what they see; it looks at nothing of the bus but what anybody can: answers, deliveries,
dead letters, which offsets a topic still has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from tidings.log.retention import RetentionPlan

Key = tuple[str, str]
"""Topic and group."""


class Broken(AssertionError):
    """A promise was not kept."""


class GroupBook:
    """What one group has seen, through all lives of the process."""

    def __init__(self, key: Key, *, order: str, attempts_max: int, at_once_max: int) -> None:
        self.key = key
        self.order = order
        self.attempts_max = attempts_max
        self.at_once_max = at_once_max
        self.exists = False
        """Whether a subscription was answered once: from then on nothing it lacks may go."""
        self.start = 0
        """What lies before is of no interest to the group: it was moved past it."""
        self.done: set[int] = set()
        """Acknowledged by its handler, in whichever life."""
        self.acknowledged: set[int] = set()
        """Acknowledged, and the news of it cannot have been lost: in this life, and since the group was last moved."""
        self.handling: dict[int, int] = {}
        """Which offsets are with the handler, and how many times."""
        self.moving_to: int | None = None
        self.done_while_moving: set[int] = set()
        self.looked_until = 0
        self.last_of: dict[str, int] = {}
        """For groups in order: the last offset that came, by key, in this life."""

    def lacks(self, offset: int, letters: Collection[int]) -> bool:
        """Whether the group still has to get an event."""
        first = self.start if self.moving_to is None else max(self.start, self.moving_to)
        return offset >= first and offset not in self.done and offset not in letters


class Book:
    """What all of them have seen."""

    def __init__(self) -> None:
        self.offered: set[int] = set()
        self.refused: set[int] = set()
        """Events whose publisher was told that they are not stored."""
        self.published: dict[str, dict[int, int]] = {}
        """What publishers were told: the number of the event at each offset."""
        self.groups: dict[Key, GroupBook] = {}
        self.moves = 0
        """Counted when a move begins and when it ends."""
        self.asked_again: set[tuple[Key, int]] = set()
        """Letters that somebody asked to be tried again."""

    # Publishers

    def offer(self, number: int) -> None:
        self.offered.add(number)

    def publish(self, topic: str, offset: int, number: int) -> None:
        """A publisher has its answer."""
        known = self.published.setdefault(topic, {}).setdefault(offset, number)
        if known != number:
            raise Broken(f"{topic} {offset} was given to event {known}, and then to {number}")

    # Groups

    def deliver(self, key: Key, events: Sequence[tuple[int, int, str]]) -> None:
        """Events, each with its attempt and its key, come to their handler, together."""
        group = self.groups[key]
        for offset, attempt, _ in events:
            if attempt > group.attempts_max:
                if (key, offset) not in self.asked_again:
                    raise Broken(f"{key} got {offset} for the {attempt}th time of {group.attempts_max}")
                return  # a re-drive, beside the group's other work
            if offset in group.acknowledged:
                raise Broken(f"{key} got {offset} again after it had acknowledged it")
            group.handling[offset] = group.handling.get(offset, 0) + 1
        if len(group.handling) > group.at_once_max:
            raise Broken(f"{key} has {len(group.handling)} events at once; {group.at_once_max} are allowed")
        if group.order != "none" and group.moving_to is None:
            self._check_order(group, [(offset, "" if group.order == "strict" else name) for offset, _, name in events])

    def _check_order(self, group: GroupBook, events: Sequence[tuple[int, str]]) -> None:
        firsts: dict[str, int] = {}
        for offset, key in events:
            if offset < firsts.setdefault(key, offset) or offset < group.last_of.get(key, -1):
                raise Broken(f"{group.key} is to get events in order, and got {offset} after {group.last_of.get(key)}")
        # What failed of a list comes again by itself, after those that were handed out with it.
        group.last_of.update(firsts)

    def leave(self, key: Key, offset: int, attempt: int, *, is_acknowledged: bool, is_late: bool = False) -> None:
        """
        The handler is through with an event.

        ``is_late``: it took so long that it may count as failed all the same.
        """
        group = self.groups[key]
        if attempt > group.attempts_max:
            return
        count = group.handling.pop(offset, 1) - 1
        if count:
            group.handling[offset] = count
        if is_acknowledged:
            group.done.add(offset)
            if group.moving_to is not None:
                group.done_while_moving.add(offset)
            elif not is_late:
                group.acknowledged.add(offset)

    def begin_move(self, key: Key, offset: int) -> None:
        """A group is told to go on somewhere else."""
        self.moves += 1
        group = self.groups[key]
        group.moving_to = offset
        group.done_while_moving = set()
        group.acknowledged.clear()
        group.last_of.clear()

    def end_move(self, key: Key, *, is_moved: bool) -> None:
        """It does; or perhaps it does, if the process ended meanwhile."""
        group = self.groups[key]
        if group.moving_to is None:
            return
        self.moves += 1
        if is_moved:
            group.start = group.moving_to
            group.done = {offset for offset in group.done if offset < group.start} | group.done_while_moving
            group.looked_until = min(group.looked_until, group.start)
        else:
            group.start = max(group.start, group.moving_to)
        group.moving_to = None
        group.acknowledged.clear()
        group.last_of.clear()

    def end_life(self) -> None:
        """The process is gone, and with it the news that was not on the disk."""
        for key, group in self.groups.items():
            self.end_move(key, is_moved=False)
            group.acknowledged.clear()
            group.handling.clear()
            group.last_of.clear()

    def check_place(self, key: Key, place: Iterable[tuple[int, int]], end: int, letters: Collection[int]) -> None:
        """What a group's place passes over, as ranges, was published, and handled or given up."""
        group = self.groups[key]
        for first, last in place:
            for offset in range(first, last + 1):
                if offset >= end or group.lacks(offset, letters):
                    raise Broken(f"{key} has not had {offset}, and its place passes over it")

    # Dropping

    def check_plan(self, plan: RetentionPlan, letters: dict[Key, set[int]]) -> None:
        """Nothing that a group lacks may be planned to go."""
        for decision in plan.drops:
            segment = decision.segment
            for key, group in self.groups.items():
                if key[0] != segment.topic or not group.exists:
                    continue
                for offset in range(segment.first_offset, segment.last_offset + 1):
                    if group.lacks(offset, letters.get(key, ())):
                        raise Broken(
                            f"{key} has not had {offset}, and segment {segment.number} is planned to be dropped"
                        )

    def check_kept(self, topic: str, first_kept: int, letters: dict[Key, set[int]]) -> None:
        """Nothing that a group lacks may be gone."""
        for key, group in self.groups.items():
            if key[0] != topic or not group.exists:
                continue
            for offset in range(group.looked_until, first_kept):
                if group.lacks(offset, letters.get(key, ())):
                    raise Broken(f"{key} has not had {offset}, and the topic begins at {first_kept}")
            group.looked_until = max(group.looked_until, first_kept)

    # The end

    def check_stored(self, topic: str, stored: dict[int, int], first_kept: int) -> None:
        """What publishers were told is there, once, at its place."""
        for offset, number in self.published.get(topic, {}).items():
            if offset >= first_kept and stored.get(offset) != number:
                raise Broken(f"{topic} {offset} was event {number}, and is {stored.get(offset)}")
        numbers = list(stored.values())
        if len(set(numbers)) != len(numbers):
            raise Broken(f"{topic} has an event twice: {sorted(numbers)}")
        if self.refused & set(numbers):
            raise Broken(f"{topic} has events that were refused: {sorted(self.refused & set(numbers))}")
        if not set(numbers) <= self.offered:
            raise Broken(f"{topic} has events that nobody published: {sorted(set(numbers) - self.offered)}")

    def check_delivered(self, key: Key, end: int, letters: Collection[int]) -> None:
        """With nothing left to do, the group has had everything."""
        group = self.groups[key]
        missing = [offset for offset in range(group.start, end) if group.lacks(offset, letters)]
        if missing:
            raise Broken(f"{key} was never given {missing}")


STATES: Final = ("dead", "requested", "trying", "redriven", "dropped")
