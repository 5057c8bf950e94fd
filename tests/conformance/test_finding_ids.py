"""An event id finds its record, wherever it is on its way from memory to the files."""

from __future__ import annotations

import pytest

from tests.conformance.support import append_all, event, numbered, read_seqs
from tidings.log import Log, Query


@pytest.mark.parametrize("limit", [1, 2, 1000])
@pytest.mark.parametrize("backwards", [False, True])
async def test_ids_find_their_records(log: Log, limit: int, backwards: bool) -> None:
    """Ids of producers and ids that the log made lead to their records, in order, and to no others."""
    made = await append_all(log, [*numbered("a", 3), event("b", event_id="own-1"), event("a", event_id="own-2")])
    wanted = (made[1].event_id, "own-1", "own-2", "nobody", "ev-" + "0" * 32)

    found = await read_seqs(log, Query(event_ids=wanted, backwards=backwards), limit=limit)

    assert found == ([5, 4, 2] if backwards else [2, 4, 5])


async def test_other_bounds_hold_too(log: Log) -> None:
    """An id that lies outside the query's topic, range or partitions is not found."""
    await append_all(
        log, [event("a", event_id="x", partitions=["p"]), event("b", event_id="y"), event("a", event_id="z")]
    )
    ids = ("x", "y", "z")

    assert await read_seqs(log, Query(event_ids=ids, topic="a")) == [1, 3]
    assert await read_seqs(log, Query(event_ids=ids, since=1, until=2)) == [2]
    assert await read_seqs(log, Query(event_ids=ids, partitions=("p",))) == [1]
    assert await read_seqs(log, Query(event_ids=(), topic="a")) == [1, 3]


async def test_old_ids_are_found_as_new_ones(log: Log) -> None:
    """Among thousands of records, an id at the beginning is found as one at the end."""
    await append_all(log, [event("a", {"n": n}, event_id=f"id-{n}") for n in range(5000)])

    assert await read_seqs(log, Query(event_ids=("id-4999", "id-0", "id-2500"))) == [1, 2501, 5000]
