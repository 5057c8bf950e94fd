"""What of the ledger's state only grows, and by how much: the figures of the topic page."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.ledger import subjects as subjects_module
from tidings.ledger.admin_ledger import AdminEntry, AdminLedger
from tidings.ledger.conflicts import ClaimEntry, ClaimLog, ConflictEnd, Conflicts, Equivalent
from tidings.ledger.name_table import NameTable
from tidings.ledger.relations import Relations, Triple
from tidings.ledger.state import Part
from tidings.ledger.subjects import Addressing, AliasKind, AliasRecord, SubjectRecord, Subjects

COUNT = 1_000
AT_MS = 1_790_000_000_000


def subject_id(number: int) -> str:
    return f"6f1d2b3c-8a40-4b7e-9c55-{number:012d}"


def names(number: int) -> tuple[Addressing, Addressing]:
    return Addressing("mpd-path", f"/music/{number}.flac"), Addressing("spotify", f"track:{number}")


def an_admin_entry(ledger: AdminLedger, number: int) -> None:
    ledger.record(
        AdminEntry(
            kind="subject_merge",
            admin_plugin="org.example.curator",
            at_ms=AT_MS + number,
            target_subject=subject_id(number),
            additional_subjects=(subject_id(number + COUNT), subject_id(number + 2 * COUNT)),
            reason=f"the same recording {number}",
        )
    )


def a_claim(log: ClaimLog, number: int) -> None:
    one, other = names(number)
    assert log.append(ClaimEntry("org.example.player", AT_MS + number, Equivalent(a=one, b=other)))
    assert not log.append(ClaimEntry("org.example.player", AT_MS + number + 1, Equivalent(a=one, b=other)))


def an_ended_conflict(conflicts: Conflicts, number: int) -> None:
    ids = (subject_id(number), subject_id(number + COUNT))
    conflicts.open("org.example.player", names(number), ids, AT_MS)
    conflicts.settle(ids[:1], lambda _: False, ConflictEnd.MERGED, AT_MS)


def an_alias(subjects: Subjects, number: int) -> None:
    old_id = subject_id(number)
    subjects.put(SubjectRecord(old_id, "track", (), AT_MS, AT_MS))
    subjects.retire(
        AliasRecord(
            old_id=old_id,
            new_ids=(subject_id(number + COUNT),),
            kind=AliasKind.MERGED,
            recorded_at_ms=AT_MS,
            admin_plugin="org.example.curator",
        )
    )


@pytest.mark.parametrize(
    ("make", "grow", "memory_bytes", "snapshot_bytes"),
    [
        (AdminLedger, an_admin_entry, 520, 250),
        (ClaimLog, a_claim, 450, 130),
        (Conflicts, an_ended_conflict, 650, 250),
        (Subjects, an_alias, 280, 160),
    ],
)
def test_an_entry_takes_no_more_than_the_page_says(
    make: Callable[[], Part], grow: Callable[[Any, int], None], memory_bytes: int, snapshot_bytes: int
) -> None:
    """In memory and in a snapshot, for names of ordinary length; a tenth more is allowed."""
    part = make()
    tracemalloc.start()
    for number in range(COUNT):
        grow(part, number)
    memory = tracemalloc.get_traced_memory()[0] / COUNT
    tracemalloc.stop()
    stored = len(msgspec.msgpack.encode(part.freeze())) / COUNT
    assert memory < 1.1 * memory_bytes
    assert stored < 1.1 * snapshot_bytes


def sizes(subjects: Subjects, relations: Relations) -> int:
    """What a snapshot of both takes."""
    return sum(len(msgspec.msgpack.encode(part.freeze())) for part in (subjects, relations))


@pytest.mark.bound("ledger.subjects.TOMBSTONES_COUNT_MAX")
@pytest.mark.parametrize("beyond", [100, 101, 1_000])
def test_what_is_gone_takes_no_room(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visitors that come into a room and are forgotten: the graph keeps none of their ids, the subjects the last tombstones, also when restored."""
    monkeypatch.setattr(subjects_module, "TOMBSTONES_COUNT_MAX", 100)
    subjects, relations = Subjects(), Relations()
    subjects.put(SubjectRecord("room", "room", (), AT_MS, AT_MS))
    for number in range(beyond):
        visitor = subject_id(number)
        subjects.put(SubjectRecord(visitor, "visitor", (), AT_MS, AT_MS))
        relations.claim(Triple(visitor, "in", "room"), "p", AT_MS)
        if number % 7 == 0:
            relations.claim(Triple("room", "near", "room"), "p", AT_MS)
        relations.forget_touching(visitor)
        subjects.retire(
            AliasRecord(old_id=visitor, new_ids=(), kind=AliasKind.TOMBSTONE, recorded_at_ms=AT_MS, admin_plugin="p")
        )
    again = Subjects(), Relations()
    pairs: tuple[tuple[Any, Any], ...] = ((subjects, again[0]), (relations, again[1]))
    for part, restored in pairs:
        restored.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(part.freeze()), type=part.frozen_type))

    for kept_subjects, kept_relations in ((subjects, relations), again):
        assert len(kept_subjects.freeze().aliases) == min(beyond, 100)
        assert kept_subjects.describe(subject_id(beyond - 1)).kind == "aliased"
        assert kept_subjects.describe(subject_id(0)).kind == ("aliased" if beyond <= 100 else "not_found")
        assert set(kept_relations.freeze().names) - {""} == {"room", "near"}
        assert len(kept_relations.freeze().names) <= 4
    assert sizes(subjects, relations) == sizes(*again)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=80), st.integers(0, 80))
def test_a_restored_table_of_names_goes_on_like_the_one_before(steps: list[tuple[bool, int]], cut: int) -> None:
    """Whenever it is frozen and restored, the numbers that names get are the same, none is given twice, and no unused name stays."""
    table, uses = NameTable(), Counter[str]()
    numbers: dict[str, int] = {}
    for place, (is_use, index) in enumerate(steps):
        if place == cut:
            frozen = table.freeze()
            table = NameTable()
            table.restore(frozen, [numbers[name] for name in uses.elements()])
            assert table.freeze() == frozen
        name = f"n{index}"
        if is_use:
            numbers[name] = table.use(name)
            uses[name] += 1
        elif uses[name]:
            table.release(numbers[name])
            uses[name] -= 1
        used = +uses
        assert {number: each for number, each in enumerate(table.freeze()) if each} == {numbers[n]: n for n in used}
        assert len(table) == len(used)
