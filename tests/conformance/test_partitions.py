"""A partition finds every record that names it, in order, each once."""

from __future__ import annotations

import itertools
import unicodedata

import pytest

from tests.conformance.support import append_all, event, read_seqs
from tidings.log import Log, Query

# What the records name, by seq from 1. Topics alternate between a and b.
NAMED: list[list[str]] = [["p"], ["q"], [], ["p", "q"], ["r"], ["q", "r"], [], ["p"]]


@pytest.fixture
async def partitioned(log: Log) -> Log:
    """A log of eight records in two topics, six of which name partitions."""
    await append_all(log, [event("ab"[n % 2], {"n": n}, partitions=names) for n, names in enumerate(NAMED)])
    return log


@pytest.mark.req("S28")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_a_record_comes_once_if_it_names_one_of_them(partitioned: Log, limit: int, backwards: bool) -> None:
    """Several partitions are joined by or, each record comes once, and all other bounds hold."""
    wishes = ["p", "q", "r", "pq", "pr", "pqr", "x", "xp"]
    bounds = [(None, None), (0, None), (1, 6), (4, 8), (8, None)]
    for topic, wanted, (since, until) in itertools.product([None, "a", "b"], wishes, bounds):
        expected = [
            seq
            for seq, names in enumerate(NAMED, start=1)
            if set(names) & set(wanted)
            and topic in (None, "ba"[seq % 2])
            and (since is None or seq > since)
            and (until is None or seq <= until)
        ]
        query = Query(topic=topic, partitions=tuple(wanted), since=since, until=until, backwards=backwards)

        assert await read_seqs(partitioned, query, limit=limit) == (expected[::-1] if backwards else expected), query


async def test_offsets_bound_partitions_too(partitioned: Log) -> None:
    """A partition can be read within a range of a topic's offsets."""
    query = Query(topic="b", partitions=("q",), from_offset=1, to_offset=3)

    assert await read_seqs(partitioned, query) == [4, 6]


@pytest.mark.req("S28")
async def test_two_forms_of_one_name_are_one_partition(log: Log) -> None:
    """A name stored in one Unicode form is found by any other form of it."""
    composed, decomposed = (unicodedata.normalize(form, "projekt:Größe-Å") for form in ("NFC", "NFD"))
    assert composed != decomposed
    await append_all(
        log, [event(partitions=[composed]), event(partitions=[decomposed]), event(partitions=[composed, decomposed])]
    )

    assert await read_seqs(log, Query(partitions=(composed,))) == [1, 2, 3]
    assert await read_seqs(log, Query(partitions=(decomposed,))) == [1, 2, 3]
    assert await read_seqs(log, Query(partitions=(composed, decomposed))) == [1, 2, 3]


async def test_names_that_only_look_alike_are_apart(log: Log) -> None:
    """Case, width and a common beginning do not make one partition of two."""
    names = ["p", "P", "p2", "p:", "ｐ"]  # noqa: RUF001 - meant
    await append_all(log, [event(partitions=[name]) for name in names])

    for seq, name in enumerate(names, start=1):
        assert await read_seqs(log, Query(partitions=(name,))) == [seq]


@pytest.mark.parametrize("backwards", [False, True])
async def test_a_rare_partition_is_found_among_many_records(log: Log, backwards: bool) -> None:
    """A reader of a partition that few records name finds all of them, however many lie between."""
    await append_all(
        log, [event("a", {"n": n}, partitions=["rare"] if n % 250 == 99 else ["common"]) for n in range(1000)]
    )

    found = await read_seqs(log, Query(partitions=("rare",), backwards=backwards), limit=3)

    assert sorted(found, reverse=backwards) == found
    assert sorted(found) == [100, 350, 600, 850]


async def test_a_partition_s_reader_goes_on_at_the_end(partitioned: Log) -> None:
    """From the last page on, a reader of a partition finds what is appended to it, and nothing twice."""
    page = await partitioned.read(Query(partitions=("p",)))
    while not page.at_end:
        page = await partitioned.read(page.next)
    await append_all(partitioned, [event(partitions=["q"]), event(partitions=["p"]), event(), event(partitions=["p"])])

    assert await read_seqs(partitioned, page.next) == [10, 12]


async def test_segments_tell_which_partitions_they_name(partitioned: Log) -> None:
    """Each topic's segments list the partitions in them with the highest seq that names each."""
    topics = partitioned.topics()

    assert topics["a"].segments[0].partitions == {"p": 1, "r": 5}
    assert topics["b"].segments[0].partitions == {"q": 6, "p": 8, "r": 6}
