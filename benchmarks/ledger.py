"""
The ledger: commands that are checked, stored and told; and a large graph: looking at it, and opening it from a snapshot and from the log.

SQLite has the same relations in a table with an index for either end, written in transactions of as many. It checks nothing, and reads
from its pages what the ledger has in memory.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tidings.ledger import Ledger, LedgerSettings, open_ledger
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.claims import AnnounceSubject, ClaimRelation
from tidings.ledger.relations import Relations
from tidings.ledger.subjects import Addressing

from .measuring import Percentiles, Taken, Window, percentiles, run_on
from .report import Row, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "measure_filling", "measure_opening", "measure_sqlite"]

_LIST: Final = 256
_EDGES_A_SUBJECT: Final = 10
_LOOKS: Final = 2_000
_PREDICATE: Final = "linked_to"
_CATALOGUE: Final = parse_catalogue(
    f"""
schema_version = 1
[[subjects]]
name = "node"
[[relation]]
predicate = "{_PREDICATE}"
source_type = "node"
target_type = "node"
"""
)
_NEIGHBOURS_US_MAX: Final = 1_000.0
_START_S_MAX: Final = 5.0


class Graph(msgspec.Struct, frozen=True):
    """A graph of random edges, and where it is."""

    folder: str
    edges: int
    is_from_log: bool = False
    """Whether it is opened without its snapshots."""

    @property
    def subjects(self) -> int:
        """How many subjects it has."""
        return max(10, self.edges // _EDGES_A_SUBJECT)

    def pairs(self) -> list[tuple[int, int]]:
        """Its edges, the same ones each time."""
        chance = random.Random(self.edges)
        found: dict[tuple[int, int], None] = {}
        while len(found) < self.edges:
            found[chance.randrange(self.subjects), chance.randrange(self.subjects)] = None
        return list(found)


class Filled(msgspec.Struct, frozen=True):
    """What it took to store all relations."""

    taken: Taken
    snapshot_s: float
    snapshot_bytes: int


class Opened(msgspec.Struct, frozen=True):
    """What it took to open it and to look at neighbours."""

    open_s: float
    cpu_s: float
    neighbours: Percentiles
    memory_mb: float


class Rival(msgspec.Struct, frozen=True):
    """The same in SQLite."""

    taken: Taken
    load_s: float
    neighbours: Percentiles


def _id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def measure_filling(case: Graph) -> Filled:
    """Claim every relation, in lists, and take a snapshot."""
    settings = LedgerSettings(snapshot_records_max=10**9)

    async def main() -> tuple[Taken, float]:
        async with await open_ledger(case.folder, catalogue=_CATALOGUE, settings=settings) as ledger:
            await _give(
                ledger,
                [
                    AnnounceSubject(
                        plugin="org.example.graph",
                        subject_type="node",
                        addressings=(Addressing("n", str(number)),),
                        new_id=_id(number),
                    )
                    for number in range(case.subjects)
                ],
            )
            commands = [
                ClaimRelation(plugin="org.example.graph", source=_id(source), predicate=_PREDICATE, target=_id(target))
                for source, target in case.pairs()
            ]
            window = Window()
            await _give(ledger, commands)
            taken = window.take()
            begin = time.perf_counter()
            await ledger.take_snapshot()
            return taken, time.perf_counter() - begin

    taken, snapshot_s = run_on("uvloop", main)
    files = Path(case.folder, ".bus", "ledger").glob("*.snapshot")
    return Filled(taken, snapshot_s, max(file.stat().st_size for file in files))


async def _give(ledger: Ledger, commands: Sequence[AnnounceSubject | ClaimRelation]) -> None:
    for start in range(0, len(commands), _LIST):
        for result in await ledger.execute_many(commands[start : start + _LIST]):
            assert not isinstance(result, BaseException), result


def measure_opening(case: Graph) -> Opened:
    """Open the ledger, and look at the neighbours of random subjects."""

    async def main() -> Opened:
        if case.is_from_log:
            shutil.rmtree(Path(case.folder, ".bus", "ledger"))
        begin, cpu = time.perf_counter(), time.process_time()
        async with await open_ledger(case.folder) as ledger:
            open_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
            assert await ledger.read(lambda state: len(state.part(Relations))) == case.edges
            chance, took = random.Random(1), []
            for _ in range(_LOOKS):
                subject_id = _id(chance.randrange(case.subjects))
                mark = time.perf_counter_ns()
                await ledger.read(lambda state, each=subject_id: state.part(Relations).neighbours(each, _PREDICATE))  # type: ignore[misc]
                took.append(time.perf_counter_ns() - mark)
            return Opened(open_s, cpu_s, percentiles(took), _memory_mb())

    return run_on("uvloop", main)


def _memory_mb() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def measure_sqlite(case: Graph) -> Rival:
    """Store the same relations in a table, read all of them, and ask for neighbours."""
    path = Path(case.folder, "graph.db")
    rows = [(_id(source), _PREDICATE, _id(target), "org.example.graph") for source, target in case.pairs()]
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(
        "CREATE TABLE edge (source, predicate, target, claimant, PRIMARY KEY (source, predicate, target))"
    )
    connection.execute("CREATE INDEX by_target ON edge (target, predicate)")
    window = Window()
    for start in range(0, len(rows), _LIST):
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO edge VALUES (?, ?, ?, ?)", rows[start : start + _LIST])
        connection.execute("COMMIT")
    taken = window.take()
    begin = time.perf_counter()
    targets: dict[str, list[str]] = {}
    for source, target in connection.execute("SELECT source, target FROM edge"):
        targets.setdefault(source, []).append(target)
    load_s = time.perf_counter() - begin
    chance, took = random.Random(1), []
    for _ in range(_LOOKS):
        subject_id = _id(chance.randrange(case.subjects))
        mark = time.perf_counter_ns()
        connection.execute(
            "SELECT target FROM edge WHERE source = ? AND predicate = ? ORDER BY target", (subject_id, _PREDICATE)
        ).fetchall()
        took.append(time.perf_counter_ns() - mark)
    connection.close()
    return Rival(taken, load_s, percentiles(took))


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Fill a graph, look at it, and open it again."""
    case = Graph(str(Path(folder) / "graph"), scale.graph_edges)
    Path(case.folder).mkdir()
    try:
        filled = run(measure_filling, case)
        rival = run(measure_sqlite, case)
        opened = run(measure_opening, case)
        replayed = run(measure_opening, Graph(case.folder, case.edges, is_from_log=True))
    finally:
        shutil.rmtree(case.folder, ignore_errors=True)
    many = f"{case.edges:,} relations"
    per_s, rival_per_s = case.edges / filled.taken.wall_s, case.edges / rival.taken.wall_s
    claims = noted("ledger", f"{many} claimed, lists of {_LIST}", "commands/s", per_s)
    yield msgspec.structs.replace(
        claims,
        baselines={"SQLite, nothing checked": rival_per_s},
        ratio=per_s / rival_per_s,
        detail={
            "cpu us each": filled.taken.cpu_s / case.edges * 1e6,
            "others' cores": filled.taken.others_cores or 0.0,
        },
    )
    look = Row(
        bench="ledger",
        case=f"neighbours of a subject, {many}, p99",
        unit="us",
        ours=opened.neighbours.p99,
        baselines={"SQLite": rival.neighbours.p99},
        ratio=opened.neighbours.p99 / rival.neighbours.p99,
        detail={"p50": opened.neighbours.p50},
    )
    yield at_most(look, _NEIGHBOURS_US_MAX)
    start = Row(
        bench="ledger",
        case=f"opening from a snapshot, {many}",
        unit="s",
        ours=opened.open_s,
        baselines={"SQLite, reading all rows": rival.load_s},
        ratio=opened.open_s / rival.load_s,
        detail={"cpu s": opened.cpu_s, "MB in memory": opened.memory_mb, "MB of snapshot": filled.snapshot_bytes / 1e6},
    )
    yield at_most(start, _START_S_MAX)
    yield noted("ledger", f"taking that snapshot, {many}", "s", filled.snapshot_s)
    commands = case.edges + case.subjects
    yield noted(
        "ledger", "opening from the log alone", "commands/s", commands / replayed.open_s, seconds=replayed.open_s
    )
