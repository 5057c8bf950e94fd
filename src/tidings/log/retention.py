"""
Retention as a plan: what may go, and why the rest stays. A plan is decided on plain values.

A sealed segment may go when a rule of its topic asks for it (age, size, consumption) and nothing holds
it: every group has passed it, no dead letter needs a record in it, every partition it names has moved past
it and, where a lake is kept, the lake holds it. The active segment never goes. Segments go oldest first, so a topic keeps one contiguous
range (one for each space, in the ``space`` layout). The topics ``access`` and ``ledger`` are kept whole: what is true follows from all of
their records. Only who keeps snapshots of it, as the ledger does, can say that the records before one are not needed.

A plan depends on its arguments only, and not on the order segments are given in. A looser rule never
drops more, and planning again after a plan was carried out drops nothing until time or readers move on.

Time passes between a plan and what is done about it, and a group may be created or set back meanwhile. So whoever
carries a plan out asks again who needs what (``carry_out``), for each segment, right before it goes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from itertools import groupby
from typing import Final, NamedTuple, Protocol

import msgspec

from .settings import TopicRetention

FOLDED: Final = frozenset({"access", "apps", "ledger"})
"""Topics whose meaning is the fold of all their records: what is true must not depend on what was dropped."""
_WHOLE: Final = "all records of this topic count"
_ACTIVE: Final = "it is the active segment"
_OLDER_KEPT: Final = "an older segment is kept"
_DAY_SECONDS: Final = 86_400
# Records may be written between reading the clock and listing the segments; the clock is right then.
_CLOCK_SLACK_SECONDS: Final = 60


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One segment as retention and the tools see it."""

    topic: str
    number: int
    space_id: str | None = None
    """The space it belongs to, in the ``space`` layout."""
    is_sealed: bool
    first_offset: int
    last_offset: int
    first_seq: int
    last_seq: int
    first_written_at: str
    last_written_at: str
    lines: int
    size_bytes: int
    partitions: dict[str, int] = {}
    """Each partition named in it, with the highest seq that names it."""
    digest: str | None = None
    """Of a sealed segment: its digest in the chain."""


class NeededRecord(NamedTuple):
    """A record that a dead letter needs, because the letter does not hold the event itself."""

    offset: int
    space_id: str
    letter_id: str


class Needs(msgspec.Struct, frozen=True):
    """Which records of each topic are still needed, and by whom."""

    groups: Mapping[str, Mapping[str, int | None]] = {}
    """For each topic, the offset up to which each group has acknowledged everything (-1: nothing yet). ``None`` where that is
    not known: such a group needs everything."""
    letters: Mapping[str, Sequence[NeededRecord]] = {}
    """For each topic, the records that dead letters need."""
    folds: Mapping[str, int] = {}
    """For folded topics, the offset up to which their records are not needed any more, if anybody can say that."""

    def why_kept(self, segment: SegmentInfo) -> str | None:
        """Who needs a record of the segment, as one sentence; ``None`` if nobody does."""
        found = (self._by_group(segment), self._by_letter(segment), self._by_fold(segment))
        return "; ".join(reason for reason in found if reason is not None) or None

    def _by_group(self, segment: SegmentInfo) -> str | None:
        groups = self.groups.get(segment.topic, {})
        unknown = sorted(name for name, committed in groups.items() if committed is None)
        if unknown:
            return f"the place of group {unknown[0]!r} cannot be read, so everything is kept for it"
        committed, name = min(((at, name) for name, at in groups.items() if at is not None), default=(None, ""))
        if committed is None or committed >= segment.last_offset:
            return None
        left = segment.last_offset - committed
        return f"group {name!r} has not passed it: {left} record{'' if left == 1 else 's'} to go"

    def _by_fold(self, segment: SegmentInfo) -> str | None:
        if segment.topic not in FOLDED:
            return None
        through = self.folds.get(segment.topic)
        if through is None:
            return _WHOLE
        return None if through >= segment.last_offset else f"snapshots and history need records after offset {through}"

    def _by_letter(self, segment: SegmentInfo) -> str | None:
        needed = [
            record.letter_id
            for record in self.letters.get(segment.topic, ())
            if segment.first_offset <= record.offset <= segment.last_offset
            and segment.space_id in (None, record.space_id)
        ]
        if not needed:
            return None
        more = f" (and {len(needed) - 1} more like it)" if len(needed) > 1 else ""
        return f"dead letter {min(needed)!r} needs its event{more}"


class Holders(Protocol):
    """Those who may need records of the log."""

    def needs_of(self, topic: str) -> AbstractAsyncContextManager[Needs]:
        """Who needs what of a topic. While the context is open nobody begins to need more, and what nobody needs may go."""
        ...


class RecordHolders(Holders, Protocol):
    """Those who need records of the log, for whoever plans retention: a store, or a running bus."""

    async def needs(self) -> Needs:
        """Which records of all topics are needed now."""
        ...


class SegmentDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to one segment, and why, in words for the operator."""

    segment: SegmentInfo
    drops: bool
    reason: str
    keep_ids: bool = False


class RetentionPlan(msgspec.Struct, frozen=True):
    """What would be done to each segment, by topic, space and number."""

    decisions: tuple[SegmentDecision, ...]

    @property
    def drops(self) -> tuple[SegmentDecision, ...]:
        """The segments that go."""
        return tuple(decision for decision in self.decisions if decision.drops)

    @property
    def freed_bytes(self) -> int:
        """How much room carrying it out makes."""
        return sum(decision.segment.size_bytes for decision in self.drops)


_NO_NEEDS: Final = Needs()


def plan_retention(
    segments: Sequence[SegmentInfo],
    rules: Mapping[str, TopicRetention],
    *,
    now: datetime,
    needs: Needs = _NO_NEEDS,
    partition_floors: Mapping[str, int] | None = None,
    archived_through: Mapping[str, int] | None = None,
) -> RetentionPlan:
    """
    Decide on every segment.

    Args:
        segments: All segments of the topics in question, the active ones too: they count in a topic's size.
        rules: Rules by topic; ``*`` is the rule of topics that have none of their own.
        now: The time, with its zone. Where it lies before a topic's own records the clock is wrong,
            and nothing is dropped by age.
        needs: What groups and dead letters still need.
        partition_floors: For each partition, the seq it has moved past: a snapshot covers it and every
            client has it. A partition that is not named has not moved.
        archived_through: For each topic, the highest offset in the lake; ``None`` where no lake is kept.

    Returns:
        One decision a segment, by topic, space and number.
    """
    if now.utcoffset() is None:
        raise TypeError("now must have a zone")
    holds = _Holds(needs, partition_floors, archived_through)
    decisions: list[SegmentDecision] = []
    for topic, of_topic in groupby(sorted(segments, key=_place), key=lambda segment: segment.topic):
        rule = rules.get(topic, rules.get("*"))
        decisions += _plan_topic(list(of_topic), rule, now, holds)
    return RetentionPlan(tuple(decisions))


async def carry_out(
    plan: RetentionPlan, holders: Holders | None, drop: Callable[[SegmentDecision], Awaitable[None]]
) -> RetentionPlan:
    """
    Drop what a plan lets go of, one segment after another, unless somebody needs it by now.

    Args:
        plan: What may go.
        holders: Those who are asked; nobody if there are none.
        drop: Drops one segment.

    Returns:
        The plan as it was carried out.
    """
    done: list[SegmentDecision] = []
    stopped: set[tuple[str, bool, str]] = set()
    for decision in plan.decisions:
        place = (decision.segment.topic, *_space(decision.segment))
        reason: str | None = None
        if decision.drops and place in stopped:
            reason = _OLDER_KEPT
        elif decision.drops and holders is None:
            await drop(decision)
        elif decision.drops and holders is not None:
            async with holders.needs_of(decision.segment.topic) as needs:
                reason = needs.why_kept(decision.segment)
                if reason is None:
                    await drop(decision)
        if reason is not None:
            stopped.add(place)
            decision = msgspec.structs.replace(decision, drops=False, reason=reason)
        done.append(decision)
    return RetentionPlan(tuple(done))


def _place(segment: SegmentInfo) -> tuple[str, bool, str, int]:
    return segment.topic, *_space(segment), segment.number


def _space(segment: SegmentInfo) -> tuple[bool, str]:
    return segment.space_id is not None, segment.space_id or ""


def _plan_topic(
    segments: list[SegmentInfo], rule: TopicRetention | None, now: datetime, holds: _Holds
) -> Iterator[SegmentDecision]:
    """Decide on one topic's segments, given by space and number, and yield them in that order."""
    is_whole = holds.keep_whole(segments[0].topic)
    if rule is None or is_whole:
        for segment in segments:
            reason = (_WHOLE if is_whole else "no retention rule") if segment.is_sealed else _ACTIVE
            yield SegmentDecision(segment=segment, drops=False, reason=reason, keep_ids=bool(segment.partitions))
        return
    topic_rule = _TopicRule(rule, now, segments, has_groups=holds.has_groups(segments[0].topic))
    stopped: set[tuple[bool, str]] = set()  # spaces whose range would get a hole if one more went
    decided: dict[int, tuple[bool, str]] = {}
    # All spaces count in the topic's size, so its oldest segments are looked for over all of them.
    for at in _oldest_first(segments):
        segment = segments[at]
        why_drop = topic_rule.why_drop(at)
        if not segment.is_sealed:
            drops, reason = False, _ACTIVE
        elif why_drop is None:
            drops, reason = False, topic_rule.why_not(at)
        elif _space(segment) in stopped:
            drops, reason = False, _OLDER_KEPT
        else:
            held = holds.of(segment)
            drops, reason = (True, why_drop) if held is None else (False, held)
        if drops:
            topic_rule.note_dropped(at)
        else:
            stopped.add(_space(segment))
        decided[at] = drops, reason
    for at, segment in enumerate(segments):
        drops, reason = decided[at]
        keep_ids = rule.keep_ids or bool(segment.partitions)
        yield SegmentDecision(segment=segment, drops=drops, reason=reason, keep_ids=keep_ids)


def _oldest_first(segments: list[SegmentInfo]) -> list[int]:
    """
    The indexes of one topic's segments, oldest first over all spaces, each space in its own order.

    An empty active segment has no seq of its own. It must not move ahead of those it follows, so a segment
    counts as no older than any before it in its space.
    """
    keys: list[tuple[int, int]] = []
    for at, segment in enumerate(segments):
        follows = at > 0 and _space(segments[at - 1]) == _space(segment)
        keys.append((max(segment.last_seq, keys[-1][0]) if follows else segment.last_seq, at))
    return [at for _, at in sorted(keys)]


class _Holds:
    """What keeps a segment although its rule would let it go."""

    def __init__(
        self,
        needs: Needs,
        partition_floors: Mapping[str, int] | None,
        archived_through: Mapping[str, int] | None,
    ) -> None:
        self._needs = needs
        self._partition_floors = partition_floors or {}
        self._archived_through = archived_through

    def has_groups(self, topic: str) -> bool:
        return bool(self._needs.groups.get(topic)) or topic in self._needs.folds

    def keep_whole(self, topic: str) -> bool:
        return topic in FOLDED and topic not in self._needs.folds

    def of(self, segment: SegmentInfo) -> str | None:
        """All that holds the segment, as one sentence; ``None`` if it is free."""
        found = [self._needs.why_kept(segment), self._by_partition(segment), self._by_lake(segment)]
        return "; ".join(reason for reason in found if reason is not None) or None

    def _by_partition(self, segment: SegmentInfo) -> str | None:
        floors = self._partition_floors
        waiting = sorted(
            name for name, seq in segment.partitions.items() if (floor := floors.get(name)) is None or floor < seq
        )
        if not waiting:
            return None
        more = f" (and {len(waiting) - 1} more like it)" if len(waiting) > 1 else ""
        return f"partition {waiting[0]!r} has yet to move past seq {segment.partitions[waiting[0]]}{more}"

    def _by_lake(self, segment: SegmentInfo) -> str | None:
        if self._archived_through is None:
            return None
        archived = self._archived_through.get(segment.topic, -1)
        if archived >= segment.last_offset:
            return None
        return f"the lake has the topic through offset {archived}, not yet through {segment.last_offset}"


class _TopicRule:
    """What one topic's rule asks for, while the plan for it is made."""

    def __init__(self, rule: TopicRetention, now: datetime, segments: list[SegmentInfo], *, has_groups: bool) -> None:
        self._rule = rule
        self._has_groups = has_groups
        self._segments = segments
        self._age_seconds = _ages(segments, now)
        self._total_bytes = sum(segment.size_bytes for segment in segments)

    def why_drop(self, at: int) -> str | None:
        """Why the segment should go; ``None`` if no rule asks for it."""
        rule = self._rule
        age_seconds = self._age_seconds[at]
        if rule.age_days_max is not None and age_seconds is not None and age_seconds > rule.age_days_max * _DAY_SECONDS:
            age_days = age_seconds / _DAY_SECONDS
            return f"its last record is {age_days:.1f} days old, past the limit of {rule.age_days_max:g} days"
        if rule.size_bytes_max is not None and self._total_bytes > rule.size_bytes_max:
            return f"the topic holds {self._total_bytes} bytes, over the limit of {rule.size_bytes_max}"
        # A group that has not passed the segment holds it under any rule, and the hold can name the group.
        if rule.consumed and self._has_groups:
            return "every group has passed it"
        return None

    def note_dropped(self, at: int) -> None:
        """Count the segment as gone: the topic is smaller for those that come after it."""
        self._total_bytes -= self._segments[at].size_bytes

    def why_not(self, at: int) -> str:
        """What to say of a segment that no rule asks to drop."""
        rule = self._rule
        if rule.age_days_max is not None and self._age_seconds[at] is None:
            return "its age is unknown: the clock is before its records, or their times cannot be read"
        if rule.age_days_max is None and rule.size_bytes_max is None:
            return "no group reads its topic" if rule.consumed else "its retention rule sets no limit"
        return "within the limits of its retention rule"


def _ages(segments: list[SegmentInfo], now: datetime) -> list[float | None]:
    """
    The age of each segment's last record in seconds; ``None`` where it is unknown.

    A clock that is before a record that the log holds has gone back, or had run ahead when the record
    was written. Nothing is dropped by such a clock: a segment has an age only if neither
    it nor any later one of its space lies in the future. Looking only at later ones keeps the answer the
    same once older segments are gone.
    """
    ages: list[float | None] = [None] * len(segments)
    for _, of_space in groupby(reversed(range(len(segments))), key=lambda at: _space(segments[at])):
        for at in of_space:
            age_seconds = _age_of(segments[at], now)
            if age_seconds is not None and age_seconds < -_CLOCK_SLACK_SECONDS:
                break
            ages[at] = age_seconds
    return ages


def _age_of(segment: SegmentInfo, now: datetime) -> float | None:
    # An empty segment has no last record, and a time that cannot be read is no reason to drop anything.
    try:
        written = datetime.fromisoformat(segment.last_written_at)
    except ValueError:
        return None
    return None if written.utcoffset() is None else (now - written).total_seconds()
