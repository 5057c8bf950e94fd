"""A ledger in memory with a catalogue of music, and what happens in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidings.core.events import Event
from tidings.happenings.bus import Envelope
from tidings.happenings.happening import to_json
from tidings.happenings.subscription import HappeningSubscription
from tidings.ledger import Ledger
from tidings.ledger.catalogue import parse_catalogue
from tidings.log.errors import StorageFull
from tidings.log.interface import Authorise, Verdict
from tidings.log.memory import MemoryLog

CATALOGUE: Final = parse_catalogue(
    """
schema_version = 1

[[racks]]
name = "audio"
charter = "what can be heard"
[[racks.shelves]]
name = "playback"
shape = 1
description = "plays tracks"
[[racks.shelves]]
name = "outputs"
shape = 2
shape_supports = [1]

[[racks]]
name = "flight_mode"
charter = "radios that can be switched off"
[[racks.shelves]]
name = "wireless.bluetooth"
shape = 1

[[subjects]]
name = "track"
[[subjects]]
name = "album"

[[relation]]
predicate = "album_of"
source_type = "track"
target_type = "album"
source_cardinality = "at_most_one"

[[relation]]
predicate = "like"
source_type = "*"
target_type = "*"
"""
)
PLAYBACK: Final = "audio.playback"
OUTPUTS: Final = "audio.outputs"
BLUETOOTH: Final = "flight_mode.wireless.bluetooth"


class FullLog(MemoryLog):
    """A log that is without room while it is said to be."""

    is_full = False

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        if self.is_full:
            raise StorageFull("no room")
        return await super().append_many(events, authorise=authorise)


async def settled(ledger: Ledger, subscription: HappeningSubscription) -> list[Envelope]:
    """All that a subscription has received up to now."""
    received: list[Envelope] = []
    passed = subscription.current_seq
    while passed < ledger.happenings.last_seq:
        received += await subscription.recv_many()
        passed = received[-1].seq
    return received


async def told(ledger: Ledger, subscription: HappeningSubscription) -> list[dict[str, Any]]:
    """The same as JSON has it, without the times, and without the plugins that were loaded."""
    return [
        {key: value for key, value in to_json(each.happening).items() if key != "at_ms"}
        for each in await settled(ledger, subscription)
        if each.happening.variant != "plugin_admitted"
    ]
