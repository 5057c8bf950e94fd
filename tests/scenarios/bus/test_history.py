"""What happened on a bus can be looked up afterwards: events, attempts, dead letters, and who had what changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World
from tidings.access.audit import AUDIT_TOPIC, Audit
from tidings.bus import Publisher
from tidings.bus.errors import UnknownDeadLetter
from tidings.core.errors import InvalidName
from tidings.core.events import EventMeta
from tidings.log.interface import Query, Refused
from tidings.log.settings import LogSettings

SMALL = LogSettings(segment_lines_max=2, journal_bytes=1 << 20, journal_count_max=2)


async def told(world: World) -> list[tuple[str, Any, dict[str, Any]]]:
    """Type, actor and content of the audit records, in order."""
    assert world.bus is not None
    return [
        (event.meta.type.name, event.meta.actor, dict(event.payload)) async for event in world.bus.replay(AUDIT_TOPIC)
    ]


@pytest.mark.req("F98")
@pytest.mark.parametrize(
    "verb", ["dlq.redrive", "dlq.drop", "group.seek", "group.pause", "group.resume", "log.compact"]
)
@pytest.mark.parametrize("by", [None, "ann"])
async def test_a_change_through_the_bus_is_on_record_before_it_and_after(
    world: World, verb: str, by: str | None
) -> None:
    """Who, what and when is durable before anything is changed, survives a restart, and how it ended is told."""
    bus = await world.open(log_settings=SMALL)
    got = Recorder(fails=lambda event: event.offset == 1)
    await world.run(bus.subscribe(TOPIC, GROUP, got, max_retries=0))
    await world.publish(6)
    await world.until(world.drained())
    await world.close()  # which seals what is full
    bus = await world.open(log_settings=SMALL)
    await world.run(bus.subscribe(TOPIC, GROUP, got, max_retries=0))
    (letter,) = await bus.dead_letters(TOPIC)
    audit: dict[str, Any] = {} if by is None else {"audit": Audit(actor=by)}
    changes: dict[str, Any] = {
        "dlq.redrive": lambda: bus.redrive(TOPIC, **audit),
        "dlq.drop": lambda: bus.drop_dead_letters(TOPIC, [letter.id], **audit),
        "group.seek": lambda: bus.seek(TOPIC, GROUP, 2, **audit),
        "group.pause": lambda: bus.pause(TOPIC, GROUP, **audit),
        "group.resume": lambda: bus.resume(TOPIC, GROUP, **audit),
        "log.compact": lambda: bus.compact(TOPIC, **audit),
    }
    if verb == "group.resume":
        await world.run(bus.pause(TOPIC, GROUP))
    before = await told(world)

    await world.run(changes[verb]())

    (what, who, said), (end, _, outcome) = (await told(world))[len(before) :]
    assert (what, who, end) == (f"bus.{verb}", by or "process", f"bus.{verb}.ended")
    assert outcome["outcome"] == "done"
    if verb.startswith("dlq"):
        assert (said["topic"], letter.id in str(said)) == (TOPIC, True)
    elif verb == "log.compact":
        assert said["segments"] >= 1
        assert {drop["topic"] for drop in said["dropped"]} == {TOPIC}
    else:
        assert (said["topic"], said["group"]) == (TOPIC, GROUP)
    await world.kill()
    await world.open(log_settings=SMALL)
    assert [name for name, _, _ in await told(world)][len(before) :] == [what, end]


@pytest.mark.req("F98")
async def test_looking_leaves_no_record_and_a_change_that_fails_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run, and what has nothing to change, is not on record; what could not be carried out is told as failed."""
    bus = await world.open()
    got = Recorder(fails=lambda _: True)
    await world.run(bus.subscribe(TOPIC, GROUP, got, max_retries=0))
    await world.publish(2)
    await world.until(world.drained())

    await bus.redrive(TOPIC, dry_run=True)
    await bus.compact(dry_run=True)
    await bus.dead_letters(TOPIC)
    await world.run(bus.resume(TOPIC, GROUP))
    with pytest.raises(UnknownDeadLetter, match="no-such"):
        await world.run(bus.drop_dead_letters(TOPIC, ["no-such-letter"]))
    assert await told(world) == []

    async def gone(topic: str, ids: Sequence[str]) -> None:
        raise UnknownDeadLetter(topic, ids[0])

    monkeypatch.setattr(bus.store, "drop_dead_letters", gone)
    with pytest.raises(UnknownDeadLetter):
        await world.run(bus.drop_dead_letters(TOPIC, [f"{GROUP}-0"]))

    (asked, _, _), (ended, _, outcome) = await told(world)
    assert (asked, ended) == ("bus.dlq.drop", "bus.dlq.drop.ended")
    assert (outcome["outcome"], outcome["error"]) == ("failed", "bus.unknown_dead_letter")
    assert len(await bus.dead_letters(TOPIC)) == 2


@pytest.mark.req("F98")
async def test_what_became_of_an_event_can_be_told_long_after(world: World) -> None:
    """The event with its envelope, and for each group that gave up on it every attempt with its time and error."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, Recorder(fails=lambda event: event.offset == 1), max_retries=2))
    await world.publish(3, actor="device:phone1", trace_id="t-1")
    await world.until(world.drained())
    await world.kill()
    bus = await world.open()

    events = [event async for event in bus.replay(TOPIC)]
    (letter,) = await bus.dead_letters(TOPIC)
    assert [(event.meta.actor, event.meta.trace_id, event.meta.space_id) for event in events] == [
        ("device:phone1", "t-1", "shared:home")
    ] * 3
    assert (letter.event_id, letter.group, letter.offset) == (events[1].meta.event_id, GROUP, 1)
    assert ["no luck with 1" in attempt.error for attempt in letter.attempts] == [True] * 3
    assert sorted(attempt.at for attempt in letter.attempts) == [attempt.at for attempt in letter.attempts]


@pytest.mark.req("F99")
async def test_nothing_on_a_bus_is_outside_a_space(world: World) -> None:
    """No way of publishing takes an event without a space; records, dead letters and the bus's own audit all name theirs."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, Recorder(fails=lambda _: True), max_retries=0))
    publisher = Publisher(bus, clock=world.clock)

    with pytest.raises(TypeError, match="space_id"):
        EventMeta(topic=TOPIC, type="X")
    for nothing in ("", None):
        event = world.event()
        event.meta.space_id = nothing  # type: ignore[assignment]
        with pytest.raises(InvalidName, match="space_id"):
            await world.run(bus.publish(event))
        (verdict,) = await world.run(bus.publish_many([event]))
        result = await world.run(publisher.publish(event))
        assert (type(verdict), result.success) == (Refused, False)
    assert bus.log.position.seq == 0

    await world.publish(2, space_id="personal:ann")
    await world.until(world.drained())
    await world.run(bus.redrive(TOPIC))
    await world.until(world.drained())

    page = await bus.log.read(Query(), limit=100)
    spaces = [(record.topic, record.meta.space_id) for record in page.records]
    assert spaces == [(TOPIC, "personal:ann")] * 2 + [(AUDIT_TOPIC, "system")] * 2
    assert [letter.event["meta"]["space_id"] for letter in await bus.dead_letters(TOPIC)] == ["personal:ann"] * 2
