"""Limits of an event: at the limit it is stored; beyond it ``publish`` raises, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.scenarios.bus.support import SETTINGS, World
from tidings.core import names
from tidings.core.errors import InvalidEvent
from tidings.core.events import Event, EventMeta
from tidings.log import LogSettings

Fields = dict[str, Any]


def nested(depth: int) -> Fields:
    """A payload of so many levels."""
    payload: Fields = {}
    for _ in range(depth - 1):
        payload = {"a": payload}
    return payload


async def publish(world: World, **fields: Any) -> int:
    """Publish an event with these parts. Return its seq."""
    bus = world.bus
    assert bus is not None
    payload = fields.pop("payload", {})
    given = {"topic": "orders", "type": "PLACED", "space_id": "shared:shop", **fields}
    return (await world.run(bus.publish(Event(EventMeta(**given), payload)))).seq


LIMITS: list[tuple[str, int, Callable[[int], Fields]]] = [
    ("topic", names.NAME_CHARS_MAX, lambda size: {"topic": "t" * size}),
    ("type", names.NAME_CHARS_MAX, lambda size: {"type": "T" * size}),
    ("event_id", names.EVENT_ID_BYTES_MAX, lambda size: {"event_id": "é" * (size // 2) + "x" * (size % 2)}),
    ("space_id", names.SPACE_BYTES_MAX, lambda size: {"space_id": "shared:" + "s" * (size - 7)}),
    ("objects", names.OBJECT_COUNT_MAX, lambda size: {"objects": [f"order:{number}" for number in range(size)]}),
    ("an object", names.OBJECT_BYTES_MAX, lambda size: {"objects": ["order:" + "o" * (size - 6)]}),
    ("partitions", names.PARTITION_COUNT_MAX, lambda size: {"partitions": [f"p{number}" for number in range(size)]}),
    ("a partition", names.PARTITION_BYTES_MAX, lambda size: {"partitions": ["p" * size]}),
    ("app", names.APP_CHARS_MAX, lambda size: {"app": "a" * size}),
]


@pytest.mark.bound(
    "core.names.APP_CHARS_MAX",
    "core.names.EVENT_ID_BYTES_MAX",
    "core.names.NAME_CHARS_MAX",
    "core.names.OBJECT_BYTES_MAX",
    "core.names.OBJECT_COUNT_MAX",
    "core.names.PARTITION_BYTES_MAX",
    "core.names.PARTITION_COUNT_MAX",
    "core.names.SPACE_BYTES_MAX",
)
@crossed
@pytest.mark.parametrize(("limit", "fields_of"), [each[1:] for each in LIMITS], ids=[each[0] for each in LIMITS])
async def test_an_envelope_at_the_limit_is_stored_and_beyond_it_rejected(
    world: World, limit: int, fields_of: Callable[[int], Fields], beyond: Beyond
) -> None:
    """The part of the envelope is named in the error; the rejected event takes no seq."""
    await world.open(log_settings=SETTINGS)
    with pytest.raises(InvalidEvent):
        await publish(world, **fields_of(beyond(limit)))
    assert await publish(world, **fields_of(limit)) == 1


@pytest.mark.bound("log.settings.LogSettings.payload_bytes_max", "log.settings.LogSettings.payload_depth_max")
@crossed
@pytest.mark.parametrize(
    ("limit", "payload_of"),
    [(1_000, lambda size: {"t": "x" * (size - 8)}), (20, nested)],
    ids=["bytes", "depth"],
)
async def test_a_payload_at_the_limit_is_stored_and_beyond_it_rejected(
    world: World, limit: int, payload_of: Callable[[int], Fields], beyond: Beyond
) -> None:
    """``payload_bytes_max`` and ``payload_depth_max`` hold for the payload as JSON; the rejected event takes no seq."""
    settings = LogSettings(journal_bytes=1 << 20, payload_bytes_max=1_000, payload_depth_max=20)
    await world.open(log_settings=settings)
    with pytest.raises(InvalidEvent):
        await publish(world, payload=payload_of(beyond(limit)))
    assert await publish(world, payload=payload_of(limit)) == 1


@pytest.mark.bound("core.names.TOPIC_AND_GROUP_CHARS_MAX")
@crossed
async def test_a_group_with_a_name_too_long_for_its_file_is_rejected(world: World, beyond: Beyond) -> None:
    """Topic and group together are limited by the name of the position's file; ``subscribe`` raises."""
    bus = await world.open(log_settings=SETTINGS)
    topic = "t" * names.NAME_CHARS_MAX
    group = "g" * (names.TOPIC_AND_GROUP_CHARS_MAX - len(topic))
    with pytest.raises(InvalidEvent):
        await world.run(bus.subscribe(topic, "g" * (beyond(names.TOPIC_AND_GROUP_CHARS_MAX) - len(topic)), print))
    await world.run(bus.subscribe(topic, group, print))
