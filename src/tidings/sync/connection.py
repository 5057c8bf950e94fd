"""
One connection: carries out what its session decides, on its transport and by the service's means.

Requests that take time are done one at a time in the order they came; an idle connection has no task. What piles up is bounded:
with too much unsent or too much to do, nothing more is read from the peer until that is gone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from tidings.core.errors import TidingsError
from tidings.log.errors import StorageFull
from tidings.wire.sync_frames import CloseCode
from tidings.wire.transport import Transport

from .dialects.camel import project_key
from .errors import HistoryPruned
from .requests import Admit, Close, Effect, PagePlan, ReadPage, Scope, SendFrame, SessionState, Submit
from .session import SyncSession

if TYPE_CHECKING:
    from .service import SyncService

__all__ = ["Connection"]

logger = logging.getLogger(__name__)


class Connection:
    """A ``Conversation`` of the sync door, and a ``Subscriber`` of its hub."""

    __slots__ = (
        "__weakref__",
        "_held",
        "_held_bytes",
        "_is_blocked",
        "_is_paused",
        "_is_working",
        "_queue",
        "_service",
        "_transport",
        "heard_s",
        "session",
    )

    def __init__(self, service: SyncService, transport: Transport, now_s: float) -> None:
        self._service = service
        self._transport = transport
        self.session = SyncSession(service.settings)
        self.heard_s = now_s
        self._queue: deque[Admit | Submit | ReadPage] | None = None
        self._is_working = False
        self._is_paused = False
        self._is_blocked = False
        self._held: list[bytes] | None = None
        self._held_bytes = 0

    # What the transport calls

    def received(self, message: bytes) -> None:
        """A whole message came in."""
        service, session = self._service, self.session
        # Until it has connected, the time since it was opened counts: heartbeats alone keep no place.
        if session.state is SessionState.ACTIVE:
            self.heard_s = service.clock.monotonic()
        queued = 0 if self._queue is None else len(self._queue)
        self.carry_out(session.receive(message, service.now_ms(), queued))
        self._throttle()

    def drained(self) -> None:
        """The peer has taken what was buffered."""
        if self._is_blocked:
            self._is_blocked = False
            self._start_working()
            self._throttle()

    def closed(self, code: int) -> None:
        """The connection is gone."""
        self.session.gone()
        self._service.ended(self)

    # What the hub and the service call

    def may_see(self, scope: Scope) -> bool:
        """Whether it may be shown a record that it has asked for by name."""
        return self.session.state is SessionState.ACTIVE and self.session.may_see(scope)

    def deliver(self, frames: Sequence[bytes], last_seq: int) -> None:
        """Broadcasts. Whoever does not read them is sent away, and finds them by sync."""
        session, settings = self.session, self._service.settings
        if session.state is not SessionState.ACTIVE:
            return
        if self._transport.buffered_bytes > settings.write_buffer_bytes_max:
            self._service.slow_count += 1
            if session.dialect is not None and session.dialect.hangs_on_errors:
                effects = session.server_error("too slow", self._service.now_ms(), CloseCode.TRY_AGAIN_LATER)
            else:
                effects = session.close(CloseCode.TRY_AGAIN_LATER, "too slow")
            self.carry_out(effects)
        elif session.is_holding:
            self._hold(frames)
        else:
            self._transport.send(frames)

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Do what the session has decided."""
        frames: list[bytes] = []
        for effect in effects:
            if isinstance(effect, SendFrame):
                frames.append(effect.frame)
            elif isinstance(effect, Close):
                if frames:
                    self._transport.send(frames)
                    frames = []
                self._service.ended(self)
                self._transport.close(int(effect.code), effect.reason)
            else:
                if self._queue is None:
                    self._queue = deque()
                self._queue.append(effect)
        if frames:
            self._transport.send(frames)
        if self._held_bytes and not self.session.is_holding:
            self._release()
        if self._queue:
            self._start_working()

    @property
    def is_waiting_for_us(self) -> bool:
        """Whether it is we who keep it waiting: then its silence says nothing."""
        return self._is_working

    def forget_requests(self) -> None:
        """What waits for its turn will not be done: the connection is over, or there is nothing."""
        if self._is_working:
            return  # whoever works does this at the end
        for work in self._queue or ():
            if isinstance(work, Submit):
                self.session.release(work.request)
        self._queue = None  # idle connections are many, and an empty deque is not small

    def look_again(self) -> None:
        """There may be room again for what this connection sends."""
        self._throttle()

    def stop_reading(self) -> None:
        """Take no more requests: the door is about to be shut."""
        self._is_paused = True
        self._transport.pause_reading()

    # Work

    def _start_working(self) -> None:
        if (
            not self._is_working
            and not self._is_blocked
            and self._queue
            and self.session.state is not SessionState.CLOSED
        ):
            self._is_working = True
            self._service.spawn(self._work())

    async def _work(self) -> None:
        try:
            while self._queue and self.session.state is not SessionState.CLOSED:
                if self._transport.buffered_bytes > self._service.settings.write_buffer_bytes_max:
                    self._is_blocked = True
                    break
                await self._do(self._queue.popleft())
                self._throttle()
        except TidingsError as error:
            logger.error("a sync request failed: %s", error)
            self.carry_out(self.session.server_error(f"the request failed ({error.code})", self._service.now_ms()))
        except Exception:
            logger.exception("a sync request failed unexpectedly")
            self.carry_out(self.session.server_error("the request failed", self._service.now_ms()))
        finally:
            self._is_working = False
            if not self._queue or self.session.state is SessionState.CLOSED:
                self.forget_requests()
            if self.session.state is SessionState.ACTIVE and self._service.is_open:
                self._throttle()

    async def _do(self, work: Admit | Submit | ReadPage) -> None:
        match work:
            case Admit():
                await self._admit(work)
            case Submit():
                await self._submit(work)
            case ReadPage():
                await self._read_page(work)

    async def _admit(self, work: Admit) -> None:
        service, session, request = self._service, self.session, work.request
        rights = service.gate.admit(request.token)
        watermark = service.log.position.seq
        if request.project_id is not None and rights is not None and session.dialect is not None:
            project = project_key(request.project_id)
            if project is not None and rights.may_sync(Scope(project)):
                watermark = await service.pages.last_seq(session.dialect.topic, project, watermark)
        effects = session.admitted(request, rights, watermark, service.now_ms())
        if session.state is SessionState.ACTIVE:
            self._transport.authenticated()
            self.heard_s = service.clock.monotonic()
            service.joined(self)
        self.carry_out(effects)

    async def _submit(self, work: Submit) -> None:
        service, session, request = self._service, self.session, work.request
        try:
            answers = await service.submitter.submit(session, request.items, self)
        except StorageFull as error:
            self.carry_out(session.refuse_batch(request, error.public_text, service.now_ms()))
            return
        finally:
            session.release(request)
            service.relieved(self)
        self.carry_out(session.submitted(request, answers, service.now_ms()))

    async def _read_page(self, work: ReadPage) -> None:
        service, session, request = self._service, self.session, work.request
        # Everything committed before the request is published, and its revocations are in force, before rights are asked.
        published = service.log.position.seq
        await service.reached(published)
        plan = session.plan_page(request, max(published, service.hub.seq), service.now_ms())
        if not isinstance(plan, PagePlan):
            self.carry_out(plan)
            return
        assert session.dialect is not None
        topic = session.dialect.topic
        if plan.subscriptions is not None:
            service.hub.subscribe(self, topic, plan.subscriptions)
        since, snapshot = plan.since, None
        if request.wants_snapshot and request.since == 0 and session.profile == "compatibility":
            snapshot = await self._snapshot(plan)
            since = plan.since if snapshot is None else snapshot[0]
        part = await service.pages.read(
            topic, plan.partitions, since, plan.until, plan.limit, service.settings.page_bytes_max
        )
        if part.pruned_through is not None and session.dialect.hangs_on_errors:
            self.carry_out(session.history_pruned(request, part.pruned_through, service.now_ms()))
            return
        sync_to = plan.until
        if session.dialect.is_by_project and plan.begins:
            sync_to = await service.pages.last_seq(topic, plan.partitions[0], plan.until)
        goes_on_until = service.hub.seq if self._is_held_too_much else None
        if goes_on_until is not None and not part.has_more:
            self._held, self._held_bytes = None, 0
        effects = session.page_read(
            plan,
            part.records,
            has_more=part.has_more,
            sync_to=sync_to,
            now_ms=service.now_ms(),
            pruned_through=part.pruned_through,
            snapshot=snapshot,
            goes_on_until=goes_on_until,
        )
        self.carry_out(effects)

    async def _snapshot(self, plan: PagePlan) -> tuple[int, dict[str, bytes]] | None:
        """The states to begin with; ``None`` if the history has to do, since they are not to be had or too large for a page."""
        try:
            states = await self._service.trees.snapshot(plan.partitions, plan.until)
        except (HistoryPruned, orjson.JSONEncodeError):  # the latter: it nests deeper than JSON can be written here
            return None
        is_small = sum(map(len, states.values())) <= self._service.settings.page_bytes_max
        return (plan.until, states) if is_small else None

    # Holding back and throttling

    def _hold(self, frames: Sequence[bytes]) -> None:
        self._held_bytes += sum(map(len, frames))
        if self._is_held_too_much:
            self._held = None
        elif self._held is None:
            self._held = list(frames)
        else:
            self._held += frames

    @property
    def _is_held_too_much(self) -> bool:
        return self._held_bytes > self._service.settings.held_bytes_max

    def _release(self) -> None:
        held, self._held, self._held_bytes = self._held, None, 0
        if held and self.session.state is SessionState.ACTIVE:
            self._transport.send(held)

    def _throttle(self) -> None:
        """Read from the peer only while there is room for what that brings."""
        session, settings = self.session, self._service.settings
        if session.state is SessionState.CLOSED or not self._service.is_open:
            return
        is_full = self._transport.buffered_bytes > settings.write_buffer_bytes_max
        if is_full:
            self._is_blocked = True
        elif session.dialect is not None and session.dialect.hangs_on_errors:
            queued = 0 if self._queue is None else len(self._queue)
            is_full = session.load.drafts >= settings.in_flight_drafts_max or queued >= settings.requests_queued_max
        if is_full and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        elif not is_full and self._is_paused and not self._is_blocked:
            self._is_paused = False
            self.heard_s = self._service.clock.monotonic()
            self._transport.resume_reading()
