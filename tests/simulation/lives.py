"""A process that lives several times, on one simulated disk and in simulated time: closed in order, killed, or cut from its power at any step."""

from __future__ import annotations

import abc
import asyncio
import random
from typing import ClassVar

from tests.crash.support import ENDINGS, disk_after
from tidings.testing import SimulatedClock, SimulatedCrash, SimulatedDisk, SimulatedLoop

from .world import STEPS_MAX


class Lives(abc.ABC):
    """
    One seed's course, life after life. A subclass says in ``_main`` what happens in one.

    Args:
        kind: What is simulated; one seed means something else for each kind.
        seed: Decides everything.
    """

    crash_exponents: ClassVar[tuple[float, float]] = (1.5, 3.3)
    """A life that ends early does so after a number of steps between ten to the power of these."""
    pauses_s: ClassVar[tuple[float, ...]] = (0.0,)
    """How long nobody runs between two lives."""

    def __init__(self, kind: str, seed: object) -> None:
        self.seed = seed
        self.rng = random.Random(f"{kind} {seed}")
        self.crashes = self.rng.randint(0, 3)
        self.disk = SimulatedDisk(self.rng.getrandbits(32))
        self.lives = 0
        self.now_s = 0.0
        self.digests: list[str] = []
        """Of each life, what happened in it; equal for equal seeds."""

    def run(self) -> None:
        """Live until everything is done."""
        while not self._live():
            pass

    def _live(self) -> bool:
        """One life; whether it came to its end by itself."""
        self.lives += 1
        is_last = self.lives > self.crashes
        self.loop = SimulatedLoop(
            f"{self.seed} {self.lives}",
            now_s=self.now_s,
            loop_pace=self.rng.choice((0.3, 1.0, 3.0)),
            crash_at=None if is_last else round(10 ** self.rng.uniform(*self.crash_exponents)),
            steps_max=STEPS_MAX,
        )
        self.clock = SimulatedClock(self.loop)
        asyncio.set_event_loop(None)
        try:
            self.loop.run_until_complete(self._main())
        except SimulatedCrash:
            return False
        except Exception as error:
            error.add_note(f"seed {self.seed}, life {self.lives}, step {self.loop.steps}")
            raise
        finally:
            self.now_s = self.loop.time() + self.rng.choice(self.pauses_s)
            self.digests.append(self.loop.digest)
            self.disk.crash_after = self.disk.calls
            self.loop.abandon()
            self.disk = disk_after(self.disk, self.rng.choice((*ENDINGS, "killed", "killed")))
        return True

    @abc.abstractmethod
    async def _main(self) -> None:
        """What one life does, from opening to its end."""
