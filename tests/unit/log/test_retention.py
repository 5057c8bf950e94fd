"""Retention drops what its rules ask for and nothing holds, oldest first, and can say why for each segment."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.clock import format_utc, ns_of
from tidings.log.retention import Needs, RetentionPlan, SegmentDecision, SegmentInfo, plan_retention
from tidings.log.settings import TopicRetention

NOW = datetime(2030, 6, 1, tzinfo=UTC)
WEEK = TopicRetention(age_days_max=7)


def segment(number: int, *, age_days: float = 0, topic: str = "orders", **changes: Any) -> SegmentInfo:
    """A sealed segment of ten records and 100 bytes, the ``number``-th of its topic."""
    written_at = format_utc(ns_of(NOW - timedelta(days=age_days))).decode()
    values: dict[str, Any] = {
        "topic": topic,
        "number": number,
        "is_sealed": True,
        "first_offset": number * 10,
        "last_offset": number * 10 + 9,
        "first_seq": number * 10 + 1,
        "last_seq": number * 10 + 10,
        "first_written_at": written_at,
        "last_written_at": written_at,
        "lines": 10,
        "size_bytes": 100,
    }
    return SegmentInfo(**(values | changes))


def plan(segments: Sequence[SegmentInfo], rule: TopicRetention, **floors: Any) -> RetentionPlan:
    return plan_retention(segments, {"orders": rule}, now=NOW, **floors)


def dropped(plan: RetentionPlan) -> list[int]:
    return [decision.segment.number for decision in plan.drops]


def reasons(plan: RetentionPlan) -> list[str]:
    return [decision.reason for decision in plan.decisions]


def test_a_topic_without_a_rule_is_kept() -> None:
    """Without a rule of its own or a default, nothing goes, however old."""
    made = plan_retention([segment(0, age_days=9999)], {"other": WEEK}, now=NOW)

    assert made.drops == ()
    assert reasons(made) == ["no retention rule"]


def test_the_star_is_the_rule_of_topics_that_have_none() -> None:
    """The default applies to a topic without a rule, and not to one that has its own."""
    segments = [segment(0, age_days=9, topic="a"), segment(0, age_days=9, topic="b")]

    made = plan_retention(segments, {"*": WEEK, "b": TopicRetention(age_days_max=30)}, now=NOW)

    assert [decision.segment.topic for decision in made.drops] == ["a"]


def test_a_rule_without_a_limit_drops_nothing() -> None:
    """A rule may be there only to remember ids."""
    made = plan([segment(0, age_days=9999)], TopicRetention(keep_ids=True), needs=Needs({"orders": {"g": 99}}))

    assert made.drops == ()
    assert reasons(made) == ["its retention rule sets no limit"]


def test_age_is_that_of_the_last_record() -> None:
    """A segment goes when its newest record is older than the limit, to the microsecond."""
    limit = NOW - timedelta(days=7)
    at_limit, past_limit = (format_utc(ns_of(limit) - lag * 1000).decode() for lag in (0, 1))

    assert dropped(plan([segment(0, last_written_at=at_limit)], WEEK)) == []
    assert dropped(plan([segment(0, last_written_at=past_limit)], WEEK)) == [0]


def test_an_age_limit_beyond_all_calendars_keeps_everything() -> None:
    """A limit that no date can express is a limit nothing reaches, not an error."""
    for age_days_max in (1e15, float("inf")):
        assert dropped(plan([segment(0, age_days=9999)], TopicRetention(age_days_max=age_days_max))) == []


@pytest.mark.parametrize("hours_ahead", [1, 24 * 365])
def test_a_clock_behind_the_records_drops_nothing_by_age(hours_ahead: int) -> None:
    """Where a later record lies in the clock's future the clock is not believed about the older ones either."""
    segments = [segment(0, age_days=30), segment(1, age_days=-hours_ahead / 24, is_sealed=False)]

    made = plan(segments, WEEK)

    assert made.drops == ()
    assert "age is unknown" in reasons(made)[0]


def test_a_clock_behind_the_records_does_not_stop_other_rules() -> None:
    """Size needs no clock."""
    segments = [segment(0, age_days=30), segment(1, age_days=-1, is_sealed=False)]

    assert dropped(plan(segments, TopicRetention(age_days_max=7, size_bytes_max=100))) == [0]


def test_records_written_while_the_plan_is_made_are_no_lie_of_the_clock() -> None:
    """A clock read a moment before the segments were listed still tells ages."""
    segments = [segment(0, age_days=30), segment(1, age_days=-5 / 86_400, is_sealed=False)]

    assert dropped(plan(segments, WEEK)) == [0]


@pytest.mark.parametrize("written_at", ["", "yesterday", "2001-01-01T00:00:00.000000"])
def test_a_time_that_cannot_be_read_is_no_reason_to_drop(written_at: str) -> None:
    """A segment whose time of writing is missing, garbled or without a zone stays."""
    assert dropped(plan([segment(0, last_written_at=written_at)], WEEK)) == []


def test_now_must_have_a_zone() -> None:
    """A local time is a programming error, not an age."""
    with pytest.raises(TypeError, match="zone"):
        plan_retention([], {}, now=NOW.replace(tzinfo=None))


def test_size_drops_the_oldest_until_the_topic_is_within() -> None:
    """No more goes than must, and the active segment counts."""
    segments = [*map(segment, range(4)), segment(4, is_sealed=False, size_bytes=50)]

    assert dropped(plan(segments, TopicRetention(size_bytes_max=450))) == []
    assert dropped(plan(segments, TopicRetention(size_bytes_max=449))) == [0]
    assert dropped(plan(segments, TopicRetention(size_bytes_max=250))) == [0, 1]
    made = plan(segments, TopicRetention(size_bytes_max=0))
    assert dropped(made) == [0, 1, 2, 3]
    assert made.freed_bytes == 400


def test_size_is_the_topics_over_all_its_spaces() -> None:
    """In the space layout the oldest segments of the topic go, whichever spaces they are of."""
    segments = [
        segment(0, space_id="home", last_seq=50),
        segment(1, space_id="home", last_seq=60),
        segment(0, space_id="work", last_seq=10),
        segment(1, space_id="work", last_seq=70),
    ]

    made = plan(segments, TopicRetention(size_bytes_max=200))

    assert [(decision.segment.space_id, decision.segment.number) for decision in made.drops] == [
        ("home", 0),
        ("work", 0),
    ]


def test_consumption_needs_a_group() -> None:
    """What nobody reads has not been read by all."""
    rule = TopicRetention(consumed=True)

    unread = plan([segment(0)], rule, needs=Needs({"other": {"g": 99}}))

    assert unread.drops == plan([segment(0)], rule).drops == ()
    assert reasons(unread) == ["no group reads its topic"]
    assert dropped(plan([segment(0)], rule, needs=Needs({"orders": {"g": 9}}))) == [0]


def test_a_segment_goes_by_consumption_when_the_last_group_has_passed_it() -> None:
    """The slowest group decides, and is named where it has not passed."""
    rule = TopicRetention(consumed=True)
    segments = [segment(0), segment(1)]

    assert dropped(plan(segments, rule, needs=Needs({"orders": {"fast": 19, "slow": 8}}))) == []
    made = plan(segments, rule, needs=Needs({"orders": {"fast": 19, "slow": 9}}))
    assert dropped(made) == [0]
    assert reasons(made)[1] == "group 'slow' has not passed it: 10 records to go"


def test_a_group_that_lags_holds_a_segment_and_is_named() -> None:
    """Whatever the rule, a segment stays while a group has records in it to read; the operator learns whose."""
    segments = [segment(0, age_days=30)]

    made = plan(segments, WEEK, needs=Needs({"orders": {"fast": 9, "new": -1, "slow": 3}}))
    nearly = plan(segments, WEEK, needs=Needs({"orders": {"slow": 8}}))

    assert made.drops == nearly.drops == ()
    assert reasons(made) == ["group 'new' has not passed it: 10 records to go"]
    assert reasons(nearly) == ["group 'slow' has not passed it: 1 record to go"]
    assert dropped(plan(segments, WEEK, needs=Needs({"orders": {"slow": 9}}))) == [0]


@pytest.mark.parametrize(
    "floors",
    [None, {}, {"p": 99}, {"p": 4, "q": 99}, {"p": 99, "q": 6}],
    ids=["no floors", "empty", "one unknown", "one behind", "the other behind"],
)
def test_a_partition_that_has_not_moved_holds_a_segment(floors: Mapping[str, int] | None) -> None:
    """A segment stays until every partition it names has moved past it; one that is not known has not."""
    made = plan([segment(0, age_days=30, partitions={"p": 5, "q": 7})], WEEK, partition_floors=floors)

    assert made.drops == ()
    assert reasons(made)[0].startswith("partition ")


def test_a_segment_goes_when_all_its_partitions_have_moved_past_it() -> None:
    """Each partition has to pass the last record that names it, not the end of the segment."""
    segments = [segment(0, age_days=30, partitions={"p": 5, "q": 7})]

    assert dropped(plan(segments, WEEK, partition_floors={"p": 5, "q": 7})) == [0]


def test_partitions_do_not_concern_segments_that_name_none() -> None:
    """Bus topics go without any partition floors."""
    assert dropped(plan([segment(0, age_days=30)], WEEK, partition_floors=None)) == [0]


def test_a_lake_holds_what_it_does_not_have_yet() -> None:
    """Where a lake is kept, a segment stays until the lake has its last record; a topic it lacks has none."""
    segments = [segment(0, age_days=30)]

    made = plan(segments, WEEK, archived_through={"orders": 8})

    assert reasons(made) == ["the lake has the topic through offset 8, not yet through 9"]
    assert dropped(plan(segments, WEEK, archived_through={})) == []
    assert dropped(plan(segments, WEEK, archived_through={"orders": 9})) == [0]
    assert dropped(plan(segments, WEEK, archived_through=None)) == [0]


def test_all_that_holds_a_segment_is_said() -> None:
    """An operator who settles one matter is not surprised by the next."""
    made = plan(
        [segment(0, age_days=30, partitions={"p": 5, "q": 7})],
        WEEK,
        needs=Needs({"orders": {"g": 0}}),
        archived_through={"orders": -1},
    )

    assert reasons(made) == [
        "group 'g' has not passed it: 9 records to go; "
        "partition 'p' has yet to move past seq 5 (and 1 more like it); "
        "the lake has the topic through offset -1, not yet through 9"
    ]


def test_nothing_goes_from_behind_a_segment_that_is_kept() -> None:
    """A topic keeps one contiguous range."""
    segments = [segment(0, age_days=30, partitions={"p": 5}), segment(1, age_days=29), segment(2, age_days=1)]

    made = plan(segments, WEEK)

    assert made.drops == ()
    assert reasons(made)[1:] == ["an older segment is kept", "within the limits of its retention rule"]


def test_one_space_does_not_hold_another() -> None:
    """In the space layout each space keeps a contiguous range of its own."""
    segments = [
        segment(0, age_days=30, space_id="home", partitions={"p": 5}),
        segment(1, age_days=30, space_id="home"),
        segment(0, age_days=30, space_id="work"),
    ]

    made = plan(segments, WEEK)

    assert [(decision.segment.space_id, decision.segment.number) for decision in made.drops] == [("work", 0)]


def test_the_active_segment_stays_and_an_empty_one_stands_in_nobodys_way() -> None:
    """An active segment without records, which has no seq yet, does not count as the oldest."""
    empty = segment(1, is_sealed=False, last_offset=9, first_seq=0, last_seq=0, last_written_at="", lines=0)

    made = plan([segment(0, age_days=30), empty], TopicRetention(age_days_max=7, size_bytes_max=0))

    assert dropped(made) == [0]
    assert reasons(made)[1] == "it is the active segment"


def test_a_segment_that_is_still_being_sealed_keeps_those_after_it() -> None:
    """Sealing may lag behind rotation; the range has no hole even then."""
    segments = [segment(0, age_days=30, is_sealed=False), segment(1, age_days=30), segment(2, is_sealed=False)]

    assert dropped(plan(segments, WEEK)) == []


def test_ids_are_kept_where_a_rule_or_a_partition_asks() -> None:
    """Ids of sync records outlive their segment always, those of others by rule."""
    segments = [segment(0, age_days=30), segment(1, age_days=30, partitions={"p": 15})]
    floors = {"p": 15}

    by_partition = plan(segments, WEEK, partition_floors=floors)
    by_rule = plan(segments, TopicRetention(age_days_max=7, keep_ids=True), partition_floors=floors)

    assert [decision.keep_ids for decision in by_partition.drops] == [False, True]
    assert [decision.keep_ids for decision in by_rule.drops] == [True, True]


def test_reasons_to_drop_are_told() -> None:
    """Each way to go has its own words."""
    floors = {"orders": {"g": 9}}

    assert reasons(plan([segment(0, age_days=8.5)], WEEK)) == [
        "its last record is 8.5 days old, past the limit of 7 days"
    ]
    assert reasons(plan([segment(0)], TopicRetention(size_bytes_max=50))) == [
        "the topic holds 100 bytes, over the limit of 50"
    ]
    assert reasons(plan([segment(0)], TopicRetention(consumed=True), needs=Needs(floors))) == [
        "every group has passed it"
    ]


# What follows holds for any log. The worlds are drawn small, so that limits, floors and ages often meet.

TOPICS = ("a", "b")
PARTITIONS = ("p", "q")


class World(msgspec.Struct, frozen=True):
    """All that a plan is made from."""

    segments: list[SegmentInfo]
    rules: dict[str, TopicRetention]
    group_floors: dict[str, dict[str, int]]
    partition_floors: dict[str, int] | None
    archived_through: dict[str, int] | None

    def plan(self) -> RetentionPlan:
        return plan_retention(
            self.segments,
            self.rules,
            now=NOW,
            needs=Needs(self.group_floors),
            partition_floors=self.partition_floors,
            archived_through=self.archived_through,
        )

    def is_held(self, info: SegmentInfo) -> bool:
        floors = self.partition_floors or {}
        lake = self.archived_through
        return (
            any(committed < info.last_offset for committed in self.group_floors.get(info.topic, {}).values())
            or any(floors.get(name, -1) < seq for name, seq in info.partitions.items())
            or (lake is not None and lake.get(info.topic, -1) < info.last_offset)
        )


RULES = st.builds(
    TopicRetention,
    age_days_max=st.none() | st.integers(1, 12).map(float),
    size_bytes_max=st.none() | st.integers(0, 12),
    consumed=st.booleans(),
    keep_ids=st.booleans(),
)


@st.composite
def chains(draw: st.DrawFn, topic: str, space_id: str | None) -> list[SegmentInfo]:
    """One space's segments, in order; some have a clock that jumps, some end in an empty active segment."""
    made: list[SegmentInfo] = []
    offset, seq = -1, draw(st.integers(0, 3))
    for number in range(draw(st.integers(0, 4))):
        lines = draw(st.integers(1, 3))
        age_days = draw(st.integers(-1, 12))
        partitions = draw(st.dictionaries(st.sampled_from(PARTITIONS), st.just(seq + lines), max_size=1))
        made.append(
            segment(
                number,
                topic=topic,
                space_id=space_id,
                age_days=age_days,
                is_sealed=draw(st.integers(0, 9)) > 0,
                first_offset=offset + 1,
                last_offset=offset + lines,
                first_seq=seq + 1,
                last_seq=seq + lines,
                lines=lines,
                size_bytes=draw(st.integers(0, 4)),
                partitions=partitions,
            )
        )
        offset += lines
        seq += lines + draw(st.integers(0, 3))
    ends_empty: bool = draw(st.booleans())
    if made and ends_empty:
        empty: dict[str, Any] = {"first_seq": 0, "last_seq": 0, "last_written_at": "", "lines": 0, "size_bytes": 0}
        made.append(segment(len(made), topic=topic, space_id=space_id, is_sealed=False, last_offset=offset, **empty))
    return made


@st.composite
def worlds(draw: st.DrawFn) -> World:
    segments = [
        info
        for topic, space_id in (("a", None), ("a", "home"), ("a", "work"), ("b", None))
        for info in draw(chains(topic, space_id))
    ]
    floors = st.integers(-1, 15)
    topics = st.sampled_from(TOPICS)
    # Without a leaning to what holds nothing, most worlds would drop nothing and show little.
    moved = st.just(dict.fromkeys(PARTITIONS, 99))
    archived = st.just(dict.fromkeys(TOPICS, 99))
    return World(
        segments,
        draw(st.dictionaries(st.sampled_from([*TOPICS, "*"]), RULES)),
        draw(st.dictionaries(topics, st.dictionaries(st.sampled_from("gh"), floors, max_size=2))),
        draw(moved | st.none() | st.dictionaries(st.sampled_from(PARTITIONS), floors)),
        draw(st.none() | archived | st.dictionaries(topics, floors)),
    )


def spaces_of(plan: RetentionPlan) -> dict[tuple[str, str | None], list[SegmentDecision]]:
    found: dict[tuple[str, str | None], list[SegmentDecision]] = {}
    for decision in plan.decisions:
        found.setdefault((decision.segment.topic, decision.segment.space_id), []).append(decision)
    return found


@given(worlds())
def test_every_segment_gets_one_decision_and_a_reason(world: World) -> None:
    """The plan is complete: nothing is forgotten, nothing is decided twice."""
    made = world.plan()

    assert sorted(map(repr, world.segments)) == sorted(repr(decision.segment) for decision in made.decisions)
    assert all(reasons(made))


@given(worlds())
def test_neither_active_nor_held_segments_go(world: World) -> None:
    """Whatever the rules, what is being written or still needed stays."""
    for decision in world.plan().drops:
        assert decision.segment.is_sealed
        assert not world.is_held(decision.segment)


@given(worlds())
def test_what_goes_is_a_prefix_of_its_space(world: World) -> None:
    """No space of any topic gets a hole."""
    for decisions in spaces_of(world.plan()).values():
        numbers = [decision.segment.number for decision in decisions]
        fates = [decision.drops for decision in decisions]
        assert numbers == sorted(numbers)
        assert fates == sorted(fates, reverse=True)


@given(worlds())
def test_a_topic_over_its_size_has_nothing_more_to_give(world: World) -> None:
    """If a topic stays too large, the first segment that each of its spaces keeps is active or held."""
    made = world.plan()

    for topic in TOPICS:
        rule = world.rules.get(topic, world.rules.get("*"))
        kept = [decision for decision in made.decisions if decision.segment.topic == topic and not decision.drops]
        size = sum(decision.segment.size_bytes for decision in kept)
        if rule is None or rule.size_bytes_max is None or size <= rule.size_bytes_max:
            continue
        firsts = {decision.segment.space_id: decision.segment for decision in reversed(kept)}
        assert all(not first.is_sealed or world.is_held(first) for first in firsts.values())


@given(worlds(), st.data())
def test_a_looser_rule_never_drops_more(world: World, data: st.DataObject) -> None:
    """Raising or lifting a limit can only keep segments, never let another one go."""

    def looser(rule: TopicRetention) -> TopicRetention:
        more = st.none() | st.integers(0, 6)
        age, size = data.draw(more), data.draw(more)
        return TopicRetention(
            age_days_max=None if age is None or rule.age_days_max is None else rule.age_days_max + age,
            size_bytes_max=None if size is None or rule.size_bytes_max is None else rule.size_bytes_max + size,
            consumed=rule.consumed and data.draw(st.booleans()),
        )

    loose = msgspec.structs.replace(world, rules={topic: looser(rule) for topic, rule in world.rules.items()})

    strict_drops = [decision.segment for decision in world.plan().drops]
    assert all(decision.segment in strict_drops for decision in loose.plan().drops)


@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_segments_are_listed_in_does_not_matter(world: World, shuffler: random.Random) -> None:
    """The same log gives the same plan."""
    shuffled = list(world.segments)
    shuffler.shuffle(shuffled)

    assert msgspec.structs.replace(world, segments=shuffled).plan() == world.plan()


@given(worlds())
def test_a_plan_carried_out_leaves_nothing_to_drop(world: World) -> None:
    """Planning again at the same time finds the log as the rules want it."""
    kept = [decision.segment for decision in world.plan().decisions if not decision.drops]

    assert msgspec.structs.replace(world, segments=kept).plan().drops == ()


def test_permissions_are_kept_whole() -> None:
    """No rule, not even one of its own, drops anything from the topic that says who may do what."""
    old = [segment(n, age_days=9999, topic="access") for n in range(3)]
    rule = TopicRetention(age_days_max=1, size_bytes_max=0)

    made = plan_retention(old, {"*": rule, "access": rule}, now=NOW)

    assert made.drops == ()
    assert made.decisions[0].reason == "all records of this topic count"
