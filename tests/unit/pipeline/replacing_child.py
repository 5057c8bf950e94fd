"""A process that replaces small files of a lake over and over: ``python -m tests.unit.pipeline.replacing_child FOLDER NUMBER ROUNDS``."""

from __future__ import annotations

import sys
from pathlib import Path

from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.export import fresh_file
from tidings.pipeline.lake import Lake
from tidings.pipeline.schemas import BRONZE_EVENTS
from tidings.pipeline.state_files import (
    Hints,
    Mark,
    StateFile,
    Vacuumed,
    load_archived,
    load_hints,
    load_state,
    load_vacuumed,
    save_archived,
    save_hints,
    save_state,
    save_vacuumed,
)
from tidings.pipeline.status import JobStates

EPOCH = "e1"


def main(folder: str, number: int, rounds: int) -> None:
    """Replace every small file of the lake in each round, and read it; each has to be whole."""
    lake = Lake(Path(folder), SYSTEM_CLOCK)
    sys.stdin.readline()  # all begin at once
    lake.begin(EPOCH)
    for turn in range(rounds):
        save_hints(lake.storage, Hints(EPOCH, 0, {f"t{each}": Mark(turn, number) for each in range(50)}))
        assert len(load_hints(lake.storage, epoch=EPOCH, seq=5).streams) == 50
        save_vacuumed(lake.storage, Vacuumed(EPOCH, {f"gold.{each}": turn for each in range(50)}))
        assert len(load_vacuumed(lake.storage, EPOCH).at_ns) == 50
        save_archived(lake, EPOCH, lake.note(BRONZE_EVENTS.name)["seq"])
        assert load_archived(lake.storage, EPOCH) == {"t": 1}
        JobStates(lake.storage, EPOCH).update(f"job{number}", seq=turn)
        assert JobStates(lake.storage, EPOCH).of(f"job{number}").seq is not None
        with fresh_file(lake.storage.path / "export") as file:
            file.write(b"%d" % number * 20_000)
        assert len(set(lake.storage.read("export") or b"")) == 1
        save_state(lake.storage, "scrub.json", StateFile(EPOCH))
        assert load_state(lake.storage, "scrub.json", StateFile, EPOCH, has_checksum=False) is not None
        lake.seen_as(lake.known_meta() or sys.exit("lake.json is gone")).save_meta()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
