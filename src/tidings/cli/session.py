"""
What every command has in common: its options, its workspace, how it runs and how it ends.

``command`` registers a function with Typer, a coroutine function or (for work that never waits, and that Ctrl-C
must end at once) a plain one. Its first parameter is a ``Session``; the options that
all commands share are added behind its own, so that ``tidings log read --json -w DIR`` works in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, Final, Literal, ParamSpec

import typer

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.log.embedded.disk import OsDisk, size_of
from tidings.log.embedded.engine import EmbeddedLog
from tidings.log.embedded.follower import FollowerLog, open_follower
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.lmdb_index import LmdbIndex
from tidings.log.embedded.opening import open_log
from tidings.log.encryption import AesGcmEncryptor, Encryptor, KeyFile
from tidings.log.errors import UnknownTopic, WorkspaceError, WorkspaceMissing
from tidings.log.interface import Log
from tidings.log.settings import LogSettings

from .errors import from_os_error
from .output import Output

__all__ = ["KeyFileOption", "Session", "command", "encryptor_of"]

P = ParamSpec("P")
Body = Callable[Concatenate["Session", P], Coroutine[Any, Any, None] | None]

WorkspaceOption = Annotated[
    Path,
    typer.Option("--workspace", "-w", metavar="DIR", envvar="TIDINGS_WORKSPACE", help="The folder that holds the log."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Show what the library logs.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", metavar="FILE", envvar="TIDINGS_KEY_FILE", help="Keys of the spaces that are sealed."),
]

WORKSPACE_DEFAULT: Final = Path("workspace")
# One command writes little: a journal of the engine's own size would take longer to make than to use.
_JOURNAL_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Session:
    """One run of one command."""

    workspace: Path
    out: Output
    clock: Clock = SYSTEM_CLOCK

    @property
    def layout(self) -> Layout:
        """Where the workspace's files are."""
        return Layout(self.workspace)

    def settings(self) -> LogSettings:
        """
        The settings that suit the workspace as it is.

        Raises:
            WorkspaceMissing, UnsupportedFormat, WorkspaceError
        """
        disk = OsDisk()
        is_by_space = self.layout.read_meta(disk).layout == "space"
        # The reserve that the workspace's own program keeps is not made smaller: that program may need all of it.
        reserve_bytes = max(size_of(disk, self.layout.reserve) or 0, 2 * _JOURNAL_BYTES)
        layout: Literal["flat", "space"] = "space" if is_by_space else "flat"
        return LogSettings(journal_bytes=_JOURNAL_BYTES, reserve_bytes=reserve_bytes, layout=layout)

    def settings_if_damaged(self) -> LogSettings:
        """
        The settings that suit the workspace, or the defaults where the file that says so is itself damaged.

        Raises:
            WorkspaceMissing, WorkspaceUnusable, UnsupportedFormat
        """
        try:
            return self.settings()
        except WorkspaceError as error:
            if type(error) is not WorkspaceError:
                raise
            return LogSettings()

    @contextlib.asynccontextmanager
    async def reading(self, key_file: Path | None = None) -> AsyncIterator[FollowerLog]:
        """The log, opened beside its writer or without one."""
        log = await open_follower(self.workspace, self.settings(), clock=self.clock, encryptor=encryptor_of(key_file))
        try:
            yield log
        finally:
            await log.close()

    @contextlib.asynccontextmanager
    async def writing(self, key_file: Path | None = None, *, may_create: bool = False) -> AsyncIterator[EmbeddedLog]:
        """The log, opened as its one writer; made if it is missing and that is wanted."""
        encryptor = encryptor_of(key_file)
        try:
            settings = self.settings()
        except WorkspaceMissing:
            if not may_create:
                raise
            settings = LogSettings(journal_bytes=_JOURNAL_BYTES)
            self.out.note(f"making a new log in {self.workspace}")
        log = await open_log(self.workspace, settings, clock=self.clock, encryptor=encryptor)
        try:
            yield log
        finally:
            await log.close()

    @contextlib.contextmanager
    def index(self) -> Iterator[LmdbIndex | None]:
        """The index as its readers see it; ``None`` if there is none yet, or nobody can say whether it is this log's."""
        layout, bytes_max = self.layout, self.settings_if_damaged().index_bytes_max
        try:
            epoch = layout.read_meta(OsDisk()).epoch
        except WorkspaceError:
            epoch = None
        if epoch is None or not layout.index.exists():
            yield None
            return
        index = LmdbIndex.open(layout.index, epoch=epoch, map_bytes_max=bytes_max, read_only=True)
        try:
            yield index
        finally:
            index.close()

    def writer(self) -> str | None:
        """Who has the workspace open for writing now; ``None`` if nobody has."""
        try:
            lock = os.open(self.layout.lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # Shared, and let go at once: this asks, and keeps nobody out.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(lock, 64, 0).decode(errors="replace").strip() or "another process"
        finally:
            os.close(lock)
        return None


def known_topic(log: Log, topic: str) -> str:
    """
    The topic, if the log has it.

    Raises:
        UnknownTopic: It has not; the hint names some that it has.
    """
    topics = log.topics()
    if topic not in topics:
        error = UnknownTopic(topic)
        error.hint = f"there are: {', '.join(list(topics)[:10])}" if topics else "the log has no topics yet"
        raise error
    return topic


def encryptor_of(key_file: Path | None) -> Encryptor | None:
    """What opens and seals payloads with these keys; ``None`` without any."""
    return None if key_file is None else AesGcmEncryptor(KeyFile(key_file))


def command(
    app: typer.Typer, name: str, *, examples: str, ends_on_interrupt: bool = False
) -> Callable[[Body[P]], Body[P]]:
    """
    Register a function as a command.

    Args:
        app: The noun it belongs to.
        name: The verb.
        examples: Command lines to show below its help, one a line.
        ends_on_interrupt: Whether Ctrl-C is how it normally ends (exit code 0, not 130).
    """

    def register(body: Body[P]) -> Body[P]:
        def run(
            *,
            workspace: Path,
            is_json: bool,
            is_verbose: bool,
            is_debug: bool,
            **options: Any,
        ) -> None:
            session = Session(workspace, Output(is_json=is_json))
            with _logging(is_verbose or is_debug):
                try:
                    work = body(session, **options)  # type: ignore[call-arg]  # its signature is given below
                    if work is not None:
                        asyncio.run(work)
                    session.out.flush()
                except KeyboardInterrupt:
                    if not ends_on_interrupt:
                        raise
                    session.out.flush()
                except BrokenPipeError:
                    _let_go_of_stdout()
                except OSError as error:
                    raise from_os_error(error) from error

        own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]
        functools.update_wrapper(run, body)
        run.__signature__ = inspect.Signature([*own, *_shared()])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
        app.command(name, epilog=f"\b\nExamples:\n{lines}")(run)
        return body

    return register


def _shared() -> list[inspect.Parameter]:
    options: tuple[tuple[str, Any, object], ...] = (
        ("workspace", WorkspaceOption, WORKSPACE_DEFAULT),
        ("is_json", JsonOption, False),
        ("is_verbose", VerboseOption, False),
        ("is_debug", DebugOption, False),
    )
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, annotation, default in options
    ]


@contextlib.contextmanager
def _logging(is_verbose: bool) -> Iterator[None]:
    """The library's words on stderr if they were asked for; otherwise none, as errors are told once, at the end."""
    logger = logging.getLogger("tidings")
    before = logger.level, logger.propagate
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if is_verbose else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if is_verbose else logging.CRITICAL)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _let_go_of_stdout() -> None:
    """The reader of our pipe has seen enough: what is still buffered goes nowhere, and nobody complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
