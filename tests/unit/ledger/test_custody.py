"""The custody ledger: what each command does to a record."""

from __future__ import annotations

import pytest

from tidings.happenings.variants import HealthStatus
from tidings.ledger.commands import PAYLOAD_BYTES_MAX, Command
from tidings.ledger.custody import (
    AbandonCustody,
    Custodies,
    CustodyActive,
    CustodyIsAborted,
    CustodyIsDegraded,
    CustodyRecord,
    CustodyReport,
    FailCustody,
    RecordCustody,
    ReleaseCustody,
    ReportCustodyState,
)
from tidings.ledger.errors import DuplicateCustody, InvalidCommand, UnknownCustody
from tidings.ledger.state import FIRST_RULES, LedgerState

from .support import run, thawed, told

P, H = "org.example.player", "h-1"
TAKE = RecordCustody(plugin=P, handle_id=H, shelf="audio.playback", custody_type="playback")
REPORT = ReportCustodyState(plugin=P, handle_id=H, health=HealthStatus.HEALTHY, payload=b"\x00one")
RELEASE = ReleaseCustody(plugin=P, handle_id=H)


@pytest.fixture
def state() -> LedgerState:
    return LedgerState(Custodies())


def record(state: LedgerState) -> CustodyRecord | None:
    return state.part(Custodies).get(P, H)


def test_taking_makes_a_record(state: LedgerState) -> None:
    """
    A custody that was taken has shelf, type and its beginning, is active, and has no report yet.
    """
    run(state, TAKE, at_ms=5)

    assert record(state) == CustodyRecord(P, H, "audio.playback", "playback", None, CustodyActive(), 5, 5)


def test_a_handle_in_use_is_not_taken_again(state: LedgerState) -> None:
    """
    Taken once more, a custody is refused and stays as it was; records of the first rules are executed as they were.
    """
    run(state, TAKE, at_ms=5)
    run(state, REPORT, at_ms=6)
    run(state, FailCustody(plugin=P, handle_id=H, mode="degraded", reason="slow"), at_ms=7)
    again = RecordCustody(plugin=P, handle_id=H, shelf="audio.other", custody_type="alarm")
    before = record(state)
    with pytest.raises(DuplicateCustody):
        run(state, again, at_ms=8)
    assert record(state) == before
    state.rules = FIRST_RULES
    run(state, again, at_ms=8)

    report = CustodyReport(b"\x00one", HealthStatus.HEALTHY, 6)
    assert record(state) == CustodyRecord(P, H, "audio.other", "alarm", report, CustodyIsDegraded("slow"), 5, 8)


@pytest.mark.parametrize("commands", [(TAKE, REPORT), (REPORT, TAKE)])
def test_report_and_taking_meet_in_one_record(state: LedgerState, commands: tuple[Command, Command]) -> None:
    """
    Whether the report or the taking comes first, the record has shelf, type and report in the end.
    """
    for at_ms, command in enumerate(commands, start=5):
        run(state, command, at_ms)

    report = CustodyReport(b"\x00one", HealthStatus.HEALTHY, 5 + commands.index(REPORT))
    assert record(state) == CustodyRecord(P, H, "audio.playback", "playback", report, CustodyActive(), 5, 6)


def test_a_report_replaces_the_one_before(state: LedgerState) -> None:
    """
    Only the last report is kept; the time of the last change does not go back with the clock.
    """
    run(state, REPORT, at_ms=9)
    run(state, ReportCustodyState(plugin=P, handle_id=H, health=HealthStatus.UNHEALTHY, payload=b"two"), at_ms=4)

    report = CustodyReport(b"two", HealthStatus.UNHEALTHY, 4)
    assert record(state) == CustodyRecord(P, H, None, None, report, CustodyActive(), 9, 9)


def test_releasing_drops_the_record_and_returns_it(state: LedgerState) -> None:
    """
    The answer to a release is the record as it was last.
    """
    run(state, TAKE)
    last = record(state)

    assert run(state, RELEASE).result == last
    assert record(state) is None


@pytest.mark.parametrize(
    "command", [RELEASE, FailCustody(plugin=P, handle_id=H, mode="aborted", reason="gone")], ids=["release", "fail"]
)
def test_an_unknown_handle_is_named(state: LedgerState, command: Command) -> None:
    """
    What nobody has custody of cannot be released nor fail; the same handle of another plugin is another custody.
    """
    other = RecordCustody(plugin="org.example.other", handle_id=H, shelf="a.b", custody_type="c")
    run(state, other)

    with pytest.raises(UnknownCustody, match=r"org\.example\.player.*h-1") as caught:
        run(state, command)

    assert (caught.value.error_class, caught.value.subclass) == ("not_found", "unknown_custody")
    assert [each.plugin for each in state.part(Custodies)] == ["org.example.other"]


def test_a_failed_custody_keeps_its_record_with_the_last_reason(state: LedgerState) -> None:
    """
    A custody that failed stays on record; failing again overwrites mode and reason.
    """
    run(state, TAKE, at_ms=1)
    degraded = told(run(state, FailCustody(plugin=P, handle_id=H, mode="degraded", reason="one")))
    aborted = told(run(state, FailCustody(plugin=P, handle_id=H, mode="aborted", reason="two"), at_ms=3))

    names = {"plugin": P, "handle_id": H, "shelf": "audio.playback"}
    assert degraded == [{"type": "custody_degraded", **names, "reason": "one"}]
    assert aborted == [{"type": "custody_aborted", **names, "reason": "two"}]
    now = record(state)
    assert now is not None
    assert (now.state, now.last_updated_ms) == (CustodyIsAborted("two"), 1000)


def test_only_what_was_never_taken_is_abandoned(state: LedgerState) -> None:
    """
    Abandoning drops a record that has only reports and leaves a custody that was taken; both silently.
    """
    run(state, REPORT)
    abandon = AbandonCustody(plugin=P, handle_id=H)
    assert (run(state, abandon).happenings, record(state)) == ((), None)
    assert not run(state, abandon).is_changed

    run(state, TAKE)
    assert not run(state, abandon).is_changed
    assert record(state) is not None


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (RecordCustody(plugin="", handle_id=H, shelf="a.b", custody_type="c"), "plugin"),
        (RecordCustody(plugin=P, handle_id="a\0b", shelf="a.b", custody_type="c"), "handle_id"),
        (RecordCustody(plugin=P, handle_id=H, shelf="", custody_type="c"), "shelf"),
        (RecordCustody(plugin=P, handle_id=H, shelf="a.b", custody_type="x" * 5000), "custody_type"),
        (ReportCustodyState(plugin=P, handle_id="", health=HealthStatus.HEALTHY), "handle_id"),
        (
            ReportCustodyState(
                plugin=P, handle_id=H, health=HealthStatus.HEALTHY, payload=bytes(PAYLOAD_BYTES_MAX + 1)
            ),
            "payload",
        ),
    ],
)
def test_wrong_values_are_refused(state: LedgerState, command: Command, field: str) -> None:
    """
    An empty name, one with a control character, one too long and a report too large are refused by name, and nothing is stored.
    """
    with pytest.raises(InvalidCommand) as caught:
        run(state, command)

    assert caught.value.field == field
    assert len(state.part(Custodies)) == 0


def test_custodies_come_back_from_a_snapshot(state: LedgerState) -> None:
    """
    Every record, in every state and with its bytes, is in a snapshot.
    """
    run(state, TAKE)
    run(state, REPORT)
    run(state, FailCustody(plugin=P, handle_id=H, mode="aborted", reason="over"))
    run(state, ReportCustodyState(plugin="a", handle_id="b", health=HealthStatus.DEGRADED, payload=bytes(range(256))))

    again = thawed(state.part(Custodies))

    assert list(again) == list(state.part(Custodies))
    assert [each.plugin for each in again] == ["a", P]
