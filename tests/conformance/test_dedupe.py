"""An event is stored once, however often it is sent; other content under the same id is refused."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.conformance.support import append_all, event, numbered, read_all
from tidings.core.events import Event
from tidings.log import Appended, Duplicate, Log, Query, Refused
from tidings.log.errors import IdConflict


async def conflict_of(log: Log, bad: Event) -> IdConflict:
    """The conflict that an event is refused with, both alone and in a batch; nothing is written."""
    before = log.position
    with pytest.raises(IdConflict) as caught:
        await log.append(bad)
    (verdict,) = await log.append_many([bad])
    match verdict:
        case Refused(IdConflict() as error):
            assert str(error) == str(caught.value)
        case _:
            pytest.fail(f"{verdict}")
    assert log.position == before
    return caught.value


@pytest.mark.req("F70")
async def test_an_event_sent_again_is_a_duplicate(log: Log) -> None:
    """The same id and content answer with the first commit's place, and nothing is written."""
    first = await log.append(event("a", {"n": 1}, event_id="e1"))
    await append_all(log, numbered("a", 3))

    again = await log.append(event("a", {"n": 1}, event_id="e1"))

    assert again == Duplicate(first.seq, first.offset, "e1")
    assert log.position.seq == 4


@pytest.mark.req("F70")
async def test_an_event_named_by_the_log_can_be_sent_again(log: Log) -> None:
    """The very object that was acknowledged is a duplicate when appended once more, first or last in the log."""
    events = numbered("a", 5)
    verdicts = await append_all(log, events)

    again = await log.append_many(events)

    assert again == [Duplicate(done.seq, done.offset, done.event_id) for done in verdicts]
    assert log.position.seq == 5


async def test_an_id_made_by_the_log_holds_when_rebuilt(log: Log) -> None:
    """Another object with an id that the log made, and the same content, is a duplicate too."""
    done = await log.append(event("a", {"n": 1}))

    again = await log.append(event("a", {"n": 1}, event_id=done.event_id))

    assert again == Duplicate(done.seq, done.offset, done.event_id)


async def test_a_log_made_id_is_not_taken_for_other_content(log: Log) -> None:
    """Other content under an id that the log made is refused like any other conflict."""
    done = await log.append(event("a", {"n": 1}))

    error = await conflict_of(log, event("a", {"n": 2}, event_id=done.event_id))

    assert (error.field, error.value, error.seq) == ("meta.event_id", done.event_id, done.seq)


async def test_ids_of_the_log_s_shape_are_not_confused(log: Log) -> None:
    """A random id of the shape that the log makes is just an id, whatever seq it seems to carry."""
    ids = [f"ev-{n:032x}" for n in range(50)]

    verdicts = await append_all(log, [event("a", {"n": n}, event_id=one) for n, one in enumerate(ids)])

    assert [verdict.event_id for verdict in verdicts] == ids


async def test_the_next_id_cannot_be_told_from_the_last(log: Log) -> None:
    """
    Whoever takes in its own space the id that the next event should get, going by the last id that the log made, does not
    hit it: no id is stored twice.
    """
    for n in range(5):
        seen = await log.append(event("a", {"n": n}, space_id="personal:mallory"))
        random_part = int(seen.event_id[3:19], 16)
        guess = f"ev-{random_part:016x}{random_part ^ (seen.seq + 2):016x}"
        await append_all(log, [event("a", space_id="personal:mallory", event_id=guess)])

        victim = await log.append(event("a", {"mine": n}, space_id="personal:alice"))

        assert (victim.seq, victim.event_id == guess) == (seen.seq + 2, False)
    stored = [record.meta.event_id for record in await read_all(log, Query())]
    assert len(set(stored)) == 15


@pytest.mark.parametrize(
    "other",
    [
        {"payload": {"n": 2}},
        {"payload": {"n": True}},
        {"payload": {"n": "1"}},
        {"payload": {"n": 1, "more": None}},
        {"payload": {}},
        {"topic": "b"},
        {"type": "OTHER"},
        {"space_id": "personal:alice"},
        {"partitions": ["p", "q"]},
        {"partitions": []},
    ],
    ids=str,
)
async def test_an_id_cannot_be_used_for_other_content(log: Log, other: dict[str, Any]) -> None:
    """Payload, topic, type, space and partitions make up an event: with any of them changed, its id is refused."""
    first = await log.append(event("a", {"n": 1}, event_id="e1", partitions=["p"]))
    changed = {"topic": "a", "payload": {"n": 1}, "partitions": ["p"]} | other

    error = await conflict_of(log, event(changed.pop("topic"), changed.pop("payload"), event_id="e1", **changed))

    assert (error.field, error.value, error.seq) == ("meta.event_id", "e1", first.seq)
    assert not error.retryable
    assert error.hint


async def test_an_honest_retry_may_have_been_rebuilt(log: Log) -> None:
    """Time, actor, trace and the order of keys and partitions do not make an event another one."""
    first = await log.append(event("a", {"x": 1, "y": [2.0]}, event_id="e1", partitions=["p", "q"]))

    again = await log.append(
        event(
            "a",
            {"y": [2], "x": 1},
            event_id="e1",
            partitions=["q", "p", "q"],
            ts=datetime(2020, 1, 1, tzinfo=UTC),
            actor="device:phone1",
            trace_id="t",
        )
    )

    assert again == Duplicate(first.seq, first.offset, "e1")


async def test_an_idempotency_key_makes_a_duplicate(log: Log) -> None:
    """Two events with the same key and content are one, although each has an id of its own."""
    first = await log.append(event("a", {"n": 1}, idem_key="k", event_id="e1"))

    again = await log.append(event("a", {"n": 1}, idem_key="k", event_id="e2"))
    unnamed = await log.append(event("a", {"n": 1}, idem_key="k"))

    assert again == unnamed == Duplicate(first.seq, first.offset, "e1")
    assert log.position.seq == 1


async def test_an_idempotency_key_cannot_be_used_for_other_content(log: Log) -> None:
    """Other content under a used key is refused, and the error names the key."""
    first = await log.append(event("a", {"n": 1}, idem_key="k"))

    error = await conflict_of(log, event("a", {"n": 2}, idem_key="k"))

    assert (error.field, error.value, error.seq) == ("meta.idem_key", "k", first.seq)


async def test_an_idempotency_key_belongs_to_a_topic_and_space(log: Log) -> None:
    """The same key in another topic or another space stands for another event."""
    verdicts = [
        await log.append(event(topic, {"n": 1}, idem_key="k", space_id=space))
        for topic, space in [("a", "s1"), ("b", "s1"), ("a", "s2"), ("a", "s1")]
    ]

    assert [type(verdict) for verdict in verdicts] == [Appended, Appended, Appended, Duplicate]
    assert verdicts[3].seq == verdicts[0].seq


async def test_keys_do_not_run_into_each_other(log: Log) -> None:
    """Where topic ends and key begins is not guessed from their joined text."""
    places = [("a", "b:c", "d"), ("a", "b", "c:d"), ("a:b", "c", "d"), ("a", "b|c", "d"), ("a", "b", "c|d")]

    await append_all(log, [event(topic, space_id=space, idem_key=key) for topic, space, key in places])

    assert log.position.seq == len(places)


async def test_the_event_id_is_looked_at_first(log: Log) -> None:
    """If id and key point at different records, the id decides, be it as duplicate or as conflict."""
    by_id = await log.append(event("a", {"n": 1}, event_id="e1"))
    await log.append(event("a", {"n": 2}, event_id="e2", idem_key="k"))

    duplicate = await log.append(event("a", {"n": 1}, event_id="e1", idem_key="k"))
    error = await conflict_of(log, event("a", {"n": 2}, event_id="e1", idem_key="k"))

    assert duplicate == Duplicate(by_id.seq, by_id.offset, "e1")
    assert (error.field, error.seq) == ("meta.event_id", by_id.seq)


async def test_a_duplicate_claims_no_further_key(log: Log) -> None:
    """A key that came only with a duplicate was not stored, so it is still free."""
    await log.append(event("a", {"n": 1}, event_id="e1"))
    await log.append(event("a", {"n": 1}, event_id="e1", idem_key="k"))

    free = await log.append(event("a", {"n": 2}, idem_key="k"))

    assert isinstance(free, Appended)


async def test_a_refused_event_claims_nothing(log: Log) -> None:
    """Id and key of an event that was refused are free for the corrected one."""
    await log.append_many([event("a", {"n": float("inf")}, event_id="e1", idem_key="k")])

    assert isinstance(await log.append(event("a", {"n": 1}, event_id="e1", idem_key="k")), Appended)


@pytest.mark.req("F70")
async def test_duplicates_within_one_batch(log: Log) -> None:
    """Within one call a later event is held against the earlier ones, by id, by key and by object."""
    same = event("a", {"n": 9})

    verdicts = await log.append_many(
        [
            event("a", {"n": 1}, event_id="e1"),
            event("a", {"n": 1}, event_id="e1"),
            event("a", {"n": 2}, event_id="e1"),
            event("a", {"n": 3}, idem_key="k"),
            event("a", {"n": 3}, idem_key="k"),
            event("a", {"n": 4}, idem_key="k"),
            same,
            same,
        ]
    )

    match verdicts:
        case [
            Appended(seq=1, offset=0),
            Duplicate(seq=1, offset=0, event_id="e1"),
            Refused(IdConflict(field="meta.event_id", seq=1)),
            Appended(seq=2, offset=1, event_id=keyed),
            Duplicate(seq=2, offset=1, event_id=known),
            Refused(IdConflict(field="meta.idem_key", seq=2)),
            Appended(seq=3, offset=2, event_id=made),
            Duplicate(seq=3, offset=2, event_id=remade),
        ]:
            assert (keyed, made) == (known, remade)
        case _:
            pytest.fail(f"{verdicts}")
    assert log.position.seq == 3


@pytest.mark.parametrize(
    ("first", "again", "is_same"),
    [
        ({"n": 1, "m": [2]}, {"m": [2.0], "n": 1.0}, True),
        ({"n": 1}, {"n": True}, False),
        ({"n": [0]}, {"n": [False]}, False),
        ({"n": "1.0"}, {"n": "1"}, False),
        ({"n": None}, {}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["event_id", "idem_key"])
@pytest.mark.parametrize("is_one_call", [False, True])
async def test_what_counts_as_the_same_content(
    log: Log, first: dict[str, Any], again: dict[str, Any], is_same: bool, field: str, is_one_call: bool
) -> None:
    """Contents are compared by what JSON says, alike within one call and against what is stored."""
    events = [event("a", first, **{field: "x"}), event("a", again, **{field: "x"})]

    if is_one_call:
        verdicts = await log.append_many(events)
    else:
        verdicts = [verdict for one in events for verdict in await log.append_many([one])]

    assert [type(verdict) for verdict in verdicts] == [Appended, Duplicate if is_same else Refused]


@pytest.mark.req("F70")
async def test_concurrent_sends_of_one_event_store_it_once(log: Log) -> None:
    """Of many concurrent sends of each event exactly one appends; the others answer with its place."""
    sends = [event("ab"[n % 2], {"n": n}, event_id=f"e{n}") for n in range(20) for _ in range(10)]

    verdicts = await asyncio.gather(*(log.append(one) for one in sends))

    for n in range(20):
        of_event = verdicts[n * 10 : n * 10 + 10]
        assert sum(isinstance(verdict, Appended) for verdict in of_event) == 1
        assert len({(verdict.seq, verdict.offset, verdict.event_id) for verdict in of_event}) == 1
    assert log.position.seq == 20
    assert len(await read_all(log, Query())) == 20


async def test_concurrent_sends_of_one_object_store_it_once(log: Log) -> None:
    """An event without an id that is sent twice at once is named once, and stored once."""
    one = event("a", {"n": 1})

    verdicts = await asyncio.gather(*(log.append(one) for _ in range(10)))

    assert len({(verdict.seq, verdict.event_id) for verdict in verdicts}) == 1
    assert log.position.seq == 1


async def test_concurrent_conflicts_let_one_through(log: Log) -> None:
    """Of concurrent events with one key and different content one is stored and the others are refused."""
    outcomes = await asyncio.gather(
        *(log.append(event("a", {"n": n}, idem_key="k")) for n in range(10)), return_exceptions=True
    )

    appended = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
    conflicts = [outcome for outcome in outcomes if isinstance(outcome, IdConflict)]
    assert (len(appended), len(conflicts)) == (1, 9)
    assert {conflict.seq for conflict in conflicts} == {appended[0].seq}
    assert log.position.seq == 1
