"""
A bus through several lives, on a simulated disk and in simulated time, in which a seed decides everything.

Publishers publish, groups handle (or fail, in all the ways that handlers have), an operator compacts, seeks, pauses,
re-drives, closes and opens; and the process is killed, or the power goes, at any step. ``Book`` holds what was promised.
When the last life has nothing left to do but to finish, everything must be finished in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.crash.support import ENDINGS, ROOMY, disk_after
from tests.simulation.book import STATES, Book, Broken, GroupBook, Key
from tidings.bus import BusSettings, EventBus, ReceivedEvent
from tidings.bus.errors import BusClosed, PublishTimeout
from tidings.bus.store import DeadLetterFilter, GroupPosition
from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.bus.store.files import FileGroupStore
from tidings.bus.store.memory import MemoryClaims
from tidings.bus.subscription import Subscription
from tidings.core.clock import datetime_of
from tidings.core.events import Event, EventMeta
from tidings.log import Appended, Query, TopicRetention
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.index import MemoryIndex
from tidings.log.embedded.layout import Layout
from tidings.log.errors import LogClosed, PositionTrimmed
from tidings.log.reading import records
from tidings.log.retention import RetentionPlan
from tidings.server.retention import NodeRetention
from tidings.testing import (
    InterleavedDisk,
    SimulatedClock,
    SimulatedCrash,
    SimulatedDisk,
    SimulatedLoop,
)
from tidings.types import Ack, Nack

WORKSPACE: Final = Path("/data/workspace")
SPACES: Final = ("shared:home", "person:ana", "person:ben")
QUIET_S: Final = 200.0
"""How long publishers may take, and then a world that is left alone to finish."""
CLOSE_S: Final = 2.0
HELD_S_MAX: Final = 12.0
"""How long a publisher may be held up by groups whose handlers are quick and whose events wait for a retry."""
STEPS_MAX: Final = 150_000
OPERATIONS: Final = ("compact", "retention", "redrive", "drop_letter", "seek", "pause", "leave", "reopen")
BEHAVIOURS: Final = ("fail", "nack", "slow", "odd", "cancelled", "swallow", "publish", "spawn")


class OddError(BaseException):
    """An error that is no ``Exception``."""


class SeedFailed(AssertionError):
    """A promise was broken; how to see it again, and what led to it."""

    def __init__(self, seed: object, plan: Plan, problem: BaseException, trace: list[str]) -> None:
        super().__init__(seed, problem)
        self.seed = seed
        self.plan = plan
        self.problem = problem
        self.trace = trace

    def __str__(self) -> str:
        steps = "\n".join(self.trace)
        return f"seed {self.seed}: {type(self.problem).__name__}: {self.problem}\n{self.plan}\n{steps}"


class GroupPlan:
    """One group and how its handler behaves."""

    def __init__(self, topic: str, name: str, rng: random.Random, plan: Plan) -> None:
        self.key: Key = (topic, name)
        self.order = "none" if plan.profile != "whole" else rng.choice(("none", "none", "key", "strict"))
        self.retries_max = rng.randint(0, 3)
        self.workers = rng.randint(1, 3)
        self.batch_count_max = rng.choice((1, 1, 3)) if plan.profile == "whole" else 1
        self.window = rng.randint(2, 8)
        self.window_bytes = rng.choice((300, 2000, 1 << 20)) if plan.profile == "whole" else 1 << 20
        self.waiting_max = rng.choice((2, 1000)) if plan.profile == "whole" else 1000
        has_deadline = plan.profile == "whole" and rng.random() < 0.4
        self.deadline_s = rng.choice((0.05, 0.2)) if has_deadline else None
        self.trouble = rng.choice((0.1, 0.4)) if plan.profile == "whole" else 0.5

    @property
    def options(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "max_inflight": self.window,
            "max_inflight_bytes": self.window_bytes,
            "waiting_retries_max": self.waiting_max,
            "max_retries": self.retries_max,
            "backoff_base": 0.02,
            "backoff_max": 0.2,
            "order": self.order,
            "batch_count_max": self.batch_count_max,
            "ack_deadline_ms": None if self.deadline_s is None else round(self.deadline_s * 1000),
        }

    def __str__(self) -> str:
        return f"{'/'.join(self.key)} {self.options}"


class Plan:
    """What a seed's world is like."""

    def __init__(self, seed: object, **forced: Any) -> None:
        rng = random.Random(f"plan {seed}")
        self.profile: str = rng.choices(("whole", "retries", "flood"), (8, 1, 1))[0]
        self.profile = forced.get("profile", self.profile)
        whole = self.profile == "whole"
        self.topics = ("alpha", "beta")[: rng.randint(1, 2) if whole else 2]
        self.operations = [op for op in OPERATIONS if rng.random() < 0.5] if whole else ["compact"]
        self.behaviours = [kind for kind in BEHAVIOURS if rng.random() < 0.4]
        if self.profile == "retries":
            self.behaviours = ["nack"]
        if self.profile == "flood":
            self.behaviours = ["slow", "spawn"]
        self.crashes = rng.randint(0, 3) if whole else 0
        self.events = rng.randint(10, 40)
        self.publishers = rng.randint(1, 3)
        self.operator_turns = rng.randint(2, 12)
        self.operators = rng.randint(1, 2)
        for name, value in forced.items():
            setattr(self, name, value)
        if "reopen" in self.operations:  # who closes the bus must be alone in doing so
            self.operators = 1
        self.groups = [
            GroupPlan(topic, f"g{n}", rng, self)
            for topic in self.topics
            for n in range(rng.randint(1, 2 if whole else 1))
        ]
        # Out of order, publishers let a few more events through than a window holds, and a group may fall behind for it.
        self.disorder = rng.choice((0.0, 0.0, 0.05)) if self.profile != "flood" else 0.0
        self.loop_pace = rng.choice((0.3, 1.0, 3.0))
        self.bus = BusSettings(
            cursor_interval_ms=rng.choice((10, 30)) if whole else 100,
            cursor_sync_interval_ms=rng.choice((30, 100)),
            read_ahead_count_max=rng.choice((3, 7, 100)),
        )

    def __str__(self) -> str:
        facts = {name: value for name, value in vars(self).items() if name not in ("groups", "bus")}
        return "\n".join([str(facts), *map(str, self.groups)])


class Simulation:
    """
    One seed's course.

    Args:
        seed: Decides everything.
        trace_count_max: How many steps of the last life a failure shows.
        interleaved: The kind of disk, for faults that are planted.
        forced: What of the seed's plan is to be otherwise, by the names of ``Plan``.
    """

    def __init__(
        self,
        seed: object,
        *,
        trace_count_max: int = 400,
        interleaved: type[InterleavedDisk] = InterleavedDisk,
        **forced: Any,
    ) -> None:
        self.seed = seed
        self.interleaved = interleaved
        self.trace_count_max = trace_count_max
        self.plan = Plan(seed, **forced)
        self.rng = random.Random(f"world {seed}")
        self.book = Book()
        for group in self.plan.groups:
            self.book.groups[group.key] = GroupBook(
                group.key,
                order=group.order,
                attempts_max=group.retries_max + 1,
                at_once_max=group.workers * group.batch_count_max,
            )
        self.disk = SimulatedDisk(self.rng.getrandbits(32))
        self.slots: dict[Key, dict[int, tuple[int, int]]] = {}
        self.lives = 0
        self.now_s = 0.0
        self.numbers = 0
        self.operator_turns = self.plan.operator_turns
        self.digests: list[str] = []
        self.steps = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Live until everything is done."""
        while not self._live():
            pass

    def _live(self) -> bool:
        """One life of the process; whether it came to its end by itself."""
        self.lives += 1
        is_last = self.lives > self.plan.crashes
        self.loop = SimulatedLoop(
            f"{self.seed} {self.lives}",
            now_s=self.now_s,
            disorder=self.plan.disorder,
            loop_pace=self.plan.loop_pace,
            crash_at=None if is_last else self._crash_at(),
            steps_max=STEPS_MAX,
            trace_count_max=self.trace_count_max,
            after_step=self._check_step,
        )
        self.loop.set_exception_handler(self._note_unhandled)
        self.clock = SimulatedClock(self.loop)
        self.is_open = False
        self.opened = asyncio.Event()
        self.bus: EventBus
        self.log: EmbeddedLog
        self.subscriptions: dict[Key, Subscription] = {}
        self.left = self.plan.publishers + self.plan.operators
        self.tasks: set[asyncio.Task[Any]] = set()
        asyncio.set_event_loop(None)
        try:
            self.loop.run_until_complete(self._main())
        except SimulatedCrash:
            return False
        except Exception as error:
            raise SeedFailed(self.seed, self.plan, error, self.loop.trace) from error
        finally:
            self.now_s = self.loop.time()
            self.steps += self.loop.steps
            self.digests.append(self.loop.digest)
            self._end_process()
        return True

    def _crash_at(self) -> int:
        return round(10 ** self.rng.uniform(1.5, 3.5))

    def _end_process(self) -> None:
        disk, slots = self.disk, {key: dict(each) for key, each in self.slots.items()}
        disk.crash_after = disk.calls
        self.loop.abandon()
        ending = self.rng.choice((*ENDINGS, "killed", "killed"))
        self.disk = disk_after(disk, ending)
        self.slots = slots if ending == "killed" or self.rng.random() < 0.5 else {}
        self.book.end_life()

    # Checks

    def fail(self, problem: BaseException) -> None:
        """Note what is wrong; the run ends with this step. (Raised in a handler it would count as a failed attempt.)"""
        self.failure = self.failure or problem

    def _note_unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "exception" in context and "never retrieved" not in context["message"]:
            self.fail(context["exception"])

    def _check_step(self) -> None:
        if self.failure is not None:
            raise self.failure
        if not self.is_open:
            return
        if self.loop.steps % 16 == 0 and (problem := self.bus.health().problem) is not None:
            raise Broken(f"the bus has a problem: {problem}")
        self._check_windows()
        if self.plan.profile == "flood":
            self._check_lag()

    def _check_windows(self) -> None:
        """No group holds more events, or more bytes, than it may; one event may be as large as it is."""
        for group in self.plan.groups:
            state = self.subscriptions[group.key].group_state
            if state is None:
                continue
            if state.pending > group.window:
                raise Broken(f"{group.key} holds {state.pending} events, and may hold {group.window}")
            if state.pending_bytes > group.window_bytes and state.pending > 1:
                raise Broken(f"{group.key} holds {state.pending_bytes} bytes, and may hold {group.window_bytes}")

    def _check_lag(self) -> None:
        for group in self.plan.groups:
            lag = self.bus.lag(*group.key)
            most = group.window + self.plan.publishers + len(self.tasks)
            if lag > most:
                raise Broken(f"{group.key} has a window of {group.window}, and {lag} events were let through to it")

    def letters(self) -> dict[Key, set[int]]:
        """The dead letters as they are on the disk right now."""
        store = DeadLetterFiles(self.disk, Layout(WORKSPACE).dlq, self.clock)
        found: dict[Key, set[int]] = {}
        for topic in self.plan.topics:
            for letter in store.find(topic, None, DeadLetterFilter(states=STATES)):
                found.setdefault((topic, letter.group), set()).add(letter.offset)
        return found

    # A life

    async def _main(self) -> None:
        await self._open()
        jobs = {f"publisher {n}": self._publisher(n) for n in range(self.plan.publishers)}
        jobs |= {f"operator {n}": self._operator(n) for n in range(self.plan.operators)}
        jobs["compactor"] = self._compactor()
        async with self._soon("publishing", QUIET_S):
            await asyncio.gather(*(asyncio.create_task(job, name=name) for name, job in jobs.items()))
        await self._finish()

    async def _open(self) -> None:
        disk = self.interleaved(self.disk, self.loop)
        self.log = await open_log(WORKSPACE, ROOMY, disk=disk, index=MemoryIndex(), clock=self.clock)
        self.bus = EventBus(
            settings=self.plan.bus,
            log=self.log,
            store=FileGroupStore(
                WORKSPACE,
                self.log,
                disk=disk,
                clock=self.clock,
                claims=lambda topic, group: MemoryClaims(self.slots.setdefault((topic, group), {})),
            ),
            clock=self.clock,
            rng=random.Random(f"bus {self.seed}"),
        )
        await self.bus.start()
        self.retention = NodeRetention(
            self.log,
            self.bus.holders,
            WORKSPACE,
            {"*": TopicRetention(consumed=True, keep_ids=True)},
            lake=None,
            clock=self.clock,
        )
        for group in self.plan.groups:
            await self._subscribe(group)
            await self.bus.resume(*group.key)
        self.is_open = True
        self.opened.set()

    async def _subscribe(self, group: GroupPlan) -> None:
        try:
            self.subscriptions[group.key] = await self.bus.subscribe(*group.key, self._handler(group), **group.options)
        except PositionTrimmed as error:
            raise Broken(f"{group.key} cannot go on where it was: {error}") from error
        self.book.groups[group.key].exists = True
        await self._check_place(group)

    async def _check_place(self, group: GroupPlan) -> None:
        position = await self.bus.position_of(*group.key)
        if not isinstance(position, GroupPosition):
            raise Broken(f"the place of {group.key} is not known: {position}")
        info = self.log.topics().get(group.key[0])
        passed = [(0, position.cursor.committed), *position.cursor.ranges]
        self.book.check_place(group.key, passed, info.next_offset if info else 0, self.letters().get(group.key, ()))

    async def _close(self) -> None:
        self.is_open = False
        self.opened.clear()
        async with self._soon("closing", CLOSE_S + 5):
            await self.bus.close(CLOSE_S)
            await self.log.close()

    @asynccontextmanager
    async def _soon(self, what: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise Broken(f"{what} has not ended after {seconds} s") from error

    async def _finish(self) -> None:
        """Nobody asks for anything more: all that was asked for comes to its end."""
        self.loop.note("quiet")
        self.loop.crash_at = None
        await self._handle_all()
        for topic in self.plan.topics:
            await self._redrive(topic)  # once: a handler that fails again leaves its letter where it was
            async with self._soon(f"re-driving in {topic}", QUIET_S):
                while await self.bus.dead_letters(topic, states=("requested", "trying")):  # noqa: ASYNC110 - nothing to wait on
                    await asyncio.sleep(0.1)
        await self._handle_all()  # what handlers have published meanwhile
        if (problem := self.bus.health().problem) is not None:
            raise Broken(f"the bus has a problem: {problem}")
        await self._check_log()
        await self._close()
        await self._open()
        await self._check_log()
        await self._close()

    async def _handle_all(self) -> None:
        async with self._soon("handling everything", QUIET_S):
            while self.tasks or any(self.bus.lag(*group.key) for group in self.plan.groups):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.2)

    async def _check_log(self) -> None:
        letters = self.letters()
        for topic, info in self.log.topics().items():
            if topic not in self.plan.topics:
                continue  # the audit's own
            self.book.check_kept(topic, info.first_offset, letters)
            stored = {
                record.offset: record.payload["n"]
                async for record in records(self.log, Query(topic=topic, from_offset=info.first_offset))
            }
            self.book.check_stored(topic, stored, info.first_offset)
            for group in self.plan.groups:
                if group.key[0] == topic:
                    self.book.check_delivered(group.key, info.next_offset, letters.get(group.key, ()))

    # Publishers

    def _event(self, topic: str) -> Event:
        self.numbers += 1
        number = self.numbers
        self.book.offer(number)
        space_id = SPACES[number % len(SPACES)]
        meta = EventMeta(topic=topic, type="NOTED", space_id=space_id, ts=datetime_of(self.clock.now_ns()))
        return Event(meta, {"n": number, "pad": "x" * (number * 37 % 250)})

    async def _publish(self, topic: str, timeout_s: float | None = None) -> None:
        event = self._event(topic)
        begun = self.clock.monotonic()
        try:
            verdict = await self.bus.publish(event, timeout_s=timeout_s)
        except PublishTimeout:
            self.book.refused.add(event.payload["n"])
            return
        except (BusClosed, LogClosed):
            await self.opened.wait()
            return
        self._note_published(event, verdict)
        held_s = self.clock.monotonic() - begun
        if self.plan.profile == "retries" and held_s > HELD_S_MAX:
            self.fail(Broken(f"a publisher to {topic} was held up for {held_s:.1f} s while events wait for a retry"))

    def _note_published(self, event: Event, verdict: object) -> None:
        assert isinstance(verdict, Appended)
        self.loop.note(f"published {event.meta.topic} {verdict.offset}: {event.payload['n']}")
        self.book.publish(event.meta.topic, verdict.offset, event.payload["n"])

    async def _publish_many(self, topics: list[str]) -> None:
        events = [self._event(topic) for topic in topics]
        try:
            verdicts = await self.bus.publish_many(events)
        except (BusClosed, LogClosed):
            await self.opened.wait()
            return
        for event, verdict in zip(events, verdicts, strict=True):
            self._note_published(event, verdict)

    async def _publisher(self, n: int) -> None:
        rng = random.Random(f"publisher {self.seed} {self.lives} {n}")
        pause_s = rng.choice((0.0, 0.01, 0.1))
        while self.numbers < self.plan.events:
            await asyncio.sleep(pause_s * rng.random())
            topics = self.plan.topics
            if rng.random() < 0.2:
                await self._publish_many([rng.choice(topics) for _ in range(rng.randint(1, 4))])
            else:
                await self._publish(rng.choice(topics), rng.choice((None, None, None, 0.5)))
        self.left -= 1

    # Handlers

    def _handler(self, group: GroupPlan) -> Callable[[Any], Awaitable[Any]]:
        async def one(event: ReceivedEvent) -> object:
            return (await self._handle(group, [event]))[0]

        async def several(events: list[ReceivedEvent]) -> object:
            return await self._handle(group, events)

        return one if group.batch_count_max == 1 else several

    async def _handle(self, group: GroupPlan, events: list[ReceivedEvent]) -> list[object]:
        """Take events in, behave as the seed wants for each, and tell the book what is answered."""
        begun = self.clock.monotonic()
        for event in events:
            self.loop.note(f"{'/'.join(group.key)} gets {event.offset} for the {event.attempt}th time")
        try:
            self.book.deliver(group.key, [(event.offset, event.attempt, event.meta.space_id) for event in events])
        except Broken as error:
            self.fail(error)
        answers: list[object] = []
        try:
            for event in events:
                answers += [await self._behave(group, event)]
        finally:
            is_late = group.deadline_s is not None and self.clock.monotonic() - begun > group.deadline_s * 0.9
            for at, event in enumerate(events):
                is_acknowledged = len(answers) == len(events) and isinstance(answers[at], Ack)
                self.loop.note(f"{'/'.join(group.key)} answers {event.offset}: {is_acknowledged}")
                self.book.leave(
                    group.key, event.offset, event.attempt, is_acknowledged=is_acknowledged, is_late=is_late
                )
        return answers

    async def _behave(self, group: GroupPlan, event: ReceivedEvent) -> object:
        rng = random.Random(f"handler {self.seed} {group.key} {event.payload['n']}")
        kind = rng.choice(self.plan.behaviours) if self.plan.behaviours and rng.random() < group.trouble else "ack"
        is_failing = event.attempt <= rng.randint(1, 4)
        match kind:
            case "fail" if is_failing:
                raise RuntimeError("not yet")
            case "nack" if is_failing:
                return Nack("not yet", delay_s=30.0 if self.plan.profile == "retries" else rng.random() / 4)
            case "odd" if is_failing:
                await asyncio.sleep(0)
                raise rng.choice(
                    (
                        GeneratorExit("odd"),
                        OddError("odd"),
                        BaseExceptionGroup("odd", [OddError("odd")]),
                        StopAsyncIteration(),
                    )
                )
            case "hang":
                await asyncio.get_running_loop().create_future()
            case "slow":
                await asyncio.sleep(rng.choice((0.0, 0.01, 0.1)))
            case "cancelled" if is_failing:
                awaited = asyncio.get_running_loop().create_future()
                awaited.cancel()
                await awaited
            case "swallow":
                try:
                    await asyncio.sleep((group.deadline_s or 0.01) * 2)
                except asyncio.CancelledError:
                    self.loop.note("cancellation swallowed")
            case "publish" if self.numbers < self.plan.events + 20:
                await self._publish(rng.choice(self.plan.topics))
            case "spawn" if self.numbers < self.plan.events + 60 and group.key[0] == self.plan.topics[0]:
                task = asyncio.create_task(self._publish_on(self.plan.topics[-1], 15), name="started by a handler")
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        return Ack()

    async def _publish_on(self, topic: str, count: int) -> None:
        await asyncio.sleep(0.001)  # until the handler has answered, a task of its own counts as the handler
        for _ in range(count):
            await self._publish(topic)

    # The operator

    async def _compactor(self) -> None:
        """Whoever keeps the log small: beside all else, again and again."""
        rng = random.Random(f"compactor {self.seed} {self.lives}")
        operations = [op for op in ("compact", "retention") if op in self.plan.operations]
        while operations and self.left:
            await asyncio.sleep(rng.choice((0.001, 0.01, 0.05)))
            if self.is_open:
                await self._run_retention(rng.choice(operations), dry_run=rng.random() < 0.7)

    async def _run_retention(self, operation: str, *, dry_run: bool) -> None:
        moves = self.book.moves
        try:
            plan: RetentionPlan = (
                await self.retention.run() if operation == "retention" else await self.bus.compact(dry_run=dry_run)
            )
        except (BusClosed, LogClosed):
            return
        if plan.drops:
            letters = self.letters()
            if moves == self.book.moves:  # a plan speaks of the moment it was made; what goes is looked at again
                self.book.check_plan(plan, letters)
            for topic, info in self.log.topics().items():
                self.book.check_kept(topic, info.first_offset, letters)

    async def _operator(self, n: int) -> None:
        rng = random.Random(f"operator {self.seed} {self.lives} {n}")
        groups = self.plan.groups[n :: self.plan.operators]
        operations = [op for op in self.plan.operations if op not in ("compact", "retention")]
        while operations and groups and self.operator_turns > 0:
            self.operator_turns -= 1
            await asyncio.sleep(rng.choice((0.001, 0.02, 0.2)))
            group = rng.choice(groups)
            operation = rng.choice(operations)
            self.loop.note(f"{operation} {group.key}")
            match operation:
                case "redrive":
                    await self._redrive(group.key[0])
                case "drop_letter":
                    letters = await self.bus.dead_letters(group.key[0])
                    if letters:
                        await self.bus.drop_dead_letters(group.key[0], [rng.choice(letters).id])
                case "seek":
                    await self._seek(group, rng)
                case "pause":
                    await self.bus.pause(*group.key)
                    await asyncio.sleep(rng.choice((0.001, 0.1)))
                    await self.bus.resume(*group.key)
                case "leave":
                    async with self._soon("unsubscribing", CLOSE_S + 5):
                        await self.bus.unsubscribe(self.subscriptions[group.key], CLOSE_S)
                    await asyncio.sleep(rng.choice((0.0, 0.1)))
                    await self._subscribe(group)
                case "reopen":
                    await self._close()
                    await self._open()
        self.left -= 1

    async def _redrive(self, topic: str) -> None:
        chosen = await self.bus.redrive(topic, dry_run=True)
        self.book.asked_again |= {((topic, letter.group), letter.offset) for letter in chosen}
        if chosen:
            await self.bus.redrive(topic, [letter.id for letter in chosen])

    async def _seek(self, group: GroupPlan, rng: random.Random) -> None:
        info = self.log.topics().get(group.key[0])
        if info is None:
            return
        offset = rng.randint(info.first_offset, info.next_offset)
        self.book.begin_move(group.key, offset)
        try:
            async with self._soon("seeking", 10 + 5):
                await self.bus.seek(*group.key, offset)
        except PositionTrimmed:  # compaction was quicker
            self.book.end_move(group.key, is_moved=False)
            return
        self.book.end_move(group.key, is_moved=True)
