"""The household put together: its parts on one bus, some moments of life, and a quiet end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from tidings.bus import EventBus
from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.middleware import MetricsMiddleware

from .acting import Actuators, Arbiter
from .attending import Workspace
from .learning import Learning, Outcomes
from .part import Flow, Part
from .remembering import Consolidation, Hippocampus, Recall
from .senses import MOMENTS, Classifier, Predictor, Writer
from .timing import Prospective, Temporal

__all__ = ["Household"]

_MOMENT_S: Final = 0.1
_QUIET_S_MAX: Final = 30.0


class Household:
    """
    All parts, and the bus between them.

    Args:
        workspace: Where the events are kept; groups go on from where they were.
        show: Gets a line for each event sent and handled.
        clock: The time.
    """

    def __init__(
        self, workspace: Path, *, show: Callable[[str], None] | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.outcomes = Outcomes()
        self.flow = Flow(show)
        self._clock = clock
        self.bus = bus = EventBus([MetricsMiddleware(sink=self.outcomes.note)], workspace=workspace, clock=clock)
        world = (bus, self.flow, clock)
        self.writer, self.classifier, self.predictor = Writer(*world), Classifier(*world), Predictor(*world)
        self.workspace, self.arbiter, self.actuators = Workspace(*world), Arbiter(*world), Actuators(*world)
        self.hippocampus, self.consolidation, self.recall = (
            Hippocampus(*world),
            Consolidation(*world),
            Recall(*world),
        )
        self.temporal, self.prospective, self.learning = Temporal(*world), Prospective(*world), Learning(*world)
        self.learning.watch(self.outcomes)
        self.parts: tuple[Part, ...] = (
            *(self.writer, self.classifier, self.predictor, self.workspace, self.arbiter, self.actuators),
            *(self.hippocampus, self.consolidation, self.recall),
            *(self.temporal, self.prospective, self.learning),
        )

    async def live(self, seconds: float) -> None:
        """Let the parts start, some moments pass (one at least), and everything that follows from them be handled."""
        async with self.bus:
            for part in self.parts:
                await part.start()
            count = max(1, round(seconds / _MOMENT_S))
            for number, moment in enumerate(islice(cycle(MOMENTS), count)):
                if number:
                    await self._clock.sleep(_MOMENT_S)
                event_id = await self.writer.write(moment)
                await self.classifier.annotate(moment, event_id)
                await self.workspace.broadcast(moment.tags, f"state-{event_id}")
                await self.predictor.predict(moment, event_id)
            async with asyncio.timeout(_QUIET_S_MAX):
                await self._quiet()

    async def _quiet(self) -> None:
        # A part publishes before it acknowledges: when no group lags, nothing more can follow.
        while True:
            if all(self.bus.lag(each.topic, each.group) == 0 for each in self.bus.get_subscriptions()):
                return
            await self._clock.sleep(0.01)
