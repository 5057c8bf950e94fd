"""The tree profile: strict rules, checked by the state after every item before."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.unit.sync.support import Peer, TroubledLog, World, open_world, tree_item
from tidings.core.events import Event, EventMeta
from tidings.sync.settings import SyncSettings, TreeTarget
from tidings.testing import VirtualClock


async def tree_client(world: World, client_id: str = "C1") -> Peer:
    return await world.client(client_id, supported_profiles=["compatibility"])


def push(id: str, item_id: str, *partitions: str, **options: Any) -> dict[str, Any]:
    payload = {"target": "board", "value": {"id": item_id, "title": item_id}, "options": options}
    return tree_item(id, "treePush", payload, *partitions)


def act(event_id: str, type: str, /, *, value: Any = None, **options: Any) -> dict[str, Any]:
    payload: dict[str, Any] = {"target": "board", "options": options}
    return tree_item(event_id, type, payload if value is None else payload | {"value": value})


async def state_of(peer: Peer, partition: str = "P1") -> dict[str, Any]:
    page = await peer.sync(partition, want_snapshot=True)
    state: dict[str, Any] = page["snapshot"]["state"][partition]
    return state


def shape(nodes: list[dict[str, Any]]) -> list[Any]:
    return [[node["id"], *shape(node["children"])] for node in nodes]


async def test_every_action_changes_the_state_as_it_says() -> None:
    """Pushes at every position, moves, updates, deletions with all that hangs below, set and unset."""
    async with open_world() as world:
        client = await tree_client(world)

        results = await client.submit(
            push("1", "b"),
            push("2", "a", position="first"),
            push("3", "d", position="last"),
            push("4", "c", position={"before": "d"}),
            push("5", "b1", parent="b"),
            push("6", "b2", parent="b", position={"after": "b1"}),
            push("7", "b21", parent="b2"),
            act("8", "treeMove", id="b2", parent="d"),
            act("9", "treeUpdate", id="a", value={"title": "A", "more": 1}),
            act("10", "treeUpdate", id="c", value={"only": True}, replace=True),
            act("11", "treeDelete", id="b"),
            tree_item("12", "set", {"target": "settings.theme", "value": {"dark": True}}),
            tree_item("13", "set", {"target": "settings.theme", "value": {"size": 2}}),
            tree_item("14", "set", {"target": "settings.other", "value": 1}),
            tree_item("15", "unset", {"target": "settings.other"}),
            tree_item("16", "unset", {"target": "settings.never"}),
            tree_item("17", "unset", {"target": "nothing.like.it"}),
        )

        assert {result["status"] for result in results} == {"committed"}
        state = await state_of(client)
        assert shape(state["board"]["tree"]) == [["a"], ["c"], ["d", ["b2", ["b21"]]]]
        assert state["board"]["items"] == {
            "a": {"id": "a", "title": "A", "more": 1},
            "c": {"only": True},
            "d": {"id": "d", "title": "d"},
            "b2": {"id": "b2", "title": "b2"},
            "b21": {"id": "b21", "title": "b21"},
        }
        assert state["settings"] == {"theme": {"dark": True, "size": 2}}
        assert set(state) == {"board", "settings"}


@pytest.mark.req("S1")
@pytest.mark.parametrize(
    ("item", "field"),
    [
        (push("x", "a"), "event.payload.value.id"),
        (push("x", "n", parent="gone"), "event.payload.options.parent"),
        (push("x", "n", position={"after": "gone"}), "event.payload.options.position"),
        (push("x", "n", position={"after": "a1"}), "event.payload.options.position"),
        (push("x", "n", position="middle"), "event.payload.options.position"),
        (push("x", "n", position={"after": "a", "before": "a"}), "event.payload.options.position"),
        (push("x", ""), "event.payload.value.id"),
        (push("x", "_root"), "event.payload.value.id"),
        (act("x", "treePush", value=5), "event.payload.value"),
        (act("x", "treePush"), "event.payload.value"),
        (act("x", "treeUpdate", id="gone", value={}), "event.payload.options.id"),
        (act("x", "treeUpdate", value={}), "event.payload.options.id"),
        (act("x", "treeUpdate", id="a", value=[]), "event.payload.value"),
        (act("x", "treeDelete", id="gone"), "event.payload.options.id"),
        (act("x", "treeMove", id="gone"), "event.payload.options.id"),
        (act("x", "treeMove", id="a", parent="a"), "event.payload.options.parent"),
        (act("x", "treeMove", id="a", parent="a11"), "event.payload.options.parent"),
        (act("x", "treeMove", id="a", parent="gone"), "event.payload.options.parent"),
        (act("x", "treeMove", id="a1", parent="_root", position={"after": "a1"}), "event.payload.options.position"),
        (tree_item("x", "treePush", {"target": "scalar", "value": {"id": "n"}}), "event.payload.target"),
        (tree_item("x", "set", {"target": "scalar.below", "value": 1}), "event.payload.target"),
        (tree_item("x", "set", {"target": "a..b", "value": 1}), "event.payload.target"),
        (tree_item("x", "set", {"target": ""}), "event.payload.target"),
        (tree_item("x", "set", {"value": 1}), "event.payload"),
        (
            tree_item("x", "set", {"target": "t", "value": {"items": {}, "tree": [{"id": "q", "children": []}]}}),
            "event.payload.value",
        ),
        (
            # An item of this name would be its own parent.
            tree_item(
                "x",
                "set",
                {
                    "target": "t",
                    "value": {"items": {"_root": {}, "q": {}}, "tree": [{"id": "_root", "children": []}]},
                },
            ),
            "event.payload.value",
        ),
        (tree_item("x", "init", {}), "event.type"),
        (tree_item("x", "event", {"schema": "note", "data": 1}), "event.type"),
    ],
)
async def test_what_does_not_fit_is_rejected_with_its_field(item: dict[str, Any], field: str) -> None:
    """The item leaves no trace in the state; the ones after it are judged without it."""
    async with open_world() as world:
        client = await tree_client(world)
        await client.submit(
            push("1", "a"),
            push("2", "a1", parent="a"),
            push("3", "a11", parent="a1"),
            tree_item("4", "set", {"target": "scalar", "value": 7}),
        )
        before = await state_of(client)

        rejected, after = await client.submit(item, push("5", "z"))

        assert rejected["status"] == "rejected"
        assert rejected["reason"] == "validation_failed"
        assert rejected["errors"][0]["field"] == field
        assert after["status"] == "committed"
        state = await state_of(client)
        assert shape(state["board"]["tree"]) == [["z"], *shape(before["board"]["tree"])]


@pytest.mark.req("SC16")
async def test_an_honest_retry_is_not_a_duplicate_push() -> None:
    """The id is looked up before the state is asked, also within a batch of old and new items."""
    async with open_world() as world:
        client = await tree_client(world)
        (first,) = await client.submit(push("1", "a"))

        again, deleted, pushed = await client.submit(push("1", "a"), act("2", "treeDelete", id="a"), push("3", "a"))
        (clash,) = await client.submit(push("1", "other"))

        assert again == first
        assert (deleted["status"], pushed["status"]) == ("committed", "committed")
        assert clash["status"] == "rejected"


async def test_a_multi_partition_change_must_fit_in_each() -> None:
    """Rejected if one of its partitions does not allow it, and then applied in none."""
    async with open_world() as world:
        client = await tree_client(world)
        await client.submit(push("1", "a", "P1"))

        both, other = await client.submit(push("2", "a", "P1", "P2"), push("3", "b", "P1", "P2"))

        assert both["status"] == "rejected"
        assert other["status"] == "committed"
        assert set((await state_of(client, "P1"))["board"]["items"]) == {"a", "b"}
        assert set((await state_of(client, "P2"))["board"]["items"]) == {"b"}
        await client.submit(tree_item("4", "set", {"target": "board.items.b.title", "value": "of P1"}, "P1"))
        assert (await state_of(client, "P2"))["board"]["items"]["b"]["title"] == "b"


async def test_targets_and_their_actions_are_registered() -> None:
    """With targets of its own, nothing else may be touched."""
    settings = SyncSettings(
        tree_targets={
            "board": TreeTarget(actions=("treePush",), value_schema={"required": ["title"]}),
            "name": TreeTarget(actions=("set",)),
        }
    )
    async with open_world(settings) as world:
        client = await tree_client(world)

        results = await client.submit(
            push("1", "a"),
            act("2", "treeDelete", id="a"),
            tree_item("3", "set", {"target": "name", "value": "x"}),
            tree_item("4", "set", {"target": "other", "value": "x"}),
            tree_item("5", "treePush", {"target": "board", "value": {"id": "b"}}),
        )

        assert [result["status"] for result in results] == [
            *("committed", "rejected", "committed", "rejected", "rejected"),
        ]
        assert [result["errors"][0]["field"] for result in results if "errors" in result] == [
            *("event.type", "event.payload.target", "event.payload.value"),
        ]


async def test_the_state_is_folded_again_after_a_restart_and_after_being_dropped() -> None:
    """With room for one partition's state, going back and forth changes no verdict; nor does a new endpoint."""
    settings = SyncSettings(tree_partitions_max=1)
    async with open_world(settings) as world:
        client = await tree_client(world)
        for round in range(3):
            await client.submit(push(f"a{round}", f"x{round}", "P1"), push(f"b{round}", f"x{round}", "P2"))
        assert (await client.submit(push("again", "x0", "P1")))[0]["status"] == "rejected"

        async with open_world(settings, log=world.log, clock=world.clock) as next_life:
            other = await tree_client(next_life)
            assert (await other.submit(push("again", "x1", "P2")))[0]["status"] == "rejected"
            assert (await other.submit(push("new", "x9", "P2")))[0]["status"] == "committed"


async def test_changes_that_come_another_way_are_seen() -> None:
    """An event that another producer put into the topic is part of the state that the next item is judged by."""
    async with open_world() as world:
        client = await tree_client(world)
        await client.submit(push("1", "a"))
        foreign = push("2", "b")
        meta = EventMeta("sync", "treePush", "sync", event_id="2", partitions=("P1",))
        await world.log.append(Event(meta, {"event": foreign["event"]}))
        await world.settle()

        (result,) = await client.submit(push("3", "b"))

        assert result["status"] == "rejected"


async def test_nothing_and_null_are_an_empty_tree() -> None:
    """A tree can begin at a target that was set to null."""
    async with open_world() as world:
        client = await tree_client(world)

        results = await client.submit(tree_item("1", "set", {"target": "board", "value": None}), push("2", "a"))

        assert [result["status"] for result in results] == ["committed"] * 2
        assert shape((await state_of(client))["board"]["tree"]) == [["a"]]


async def test_two_clients_at_once_are_judged_one_after_the_other() -> None:
    """Of two first pushes of one item one commits and one is rejected, whoever comes first."""
    async with open_world() as world:
        one, two = await tree_client(world, "C1"), await tree_client(world, "C2")

        one.say("submit_events", {"events": [push("1", "a")]})
        two.say("submit_events", {"events": [push("2", "a")]})
        await world.settle()

        statuses = [m["payload"]["results"][0]["status"] for m in (*one.take(), *two.take())]
        assert sorted(statuses) == ["committed", "rejected"]


async def test_a_snapshot_too_large_for_a_page_gives_way_to_the_history() -> None:
    """Pages are bounded, and the events say the same."""
    async with open_world(SyncSettings(page_bytes_max=1024)) as world:
        client = await tree_client(world)
        await client.submit(*(push(f"{n}", f"item-{n}" * 10) for n in range(20)))

        page = await client.sync("P1", want_snapshot=True)

        assert "snapshot" not in page
        assert page["events"][0]["committed_id"] == 1
        assert page["has_more"]


async def deep_tree(world: World, levels: int) -> None:
    """A tree as it could grow before there was a bound: it is in the log, whoever wrote it."""
    chain = [push(f"d{n}", f"i{n}", parent=f"i{n - 1}" if n else "_root") for n in range(levels)]
    for start in range(0, levels, 1000):
        await world.log.append_many(
            [
                Event(
                    EventMeta("sync", "treePush", "sync", event_id=each["id"], partitions=("P1",)),
                    {"event": each["event"]},
                )
                for each in chain[start : start + 1000]
            ]
        )
    await world.settle()


async def test_a_tree_that_is_too_deep_already_goes_on() -> None:
    """However deep it is, it is judged rightly and its history can be read; only what would make it deeper is rejected."""
    async with open_world() as world:
        client = await tree_client(world)
        await deep_tree(world, 1200)

        page = await client.sync("P1", want_snapshot=True)
        results = await client.submit(
            act("x", "treeMove", id="i1", parent="i1199"),
            act("y", "treeMove", id="i1199", parent="i0"),
            push("z", "below", parent="i1198"),
            act("u", "treeUpdate", id="i1000", value={"title": "deep"}),
            act("v", "treeDelete", id="i70"),
        )

        assert "snapshot" not in page
        assert page["events"][0]["committed_id"] == 1
        assert [result["status"] for result in results] == [*("rejected", "committed", "rejected"), *["committed"] * 2]
        assert results[2]["errors"] == [
            {"field": "event.payload.options.parent", "message": "makes the tree deeper than 64 levels"}
        ]
        assert len((await state_of(client))["board"]["items"]) == 71


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (push("x", "n", parent="c"), "event.payload.options.parent"),
        (act("x", "treeMove", id="y", parent="b"), "event.payload.options.parent"),
        (tree_item("x", "set", {"target": ".".join("a" * 33), "value": 1}), "event.payload.target"),
        (
            tree_item(
                "x",
                "set",
                {
                    "target": "other",
                    "value": {
                        "items": {name: {} for name in "abcd"},
                        "tree": [
                            {
                                "id": "a",
                                "children": [
                                    {
                                        "id": "b",
                                        "children": [{"id": "c", "children": [{"id": "d", "children": []}]}],
                                    }
                                ],
                            }
                        ],
                    },
                },
            ),
            "event.payload.value",
        ),
    ],
)
async def test_no_change_makes_a_tree_deeper_than_the_bound(item: dict[str, Any], field: str) -> None:
    """A push, the move of an item with others below it, a tree set as a whole, a long path: rejected with the field at fault."""
    async with open_world(SyncSettings(tree_depth_max=3)) as world:
        client = await tree_client(world)
        await client.submit(
            *(push(f"1{name}", name, parent=parent) for name, parent in (("a", "_root"), ("b", "a"), ("c", "b"))),
            *(push(f"2{name}", name, parent=parent) for name, parent in (("x", "_root"), ("y", "x"), ("z", "y"))),
        )

        rejected, fits = await client.submit(item, act("w", "treeMove", id="y", parent="a"))

        assert (rejected["status"], rejected["errors"][0]["field"]) == ("rejected", field)
        assert fits["status"] == "committed"


@pytest.mark.parametrize(
    "change",
    [
        act("x", "treeUpdate", id="i50", value={"title": "new"}),
        act("x", "treeMove", id="i50", position={"after": "i7"}),
        act("x", "treeDelete", id="i50"),
        push("x", "one-more", position={"before": "i90"}),
        tree_item("x", "set", {"target": "board.items.i3.title", "value": 1}),
        tree_item("x", "set", {"target": "board.items", "value": {"loose": {}}}),
        tree_item("x", "unset", {"target": "board.items.loose"}),
    ],
    ids=["update", "move", "delete", "push", "set", "merge", "unset"],
)
async def test_a_change_costs_the_same_in_a_large_tree(change: dict[str, Any]) -> None:
    """The lines of code that run for one submitted change are as many with 200 siblings as with 1,600."""
    counts: list[int] = []
    for size in (200, 1_600):
        async with open_world() as world:
            client = await tree_client(world)
            tree = [{"id": f"i{n}", "children": []} for n in range(size)]
            items = {f"i{n}": {"title": f"i{n}"} for n in range(size)}
            await client.submit(tree_item("s", "set", {"target": "board", "value": {"items": items, "tree": tree}}))
            assert (await client.submit(act("warm", "treeUpdate", id="i0", value={})))[0]["status"] == "committed"

            with counting_lines() as counted:
                (result,) = await client.submit(change)

            assert result["status"] == "committed"
            counts.append(counted())

    assert counts[0] > 50
    assert counts[1] <= counts[0] * 1.05


@contextlib.contextmanager
def counting_lines() -> Iterator[Callable[[], int]]:
    """Count the lines of the tree's own code that run."""
    count = 0

    def on_line(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal count
        count += kind == "line"
        return on_line

    def on_call(frame: FrameType, kind: str, _: object) -> Any:
        return on_line if "tidings/sync/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)


async def test_a_snapshot_is_the_state_at_the_end_of_the_cycle() -> None:
    """It comes in place of the history; what follows are later events only; without asking nobody meets it."""
    async with open_world() as world:
        writer, reader = await tree_client(world, "C1"), await tree_client(world, "C2")
        await writer.submit(*(push(f"{n}", f"i{n}") for n in range(5)))

        page = await reader.sync("P1", want_snapshot=True)
        plain = await reader.sync("P1")
        later = await reader.sync("P1", since=2, want_snapshot=True)

        assert page["snapshot"]["committed_id"] == page["next_since_committed_id"] == page["sync_to_committed_id"] == 5
        assert page["events"] == []
        assert page["has_more"] is False
        assert len(page["snapshot"]["state"]["P1"]["board"]["items"]) == 5
        assert "snapshot" not in plain
        assert len(plain["events"]) == 5
        assert "snapshot" not in later
        assert len(later["events"]) == 3


async def test_trees_of_different_partitions_are_changed_side_by_side() -> None:
    """
    Batches for one partition wait for one another, also if they name others besides; those for other partitions do not.
    """
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(log=log, clock=clock) as world:
        peers = [await tree_client(world, f"C{number}") for number in range(4)]
        log.may_commit.clear()

        for peer, partitions in zip(peers, (["P1"], ["P2"], ["P2", "P3"], ["P3"]), strict=True):
            peer.say("submit_events", {"events": [push(f"of-{peer.client_id}", peer.client_id, *partitions)]})
            await world.settle()
        held_up = log.held_up
        log.may_commit.set()
        await world.settle()

        results = [peer.take()[-1]["payload"]["results"][0]["status"] for peer in peers]
        assert held_up == 3, "P1, P2 and P3; what names P2 and P3 waits for both"
        assert results == ["committed"] * 4
        assert shape((await state_of(peers[0], "P2"))["board"]["tree"]) in ([["C1"], ["C2"]], [["C2"], ["C1"]])
    await log.close()
