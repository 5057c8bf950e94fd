"""A publisher says what became of each event, and tries again where that can help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance.support import event, numbered
from tidings.bus import EventBus, Publisher, PublisherSettings
from tidings.bus.errors import BusClosed, InvalidBatch
from tidings.core.errors import InvalidName
from tidings.core.events import Event
from tidings.log import Query
from tidings.log.errors import StorageFull
from tidings.log.interface import Authorise, Verdict
from tidings.testing import VirtualClock


@pytest.mark.req("F22", "F133")
async def test_a_batch_gets_one_result_each(tmp_path: Path) -> None:
    """Good events are stored and bad ones are told, whatever stands beside them; sent again, they are known."""
    async with EventBus(workspace=tmp_path) as bus:
        publisher = Publisher(bus)
        events = [*numbered("a", 3), event("not/a/topic"), *numbered("b", 2)]
        results = await publisher.publish_batch(events)
        again = await publisher.publish_batch(events[:3])
        stored = (await bus.log.read(Query())).records

    assert [result.success for result in results] == [True, True, True, False, True, True]
    assert isinstance(results[3].error, InvalidName)
    assert [record.meta.event_id for record in stored] == [r.event_id for r in results if r.success]
    assert [result.is_duplicate for result in again] == [True] * 3
    assert all(result.published_at is not None for result in again)


@pytest.mark.req("F22")
@pytest.mark.parametrize("count", [0, 4])
async def test_a_batch_out_of_bounds_is_refused_whole(tmp_path: Path, count: int) -> None:
    """An empty or too large batch publishes nothing."""
    async with EventBus(workspace=tmp_path) as bus:
        publisher = Publisher(bus, PublisherSettings(batch_count_max=3))
        with pytest.raises(InvalidBatch):
            await publisher.publish_batch(numbered("a", count))
        assert bus.log.position.seq == 0


async def test_a_closed_publisher_answers_with_failures(tmp_path: Path) -> None:
    """Closing a publisher takes no events any more, and leaves the bus alone."""
    async with EventBus(workspace=tmp_path) as bus:
        publisher = Publisher(bus)
        assert publisher.health_check()
        await publisher.close()
        result = await publisher.publish(event("a"))
        assert not publisher.health_check()
        assert bus.health().is_writable

    assert not result.success
    assert isinstance(result.error, BusClosed)


async def test_what_can_be_tried_again_is_with_growing_delays(tmp_path: Path) -> None:
    """A retryable refusal is tried again as often as the settings say, an error of the event's own is not."""
    clock = VirtualClock()

    class Tight(EventBus):
        tries = 0

        async def publish_many(
            self, events: Sequence[Event], *, timeout_s: float | None = None, authorise: Authorise | None = None
        ) -> list[Verdict]:
            Tight.tries += 1
            if Tight.tries <= 3:
                raise StorageFull("disk")
            return await super().publish_many(events, timeout_s=timeout_s)

    async with Tight(workspace=tmp_path) as bus:
        began = clock.monotonic()
        patient = Publisher(bus, PublisherSettings(timeout_s=30.0), clock=clock)
        result = await clock.run_until(patient.publish(event("a")))
        assert (result.success, result.retry_count, clock.monotonic() - began) == (True, 3, 1.0 + 2.0 + 4.0)
        Tight.tries = 0
        given_up = await clock.run_until(
            Publisher(bus, PublisherSettings(retries_max=2), clock=clock).publish(event("a"))
        )

    assert not given_up.success
    assert isinstance(given_up.error, StorageFull)
