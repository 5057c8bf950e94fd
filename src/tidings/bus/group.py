"""
One group of a topic at work: what is taken in, what is being handled, what is to be tried again.

Workers are long-lived tasks that take the next event and await its handler; nothing is made per event but the event itself.
The group never holds more than ``max_inflight`` events that are not acknowledged, whatever the topic holds.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from tidings.core.clock import Clock, format_utc, within
from tidings.core.events import Event
from tidings.log.record import Record

from .cancelling import is_being_cancelled
from .claims import Claims
from .cursor import Cursor
from .deadlines import Deadlines
from .errors import HandlerTimeout, InvalidAnswer
from .events import Ack, Nack, ReceivedEvent
from .lane import Lane
from .letters import Attempt, DeadLetter, Reason
from .pipeline import Denied, Expired, Pipeline, Quarantined
from .retry import next_retry
from .settings import SubscriptionSettings
from .texts import cut, text_of

__all__ = ["HANDLING", "Group", "GroupStats", "ProcessEnded"]

logger = logging.getLogger(__name__)

HANDLING: Final[contextvars.ContextVar[str | None]] = contextvars.ContextVar("tidings_handling", default=None)
"""The group whose handler this code runs in. A handler's own publishing must not wait for handlers."""

_TURN: Final = 64
"""A worker that never had to wait lets others run after this many events."""

_ALONE_WAIT_S_MAX: Final = 30.0
"""How long a suspect waits for others to be done with. One of them may hang, and must not hold up the rest for good."""
_UNWIND_S_MAX: Final = 1.0
"""How long closing waits for a handler that was told to stop, and does not."""

Bury = Callable[[Record, str, BaseException, list[Attempt], Reason], Awaitable[DeadLetter]]


class GroupStats:
    """What a group has done since it started."""

    __slots__ = ("acked", "buried", "delivered", "expired", "failed", "retried", "timed_out")

    def __init__(self) -> None:
        self.delivered = self.acked = self.failed = self.retried = 0
        self.buried = self.expired = self.timed_out = 0


class ProcessEnded(Exception):
    """Stands for the failure that ended the process."""

    def __str__(self) -> str:
        return "the process ended while the event was being handled"


class WorkerStopped(Exception):
    """Stands for what cancelled a worker from outside."""

    def __str__(self) -> str:
        return "a worker was cancelled by somebody else"


class Group:
    """The runtime of one subscription."""

    def __init__(
        self,
        *,
        topic: str,
        name: str,
        pipeline: Pipeline,
        settings: SubscriptionSettings,
        key_of: Callable[[Event], object] | None,
        cursor: Cursor,
        attempts: dict[int, int],
        claims: Claims,
        clock: Clock,
        rng: random.Random,
        bury: Bury,
        on_change: Callable[[Group], None],
        ack_deadline_ms: int | None,
        priority: int = 5,
        alone: asyncio.Lock,
    ) -> None:
        self.topic = topic
        self.name = name
        self.settings = settings
        self.cursor = cursor
        self.attempts = attempts
        """Deliveries so far, of events that failed at least once."""
        self.stats = GroupStats()
        self.position = cursor.committed + 1
        """The next offset to take in."""
        self.pending = 0
        """Events taken in and not acknowledged."""
        self.is_live = False
        """Whether the group keeps up with its topic and is fed from memory."""
        self.is_paused = False
        self._may_go_on = asyncio.Event()
        """Not paused; or closing, which waits for nothing."""
        self._may_go_on.set()
        self.is_change_wanted = True
        """Whether the next acknowledgement is to be told: nobody was since the place was last stored, or a publisher waits."""
        self.problem: BaseException | None = None
        self._pipeline = pipeline
        self._key_of = key_of
        self._claims = claims
        self._clock = clock
        self._rng = rng
        self._bury = bury
        self._on_change = on_change
        self._alone = alone
        """Held by the one suspect of the whole bus that is being handled. Were two at work when the process ends, the
        innocent one would be counted for the other, time after time, and end as a dead letter beside it."""
        self._suspects = set(attempts)
        """Events that were counted before this process: one of them may have ended the last."""
        self._deadline_ms = ack_deadline_ms
        is_ordered = settings.order == "strict"
        self._worker_count = 1 if is_ordered else settings.workers
        self._retries_in_place = settings.order != "none"
        lanes = self._worker_count if settings.order == "key" else 1
        self._lanes = [Lane(by_priority=settings.by_priority, priority=priority) for _ in range(lanes)]
        self._histories: dict[int, list[Attempt]] = {}
        self._room_wanted: list[tuple[int, asyncio.Future[None]]] = []
        self._deadlines = Deadlines(clock, ack_deadline_ms, self._count_timeout)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._workers: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._closing: asyncio.Future[None] | None = None
        self._handling = 0

    # Taking in

    @property
    def room(self) -> int:
        """How many more events the group may take in."""
        return self.settings.max_inflight - self.pending

    def offer(self, records: Sequence[Record]) -> bool:
        """Take in what was just committed, if there is room for all of it; whether it was taken."""
        if records[0].offset < self.position:
            # Catching up, the group read further than the feed had, and joined it from ahead.
            records = [record for record in records if record.offset >= self.position]
            if not records:
                return True
        if len(records) > self.room:
            self.is_live = False
            return False
        self.take(records)
        return True

    def take(self, records: Sequence[Record]) -> None:
        """Take in the records from ``position`` on. What is acknowledged already is passed over."""
        if records[-1].offset - self.position >= len(records):
            self._skip_gaps(records)
        self.position = records[-1].offset + 1
        if self.cursor.highest >= records[0].offset:
            records = [record for record in records if record.offset not in self.cursor]
        self.pending += len(records)
        if len(self._lanes) == 1:
            self._lanes[0].extend(records)
            return
        for record in records:
            self._lane_of(record).extend((record,))

    def _skip_gaps(self, records: Sequence[Record]) -> None:
        """Offsets that hold nothing are done with: retention dropped them, or the engine left them out."""
        expected = self.position
        for record in records:
            if record.offset > expected:
                self.cursor.skip(expected, record.offset - 1)
            expected = record.offset + 1

    def _lane_of(self, record: Record) -> Lane:
        key: object = record.meta.space_id
        if self._key_of is not None:
            try:
                key = self._key_of(ReceivedEvent(record, self.name, 1))
            except Exception:
                # The feed serves other groups too, and must go on. The event keeps an order: that of its space.
                logger.exception("group %s: no key for the event at offset %d", self.name, record.offset)
        return self._lanes[zlib.crc32(repr(key).encode()) % len(self._lanes)]

    async def wait_for_room(self, count: int) -> None:
        """Wait until ``count`` more events may be taken in; or half of what the window has for others than those that failed."""
        while self.room < self._enough(count):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room_wanted.append((count, turn))
            await turn

    def _enough(self, count: int) -> int:
        # What waits for a retry may do so for long, and must not hold up the rest.
        return min(count, max(1, (self.settings.max_inflight - len(self.attempts)) // 2))

    # Working

    def start(self) -> None:
        """Start the workers. What a crash left over is counted first."""
        self._claims.begin(self._worker_count * self.settings.batch_count_max)
        for slot in range(self._worker_count):
            lane = self._lanes[slot % len(self._lanes)]
            worker = asyncio.create_task(self._work(slot, lane), name=f"{self.topic}/{self.name}#{slot}")
            worker.add_done_callback(self._note_end)
            self._workers.append(worker)
        if self._deadline_ms is not None:
            self._spawn(self._deadlines.watch(self._workers, self._deadline_ms))

    def _count_timeout(self) -> None:
        self.stats.timed_out += 1

    def _note_end(self, worker: asyncio.Task[None]) -> None:
        error: BaseException | None = WorkerStopped() if worker.cancelled() else worker.exception()
        if error is not None and not (self._is_closing and worker.cancelled()):
            self.problem = error
            logger.error("a worker of group %s of topic %s ended: %s", self.name, self.topic, text_of(error))

    async def _work(self, slot: int, lane: Lane) -> None:
        HANDLING.set(self.name)
        take, clear = self._claims.taker(slot), self._claims.clear
        while not self._is_closing:
            if not lane.items or self.is_paused:
                await lane.wait()
                continue
            self._handling += 1
            try:
                if self.attempts or self._deadline_ms is not None:
                    await self._deliver(slot, lane.pop())
                else:
                    failed = await self._run_on(lane, take)
                    clear(slot)
                    if failed is not None:
                        await self._conclude(slot, *failed)
            except asyncio.CancelledError:
                clear(slot)
                raise
            finally:
                self._handling -= 1
            # Whatever else a handler raises (``SystemExit``) ends the process: the claim stays, and counts.
            if lane.items:
                await asyncio.sleep(0)

    async def _run_on(self, lane: Lane, take: Callable[[int, int], object]) -> tuple[Record, object] | None:
        """
        Hand out events until one is not acknowledged, the lane is empty, or it is others' turn: what ``_deliver`` comes
        to while nothing has failed. A busy group spends its time here.

        The next claim takes the place of the last; so a process that is killed between two events leaves a claim of one
        that it has handled. That counts an attempt that there was.
        """
        items, name, pipeline, stats, ack = lane.items, self.name, self._pipeline, self.stats, self.cursor.ack
        handler, run, is_bare = pipeline.handler, pipeline.run, pipeline.is_bare_for_good
        pop = items.popleft if isinstance(items, deque) else lane.pop
        for _ in range(_TURN):
            if not items or self.attempts or self.is_paused or self._is_closing:
                return None
            record = pop()
            offset = record.offset
            take(offset, 1)
            stats.delivered += 1
            event = ReceivedEvent(record, name, 1)
            try:
                is_plain = record.known_plain or record.is_plain
                answer = await (handler(event) if is_bare and is_plain else run(event))
            except (asyncio.CancelledError, Exception) as error:
                if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                    raise
                return record, error  # whatever a handler raises is a failed attempt
            if type(answer) is not Ack:
                return record, answer
            # As in ``_done``, of an event that has not failed.
            ack(offset)
            stats.acked += 1
            self.pending -= 1
            if self._room_wanted:
                self._wake_for_room()
            if self.is_change_wanted:
                self._on_change(self)
        return None

    async def _conclude(self, slot: int, record: Record, given: object) -> None:
        """Bring a first attempt to its end."""
        answer = self._judge(given)
        if isinstance(answer, Ack):
            self._done(record.offset)
            return
        delay_s = await self._failed(record, 1, answer)
        if delay_s is not None and await self._rest(delay_s):
            await self._deliver(slot, record)

    async def _rest(self, delay_s: float) -> bool:
        """
        Wait between two attempts in place, and for as long as the group is paused; ``False`` if it closes, which does not
        wait for this.
        """
        if self._is_closing:
            return False
        self._closing = self._closing or asyncio.get_running_loop().create_future()
        await within(self._clock, delay_s, self._closing)
        await self._may_go_on.wait()
        return not self._is_closing

    async def _wait_to_be_alone(self) -> bool:
        if not self._alone.locked():
            return await self._alone.acquire()
        turn = asyncio.ensure_future(self._alone.acquire())
        try:
            await within(self._clock, _ALONE_WAIT_S_MAX, turn)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._alone.release()
            raise
        finally:
            turn.cancel()
        return turn.done() and not turn.cancelled()

    async def _deliver(self, slot: int, record: Record) -> None:
        offset = record.offset
        while True:
            attempt = 1 + self.attempts.get(offset, 0) if self.attempts else 1
            if attempt > self.settings.backoff.retries_max + 1:
                # Counted before a crash: it has had all its attempts, and may have ended the process in the last.
                await self._give_up(record, ProcessEnded(), "retries")
                return
            answer = self._judge(await self._try(slot, record, attempt))
            if isinstance(answer, Ack):
                self._done(offset)
                return
            delay_s = await self._failed(record, attempt, answer)
            if delay_s is None or not await self._rest(delay_s):  # in order: what comes after waits too
                return

    async def _try(self, slot: int, record: Record, attempt: int) -> object:
        """Hand an event out once; what became of it."""
        is_alone = record.offset in self._suspects and await self._wait_to_be_alone()
        try:
            self._claims.take(slot, record.offset, attempt)
            self.stats.delivered += 1
            answer = await self._deadlines.run(slot, self._pipeline.run(ReceivedEvent(record, self.name, attempt)))
        except asyncio.CancelledError:
            self._claims.clear(slot)
            raise
        finally:
            if is_alone:
                self._alone.release()
        self._claims.clear(slot)
        return answer

    def _judge(self, answer: object) -> Ack | BaseException | Nack:
        if isinstance(answer, Ack | Nack | BaseException):
            return answer
        if answer is None and self.settings.none_is_ack:
            return Ack()
        return InvalidAnswer(answer)

    def _done(self, offset: int) -> None:
        """The group is through with an offset."""
        self.cursor.ack(offset)
        if self.attempts:
            self.attempts.pop(offset, None)
            self._histories.pop(offset, None)
            self._suspects.discard(offset)
        self.stats.acked += 1
        self.pending -= 1
        if self._room_wanted:
            self._wake_for_room()
        if self.is_change_wanted:
            self._on_change(self)

    def _wake_for_room(self) -> None:
        room = self.room
        still: list[tuple[int, asyncio.Future[None]]] = []
        for count, turn in self._room_wanted:
            if turn.done():
                continue
            if self._enough(count) <= room:
                turn.set_result(None)
            else:
                still.append((count, turn))
        self._room_wanted = still

    async def _failed(self, record: Record, attempt: int, answer: BaseException | Nack) -> float | None:
        """
        Count a failure. Either the event is finished with, or it comes again: after the delay returned, in place; or,
        if ``None`` is returned, by itself.
        """
        error = RuntimeError(cut(answer.reason)) if isinstance(answer, Nack) else answer
        if isinstance(error, Expired):
            await self._expire(record, error)
            return None
        if isinstance(error, Denied | Quarantined):
            await self._give_up(record, error, "denied" if isinstance(error, Denied) else "quarantined")
            return None
        offset = record.offset
        self.stats.failed += 1
        self.attempts[offset] = attempt
        if self._room_wanted:
            self._wake_for_room()
        history = self._histories.setdefault(offset, [])
        history.append(Attempt(format_utc(self._clock.now_ns()).decode(), text_of(error)))
        self._on_change(self)
        wish = answer.delay_s if isinstance(answer, Nack) else None
        retry = next_retry(self.settings.backoff, attempt, self._rng, wish)
        if retry is None:
            await self._give_up(record, error, "retries")
            return None
        self.stats.retried += 1
        if self._retries_in_place:
            return retry.delay_s
        self._spawn(self._come_again(record, retry.delay_s))
        return None

    async def _come_again(self, record: Record, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self._lanes[0].extend((record,))

    async def _expire(self, record: Record, error: Expired) -> None:
        self.stats.expired += 1
        if error.is_dead_letter:
            await self._give_up(record, error, "expired")
        else:
            self._done(record.offset)

    async def _give_up(self, record: Record, error: BaseException, reason: Reason) -> None:
        """The event becomes a dead letter; only when that is stored does the cursor pass it."""
        told = self._histories.get(record.offset, [])
        untold = Attempt("", "counted by a process that ended before the event was done with")
        history = [untold] * (self.attempts.get(record.offset, 0) - len(told)) + told
        await self._bury(record, self.name, error, history, reason)
        self.stats.buried += 1
        self._done(record.offset)

    async def redrive(self, record: Record, attempt: int, *, is_suspect: bool = False) -> BaseException | None:
        """
        Try a dead letter once more, beside the group's own work; the error if it fails again.

        One that may have ended the process is tried while no other suspect is, whom its end would be counted for.
        """
        is_alone = is_suspect and await self._wait_to_be_alone()
        try:
            return await self._redrive(record, attempt)
        finally:
            if is_alone:
                self._alone.release()

    async def _redrive(self, record: Record, attempt: int) -> BaseException | None:
        HANDLING.set(self.name)
        handing_out = asyncio.ensure_future(self._hand_out(ReceivedEvent(record, self.name, attempt)))
        try:
            if self._deadline_ms is not None and not await within(self._clock, self._deadline_ms / 1000, handing_out):
                self.stats.timed_out += 1
                return HandlerTimeout(self._deadline_ms)
            answer = self._judge(await handing_out)
        except (asyncio.CancelledError, Exception) as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            return error  # whatever a handler raises is a failed attempt
        finally:
            handing_out.cancel()
        if isinstance(answer, Ack):
            return None
        return RuntimeError(cut(answer.reason)) if isinstance(answer, Nack) else answer

    async def _hand_out(self, event: ReceivedEvent) -> object:
        """One attempt of a re-drive, whose age does not count."""
        return await self._pipeline.run(event, is_redrive=True)

    # Stopping

    def pause(self) -> None:
        """Hand out nothing more; what is being handled is finished."""
        self.is_paused = True
        if not self._is_closing:
            self._may_go_on.clear()

    def resume(self) -> None:
        """Go on handing out."""
        self.is_paused = False
        self._may_go_on.set()
        for lane in self._lanes:
            lane.wake(len(lane.items))

    async def close(self, timeout_s: float) -> None:
        """Let handlers that are at work finish, but not for longer than this; what is not acknowledged comes again."""
        self._is_closing = self._deadlines.is_closing = True
        self._may_go_on.set()
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(None)
        for task in list(self._tasks):
            task.cancel()
        for lane in self._lanes:
            lane.wake_all()
        if not await self._ended(timeout_s):
            for worker in self._workers:
                worker.cancel()
            if not await self._ended(_UNWIND_S_MAX):
                logger.error("group %s of topic %s: a handler does not stop, and is left behind", self.name, self.topic)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pipeline.close()
        self._claims.close()

    async def _ended(self, timeout_s: float) -> bool:
        """Whether all workers end within this time."""
        if all(worker.done() for worker in self._workers):
            return True
        waiting = asyncio.ensure_future(asyncio.wait(self._workers))
        try:
            await within(self._clock, timeout_s, waiting)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return all(worker.done() for worker in self._workers)

    @property
    def filtered_count(self) -> int:
        """How many events its filters kept from the handler since it started."""
        return self._pipeline.filtered_count

    @property
    def handling(self) -> int:
        """How many events are with a handler right now."""
        return self._handling

    def _spawn(self, job: Any) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
