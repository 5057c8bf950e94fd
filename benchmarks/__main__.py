"""The command line: ``python -m benchmarks [--only NAME] [--quick] [--events N] [--json] [--one-core] [--callgrind]``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from . import (
    appointments,
    bus,
    counting,
    doors,
    gateway,
    happenings,
    ledger,
    opening,
    pipeline,
    publish_many,
    publish_one,
    recovering,
    replay,
    sync,
    topics,
)
from .measuring import Window
from .report import Report, Row, line_of, machine_of, show
from .running import Runner, in_child
from .scales import FULL, QUICK, TINY, Scale

__all__ = ["BENCHES", "main"]

Bench = Callable[[Runner, Scale, str, bool], Iterator[Row]]
BENCHES: Final[dict[str, Bench]] = {
    "publish_one": publish_one.bench,
    "publish_many": publish_many.bench,
    "replay": replay.bench,
    "open": opening.bench,
    "topics": topics.bench,
    "recovery": recovering.bench,
    "bus": bus.bench,
    "happenings": happenings.bench,
    "ledger": ledger.bench,
    "appointments": appointments.bench,
    "doors": doors.bench,
    "sync": sync.bench,
    "sync_latency": sync.bench_latency,
    "gateway": gateway.bench,
    "gateway_latency": gateway.bench_latency,
    "pipeline": pipeline.bench,
    "pipeline_commands": pipeline.bench_commands,
    "pipeline_costs": pipeline.bench_costs,
}
RESULTS: Final = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the table, or the report as JSON, goes to standard output."""
    options = _parser().parse_args(arguments)
    scale: Scale = TINY if options.tiny else QUICK if options.quick else FULL
    if options.events:
        scale = msgspec.structs.replace(scale, pipeline_events=options.events, pipeline_histories=(options.events,))
    started_at = datetime.now(UTC)
    begin = time.monotonic()
    folder = tempfile.mkdtemp(prefix="tidings-bench-", dir=options.dir)
    try:
        machine = machine_of(Path(folder))
        window, children_before_s = Window(), _children_s()
        rows: list[Row] = []
        for name in () if options.callgrind else options.only or BENCHES:
            print(f"{name} ...", file=sys.stderr, flush=True)
            for row in BENCHES[name](in_child, scale, folder, options.one_core):
                rows.append(row)
                print(line_of(row), file=sys.stderr, flush=True)
        if options.callgrind:
            print("callgrind ...", file=sys.stderr, flush=True)
            rows += counting.bench(folder)
        # The children's time belongs to us; what is left of the machine's was others'.
        taken = window.take()
        children_s = _children_s() - children_before_s
        others = None if taken.others_cores is None else max(0.0, taken.others_cores - children_s / taken.wall_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    command = " ".join(["python -m benchmarks", *(sys.argv[1:] if arguments is None else arguments)])
    report = Report(
        started_at=started_at.isoformat(timespec="seconds"),
        command=command,
        scale=scale.name,
        machine=machine,
        rows=rows,
        load_after=os.getloadavg(),
        others_cores=others,
        steal_cores=taken.steal_cores,
        wall_s=time.monotonic() - begin,
    )
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{started_at:%Y%m%dT%H%M%S}-{scale.name}.json").write_bytes(encoded)
    if options.json:
        print(encoded.decode())
    else:
        show(report)
    return 0


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the log, the bus, happenings, the sync endpoint and the pipeline.",
    )
    parser.add_argument("--only", action="append", choices=list(BENCHES), help="run this bench; may be repeated")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="less of everything, in a minute")
    size.add_argument("--tiny", action="store_true", help="just enough to see that it runs; the figures mean nothing")
    parser.add_argument(
        "--events", type=int, help="of the pipeline's benches: how many events there are (one history only)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.add_argument("--one-core", action="store_true", help="keep each measuring process on one core")
    parser.add_argument("--callgrind", action="store_true", help="count instructions an event instead (needs valgrind)")
    parser.add_argument("--dir", help="measure the disk that this folder is on (default: the temporary folder's)")
    parser.add_argument("--results", default=str(RESULTS), help="where the report is kept (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
