"""The local store's transactions: whole or not at all, and each draft in one place."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.client.support import body, committed, item
from tidings.client import ClientStore, Committed, Pending, Rejected
from tidings.client import database as database_module
from tidings.client.database import Database, StoredDraft, open_connection
from tidings.client.errors import DraftQueueFull, InvalidDraft, StoreUnusable
from tidings.sync.client_effects import ItemCommitted, ItemRejected
from tidings.wire.sync_frames import SubmitItem

ROOM = {"count_max": 100, "bytes_max": 1 << 20}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(str(tmp_path / "ana.db"), "ana")
    yield made
    made.close()


def test_every_commit_reaches_the_disk(tmp_path: Path) -> None:
    """The store uses a write-ahead log and syncs it at every commit."""
    connection = open_connection(str(tmp_path / "ana.db"))

    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    connection.close()


@pytest.mark.req("S18")
def test_a_page_and_its_cursor_are_stored_together(tmp_path: Path) -> None:
    """Killed before any statement, a store has both the events and the cursor of a page, or neither."""
    path = tmp_path / "ana.db"
    copies: list[Path] = []

    def copy_files(statement: str) -> None:
        copies.append(tmp_path / f"copy-{len(copies)}.db")
        shutil.copyfile(path, copies[-1])
        shutil.copyfile(f"{path}-wal", f"{copies[-1]}-wal")

    database = Database(str(path), "ana")
    database._connection.set_trace_callback(copy_files)
    database.store_events([committed(1), committed(2)], {"P1": 2})
    database.store_events([committed(3)], {"P1": 3})
    database.opened(["P1"])
    database.close()

    seen = set()
    for each in copies:
        copied = Database(str(each), "ana")
        ids = [event.committed_id for event in copied.events()]
        seen.add((tuple(ids), copied.opened(["P1"]).cursors["P1"]))
        copied.close()
    assert seen == {((), 0), ((1, 2), 2), ((1, 2, 3), 3)}


@pytest.mark.req("S19", "S20")
def test_storing_an_event_again_changes_nothing(database: Database) -> None:
    """The second time nothing is new, within one call and across calls."""
    first = database.store_events([committed(1), committed(1), committed(2)])
    second = database.store_events([committed(2), committed(1)])

    assert [event.committed_id for event in first.events] == [1, 2]
    assert second.events == []
    assert [event.committed_id for event in database.events()] == [1, 2]


def test_a_draft_is_in_one_place(database: Database) -> None:
    """Waiting, then committed or in quarantine: never two of them, and the verdict says which."""
    database.add_drafts([item("a"), item("b"), item("c")], **ROOM)
    database.settle([ItemCommitted("a", 1, 5, False), ItemRejected("b", "forbidden", ())], 9)

    assert [draft.item.id for draft in database.drafts()] == ["c"]
    assert [kept.event.id for kept in database.quarantine()] == ["b"]
    assert [event.id for event in database.events()] == ["a"]
    assert database.verdict("a") == Committed(1)
    assert database.verdict("b") == Rejected("forbidden")
    assert database.verdict("c") == Pending()
    assert database.verdict("d") is None


def test_a_verdict_that_comes_twice_counts_once(database: Database) -> None:
    """A draft that is settled stays settled as it is."""
    database.add_drafts([item("a")], **ROOM)
    database.settle([ItemCommitted("a", 1, 5, False)], 9)

    again = database.settle([ItemRejected("a", "forbidden", ())], 9)

    assert again.verdicts == {}
    assert database.verdict("a") == Committed(1)


def test_a_draft_that_comes_back_as_an_event_is_settled(database: Database) -> None:
    """Same id and same content, however the JSON is written: the draft's answer was lost, and here is the event."""
    database.add_drafts([SubmitItem(id="e1", partitions=["P1"], event=body("noted", {"n": 1.0, "m": 2}))], **ROOM)
    returned = committed(1)
    event = type(returned)(
        **{name: getattr(returned, name) for name in returned.__struct_fields__ if name != "event"},
        event=body("noted", {"m": 2, "n": 1}),
    )

    applied = database.store_events([event])

    assert applied.verdicts == {"e1": Committed(1, was_duplicate=True)}
    assert database.drafts() == []


def test_another_event_with_a_drafts_id_does_not_settle_it(database: Database) -> None:
    """The draft keeps waiting: what the server says to it is the server's to say."""
    database.add_drafts([SubmitItem(id="e1", partitions=["P1"], event=body("noted", {"n": 99}))], **ROOM)

    applied = database.store_events([committed(1)])

    assert applied.verdicts == {}
    assert database.verdict("e1") == Pending()


@pytest.mark.parametrize(
    "raw", [b"17", b"[]", b'{"type":1}', b"[" * 5000 + b"]" * 5000], ids=["int", "list", "type", "deep"]
)
def test_an_event_of_an_unknown_shape_is_kept_as_text(database: Database, raw: bytes) -> None:
    """What a server commits is stored and shown, also if this client cannot make sense of it."""
    odd = msgspec.structs.replace(committed(1), event=msgspec.Raw(raw))

    database.store_events([odd])

    (event,) = database.events()
    assert (event.type, event.payload) == ("unknown", {"text": raw.decode()})


def test_two_events_at_one_place_are_a_contradiction(database: Database) -> None:
    """Another event at a known committed id is not stored, nor anything with it."""
    database.store_events([committed(1)])

    applied = database.store_events([committed(2), committed(1, id="other")], {"P1": 2})

    assert applied.is_conflicting
    assert [event.id for event in database.events()] == ["e1"]
    assert database.opened(["P1"]).cursors == {"P1": 0}


def test_drafts_are_taken_all_or_none(database: Database) -> None:
    """Without room for all, none is kept; an id that stands for something else refuses them all too."""
    with pytest.raises(DraftQueueFull):
        database.add_drafts([item("a"), item("b")], count_max=1, bytes_max=1 << 20)
    database.add_drafts([item("x", 1)], **ROOM)
    with pytest.raises(InvalidDraft):
        database.add_drafts([item("c"), item("x", 2)], **ROOM)

    assert [draft.item.id for draft in database.drafts()] == ["x"]


def test_local_order_survives_quarantine(database: Database) -> None:
    """A released draft takes its old place before those that were made later."""
    database.add_drafts([item("a"), item("b")], **ROOM)
    database.settle([ItemRejected("a", "forbidden", ())], 0)

    released = database.release("a")

    assert isinstance(released, StoredDraft)
    assert [draft.item.id for draft in database.drafts()] == ["a", "b"]


def test_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    """A store of a later version is refused by its number."""
    path = str(tmp_path / "ana.db")
    Database(path, "ana").close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(StoreUnusable, match="format 99"):
        Database(path, "ana")


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """Tables that are not ours are not touched."""
    path = str(tmp_path / "other.db")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()

    with pytest.raises(StoreUnusable, match="another program"):
        Database(path, "ana")


async def test_drafts_handed_in_together_share_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred submissions at once take a few transactions, not a hundred."""
    commits = 0

    def count(statement: str) -> None:
        nonlocal commits
        commits += statement == "COMMIT"

    def open_traced(path: str) -> sqlite3.Connection:
        connection = open_connection(path)
        connection.set_trace_callback(count)
        return connection

    monkeypatch.setattr(database_module, "open_connection", open_traced)
    store = ClientStore(tmp_path / "ana.db")
    await store.open("ana")
    commits = 0

    await asyncio.gather(*(store.add_drafts([item(f"d{n}")], count_max=1000, bytes_max=1 << 20) for n in range(100)))

    assert commits <= 3
    assert len(await store.call(Database.drafts)) == 100
    await store.close()


async def test_one_callers_fault_is_not_the_others(tmp_path: Path) -> None:
    """Among drafts handed in together, only the one that is at fault fails."""
    store = ClientStore(tmp_path / "ana.db")
    await store.open("ana")
    await store.add_drafts([item("x", 1)], count_max=10, bytes_max=1 << 20)

    answers = await asyncio.gather(
        *(store.add_drafts([each], count_max=10, bytes_max=1 << 20) for each in (item("a"), item("x", 2), item("b"))),
        return_exceptions=True,
    )

    assert [isinstance(answer, InvalidDraft) for answer in answers] == [False, True, False]
    assert [draft.item.id for draft in await store.call(Database.drafts)] == ["x", "a", "b"]
    await store.close()


async def test_a_cancelled_submission_is_kept_and_told(tmp_path: Path) -> None:
    """Whoever stops waiting does not take the draft back: it is stored, and the client hears of it."""
    store = ClientStore(tmp_path / "ana.db")
    told: list[str] = []
    store.drafts_stored = lambda drafts: told.extend(draft.item.id for draft in drafts)
    await store.open("ana")
    adding = asyncio.create_task(store.add_drafts([item("a")], count_max=10, bytes_max=1 << 20))
    await asyncio.sleep(0)
    adding.cancel()
    await asyncio.wait({adding})

    await store.close()

    assert told == ["a"]
    reopened = Database(store.path, "ana")
    assert [draft.item.id for draft in reopened.drafts()] == ["a"]
    reopened.close()


def test_the_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    """The file and its journal can be read by nobody else, whatever the umask; a store that others could read is closed to them."""
    path = tmp_path / "store.db"
    before = os.umask(0)
    try:
        database = Database(str(path), "me")
        modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
        database.close()
        path.chmod(0o644)
        Database(str(path), "me").close()
    finally:
        os.umask(before)

    assert {"store.db", "store.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}
    assert path.stat().st_mode & 0o777 == 0o600
