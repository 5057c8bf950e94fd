"""Groups from the command line: where they stand, beside a living writer too, and moving them while nobody runs them."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.support import fill, invoke, invoke_until, lines, started
from tidings.bus import Ack, EventBus
from tidings.bus.errors import CursorDamaged
from tidings.bus.store import Cursor, GroupPosition
from tidings.bus.store.offset_files import OffsetFiles
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.layout import Layout
from tidings.log.settings import LogSettings

NOTED = ("--type", "NOTED", "--space", "shared:home")


def damage(workspace: Path, group: str) -> None:
    """Leave no file of a group whole."""
    for name in (f"demo__{group}.json", f"demo__{group}.json.bak"):
        (Layout(workspace).offsets / name).write_text("damaged")


def store_of(workspace: Path) -> OffsetFiles:
    layout = Layout(workspace)
    return OffsetFiles(OsDisk(), layout.offsets, SYSTEM_CLOCK, layout.read_meta(OsDisk()).epoch)


def position_of(workspace: Path, group: str = "worker") -> GroupPosition:
    place = store_of(workspace).load("demo", group)
    assert place is not None
    return place


def listed(workspace: Path, *args: object) -> list[dict[str, Any]]:
    done = invoke("group", "list", *args, "--json", "-w", workspace)
    assert done.exit_code == 0, done.stderr
    return lines(done.stdout)


def changed(workspace: Path, verb: str, *args: object) -> dict[str, Any]:
    done = invoke("group", verb, "demo", "worker", *args, "--json", "-w", workspace)
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


def delivered(workspace: Path, count: int) -> list[int]:
    """The offsets that the group ``worker`` gets when it runs, once it got ``count`` of them."""

    async def work() -> list[int]:
        seen: list[int] = []
        is_enough = asyncio.Event()

        async def handler(event: Any) -> Ack:
            seen.append(event.offset)
            if len(seen) >= count:
                is_enough.set()
            return Ack()

        async with EventBus(workspace=workspace, log_settings=LogSettings(journal_bytes=1 << 20)) as bus:
            await bus.subscribe("demo", "worker", handler)
            async with asyncio.timeout(20):
                await is_enough.wait()
        return seen

    return asyncio.run(work())


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """
    A topic ``demo`` of 25 events: group ``worker`` is through with 0 to 9 and 12 to 14, and failed twice on 10; group ``late``
    has seen all.
    """
    fill(tmp_path / "w", ("demo", 25), ("other", 3))
    store = store_of(tmp_path / "w")
    store.save("demo", "worker", GroupPosition(Cursor(9, [(12, 14)]), {10: 2}))
    store.save("demo", "late", GroupPosition(Cursor(24), {}))
    return tmp_path / "w"


class TestLooking:
    def test_the_list_says_where_each_group_stands(self, workspace: Path) -> None:
        """Lag, committed offset, early ones, attempts and the age of the oldest event that waits are all there."""
        late, worker = listed(workspace)

        assert (worker["topic"], worker["group"], worker["state"]) == ("demo", "worker", "ready")
        assert (worker["committed"], worker["next_offset"]) == (9, 25)
        assert (worker["lag"], worker["acknowledged_early"], worker["failed_attempts"]) == (12, 3, 2)
        assert 0 <= worker["oldest_unacked_age_s"] < 600
        assert worker["paused"] is False
        assert (late["lag"], late["oldest_unacked_age_s"]) == (0, None)

    def test_the_list_is_a_table_for_people(self, workspace: Path) -> None:
        """People see a line for each group under named columns."""
        shown = invoke("group", "list", "-w", workspace).stdout

        for word in ("committed", "lag", "early", "failed", "oldest", "worker", "late"):
            assert word in shown

    def test_the_list_can_be_narrowed_to_a_topic(self, workspace: Path) -> None:
        """Groups of other topics are left out."""
        store_of(workspace).save("other", "reader", GroupPosition(Cursor(), {}))

        assert [each["group"] for each in listed(workspace, "--topic", "other")] == ["reader"]

    def test_one_group_is_shown_in_detail(self, workspace: Path) -> None:
        """The early ones and the events that failed are named."""
        shown = invoke("group", "show", "demo", "worker", "--json", "-w", workspace)

        found = json.loads(shown.stdout)
        assert found["acknowledged_ranges"] == [[12, 14]]
        assert found["failed_attempts_by_offset"] == {"10": 2}
        assert "12 to 14" in invoke("group", "show", "demo", "worker", "-w", workspace).stdout

    def test_a_group_that_is_not_there_is_an_error_with_help(self, workspace: Path) -> None:
        """The error names groups that there are."""
        done = invoke("group", "show", "demo", "nobody", "-w", workspace)

        assert done.exit_code == 1
        assert "there are: late, worker" in done.stderr

    def test_a_damaged_place_is_shown_and_does_not_hide_the_others(self, workspace: Path) -> None:
        """A group whose offset file is beyond reading has state ``damaged``, and the rest are listed all the same."""
        damage(workspace, "late")

        late, worker = listed(workspace)

        assert (late["state"], late["lag"]) == ("damaged", None)
        assert "neither the offset file nor its backup" in late["problem"]
        assert worker["lag"] == 12

    def test_a_place_of_another_epoch_is_shown_as_such(self, workspace: Path) -> None:
        """A group that counts in another life of the log cannot start, and seeking mends it."""
        elsewhere = OffsetFiles(OsDisk(), Layout(workspace).offsets, SYSTEM_CLOCK, "another-epoch")
        elsewhere.save("demo", "worker", GroupPosition(Cursor(9), {}))

        assert [each["state"] for each in listed(workspace)] == ["ready", "other_epoch"]
        changed(workspace, "seek", "--earliest", "--yes")
        assert [each["state"] for each in listed(workspace)] == ["ready", "ready"]

    def test_a_group_whose_next_events_were_dropped_is_said_to_be_trimmed(self, workspace: Path) -> None:
        """Retention that passed over a group shows in the list."""
        store_of(workspace).remove("demo", "worker")
        done = invoke("log", "retention", "--max-bytes", "demo=0", "--yes", "-w", workspace)
        assert done.exit_code == 0, done.stderr
        store_of(workspace).save("demo", "worker", GroupPosition(Cursor(4), {}))

        _, worker = listed(workspace)

        assert worker["state"] == "trimmed"
        assert "was dropped" in worker["problem"]

    def test_a_workspace_that_is_not_there_ends_with_3(self, tmp_path: Path) -> None:
        """A wrong path is an error, and nothing is made there."""
        assert invoke("group", "list", "-w", tmp_path / "none").exit_code == 3
        assert not (tmp_path / "none").exists()


class TestSeeking:
    @pytest.mark.req("F123")
    def test_a_group_sent_back_sees_events_again(self, workspace: Path) -> None:
        """After a seek the next run of the group begins at that offset, early ones forgotten."""
        done = changed(workspace, "seek", "--to-offset", "5", "--yes")

        assert (done["carried_out"], done["next_offset"]) == (True, 5)
        assert (done["redelivered"], done["skipped"]) == (8, 0)
        assert delivered(workspace, 20) == list(range(5, 25))

    def test_a_dry_run_tells_and_changes_nothing(self, workspace: Path) -> None:
        """What would come again or be passed over is counted; place and audit stay as they were."""
        done = changed(workspace, "seek", "--latest", "--dry-run")

        assert (done["carried_out"], done["next_offset"]) == (False, 25)
        assert (done["redelivered"], done["skipped"]) == (0, 12)
        assert position_of(workspace).cursor.committed == 9
        assert audited(workspace) == []

    def test_a_change_is_recorded(self, workspace: Path) -> None:
        """The topic ``audit`` says what was moved, from where and to where."""
        done = changed(workspace, "seek", "--earliest", "--yes")

        ((kind, payload),) = audited(workspace)
        assert kind == "cli.group.seek"
        assert (payload["topic"], payload["group"]) == ("demo", "worker")
        assert (payload["committed"], payload["next_offset"]) == (9, 0)
        assert done["audit_seq"] == 29

    def test_a_time_stands_for_the_first_event_written_then(self, workspace: Path) -> None:
        """A time before all events is the first offset, one after all of them the end."""
        assert changed(workspace, "seek", "--to-time", "1d", "--dry-run")["next_offset"] == 0
        assert changed(workspace, "seek", "--to-time", "0s", "--dry-run")["next_offset"] == 25

    @pytest.mark.parametrize(
        "args",
        [
            (),
            ("--to-offset", "26"),
            ("--earliest", "--latest"),
            ("--to-time", "soon"),
            ("--earliest", "--yes", "--dry-run"),
        ],
    )
    def test_a_place_that_makes_no_sense_is_refused(self, workspace: Path, args: tuple[str, ...]) -> None:
        """No place, two places, or one the topic does not have: exit code 2, and nothing moves."""
        done = invoke("group", "seek", "demo", "worker", *args, "-w", workspace)

        assert done.exit_code == 2
        assert position_of(workspace).cursor.committed == 9

    def test_a_damaged_group_is_mended(self, workspace: Path) -> None:
        """Seeking gives a group whose offset file is beyond reading a place again."""
        damage(workspace, "worker")

        done = changed(workspace, "seek", "--to-offset", "20", "--yes")

        assert "neither" in done["problem"]
        assert delivered(workspace, 5) == list(range(20, 25))

    def test_without_a_terminal_nothing_moves_unasked(self, workspace: Path) -> None:
        """Without ``--yes`` and with nobody to ask, the command ends with 2."""
        done = invoke("group", "seek", "demo", "worker", "--earliest", "-w", workspace)

        assert done.exit_code == 2
        assert "--yes" in done.stderr
        assert position_of(workspace).cursor.committed == 9

    def test_a_sealed_place_is_moved_with_its_key(self, workspace: Path, tmp_path: Path) -> None:
        """Where the bus seals its offset files, the key that is given makes the new place one that it takes."""
        layout, key_file = Layout(workspace), tmp_path / "key"
        key_file.write_bytes(b"a key of some length")
        epoch = layout.read_meta(OsDisk()).epoch
        sealed = OffsetFiles(OsDisk(), layout.offsets, SYSTEM_CLOCK, epoch, key_file.read_bytes())
        sealed.save("demo", "worker", GroupPosition(Cursor(9), {}))

        changed(workspace, "seek", "--to-offset", "3", "--yes", "--offsets-key", key_file)

        place = sealed.load("demo", "worker")
        assert place is not None
        assert place.cursor.committed == 2
        with pytest.raises(CursorDamaged):
            sealed.load("demo", "late")


class TestPausing:
    def test_a_paused_group_gets_nothing_until_it_is_resumed(self, workspace: Path) -> None:
        """The mark is stored with the place, which stays; ``resume`` takes it away; both are recorded."""
        assert changed(workspace, "pause")["changes"] is True
        (paused,) = [each for each in listed(workspace) if each["group"] == "worker"]
        assert (paused["state"], paused["paused"], paused["lag"]) == ("paused", True, 12)

        assert changed(workspace, "pause")["changes"] is False
        assert changed(workspace, "resume")["changes"] is True

        place = position_of(workspace)
        assert (place.paused, place.cursor.ranges, place.attempts) == (False, [(12, 14)], {10: 2})
        assert [kind for kind, _ in audited(workspace)] == ["cli.group.pause", "cli.group.resume"]
        assert sorted(delivered(workspace, 12)) == [10, 11, *range(15, 25)]

    def test_a_dry_run_pauses_nothing(self, workspace: Path) -> None:
        """It says that there would be a change."""
        planned = changed(workspace, "pause", "--dry-run")
        assert (planned["carried_out"], planned["changes"], planned["committed"]) == (False, True, 9)
        assert not position_of(workspace).paused

    def test_a_seek_keeps_a_group_paused(self, workspace: Path) -> None:
        """Moving a paused group does not let it go."""
        changed(workspace, "pause")
        changed(workspace, "seek", "--earliest", "--yes")

        assert position_of(workspace).paused


class TestDeleting:
    def test_a_deleted_group_begins_anew(self, workspace: Path) -> None:
        """Its place is gone, its events are not, and a group of that name starts from the beginning."""
        done = changed(workspace, "delete", "--yes")

        assert (done["carried_out"], done["committed"]) == (True, 9)
        assert [each["group"] for each in listed(workspace)] == ["late"]
        assert [kind for kind, _ in audited(workspace)] == ["cli.group.delete"]
        assert delivered(workspace, 25) == list(range(25))

    def test_a_dry_run_deletes_nothing(self, workspace: Path) -> None:
        """The group is still there, and no record was written."""
        assert changed(workspace, "delete", "--dry-run")["carried_out"] is False
        assert len(listed(workspace)) == 2
        assert audited(workspace) == []


@pytest.mark.slow
class TestBesideAWriter:
    def test_looking_works_and_changing_is_refused(self, workspace: Path) -> None:
        """While another process writes, the list shows its events; every changing verb ends with 4 and names the writer."""
        with started("log", "append", "demo", "-", *NOTED, "--json", "-w", workspace) as writer:
            writer.write("{}")
            assert writer.json()["offset"] == 25

            words = ("group", "list", "--json", "-w", workspace)
            invoke_until(lambda shown: lines(shown)[1]["next_offset"] == 26, *words)
            for verb in (("seek", "--earliest", "--yes"), ("pause",), ("resume",), ("delete", "--yes")):
                busy = invoke("group", verb[0], "demo", "worker", *verb[1:], "-w", workspace)
                assert (busy.exit_code, busy.stdout) == (4, "")
                assert f"is being written by process {writer.process.pid}" in busy.stderr
            assert invoke("group", "seek", "demo", "worker", "--earliest", "--dry-run", "-w", workspace).exit_code == 0
        assert position_of(workspace).cursor.committed == 9

    def test_watching_shows_what_changes_and_ends_on_interrupt(self, workspace: Path) -> None:
        """A watched list comes again with new numbers, and Ctrl-C ends it with 0."""
        watch = ("group", "list", "--watch", "--interval", "0.1", "--json", "-w", workspace)
        with (
            started("log", "append", "demo", "-", *NOTED, "--json", "-w", workspace) as writer,
            started(*watch) as watching,
        ):
            assert [watching.json()["lag"] for _ in range(2)] == [0, 12]
            writer.write("{}")
            assert writer.json()["offset"] == 25
            while watching.json()["lag"] not in (1, 13):
                pass

            watching.process.send_signal(signal.SIGINT)
            assert watching.exit_code() == 0
            assert watching.errors() == ""
