"""
The store of a log in memory: nothing outlives the object. ``EventBus(log=MemoryLog(), store=MemoryGroupStore())`` is a bus without files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tidings.core.clock import SYSTEM_CLOCK, Clock, format_utc
from tidings.log.record import Record
from tidings.log.retention import Needs

from ..errors import UnknownDeadLetter
from .dead_letters import (
    OPEN,
    Attempt,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterState,
    Reason,
    StateChange,
    chosen,
    make_dead_letter,
    named,
)
from .interface import Claims, GroupPosition, GroupStore


class MemoryClaims:
    """Claims in a dictionary, by slot; whoever keeps it keeps what is left over."""

    def __init__(self, slots: dict[int, tuple[int, int]] | None = None) -> None:
        self.slots: dict[int, tuple[int, int]] = {} if slots is None else slots

    def begin(self, slots: int) -> None:
        self.slots.clear()

    def take(self, slot: int, offset: int, attempt: int) -> None:
        self.slots[slot] = (offset, attempt)

    def taker(self, slot: int) -> Callable[[int, int], object]:
        return functools.partial(self.take, slot)

    def clear(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def left_over(self) -> dict[int, int]:
        return dict(self.slots.values())

    def close(self) -> None:
        pass


class MemoryGroupStore(GroupStore):
    """
    Offsets, dead letters and claims in dictionaries.

    Args:
        clock: What time it is.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self._clock = clock
        self._positions: dict[tuple[str, str], GroupPosition] = {}
        self._claims: dict[tuple[str, str], MemoryClaims] = {}
        self._letters: dict[str, dict[str, DeadLetter]] = {}

    async def groups(self, topic: str | None = None) -> list[tuple[str, str]]:
        return sorted(key for key in self._positions if topic in (None, key[0]))

    async def load(self, topic: str, group: str) -> GroupPosition | None:
        found = self._positions.get((topic, group))
        return None if found is None else _copy(found)

    async def is_paused(self, topic: str, group: str) -> bool:
        found = self._positions.get((topic, group))
        return found is not None and found.paused

    async def save(self, topic: str, group: str, position: GroupPosition, *, sync: bool = True) -> None:
        self._positions[topic, group] = _copy(position)

    async def remove(self, topic: str, group: str) -> None:
        self._claims.pop((topic, group), None)
        self._positions.pop((topic, group), None)

    def claims(self, topic: str, group: str) -> Claims:
        return self._claims.setdefault((topic, group), MemoryClaims())

    async def left_over(self, claims: Claims) -> dict[int, int]:
        return claims.left_over()

    async def add_dead_letter(
        self, record: Record, group: str, error: BaseException, attempts: list[Attempt], reason: Reason
    ) -> DeadLetter:
        letters = self._letters.setdefault(record.topic, {})
        letter = make_dead_letter(record, group, error, attempts, reason, now=self._now())
        known = letters.get(letter.id)
        if known is not None and known.state in OPEN:
            return known
        letters[letter.id] = letter
        return letter

    async def dead_letters(
        self, topic: str, ids: Sequence[str] | None = None, wanted: DeadLetterFilter | None = None
    ) -> list[DeadLetter]:
        return chosen(topic, self._letters.get(topic, {}), ids, wanted or DeadLetterFilter())

    async def dead_letter_topics(self) -> list[str]:
        return sorted(self._letters)

    async def dead_letter_state(self, topic: str, letter_id: str) -> DeadLetterState | None:
        letter = self._letters.get(topic, {}).get(letter_id)
        return None if letter is None else letter.state

    async def request_redrive(self, topic: str, ids: Sequence[str]) -> list[DeadLetter]:
        found = named(topic, self._letters.get(topic, {}), ids)
        for letter in found:
            if letter.state == "dead":
                self._change(topic, letter.id, "requested")
        return [self._letters[topic][letter.id] for letter in found if letter.state in OPEN]

    async def begin_redrive(self, topic: str, letter_id: str) -> None:
        self._change(topic, letter_id, "trying")

    async def finish_redrive(self, topic: str, letter_id: str, error: BaseException | None = None) -> None:
        self._change(topic, letter_id, "redriven" if error is None else "dead", error)

    async def drop_dead_letters(self, topic: str, ids: Sequence[str]) -> None:
        for letter in named(topic, self._letters.get(topic, {}), ids):
            if letter.state != "dropped":
                self._change(topic, letter.id, "dropped")

    def _change(self, topic: str, letter_id: str, state: DeadLetterState, error: BaseException | None = None) -> None:
        letters = self._letters.get(topic, {})
        if letter_id not in letters:
            raise UnknownDeadLetter(topic, letter_id)
        letters[letter_id] = StateChange.of(letter_id, state, self._now(), error).applied_to(letters[letter_id])

    def _now(self) -> str:
        return format_utc(self._clock.now_ns()).decode()

    async def needs(self, topic: str | None = None) -> Needs:
        groups: dict[str, dict[str, int | None]] = {}
        for (name, group), position in self._positions.items():
            if topic in (None, name):
                groups.setdefault(name, {})[group] = position.cursor.committed
        return Needs(groups)  # its dead letters hold their events


def _copy(position: GroupPosition) -> GroupPosition:
    return GroupPosition(position.cursor.copy(), dict(position.attempts), position.paused, position.set_at)
