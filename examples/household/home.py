"""The household put together: its parts on one bus, some moments of life, and a quiet end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from tidings.bus import EventBus
from tidings.cognition import MemoryStore
from tidings.core.clock import SYSTEM_CLOCK, Clock, datetime_of
from tidings.middleware import MetricsMiddleware

from .acting import Actuators, Arbiter
from .attending import Attention, Workspace
from .learning import Learning, Outcomes
from .part import Flow, Part
from .remembering import Consolidation, Hippocampus, Recall, Writer
from .senses import MOMENTS, Classifier, Moment, Predictor, moment_event
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
        self._folder = workspace
        self.bus = bus = EventBus([MetricsMiddleware(sink=self.outcomes.note)], workspace=workspace, clock=clock)
        world = (bus, self.flow, clock)
        self.attention, self.classifier, self.predictor = Attention(*world), Classifier(*world), Predictor(*world)
        self.workspace, self.arbiter, self.actuators = Workspace(*world), Arbiter(*world), Actuators(*world)
        self.writer, self.hippocampus = Writer(*world), Hippocampus(*world)
        self.consolidation, self.recall = Consolidation(*world), Recall(*world)
        self.temporal, self.prospective, self.learning = Temporal(*world), Prospective(*world), Learning(*world)
        self.learning.watch(self.outcomes)
        self.parts: tuple[Part, ...] = (
            *(self.attention, self.classifier, self.predictor, self.workspace, self.arbiter, self.actuators),
            *(self.writer, self.hippocampus, self.consolidation, self.recall),
            *(self.temporal, self.prospective, self.learning),
        )

    async def live(self, seconds: float) -> None:
        """Let the parts start, some moments pass (one at least), and everything that follows from them be handled."""
        async with self.alive():
            count = max(1, round(seconds / _MOMENT_S))
            for number, moment in enumerate(islice(cycle(MOMENTS), count)):
                if number:
                    await self._clock.sleep(_MOMENT_S)
                await self.attention.hear_again()
                await self._pass(moment)
            async with asyncio.timeout(_QUIET_S_MAX):
                await self.quiet()

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """All parts at work, and all of them at rest afterwards."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(MemoryStore(self._folder / "memory.db")) as store:
            self.writer.write_to(store)
            async with self.bus, contextlib.AsyncExitStack() as started:
                for part in self.parts:
                    started.push_async_callback(part.stop)
                    await part.start()
                yield

    async def _pass(self, moment: Moment) -> None:
        event = moment_event(moment, datetime_of(self._clock.now_ns()))
        event_id = event.meta.event_id
        await self.classifier.annotate(moment, event_id)
        salience = await self.attention.notice(event)
        if salience is not None:
            await self.workspace.take_in(moment.tags, f"state-{event_id}", salience, event.meta.ts)
            await self.predictor.predict(moment, event_id)

    async def quiet(self) -> None:
        """Wait until all that was said is handled, and nothing more can follow."""
        # A part publishes before it acknowledges, and a trigger is held until its firing is published: when no reminder
        # is about to come and no group lags, nothing more can follow.
        while self.prospective.is_waiting or any(
            self.bus.lag(each.topic, each.group) for each in self.bus.get_subscriptions()
        ):
            await self._clock.sleep(0.01)
