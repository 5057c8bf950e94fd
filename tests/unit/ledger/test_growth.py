"""What of the ledger's state only grows, and by how much: the figures of the topic page."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tidings.ledger.admin_ledger import AdminEntry, AdminLedger
from tidings.ledger.conflicts import ClaimEntry, ClaimLog, ConflictEnd, Conflicts, Equivalent
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
