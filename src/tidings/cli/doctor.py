"""``tidings doctor``: whether this machine, this installation and this workspace are fit, and what to do about what is not."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Final, Literal, NamedTuple

import typer

from tidings import __version__
from tidings.core.clock import datetime_of
from tidings.core.errors import SettingsError, TidingsError
from tidings.core.installing import install_line
from tidings.log.embedded.disk import DiskSpace, OsDisk
from tidings.log.embedded.sizing import FIRST_FILE_BYTES, refuse_impossible
from tidings.log.errors import WorkspaceMissing
from tidings.log.line_codec import IS_COMPILED
from tidings.log.settings import LogSettings
from tidings.server.address import read_address

from .context_file import contexts_path
from .output import EXTRAS, ExitCode, as_typed, human_bytes
from .session import Session, command

app = typer.Typer(rich_markup_mode=None)

_FREE_BYTES_MIN: Final = 1 << 30
_FILES_MIN: Final = 1024
_SYNC_BYTES: Final = 4096
_SYNC_COUNT: Final = 20
_HONEST_SYNC_NS: Final = 20_000
"""No disk that keeps its word answers sooner, not even one with a battery."""
_NOT_A_DISK: Final = frozenset({"tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "vboxsf"})
_TIME_ERROR: Final = 5
_PIPELINE: Final = "pipeline"


class CheckResult(NamedTuple):
    """What was found about one thing."""

    check: str
    state: Literal["ok", "warning", "problem"]
    found: str
    hint: str | None = None


@command(app, "doctor", examples="tidings doctor\ntidings doctor -w ./workspace --port 9000\ntidings doctor --json")
async def doctor(
    session: Session,
    *,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, metavar="P", help="The port that a node would take.")
    ] = 8787,
) -> None:
    """
    Look at the set-up, the disk and how honest its sync is, the clock, ports, Java, permissions and free space.

    Nothing is changed: a scratch file beside the workspace is written to time the sync, and removed. Exit code 1 if there is a problem;
    warnings are none.
    """
    findings = [
        *_installation(),
        *await _workspace(session),
        *_disk(session),
        _clock(),
        _port(session, port),
        *_java(),
        _open_files(),
        *_contexts(),
    ]
    session.out.listing(
        "Checks",
        ("", "check", "found"),
        findings,
        lambda each: ({"ok": "ok", "warning": "!", "problem": "PROBLEM"}[each.state], each.check, each.found),
        CheckResult._asdict,
        empty="nothing was looked at",
    )
    for each in findings:
        if each.hint is not None:
            session.out.text(as_typed(f"{each.check}: {each.hint}"))
    if any(each.state == "problem" for each in findings):
        raise typer.Exit(ExitCode.PROBLEM)


def _installation() -> Iterator[CheckResult]:
    about = f"tidings {__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield CheckResult("version", "ok", about)
    if IS_COMPILED:
        yield CheckResult("compiled part", "ok", "in use")
    else:
        yield CheckResult(
            "compiled part", "warning", "not there: publishing is slower", "install again where there is a C compiler"
        )
    for extra in sorted(set(EXTRAS.values())):
        missing = sorted(name for name, of in EXTRAS.items() if of == extra and importlib.util.find_spec(name) is None)
        if missing:
            yield CheckResult(
                f"extra {extra}",
                "ok",
                f"not installed ({', '.join(missing)})",
                f"if you need it: {install_line(extra)}",
            )
        else:
            yield CheckResult(f"extra {extra}", "ok", "installed")


async def _workspace(session: Session) -> list[CheckResult]:
    folder, findings = session.workspace, list[CheckResult]()
    try:
        async with session.reading() as log:
            position, newest = (
                log.position,
                max(
                    (
                        segment.last_written_at
                        for info in log.topics().values()
                        for segment in info.segments
                        if segment.lines
                    ),
                    default=None,
                ),
            )
    except WorkspaceMissing:
        if folder.exists() and not folder.is_dir():
            return [CheckResult("workspace", "problem", f"{folder} is no folder", "name another with --workspace")]
        findings.append(CheckResult("workspace", "ok", f"{folder} is not there yet; the first event makes it"))
        return findings
    except (TidingsError, OSError) as error:
        hint = getattr(error, "hint", None) or "see what `tidings log verify` finds"
        findings.append(CheckResult("workspace", "problem", f"{folder} cannot be opened: {error}", hint))
        return findings
    writer, address = session.writer(), read_address(folder)
    holder = (
        "nobody writes it now"
        if writer is None
        else f"written by process {writer}"
        if address is None
        else f"held by the node at {address.url}"
    )
    findings.append(CheckResult("workspace", "ok", f"{folder}: through seq {position.seq}, {holder}"))
    now = datetime_of(session.clock.now_ns()).isoformat()
    if newest is not None and newest > now:
        findings.append(
            CheckResult(
                "clock and log",
                "problem",
                f"the newest record was written at {newest}, which is later than now",
                "set the clock right: nothing is dropped by age meanwhile, and if it is a day and more, jobs go by this clock",
            )
        )
    missing = session.layout.missing_folders(OsDisk())
    if missing:
        names = ", ".join(each.name for each in missing)
        findings.append(CheckResult("folders", "ok", f"{names}: missing; made when the log is opened"))
    used = [session.layout.root, *(each for each in session.layout.root.iterdir() if each.is_dir())]
    if not all(os.access(each, os.W_OK) for each in (folder, session.layout.lock, *used)):
        owner = folder.stat().st_uid
        findings.append(
            CheckResult(
                "permissions",
                "problem",
                f"{folder} belongs to uid {owner}, and you cannot write it",
                "run as its owner, or ask the node that has it by --node",
            )
        )
    else:
        is_open = bool(stat.S_IMODE(folder.stat().st_mode) & stat.S_IWOTH)
        findings.append(
            CheckResult("permissions", "warning", "everybody may write the folder", f"chmod o-w {folder}")
            if is_open
            else CheckResult("permissions", "ok", "you can write it, others cannot")
        )
    return findings


def _disk(session: Session) -> Iterator[CheckResult]:
    folder = nearest_folder(session.workspace)
    kind = _file_system(folder)
    yield _space(session, OsDisk().space(folder))
    try:
        times_ns = sync_times_ns(folder, session.clock.monotonic, _SYNC_COUNT)
    except OSError as error:
        yield CheckResult(
            "sync",
            "problem",
            f"no file can be written in {folder}: {error.strerror}",
            "make the folder writable, or run as its owner",
        )
        return
    took = f"{median(times_ns) / 1e6:.2f} ms in the middle of {len(times_ns)}, on {kind}"
    if kind in _NOT_A_DISK:
        yield CheckResult(
            "sync",
            "warning",
            took,
            f"{kind} is no disk of this machine: what is acknowledged may not survive a power cut",
        )
    elif median(times_ns) < _HONEST_SYNC_NS:
        yield CheckResult(
            "sync", "warning", took, "no disk is that fast: something in between says that it is stored before it is"
        )
    else:
        yield CheckResult("sync", "ok", f"{took}: as long as a disk takes")


def _space(session: Session, space: DiskSpace) -> CheckResult:
    """Whether the file system can hold the log and more events."""
    free = f"{human_bytes(space.free_bytes)} of {human_bytes(space.total_bytes)} free"
    held = sum(file.stat().st_size for file in session.layout.wal.rglob("*.jsonl"))
    kept = sum(file.stat().st_size for file in (session.layout.reserve, session.layout.room) if file.exists())
    about = (
        f"{free}; the workspace holds {human_bytes(held)} of records and keeps {human_bytes(kept)} back for a full disk"
    )
    if held:
        hint = "make room: `tidings log retention --max-age-days 30` shows what may go"
    else:
        hint = "make room on this file system: the workspace holds nothing that could go"
    try:
        refuse_impossible(LogSettings(), space)
    except SettingsError as error:
        return CheckResult("free space", "problem", error.problem, error.hint)
    if space.free_files is not None and space.free_files < _FILES_MIN:
        found = f"{free}, but only {space.free_files} more files (inodes)"
        return CheckResult("free space", "problem", found, "remove files that are not needed: each topic takes some")
    if space.free_bytes < 3 * FIRST_FILE_BYTES and kept < 2 * FIRST_FILE_BYTES:
        return CheckResult("free space", "problem", f"{about}: too little to take events", hint)
    if space.free_bytes < _FREE_BYTES_MIN:
        return CheckResult("free space", "warning", about, hint)
    return CheckResult("free space", "ok", free)


def nearest_folder(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def sync_times_ns(folder: Path, monotonic: Callable[[], float], count: int) -> list[int]:
    """How long each of so many appends of one page to a scratch file takes, sync included, as the log's journal does them."""
    times: list[int] = []
    with tempfile.TemporaryDirectory(prefix=".tidings-sync-", dir=folder) as scratch:
        file = OsDisk().open(Path(scratch) / "file", create=True)
        try:
            page = bytes(_SYNC_BYTES)
            file.write(0, page * count)
            file.sync()
            for at in range(count):
                began = monotonic()
                file.write(at * _SYNC_BYTES, page)
                file.sync()
                times.append(round((monotonic() - began) * 1e9))
        finally:
            file.close()
    return times


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, as the kernel names it."""
    kinds: dict[str, str] = {}
    try:
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, place, kind, *_ = line.split(" ")
            kinds[place.encode().decode("unicode_escape")] = kind
    except (OSError, ValueError):
        return "an unknown file system"
    while str(folder) not in kinds and folder != folder.parent:
        folder = folder.parent
    return kinds.get(str(folder), "an unknown file system")


def _clock() -> CheckResult:
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: asks, and sets nothing
    except (OSError, AttributeError):
        return CheckResult("clock", "ok", "whether it is kept right cannot be asked here")
    if state == _TIME_ERROR:
        return CheckResult(
            "clock",
            "warning",
            "nobody keeps it right",
            "start a time service such as chrony: times of records come from this clock",
        )
    return CheckResult("clock", "ok", "kept right by a time service")


def _port(session: Session, port: int) -> CheckResult:
    address = read_address(session.workspace)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if address is not None and address.url.endswith(f":{port}") and session.writer() is not None:
                return CheckResult("port", "ok", f"{port} has this workspace's node")
            return CheckResult(
                "port",
                "warning",
                f"{port}: {error.strerror}",
                "give a node another one: `tidings serve --port 0` takes a free one",
            )
    return CheckResult("port", "ok", f"{port} is free")


def _java() -> Iterator[CheckResult]:
    if any(of == _PIPELINE and importlib.util.find_spec(name) is None for name, of in EXTRAS.items()):
        return  # without the extra nothing needs one
    from tidings.pipeline.java import find_java

    with tempfile.TemporaryDirectory() as cache:
        try:
            found = find_java(os.environ, Path(cache))  # noqa: TID251 - where a pipeline run looks for it
        except TidingsError as error:
            yield CheckResult("java", "warning", error.describe(), f"{error.hint}; only the pipeline needs it")
        else:
            yield CheckResult("java", "ok", f"version {found.version}, by {found.origin}")


def _open_files() -> CheckResult:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _FILES_MIN:
        return CheckResult("open files", "warning", f"at most {limit}", f"allow {_FILES_MIN} or more: ulimit -n 8192")
    return CheckResult("open files", "ok", f"at most {limit}")


def _contexts() -> Iterator[CheckResult]:
    path = contexts_path()
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield CheckResult("contexts", "problem", f"{path} holds tokens, and others may read it", f"chmod 600 {path}")
