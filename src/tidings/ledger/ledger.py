"""
The ledger: one task that executes commands, stores them, and then tells what they did.

    async with await open_ledger("./workspace") as ledger:
        await ledger.execute(SetFlightMode(rack_class="flight_mode.wireless", on=True))
        modes = await ledger.read(lambda state: state.part(FlightModes).freeze())

The task takes the commands that wait, executes them one after another, and appends their records in one call. Only when these are durable are
the happenings published and the callers answered, and only then may anybody look at the state. So of two commands that exclude each
other the second one is refused, nobody sees what might not last, and a commit serves as many commands as came meanwhile.

If the records cannot be stored, the state that was changed for them is thrown away and made again from snapshot and log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.settings import checked
from tidings.core.tasks import cancel_and_wait
from tidings.happenings.bus import HappeningsBus
from tidings.happenings.errors import InvalidHappening
from tidings.happenings.facade import Happenings
from tidings.happenings.happening import AnyHappening
from tidings.log.encoding import check_payload
from tidings.log.interface import Appended, Log, Refused
from tidings.log.settings import LogSettings

from .admins import Admin
from .catalogue import Catalogue, catalogue_command
from .commands import Command, Rehearsal, rehearse
from .commits import CommandRequest, CommandStep, Commit, Prepared, Slice
from .directory import Plugins
from .errors import CommandTooLarge, InvalidCommand, LedgerClosed, LedgerError, LedgerUnavailable
from .grammar import Grammar
from .handlers import Handler, Manifest
from .history import LedgerHistory
from .marks import SEQ_GAP, BeginEpoch, EmitHappenings, Marks, ReserveSeqs, TrimHistory
from .plugins import Plugin
from .projections import Projections
from .records import (
    CommandReader,
    EmittedTogether,
    HappeningReader,
    accepts_in_order,
    encode_command,
    encode_happenings,
    events_left,
    events_of,
)
from .recovery import PartMaker, Recovered, recover
from .settings import LedgerSettings
from .snapshot_keeping import SnapshotKeeper
from .snapshots import FrozenPart, MemorySnapshots, SnapshotHeader, SnapshotStore, frozen_parts
from .standard import STANDARD_PARTS
from .state import LedgerState, collector_paused

if TYPE_CHECKING:
    from tidings.log.embedded.disk import Disk

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_SlicedRead: TypeAlias = "tuple[Callable[[LedgerState], Generator[None, None, Any]], asyncio.Future[Any]]"
_SEQ_BLOCK: Final = 1000
"""Seqs that are written down as used at once, for plain emits."""
_RETRY_S: Final = 1.0
"""How long a ledger whose state could not be made again waits before it tries the next time."""
_EXECUTING_S_MAX: Final = 0.02
"""How long the commands of one commit are executed in a row; the others wait for the next commit, and the event loop goes on in between."""
_WEIGHT_MAX: Final = 1000
"""Commands that change more relations than that are executed in a thread."""
_APPENDED_COUNT: Final = 4000
"""Happenings that are appended in one call, about, where a commit has more."""
_CHECK_COUNT: Final = 64
"""Commands and happenings after which the time is looked at."""
_SLICE_COUNT: Final = 500
_SLICE_BYTES: Final = 256 * 1024
"""Of a list of commands, so many, or so much of their JSON, are checked in a row."""
_BRACKETS_MAX: Final = 50
_LONG_NUMBER: Final = b"0" * 19
_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")


def new_uuid() -> str:
    """A random id."""
    return str(uuid.uuid4())


async def open_ledger(
    where: Path | str | Log,
    *,
    catalogue: Catalogue | Path | None = None,
    settings: LedgerSettings | None = None,
    parts: Sequence[PartMaker] = (),
    clock: Clock = SYSTEM_CLOCK,
    ids: Callable[[], str] = new_uuid,
    snapshots: SnapshotStore | None = None,
    log_settings: LogSettings | None = None,
    disk: Disk | None = None,
    accept_loss: bool = False,
) -> Ledger:
    """
    Open the ledger of a workspace, or on a log.

    Args:
        where: A workspace: its log is opened, and closed with the ledger. Or a log that is open; it stays open.
        catalogue: The catalogue, or the file it is in. A file that cannot be used does not keep the ledger from opening: it goes on with the
            catalogue it had, and tells so. So does one whose log takes no records now. Left out: as it was.
        settings: How the ledger behaves.
        parts: What makes further parts of the state, each empty: a class will do. A ledger has to be opened with all the parts that its records
            were written with.
        clock, ids: What time it is, and where new ids come from.
        snapshots: Where snapshots are kept, for a log that was given; in memory if left out.
        log_settings, disk: For a workspace.
        accept_loss: Open a ledger of which records are gone that no snapshot covers, with what the others come to. What is no longer possible is
            in ``Ledger.problems``.

    Raises:
        SettingsError: A setting cannot be used.
        CatalogueInvalid: The catalogue that was given cannot be used.
        WorkspaceError, StorageFull: The log cannot be opened.
        LedgerIncomplete, LedgerDiverged, UnknownCommand, MissingPart, InvalidRecord, SnapshotUnsupported: The state cannot be made again from
            what is there.
    """
    settings = checked(settings or LedgerSettings(), "ledger")
    opened: Log | None = None
    if isinstance(where, str | Path):
        from .snapshot_files import open_files  # only here: a ledger on another log needs no engine

        opened, files = await open_files(where, log_settings, clock=clock, disk=disk)
        log, snapshots = opened, snapshots or files
    else:
        log = where
    ledger = Ledger(
        log,
        snapshots or MemorySnapshots(),
        settings=settings,
        makers=(*STANDARD_PARTS, *parts),
        clock=clock,
        ids=ids,
        owns_log=opened is not None,
    )
    try:
        await ledger.start(accept_loss=accept_loss)
    except BaseException:
        if opened is not None:
            await opened.close()
        raise
    try:
        command = await ledger.read(lambda state: catalogue_command(state, catalogue))
        if command is not None:
            await ledger.execute(command)
        await ledger.grammar.scan()
    except LedgerUnavailable as error:
        # On a full disk a ledger can still be read; whatever the catalogue would allow, nothing can be stored now.
        logger.warning("the ledger is opened as it was, without its new catalogue: %s", error)
    except BaseException:
        await ledger.close()
        raise
    return ledger


class Ledger:
    """
    The authoritative stores of one log. Made by ``open_ledger``.

    Args:
        log: Where commands are stored, in the topic ``ledger``; nobody else writes there.
        snapshots: Where snapshots of the state are kept.
        settings: How it behaves.
        makers: Each makes one part of the state, empty.
        clock, ids: What time it is, and where new ids come from.
        owns_log: Whether the log is closed with the ledger.
    """

    happenings: Happenings
    """What happens: subscribe, emit, read history."""

    def __init__(
        self,
        log: Log,
        snapshots: SnapshotStore,
        *,
        settings: LedgerSettings,
        makers: Sequence[PartMaker],
        clock: Clock,
        ids: Callable[[], str],
        owns_log: bool,
    ) -> None:
        self.log = log
        self.clock = clock
        self.settings = settings
        self.new_id = ids
        """A new id, for what a command makes."""
        self.problems: list[str] = []
        """Commands that a repaired log no longer allows: what they did is not in the state."""
        self.plugins = Plugins(self, instance_grace_s=settings.instance_grace_s)
        """The plugins that are loaded, and what is asked of those on a shelf."""
        self.projections = Projections(self)
        """Subjects with their surroundings, racks, and lists in pages."""
        self.grammar = Grammar(self)
        """Subjects whose type the catalogue no longer declares, and what is done about them."""
        self._snapshots = SnapshotKeeper(snapshots, records_max=settings.snapshot_records_max)
        self._makers = makers
        self._owns_log = owns_log
        self._commands = CommandReader()
        self._happenings = HappeningReader()
        self._history = LedgerHistory(log, Marks(), settings, clock)
        self._state: LedgerState | None = None
        self._next_offset = 0
        self._last_event_id = ""

        self._queue: deque[CommandRequest] = deque()
        self._waiting_count = 0
        self._reads: deque[Callable[[], None]] = deque()
        self._sliced_reads: deque[_SlicedRead] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._taken: list[Slice] = []
        """What is being executed and stored."""
        self._is_busy = False
        self._is_covering = False
        self._covering: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._janitor: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._has_ended = False
        """Nothing more is taken: it is being closed, or its task was ended."""

        self._failure: LedgerUnavailable | None = None
        """Why there is no state."""
        self._retry_at = 0.0
        self._unresolved: Commit | None = None
        """A commit that failed, and of which nobody knows yet how much was stored."""

    # Life

    async def start(self, *, accept_loss: bool = False) -> None:
        """Make the state, and begin to work. Raises as ``open_ledger`` does."""
        self._loop = loop = asyncio.get_running_loop()
        found = await self._recover(accepts_loss=accept_loss)
        marks = self._marks
        epoch = self.log.position.epoch
        is_new = not found.seq and not found.next_offset
        has_lost = found.has_lost or (marks.epoch != epoch and not is_new)
        last_seq = found.seq + SEQ_GAP if has_lost else found.seq
        self._bus = HappeningsBus(capacity=self.settings.buffer_count_max, last_seq=last_seq, covers=self._cover)
        self.happenings = Happenings(self._bus, self._history, self.clock, self._emit_durable)
        self._is_busy = True
        if has_lost:
            await self._do_now(BeginEpoch(epoch=epoch, seq=last_seq))
            await self._snapshots.save(*self._freeze())  # what is left is the truth now
        elif last_seq > marks.seq:
            await self._do_now(ReserveSeqs(through=last_seq))
        self._is_busy = False
        self._task = loop.create_task(self._work(), name="ledger")
        self._janitor = loop.create_task(self._trim_now_and_then(), name="ledger janitor")
        await self.plugins.start()

    async def close(self) -> None:
        """Finish what waits, take a snapshot if it is worth it, and let go of everything. Closing twice is fine."""
        self._has_ended = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="ledger closing")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        assert self._task is not None
        assert self._janitor is not None
        await self.plugins.close()
        await cancel_and_wait(self._janitor, self._covering)
        self._notify()
        for waiter in self._room_waiters:
            if not waiter.done():
                waiter.set_result(None)
        await asyncio.wait([self._task])
        try:
            await self._snapshots.finished()
            await self._settle()
        except (TidingsError, OSError) as error:
            logger.warning("the ledger was not closed in order, and takes longer to open: %s", error)
        finally:  # whatever a part of somebody's own raises
            await (
                self._snapshots.finished()
            )  # a snapshot that settling made due: whoever opens the ledger next must not meet it
            self._bus.close()
            if self._owns_log:
                await self.log.close()

    async def _settle(self) -> None:
        """Give back seqs that were not used, and take a snapshot."""
        if self._state is None or not self.log.health().is_writable:
            return
        if self._marks.seq > self._bus.minted_seq:
            await self._do_now(ReserveSeqs(through=self._bus.minted_seq))
        if self._snapshots.is_worth_closing(self._next_offset):
            await self._snapshots.save(*self._freeze())

    async def __aenter__(self) -> Ledger:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # What users call

    def plugin(self, name: str, handler: Handler | None = None, manifest: Manifest | None = None) -> Plugin:
        """
        Load a plugin; or find it, if one is loaded and nothing but its name is given.

        Args:
            name: Its name, usually like ``org.example.player``.
            handler: What is asked: a ``Respondent``, a ``Warden``, or both. A plugin without one drives itself.
            manifest: What it declares of itself.

        Raises:
            PluginAlreadyLoaded: One of this name is, and a handler or manifest is given.
            ShelfOccupied: Another plugin stands on one of its shelves.
            InvalidCommand: The name, or a shelf's, cannot be one.
            SettingsError: The manifest has a value that is out of its range.
            ShuttingDown: Plugins are being unloaded.
        """
        return self.plugins.plugin(name, handler, manifest)

    def admin(self, name: str) -> Admin:
        """
        An administrator of this name, for merging, splitting, suppressing, and retracting what others claim.

        Raises:
            InvalidCommand: The name cannot be one.
        """
        return self.plugins.admin(name)

    async def execute(self, command: Command) -> Any:
        """
        Do one thing; when this returns it is durable, its happenings are told, and its result is returned.

        Cancelling the call does not take the command back.

        Raises:
            LedgerError: It cannot be done, and nothing has changed. ``LedgerUnavailable`` where the log could not store it.
        """
        request = CommandRequest((self._prepare(command),), self._loop.create_future())
        if self._waiting_count >= self.settings.waiting_count_max:
            await self._wait_for_room()
        self._give(request)
        return await request.answer

    async def rehearse(self, command: Command) -> Rehearsal:
        """
        Whether a command would be done: its checks, on the state as it is now, and nothing else.

        Raises:
            LedgerError: It would be refused, as it would be by ``execute``.
            TypeError: Commands of this class cannot be rehearsed (``Command.is_rehearsable``).
        """
        if not command.is_rehearsable:
            raise TypeError(f"{type(command).__name__} cannot be rehearsed")
        self._prepare(command)
        at_ms = self.clock.now_ns() // 1_000_000
        return await self.read(lambda state: rehearse(command, state, at_ms))

    async def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """
        Do several things in order; one that is refused does not keep the others from being done.

        Returns:
            The result of each, or the ``LedgerError`` that says why it was refused.

        Raises:
            InvalidCommand, CommandTooLarge: One cannot be stored; none was done.
        """
        if not commands:
            return []
        prepared: list[Prepared] = []
        size = 0
        for number, command in enumerate(commands, 1):
            prepared.append(self._prepare(command))
            size += len(prepared[-1].json)
            if (size > _SLICE_BYTES or number % _SLICE_COUNT == 0) and number < len(commands):
                size = 0
                await asyncio.sleep(0)
        request = CommandRequest(prepared, self._loop.create_future(), [])
        if self._waiting_count >= self.settings.waiting_count_max:
            await self._wait_for_room()
        self._give(request)
        results: list[Any] = await request.answer
        return results

    async def finish_waiting(self) -> None:
        """
        Wait until every command that was given before is done or refused, also those that their callers no longer wait for.

        Raises:
            LedgerClosed: The ledger was closed.
        """
        with contextlib.suppress(LedgerUnavailable):  # then those before it are refused as well
            await self.execute(TrimHistory(through=0))  # changes nothing, and takes its turn

    async def read(self, look: Callable[[LedgerState], _T]) -> _T:
        """
        Look at the state, all of which is durable; nothing changes while ``look`` runs.

        Args:
            look: Takes out of the state what is wanted. It must not wait, nor change anything, nor keep a part.

        Raises:
            LedgerUnavailable: There is no state at the moment.
            LedgerClosed: The ledger was closed.
        """
        if self._has_ended:
            raise LedgerClosed
        if self._state is not None and not self._is_busy:
            return look(self._state)
        answer: asyncio.Future[_T] = self._loop.create_future()

        def run() -> None:
            if answer.done():
                return
            try:
                if self._state is None:
                    raise self._unavailable()
                answer.set_result(look(self._state))
            except Exception as error:  # noqa: BLE001 - it is the caller's
                answer.set_exception(error)

        self._reads.append(run)
        self._notify()
        return await answer

    async def read_in_slices(self, look: Callable[[LedgerState], Generator[None, None, _T]]) -> _T:
        """
        Look at the state, all of which is durable, in slices: commands wait until ``look`` ends, and everything else continues.

        One such read runs at a time. Commands that wait are executed between two of them, so neither can hold up the other for long.

        Args:
            look: Takes out of the state what is wanted, and yields after about a millisecond's work. It must not change anything,
                nor keep a part.

        Raises:
            LedgerUnavailable: There is no state at the moment.
            LedgerClosed: The ledger was closed.
        """
        if self._has_ended:
            raise LedgerClosed
        answer: asyncio.Future[_T] = self._loop.create_future()
        self._sliced_reads.append((look, answer))
        self._notify()
        return await answer

    async def trim_history(self) -> int:
        """
        Let go of the history that the settings no longer keep, now instead of at the janitor's next turn.

        Returns:
            The highest seq that is no longer kept.
        """
        through = await self._history.window_start()
        if through > self._history.trimmed_through:
            await self.execute(TrimHistory(through=through))
        return self._history.trimmed_through

    async def take_snapshot(self) -> None:
        """
        Take a snapshot of the state now.

        Raises:
            LedgerUnavailable: There is no state at the moment.
            OSError: It could not be stored.
        """
        await self._snapshots.save(*await self.read(lambda _: self._freeze()))

    async def released_through(self) -> int:
        """
        The offset up to which the ledger does not need its records any more: every snapshot covers them, and their history was trimmed.
        """
        released = self._snapshots.released_offset
        return released if released < 0 else min(released, await self._history.first_kept_offset() - 1)

    @property
    def is_available(self) -> bool:
        """Whether commands are accepted, as far as is known."""
        return self._state is not None and not self._has_ended and self.log.health().is_writable

    # Taking commands in

    def _prepare(self, command: Command) -> Prepared:
        try:
            if command.__class__ is EmitHappenings:
                prepared = Prepared(command, encode_happenings(command.happenings))
                if b"null" in prepared.json or _has_long_number(prepared.json):
                    check_payload({"happenings": msgspec.to_builtins(command.happenings)})
                self._happenings.check(command.happenings, prepared.json)
            else:
                encoded = encode_command(command)
                if (
                    b"null" in encoded
                    or encoded.count(b"[") + encoded.count(b"{") > _BRACKETS_MAX
                    or _has_long_number(encoded)
                ):
                    check_payload({"do": msgspec.to_builtins(command)})
                prepared = Prepared(self._commands.read(encoded), encoded)
        except (InvalidEvent, InvalidHappening) as error:
            raise InvalidCommand(type(command).__name__, error.problem) from error
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidCommand(type(command).__name__, f"cannot be stored as JSON: {error}") from error
        size, size_max = len(prepared.json), self.settings.record_bytes_max
        if size > size_max:
            raise CommandTooLarge(type(command).__name__, size, size_max, "bytes of JSON")
        return prepared

    async def _wait_for_room(self) -> None:
        while self._waiting_count >= self.settings.waiting_count_max and not self._has_ended:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room_waiters.append(waiter)
            await waiter

    def _give(self, request: CommandRequest) -> None:
        if self._has_ended:
            raise LedgerClosed
        self._queue.append(request)
        self._waiting_count += len(request.commands)
        if self._wake is not None:
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _emit_durable(self, happenings: Sequence[AnyHappening]) -> Awaitable[int]:
        return self.execute(EmitHappenings(happenings=happenings))

    def emit_soon(self, happening: AnyHappening) -> None:
        """Emit a happening durably, before everything that later commands emit, and without waiting. A failure is a line in the log."""
        if self._has_ended:
            return
        prepared = self._prepare(EmitHappenings(happenings=(happening,)))
        request = CommandRequest((prepared,), self._loop.create_future())
        request.answer.add_done_callback(_log_failure)
        self._give(request)

    def _cover(self, seq: int) -> None:
        """Write down that seqs are used which plain emits have taken: a block of them, in the background."""
        if self._is_covering or self._has_ended:
            return
        self._is_covering = True
        through = seq + _SEQ_BLOCK
        request = CommandRequest((self._prepare(ReserveSeqs(through=through)),), self._loop.create_future())
        request.answer.add_done_callback(lambda answer: self._covered(answer, through))
        self._give(request)

    def _covered(self, answer: asyncio.Future[Any], through: int) -> None:
        self._is_covering = False
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            logger.error("happenings that were emitted wait, since their seqs cannot be written down: %s", error)
            self._covering = self._loop.create_task(self._cover_later(), name="ledger covering")
            return
        self._bus.cover(through)

    async def _cover_later(self) -> None:
        await self.clock.sleep(_RETRY_S)
        self._cover(self._bus.minted_seq)

    # The task

    async def _work(self) -> None:
        try:
            await self._serve_all()
        except BaseException as error:
            # Whatever ends the task (it is cancelled, or the program is), nobody may wait for it for ever.
            self._lose_state(error)
            self._has_ended = True
            for _, reading in self._sliced_reads:
                if not reading.done():
                    reading.set_exception(self._unavailable())
            self._refuse(
                [*self._taken, *((each, each.commands[each.taken :]) for each in self._queue)], self._unavailable()
            )
            self._run_reads()
            raise

    async def _serve_all(self) -> None:
        while True:
            while not self._queue and not self._sliced_reads and not (self._reads and self._state is None):
                if self._has_ended:
                    return
                self._wake = self._loop.create_future()
                await self._wake
                self._wake = None
            if self._queue or self._state is None:
                self._is_busy = True
                try:
                    await self._serve()
                except Exception as error:
                    logger.exception("the ledger failed; its state is made again")
                    self._lose_state(error)
                finally:
                    self._is_busy = False
                self._run_reads()
            if self._sliced_reads:
                await self._run_sliced_read(*self._sliced_reads[0])
                self._sliced_reads.popleft()

    async def _run_sliced_read(
        self, look: Callable[[LedgerState], Generator[None, None, Any]], answer: asyncio.Future[Any]
    ) -> None:
        """Go through one read. The state is durable and does not change meanwhile, so plain reads need not wait."""
        if answer.done():
            return
        try:
            if self._state is None:
                raise self._unavailable()
            steps = look(self._state)
            while not answer.done():
                next(steps)
                await asyncio.sleep(0)
        except StopIteration as end:
            answer.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            answer.set_exception(error)

    def _run_reads(self) -> None:
        while self._reads:
            self._reads.popleft()()

    async def _serve(self) -> None:
        """Do what waits, or say why not."""
        if self._state is None and self.clock.monotonic() >= self._retry_at:
            await self._recover_or_fail()
        self._taken = slices = self._take()
        if self._state is None:
            self._refuse(slices, self._unavailable())
        elif (health := self.log.health()) and not health.is_writable:
            # Executing them first would only mean to make the state again for each.
            self._refuse(slices, LedgerUnavailable(health.problem or "the log takes no records"))
        else:
            await self._commit(slices)
        self._taken = []

    def _take(self) -> list[Slice]:
        """Commands for one commit, by request."""
        slices: list[Slice] = []
        room = self.settings.batch_count_max
        while room and self._queue:
            request = self._queue[0]
            taken = request.commands
            if request.results is not None:
                taken = taken[request.taken : request.taken + room]
            count = len(taken)
            request.taken += count
            if request.taken == len(request.commands):
                self._queue.popleft()
            slices.append((request, taken))
            room -= count
            self._waiting_count -= count
        while self._room_waiters and self._waiting_count < self.settings.waiting_count_max:
            waiter = self._room_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break  # one at a time: each fills some of the room
        return slices

    @staticmethod
    def _refuse(slices: Sequence[Slice], error: LedgerError) -> None:
        for request, commands in slices:
            for _ in commands:
                request.add(error)

    async def _do_now(self, command: Command) -> None:
        """Execute one of the ledger's own commands while nobody else's are."""
        request = CommandRequest((self._prepare(command),), self._loop.create_future())
        await self._commit([(request, request.commands)])
        await request.answer

    async def _commit(self, slices: Sequence[Slice]) -> None:
        """Execute, store, tell, answer."""
        commit = Commit(self.clock.now_ns() // 1_000_000, self._next_offset)
        bug = await self._execute_and_reserve(commit, slices)
        if commit.events:
            if not self._marks.epoch:
                self._begin_first_epoch(commit)
            try:
                last = await self._append(commit)
            except (TidingsError, OSError) as error:
                await self._after_failure(commit, error)
                return
            self._next_offset, self._last_event_id = last.offset + 1, last.event_id
            if len(commit.happenings) > _APPENDED_COUNT:
                await self._publish_many(commit)
            else:
                self._publish(commit, len(commit.happenings))
        for step in commit.steps:
            step.request.add(step.result)
        if bug is not None:
            self._lose_state(bug)
            await self._recover_or_fail()
        elif self._snapshots.is_due(self._next_offset) and not self._has_ended:
            self._snapshots.begin(*self._freeze())  # one that is being closed takes its own

    async def _execute_and_reserve(self, commit: Commit, slices: Sequence[Slice]) -> Exception | None:
        """Execute commands, in a thread if they are heavy, and reserve the seqs of their happenings. As ``_execute``."""
        state = self._state
        assert state is not None
        weight = sum(
            each.command.weight(state) for _, commands in slices for each in commands if each.command.is_weighed
        )
        if weight <= _WEIGHT_MAX:
            bug, left, done = self._execute(commit, slices)
            self._put_back(left, done)
            if commit.happenings:
                commit.first_seq = self._bus.reserve(len(commit.happenings))
            return bug
        self._bus.hold()  # how many seqs the commands take is not known before they are executed
        try:
            bug, left, done = await asyncio.to_thread(self._execute, commit, slices)
            self._put_back(left, done)
            if commit.happenings:
                commit.first_seq = self._bus.reserve(len(commit.happenings))
        finally:
            self._bus.resume()
        return bug

    async def _append(self, commit: Commit) -> Appended:
        """
        Append the records of a commit, those with very many happenings a few at a time. Return the last.

        What a crash cuts off of a command is completed at the next opening.
        """
        events = commit.events
        together = max(1, len(events) * _APPENDED_COUNT // max(_APPENDED_COUNT, len(commit.happenings)))
        last: Appended | None = None
        for begin in range(0, len(events), together):
            some = events[begin : begin + together]
            for verdict in await self.log.append_many(some, authorise=accepts_in_order() if len(some) > 1 else None):
                if isinstance(verdict, Refused):
                    raise verdict.error
                assert isinstance(verdict, Appended)
                last = verdict
        assert last is not None
        return last

    def _begin_first_epoch(self, commit: Commit) -> None:
        """
        Put the record that begins the epoch before the first ones of a new ledger: opening one that nobody uses leaves no record.

        All that it changes in an empty state is the epoch, so it makes no difference that what comes after it was executed before.
        """
        command = BeginEpoch(epoch=self.log.position.epoch, seq=0)
        commit.events[:0] = events_of(
            command,
            encode_command(command),
            at_ms=commit.at_ms,
            seq=self._bus.minted_seq + 1 if commit.first_seq is None else commit.first_seq,
            happenings=(),
            happenings_json=b"",
            bytes_max=self.settings.record_bytes_max,
        )
        for step in commit.steps:
            step.first_event += 1
        self._marks.epoch = command.epoch

    def _execute(self, commit: Commit, slices: Sequence[Slice]) -> tuple[Exception | None, Sequence[Slice], int]:
        """
        Change the state by all of the commands, and make their records.

        Returns:
            What a command has raised that is no refusal: the state may be changed by half. Then the commands that were not executed, because of
            that or for lack of time, as slices, and how many of the first one were.
        """
        with collector_paused():
            return self._execute_each(commit, slices)

    def _execute_each(self, commit: Commit, slices: Sequence[Slice]) -> tuple[Exception | None, Sequence[Slice], int]:
        state, at_ms = self._state, commit.at_ms
        assert state is not None
        seq, bytes_max = self._bus.minted_seq + 1, self.settings.record_bytes_max
        steps, events, happenings = commit.steps, commit.events, commit.happenings
        emitted = EmittedTogether(at_ms, bytes_max)
        monotonic = self.clock.monotonic
        stops_at = monotonic() + _EXECUTING_S_MAX
        unchecked = _CHECK_COUNT
        for at, (request, commands) in enumerate(slices):
            for number, prepared in enumerate(commands):
                unchecked -= 1
                if unchecked < 0:
                    if monotonic() >= stops_at:
                        emitted.flush(events)
                        return None, slices[at:], number
                    unchecked = _CHECK_COUNT
                command = prepared.command
                if command.__class__ is EmitHappenings:
                    told = command.happenings
                    first = seq + len(happenings)
                    emitted.add(first, prepared.json, events)
                    happenings += told
                    steps.append(CommandStep(request, first, len(events), len(happenings), is_stored=True))
                    continue
                emitted.flush(events)
                first_event = len(events)
                try:
                    told, result, is_changed = command.execute(state, at_ms)
                    told_json = b""
                    if told:
                        told_json = encode_happenings(told)
                        unchecked -= len(told)
                except TidingsError as error:
                    steps.append(CommandStep(request, error, first_event, len(happenings), is_stored=False))
                    continue
                except Exception as error:
                    logger.exception("the command %s failed", type(command).__name__)
                    steps.append(CommandStep(request, error, first_event, len(happenings), is_stored=False))
                    return error, slices[at:], number + 1
                if is_changed:
                    events += events_of(
                        command,
                        prepared.json,
                        at_ms=at_ms,
                        seq=seq + len(happenings),
                        happenings=told,
                        happenings_json=told_json,
                        bytes_max=bytes_max,
                    )
                    happenings += told
                steps.append(CommandStep(request, result, first_event, len(happenings), is_stored=is_changed))
        emitted.flush(events)
        return None, (), 0

    def _put_back(self, slices: Sequence[Slice], done: int) -> None:
        """Let commands wait again, the first ``done`` of them not."""
        for request, commands in reversed(slices):
            left = len(commands) - (done if request is slices[0][0] else 0)
            if not left:
                continue
            if not self._queue or self._queue[0] is not request:
                self._queue.appendleft(request)
            request.taken -= left
            self._waiting_count += left

    def _publish(self, commit: Commit, count: int) -> None:
        """The first so many happenings of a commit are durable; the others are not."""
        if commit.first_seq is None:
            return
        if count:
            self._marks.note_told(commit.first_seq + count - 1)
            self._history.stored(commit.first_seq, commit.first_seq + count - 1)
        happenings, steps = commit.happenings, commit.steps
        if count < len(happenings):
            happenings = happenings[:count]
        ends = [step.end for step in steps if step.end <= count] if len(steps) > 1 else None
        self._bus.publish(commit.first_seq, happenings, ends)

    async def _publish_many(self, commit: Commit) -> None:
        """``_publish`` of all of a commit with very many happenings."""
        assert commit.first_seq is not None
        count = len(commit.happenings)
        self._marks.note_told(commit.first_seq + count - 1)
        self._history.stored(commit.first_seq, commit.first_seq + count - 1)
        await self._bus.publish_many(commit.first_seq, commit.happenings, [step.end for step in commit.steps])

    # When something fails

    async def _after_failure(self, commit: Commit, error: Exception) -> None:
        """A commit failed: find out what of it was stored, and tell everybody what became of theirs."""
        logger.error("the ledger could not store %d records: %s", len(commit.events), error)
        self._unresolved = commit
        self._lose_state(error)
        stored = await self._recover_or_fail()
        is_known = self._state is not None
        problem = str(error) if is_known else f"{error}; whether it was done is not known yet"
        is_done = is_known
        for step in commit.steps:
            is_done = is_done and (not step.is_stored or step.first_event < stored)
            failure = LedgerUnavailable(problem)
            failure.__cause__ = error
            step.request.add(step.result if is_done else failure)

    def _lose_state(self, error: BaseException) -> None:
        self._state = None
        self._failure = LedgerUnavailable(str(error) or type(error).__name__)
        self._failure.__cause__ = error
        self._retry_at = self.clock.monotonic()

    def _unavailable(self) -> LedgerUnavailable:
        failure = LedgerUnavailable(self._failure.problem if self._failure is not None else "it has no state")
        failure.__cause__ = self._failure
        return failure

    async def _recover_or_fail(self) -> int:
        """Make the state again; how many records of the commit that failed were stored. Without success there is no state."""
        try:
            found = await self._recover()
        except (TidingsError, OSError) as error:
            logger.error("the ledger's state cannot be made again now: %s", error)
            self._lose_state(error)
            self._retry_at += _RETRY_S
            return 0
        commit, self._unresolved = self._unresolved, None
        if commit is None:
            return 0
        stored = sum(event.meta.event_id in found.event_ids for event in commit.events)
        told = [step.end for step in commit.steps if step.is_stored and step.first_event < stored]
        self._publish(commit, told[-1] if told else 0)
        return stored

    async def _recover(self, *, accepts_loss: bool = False) -> Recovered:
        """Make the state from snapshot and log; happenings that a crash cut off from their command are stored now."""
        ids_from = None if self._unresolved is None else self._unresolved.next_offset
        async with self._snapshots.undisturbed():  # one that is being stored removes others
            found = await recover(
                self.log,
                self._snapshots.store,
                self._makers,
                self._commands,
                ids_from=ids_from,
                accepts_loss=accepts_loss,
            )
        next_offset, last_event_id = found.next_offset, found.last_event_id
        if found.untold:
            events = events_left(
                found.untold,
                at_ms=found.untold_at_ms,
                seq=found.untold_seq,
                of=found.untold_of,
                bytes_max=self.settings.record_bytes_max,
            )
            for event in events:
                last_event_id = (await self.log.append(event, from_reserve=True)).event_id
                next_offset += 1
        self._state = found.state
        self._failure = None
        self.problems = found.problems
        self._history.marks = self._marks
        self._next_offset, self._last_event_id = next_offset, last_event_id
        self._snapshots.found(found.snapshot_offsets)
        return found

    @property
    def _marks(self) -> Marks:
        assert self._state is not None
        return self._state.part(Marks)

    # Snapshots and history

    def _freeze(self) -> tuple[SnapshotHeader, list[FrozenPart]]:
        assert self._state is not None
        frozen = frozen_parts(self._state)
        header = SnapshotHeader(
            offset=self._next_offset - 1,
            event_id=self._last_event_id,
            epoch=self.log.position.epoch,
            taken_at_ms=self.clock.now_ns() // 1_000_000,
            parts=tuple(part.name for part in frozen),
        )
        return header, frozen

    async def _trim_now_and_then(self) -> None:
        while True:
            await self.clock.sleep(self.settings.janitor_interval_s)
            try:
                await self.trim_history()
            except (TidingsError, OSError) as error:
                logger.warning("the ledger's history was not trimmed; it is tried again later: %s", error)


def _log_failure(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        logger.warning("a happening could not be stored, and is not emitted: %s", error)


def _has_long_number(encoded: bytes) -> bool:
    """Whether there may be a number that is too large for the log."""
    return _LONG_NUMBER in encoded.translate(_ZEROS)
