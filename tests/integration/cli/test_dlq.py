"""Dead letters from the command line: found, filtered, asked to be tried again, dropped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.support import invoke, lines, started
from tidings.bus import Ack, EventBus
from tidings.bus.store import Cursor, DeadLetterFilter, GroupPosition
from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.bus.store.dead_letters import OPEN
from tidings.bus.store.offset_files import OffsetFiles
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.events import Event, EventMeta
from tidings.log.embedded.disk import OsDisk
from tidings.log.settings import LogSettings

NOTED = ("--type", "NOTED", "--space", "shared:home")
SETTINGS = LogSettings(journal_bytes=1 << 20)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition, within the time that a test has."""
    async with asyncio.timeout(20):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.005)


def state_of(workspace: Path) -> dict[str, str]:
    store = DeadLetterFiles(OsDisk(), workspace / ".bus" / "dlq", SYSTEM_CLOCK)
    return {each.id: each.state for each in store.find("demo", None, DeadLetterFilter(states=(*OPEN, "redriven")))}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Group ``worker`` gave up on offsets 1 (a ValueError) and 3 (a KeyError), group ``other`` on 1."""

    async def worker(event: Any) -> Ack:
        if event.offset == 1:
            raise ValueError("one is bad")
        if event.offset == 3:
            raise KeyError("three")
        return Ack()

    async def other(event: Any) -> Ack:
        if event.offset == 1:
            raise ValueError("bad here too")
        return Ack()

    async def work() -> None:
        async with EventBus(workspace=tmp_path / "w", log_settings=SETTINGS) as bus:
            await bus.subscribe("demo", "worker", worker, max_retries=0)
            await bus.subscribe("demo", "other", other, max_retries=1, backoff_base=0.0)
            for n in range(5):
                await bus.publish(Event(EventMeta("demo", "NOTED", "shared:home", f"demo-{n}"), {"n": n}))
            await until(lambda: bus.lag("demo", "worker") == bus.lag("demo", "other") == 0)

    asyncio.run(work())
    return tmp_path / "w"


def add_many(workspace: Path, count: int) -> None:
    """A workspace whose group ``worker`` gave up on each of so many events."""

    async def work() -> None:
        async with EventBus(workspace=workspace, log_settings=SETTINGS) as bus:
            await bus.publish_many([Event(EventMeta("demo", "NOTED", "shared:home"), {"n": n}) for n in range(count)])
            store = DeadLetterFiles(OsDisk(), workspace / ".bus" / "dlq", SYSTEM_CLOCK)
            async for event in bus.replay("demo"):
                store.add(event.record, "worker", ValueError("no"), [], "retries")
        OffsetFiles(OsDisk(), workspace / ".bus" / "offsets", SYSTEM_CLOCK, "").save(
            "demo", "worker", GroupPosition(Cursor(count - 1), {})
        )

    asyncio.run(work())


def listed(workspace: Path, *args: object) -> dict[str, str]:
    done = invoke("dlq", "list", *args, "--json", "-w", workspace)
    assert done.exit_code == 0, done.stderr
    return {each["id"]: each["state"] for each in lines(done.stdout)}


def changed(workspace: Path, verb: str, *args: object) -> dict[str, Any]:
    done = invoke("dlq", verb, "demo", *args, "--json", "-w", workspace)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def audited(workspace: Path) -> list[tuple[str, dict[str, Any]]]:
    """What was begun; each of it must have ended well."""
    done = invoke("log", "read", "audit", "--json", "-w", workspace)
    found = lines(done.stdout) if done.exit_code == 0 else []
    ends = [(each["meta"]["type"], each["payload"]) for each in found[1::2]]
    assert ends == [
        (f"{each['meta']['type']}.ended", {"outcome": "done", "audit_seq": each["seq"]}) for each in found[::2]
    ]
    return [(each["meta"]["type"], each["payload"]) for each in found[::2]]


class TestLooking:
    def test_the_list_has_every_letter_that_is_open(self, workspace: Path) -> None:
        """Letters of all groups are there, with state, error and attempts."""
        assert listed(workspace) == {"worker-1": "dead", "worker-3": "dead", "other-1": "dead"}

        shown = invoke("dlq", "list", "-w", workspace).stdout
        assert "builtins.ValueError: one is bad" in shown

    @pytest.mark.parametrize(
        ("filters", "ids"),
        [
            (("--group", "worker"), {"worker-1", "worker-3"}),
            (("--error-type", "ValueError"), {"worker-1", "other-1"}),
            (("--error-type", "builtins.KeyError"), {"worker-3"}),
            (("--reason", "retries"), {"worker-1", "worker-3", "other-1"}),
            (("--reason", "expired"), set()),
            (("--since", "1h"), {"worker-1", "worker-3", "other-1"}),
            (("--since", "2999-01-01"), set()),
            (("--group", "worker", "--error-type", "ValueError"), {"worker-1"}),
            (("demo",), {"worker-1", "worker-3", "other-1"}),
            (("elsewhere",), set()),
        ],
    )
    def test_filters_are_joined_by_and(self, workspace: Path, filters: tuple[str, ...], ids: set[str]) -> None:
        """Each filter narrows the list down."""
        assert listed(workspace, *filters).keys() == ids

    def test_one_letter_is_shown_whole(self, workspace: Path) -> None:
        """The event, the error and each attempt are there."""
        done = invoke("dlq", "show", "demo", "other-1", "--json", "-w", workspace)

        letter = json.loads(done.stdout)
        assert letter["event"]["payload"] == {"n": 1}
        assert letter["event_id"] == "demo-1"
        assert [each["error"] for each in letter["attempts"]] == ["bad here too"] * 2
        assert '{"n":1}' in invoke("dlq", "show", "demo", "other-1", "-w", workspace).stdout

    def test_an_unknown_letter_is_an_error(self, workspace: Path) -> None:
        """A name that no letter has ends with 1, also where something would be changed."""
        for verb in (("show", "demo", "nobody-7"), ("drop", "demo", "nobody-7", "--yes")):
            done = invoke("dlq", *verb, "-w", workspace)
            assert done.exit_code == 1
            assert "has no dead letter 'nobody-7'" in done.stderr
        assert audited(workspace) == []

    def test_a_workspace_that_is_not_there_ends_with_3(self, tmp_path: Path) -> None:
        """A wrong path is not a workspace without letters."""
        assert invoke("dlq", "list", "-w", tmp_path / "none").exit_code == 3


class TestRedriving:
    def test_requested_letters_are_tried_by_their_group_when_it_next_runs(self, workspace: Path) -> None:
        """Only the group that failed gets the event again; the letter is then closed."""
        done = changed(workspace, "redrive", "--group", "worker", "--error-type", "ValueError", "--yes")
        assert (done["carried_out"], [each["id"] for each in done["dead_letters"]]) == (True, ["worker-1"])
        assert listed(workspace) == {"worker-1": "requested", "worker-3": "dead", "other-1": "dead"}

        seen: list[tuple[str, int]] = []

        async def handler(event: Any) -> Ack:
            seen.append((event.group, event.offset))
            return Ack()

        async def work() -> None:
            async with EventBus(workspace=workspace, log_settings=SETTINGS) as bus:
                for group in ("worker", "other"):
                    await bus.subscribe("demo", group, handler)
                await until(lambda: state_of(workspace)["worker-1"] == "redriven")

        asyncio.run(work())
        assert seen == [("worker", 1)]
        assert listed(workspace) == {"worker-3": "dead", "other-1": "dead"}
        assert listed(workspace, "--every-state")["worker-1"] == "redriven"

    def test_the_output_says_when_they_are_tried(self, workspace: Path) -> None:
        """People are told that the tool itself calls no handler."""
        done = invoke("dlq", "redrive", "demo", "--all", "--yes", "-w", workspace)

        assert "requested: 3 dead letters" in done.stdout
        assert "at once if it runs, else when it next does" in done.stdout

    def test_asking_twice_is_asking_once(self, workspace: Path) -> None:
        """What is requested already is not asked for again, and leaves no second record."""
        assert changed(workspace, "redrive", "worker-1", "worker-1", "--yes")["count"] == 1
        assert changed(workspace, "redrive", "worker-1", "--yes")["count"] == 0
        assert len(audited(workspace)) == 1

    @pytest.mark.slow
    def test_many_letters_are_asked_for_at_once(self, tmp_path: Path) -> None:
        """A bulk of letters is marked whole, and the records name each of them."""
        add_many(tmp_path, 620)

        done = changed(tmp_path, "redrive", "--reason", "retries", "--yes")

        assert done["count"] == 620
        assert set(listed(tmp_path).values()) == {"requested"}
        assert [(payload["count"], len(payload["ids"])) for _, payload in audited(tmp_path)] == [(500, 500), (120, 120)]
        assert [each["dead_letters"] for each in lines(invoke("group", "list", "--json", "-w", tmp_path).stdout)] == [
            620
        ]

    def test_a_dry_run_asks_for_nothing(self, workspace: Path) -> None:
        """It names the letters, and changes neither them nor the audit."""
        assert changed(workspace, "redrive", "--all", "--dry-run")["count"] == 3
        assert set(listed(workspace).values()) == {"dead"}
        assert audited(workspace) == []

    def test_which_letters_must_be_said(self, workspace: Path) -> None:
        """Without names, filters or ``--all`` nothing is guessed."""
        done = invoke("dlq", "redrive", "demo", "--yes", "-w", workspace)

        assert done.exit_code == 2
        assert set(listed(workspace).values()) == {"dead"}


class TestDropping:
    def test_dropped_letters_are_gone_for_good_and_kept_in_the_file(self, workspace: Path) -> None:
        """They are no longer open, cannot be re-driven, and still can be read; the deed is recorded."""
        done = changed(workspace, "drop", "worker-3", "other-1", "--yes")

        assert (done["carried_out"], done["count"]) == (True, 2)
        assert listed(workspace) == {"worker-1": "dead"}
        assert listed(workspace, "--every-state")["worker-3"] == "dropped"
        assert changed(workspace, "redrive", "worker-3", "--yes")["count"] == 0
        ((kind, payload),) = audited(workspace)
        assert kind == "cli.dlq.drop"
        assert payload == {"topic": "demo", "count": 2, "ids": ["worker-3", "other-1"]}

    def test_without_a_terminal_nothing_goes_unasked(self, workspace: Path) -> None:
        """Without ``--yes`` and with nobody to ask, the command ends with 2."""
        assert invoke("dlq", "drop", "demo", "--all", "-w", workspace).exit_code == 2
        assert len(listed(workspace)) == 3

    def test_a_dry_run_drops_nothing(self, workspace: Path) -> None:
        """It says what would go."""
        shown = invoke("dlq", "drop", "demo", "--group", "other", "--dry-run", "-w", workspace).stdout

        assert "would drop: 1 dead letter" in shown
        assert len(listed(workspace)) == 3


@pytest.mark.slow
def test_beside_a_writer_letters_can_be_seen_and_not_changed(workspace: Path) -> None:
    """While another process writes, the list works, and changing verbs end with 4."""
    with started("log", "append", "demo", "-", *NOTED, "--json", "-w", workspace) as writer:
        writer.write("{}")
        assert writer.json()["offset"] == 5

        assert len(listed(workspace)) == 3
        for verb in ("redrive", "drop"):
            busy = invoke("dlq", verb, "demo", "--all", "--yes", "-w", workspace)
            assert (busy.exit_code, busy.stdout) == (4, "")
            assert "is being written by process" in busy.stderr
    assert set(listed(workspace).values()) == {"dead"}
