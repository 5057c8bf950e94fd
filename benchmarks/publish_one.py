"""
One publisher that awaits each acknowledgement: what an event waits for, next to the bare write and sync it needs.

Publishing and both bare files take turns, one operation each, within one process. Turns of some hundred were not
enough: a neighbour's burst then falls on one of the three, and publishing came out faster than the sync it contains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import msgspec

from tidings.log.embedded import open_log
from tidings.log.embedded.journal import encode_frame

from .baselines import RawFile
from .measuring import Loop, Percentiles, Taken, Window, one_core, percentiles, run_on, scratch
from .report import Row, at_most, unsure
from .running import Runner
from .scales import Scale
from .workload import event_maker, sample_lines

__all__ = ["bench", "measure"]


class Case(msgspec.Struct, frozen=True):
    """A few rounds of single publishes."""

    folder: str
    loop: Loop
    rounds: int
    count: int
    is_one_core: bool


class Result(msgspec.Struct, frozen=True):
    """Each round's latencies."""

    ours: list[Percentiles]
    growing: list[Percentiles]
    recycled: list[Percentiles]
    frame_bytes: int
    taken: Taken


def measure(case: Case) -> Result:
    """Take turns: publish, sync a growing file, sync a recycled one.

    What the log writes to its segments behind an acknowledgement may fall into a bare file's turn; it syncs nothing then.
    """
    with one_core(case.is_one_core), scratch(case.folder) as folder:

        async def main() -> Result:
            lines = await sample_lines(folder / "sample")
            frame = encode_frame(lines[:1], first=1, last=1, durable=0)
            growing = RawFile(folder / "growing", is_recycled=False)
            recycled = RawFile(folder / "recycled", is_recycled=True)
            log = await open_log(folder / "log")
            make = event_maker("log ids", 1)
            found = Result([], [], [], len(frame), Window().take())
            window = Window()
            for _ in range(case.rounds):
                ours_ns: list[int] = []
                growing_ns: list[int] = []
                recycled_ns: list[int] = []
                for n in range(case.count):
                    begin = time.perf_counter_ns()
                    await log.append(make(n))
                    ours_ns.append(time.perf_counter_ns() - begin)
                    growing_ns.append(growing.latency_ns(frame))
                    recycled_ns.append(recycled.latency_ns(frame))
                found.ours.append(percentiles(ours_ns))
                found.growing.append(percentiles(growing_ns))
                found.recycled.append(percentiles(recycled_ns))
            taken = window.take()
            await log.close()
            growing.close()
            recycled.close()
            return msgspec.structs.replace(found, taken=taken)

        return run_on(case.loop, main)


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Both loops, judged on the median against each kind of file."""
    for loop in ("uvloop", "asyncio"):
        result = run(measure, Case(folder, loop, scale.rounds, scale.one_count, is_one_core))
        ours = _over_rounds(result.ours)
        for name, baseline in (("recycled", result.recycled), ("growing", result.growing)):
            # Rounds are compared with themselves: load that comes and goes is then in both halves of a ratio.
            ratio = median(mine.p50 / theirs.p50 for mine, theirs in zip(result.ours, baseline, strict=True))
            raw = _over_rounds(baseline)
            row = Row(
                bench="publish_one",
                case=f"{loop}, p50 against a {name} file",
                unit="us",
                ours=ours.p50,
                baselines={f"raw {name} p50": raw.p50},
                ratio=ratio,
                detail={
                    "ours p95": ours.p95,
                    "p99": ours.p99,
                    "raw p95": raw.p95,
                    "raw p99": raw.p99,
                    "others' cores": result.taken.others_cores or 0.0,
                },
            )
            judged = at_most(row, 1.5 * ours.p50 / ratio, "<= 1.5 x raw")
            # A publish contains such a write and sync, so it cannot be faster: then it was load that was measured.
            is_possible = ratio >= 1 or name == "growing"
            yield judged if is_possible else unsure(judged)


def _over_rounds(rounds: list[Percentiles]) -> Percentiles:
    return Percentiles(*(median(getattr(each, name) for each in rounds) for name in ("p50", "p95", "p99")))
