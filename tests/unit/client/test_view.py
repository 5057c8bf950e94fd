"""The local view: committed events in the server's order, drafts on top, whatever order they come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.client.support import numbers
from tidings.client import LocalEvent, ViewOf, event_list
from tidings.client.database import ViewSnapshot
from tidings.client.view import LocalView


def event(n: int, committed_id: int | None = None, partition: str = "P1") -> LocalEvent:
    return LocalEvent(
        id=f"e{n}", type="noted", payload={"n": n}, partitions=(partition,), client_id="c", committed_id=committed_id
    )


def view() -> LocalView[list[int]]:
    return LocalView(numbers(), ["P1"])


def test_drafts_stand_behind_committed_events_in_local_order() -> None:
    """Committed events come first, by committed id; drafts follow, by the order in which they were made."""
    made = view()
    made.add_draft(2, event(102))
    made.add_draft(1, event(101))
    made.add_committed([event(2, 2), event(1, 1)])

    assert made.state == [1, 2, 101, 102]
    assert made.confirmed == [1, 2]


def test_a_late_event_takes_its_place_among_those_already_shown() -> None:
    """An event that comes after a later one was folded is folded before it."""
    made = view()
    made.add_committed([event(1, 1), event(3, 3)])
    assert made.state == [1, 3]

    made.add_committed([event(2, 2)])

    assert made.state == [1, 2, 3]


def test_a_settled_draft_moves_to_its_place() -> None:
    """Once committed, a draft stands where the server put it, before drafts that were made earlier."""
    made = view()
    made.add_draft(1, event(1))
    made.add_draft(2, event(2))
    assert made.state == [1, 2]

    made.drop_draft("e2")
    made.add_committed([event(2, 1)])

    assert made.state == [2, 1]


def test_an_event_below_what_is_folded_for_good_asks_for_a_rebuild() -> None:
    """What was settled cannot be reordered; the view says that it must be folded again."""
    made = view()
    made.add_committed([event(1, 1), event(5, 5)])
    made.settle(5)

    made.add_committed([event(3, 3)])

    assert made.needs_rebuild
    made.rebuild()
    made.add_committed([event(1, 1), event(3, 3), event(5, 5)])
    assert made.state == [1, 3, 5]
    assert not made.needs_rebuild


def test_events_of_other_partitions_are_not_shown() -> None:
    """The view is about the partitions that are followed, for drafts and committed events alike."""
    made = view()
    made.add_committed([event(1, 1, "P2"), event(2, 2)])
    made.add_draft(1, event(3, partition="P2"))

    assert made.state == [2]


@given(
    order=st.permutations(range(1, 13)),
    looks=st.sets(st.integers(0, 11)),
    settles=st.dictionaries(st.integers(0, 11), st.integers(0, 12), max_size=4),
)
def test_whatever_the_order_the_state_is_the_fold_in_server_order(
    order: list[int], looks: set[int], settles: dict[int, int]
) -> None:
    """Events in any order, looked at in between, partly folded for good: the state is always the sorted fold."""
    made = view()
    here: set[int] = set()
    for step, committed_id in enumerate(order):
        made.add_committed([event(committed_id, committed_id)])
        here.add(committed_id)
        if step in looks:
            assert made.state == sorted(here)
        # Only what is complete may be settled: every id up to there has come.
        wanted = settles.get(step, 0)
        if set(range(1, wanted + 1)) <= here:
            made.settle(wanted)
        assert not made.needs_rebuild

    assert made.state == made.confirmed == list(range(1, 13))


@given(
    order=st.permutations(range(1, 13)),
    looks=st.sets(st.integers(0, 11)),
    settles=st.dictionaries(st.integers(0, 11), st.integers(0, 12), max_size=4),
    drafts=st.dictionaries(st.integers(0, 11), st.integers(100, 120), max_size=3),
)
def test_a_reducer_may_change_the_state_in_place_if_it_can_be_copied(
    order: list[int], looks: set[int], settles: dict[int, int], drafts: dict[int, int]
) -> None:
    """With a copy function, a reducer that mutates gives the same states as one that does not."""

    def append(state: list[int], event: LocalEvent) -> list[int]:
        state.append(event.payload["n"])
        return state

    made: LocalView[list[int]] = LocalView(ViewOf[list[int]](append, [], copy=list), ["P1"])
    here: set[int] = set()
    shown: list[int] = []
    for step, committed_id in enumerate(order):
        made.add_committed([event(committed_id, committed_id)])
        here.add(committed_id)
        if step in drafts:
            made.add_draft(step, event(drafts[step]))
            shown.append(drafts[step])
        if step in looks:
            assert made.state == sorted(here) + shown
            assert made.confirmed == sorted(here)
        wanted = settles.get(step, 0)
        if set(range(1, wanted + 1)) <= here:
            made.settle(wanted)

    assert made.state == list(range(1, 13)) + shown
    assert made.confirmed == list(range(1, 13))


def test_a_state_of_the_server_stands_for_all_before_it() -> None:
    """Events that the server's state holds already are not folded again; later ones are, also after a restart."""

    def of() -> ViewOf[list[int]]:
        return ViewOf[list[int]](
            lambda state, event: [*state, event.payload["n"]], [], from_server=lambda states: states["P1"]
        )

    made = LocalView(of(), ["P1"])
    made.adopt(5, {"P1": [2, 5]})
    made.add_committed([event(2, 2), event(6, 6)])
    assert made.state == [2, 5, 6]

    other = LocalView(of(), ["P1"])
    assert other.restore(made.snapshot())
    other.add_committed([event(2, 2)])

    assert other.state == [2, 5]
    assert not other.needs_rebuild


def test_a_snapshot_gives_the_base_back() -> None:
    """A view restored from a snapshot goes on from where it was taken."""
    made = view()
    made.add_committed([event(n, n) for n in range(1, 6)])
    made.settle(4)

    other = view()
    assert other.restore(made.snapshot())
    other.add_committed([event(5, 5)])

    assert (other.base_id, other.state) == (4, [1, 2, 3, 4, 5])


def test_a_snapshot_that_does_not_fit_is_not_used() -> None:
    """Another version, other partitions, a damaged state or one that cannot be decoded: the view begins from nothing."""
    made = view()
    made.add_committed([event(1, 1)])
    made.settle(1)
    good = made.snapshot()
    broken = b"{"
    candidates = [
        None,
        ViewSnapshot("2", good.partitions, good.through, good.checksum, good.state),
        ViewSnapshot(good.version, ["P2"], good.through, good.checksum, good.state),
        ViewSnapshot(good.version, good.partitions, good.through, good.checksum, good.state + b" "),
        ViewSnapshot(good.version, good.partitions, good.through, _crc(broken), broken),
    ]

    for candidate in candidates:
        other = view()
        assert not other.restore(candidate)
        assert (other.base_id, other.state) == (0, [])


def _crc(state: bytes) -> int:
    made: LocalView[bytes] = LocalView(ViewOf[bytes](lambda state, event: state, state, encode=bytes), ["P1"])
    return made.snapshot().checksum


def test_the_plain_view_is_the_list_of_events() -> None:
    """Without a reducer of one's own, the view is all events, and survives a snapshot."""
    made = LocalView(event_list(), ["P1"])
    made.add_committed([event(1, 1)])
    made.settle(1)

    other = LocalView(event_list(), ["P1"])
    assert other.restore(made.snapshot())

    assert other.state == made.state == (event(1, 1),)
