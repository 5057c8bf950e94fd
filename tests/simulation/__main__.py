"""
Run seeds by hand: ``python -m tests.simulation 1234`` replays one and prints its steps, ``... 0 1000`` runs a thousand.

What a seed comes to depends on the code: the same seed takes another course after a change.
"""

from __future__ import annotations

import argparse
import logging
import sys

from tests.simulation.world import SeedFailed, Simulation


def main() -> int:
    """Run the seeds; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # handlers fail by the hundred
    failed = steps = 0
    for seed in range(given.seed, given.seed + given.count):
        simulation = Simulation(seed, trace_count_max=1_000_000 if given.count == 1 else 400)
        try:
            simulation.run()
        except SeedFailed as error:
            failed += 1
            sys.stdout.write(f"{error if given.count == 1 else str(error).partition(chr(10))[0]}\n")
        steps += simulation.steps
    sys.stdout.write(f"{given.count} seeds, {failed} failed, {steps} steps\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
