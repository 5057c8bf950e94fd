"""
The optimistic local view: committed events in the server's order, then drafts in local order, folded by the user's reducer.

    base (all up to ``settled``) -> tail (committed, above it) -> drafts
       saved as a snapshot          may still get company          may be rejected

Below the settled id no event of the followed partitions can appear any more, so the base only grows. The tail is kept as a
list, since a late event may belong into its middle. Deciding only: the shell loads, stores and saves.

``tree_view`` is a ready-made view for the tree profile: the state of each partition, folded by the server's own rules. What the
server would reject has no effect here either, so a draft that clashes with what others did meanwhile does not show, and its
verdict follows.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

import msgspec

from tidings.sync import tree

from .database import ViewSnapshot
from .drafts import LocalEvent

S = TypeVar("S")


class ViewOf(Generic[S]):
    """
    What a view is made of.

    Args:
        apply: The state after one more event. It must leave the state that it was given as it was, and depend on nothing
            else: the same events are folded again whenever the server's order or a verdict asks for it.
        initial: The state before the first event.
        version: Changes when ``apply`` changes its mind; snapshots of another version are not used.
        encode: The state as bytes, for snapshots; JSON unless given.
        decode: The way back.
        copy: If given, ``apply`` may change the state in place: it works on copies made with this.
        from_server: The state made of the server's own states, by partition. If given, a new client begins with
            them where the server offers them, instead of reading the whole history.
        show: What readers of the view are given for a state; the state itself unless given.
    """

    def __init__(
        self,
        apply: Callable[[S, LocalEvent], S],
        initial: S,
        *,
        version: str = "1",
        encode: Callable[[S], bytes] = msgspec.json.encode,
        decode: Callable[[bytes], S] = msgspec.json.decode,
        copy: Callable[[S], S] | None = None,
        from_server: Callable[[dict[str, Any]], S] | None = None,
        show: Callable[[S], Any] | None = None,
    ) -> None:
        self.apply = apply
        self.initial = initial
        self.version = version
        self.encode = encode
        self.decode = decode
        self.copy = copy
        self.from_server = from_server
        self.show = show


def _append(state: tuple[LocalEvent, ...], event: LocalEvent) -> tuple[LocalEvent, ...]:
    return (*state, event)


def event_list() -> ViewOf[tuple[LocalEvent, ...]]:
    """The plainest view: all events, in order. For small histories; each change copies the list."""
    return ViewOf[tuple[LocalEvent, ...]](
        _append, (), decode=msgspec.json.Decoder(tuple[LocalEvent, ...]).decode, version="event_list"
    )


class LocalView(Generic[S]):
    """The folded state of one client, for the partitions that it follows."""

    def __init__(self, of: ViewOf[S], partitions: Iterable[str]) -> None:
        self._of = of
        self._covered_id = 0
        """Events up to here are in the base, although they were never seen: it began as a state of the server."""
        self._partitions = frozenset(partitions)
        self.needs_rebuild = False
        """An event came that belongs below what is folded for good; ``rebuild`` it from the store."""
        self._base, self._base_id = self._own(of.initial), 0
        self._tail: list[LocalEvent] = []
        self._confirmed, self._folded_count = self._base, 0
        self._drafts: dict[int, LocalEvent] = {}
        self._state: S | None = None
        self._is_fresh = False
        self.folded_since_snapshot = 0

    @property
    def base_id(self) -> int:
        """All events up to this committed id are folded for good."""
        return self._base_id

    @property
    def state(self) -> S:
        """The state with every committed event and every draft that is known now, as it is shown."""
        if not self._is_fresh:
            if self._of.copy is not None:
                self._confirmed, self._folded_count = self._own(self._base), 0
            for event in self._tail[self._folded_count :]:
                self._confirmed = self._of.apply(self._confirmed, event)
            self._folded_count = len(self._tail)
            state = self._own(self._confirmed) if self._drafts else self._confirmed
            for local_id in sorted(self._drafts):
                state = self._of.apply(state, self._drafts[local_id])
            self._state, self._is_fresh = self._shown(state), True
        return self._state  # type: ignore[return-value]  # fresh means set, and S may include None

    @property
    def confirmed(self) -> S:
        """The state with committed events only."""
        _ = self.state
        return self._shown(self._confirmed)

    def _shown(self, state: S) -> S:
        return state if self._of.show is None else cast("S", self._of.show(state))

    def shows(self, event: LocalEvent) -> bool:
        """Whether the event is in a partition that this view is about."""
        return not self._partitions.isdisjoint(event.partitions)

    def add_committed(self, events: Iterable[LocalEvent]) -> None:
        """Add committed events, in any order."""
        for event in events:
            if not self.shows(event):
                continue
            assert event.committed_id is not None
            if event.committed_id <= self._covered_id:
                continue
            if event.committed_id <= self._base_id:
                self.needs_rebuild = True
                continue
            place = bisect.bisect(self._tail, event.committed_id, key=_committed_id)
            self._tail.insert(place, event)
            if place < self._folded_count:
                self._confirmed, self._folded_count = self._base, 0
            self._is_fresh = False

    def settle(self, settled_id: int) -> None:
        """Fold for good what lies at or below ``settled_id``."""
        if settled_id <= self._base_id or self.needs_rebuild:
            return
        count = bisect.bisect(self._tail, settled_id, key=_committed_id)
        if self._of.copy is None and count == self._folded_count:
            self._base = self._confirmed
        else:
            for event in self._tail[:count]:
                self._base = self._of.apply(self._base, event)
            if self._of.copy is None and count > self._folded_count:
                self._confirmed, self._folded_count = self._base, count
        del self._tail[:count]
        self._folded_count = max(0, self._folded_count - count)
        self._base_id = settled_id
        self.folded_since_snapshot += count

    def add_draft(self, local_id: int, event: LocalEvent) -> None:
        """Add a draft."""
        if self.shows(event):
            self._drafts[local_id] = event
            self._is_fresh = False

    def drop_draft(self, id: str) -> None:
        """A draft has its verdict: if committed, the event is added on its own; if rejected, it leaves the view."""
        for local_id, event in self._drafts.items():
            if event.id == id:
                del self._drafts[local_id]
                self._is_fresh = False
                return

    def rebuild(self) -> None:
        """Begin again from nothing; committed events are then added from the store. Drafts stay."""
        self._begin(self._own(self._of.initial), 0, 0)

    def _own(self, state: S) -> S:
        return state if self._of.copy is None else self._of.copy(state)

    def adopt(self, committed_id: int, states: dict[str, Any]) -> None:
        """Begin from the server's states of the partitions: they hold all events up to ``committed_id``."""
        assert self._of.from_server is not None
        self._begin(self._of.from_server(states), committed_id, committed_id)

    def _begin(self, base: S, base_id: int, covered_id: int) -> None:
        self._base, self._base_id, self._covered_id = base, base_id, covered_id
        self._tail.clear()
        self._confirmed, self._folded_count = base, 0
        self._is_fresh = self.needs_rebuild = False

    # Snapshots

    def snapshot(self) -> ViewSnapshot:
        """The base, as it is saved."""
        state = self._of.encode(self._base)
        self.folded_since_snapshot = 0
        return ViewSnapshot(
            self._of.version, sorted(self._partitions), self._base_id, zlib.crc32(state), state, self._covered_id
        )

    def restore(self, snapshot: ViewSnapshot | None) -> bool:
        """Begin from a saved base; ``False``, and from nothing, if it is none of this view's or is damaged."""
        self.rebuild()
        if (
            snapshot is None
            or snapshot.version != self._of.version
            or snapshot.partitions != sorted(self._partitions)
            or snapshot.checksum != zlib.crc32(snapshot.state)
        ):
            return False
        try:
            base = self._of.decode(snapshot.state)
        except (
            ValueError,
            TypeError,
            LookupError,
            RecursionError,
        ):  # whatever a decoder says of bytes that it did not write
            return False
        self._begin(base, snapshot.through, snapshot.covered)
        return True


def _committed_id(event: LocalEvent) -> int:
    assert event.committed_id is not None
    return event.committed_id


States = dict[str, dict[str, Any]]
_Folded = dict[str, tree.PartitionState]


class _Saved(msgspec.Struct):
    """States as they are kept: trees as rows, so that a deep one does not nest deeply."""

    rows: dict[str, tuple[dict[str, Any], list[tuple[list[str], list[Any]]]]]


def tree_view() -> ViewOf[States]:
    """
    The state of every partition, by its name. A new client begins with the server's states instead of the history.

    An event may name partitions that are not followed; their states hold what was seen of them, which is not all.
    """
    view = ViewOf[_Folded](
        _apply_change,
        {},
        version="tree.2",
        encode=_encode_states,
        decode=_decode_states,
        copy=lambda states: {name: state.copy() for name, state in states.items()},
        from_server=lambda states: {name: tree.PartitionState(state) for name, state in states.items()},
        show=lambda states: {name: state.plain() for name, state in states.items()},
    )
    return cast("ViewOf[States]", view)


def _apply_change(states: _Folded, event: LocalEvent) -> _Folded:
    change = tree.parse_change(event.type, dict(event.payload))
    if not isinstance(change, tree.Change):
        return states
    for partition in event.partitions:
        state = states.setdefault(partition, tree.PartitionState())
        if state.check(change) is None:
            state.apply(change)
    return states


def _encode_states(states: _Folded) -> bytes:
    return msgspec.json.encode(_Saved({name: state.to_rows() for name, state in states.items()}))


def _decode_states(data: bytes) -> _Folded:
    saved = msgspec.json.decode(data, type=_Saved)
    return {name: tree.PartitionState.from_rows(*rows) for name, rows in saved.rows.items()}
