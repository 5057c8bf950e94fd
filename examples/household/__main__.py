"""``python -m examples.household``: let the household live for a while, and say what went over the bus."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from .home import Household
from .wiring import INTAKE, WIRING


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if every consumer of every topic saw events."""
    parser = argparse.ArgumentParser(prog="python -m examples.household", description="A household on one bus.")
    parser.add_argument("--workspace", type=Path, default=Path("household-workspace"), help="where the events are kept")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long moments come in")
    parser.add_argument("--quiet", action="store_true", help="only the summary")
    options = parser.parse_args(arguments)
    household = Household(options.workspace, show=None if options.quiet else print)
    asyncio.run(household.live(options.seconds))
    print("\ntopic            use                                       sent  handled by")
    is_complete = True
    for topic, wire in (INTAKE | WIRING).items():
        sent = sum(count for (name, _, _), count in household.flow.sent.items() if name == topic)
        by = {
            consumer: sum(n for (name, who, _), n in household.flow.got.items() if (name, who) == (topic, consumer))
            for consumer in wire.consumers
        }
        is_complete &= sent > 0 and all(by.values())
        print(f"{topic:<16} {wire.use:<40} {sent:>5}  {', '.join(f'{who} {count}' for who, count in by.items())}")
    learned, kept = len(household.learning.signals), len(household.hippocampus.episodes)
    print(
        f"\nlearned from {learned} outcomes; memories kept: {kept}; put off: {household.attention.gate.deferred_count}"
    )
    for type_, error, who in sorted(household.flow.poison):
        print(f"keeps failing: {type_} at {who} with {error}")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
