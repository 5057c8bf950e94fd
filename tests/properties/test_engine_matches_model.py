"""
An engine and the model, driven by the same operations, give the same answers.

Hypothesis draws the operations: appends with ids and keys that come again, queries of every kind, retention,
a clock that jumps both ways, and reopening where the engine can. What may differ between engines is left out of
the comparison, and nothing else: ids that the log made (each has its own, but always the same one for the same
record), where pages are cut, and digests of segments.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidings.core.errors import InvalidEvent
from tidings.core.events import Event, EventMeta
from tidings.log import Appended, Duplicate, Log, LogSettings, Query, Record, Refused, TopicRetention, Verdict
from tidings.log.embedded import open_log
from tidings.log.errors import IdConflict, PositionTrimmed
from tidings.log.memory import MemoryLog
from tidings.log.retention import RetentionPlan, plan_retention
from tidings.testing import VirtualClock

T = TypeVar("T")

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS: Final = LogSettings(journal_bytes=1 << 20, segment_lines_max=3, payload_bytes_max=400)
SECONDS_MAX: Final = 20.0

# Weights by repetition: most events are sound and most bounds are open, or nothing would ever be stored or found.
TOPICS: Final = st.sampled_from(["a", "b", "c.d"])
NAMES: Final = [[], ["p"], ["q"], ["p", "q"], ["\u00e9"], ["e\u0301", "p"]]
PARTITIONS: Final = st.sampled_from([[], [], *NAMES])


class Spec(NamedTuple):
    """An event, of which each engine gets an object of its own."""

    topic: str
    event_id: str | None
    idem_key: str | None
    partitions: list[str]
    payload: dict[str, Any]

    def make(self) -> Event:
        meta = EventMeta(
            topic=self.topic,
            type="T",
            space_id="s",
            event_id=self.event_id,
            idem_key=self.idem_key,
            partitions=self.partitions,
            ts=START,
        )
        return Event(meta, self.payload)


SPECS: Final = st.builds(
    Spec,
    topic=st.sampled_from(["a", "b", "c.d"] * 5 + ["no/name"]),
    event_id=st.sampled_from([None] * 8 + [f"e{n}" for n in range(6)]),
    idem_key=st.sampled_from([None] * 8 + ["k0", "k1"]),
    partitions=PARTITIONS,
    payload=st.sampled_from(
        [{"n": 0}, {"n": 1}, {"n": 1.0}, {"n": True}, {"blob": "x" * 200}, {"blob": "x" * 390}] * 4
        + [{"blob": "x" * 391}, {"n": float("nan")}]
    ),
)
PLACES: Final = st.sampled_from([None] * 160 + list(range(40)))
MOMENTS: Final = st.sampled_from([None] * 80 + [START + timedelta(seconds=seconds) for seconds in range(-3, 17)])


@st.composite
def queries(draw: st.DrawFn) -> Query:
    """Queries of every kind that is not refused."""
    topic = draw(st.sampled_from([None, None, None, "a", "a", "b", "b", "c.d", "none"]))
    return Query(
        topic=topic,
        partitions=tuple(draw(st.sampled_from([[], [], [], [], *NAMES]))),
        since=draw(PLACES),
        until=draw(PLACES),
        from_offset=None if topic is None else draw(PLACES),
        to_offset=None if topic is None else draw(PLACES),
        from_time=draw(MOMENTS),
        to_time=draw(MOMENTS),
        backwards=draw(st.booleans()),
    )


class Side(NamedTuple):
    """What one log answered to a query: its records, and that it came to the end or that the rest is gone."""

    records: list[Record]
    trimmed: tuple[str | None, int, int] | None
    stands_at: Query
    pages: int

    @property
    def is_trimmed_at_once(self) -> bool:
        return self.trimmed is not None and self.pages == 0


class EngineMatchesModel(RuleBasedStateMachine):
    """Drives the model and an engine. Here the engine is another model, which shows that the machine is sound."""

    can_reopen = False

    async def open_engine(self) -> Log:
        """Open the engine under test, on the same workspace each time."""
        return MemoryLog(SETTINGS, clock=self.clock)

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.workspace = Path(self.folder.name) / "workspace"
        self.clock = VirtualClock()
        self.model = MemoryLog(SETTINGS, clock=self.clock)
        self.engine = self.run(self.open_engine())
        self.sent: list[tuple[Event, Event]] = []
        self.id_of: dict[str, str] = {}
        self.standing: list[tuple[Query, Query]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, or fail: nothing here may take long."""
        return self.loop.run_until_complete(asyncio.wait_for(work, SECONDS_MAX))

    def teardown(self) -> None:
        try:
            self.run(self.engine.close())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()
            self.folder.cleanup()

    # Appending

    @rule(specs=st.lists(SPECS, max_size=12))
    def append_many(self, specs: list[Spec]) -> None:
        self.send([(spec.make(), spec.make()) for spec in specs])

    @rule(topic=TOPICS, count=st.integers(1, 10), names=PARTITIONS)
    def append_burst(self, topic: str, count: int, names: list[str]) -> None:
        """A run of events that fills segments."""
        self.send([(spec.make(), spec.make()) for spec in [Spec(topic, None, None, names, {"n": 0})] * count])

    @rule(spec=SPECS)
    def append_one(self, spec: Spec) -> None:
        pair = spec.make(), spec.make()
        self.sent.append(pair)
        self.compare(self.run(self.append(self.model, pair[0])), self.run(self.append(self.engine, pair[1])))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """The very objects that were sent before: those that the log named know their names by now."""
        self.send(data.draw(st.lists(st.sampled_from(self.sent), min_size=1, max_size=4)))

    def send(self, pairs: list[tuple[Event, Event]]) -> None:
        self.sent += pairs
        told = self.run(self.model.append_many([pair[0] for pair in pairs]))
        found = self.run(self.engine.append_many([pair[1] for pair in pairs]))
        assert len(told) == len(found) == len(pairs)
        for expected, actual in zip(told, found, strict=True):
            self.compare(expected, actual)

    async def append(self, log: Log, event: Event) -> Verdict:
        try:
            return await log.append(event)
        except (InvalidEvent, IdConflict) as error:
            return Refused(error)

    def compare(self, expected: Verdict, actual: Verdict) -> None:
        """Check that two verdicts say the same."""
        assert type(actual) is type(expected), (actual, expected)
        match expected, actual:
            case Refused(IdConflict() as told), Refused(IdConflict() as found):
                assert (found.field, found.seq) == (told.field, told.seq)
            case Refused(InvalidEvent() as told), Refused(InvalidEvent() as found):
                assert (type(found), str(found)) == (type(told), str(told))
            case ((Appended() | Duplicate() as told), (Appended() | Duplicate() as found)):
                assert (found.seq, found.offset) == (told.seq, told.offset)
                assert self.id_of.setdefault(told.event_id, found.event_id) == found.event_id
            case _:
                raise AssertionError((actual, expected))

    # Reading

    @rule(
        asked=st.lists(queries(), min_size=1, max_size=6),
        limit=st.integers(1, 9),
        bytes_max=st.sampled_from([1, 700, 2000, 1 << 20]),
    )
    def read(self, asked: list[Query], limit: int, bytes_max: int) -> None:
        for query in asked:
            self.read_both(query, query, limit, bytes_max)

    @precondition(lambda self: self.standing)
    @rule(data=st.data(), limit=st.integers(1, 9))
    def read_on(self, data: st.DataObject, limit: int) -> None:
        """Go on from where a reader has come to its end before."""
        at = data.draw(st.integers(0, len(self.standing) - 1))
        model_query, engine_query = self.standing.pop(at)
        self.read_both(model_query, engine_query, limit, 1 << 20)

    def read_both(self, model_query: Query, engine_query: Query, limit: int, bytes_max: int) -> None:
        expected = self.run(self.read_side(self.model, model_query, limit, bytes_max))
        actual = self.run(self.read_side(self.engine, engine_query, limit, bytes_max))
        told = [self.told(record, is_model=True) for record in expected.records]
        found = [self.told(record) for record in actual.records]
        if expected.trimmed is None and actual.trimmed is None:
            assert found == told
            self.standing.append((expected.stands_at, actual.stands_at))
        elif expected.is_trimmed_at_once or actual.is_trimmed_at_once:
            # A reader with a filter may stand further back than the model's, where nothing was for it anyway.
            is_further_back = bool(model_query.partitions) and model_query != engine_query
            assert actual.trimmed == expected.trimmed or is_further_back
        else:
            # Told between two pages, which engines may cut at different records.
            shorter = min(len(told), len(found))
            assert found[:shorter] == told[:shorter]

    async def read_side(self, log: Log, query: Query, limit: int, bytes_max: int) -> Side:
        found: list[Record] = []
        for pages in range(1000):
            try:
                page = await log.read(query, limit=limit, bytes_max=bytes_max)
            except PositionTrimmed as error:
                return Side(found, (error.topic, error.asked, error.first), query, pages)
            assert len(page.records) <= limit
            found += page.records
            query = page.next
            if page.at_end:
                return Side(found, None, query, pages + 1)
        raise AssertionError("no end after 1000 pages")

    def told(self, record: Record, *, is_model: bool = False) -> object:
        """A record as it can be compared: with the engine's name for it."""
        event_id = self.id_of[record.meta.event_id] if is_model else record.meta.event_id
        meta = msgspec.structs.replace(record.meta, event_id=event_id)
        return record.seq, record.offset, meta, record.payload

    @rule(after=st.integers(0, 60), topic=st.none() | TOPICS)
    def wait(self, after: int, topic: str | None) -> None:
        """Whether there is something to wait for is the same for both."""
        last_seq = self.model.position.seq
        if topic is not None:
            infos = self.model.topics()
            last_seq = infos[topic].last_seq if topic in infos else 0
        if last_seq > after:
            assert self.run(self.model.wait(after, topic)) > after
            assert self.run(self.engine.wait(after, topic)) > after

    # Time, retention, reopening

    @rule(seconds=st.integers(-5, 5))
    def move_the_clock(self, seconds: int) -> None:
        self.clock.jump(seconds)

    @rule(
        topics=st.lists(TOPICS, min_size=1, max_size=3, unique=True),
        keep_ids=st.booleans(),
        size_bytes_max=st.sampled_from([0, 0, 1500, 5000]),
    )
    def drop(self, topics: list[str], keep_ids: bool, size_bytes_max: int) -> None:
        self.check_topics()
        rules = dict.fromkeys(topics, TopicRetention(size_bytes_max=size_bytes_max, keep_ids=keep_ids))
        plans = [self.plan(log, rules) for log in (self.model, self.engine)]
        told, found = ([(d.segment.topic, d.segment.number, d.keep_ids) for d in plan.drops] for plan in plans)
        assert found == told
        self.run(self.model.drop(plans[0]))
        self.run(self.engine.drop(plans[1]))
        self.check_topics()

    def plan(self, log: Log, rules: dict[str, TopicRetention]) -> RetentionPlan:
        segments = [segment for topic in log.topics().values() for segment in topic.segments]
        partitions = {name for segment in segments for name in segment.partitions}
        return plan_retention(segments, rules, now=START, partition_floors=dict.fromkeys(partitions, log.position.seq))

    @precondition(lambda self: self.can_reopen)
    @rule()
    def reopen(self) -> None:
        epoch = self.engine.position.epoch
        self.run(self.engine.close())
        self.engine = self.run(self.open_engine())
        assert self.engine.position.epoch == epoch
        self.check_topics()

    @rule()
    def check_topics(self) -> None:
        """Topics and segments are the same, once the engine has sealed what is full."""
        told = self.topics_of(self.model)

        async def settled() -> None:
            while self.topics_of(self.engine) != told:  # noqa: ASYNC110 - the interface has no event for it
                await asyncio.sleep(0.002)

        try:
            self.run(settled())
        except TimeoutError:
            assert self.topics_of(self.engine) == told

    def topics_of(self, log: Log) -> object:
        return {
            name: msgspec.structs.replace(
                info, segments=tuple(msgspec.structs.replace(segment, digest=None) for segment in info.segments)
            )
            for name, info in log.topics().items()
        }

    @invariant()
    def both_stand_at_the_same_seq(self) -> None:
        assert self.engine.position.seq == self.model.position.seq


class EmbeddedMatchesModel(EngineMatchesModel):
    """The engine on files, which answers what is recent from memory."""

    can_reopen = True
    settings = SETTINGS

    async def open_engine(self) -> Log:
        return await open_log(self.workspace, self.settings, clock=self.clock)


class EmbeddedFromFilesMatchesModel(EmbeddedMatchesModel):
    """The engine on files, which keeps nothing recent in memory and reads all of it back."""

    settings = msgspec.structs.replace(SETTINGS, recent_bytes_max=0)


TestMemoryMatchesModel = EngineMatchesModel.TestCase
TestEmbeddedMatchesModel = EmbeddedMatchesModel.TestCase
TestEmbeddedFromFilesMatchesModel = EmbeddedFromFilesMatchesModel.TestCase
