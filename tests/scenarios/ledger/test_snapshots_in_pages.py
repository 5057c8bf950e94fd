"""Lists in pages: complete, in order, and pinned to a seq from which on changes can be followed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tidings.happenings.variants import CustodyReleased, CustodyTaken, SubjectForgotten
from tidings.ledger import ErrorClass, Ledger, LedgerError, ListPage
from tidings.ledger.paging import encode_cursor

from .support import PLAYBACK, settled

List = Callable[..., Awaitable[ListPage[Any]]]
LISTS = ["list_custodies", "list_subjects", "list_relations", "list_addressings"]


async def fill(ledger: Ledger, count: int) -> None:
    """As many subjects, addressings, relations and custodies."""
    plugin = ledger.plugin("org.example.one")
    for number in range(count):
        await plugin.announce_subject("track", [("n", f"{number:03}")])
        await plugin.claim_relation(("n", "000"), "like", ("n", f"{number:03}"))
        await plugin.take_custody(PLAYBACK, "playback", handle_id=f"h{number:03}")


def key_of(item: Any) -> tuple[str, ...]:
    for names in (("plugin", "handle_id"), ("source_id", "predicate", "target_id"), ("canonical_id",)):
        if all(hasattr(item, name) for name in names):
            return tuple(getattr(item, name) for name in names)
    return tuple(item[:2])


async def all_pages(listing: List, page_size: int) -> list[ListPage[Any]]:
    pages = [await listing(page_size=page_size)]
    while pages[-1].next_cursor is not None:
        pages.append(await listing(pages[-1].next_cursor, page_size))
    return pages


@pytest.mark.req("H72")
@pytest.mark.parametrize("name", LISTS)
async def test_every_item_is_on_one_page(ledger: Ledger, name: str) -> None:
    """
    The pages of a list together have every item once, in the order of its keys, and each page names the seq that it is of.
    """
    await fill(ledger, 25)
    listing: List = getattr(ledger.projections, name)

    pages = await all_pages(listing, 10)
    [whole] = await all_pages(listing, 1000)

    assert [len(page.items) for page in pages] == [10, 10, 5]
    assert [len(page.items) for page in await all_pages(listing, 5)] == [5] * 5
    keys = [key_of(item) for page in pages for item in page.items]
    assert keys == sorted(set(keys)) == [key_of(item) for item in whole.items]
    assert {page.current_seq for page in [*pages, whole]} == {ledger.happenings.last_seq}


@pytest.mark.req("H72")
async def test_a_list_and_what_follows_its_seq_make_the_present(ledger: Ledger) -> None:
    """
    Pages that are read while others change the ledger, brought up to date by the happenings after the first page's seq, are what the
    ledger holds in the end: nothing that changed between two pages is missed.
    """
    await fill(ledger, 30)
    plugin = ledger.plugin("org.example.one")
    custodies: dict[str, bool] = {}
    page = await ledger.projections.list_custodies(page_size=7)
    since = page.current_seq
    step = 0
    while True:
        custodies.update((record.handle_id, True) for record in page.items)
        await plugin.release_custody(f"h{step:03}")
        await plugin.release_custody(f"h{29 - step:03}")
        await plugin.take_custody(PLAYBACK, "playback", handle_id=f"h{step:03}x")
        step += 1
        if page.next_cursor is None:
            break
        page = await ledger.projections.list_custodies(page.next_cursor, 7)
    subscription = ledger.happenings.subscribe(since=since)
    for _ in range(3 * step):
        match (await subscription.recv()).happening:
            case CustodyTaken(handle_id=handle_id):
                custodies[handle_id] = True
            case CustodyReleased(handle_id=handle_id):
                custodies[handle_id] = False

    now = await ledger.projections.list_custodies(page_size=1000)
    assert {handle_id for handle_id, is_held in custodies.items() if is_held} == {each.handle_id for each in now.items}


@pytest.mark.req("H72")
async def test_removals_between_pages_neither_repeat_nor_skip(ledger: Ledger) -> None:
    """
    A subject that is forgotten while a list is paged through makes no other appear twice or not at all.
    """
    await fill(ledger, 25)
    plugin = ledger.plugin("org.example.one")
    subscription = ledger.happenings.subscribe()

    first = await ledger.projections.list_subjects(page_size=10)
    await plugin.retract_addressing(first.items[0].addressings[0].addressing)
    rest = [await ledger.projections.list_subjects(first.next_cursor, 10)]
    rest.append(await ledger.projections.list_subjects(rest[-1].next_cursor, 10))

    ids = [item.canonical_id for page in (first, *rest) for item in page.items]
    assert len(ids) == len(set(ids)) == 25
    assert rest[-1].next_cursor is None
    assert rest[0].current_seq > first.current_seq
    [forgotten, *_] = [each.happening for each in await settled(ledger, subscription)]
    assert isinstance(forgotten, SubjectForgotten)
    assert forgotten.canonical_id == ids[0]


async def test_suppressed_relations_are_listed_as_such(ledger: Ledger) -> None:
    """
    A list of relations has the hidden ones too, and says that they are.
    """
    await fill(ledger, 2)
    await ledger.admin("org.example.admin").suppress_relation(("n", "000"), "like", ("n", "001"))

    page = await ledger.projections.list_relations()

    assert sorted(record.is_suppressed for record in page.items) == [False, True]


@pytest.mark.req("H72")
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("cursor", ["no cursor", encode_cursor("a", "b", "c", "d")])
async def test_a_wrong_cursor_is_refused(ledger: Ledger, name: str, cursor: str) -> None:
    """
    A cursor that the list did not make is refused as such.
    """
    with pytest.raises(LedgerError) as caught:
        await getattr(ledger.projections, name)(cursor)

    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.CONTRACT_VIOLATION, "invalid_page_cursor")


async def test_an_empty_ledger_has_one_empty_page(ledger: Ledger) -> None:
    """
    Where there is nothing, the first page is the last.
    """
    for name in LISTS:
        page = await getattr(ledger.projections, name)(page_size=0)
        assert (page.items, page.next_cursor) == ((), None)
