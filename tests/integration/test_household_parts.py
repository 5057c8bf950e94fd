"""The household is made of the cognitive layer's own parts, and no part is thrown by an event that comes again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.household.home import Household
from examples.household.senses import MOMENTS
from examples.household.wiring import INTAKE, SPACE, WIRING
from tidings.bus import EventBus, ReceivedEvent
from tidings.testing import VirtualClock
from tidings.types import Event, EventMeta

TOPICS = (*INTAKE, *WIRING)
# Said of a trigger's state, which a command that comes again may change; everything else is said once for its cause.
HISTORY = "PROS_TRIGGER_UPSERTED"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a household has lived through every kind of moment once."""
    folder = tmp_path_factory.mktemp("household")
    asyncio.run(Household(folder).live(seconds=0.1 * len(MOMENTS)))
    return folder


def stored(workspace: Path, topic: str) -> list[ReceivedEvent]:
    async def read() -> list[ReceivedEvent]:
        async with EventBus(workspace=workspace) as bus:
            return [event async for event in bus.replay(topic)]

    return asyncio.run(read())


def types(workspace: Path, topic: str) -> Counter[str]:
    return Counter(event.meta.type for event in stored(workspace, topic) if event.meta.type != HISTORY)


def dead_letters(workspace: Path) -> list[tuple[str, str, str]]:
    async def read() -> list[tuple[str, str, str]]:
        async with EventBus(workspace=workspace) as bus:
            letters = [(topic, letter) for topic in TOPICS for letter in await bus.dead_letters(topic)]
            return [(topic, letter.group, letter.error) for topic, letter in letters]

    return asyncio.run(read())


@pytest.mark.slow
def test_the_topics_carry_what_the_real_producers_produce(workspace: Path) -> None:
    """Gate, write workflow, working memory and triggers are the cognitive layer's, and no event is a dead letter."""
    moments = len(MOMENTS)
    made = [event.payload["trigger"] for event in stored(workspace, "prospective") if event.meta.type == HISTORY]
    # One that was made later than its moment is told as expired, and does not fire.
    due = sum(each["schedule"]["kind"] == "once" and each["status"] == "ACTIVE" for each in made)

    assert len(made) == moments  # two for each summary, and a summary for every other moment
    assert due
    assert types(workspace, "bus.attention_gate.admitted").total() == moments
    assert types(workspace, "bus.write.ingest") == {"WRITE_REQUEST": moments}
    assert types(workspace, "memory.receipts") == {"MEMORY_RECEIPT_CREATED": moments}
    assert types(workspace, "hippo") == {"HIPPO_ENCODE": moments, "HIPPO_ENCODED": moments}
    assert types(workspace, "prospective") == {"PROSPECTIVE_TRIGGER": due, "PROS_TRIGGER_FIRED": due}
    assert types(workspace, "workspace") == {"WORKSPACE_BROADCAST": moments + due}
    assert set(types(workspace, "cognitive.working_memory")) == {"cognitive.working_memory.updated"}
    assert dead_letters(workspace) == []


@pytest.mark.slow
def test_a_reminder_reaches_arbiter_and_workspace(workspace: Path) -> None:
    """What a trigger says when it fires is decided on, carried out and broadcast."""
    titles = [event.payload["title"] for event in stored(workspace, "prospective") if "title" in event.payload]
    actions = [event.payload for event in stored(workspace, "actions")]
    notified = [each for each in actions if each.get("selected_action", {}).get("name") == "notify"]
    said = [event.payload["salient_keys"] for event in stored(workspace, "workspace")]

    assert titles
    assert [each["selected_action"]["args"]["title"] for each in notified] == titles
    done = {each["plan_id"]: each["status"] for each in actions if "status" in each}
    assert {done[each["plan_id"]] for each in notified} == {"OK"}
    assert all([title] in said for title in titles)


@pytest.mark.heavy
def test_everything_may_be_delivered_again(tmp_path: Path) -> None:
    """A later life that knows nothing of the first gets every event again: nothing is said twice, nothing is dead."""
    asyncio.run(Household(tmp_path).live(seconds=0.1 * len(MOMENTS)))
    before = {topic: types(tmp_path, topic) for topic in TOPICS}

    async def again() -> None:
        household = Household(tmp_path)
        async with household.bus as bus:
            for topic, wire in (INTAKE | WIRING).items():
                for group in wire.consumers:
                    await bus.seek(topic, group, 0)
        household = Household(tmp_path)
        async with household.alive(), asyncio.timeout(30):
            await household.quiet()
        handled = Counter((topic, who) for (topic, who, _), n in household.flow.got.items() for _ in range(n))
        assert all(
            handled[topic, who] >= before[topic].total()
            for topic, wire in (INTAKE | WIRING).items()
            for who in wire.consumers
        )

    asyncio.run(again())

    assert {topic: types(tmp_path, topic) for topic in TOPICS} == before
    assert dead_letters(tmp_path) == []


async def handled_twice(household: Household, clock: VirtualClock, cause: Event, part: str) -> list[dict[str, Any]]:
    """What a part's handler publishes on its topics when it gets one cause now and again an hour later."""
    await household.bus.publish(cause)
    (received,) = [event async for event in household.bus.replay(cause.meta.topic)]
    (one,) = [each for each in household.parts if each.name == part]
    await one.start()
    for _ in range(2):
        await one.handlers()[cause.meta.topic](received)
        clock.jump(3600)
    known = {cause.meta.event_id}
    return [
        dict(event.payload)
        for topic in ("actions", "workspace", "temporal")
        async for event in household.bus.replay(topic)
        if event.meta.event_id not in known
    ]


CANDIDATE = {"action": {"name": "order_taxi", "args": {}}, "risk_level": "LOW"}
DECISION = {"plan_id": "plan-1", "selected_action": {"name": "order_taxi", "args": {}}}
REMINDER = {
    "id": "tea",
    "person_id": "alice",
    "space_id": SPACE,
    "title": "tea",
    "action": "notify",
    "slot": "2026-01-01T00:00:00Z",
}


@pytest.mark.parametrize(
    ("part", "topic", "type_", "payload"),
    [
        ("arbiter", "cortex", "CORTEX_PREDICTION", CANDIDATE),
        ("arbiter", "prospective", "PROSPECTIVE_TRIGGER", REMINDER),
        ("workspace", "prospective", "PROSPECTIVE_TRIGGER", REMINDER),
        ("actuators", "actions", "ACTION_DECISION", DECISION),
    ],
)
async def test_a_cause_that_is_handled_twice_has_one_answer(
    tmp_path: Path, part: str, topic: str, type_: str, payload: dict[str, Any]
) -> None:
    """The answer's times are the cause's, so that the second one is the first one again."""
    clock = VirtualClock()
    household = Household(tmp_path, clock=clock)
    cause = Event(EventMeta(topic, type_, SPACE), payload)
    async with household.bus:
        answers = await handled_twice(household, clock, cause, part)

    assert len(answers) == 1
    times = {answers[0].get(name) for name in ("decided_at", "executed_at", "generated_at")} - {None}
    assert times == {cause.meta.ts.isoformat().replace("+00:00", "Z")}
