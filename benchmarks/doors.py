"""
What others wait while the dearest documented requests run: health, publishing and reading of a light client, beside an idle node in the same run.

The light client sends its requests one by one at a steady pace, each over a connection of its own. The dear requests come from another process
without a pause. A door keeps its promise if its p99 is at most 50 ms, or at most 50 ms more than beside the idle node.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import orjson

from tidings.client.errors import LedgerRefused
from tidings.client.ledger import LedgerClient
from tidings.ledger import LedgerSettings, open_ledger
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.claims import AnnounceSubject, ClaimRelation
from tidings.ledger.subjects import Addressing
from tidings.wire.steward import requests

from .measuring import percentiles, run_on, scratch
from .nodes import NodeProcess, serving
from .report import Row, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "measure_doors"]

_PACE_S: Final = 0.01
_MS_MAX: Final = 50.0
_SPACE: Final = "shared:shop"
_PLUGIN: Final = "org.example.bench"
_HUBS: Final = 8
_RECORDS: Final = 20_000
_LIST: Final = 1_000
_CATALOGUE: Final = """
schema_version = 1
[[subjects]]
name = "node"
[[relation]]
predicate = "related_to"
source_type = "node"
target_type = "node"
"""
_CONFIG: Final = """
[server]
access_log = false
[log]
journal_bytes = 8388608
"""
_DOORS: Final = ("GET /healthz", "POST /v1/events", "GET /v1/events")


class Load(msgspec.Struct, frozen=True):
    """The size of the ledger, and the seconds of each dear request."""

    folder: str
    relations: int
    seconds: float


class Waits(msgspec.Struct, frozen=True):
    """The p99 of each door in milliseconds, by what ran beside it; ``idle`` is nothing."""

    p99_ms: dict[str, dict[str, float]]
    counts: dict[str, int]
    """Dear requests that were answered."""


def measure_doors(case: Load) -> Waits:
    """Fill a workspace, serve it, and time the doors beside each dear request."""
    folder = Path(case.folder)
    run_on("uvloop", lambda: _fill(folder / "w", case.relations))
    waits: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    with serving(folder, _CONFIG, _CATALOGUE) as node:
        run_on("uvloop", lambda: _publish_many(node))
        for name in ("idle", *_DEAR):
            with _dear(node, name, counts):
                waits[name] = run_on("uvloop", lambda: _time_doors(node, case.seconds))
    return Waits(waits, counts)


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Yield a row for each door and dear request."""
    with scratch(folder) as place:
        waits = run(measure_doors, Load(str(place), scale.door_relations, scale.latency_s / 4))
    for door in _DOORS:
        idle = waits.p99_ms["idle"][door]
        yield noted("doors", f"{door}, idle", "ms", idle)
        for name in _DEAR:
            row = noted("doors", f"{door}, beside {name}", "ms", waits.p99_ms[name][door], answered=waits.counts[name])
            yield at_most(msgspec.structs.replace(row, baselines={"idle": idle}), max(_MS_MAX, idle + _MS_MAX))


async def _fill(workspace: Path, relations: int) -> None:
    """Relate hubs to leaves, so that merging two hubs rewrites an eighth of all relations each."""
    settings = LedgerSettings(snapshot_records_max=10**9)
    leaves = max(1, relations // _HUBS)
    async with await open_ledger(workspace, catalogue=parse_catalogue(_CATALOGUE), settings=settings) as ledger:
        names = [f"hub{number}" for number in range(_HUBS)] + [f"leaf{number}" for number in range(leaves)]
        commands: list[Any] = [
            AnnounceSubject(
                plugin=_PLUGIN, subject_type="node", addressings=(Addressing("n", name),), new_id=_id(number)
            )
            for number, name in enumerate(names)
        ]
        commands += [
            ClaimRelation(plugin=_PLUGIN, source=_id(hub), predicate="related_to", target=_id(_HUBS + leaf))
            for hub in range(_HUBS)
            for leaf in range(leaves)
        ]
        for start in range(0, len(commands), _LIST):
            for result in await ledger.execute_many(commands[start : start + _LIST]):
                assert not isinstance(result, BaseException), result
        await ledger.take_snapshot()


def _id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


async def _publish_many(node: NodeProcess) -> None:
    async with httpx.AsyncClient(base_url=node.url, headers=_headers(node), timeout=60.0) as http:
        for start in range(0, _RECORDS, _LIST):
            await http.post("/v1/events", json=[_event(start + number) for number in range(_LIST)])


async def _time_doors(node: NodeProcess, seconds: float) -> dict[str, float]:
    latencies: dict[str, list[int]] = {door: [] for door in _DOORS}
    async with httpx.AsyncClient(base_url=node.url, headers=_headers(node), timeout=120.0) as http:

        async def time_one(door: str) -> None:
            method, path = door.split()
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                started_ns = time.perf_counter_ns()
                body = _event(0) if method == "POST" else None
                params = {"since": 0, "limit": 1} if path == "/v1/events" and method == "GET" else None
                answer = await http.request(method, path, json=body, params=params)
                latencies[door].append(time.perf_counter_ns() - started_ns)
                assert answer.status_code < 300, answer.text
                await asyncio.sleep(_PACE_S)

        await asyncio.gather(*(time_one(door) for door in _DOORS))
    return {door: percentiles(taken).p99 / 1000 for door, taken in latencies.items()}


@contextlib.contextmanager
def _dear(node: NodeProcess, name: str, counts: dict[str, int]) -> Iterator[None]:
    """Run a dear request again and again in a process of its own until the block ends; then count its answers."""
    if name == "idle":
        yield
        return
    command = [sys.executable, "-m", "benchmarks.doors", name, node.url, node.token("dear")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # It is connected.
            yield
            output, _ = process.communicate(timeout=120)
            counts[name] = int(output)
        finally:
            process.kill()


# The dear requests. Each is called until the process is told to stop.


async def _merge(http: httpx.AsyncClient, ledger: LedgerClient, number: int) -> None:
    with contextlib.suppress(LedgerRefused):  # both are one subject by now
        a, b = number % _HUBS, (number + 1) % _HUBS
        await ledger.call(requests.MergeSubjectsRequest(a=_id(a), b=_id(b)))


async def _project(http: httpx.AsyncClient, ledger: LedgerClient, number: int) -> None:
    scope = {"max_depth": 32, "max_visits": 100_000, "relation_predicates": ["related_to"]}
    await ledger.call(requests.ProjectSubjectRequest(canonical_id=_id(0), scope=scope))


async def _change_policy(http: httpx.AsyncClient, ledger: LedgerClient, number: int) -> None:
    policy = f'forbid (principal, action, resource == Topic::"hidden{number}");'
    answer = await http.post(
        "/v1/access/policies", json={"type": "access.policy_put", "policy_id": "bench", "text": policy}
    )
    answer.raise_for_status()


async def _publish_list(http: httpx.AsyncClient, ledger: LedgerClient, number: int) -> None:
    events = [_event(0, partitions=[f"p{number % 7}-{entry}-{part}" for part in range(64)]) for entry in range(_LIST)]
    await http.post("/v1/events", content=orjson.dumps(events), headers={"content-type": "application/json"})


async def _commit_large(http: httpx.AsyncClient, ledger: LedgerClient, number: int) -> None:
    events = [_event(0, text="x" * 15_000) for _ in range(_LIST)]
    await http.post("/v1/events", content=orjson.dumps(events), headers={"content-type": "application/json"})


async def _read_pages(http: httpx.AsyncClient, ledger: LedgerClient, number: int) -> None:
    await http.get("/v1/events", params={"since": 0, "limit": 1_000})


_DEAR: Final[dict[str, Callable[[httpx.AsyncClient, LedgerClient, int], Awaitable[None]]]] = {
    "merges": _merge,
    "projections": _project,
    "policy changes": _change_policy,
    "lists with many partitions": _publish_list,
    "large commits": _commit_large,
    "pages": _read_pages,
}


async def _repeat(name: str, url: str, token: str) -> int:
    """Send a dear request until stdin ends. Return the number of answers."""
    stopped = asyncio.ensure_future(asyncio.to_thread(sys.stdin.buffer.read))
    count, headers = 0, {"Authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=120.0) as http,
        LedgerClient(url, token=token, capabilities=["ledger_admin"]) as ledger,
    ):
        await ledger.describe_capabilities()
        print("ready", flush=True)
        while not stopped.done():
            await _DEAR[name](http, ledger, count)
            count += 1
    return count


def _event(number: int, *, text: str = "", **meta: Any) -> dict[str, Any]:
    return {
        "meta": {"topic": "orders", "type": "PLACED", "space_id": _SPACE, **meta},
        "payload": {"n": number, "text": text},
    }


def _headers(node: NodeProcess) -> dict[str, str]:
    return {"Authorization": f"Bearer {node.token()}"}


if __name__ == "__main__":
    print(asyncio.run(_repeat(*sys.argv[1:4])))
