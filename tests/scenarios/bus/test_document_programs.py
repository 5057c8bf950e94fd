"""The programs of the bus's document, as they are written there but for the package's name, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]

PUBLISH: Final = """
from tidings.bus import EventBus
from tidings.types import Event, EventMeta
bus = EventBus(registry=registry)
for user, priority in [("alice", "high"), ("alice", "low"), ("bob", "high")]:
    meta = EventMeta(topic="WORKSPACE_BROADCAST", type="X", space_id="s", actor={"user_id": user}, priority=priority)
    await bus.publish(Event(meta, {"from": user, "priority": priority}))
"""
DONE: Final = """
import asyncio
async with asyncio.timeout(30):
    while bus.lag({topic!r}, {group!r}):
        await asyncio.sleep(0)
print("letters", len(await bus.dead_letters({topic!r})))
await bus.close()
"""
READ: Final = """
print([(ev.offset, ev.meta.type.name, dict(ev.payload)) async for ev in bus.replay({topic!r})])
"""
SHAPES: Final = """
import dataclasses, inspect
from tidings import types as ours
assert {m.name: m.value for m in EventType} == {m.name: m.value for m in ours.EventType}
given = inspect.signature(ours.EventMeta).parameters
asked = dataclasses.fields(EventMeta)
assert [f.name for f in asked] == list(given)[: len(asked)]
needed = dict(topic="actions", type=ours.EventType.ACTION_EXECUTED, space_id="s")
theirs, made = EventMeta(**needed), ours.EventMeta(**needed)
for f in asked:
    assert isinstance(getattr(made, f.name), type(getattr(theirs, f.name))), f.name
assert len(made.event_id) == len(theirs.event_id) and made.ts.tzinfo == theirs.ts.tzinfo
for left_out in needed:
    for make in (EventMeta, ours.EventMeta):
        try:
            make(**{name: value for name, value in needed.items() if name != left_out})
        except TypeError:
            continue
        raise AssertionError(left_out)
event = ours.Event(made, {"a": 1})
assert (event.meta, event.payload) == (made, {"a": 1})
ours.Ack(), ours.Nack()
print("the same")
"""
GATE: Final = """
import inspect
from tidings.cognition import AttentionGate as Ours
from tidings.types import Event, EventMeta, EventType
gate = Ours()
event = Event(EventMeta("workspace", EventType.WORKSPACE_BROADCAST, "s", actor="device:phone1"), {"text": "hello"})
for name in ("admit", "defer", "boost", "drop"):
    assert list(inspect.signature(getattr(AttentionGate, name)).parameters) == ["self", "event"]
    assert type(getattr(gate, name)(event)) is bool
assert [gate.admit(event), gate.defer(event), gate.drop(event)].count(True) == 1
print("decided")
"""

PROGRAMS: Final = {
    "basic_publishing": (
        READ.format(topic="WORKSPACE_BROADCAST"),
        str([(n, "WORKSPACE_BROADCAST", {"message": "Hello world"}) for n in range(3)]),
    ),
    "filtered_subscription": (
        PUBLISH + DONE.format(topic="WORKSPACE_BROADCAST", group="default"),
        "Important event from Alice: {'from': 'alice', 'priority': 'high'}\nletters 0",
    ),
    "subscribe_and_publish": (
        DONE.format(topic="actions", group="learner").replace("await bus.close()", READ.format(topic="actions")),
        f"letters 0\n{[(0, 'ACTION_EXECUTED', {'action_id': 'a1', 'status': 'ok'})]}",
    ),
    "playbook": (
        DONE.format(topic="workspace", group="arbiter") + "print(len(SEEN))",
        "letters 0\n3",
    ),
    "types": (SHAPES, "the same"),
    "attention_gate": (GATE, "decided"),
}


def run(folder: Path, program: str, more: str = "") -> str:
    """Run a program to its end; what it printed."""
    command = [sys.executable, "-W", "error", "-m", "tests.scenarios.bus.document_program", program, more]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done.stdout.strip()


@pytest.mark.req("F132")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_listing_runs_as_written_and_again_in_the_same_folder(program: str, tmp_path: Path) -> None:
    """Each listing runs to its end twice, closing nothing it does not close; the third time its outcome is as promised."""
    more, printed = PROGRAMS[program]

    assert run(tmp_path, program) == ""
    assert run(tmp_path, program) == ""
    assert run(tmp_path, program, more) == printed


@pytest.mark.req("F132")
def test_the_end_to_end_program_handles_its_event_once(tmp_path: Path) -> None:
    """Run twice it publishes one event, by its key; the learner has acknowledged it, and nothing is a dead letter."""
    assert run(tmp_path, "end_to_end") == ""
    assert run(tmp_path, "end_to_end") == ""

    bus = tmp_path / "workspace" / ".bus"
    assert (bus / "wal" / "actions.00000001.jsonl").read_text().count("\n") == 1
    assert '"committed":0,' in (bus / "offsets" / "actions__learner.json").read_text()
    assert not (bus / "dlq").exists() or not list((bus / "dlq").iterdir())
