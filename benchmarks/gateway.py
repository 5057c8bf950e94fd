"""
The gateway over real sockets: fan-out, latency, idle subscribers, a whole node's clients coming back, and subscribers of other things.

Beside the fan-out, in the same run: the same bytes sent to as many by a bare picows server, which is the floor, and by the broadcast of the
package ``websockets``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Final, Literal

from .gateway_measures import (
    Broadcast,
    Crowd,
    Fanned,
    Published,
    Rate,
    Rated,
    Return,
    measure_broadcast,
    measure_crowd,
    measure_published,
    measure_rate,
    measure_return,
)
from .gateway_rivals import has_websockets, rival
from .latency import latency_rows
from .measuring import Percentiles, scratch
from .report import Row, at_least, at_most
from .running import Runner
from .scales import Scale
from .sync_serving import Server, node

__all__ = ["bench", "bench_latency"]

_DELIVERIES_PER_S_MIN: Final = 100_000.0
_IDLE_KB_MAX: Final = 30.0
_RETURN_S_MAX: Final = 15.0
_OTHERS_RATIO_MAX: Final = 2.0
_RATE_PER_S: Final = 1_000
_FIGURES: Final[tuple[tuple[str, Callable[[Rated], Percentiles], float], ...]] = (
    ("commit to frame", attrgetter("committed_to_frame"), 25.0),
    ("publish to frame", attrgetter("published_to_frame"), 50.0),
)
_MISSED: Final = 20
_SETTINGS: Final = """
[event.websocket]
max_connections = 30000
max_connections_per_identity = 30000
[event.queue]
per_connection = 8192
total_ceiling = 4000000
[event.delivery]
max_msgs_per_sec = 100000
"""


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """All of it."""
    with scratch(folder) as workspace, node(workspace, _SETTINGS, "/events") as server:
        # Before anything else: what the node's heap has had to hold already would be used again.
        yield _idle(run, scale, server, is_one_core)
        yield _others(run, scale, server, is_one_core)
        yield from _fan_out(run, scale, server, is_one_core)
    yield from _return(run, scale, folder, is_one_core)


def bench_latency(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """How long single events take to those who hear of them, however they are published."""
    ways: tuple[tuple[Literal["socket", "http"], str], ...] = (
        ("socket", ", published over a socket"),
        ("http", ", published by a request each"),
    )
    with scratch(folder) as workspace, node(workspace, _SETTINGS, "/events") as server:
        for via, how in ways:
            case = Rate(
                server=server,
                workspace=str(workspace),
                subscribers=scale.hearers,
                per_s=_RATE_PER_S,
                seconds=scale.latency_s,
                via=via,
                run=f"rate-{via}",
                is_one_core=is_one_core,
            )
            yield from latency_rows(run, "gateway_latency", measure_rate, case, _FIGURES, how)


def _fan_out(run: Runner, scale: Scale, server: Server, is_one_core: bool) -> Iterator[Row]:
    found: dict[str, list[Fanned]] = {"ours": [], "picows": [], "websockets": []}
    began = time.monotonic()
    # In turns, so that a burst of foreign load falls on all alike; and of each its best round counts.
    while not found["ours"] or (len(found["ours"]) < scale.rounds and time.monotonic() - began < scale.bench_s_max):
        case = Broadcast(
            server=server,
            kind="gateway",
            subscribers=scale.gateway_subscribers,
            events=scale.gateway_events,
            run=f"fan{len(found['ours'])}",
            is_one_core=is_one_core,
        )
        found["ours"].append(run(measure_broadcast, case))
        for name in ("picows", "websockets") if has_websockets() else ("picows",):
            with rival(name) as other:
                bare = Broadcast(
                    server=other,
                    kind="bare",
                    subscribers=scale.gateway_subscribers,
                    events=scale.gateway_events,
                    text=found["ours"][0].frame,
                    run="bare",
                    is_one_core=is_one_core,
                )
                found[name].append(run(measure_broadcast, bare))
    best = {name: min(rounds, key=lambda each: each.taken.wall_s) for name, rounds in found.items() if rounds}
    per_s = {name: each.deliveries / each.taken.wall_s for name, each in best.items()}
    # The system counts a process's time in ticks: less than one is not known.
    cpu_us = {
        name: max(each.server_cpu_s, 1 / os.sysconf("SC_CLK_TCK")) / each.deliveries * 1e6
        for name, each in best.items()
    }
    about = f"to {scale.gateway_subscribers:,} subscribers"
    row = Row(
        bench="gateway",
        case=f"fan-out {about}",
        unit="deliveries/s",
        ours=per_s["ours"],
        baselines={f"bare {name}": per_s[name] for name in ("picows", "websockets") if name in per_s},
        ratio=per_s["ours"] / per_s["picows"],
        detail={"rounds": float(len(found["ours"]))},
    )
    yield at_least(row, _DELIVERIES_PER_S_MIN)
    row = Row(
        bench="gateway",
        case=f"the server's CPU for a delivery {about}, publishing and commit included",
        unit="us",
        ours=cpu_us["ours"],
        baselines={f"bare {name}": cpu_us[name] for name in ("picows", "websockets") if name in cpu_us},
        ratio=cpu_us["ours"] / cpu_us["picows"],
    )
    yield at_most(row, 1e6 / _DELIVERIES_PER_S_MIN)


def _idle(run: Runner, scale: Scale, server: Server, is_one_core: bool) -> Row:
    case = Crowd(server=server, connections=scale.gateway_connections, is_one_core=is_one_core)
    found = run(measure_crowd, case)
    row = Row(
        bench="gateway",
        case=f"memory of each of {case.connections:,} idle subscribers",
        unit="KB",
        ours=max(found.bytes_each / 1000, 0.001),
        detail={"connected/s": case.connections / found.connect_s},
    )
    return at_most(row, _IDLE_KB_MAX)


def _others(run: Runner, scale: Scale, server: Server, is_one_core: bool) -> Row:
    case = Published(
        server=server,
        others=scale.gateway_others,
        events=scale.gateway_events * 10,
        rounds=max(2, scale.rounds // 2),
        run="other",
        is_one_core=is_one_core,
    )
    found = run(measure_published, case)
    row = Row(
        bench="gateway",
        case=f"the node's CPU for an event beside {case.others:,} subscribers of other objects",
        unit="us",
        ours=found.beside_us,
        baselines={"without them": found.alone_us},
        ratio=found.beside_us / found.alone_us,
    )
    return at_most(row, _OTHERS_RATIO_MAX * found.alone_us, f"<= {_OTHERS_RATIO_MAX:g} x without them")


def _return(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    ways: tuple[tuple[Literal["farewell", "life", "refusal"], str, int], ...] = (
        ("farewell", "a restarted node", scale.gateway_returning),
        ("life", "a node that crashed", scale.gateway_returning),
        # Ours do not do so, but in a browser, where the answer to an upgrade cannot be read.
        ("refusal", "such a node that show a token of its earlier life", scale.gateway_returning // 10),
    )
    for knows_by, what, clients in ways:
        with scratch(folder) as workspace:
            with node(workspace, _SETTINGS, "/events") as server:
                run(
                    measure_broadcast,
                    Broadcast(
                        server=server, kind="gateway", subscribers=1, events=100, run="before", is_one_core=is_one_core
                    ),
                )
            with node(workspace, _SETTINGS, "/events") as server:
                case = Return(
                    server=server,
                    clients=clients,
                    missed=_MISSED,
                    knows_by=knows_by,
                    is_one_core=is_one_core,
                )
                found = run(measure_return, case)
        row = Row(
            bench="gateway",
            case=f"{case.clients:,} clients of {what} up to date and subscribed again",
            unit="s",
            ours=found.wall_s,
            detail={
                "server's cores": found.server_cpu_s / found.wall_s,
                "server's ms each": found.server_cpu_s / case.clients * 1e3,
            },
        )
        yield row if knows_by == "refusal" else at_most(row, _RETURN_S_MAX)
