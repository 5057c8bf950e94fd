"""Following one subject: its projection at each change, through merges and migrations, until a split."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
import pytest

from tests.unit.happenings.test_variants import OURS, examples
from tidings.happenings.errors import HappeningsClosed, Lagged
from tidings.happenings.happening import Happening, facts_of
from tidings.happenings.variants import SplitStrategy
from tidings.ledger import Ledger, LedgerSettings, ProjectionScope, WalkDirection, open_ledger
from tidings.ledger.catalogue import SetCatalogue, parse_catalogue
from tidings.ledger.claims import ClaimRelation, RetractRelation
from tidings.ledger.errors import AliasChainForked, AliasChainUnresolved, UnknownSubject
from tidings.ledger.following import SubjectSubscription, SubjectUpdate
from tidings.log.memory import MemoryLog

from .support import CATALOGUE

ADMIN = "org.example.admin"


async def track(ledger: Ledger, *names: str) -> str:
    """A subject with these names."""
    announced = await ledger.plugin("org.example.player").announce_subject("track", [("file", name) for name in names])
    assert announced.canonical_id is not None
    return announced.canonical_id


async def merge(ledger: Ledger, first: str, second: str) -> str:
    """Two subjects become one."""
    return await ledger.admin(ADMIN).merge_subjects(first, second)


async def split(ledger: Ledger, source: str, *names: str) -> tuple[str, ...]:
    """A subject becomes several, one a name."""
    partition = [[("file", name)] for name in names]
    return await ledger.admin(ADMIN).split_subject(source, partition, strategy=SplitStrategy.TO_BOTH)


async def until(stream: SubjectSubscription, canonical_id: str) -> SubjectUpdate:
    """The first update of this subject."""
    while (update := await stream.recv()).canonical_id != canonical_id:
        pass
    return update


@pytest.mark.req("H60")
async def test_a_subject_is_followed_through_its_changes(ledger: Ledger) -> None:
    """First it is told as it is; then after each change, with the seq of the happening and a projection that has the change."""
    player = ledger.plugin("org.example.player")
    first, second = await track(ledger, "1"), await track(ledger, "2")
    await player.claim_relation(first, "like", second)
    with await ledger.projections.follow_subject(first, ProjectionScope(relation_predicates=("like",))) as stream:
        update = await stream.recv()
        assert (update.seq, update.canonical_id, stream.current_seq) == (0, first, ledger.happenings.last_seq)
        assert update.projection is not None
        assert [each.target_id for each in update.projection.related] == [second]

        await player.update_state(first, {"volume": 7})
        update = await stream.recv()
        assert update.seq == ledger.happenings.last_seq == stream.current_seq + 1
        assert update.projection is not None
        assert update.projection.state == {"volume": 7}

        await player.update_state(second, {"volume": 8})
        await player.retract_relation(first, "like", second)
        update = await stream.recv()
        assert update.seq == stream.current_seq + 3
        assert update.projection is not None
        assert update.projection.related == ()

        await player.retract_addressing(("file", "1"))
        assert await stream.recv() == SubjectUpdate(ledger.happenings.last_seq, first, None)


@pytest.mark.req("H60")
@pytest.mark.parametrize(
    "name", [each for each in OURS if each not in ("subject_merged", "subject_split", "subject_migrated")]
)
async def test_every_variant_that_touches_a_subject_brings_an_update(ledger: Ledger, name: str) -> None:
    """Whichever of its fields names the subject; and a happening that names others only brings none."""
    subject = await track(ledger, "1")
    stream = await ledger.projections.follow_subject(subject)
    await stream.recv()
    for happening in examples(name):
        assert isinstance(happening, Happening)
        fields = [each for each in facts_of(type(happening)).subjects if getattr(happening, each) is not msgspec.UNSET]
        for field in fields:
            value: Any = (subject,) if isinstance(getattr(happening, field), tuple) else subject
            seq = await ledger.happenings.emit_durable(happening, msgspec.structs.replace(happening, **{field: value}))
            assert (await stream.recv()).seq == seq + 1
        if not fields:
            await ledger.happenings.emit_durable(happening)
    reading = asyncio.ensure_future(stream.recv())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reading.done()
    reading.cancel()


@pytest.mark.req("H60")
async def test_a_merge_leads_on_and_a_split_ends(ledger: Ledger) -> None:
    """After a merge the new subject is followed, its later changes too; a split is told with what it became, and nothing follows."""
    first, second = await track(ledger, "1"), await track(ledger, "2")
    stream = await ledger.projections.follow_subject(first)
    await stream.recv()

    merged = await merge(ledger, first, second)
    update = await until(stream, merged)
    assert update.projection is not None
    assert {each.value for each in update.projection.addressings} == {"1", "2"}
    await ledger.plugin("org.example.player").update_state(merged, 1)
    state = None
    while state != 1:  # what the merge told of the new subject comes before
        projection = (await stream.recv()).projection
        assert projection is not None
        state = projection.state

    parts = await split(ledger, merged, "1", "2")
    last = await stream.recv()
    assert last[1:] == (merged, None, parts)
    with pytest.raises(HappeningsClosed):
        await stream.recv()
    assert ledger.happenings.receiver_count == 0


@pytest.mark.req("H60")
@pytest.mark.parametrize("end", ["live", "split", "forgotten"])
async def test_whatever_becomes_of_a_subject_before_anybody_looks(ledger: Ledger, end: str) -> None:
    """
    Changed often, merged twice in a row and then left, split or forgotten, all before the next read: the stream gets to where the subject is,
    and never tells in between that it is gone.
    """
    names = "abc"
    first, second, third = [await track(ledger, name) for name in names]
    stream = await ledger.projections.follow_subject(first)
    await stream.recv()
    for number in range(150):  # more than is heard at once
        await ledger.plugin("org.example.player").update_state(first, number)
    merged = await merge(ledger, await merge(ledger, first, second), third)
    parts: tuple[str, ...] = ()
    if end == "split":
        parts = await split(ledger, merged, *names)
    if end == "forgotten":
        for name in names:
            await ledger.plugin("org.example.player").retract_addressing(("file", name))

    update = await stream.recv()

    assert (update.canonical_id, update.new_ids, update.projection is not None) == (merged, parts, end == "live")


async def test_what_comes_to_a_subject_is_an_update(ledger: Ledger) -> None:
    """A relation that is made and a second name that is added each give a fresh projection, which shows it."""
    room, lamp = await track(ledger, "room"), await track(ledger, "lamp")
    scope = ProjectionScope(relation_predicates=("like",), direction=WalkDirection.INVERSE)
    player = ledger.plugin("org.example.player")
    with await ledger.projections.follow_subject(room, scope) as stream:
        await stream.recv()
        await player.claim_relation(lamp, "like", room)
        related = await stream.recv()
        await player.announce_subject("track", [("file", "room"), ("name", "kitchen")])
        named = await stream.recv()

    assert related.projection is not None
    assert named.projection is not None
    assert [each.target_id for each in related.projection.related] == [lamp]
    assert [each.value for each in named.projection.addressings] == ["room", "kitchen"]


async def test_happenings_that_come_together_are_one_update(ledger: Ledger) -> None:
    """After a list of 900 relations that leave a subject its follower gets one projection, under the highest seq."""
    room = await track(ledger, "room")
    player = ledger.plugin("org.example.player")
    lamps = [await track(ledger, f"lamp {number}") for number in range(900)]
    claims = [ClaimRelation(plugin=player.name, source=lamp, predicate="like", target=room) for lamp in lamps]
    await ledger.execute_many(claims)
    with await ledger.projections.follow_subject(room) as stream:
        await stream.recv()
        retractions = [
            RetractRelation(plugin=player.name, source=lamp, predicate="like", target=room) for lamp in lamps
        ]
        await ledger.execute_many(retractions)
        updates = await stream.recv_many()

    assert [update.seq for update in updates] == [ledger.happenings.last_seq]


async def test_a_migrated_subject_is_followed(ledger: Ledger) -> None:
    """A subject that gets another type has another id, and the stream goes on with that."""
    subject = await track(ledger, "1")
    stream = await ledger.projections.follow_subject(subject)
    await stream.recv()
    await ledger.execute(SetCatalogue(catalogue=parse_catalogue('schema_version=1\n[[subjects]]\nname="song"\n')))
    await ledger.grammar.scan()
    await ledger.grammar.migrate("track", {"kind": "rename", "to_type": "song"}, admin=ADMIN)

    update = await stream.recv()
    assert update.projection is not None
    assert update.projection.subject_type == "song"
    assert stream.canonical_id == update.canonical_id != subject


async def test_retired_and_unknown_ids(ledger: Ledger) -> None:
    """An id that leads to one subject is followed if asked; one that does not, or that nobody has, is refused, and nothing is left registered."""
    first, second = await track(ledger, "1"), await track(ledger, "2")
    merged = await merge(ledger, first, second)
    follow = ledger.projections.follow_subject

    with await follow(first, follow_aliases=True) as stream:
        assert (await stream.recv()).canonical_id == stream.canonical_id == merged
    with pytest.raises(AliasChainUnresolved, match="followed"):
        await follow(first)
    with pytest.raises(UnknownSubject):
        await follow("nobody")
    await split(ledger, merged, "1", "2")
    with pytest.raises(AliasChainForked):
        await follow(second, follow_aliases=True)
    gc.collect()
    assert ledger.happenings.receiver_count == 0


async def test_a_cursor_gives_the_first_update_its_seq(ledger: Ledger) -> None:
    """What touched the subject since then is one update, with the last of their seqs; 0 if nothing did."""
    first, second = await track(ledger, "1"), await track(ledger, "2")
    for number in range(2):
        await ledger.plugin("org.example.player").update_state(first, number)
        await ledger.plugin("org.example.player").update_state(second, number)
    last_seq = ledger.happenings.last_seq

    for since, seq in ((0, last_seq - 1), (last_seq - 1, 0)):
        stream = await ledger.projections.follow_subject(first, since=since)
        assert (await stream.recv()).seq == seq


async def test_a_reader_that_is_too_slow_is_told_and_begins_again() -> None:
    """What became of the subject may be among what was missed, so the stream ends."""
    settings = LedgerSettings(buffer_count_max=2)
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, settings=settings) as ledger:
        subject = await track(ledger, "1")
        stream = await ledger.projections.follow_subject(subject)
        await stream.recv()
        for number in range(5):
            await ledger.plugin("org.example.player").update_state(subject, number)

        with pytest.raises(Lagged, match="3 happenings"):
            await stream.recv()
        assert [each async for each in stream] == []
