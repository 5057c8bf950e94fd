"""
What the commands have in common: how they are registered and run, their workspace, shared options, typed values, confirmation.

``command`` registers a function with Typer: a coroutine function or, for work that never waits and that Ctrl-C must end at once, a plain
one. Its first parameter is a ``Session``; the options that all commands share are added after its own, so that
``tidings log read --json -w DIR`` works in any order.

A command that changes the workspace plans first, and shows that with ``--dry-run``; then it asks, opens the log as its one writer, plans
again, as things may have changed meanwhile, records the change with ``user_audit``, and makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import typer

from tidings.access.administration import Request, send
from tidings.access.audit import Audit
from tidings.access.errors import NodeRefused, NodeUnreachable
from tidings.core.clock import SYSTEM_CLOCK, Clock, datetime_of
from tidings.core.names import check_topic
from tidings.log.embedded.disk import OsDisk, size_of
from tidings.log.embedded.engine import EmbeddedLog
from tidings.log.embedded.follower import FollowerLog, open_follower
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.lmdb_index import LmdbIndex
from tidings.log.embedded.opening import open_log
from tidings.log.encryption import AesGcmEncryptor, Encryptor
from tidings.log.errors import UnknownTopic, WorkspaceError, WorkspaceMissing
from tidings.log.interface import ReadableLog
from tidings.log.keys import KeyFile
from tidings.log.settings import LogSettings
from tidings.pipeline.storage import LAKE_FOLDER, Storage
from tidings.server.address import NodeAddress, read_token

from .context_file import chosen_node, is_context_in_use
from .node_log import NodeTarget, Token, open_node_log
from .output import ExitCode, Output, UsageProblem, discard_stdout, from_os_error

P = ParamSpec("P")
T = TypeVar("T")
Body = Callable[Concatenate["Session", P], Coroutine[Any, Any, None] | None]

WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "--workspace",
        "-w",
        metavar="DIR",
        envvar="TIDINGS_WORKSPACE",
        help="The folder that holds the log; ./workspace if left out.",
    ),
]
NodeOption = Annotated[
    str | None,
    typer.Option(
        "--node", metavar="URL", help="Ask this node and no workspace: its address, or the name of a context."
    ),
]
LakeOption = Annotated[
    str | None,
    typer.Option(
        "--lake",
        metavar="PLACE",
        envvar="TIDINGS_LAKE",
        help="The lake, if it is not in the workspace: a folder, or s3://..., abfss://..., gs://...",
    ),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="NAME=VALUE",
        envvar="TIDINGS_STORAGE_OPTIONS",
        show_envvar=True,
        help="What the object store wants to know, by delta-rs's names; may be repeated.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Show what the library logs.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", metavar="FILE", envvar="TIDINGS_KEY_FILE", help="Keys of the spaces that are sealed."),
]
OffsetsKeyOption = Annotated[
    Path | None,
    typer.Option("--offsets-key", metavar="FILE", help="The key that seals the offset files, where the bus has one."),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="TOKEN", envvar="TIDINGS_TOKEN", help="What to show to a node; the context's if left out."
    ),
]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
AnyTopicArgument = Annotated[
    str | None, typer.Argument(metavar="TOPIC", help="Only this topic; all of them if left out.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

WORKSPACE_DEFAULT: Final = Path("workspace")
OF_FILES: Final = "Works on a workspace's files, which -w names: nodes and contexts do not count."
"""What the help of a command says that has a workspace and cannot ask a node."""
# One command writes little: a journal of the engine's own size would take longer to make than to use.
_JOURNAL_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Session:
    """One run of one command."""

    workspace: Path
    out: Output
    clock: Clock = SYSTEM_CLOCK
    lake_place: str | None = None
    storage_options: tuple[str, ...] = field(default=(), repr=False)
    node: NodeAddress | None = None
    """The node that is to be asked, by ``--node`` or the context in use; then there is no workspace."""
    token: Token | None = field(default=None, repr=False)
    """What to show to a node."""

    @property
    def lake(self) -> Storage:
        """
        Where the workspace's lake is.

        Raises:
            SettingsError: The address will not do.
        """
        options: dict[str, str] = {}
        for text in self.storage_options:
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise UsageProblem("--storage-option: give NAME=VALUE")  # not what was given: it may be a key
            options[name] = value
        return Storage.of(self.lake_place or self.workspace / LAKE_FOLDER, options)

    @property
    def layout(self) -> Layout:
        """Where the workspace's files are."""
        return Layout(self.workspace)

    def settings(self) -> LogSettings:
        """
        The settings that suit the workspace as it is.

        Raises:
            UsageProblem: A node is to be asked, and this needs the files.
            WorkspaceMissing, UnsupportedFormat, WorkspaceError
        """
        if self.node is not None:
            raise UsageProblem(
                f"this needs the files of a workspace, and {self.node.url} is to be asked",
                "give --workspace, no --node",
            )
        disk = OsDisk()
        is_by_space = self.layout.read_meta(disk).layout == "space"
        # A larger reserve that the workspace's own program keeps is not made smaller: that program may need all of it.
        held_bytes = size_of(disk, self.layout.reserve) or 0
        reserve_bytes = held_bytes if held_bytes > 2 * _JOURNAL_BYTES else None
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
    async def reading(self, key_file: Path | None = None, *, has_segments: bool = False) -> AsyncIterator[ReadableLog]:
        """The log: that of the node to be asked, else the workspace's, beside its writer or without one; of a node with segments if that is said."""
        if self.node is not None:
            refuse_keys(self.node, key_file)
            yield await open_node_log(self.target(self.node), has_segments=has_segments)
            return
        async with self.following(key_file) as log:
            yield log

    @contextlib.asynccontextmanager
    async def following(self, key_file: Path | None = None) -> AsyncIterator[FollowerLog]:
        """The workspace's log, opened beside its writer or without one."""
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
            # Shared, and released at once: this only asks, and locks nobody out.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(lock, 64, 0).decode(errors="replace").strip() or "another process"
        finally:
            os.close(lock)
        return None

    def target(self, address: NodeAddress) -> NodeTarget:
        """
        The node at this address, with what there is to show it.

        Raises:
            UsageProblem: There is no token, and the node wants one.
            NodeUnreachable: It does not answer.
        """
        token, own = self.token, None if self.node is not None else read_token(self.workspace)
        if own is not None and token is None:
            token = Token(own, "the dev node's own, in its workspace")
        elif own is not None and token is not None and token.text != own:
            token = token._replace(instead="the dev node's own is shown without it")
        if token is None:
            try:  # one whose access is open knows everybody
                send(address.url, Request("GET", "/v1/whoami", b""), None, address.certificate)
            except NodeRefused:
                raise UsageProblem(
                    f"the node at {address.url} wants a token, and there is none to show",
                    "give a token that may do this by TIDINGS_TOKEN or --token",
                ) from None
        return NodeTarget(address, token)


def refuse_keys(address: NodeAddress, key_file: Path | None) -> None:
    """
    Make sure that no key file was given for what a node does.

    Raises:
        UsageProblem: One was.
    """
    if key_file is not None:
        hint = "leave out --key-file and TIDINGS_KEY_FILE"
        raise UsageProblem(f"the node at {address.url} seals and opens with its own keys", hint)


def known_topic(log: ReadableLog, topic: str) -> str:
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
    app: typer.Typer,
    name: str,
    *,
    examples: str,
    ends_on_interrupt: bool = False,
    has_lake: bool = False,
    has_workspace: bool = True,
    asks_node: bool = False,
    has_log_lines: bool = False,
) -> Callable[[Body[P]], Body[P]]:
    """
    Register a function as a command.

    Args:
        app: The noun it belongs to.
        name: The verb.
        examples: Command lines to show below its help, one a line.
        ends_on_interrupt: Whether Ctrl-C is how it normally ends (exit code 0, not 130).
        has_lake: Whether it uses the lake, and is to be told where that is.
        has_workspace: Whether it is about a workspace, and is to be told where that is.
        asks_node: Whether it can ask a node, and is to be told which, and what to show it.
        has_log_lines: Whether the library's warnings are shown in any case: it runs for long.
    """

    is_of_files = has_workspace and not asks_node

    def register(body: Body[P]) -> Body[P]:
        def run(
            *,
            is_json: bool,
            is_verbose: bool,
            is_debug: bool,
            workspace: Path | None = None,
            lake: str | None = None,
            storage_option: list[str] | None = None,
            node_asked: str | None = None,
            token_shown: str | None = None,
            **options: Any,
        ) -> None:
            node, token = None, None
            if asks_node:
                node, token = chosen_node(node_asked, token_shown, has_workspace=workspace is not None)
            by_context = node if node_asked is None else None
            session = Session(
                workspace or WORKSPACE_DEFAULT,
                Output(is_json=is_json),
                lake_place=lake,
                storage_options=tuple(storage_option or ()),
                node=node,
                token=token,
            )
            if by_context is not None and has_workspace and WORKSPACE_DEFAULT.is_dir():
                session.out.note(
                    f"at {by_context.url}, the context in use; for the folder here: -w {WORKSPACE_DEFAULT}"
                )
            elif is_of_files and workspace is None and lake is None and is_context_in_use():
                session.out.note(
                    f"in the files of {WORKSPACE_DEFAULT}, whatever context is in use; -w DIR names other files"
                )
            with _logging(logging.DEBUG if is_verbose or is_debug else logging.WARNING if has_log_lines else None):
                try:
                    work = body(session, **options)  # type: ignore[call-arg]  # its signature is given below
                    if work is not None:
                        asyncio.run(work)
                    session.out.flush()
                except KeyboardInterrupt:
                    if not ends_on_interrupt:
                        raise
                    session.out.flush()
                except NodeUnreachable as error:
                    if by_context is not None:
                        error.hint = "the context in use names it; choose by `tidings context use NAME`, --node or -w"
                    raise
                except BrokenPipeError:
                    discard_stdout()
                except OSError as error:
                    raise from_os_error(error) from error

        own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]
        functools.update_wrapper(run, body)
        if is_of_files:
            run.__doc__ = f"{inspect.cleandoc(body.__doc__ or '')}\n\n{OF_FILES}"
        shared = _shared(has_lake=has_lake, has_workspace=has_workspace, asks_node=asks_node)
        run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
        summary = inspect.cleandoc(body.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        app.command(name, short_help=summary, epilog=f"\b\nExamples:\n{lines}")(run)
        return body

    return register


def _shared(*, has_lake: bool, has_workspace: bool, asks_node: bool) -> list[inspect.Parameter]:
    options: tuple[tuple[str, Any, object], ...] = (
        *((("lake", LakeOption, None), ("storage_option", StorageOption, None)) if has_lake else ()),
        *((("node_asked", NodeOption, None), ("token_shown", TokenOption, None)) if asks_node else ()),
        *((("workspace", WorkspaceOption, None),) if has_workspace else ()),
        ("is_json", JsonOption, False),
        ("is_verbose", VerboseOption, False),
        ("is_debug", DebugOption, False),
    )
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, annotation, default in options
    ]


@contextlib.contextmanager
def _logging(level: int | None) -> Iterator[None]:
    """The library's log on stderr from a level on; otherwise none, as errors are reported once, at the end."""
    logger = logging.getLogger("tidings")
    before = logger.level, logger.propagate
    handler: logging.Handler = logging.NullHandler() if level is None else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.CRITICAL if level is None else level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def check_dry_run(*, is_dry_run: bool, is_yes: bool) -> None:
    """
    Make sure that the options agree.

    Raises:
        UsageProblem: They do not.
    """
    if is_dry_run and is_yes:
        raise UsageProblem("--dry-run and --yes exclude each other")


def confirm(out: Output, question: str, *, is_yes: bool) -> None:
    """
    Go ahead by ``--yes``, or by what the person at the terminal answers; otherwise the command ends here.

    Raises:
        UsageProblem: Nobody is there to be asked.
    """
    if is_yes:
        return
    if out.is_json or not sys.stdin.isatty():
        raise UsageProblem(
            "there is no terminal to ask on, so nothing was changed", "look with --dry-run, then give --yes"
        )
    out.note(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        out.note("nothing was changed")
        raise typer.Exit(ExitCode.PROBLEM)


def user_audit() -> Audit:
    """The user of the machine, as the audit names them."""
    return Audit(f"cli:uid-{os.getuid()}", "cli")


_SPAN: Final = re.compile(r"([0-9]{1,9})([smhdw])")
_SPAN_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_SIZE_FACTORS: Final[dict[str, int]] = {
    "b": 1,
    **{f"{letter}b": int(1000**power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": int(1024**power) for power, letter in enumerate("kmgt", 1)},
}


def parse_time(option: str, text: str, clock: Clock) -> datetime:
    """
    A moment: RFC 3339 with a zone, a date (its first moment in UTC), or a span such as ``15m`` (so long ago).

    Raises:
        UsageProblem: It is none of these. A time without a zone is refused, not guessed.
    """
    seconds = parse_span(text)
    if seconds is not None:
        try:
            return datetime_of(clock.now_ns()) - timedelta(seconds=seconds)
        except OverflowError:
            raise UsageProblem(f"{option}: {text} ago is before all time") from None
    hint = "give a time with its zone (2026-03-01T12:00:00Z), a date (2026-03-01) or a span (90s, 15m, 2h, 7d, 4w)"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageProblem(f"{option}: {text!r} is not a time", hint) from None
    if moment.utcoffset() is None:
        if "T" in text or " " in text:
            raise UsageProblem(f"{option}: {text!r} has no time zone", hint)
        moment = moment.replace(tzinfo=UTC)
    return moment


def parse_span(text: str) -> int | None:
    """The seconds of a span such as ``90s``, ``15m``, ``2h``, ``7d`` or ``4w``; ``None`` if it is not one."""
    span = _SPAN.fullmatch(text)
    return None if span is None else int(span[1]) * _SPAN_SECONDS[span[2]]


def read_text(file: Path, bytes_max: int) -> str:
    """
    A text file, or stdin for ``-``, of at most so many bytes.

    Raises:
        UsageProblem: It is not UTF-8.
    """
    if str(file) == "-":
        data = sys.stdin.buffer.read(bytes_max)
    else:
        with file.open("rb") as stream:
            data = stream.read(bytes_max)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageProblem(f"{file} is not UTF-8 text") from None


def parse_size(text: str) -> int:
    """
    A number of bytes: ``1048576``, ``500MB``, ``2GiB``.

    Raises:
        ValueError: It is not one.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("is not a size such as 1048576, 500MB or 2GiB")
    factor = _SIZE_FACTORS[(found[2] or "B").lower()]
    return int(found[1]) * factor


def parse_days(text: str) -> float:
    """
    A number of days above zero.

    Raises:
        ValueError: It is not one.
    """
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days < 1_000_000:  # also refuses NaN
        raise ValueError("is not a number of days above 0")
    return days


def by_topic(option: str, given: Iterable[str], parse: Callable[[str], T]) -> dict[str, T]:
    """
    Values such as ``30`` (for every topic, under ``*``) and ``demo=7`` (for one).

    Raises:
        UsageProblem: A value or a topic is not valid, or a topic is named twice.
        InvalidName: That is no topic's name.
    """
    found: dict[str, T] = {}
    for text in given:
        topic, equals, value = text.rpartition("=")
        topic = check_topic(topic) if equals else "*"
        if topic in found:
            raise UsageProblem(f"{option}: {'all topics' if topic == '*' else topic} was given twice")
        try:
            found[topic] = parse(value)
        except ValueError as error:
            raise UsageProblem(f"{option}: {value!r} {error}") from None
    return found
