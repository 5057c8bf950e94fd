"""What is published: orders with a payload of about 200 bytes, and lines as the log writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from tidings.core.events import Event, EventMeta
from tidings.log.embedded import open_log

__all__ = ["PAYLOADS", "Variant", "event_maker", "sample_lines"]

Variant = Literal["log ids", "producer ids", "idem keys", "partitions"]
Maker = Callable[[int], Event]

_POOL: Final = 256
_TYPE: Final = "ORDER_PLACED"
_SPACE: Final = "shared:shop"
PAYLOADS: Final = [
    {
        "order_id": f"ord-{n:09d}",
        "customer": f"customer-{n * 7919 % 100_000:06d}",
        "total_cents": n * 37 % 50_000,
        "is_gift": n % 9 == 0,
        "note": "please leave it with the neighbours on the second floor if nobody answers the bell",
    }
    for n in range(_POOL)
]


def event_maker(variant: Variant, topic_count: int) -> Maker:
    """A function that makes the n-th event; the producer's own work is part of what is measured."""
    topics = [f"orders-{n:02d}" for n in range(topic_count)]

    def plain(n: int) -> Event:
        return Event(EventMeta(topics[n % topic_count], _TYPE, _SPACE), PAYLOADS[n % _POOL])

    def with_id(n: int) -> Event:
        return Event(EventMeta(topics[n % topic_count], _TYPE, _SPACE, f"order-{n:012d}"), PAYLOADS[n % _POOL])

    def with_idem_key(n: int) -> Event:
        meta = EventMeta(topics[n % topic_count], _TYPE, _SPACE, idem_key=f"once-{n:012d}")
        return Event(meta, PAYLOADS[n % _POOL])

    def with_partitions(n: int) -> Event:
        meta = EventMeta(topics[n % topic_count], _TYPE, _SPACE, partitions=(f"customer-{n % 100:03d}",))
        return Event(meta, PAYLOADS[n % _POOL])

    makers: dict[Variant, Maker] = {
        "log ids": plain,
        "producer ids": with_id,
        "idem keys": with_idem_key,
        "partitions": with_partitions,
    }
    return makers[variant]


async def sample_lines(workspace: Path, count: int = _POOL) -> list[bytes]:
    """The lines that the log writes for the first ``count`` events, for baselines that must write the same bytes."""
    make = event_maker("log ids", 1)
    log = await open_log(workspace)
    await log.append_many([make(n) for n in range(count)])
    await log.close()
    (segment,) = (workspace / ".bus" / "wal").iterdir()
    return segment.read_bytes().splitlines(keepends=True)
