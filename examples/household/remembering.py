"""Memory: the writer stores moments, the hippocampus encodes them, consolidation counts, recall keeps at hand."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Final

import msgspec

from tidings.bus import ReceivedEvent
from tidings.cognition import MemoryStore, WriteHandler
from tidings.cognition.payloads import HippoEncode, WorkspaceBroadcast
from tidings.cognition.write import StaticSpacePolicy
from tidings.types import EventType

from .part import Part, Work
from .wiring import PERSON, SPACE, WRITE_TOPIC

__all__ = ["Code", "Consolidation", "Hippocampus", "Recall", "Writer"]

_AT_HAND_MAX: Final = 16
_POLICY: Final = StaticSpacePolicy(members={SPACE: frozenset({PERSON})})


class Writer(Part):
    """Makes a memory of each moment that was let in; what it was goes to ``hippo``, when it was to ``temporal``."""

    name = "writer"

    def write_to(self, store: MemoryStore) -> None:
        """Where memories are kept."""
        self._handler = WriteHandler(store, self.publish, self._clock, _POLICY)

    def handlers(self) -> dict[str, Work]:
        return {WRITE_TOPIC: self._write}

    async def start(self) -> None:
        await super().start()
        self.keep_running(self._handler.outbox.run())

    async def _write(self, event: ReceivedEvent) -> None:
        await self._handler(event)


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """What of ``HIPPO_ENCODED`` a hippocampus needs: a memory under a sparse code of its content."""

    memory_id: str
    episode_id: str
    simhash: str
    novelty: float


class Hippocampus(Part):
    """Keeps each memory under its code, so that the same one twice is one."""

    name = "hippocampus"

    def handlers(self) -> dict[str, Work]:
        return {"hippo": self._encode}

    async def start(self) -> None:
        self.episodes: dict[str, Code] = {}
        self.heard = 0
        await super().start()

    async def _encode(self, event: ReceivedEvent) -> None:
        if event.meta.type == EventType.HIPPO_ENCODE:
            msgspec.convert(event.payload, HippoEncode)
            self.heard += 1
        elif event.meta.type == "HIPPO_ENCODED":
            code = msgspec.convert(event.payload, Code)
            self.episodes[code.memory_id] = code


class Consolidation(Part):
    """Counts what comes up again and again."""

    name = "consolidation"

    def handlers(self) -> dict[str, Work]:
        return {"hippo": self._count}

    async def start(self) -> None:
        self.themes: Counter[str] = Counter()
        await super().start()

    async def _count(self, event: ReceivedEvent) -> None:
        if event.meta.type == EventType.HIPPO_ENCODE:
            self.themes.update(msgspec.convert(event.payload, HippoEncode).tags)


class Recall(Part):
    """Keeps at hand what is salient, and the candidates in time that may be asked for next."""

    name = "recall"

    def handlers(self) -> dict[str, Work]:
        return {"workspace": self._attend, "temporal": self._take_candidates}

    async def start(self) -> None:
        self.salient: deque[str] = deque(maxlen=_AT_HAND_MAX)
        self.candidates: list[dict[str, Any]] = []
        await super().start()

    async def _attend(self, event: ReceivedEvent) -> None:
        self.salient.extend(msgspec.convert(event.payload, WorkspaceBroadcast).salient_keys)

    async def _take_candidates(self, event: ReceivedEvent) -> None:
        if event.meta.type == "TEMPORAL_CANDIDATES":
            self.candidates = list(event.payload["candidates"])
