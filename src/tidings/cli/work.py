"""
``tidings work``: the subscribers of a bus, until the process is told to stop.

One process works on the workspace itself, or through the node that holds it. Several share the groups through a node. With several
processes, or with ``--reload``, this process only looks after the others: each is ``tidings work --member``, which is told the token by its stdin
and stops when that ends, so that none outlives this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any, Final

import typer

from tidings.bus.eventbus import EventBus
from tidings.core.clock import Clock

from .administration import node_of
from .context_file import chosen_node
from .ledger_access import trusting
from .node_log import NodeTarget
from .output import ExitCode, Output, UsageProblem
from .session import NodeOption, Session, TokenOption, command

app = typer.Typer(rich_markup_mode=None)

_START_S: Final = 5.0
"""A worker that ends sooner after its start could not start; one that ends later is started again."""
_RESTART_S: Final = 1.0
_LOOK_S: Final = 0.5
_FOLDERS_PASSED_OVER: Final = frozenset({"__pycache__", "node_modules", "site-packages"})


@command(
    app,
    "work",
    has_workspace=False,
    ends_on_interrupt=True,
    has_log_lines=True,
    examples="""
        tidings work app.py
        tidings work app:bus
        tidings work shop.events:bus --processes 4
        tidings work app:bus --reload
        tidings work app:bus --node http://127.0.0.1:8787
    """,
)
def work(
    session: Session,
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE[:BUS]",
            help="Where the bus is: a module, found from this folder, or a file; the bus by its name, or the only one there.",
        ),
    ],
    *,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=256, metavar="N", help="Share the groups, through a node.")
    ] = 1,
    is_reload: Annotated[
        bool, typer.Option("--reload", help="Start again when a Python file below this folder changes.")
    ] = False,
    node: NodeOption = None,
    token: TokenOption = None,
    is_member: Annotated[bool, typer.Option("--member", hidden=True)] = False,
) -> None:
    """
    Handle a bus's events, by its subscribers, until SIGTERM or Ctrl-C; handlers that are at work may finish.

    The bus's own workspace is worked on or, if a node holds that or --node names one, the node's groups are joined. Several processes always
    join through a node. One that dies is started again.
    """
    if is_member:
        token = sys.stdin.readline().strip() or None
    session = _with_node(session, node, token)
    if is_member or (processes == 1 and not is_reload):
        bus = _bus_of(target)
        asyncio.run(_work(session, bus, _node_for(session, bus, processes), is_member=is_member))
        return
    if not is_reload:  # what is wrong for all of them is said once
        _node_for(session, bus := _bus_of(target), processes)
        del bus
    # With --reload a worker writes no bytecode: it could be taken for that of a file edited meanwhile (see _remove_bytecode).
    flags = ["-u", "-B"] if is_reload else ["-u"]
    words = [sys.executable, *flags, "-m", "tidings.cli", "work", target, "--member", "--processes", str(processes)]
    words += [] if node is None else ["--node", node]
    token = None if session.token is None else session.token.text
    ended = asyncio.run(_Workers(words, token, session.clock, session.out, is_reload=is_reload).run(processes))
    if ended:
        raise typer.Exit(ended)


def _with_node(session: Session, node: str | None, token: str | None) -> Session:
    address, shown = chosen_node(
        node, token, has_workspace=True
    )  # the bus names its workspace: a context in use does not count
    return dataclasses.replace(session, node=address, token=shown)


def _bus_of(target: str) -> EventBus:
    """
    The bus that is meant: of a module or a file, by its name or, without one, the only one there.

    Raises:
        UsageProblem: There is none, or there are several, or it has no subscribers.
    """
    where, _, name = target.partition(":")
    module = _module_of(where)
    if name:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, EventBus):
            raise UsageProblem(f"{where} has no bus {name!r}", _buses_hint(where, _buses(module)))
    else:
        buses = _buses(module)
        found = buses.get("bus") or (next(iter(buses.values())) if len(set(map(id, buses.values()))) == 1 else None)
        if found is None:
            several = f"{where} has {len(buses)} buses" if buses else f"{where} has no bus"
            raise UsageProblem(several, _buses_hint(where, buses))
    if not found.get_subscriptions():
        raise UsageProblem(f"the bus {target} has no subscribers", "subscribe with @bus.subscriber(...) in its module")
    return found


def _buses(module: ModuleType) -> dict[str, EventBus]:
    return {name: each for name, each in vars(module).items() if isinstance(each, EventBus)}


def _buses_hint(where: str, buses: dict[str, EventBus]) -> str:
    if not buses:
        return "make one there with tidings.Bus(...)"
    return f"name one of: {', '.join(f'{where}:{name}' for name in sorted(buses))}"


def _module_of(where: str) -> ModuleType:
    """
    A module by its name as it is found from this folder, or by its file.

    Raises:
        UsageProblem: There is none, or it cannot be imported.
    """
    path, folder = Path(where), Path.cwd()
    if where.endswith(".py") or "/" in where:
        if not path.is_file():
            raise UsageProblem(f"there is no file {where}", f"name a file or a module; this folder is {folder}")
        place = path.resolve().with_suffix("")
        folder = folder if place.is_relative_to(folder) else place.parent
        name = ".".join(place.relative_to(folder).parts)
    else:
        name = where
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - other people's code
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            hint = f"start the command in the folder that has it; this is {folder}"
            raise UsageProblem(f"there is no module {name!r}", hint) from None
        sys.stderr.writelines(traceback.format_exception(error.with_traceback(_own_part(error.__traceback__))))
        raise UsageProblem(f"{where} cannot be imported: {type(error).__name__}: {error}") from None


def _own_part(frames: TracebackType | None) -> TracebackType | None:
    """Of a traceback what comes after this module and the import machinery."""
    while frames is not None and (
        "importlib" in frames.tb_frame.f_code.co_filename or frames.tb_frame.f_code.co_filename == __file__
    ):
        frames = frames.tb_next
    return frames


def _node_for(session: Session, bus: EventBus, processes: int) -> NodeTarget | None:
    """
    The node to work through; ``None`` to work on the workspace itself.

    Raises:
        UsageProblem: There is none, and several processes need one.
    """
    found = node_of(dataclasses.replace(session, workspace=bus.workspace))
    if found is None and processes > 1:
        raise UsageProblem(
            f"several processes share groups through a node, and none holds {bus.workspace}",
            f"start one with `tidings serve --dev --workspace {bus.workspace}`",
        )
    return found


async def _work(session: Session, bus: EventBus, node: NodeTarget | None, *, is_member: bool) -> None:
    groups = [f"{each.topic}/{each.group}" for each in bus.get_subscriptions()]
    where = str(bus.workspace) if node is None else node.address.url
    session.out.result(
        {"pid": os.getpid(), "groups": groups, "workspace": str(bus.workspace), "through": node and node.address.url},
        f"worker {os.getpid()}: {', '.join(groups)} {'in' if node is None else 'through'} {where}; Ctrl-C stops",
    )
    session.out.flush()
    if is_member:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _stop_at_end)
    # The user's modules stay: collections need not look at them again.
    gc.collect()
    gc.freeze()
    if node is None:
        await bus.run()
        return
    from tidings.client import RemoteBus
    from tidings.client.websocket import WebSocketConnector

    connector = WebSocketConnector(ssl_context=trusting(node.address))
    await bus.run(RemoteBus(node.address.url, node.token, name=f"worker {os.getpid()}", connector=connector))


def _stop_at_end() -> None:
    """Whoever started us says nothing more; at the end of its words we stop, as if it had said so."""
    if not os.read(sys.stdin.fileno(), 1):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        signal.raise_signal(signal.SIGTERM)


class _Workers:
    """Processes that work, and are started again when they die or when a file has changed."""

    def __init__(self, words: list[str], token: str | None, clock: Clock, out: Output, *, is_reload: bool) -> None:
        self._words = words
        self._token = token
        self._clock = clock
        self._out = out
        self._is_reload = is_reload
        self._processes: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        """Set, and replaced, at each change of a file."""

    async def run(self, count: int) -> int:
        """Look after so many of them until a signal comes; the exit code, which is that of one that could not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        watching = asyncio.ensure_future(self._watch()) if self._is_reload else None
        try:
            return max(await asyncio.gather(*(self._keep_one() for _ in range(count))))
        finally:
            if watching is not None:
                watching.cancel()

    def _stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill() if self._stopping.is_set() else process.terminate()
        self._stopping.set()

    async def _keep_one(self) -> int:
        while not self._stopping.is_set():
            changed = self._changed
            started = self._clock.monotonic()
            code = await self._run_one()
            if self._stopping.is_set():
                break
            if changed.is_set():
                continue
            if not self._is_reload and self._clock.monotonic() - started < _START_S:
                self._stop()
                return code if 0 < code < 128 else ExitCode.PROBLEM
            self._out.note(
                f"a worker ended with {code}; {'waiting for a change' if self._is_reload else 'starting another'}"
            )
            if self._is_reload:
                await _first(changed.wait(), self._stopping.wait())
            else:
                await _first(self._clock.sleep(_RESTART_S), self._stopping.wait())
        return ExitCode.OK

    async def _run_one(self) -> int:
        # A session of its own: Ctrl-C comes to this process alone, which tells the others once.
        process = await asyncio.create_subprocess_exec(
            *self._words, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(f"{self._token or ''}\n".encode())
        self._processes.add(process)
        if self._stopping.is_set():
            process.terminate()
        try:
            return await process.wait()
        finally:
            self._processes.discard(process)
            process.stdin.close()

    async def _watch(self) -> None:
        seen = dict(_python_files(Path.cwd()))
        while True:
            await self._clock.sleep(_LOOK_S)
            now = dict(_python_files(Path.cwd()))
            if now == seen:
                continue
            changed = {name for name, _ in now.items() ^ seen.items()}
            _remove_bytecode(changed)
            self._out.note(f"{min(changed)} has changed; starting again")
            seen = now
            self._changed.set()
            self._changed = asyncio.Event()
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _remove_bytecode(sources: Iterable[str]) -> None:
    """
    Remove the cached bytecode of source files.

    Python takes bytecode for current if the source has the same length and the same modification time in whole seconds, so an edit
    within the second of the last import would not be seen.
    """
    for source in sources:
        with contextlib.suppress(OSError):
            os.unlink(importlib.util.cache_from_source(source))


def _python_files(folder: Path) -> Iterator[tuple[str, int]]:
    """The Python files below a folder, each with when it was changed; hidden folders and installed packages are passed over."""
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _FOLDERS_PASSED_OVER]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(at, name)
                with contextlib.suppress(OSError):
                    yield path, os.stat(path).st_mtime_ns
