"""Records that name objects are told to the gateway, whole, in order and once; what it refuses stops nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidings.access.administration import Grant, PolicyPut, event_of
from tidings.access.resources import Action, ResourcePattern
from tidings.core.events import Event, EventMeta
from tidings.gateway.ceiling import Ceiling
from tidings.gateway.contexts import RequestContext
from tidings.gateway.descriptors import EventDescriptor
from tidings.gateway.envelopes import encode
from tidings.gateway.event_types import GRAPH_MANAGER, EventDeclarations
from tidings.gateway.intake import Rejection, SourceIntake, TaggedDescriptor
from tidings.gateway.queues import BoundedQueue
from tidings.ledger import open_ledger
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.subjects import Addressing
from tidings.log.dispatcher import Dispatcher
from tidings.log.interface import Query
from tidings.log.memory import MemoryLog
from tidings.log.reading import records
from tidings.log.record import Record
from tidings.server.graph_source import GraphSource, descriptors_of
from tidings.server.objects import objects_of
from tidings.testing import VirtualClock


async def stored(event: Event) -> Record:
    """An event as a log gives it back."""
    log = MemoryLog(clock=VirtualClock())
    await log.append(event)
    return (await log.read(Query())).records[0]


def order(objects: list[str], **meta: Any) -> Event:
    """An event about objects."""
    return Event(EventMeta("orders", "ORDER_PLACED", "shared:shop", objects=objects, **meta), {"secret": "body"})


async def test_a_record_without_objects_has_nothing_to_tell() -> None:
    """Most records name none."""
    assert descriptors_of(await stored(order([])), "default") == []


@pytest.mark.req("R214")
async def test_a_descriptor_says_where_and_about_what_and_no_more() -> None:
    """App, domain, seq, objects, type, space and on whose behalf; nothing of the payload."""
    (told,) = descriptors_of(
        await stored(order(["order:2", "order:1"], actor={"user_id": "ada"}, app="shop")), "default"
    )

    assert (told.app_id, told.domain_id, told.sequence_anchor_hint) == ("shop", "orders", 1)
    assert told.payload_summary == {
        "object_ids": ("order:1", "order:2"),
        "op_kinds": ("ORDER_PLACED",),
        "op_count": 2,
        "owner_identity_id": "ada",
        "space_id": "shared:shop",
    }
    context = told.operation_context
    assert isinstance(context, RequestContext)
    assert (context.app_id, context.requester_identity_id, context.trace_id) == ("shop", "ada", "seq-1")
    assert told.read_scope is not None
    assert (told.read_scope.topic, told.read_scope.space_id) == ("orders", "shared:shop")
    assert (
        descriptors_of(await stored(order(["o:1"], actor="x" * 300, trace_id="two words")), "default")[0].app_id
        == "default"
    )


@pytest.mark.parametrize(
    ("objects", "event_type"),
    [(["rating:1", "rating:2"], "graph.rating_changed"), (["rating:1", "order:2"], "graph.object_mutated")],
)
async def test_ratings_alone_are_a_type_of_their_own(objects: list[str], event_type: str) -> None:
    """An event that is about nothing but ratings tells of a rating."""
    assert descriptors_of(await stored(order(objects)), "default")[0].event_type == event_type


@pytest.mark.parametrize(
    "objects",
    [
        [f"o:{n}" for n in range(1000)],
        [f"o:{n:03d}{'x' * 240}" for n in range(40)],
        [f"o:{n}" + '"\\' * 100 for n in range(40)],
        [f"o:{n}\U0001f4e8" + "\U0001f4e8" * 60 for n in range(100)],
    ],
    ids=["many", "long", "escaped", "wide"],
)
async def test_many_objects_take_several_descriptors_that_each_fit(objects: list[str]) -> None:
    """None has more than 64 objects or 4,096 bytes; together they have all, in order, each with its part."""
    told = descriptors_of(await stored(order(objects, actor="a" * 256)), "default")

    assert [each for one in told for each in one.payload_summary["object_ids"]] == sorted(objects, key=str.encode)  # type: ignore[union-attr]
    assert len(told) > 1
    for at, one in enumerate(told):
        assert len(one.payload_summary["object_ids"]) <= 64  # type: ignore[arg-type]
        assert len(encode(one.payload_summary)) <= 4096
        assert (one.payload_summary["part"], one.payload_summary["parts"]) == (at + 1, len(told))
        assert one.resume_hint is not None
        assert one.resume_hint.local_order == at


async def test_sync_records_name_their_partitions_and_their_item() -> None:
    """By themselves, whatever publishers cannot say there."""
    record = await stored(Event(EventMeta("sync", "note", "system", "item-1", partitions=["home", "work list"]), {}))

    assert objects_of(record) == ("item:item-1", "partition:home", "partition:work list")


async def test_access_records_name_whom_and_what_they_are_about() -> None:
    """A grant names its subject and its resource, a policy itself; both tell that access has changed."""
    grant = Grant(subject="ada", action=Action.READ, resource=ResourcePattern("topic", "ord", "prefix"))  # type: ignore[arg-type]
    policy = PolicyPut(policy_id="p1", text="permit(principal, action, resource);")
    records_ = [await stored(event_of(each, actor="admin")) for each in (grant, policy)]

    assert [objects_of(each) for each in records_] == [("identity:ada", "topic:ord*"), ("policy:p1",)]
    assert {descriptors_of(each, "default")[0].event_type for each in records_} == {"graph.acl_changed"}


async def test_what_cannot_be_read_names_nothing() -> None:
    """A record of our own topics that says something else is passed over."""
    event = Event(EventMeta("access", "access.grant", "system"), {"subject": [1]})

    assert objects_of(await stored(event)) == ()


@pytest.mark.parametrize(
    "payload",
    [
        {"do": {"partition": 3, "addressings": 5, "subject": {"id": 1}, "source": None, "a": [1], "b": 7.5}},
        {"do": {"partition": [1, None, "x"], "addressings": {"a": 1}}},
        {"do": {"partition": None, "addressings": None, "predicate": {}, "target": []}},
        {"happenings": [{"type": ["x"]}, {"type": None, "predicate": 1}]},
    ],
    ids=str,
)
async def test_commands_of_a_users_own_may_hold_anything(payload: dict[str, Any]) -> None:
    """A field that is called as one of the ledger's own and holds something else names nothing, and stops nothing."""
    assert objects_of(await stored(Event(EventMeta("ledger", "ledger.own.command", "s"), payload))) == ()


async def test_ledger_records_name_subjects_and_relations() -> None:
    """By the names that the command used, and by the ids of what it told; a name too long for an id by its digest."""
    log = MemoryLog(clock=VirtualClock())
    long = "x" * 300
    catalogue = 'schema_version = 1\n[[subjects]]\nname = "track"\n[[relation]]\npredicate = "follows"\nsource_type = "*"\ntarget_type = "*"\n'
    async with await open_ledger(log, catalogue=parse_catalogue(catalogue), clock=VirtualClock()) as ledger:
        plugin = ledger.plugin("finder")
        for value in ("a", "b", long):
            await plugin.announce_subject("track", [Addressing("isbn", value)])
        await plugin.claim_relation(Addressing("isbn", "a"), "follows", Addressing("isbn", "b"))
        merged = await ledger.admin("root").merge_subjects(Addressing("isbn", "a"), Addressing("isbn", "b"))
    found = [objects_of(record) async for record in records(log, Query(topic="ledger"))]

    assert any(each[:1] == ("address:isbn:a",) and each[1].startswith("subject:") for each in found if each)
    assert any(each[0].startswith("address:sha256-") and len(each[0]) < 100 for each in found if each)
    assert any({"address:isbn:a", "address:isbn:b", "relation:isbn:a follows isbn:b"} <= {*each} for each in found)
    assert any({"address:isbn:a", "address:isbn:b", f"subject:{merged}"} <= {*each} for each in found)


def an_intake(
    log: MemoryLog, capacity: int = 1000
) -> tuple[SourceIntake, BoundedQueue[TaggedDescriptor], list[Rejection]]:
    """An intake that runs, the queue behind it, and what it refused."""
    queue: BoundedQueue[TaggedDescriptor] = BoundedQueue(capacity)
    rejected: list[Rejection] = []
    intake = SourceIntake(
        EventDeclarations(),
        Ceiling(1000),
        queue,
        committed_seq=lambda: log.position.seq,
        is_app_known=lambda app: app == "default",
        make_room=lambda: False,
        on_rejected=rejected.append,
        wake=lambda: None,
    )
    intake.is_open = True
    return intake, queue, rejected


def taken(queue: BoundedQueue[TaggedDescriptor]) -> list[EventDescriptor]:
    """What has come through."""
    found = []
    while (tagged := queue.take()) is not None:
        found.append(tagged.descriptor)
    return found


@pytest.mark.req("R214", "R215")
async def test_what_the_gateway_refuses_is_counted_and_the_commit_stands(caplog: pytest.LogCaptureFixture) -> None:
    """
    Every committed record with objects is submitted, in seq order. One that is refused (its app is not known) fails as a whole, loudly; it stays
    committed, and the records behind it are told.
    """
    log = MemoryLog(clock=VirtualClock())
    intake, queue, rejected = an_intake(log)
    source = GraphSource(intake.register(GRAPH_MANAGER), lambda: "default")
    dispatcher = Dispatcher(log)
    dispatcher.add("graph", source)
    dispatcher.start()
    many = [f"order:{n}" for n in range(100)]
    for event in (order(["order:1"]), order(["order:2"], app="nobody"), order([]), order(many)):
        await log.append(event)
    await dispatcher.reached(4)
    await dispatcher.close()
    source.committed([await stored(order(["order:3"], app="nobody"))] * 3)

    assert [each.sequence_anchor_hint for each in taken(queue)] == [1, 4, 4]
    assert (source.refused_count, [each.app_id for each in rejected]) == (4, ["nobody"] * 4)
    assert [line.rpartition("; ")[2] for line in caplog.messages if "could not be told" in line] == [
        "and 0 more",
        "and 2 more",
    ]
    assert len([record async for record in records(log, Query())]) == 4
    assert dispatcher.problems == []


async def test_a_descriptor_is_what_the_gateway_takes() -> None:
    """Whatever a publisher may write into an envelope, intake finds nothing wrong with what is told of it."""
    log = MemoryLog(clock=VirtualClock())
    intake, queue, rejected = an_intake(log)
    source = GraphSource(intake.register(GRAPH_MANAGER), lambda: "default")
    await log.append(
        order(["o:" + "\u00e4" * 120, 'o:"', "o:\\"], actor="", trace_id="\u00e4", device={"device_id": "d"})
    )
    await log.append(order(["o:1"], actor={"agent": 1}, extra={"a": msgspec.json.decode(b"1")}))
    source.committed((await log.read(Query())).records)

    assert rejected == []
    assert len(taken(queue)) == 2
