"""Memory: the hippocampus encodes episodes, consolidation counts what recurs, recall keeps what is at hand."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from typing import Any, Final

import msgspec

from tidings.bus import ReceivedEvent
from tidings.cognition.payloads import HippoEncode, WorkspaceBroadcast

from .part import Part, Work

__all__ = ["Consolidation", "Hippocampus", "Recall"]

_AT_HAND_MAX: Final = 16


class Hippocampus(Part):
    """Keeps each episode under a sparse code of its content, so that the same one twice is one."""

    name = "hippocampus"

    def handlers(self) -> dict[str, Work]:
        return {"hippo": self._encode}

    async def start(self) -> None:
        self.episodes: dict[str, HippoEncode] = {}
        await super().start()

    async def _encode(self, event: ReceivedEvent) -> None:
        episode = msgspec.convert(event.payload, HippoEncode)
        code = hashlib.sha256(msgspec.json.encode(episode.content, order="sorted")).hexdigest()[:12]
        self.episodes[code] = episode


class Consolidation(Part):
    """Counts what comes up again and again."""

    name = "consolidation"

    def handlers(self) -> dict[str, Work]:
        return {"hippo": self._count}

    async def start(self) -> None:
        self.themes: Counter[str] = Counter()
        await super().start()

    async def _count(self, event: ReceivedEvent) -> None:
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
