"""
One group of a topic at work: what is taken in, what is being handled, what is to be tried again.

Workers are long-lived tasks that take the next event that a member has a free slot for, and await the member's answer. An event
waits in its lane until then; so the order of the lane is the order in which events are handed out, however many members there are.
A claim is made, and the deadline begins, when an event is handed over.
The window is what a group holds in memory for its workers: at most ``max_inflight`` events and ``max_inflight_bytes`` of
payloads, whatever the topic holds. An event leaves it when it is done with, and when it is to be tried again later.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, cast

from tidings.core.clock import Clock, format_utc, within
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.core.tasks import cancel_and_wait
from tidings.log.errors import LogError
from tidings.log.record import Record

from .errors import PayloadMismatch
from .events import Ack, Nack, ReceivedEvent
from .handlers import HANDLING, AsyncHandler, HandlerTasks, NotTried, is_failure, judged
from .members import Handover, LocalMember, Member, Members
from .pipeline import DeliveryPipeline, Denied, Expired, Quarantined
from .retry import WaitingRetries, next_retry_s
from .settings import SubscriptionSettings
from .store import Attempt, Claims, Cursor, DeadLetter, Reason
from .texts import FailureLog, cut, text_of
from .worker import Lane, Worker, WorkerStopped

logger = logging.getLogger(__name__)

_ALONE_WAIT_S_MAX: Final = 30.0
"""How long a suspect waits for others to be done with. One of them may hang, and must not hold up the rest for good."""
_REPLACE_WAIT_S: Final = 1.0
_READ_AGAIN_WAIT_S: Final = 1.0
_UNWIND_S_MAX: Final = 1.0
"""How long closing waits for a handler that was told to stop, and does not."""

_REASONS: Final[dict[type[BaseException], Reason]] = {
    Denied: "denied",
    Quarantined: "quarantined",
    PayloadMismatch: "invalid",
}
"""What is not tried again, as nothing would change, and the reason in its dead letter."""

AddDeadLetter = Callable[[Record, str, BaseException, list[Attempt], Reason], Awaitable[DeadLetter]]


async def _no_handler(_: object) -> object:
    """Of a group that members share: what is handed out goes to one of them."""
    raise NotTried


class GroupStats:
    """What a group has done since it started."""

    __slots__ = ("acked", "dead_lettered", "delivered", "expired", "failed", "retried", "timed_out")

    def __init__(self) -> None:
        self.delivered = self.acked = self.failed = self.retried = 0
        self.dead_lettered = self.expired = self.timed_out = 0


class ProcessEnded(Exception):
    """Stands for the failure that ended the process."""

    def __str__(self) -> str:
        return "the process ended while the event was being handled"


class Group:
    """The runtime of one subscription."""

    def __init__(
        self,
        *,
        topic: str,
        name: str,
        members: Members,
        pipeline: DeliveryPipeline,
        settings: SubscriptionSettings,
        key_of: Callable[[Event], object] | None,
        cursor: Cursor,
        attempts: dict[int, int],
        claims: Claims,
        clock: Clock,
        rng: random.Random,
        is_encrypted: Callable[[str], bool],
        dead_letter: AddDeadLetter,
        on_change: Callable[[Group], None],
        on_worker_end: Callable[[Group, Worker], None],
        ack_deadline_ms: int | None,
        priority: int = 5,
        alone: asyncio.Lock,
        read: Callable[[int], Awaitable[Record | None]],
    ) -> None:
        self.topic = topic
        self.name = name
        self.members = members
        self._handler = members.sole.handler if members.sole is not None else _no_handler
        self.settings = settings
        self.cursor = cursor
        self.attempts = attempts
        """Deliveries so far, of events that failed at least once."""
        self.stats = GroupStats()
        self.position = cursor.committed + 1
        """The next offset to take in."""
        self.pending = 0
        """Events in the window: with a worker, or waiting for one."""
        self.pending_bytes = 0
        """The size of their payloads."""
        self._due = 0
        """Events that are to be tried again now, and wait for room in the window."""
        self._due_bytes = 0
        """Their size, as far as it is known."""
        self.is_stalled = False
        """Whether publishers have stopped waiting for it, until it has caught up."""
        self.set_at = ""
        """When its position was last set, by creating or moving it."""
        self.live_from = 0.0
        """Time of the monotonic clock before which it is not live again."""
        self.is_live = False
        """Whether the group keeps up with its topic and is fed from memory."""
        self.is_paused = False
        self._may_go_on = asyncio.Event()
        """Not paused; or closing, which waits for nothing."""
        self._may_go_on.set()
        self.is_change_wanted = True
        """Whether the next acknowledgement is to be told: nobody was since the place was last stored, or a publisher waits."""
        self.feed_problem: BaseException | None = None
        """Why it is not fed any more, if so."""
        self.worker_problem: BaseException | None = None
        """What ended a worker, until the group has handled something since."""
        self.pipeline = pipeline
        self._key_of = key_of
        self.claims = claims
        self._clock = clock
        self._rng = rng
        self._dead_letter = dead_letter
        self.on_change = on_change
        self._on_worker_end = on_worker_end
        self._alone = alone
        """Held by the one suspect of the whole bus that is being handled. Were two at work when the process ends, the
        innocent one would be counted for the other, time after time, and end as a dead letter beside it."""
        self._suspects = set(attempts)
        """Events that were counted before this process: one of them may have ended the last."""
        self.deadline_ms = ack_deadline_ms
        self._worker_count = 1 if settings.order == "strict" else settings.workers
        self.is_ordered = settings.order != "none"
        """Whether what comes after an event in its lane waits until that is done with. Each lane has one worker then."""
        lanes = self._worker_count if settings.order == "key" else 1
        self._lanes = [Lane(by_priority=settings.by_priority, priority=priority) for _ in range(lanes)]
        self._histories: dict[int, list[Attempt]] = {}
        self._failures = FailureLog(topic, name, clock, is_encrypted)
        self._room_wanted: list[tuple[int, Callable[[], bool], asyncio.Future[None]]] = []
        """Who waits for room: with how many events in the window it is worth looking, and whether there is enough."""
        self.wake_at = -1
        """With so many events in the window, or fewer, somebody who waits may go on; -1 if nobody waits."""
        self._read = read
        self._retries = WaitingRetries(clock, self._take_back)
        self._handler_tasks = HandlerTasks(clock, ack_deadline_ms, self._count_timeout)
        self._wake_from = 0
        """The lane that is woken first, when there is room for less than all of them have."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._workers: list[Worker] = []
        self.is_closing = False
        self.is_closed = False
        self._closing: asyncio.Future[None] | None = None

    @property
    def problem(self) -> str | None:
        """Why it is stalled, or was until a moment ago."""
        if self.is_stalled:
            return "its window stayed full for too long; publishers do not wait for it"
        error = self.feed_problem or self.worker_problem
        return None if error is None else text_of(error)

    # Taking in

    @property
    def room(self) -> int:
        """How many more events fit into the window. Of what size they are is not known yet: as those that are in it."""
        room = self.settings.max_inflight - self.pending
        if self.pending_bytes:
            bytes_left = max(0, self.settings.max_inflight_bytes - self.pending_bytes)
            room = min(room, bytes_left * self.pending // self.pending_bytes)
        return room

    @property
    def room_for_new(self) -> int:
        """The same for events that were not tried yet: those that are due again come first."""
        return self.room - self._due

    @property
    def progress(self) -> int:
        """How many events have left the window so far."""
        return self.stats.acked + (0 if self.is_ordered else self.stats.retried)

    @property
    def _takes_new(self) -> bool:
        return len(self._retries) < self.settings.waiting_retries_max

    def fitting(self, records: Sequence[Record]) -> int:
        """How many of these new records, from the first on, the window takes now, beside one that is due again."""
        settings = self.settings
        bytes_left = settings.max_inflight_bytes - self.pending_bytes - self._due_bytes
        places = max(0, settings.max_inflight - self.pending - self._due)
        sizes = [len(record.payload_json) for record in records[:places]]
        if sum(sizes) <= bytes_left:
            return len(sizes)
        count = 0
        for size in sizes:
            bytes_left -= size
            if bytes_left < 0 and (count or self.pending or self._due):
                break
            count += 1
        return count

    def offer(self, records: Sequence[Record], size_bytes: int) -> bool:
        """Take in what was just committed, of this size, if there is room for all of it; whether it was taken."""
        if records[0].offset < self.position:
            # Catching up, the group read further than the feed had, and joined it from ahead.
            records = [record for record in records if record.offset >= self.position]
            if not records:
                return True
        settings = self.settings
        is_fitting = (
            len(records) <= settings.max_inflight - self.pending - self._due
            and size_bytes <= settings.max_inflight_bytes - self.pending_bytes - self._due_bytes
        )
        if not self._takes_new or not (is_fitting or self.fitting(records) == len(records)):
            self.is_live = False
            return False
        self.take(records)
        return True

    def take(self, records: Sequence[Record]) -> None:
        """Take in the records from ``position`` on. What is acknowledged already is skipped."""
        if records[-1].offset - self.position >= len(records):
            self._skip_gaps(records)
        self.position = records[-1].offset + 1
        if self.cursor.highest >= records[0].offset:
            records = [record for record in records if record.offset not in self.cursor]
        self.pending += len(records)
        self.pending_bytes += sum([len(record.payload_json) for record in records])
        if self.pending_bytes > self.settings.max_inflight_bytes // 2:
            self.on_change(self)  # publishers count events; there may be room for fewer of them than they found
        if len(self._lanes) == 1:
            self._put(self._lanes[0], records)
            return
        for record in records:
            self._put(self._lane_of(record), (record,))

    def _put(self, lane: Lane, records: Sequence[Record]) -> None:
        lane.add(records)
        if self.members.sole is not None:
            lane.wake(len(records))
        else:
            self._wake_lane(lane, self.members.room)

    def wake(self) -> None:
        """A member has more room, or may see more: workers that have something for it go on."""
        room, count = self.members.room, len(self._lanes)
        for step in range(count):
            if room <= 0:
                return
            at = (self._wake_from + step) % count
            if woken := self._wake_lane(self._lanes[at], room):
                room -= woken
                self._wake_from = (at + 1) % count

    def _wake_lane(self, lane: Lane, room: int) -> int:
        """Wake as many workers of a lane as there is something to do for; how many were asleep."""
        if not lane or room <= 0 or (self.is_ordered and not self.members.could_take(lane.first)):
            return 0
        return lane.wake(min(room, len(lane)))

    def _skip_gaps(self, records: Sequence[Record]) -> None:
        """Offsets that hold nothing are done with: retention dropped them, or the engine left them out."""
        expected = self.position
        for record in records:
            if record.offset > expected:
                self.cursor.skip(expected, record.offset - 1)
            expected = record.offset + 1

    def _lane_of(self, record: Record) -> Lane:
        if len(self._lanes) == 1:
            return self._lanes[0]
        if self._key_of is not None:
            try:
                return self._lane_for(self._key_of(ReceivedEvent(record, self.name, 1)))
            except BaseException as error:
                if not is_failure(error):
                    raise
                # The feed serves other groups too, and must go on. The event keeps an order: that of its space.
                logger.exception("group %s: no key for the event at offset %d", self.name, record.offset)
        return self._lane_for(record.meta.space_id)

    def _lane_for(self, key: object) -> Lane:
        return self._lanes[zlib.crc32(_key_text(key).encode(errors="backslashreplace")) % len(self._lanes)]

    async def wait_for_room(self, count: int) -> None:
        """Wait until there is room for that many."""
        await self._wait_until(self._enough(count), lambda: self.has_room(count))

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more events may be taken in, or half a window of them."""
        return self._takes_new and self.room_for_new >= self._enough(count)

    def _enough(self, count: int) -> int:
        return min(count, max(1, self.settings.max_inflight // 2))

    async def wait_until_it_fits(self, record: Record) -> None:
        """Wait until this record may be taken in."""
        await self._wait_until(1, lambda: self.fitting((record,)) > 0)

    def count_behind(self, end: int) -> int:
        """How many events before this offset are not handled yet."""
        return sum(offset not in self.cursor for offset in range(self.cursor.committed + 1, end))

    async def wait_until_handled(self, end: int) -> None:
        """Wait until every event before this offset is acknowledged or dead-lettered."""
        await self._wait_until(0, lambda: self.cursor.committed + 1 >= end)

    async def _wait_until(self, count: int, is_ready: Callable[[], bool]) -> None:
        """Wait until it is ready, which it is not before ``count`` more events fit."""
        pending_max = self.settings.max_inflight - count
        while not is_ready():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room_wanted.append((pending_max, is_ready, waiter))
            self.wake_at = max(self.wake_at, pending_max)
            await waiter

    # Working

    def start(self) -> None:
        """Start the workers. What a crash left over is counted first."""
        self.members.group = self
        self.claims.begin(self._worker_count * self.settings.batch_count_max)
        for slot in range(self._worker_count):
            worker = Worker(self, slot, self._lanes[slot % len(self._lanes)])
            worker.start()
            self._workers.append(worker)
        if self.deadline_ms is not None:
            self._spawn(self._handler_tasks.watch(self.deadline_ms))
        if not self.is_ordered:
            self._spawn(self._retries.run())

    def _count_timeout(self) -> None:
        self.stats.timed_out += 1

    def worker_ended(self, worker: Worker) -> None:
        """A worker's task has ended. Unless that was meant, another one takes its place."""
        task = worker.task
        error: BaseException | None = WorkerStopped() if task.cancelled() else task.exception()
        if self.is_closing or error is None or isinstance(error, SystemExit | KeyboardInterrupt):
            return
        if self.worker_problem is None:  # else it was told, and nothing was handled since
            logger.error(
                "a worker of group %s of topic %s ended, and is replaced: %s",
                self.name,
                self.topic,
                text_of(error),
                exc_info=error,
            )
        self.worker_problem = error
        self._on_worker_end(self, worker)

    def replace(self, worker: Worker) -> None:
        """Start another task in the place of one that has ended."""
        if not self.is_closing:
            self._spawn(self._start_again(worker))

    async def _start_again(self, worker: Worker) -> None:
        if not worker.task.cancelled():  # a fault of ours: not to be repeated as fast as it can be
            await self._clock.sleep(_REPLACE_WAIT_S)
        if not self.is_closing:
            worker.start()

    async def rest(self, delay_s: float) -> None:
        """Wait between two attempts in place, and for as long as the group is paused; closing does not wait for this."""
        if not self.is_closing:
            await within(self._clock, delay_s, self._closed_soon())
            await self._may_go_on.wait()

    def _closed_soon(self) -> asyncio.Future[None]:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_future()
            if self.is_closing:
                self._closing.set_result(None)
        return self._closing

    async def alone_if_suspect(self, record: Record) -> bool:
        """Keep other suspects of the whole bus waiting while this one is handled, if it is one; whether they do."""
        return record.offset in self._suspects and await self._wait_to_be_alone()

    def no_longer_alone(self) -> None:
        """Other suspects may be handled."""
        self._alone.release()

    async def _wait_to_be_alone(self) -> bool:
        if not self._alone.locked():
            return await self._alone.acquire()
        acquiring = asyncio.ensure_future(self._alone.acquire())
        try:
            await within(self._clock, _ALONE_WAIT_S_MAX, acquiring)
        except asyncio.CancelledError:
            if acquiring.done() and not acquiring.cancelled():
                self._alone.release()
            raise
        finally:
            acquiring.cancel()
        return acquiring.done() and not acquiring.cancelled()

    async def is_used_up(self, record: Record) -> bool:
        """
        Whether an event has had all its attempts before it is handed out: it was counted before a crash, and may have ended
        the process in the last. It is a dead letter then.
        """
        if self.attempts.get(record.offset, 0) <= self.settings.backoff.retries_max:
            return False
        await self._give_up(record, ProcessEnded(), "retries")
        return True

    async def until_reached(self, member: Member, record: Record) -> None:
        """Wait until an event may be handed to a member. If it never may be, the group is stalled until it is closed."""
        try:
            waiting = member.reached(record.seq)
            if waiting is not None:
                await waiting
        except TidingsError as error:
            # Nobody can say any more who may see what. That is not the event's fault: it waits until the node starts anew.
            logger.error("group %s of topic %s is stalled: %s", self.name, self.topic, error)
            await self._closed_soon()
            raise NotTried from error

    def hand_out(
        self, events: Sequence[ReceivedEvent], handover: Handover | None, *, is_redrive: bool = False
    ) -> Coroutine[Any, Any, list[object]]:
        """What becomes of events that are handed out together; errors are values. Without a member, the group has one handler."""
        handler = handover or self._handler
        if self.deadline_ms is None and not is_redrive and (handover is None or not handover.member.is_local):
            return self.pipeline.run(events, handler)
        return self._hand_out_in_task(events, handler, None if handover is None else handover.member, is_redrive)

    async def _hand_out_in_task(
        self, events: Sequence[ReceivedEvent], handler: AsyncHandler, member: Member | None, is_redrive: bool
    ) -> list[object]:
        """The same, where the handler may have to be cancelled while the worker goes on."""
        outcome = await self._handler_tasks.run(self.pipeline.run(events, handler, is_redrive=is_redrive), member)
        return outcome if isinstance(outcome, list) else [outcome] * len(events)

    @property
    def direct_handler(self) -> AsyncHandler | None:
        """The handler, if one event at a time goes to it with nothing in between, unless the event may be too old."""
        is_direct = self.deadline_ms is None and self.settings.batch_count_max == 1 and self.pipeline.is_bare_for_good
        return self._handler if is_direct and self.members.sole is not None else None

    def withdraw(self, member: Member) -> None:
        """Take back, as not tried, what a local member is at."""
        self._handler_tasks.withdraw(member)

    async def conclude(self, event: ReceivedEvent, outcome: object, lane: Lane) -> float | None:
        """Count what became of an event of a lane; if it is to be tried again in place, after which delay."""
        answer = judged(outcome)
        if isinstance(answer, Ack):
            self.done(event.record)
            return None
        if isinstance(answer, NotTried):
            lane.hold(event.record)
            self.wake()
            return None
        return await self._failed(event.record, event.attempt, answer)

    def done(self, record: Record) -> None:
        """The group is through with an event of its window."""
        self.cursor.ack(record.offset)
        if self.attempts:
            self.forget_attempts(record.offset)
        self.stats.acked += 1
        self.pending -= 1
        self.pending_bytes -= len(record.payload_json)
        if self.pending <= self.wake_at:
            self.wake_for_room()
        if self.is_change_wanted:
            self.on_change(self)

    def forget_attempts(self, offset: int) -> None:
        """An event that failed before is done with."""
        self.attempts.pop(offset, None)
        self._histories.pop(offset, None)
        self._suspects.discard(offset)

    def _leave_window(self, record: Record) -> None:
        self.pending -= 1
        self.pending_bytes -= len(record.payload_json)
        if self.pending <= self.wake_at:
            self.wake_for_room()

    def wake_for_room(self) -> None:
        """There may be room: those who wait for it and have enough go on."""
        wanted, self._room_wanted = self._room_wanted, []
        for pending_max, is_ready, waiter in wanted:
            if waiter.done():
                continue
            if is_ready():
                waiter.set_result(None)
            else:
                self._room_wanted.append((pending_max, is_ready, waiter))
        self.wake_at = max((pending_max for pending_max, _, _ in self._room_wanted), default=-1)

    async def _failed(self, record: Record, attempt: int, answer: BaseException | Nack) -> float | None:
        """
        Count a failure. Either the event is finished with, or it comes again: after the delay returned, in place; or,
        if ``None`` is returned, by itself.
        """
        error = RuntimeError(cut(answer.reason)) if isinstance(answer, Nack) else answer
        if isinstance(error, Expired):
            await self._expire(record, error)
            return None
        if (reason := _REASONS.get(type(error))) is not None:
            await self._give_up(record, error, reason)
            return None
        offset = record.offset
        self.stats.failed += 1
        self.attempts[offset] = attempt
        history = self._histories.setdefault(offset, [])
        history.append(Attempt(format_utc(self._clock.now_ns()).decode(), text_of(error)))
        self.on_change(self)
        wish = answer.delay_s if isinstance(answer, Nack) else None
        delay_s = next_retry_s(self.settings.backoff, attempt, self._rng, wish)
        if delay_s is None:
            await self._give_up(record, error, "retries")
            return None
        self.stats.retried += 1
        self._failures.retried(record, attempt, error, delay_s)
        if self.is_ordered:
            return delay_s
        self._retries.add(offset, delay_s)
        self._leave_window(record)
        self.on_change(self)
        return None

    def _fits_what_is_due(self) -> bool:
        settings = self.settings
        bytes_left = settings.max_inflight_bytes - self.pending_bytes
        return not self.pending or (self.pending < settings.max_inflight and self._due_bytes <= bytes_left)

    async def _take_back(self, offset: int) -> None:
        """Take an event that is due again into the window, as soon as there is room."""
        self._due = 1
        try:
            await self._wait_until(1, lambda: self.room > 0)
            record = await self._read(offset)
            self.feed_problem = None
            if record is not None:
                # Only now is its size known, and others may have come in while it was read.
                self._due_bytes = len(record.payload_json)
                await self._wait_until(1, self._fits_what_is_due)
                self.pending += 1
                self.pending_bytes += self._due_bytes
                self._put(self._lanes[0], (record,))
                return
        except (LogError, OSError) as error:
            self.feed_problem = error
            logger.error("group %s of topic %s: offset %d cannot be read: %s", self.name, self.topic, offset, error)
            self._retries.add(offset, _READ_AGAIN_WAIT_S)
            return
        finally:
            self._due = self._due_bytes = 0
            self.wake_for_room()
        logger.error(
            "group %s of topic %s: offset %d was dropped before it was tried again", self.name, self.topic, offset
        )
        self.cursor.ack(offset)
        self.forget_attempts(offset)
        self.on_change(self)

    async def _expire(self, record: Record, error: Expired) -> None:
        self.stats.expired += 1
        if error.is_dead_letter:
            await self._give_up(record, error, "expired")
        else:
            self.done(record)

    async def _give_up(self, record: Record, error: BaseException, reason: Reason) -> None:
        """The event becomes a dead letter; only when that is stored does the cursor pass it."""
        told = self._histories.get(record.offset, [])
        untold = Attempt("", "counted by a process that ended before the event was done with")
        history = [untold] * (self.attempts.get(record.offset, 0) - len(told)) + told
        await self._dead_letter(record, self.name, error, history, reason)
        self._failures.dead_lettered(record, error, reason)
        self.stats.dead_lettered += 1
        self.done(record)

    async def redrive(
        self, record: Record, attempt: int, handover: Handover | None, *, is_suspect: bool = False
    ) -> BaseException | None:
        """
        Try a dead letter once more, beside the group's own work; the error if it fails again.

        One that may have ended the process is tried while no other suspect is, whom its end would be counted for.

        Args:
            handover: To the member that was chosen for it; ``None`` if the group has one handler.

        Raises:
            NotTried: The member gave it back, or the group is stalled and closes.
        """
        answer = judged(await self._redrive(ReceivedEvent(record, self.name, attempt), handover, is_suspect=is_suspect))
        if isinstance(answer, Ack):
            return None
        if isinstance(answer, NotTried):
            raise answer
        error = RuntimeError(cut(answer.reason)) if isinstance(answer, Nack) else answer
        self._failures.dead_lettered(record, error, "redriven, and failed again")
        return error

    async def _redrive(self, event: ReceivedEvent, handover: Handover | None, *, is_suspect: bool) -> object:
        is_alone = False
        try:
            if handover is not None:
                await self.until_reached(handover.member, event.record)
            is_alone = is_suspect and await self._wait_to_be_alone()
            HANDLING.set(event)
            return (await self.hand_out([event], handover, is_redrive=True))[0]
        finally:
            event.is_at_work = False
            if is_alone:
                self.no_longer_alone()

    # Stopping

    def pause(self) -> None:
        """Hand out nothing more; what is being handled is finished."""
        self.is_paused = True
        if not self.is_closing:
            self._may_go_on.clear()

    def resume(self) -> None:
        """Go on handing out."""
        self.is_paused = False
        self._may_go_on.set()
        for lane in self._lanes:
            lane.wake_all()

    async def close(self, timeout_s: float) -> None:
        """Let handlers that are at work finish, but not for longer than this; what is not acknowledged comes again."""
        self.is_closing = True
        self._may_go_on.set()
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(None)
        for task in list(self._tasks):
            task.cancel()
        for lane in self._lanes:
            lane.wake_all()
        if not await self._ended(timeout_s):
            for worker in self._workers:
                worker.task.cancel("the group stops or was moved")
            if not await self._ended(_UNWIND_S_MAX):
                logger.error("group %s of topic %s: a handler does not stop, and is left behind", self.name, self.topic)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._failures.flush()
        self.is_closed = True
        if self.members.group is self:
            self.members.group = None
        for member in self.members:
            if isinstance(member, LocalMember):
                member.stop()
        self.claims.close()

    async def _ended(self, timeout_s: float) -> bool:
        """Whether all workers end within this time."""
        tasks = [worker.task for worker in self._workers]
        if all(task.done() for task in tasks):
            return True
        waiting = asyncio.ensure_future(asyncio.wait(tasks))
        try:
            await within(self._clock, timeout_s, waiting)
        finally:
            await cancel_and_wait(waiting)
        return all(task.done() for task in tasks)

    @property
    def filtered_count(self) -> int:
        """How many events its filters kept from the handler since it started."""
        return self.pipeline.filtered_count

    @property
    def handling(self) -> int:
        """How many events are with a handler, or a member elsewhere, right now."""
        return sum(worker.handling for worker in self._workers)

    def _spawn(self, job: Any) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key_text(key: object) -> str:
    """Return a text for a key. Equal numbers have one text, as for deduplication: 1 and 1.0 are one key."""
    if isinstance(key, float) and key.is_integer():
        return repr(int(key))
    if type(key) in (tuple, list):
        return f"({','.join(map(_key_text, cast('Sequence[object]', key)))})"
    return repr(key)
