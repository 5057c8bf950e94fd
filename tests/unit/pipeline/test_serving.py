"""Records that the log dropped are read from the lake, and equal what they were."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pipeline.lake_support import all_records, archive, empty_lake
from tidings.core.events import Event, EventMeta, QoS
from tidings.log.embedded.follower import open_follower
from tidings.log.embedded.opening import open_log
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import EpochMismatch, PositionTrimmed
from tidings.log.interface import Log, Query
from tidings.log.keys import DerivedKeys
from tidings.log.memory import MemoryLog
from tidings.log.reading import last, pages
from tidings.log.record import Record
from tidings.log.retention import plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.pipeline.catalogue import query
from tidings.pipeline.lake import Lake
from tidings.pipeline.schemas import BRONZE_EVENTS
from tidings.pipeline.serving import ArchivedLog, LakeArchive
from tidings.testing import VirtualClock

NOW = datetime(2026, 3, 2, tzinfo=UTC)


def events(count: int, seed: int = 1) -> list[Event]:
    """Events of three topics with envelopes of every kind."""
    chance = random.Random(seed)
    made = []
    for n in range(count):
        meta = EventMeta(
            chance.choice(["a", "b", "b", "c.d"]),
            "X",
            chance.choice(["s1", "s2"]),
            f"id-{n}",
            NOW + timedelta(microseconds=chance.randrange(10**10)),
            actor=chance.choice([None, "device:phone", "7", '"q"', "null", {"user_id": "u", "n": [1, 2.5]}]),
            trace_id=chance.choice([None, "t"]),
            idem_key=f"k{n}" if chance.random() < 0.2 else None,
            ttl_sec=chance.choice([None, 60]),
            device=chance.choice([None, "d1", {"device_id": "d"}]),
            partitions=chance.choice([(), (), ("p1",), ("p2", "p1"), ("p3",)]),
            objects=chance.choice([(), (), ("order:1", "order:2")]),
            app=chance.choice([None, None, "shop"]),
            band=chance.choice([None, "RED"]),
            priority=chance.choice([None, 5, "5", "high"]),
            qos=chance.choice([None, QoS(priority=3)]),
            extra=chance.choice([None, {}, {"x": {"y": [None, "é\u2028"]}}]),
        )
        made.append(Event(meta, {"n": n, "text": chance.choice(["", 'a"b', "é", '{"payload":1}']), "f": 1.0}))
    return made


async def trimmed_log(
    count: int = 60, *, kept_lines: int = 4, clock: VirtualClock | None = None
) -> tuple[MemoryLog, list[Record]]:
    """A log that dropped all sealed segments, and everything it ever held."""
    log = MemoryLog(LogSettings(segment_lines_max=kept_lines), clock=clock or VirtualClock(), epoch="e1")
    for event in events(count):
        await log.append(event)
    everything = await all_records(log)
    await drop_all(log)
    return log, everything


async def drop_all(log: Log) -> None:
    """Drop every sealed segment."""
    segments = [segment for info in log.topics().values() for segment in info.segments]
    passed = {partition: 10**9 for segment in segments for partition in segment.partitions}
    rule = {"*": TopicRetention(size_bytes_max=0)}
    await log.drop(plan_retention(segments, rule, now=NOW + timedelta(days=999), partition_floors=passed))


def filled(
    folder: Path, everything: list[Record], *, upto: int | None = None, batches: int = 3, epoch: str = "e1"
) -> Lake:
    """A lake that holds the records, or the first of them, in several commits."""
    lake = empty_lake(folder, VirtualClock())
    found = everything[:upto]
    size = max(1, len(found) // batches)
    for batch, start in enumerate(range(0, len(found), size), 1):
        archive(lake, found[start : start + size], epoch=epoch, batch=batch)
    return lake


async def read_all(log: Log, query: Query, limit: int = 7, found: list[Record] | None = None) -> list[Record]:
    """All records, page by page; ``found`` has those that came before an error."""
    found = [] if found is None else found
    async for page in pages(log, query, limit):
        found += page.records
    return found


async def test_a_lake_of_before_there_were_objects_goes_on(tmp_path: Path) -> None:
    """What was committed without columns for objects and app is read as it was, and the next commit adds the columns."""
    log = MemoryLog(LogSettings(segment_lines_max=2), clock=VirtualClock(), epoch="e1")
    await log.append(Event(EventMeta("a", "X", "s", "old"), {}))
    await log.append(Event(EventMeta("a", "X", "s", "new", objects=["order:7"], app="shop"), {}))
    await log.append(Event(EventMeta("a", "X", "s", "left"), {}))
    everything = await all_records(log)
    await drop_all(log)
    lake = empty_lake(tmp_path, VirtualClock())

    archive(lake, everything[:1], epoch="e1", batch=1, files=1, without=("objects", "app"))
    before = set(lake.schema(BRONZE_EVENTS.name).names)
    archive(lake, everything[1:2], epoch="e1", batch=2, files=1)
    rows = query(lake, "select event_id, objects, app from bronze.events order by seq").rows

    assert await read_all(ArchivedLog(log, LakeArchive(lake)), Query()) == everything
    assert set(lake.schema(BRONZE_EVENTS.name).names) - before == {"objects", "app"}
    assert rows == (("old", None, None), ("new", ["order:7"], "shop"))


@pytest.mark.req("F123")
async def test_a_reader_goes_on_in_the_lake_without_noticing(tmp_path: Path) -> None:
    """All ways to read, forwards and backwards, give every record there ever was, equal to the byte, in order."""
    log, everything = await trimmed_log()
    archived = ArchivedLog(log, LakeArchive(filled(tmp_path, everything)))
    of_b = [record for record in everything if record.topic == "b"]

    with pytest.raises(PositionTrimmed):
        await log.read(Query(since=0))
    for found, expected in [
        (await read_all(archived, Query()), everything),
        (await read_all(archived, Query(since=0)), everything),
        (await read_all(archived, Query(since=10, until=50)), everything[10:50]),
        (await read_all(archived, Query(topic="b")), of_b),
        (await read_all(archived, Query(topic="b", from_offset=3, to_offset=20)), of_b[3:20]),
        (await read_all(archived, Query(topic="b", since=5)), [record for record in of_b if record.seq > 5]),
        (await read_all(archived, Query(partitions=("p1",))), [r for r in everything if "p1" in r.meta.partitions]),
        (await read_all(archived, Query(backwards=True)), everything[::-1]),
        (await read_all(archived, Query(topic="b", backwards=True)), of_b[::-1]),
        (await read_all(archived, Query(until=30, since=4, backwards=True)), everything[4:30][::-1]),
        (await last(archived, 1000, topic="b"), of_b),
    ]:
        assert found == expected
        assert [record.to_json() for record in found] == [record.to_json() for record in expected]
    await archived.close()


async def test_records_are_found_by_id_and_time(tmp_path: Path) -> None:
    """Ids are looked up in log and lake, and bounds on the time of writing hold across both."""
    clock = VirtualClock()
    log = MemoryLog(LogSettings(segment_lines_max=3), clock=clock, epoch="e1")
    for event in events(30):
        await log.append(event)
        await clock.advance(1.0)
    everything = await all_records(log)
    await drop_all(log)
    archived = ArchivedLog(log, LakeArchive(filled(tmp_path, everything)))
    start, end = everything[4].meta.written_time, everything[25].meta.written_time

    found = await archived.read(Query(event_ids=("id-2", "id-29", "nobody")))
    assert [record.meta.event_id for record in found.records] == ["id-2", "id-29"]
    assert found.at_end
    assert await read_all(archived, Query(from_time=start, to_time=end)) == everything[4:25]
    await archived.close()


async def test_sealed_payloads_come_back_sealed_or_opened(tmp_path: Path) -> None:
    """Without the key a sealed record is as it was; with it the payload can be read."""
    encryptor = AesGcmEncryptor(DerivedKeys(bytes(32), spaces={"s1"}))
    log = await open_log(tmp_path, encryptor=encryptor)
    for event in events(10):
        await log.append(event)
    readable = await all_records(log)
    await log.close()
    follower = await open_follower(tmp_path)
    raw = await all_records(follower)
    await follower.close()
    lake = filled(tmp_path, raw)

    assert any(record.meta.sealed for record in raw)
    assert LakeArchive(lake).read(Query()).records == raw
    assert LakeArchive(lake, encryptor=encryptor).read(Query()).records == readable


@pytest.mark.parametrize("limit", [6, 1000])
async def test_what_neither_holds_is_told(tmp_path: Path, limit: int) -> None:
    """If the lake ends before the log begins, a reader gets what there is and is then told of the gap, whatever its pages hold."""
    log, everything = await trimmed_log()
    archived = ArchivedLog(log, LakeArchive(filled(tmp_path, everything, upto=20)))
    found: list[Record] = []
    with pytest.raises(PositionTrimmed):
        await read_all(archived, Query(since=0), limit, found)
    assert found == everything[:20]
    of_b: list[Record] = []
    with pytest.raises(PositionTrimmed):
        await read_all(archived, Query(topic="b", from_offset=0), limit, of_b)
    assert of_b == [record for record in everything[:20] if record.topic == "b"]
    with pytest.raises(PositionTrimmed):
        await read_all(archived, Query(backwards=True))

    empty = ArchivedLog(log, LakeArchive(empty_lake(tmp_path / "none", VirtualClock())))
    with pytest.raises(PositionTrimmed):
        await empty.read(Query(since=0))
    await archived.close()
    await empty.close()


async def test_a_hole_in_the_lake_is_told(tmp_path: Path) -> None:
    """Records missing within the lake stop a reader there, by seq and by offset."""
    log, everything = await trimmed_log()
    lake = empty_lake(tmp_path, VirtualClock())
    archive(lake, everything[:20] + everything[25:], epoch="e1", batch=1)
    archive_ = LakeArchive(lake)

    assert archive_.read(Query(since=0), limit=100).records == everything[:20]
    with pytest.raises(PositionTrimmed) as told:
        archive_.read(Query(since=20))
    assert told.value.first == 25
    of_b = [record.offset for record in everything[20:25] if record.topic == "b"]
    with pytest.raises(PositionTrimmed):
        archive_.read(Query(topic="b", from_offset=of_b[0]))
    await log.close()


async def test_another_epoch_is_refused(tmp_path: Path) -> None:
    """A lake of another life of the log answers nothing."""
    log, everything = await trimmed_log()
    lake = empty_lake(tmp_path, VirtualClock())
    archive(lake, everything, epoch="other", batch=1)
    archived = ArchivedLog(log, LakeArchive(lake))

    with pytest.raises(EpochMismatch):
        await archived.read(Query(since=0))
    await archived.close()


async def test_a_page_keeps_to_its_bounds(tmp_path: Path) -> None:
    """A page has at most so many records and bytes, but at least one record, and large payloads do not pile up."""
    log = MemoryLog(LogSettings(segment_lines_max=1), clock=VirtualClock(), epoch="e1")
    for n in range(12):
        await log.append(Event(EventMeta("t", "X", "s", f"id{n}"), {"text": "x" * (3_000_000 if n % 3 == 0 else 10)}))
    everything = await all_records(log)
    archive_ = LakeArchive(filled(tmp_path, everything, batches=1))

    page = archive_.read(Query(since=0), limit=100, bytes_max=1000)
    assert [record.seq for record in page.records] == [1]
    page = archive_.read(page.next, limit=100, bytes_max=1000)
    assert [record.seq for record in page.records] == [2, 3]
    found, query = [], Query(since=0)
    for _ in range(100):
        page = archive_.read(query, limit=2, bytes_max=4_000_000)
        assert len(page.records) <= 2
        found += page.records
        query = page.next
        if page.at_end:
            break
    assert found == everything
    await log.close()


async def test_new_commits_and_compaction_are_seen(tmp_path: Path) -> None:
    """An archive that was opened before the lake grew, or its files were replaced, reads on."""
    log, everything = await trimmed_log()
    lake = filled(tmp_path, everything, upto=10)
    archived = ArchivedLog(log, LakeArchive(lake))
    assert (await archived.read(Query(since=0), limit=5)).records == everything[:5]

    archive(lake, everything[10:], epoch="e1", batch=99)
    assert await read_all(archived, Query(since=0)) == everything

    table = DeltaTable(str(lake.folder("bronze.events").path))
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert await read_all(archived, Query(topic="b", from_offset=0), 3) == [r for r in everything if r.topic == "b"]
    await archived.close()


@pytest.mark.parametrize(
    "query",
    [
        Query(topic="a", since=0, from_offset=9),
        Query(topic="a", until=12),
        Query(topic="b", to_offset=0),
        Query(topic="b", since=3, from_offset=5, until=30),
        Query(partitions=("p3",), backwards=True),
    ],
)
async def test_a_search_that_ends_early_goes_on_where_it_was(tmp_path: Path, query: Query) -> None:
    """With one file a read, bounds of both kinds hold from page to page, and nothing comes twice or is left out."""
    log, everything = await trimmed_log(40)
    archived = ArchivedLog(log, LakeArchive(filled(tmp_path, everything, batches=5), files_per_read_max=1))
    expected = [record for record in everything if fits(record, query)]

    assert await read_all(archived, query, 1) == (expected[::-1] if query.backwards else expected)
    await archived.close()


def fits(record: Record, query: Query) -> bool:
    """Whether a record is what a query asks for."""
    return (
        query.topic in (None, record.topic)
        and (not query.partitions or not set(query.partitions).isdisjoint(record.meta.partitions))
        and (query.since or 0) < record.seq <= (10**9 if query.until is None else query.until)
        and (query.from_offset or 0) <= record.offset < (10**9 if query.to_offset is None else query.to_offset)
    )


_lakes: dict[int, Lake] = {}


@given(data=st.data())
async def test_any_query_finds_what_a_search_through_everything_finds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is asked, and however small the pages, the archive gives what a plain search gives."""
    log, everything = await trimmed_log(40)
    batches = data.draw(st.sampled_from([1, 2, 5]))
    if batches not in _lakes:
        _lakes[batches] = filled(tmp_path_factory.mktemp("lake"), everything, batches=batches)
    files_max = data.draw(st.sampled_from([1, 2, 64]))
    archived = ArchivedLog(log, LakeArchive(_lakes[batches], files_per_read_max=files_max))
    topic = data.draw(st.sampled_from([None, "a", "b", "none"]))
    query = Query(
        topic=topic,
        partitions=data.draw(st.sampled_from([(), ("p1",), ("p2", "p3")])),
        since=data.draw(st.none() | st.integers(0, 45)),
        until=data.draw(st.none() | st.integers(0, 45)),
        from_offset=None if topic is None else data.draw(st.none() | st.integers(0, 20)),
        to_offset=None if topic is None else data.draw(st.none() | st.integers(0, 20)),
        backwards=data.draw(st.booleans()),
    )
    expected = [record for record in everything if fits(record, query)]
    found = await read_all(archived, query, data.draw(st.sampled_from([1, 3, 50])))
    assert found == (expected[::-1] if query.backwards else expected)
    await archived.close()
