"""Pages of keys come in order, whatever changes between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.ledger import paging
from tidings.ledger.errors import InvalidPageCursor, LedgerError
from tidings.ledger.paging import KeyOrder, clamp_page_size, decode_cursor, encode_cursor
from tidings.ledger.relations import Relations, Triple

KEYS = st.integers(0, 300).map(str)


Step = tuple[str, set[str] | str]
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.sets(KEYS, max_size=120)) | st.tuples(st.just("list"), KEYS)
)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "_RUN_KEYS", 16)


def change(store: dict[str, None], order: KeyOrder[str], do: str, keys: Iterable[str]) -> None:
    for key in keys:
        if do == "add":
            store[key] = None
        else:
            store.pop(key, None)
        order.changed(key)


@given(STEPS)
def test_listing_is_what_sorting_would_give(steps: list[Step]) -> None:
    """
    After any additions and removals, few or many at a time, the keys after a key are those that sorting all of them shows.
    """
    store: dict[str, None] = {}
    order = KeyOrder(store)
    for do, argument in steps:
        if do == "list":
            last = str(argument)
            assert order.after(last, 50) == [key for key in sorted(store) if key > last][:50]
        else:
            change(store, order, do, argument)

    assert order.after(None, 1000) == sorted(store)


async def test_others_go_on_while_keys_are_sorted() -> None:
    """
    Sorting lets others run every few keys; what they add and remove meanwhile is in the order too. Who asks meanwhile waits.
    """
    store = dict.fromkeys(map(str, range(500)))
    order = KeyOrder(store)
    preparing = [asyncio.create_task(order.prepare()) for _ in range(2)]
    turns = 0
    while not all(task.done() for task in preparing):
        await asyncio.sleep(0)
        change(store, order, "add", [f"new {turns}"])
        change(store, order, "remove", [str(turns * 7)])
        turns += 1

    assert turns > 25
    assert order.after(None, 10_000) == sorted(store)


async def test_relations_come_and_go_while_they_are_sorted() -> None:
    """
    Relations that are claimed and retracted while their order is being made, whole sources and predicates among them, are in it or not as they
    should be.
    """
    relations = Relations()
    there = {Triple(f"s{number % 20}", f"p{number % 3}", f"t{number}") for number in range(500)}
    for triple in sorted(there):
        relations.claim(triple, "org.example", 1)
    preparing = asyncio.create_task(relations.triples.prepare())
    turns = 0
    while not preparing.done():
        await asyncio.sleep(0)
        for triple in [
            each for each in there if each.source_id == f"s{turns}" or (turns == 8 and each.predicate == "p2")
        ]:
            relations.retract(triple, "org.example", 2)
            there.remove(triple)
        new = Triple(f"s{turns}", f"new{turns}", "t")
        relations.claim(new, "org.example", 2)
        there.add(new)
        turns += 1

    assert turns > 8
    assert relations.triples.after(None, 10_000) == sorted(there)


async def test_who_cannot_wait_sorts_at_once() -> None:
    """
    A page that is asked for while the keys are being sorted is right, and so is every later one, whatever changed in between.
    """
    store = dict.fromkeys(map(str, range(500)))
    order = KeyOrder(store)
    preparing = asyncio.create_task(order.prepare())
    await asyncio.sleep(0)

    assert order.after(None, 1000) == sorted(store)
    change(store, order, "remove", map(str, range(400)))
    change(store, order, "add", map(str, range(600, 1200)))
    await preparing

    assert order.after(None, 10_000) == sorted(store)


def test_keys_that_nobody_lists_are_not_gathered() -> None:
    """
    When more keys have come and gone than there are, their order is given up until somebody asks again.
    """
    store: dict[str, None] = {"stays": None}
    order = KeyOrder(store)
    order.after(None, 1)

    change(store, order, "remove", (f"passing {number}" for number in range(1000)))

    assert (order._runs, order._fresh) == (None, [])
    assert order.after(None, 10) == ["stays"]


@pytest.mark.parametrize(("asked", "given_"), [(None, 100), (0, 1), (-5, 1), (7, 7), (1000, 1000), (5000, 1000)])
def test_page_sizes_have_limits(asked: int | None, given_: int) -> None:
    """
    A page has 100 items unless another size is asked for, at least 1 and at most 1,000.
    """
    assert clamp_page_size(asked) == given_


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=3))
def test_a_cursor_is_read_back_as_the_key(key: list[str]) -> None:
    """
    A cursor stands for the key it was made of.
    """
    assert decode_cursor(encode_cursor(*key), len(key)) == tuple(key)


@pytest.mark.parametrize("cursor", ["%%%", "YQ", "/w==", encode_cursor("a", "b"), encode_cursor("a"), "Ä"])
def test_a_cursor_of_another_list_is_refused(cursor: str) -> None:
    """
    What is no base64, no text, or has another number of parts is refused as an invalid cursor.
    """
    with pytest.raises(InvalidPageCursor) as caught:
        decode_cursor(cursor, 3)

    assert (caught.value.error_class, caught.value.subclass) == ("contract_violation", "invalid_page_cursor")
    assert isinstance(caught.value, LedgerError)


@pytest.mark.parametrize("is_prepared", [True, False])
async def test_a_page_looks_into_few_runs(is_prepared: bool) -> None:
    """Of 100,000 keys, sorted beforehand or at the first page and changed by 20,000 meanwhile, the runs are merged in levels; a walk has each once."""
    store = dict.fromkeys(f"k{number:07}" for number in range(100_000))
    order = KeyOrder(store)
    if is_prepared:
        await order.prepare()
    order.after(None, 1)
    for number in range(100_000, 120_000):
        store[f"k{number:07}"] = None
        order.changed(f"k{number:07}")
    assert order._runs is not None
    assert len(order._runs) <= 120_000 // paging._MERGED_KEYS_MAX + 10
    walked: list[str] = []
    while page := order.after(walked[-1] if walked else None, 10_000):
        walked += page
    assert walked == sorted(store)
