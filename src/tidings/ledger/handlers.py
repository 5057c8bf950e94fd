"""
What a plugin brings to be called: a respondent answers requests, a warden looks after long-running work.

A call takes a bounded time. What a handler raises on purpose, a ``LedgerError`` such as ``PluginFailure``, reaches the caller as it is;
anything else becomes ``HandlerFailed``, with the traceback in the log.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from tidings.core.clock import Clock, within
from tidings.core.settings import Settings

from .errors import HandlerFailed, HandlerTimedOut, LedgerError, PluginUnloaded

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PROBLEM_CHARS_MAX: Final = 500


class PluginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the plugin on a shelf."""

    shelf: str
    request_type: str
    payload: bytes = b""
    instance_id: str | None = None
    """Which of a factory's instances is meant."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a warden is asked to take custody of."""

    handle_id: str
    shelf: str
    custody_type: str
    payload: bytes = b""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """A change of course for work that a warden has custody of."""

    handle_id: str
    shelf: str
    correction_type: str
    payload: bytes = b""


@runtime_checkable
class Respondent(Protocol):
    """A handler that answers requests."""

    async def handle_request(self, request: PluginRequest) -> bytes:
        """The answer."""
        ...


@runtime_checkable
class Warden(Protocol):
    """A handler that looks after long-running work. It may answer requests too."""

    async def take_custody(self, assignment: Assignment) -> None:
        """Begin the work, or raise. It may report states of it from here on."""
        ...

    async def correct_course(self, correction: Correction) -> None:
        """Change the work, or raise."""
        ...

    async def release_custody(self, handle_id: str) -> None:
        """End the work, or raise; then custody goes on."""
        ...


Handler = Respondent | Warden


class InteractionKind(enum.StrEnum):
    """How others deal with a plugin."""

    RESPONDENT = "respondent"
    WARDEN = "warden"


class CorrectionFailure(enum.StrEnum):
    """What a correction that failed or took too long means for the work."""

    ABORT = "abort"
    """It is over."""
    PARTIAL_OK = "partial_ok"
    """It goes on, degraded."""


class InstancePolicy(enum.StrEnum):
    """When a factory may announce and retract instances. At unload all are retracted, whatever the policy."""

    DYNAMIC = "dynamic"
    STARTUP_ONLY = "startup_only"
    """None is announced after loading is finished."""
    SHUTDOWN_ONLY = "shutdown_only"
    """None is retracted before the plugin is unloaded."""


_Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]


class Manifest(Settings, frozen=True, kw_only=True):
    """What a plugin declares of itself."""

    shelves: tuple[str, ...] = ()
    """The shelves it stands on, as ``rack.shelf``. A shelf has room for one plugin."""
    version: str | None = None
    corrections: tuple[str, ...] | None = None
    """The types of corrections that it takes; none given: all are passed on to it."""
    on_failed_correction: CorrectionFailure = CorrectionFailure.ABORT
    instances: InstancePolicy = InstancePolicy.DYNAMIC
    request_ms_max: _Milliseconds = 30_000
    custody_ms_max: _Milliseconds = 30_000
    """How long taking and releasing may take, each."""
    correction_ms_max: _Milliseconds = 5_000

    def conflicts(self) -> Iterable[tuple[str, str]]:
        for shelf in self.shelves:
            rack, _, name = shelf.partition(".")
            if not rack or not name:
                yield "shelves", f"{shelf!r} is not written as rack.shelf"
        if len(set(self.shelves)) < len(self.shelves):
            yield "shelves", "one is named twice"


class Calls:
    """
    The calls of one plugin's handler that are under way.

    Args:
        plugin: Whose.
        clock: Measures their time.
    """

    def __init__(self, plugin: str, clock: Clock) -> None:
        self._plugin = plugin
        self._clock = clock
        self._tasks: set[asyncio.Future[Any]] = set()
        self._is_over = False

    async def run(self, name: str, call: Callable[[], Awaitable[T]], ms_max: int) -> T:
        """
        Await a call of the handler.

        Args:
            name: What is called, for messages.
            call: Calls it.
            ms_max: How long it may take. It is cancelled then.

        Raises:
            LedgerError: As the handler raised it.
            HandlerFailed: It raised something else.
            HandlerTimedOut: It took too long.
            PluginUnloaded: The plugin was unloaded meanwhile, and would not wait.
        """

        async def called() -> T:
            return await call()

        task = asyncio.ensure_future(called())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            if not await within(self._clock, ms_max / 1000, task):
                raise HandlerTimedOut(self._plugin, name, ms_max)
        finally:
            task.cancel()
        if task.cancelled() and self._is_over:
            raise PluginUnloaded(self._plugin)
        error = asyncio.CancelledError("cancelled itself") if task.cancelled() else task.exception()
        if error is None:
            return task.result()
        if isinstance(error, LedgerError) or not isinstance(error, Exception | asyncio.CancelledError):
            raise error
        logger.error("%r failed in %s", self._plugin, name, exc_info=error)
        raise HandlerFailed(self._plugin, name, problem_of(error)) from error

    async def finish(self, seconds: float) -> None:
        """Let the calls under way finish, for at most so long; then cancel them."""
        self._is_over = True
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await within(self._clock, seconds, asyncio.gather(*tasks, return_exceptions=True))
        for task in tasks:
            task.cancel()

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also when nobody waits any more


def problem_of(error: BaseException) -> str:
    """What an exception says, as text that fits a record."""
    text = str(error) or type(error).__name__
    return text[:_PROBLEM_CHARS_MAX].encode(errors="replace").decode()
