"""
Subscriptions by partition or project, and the frames that announce commits.

A frame is built once for each record and dialect and shared by all who get it. What one dispatch has for a connection goes out
in one call. A connection that does not take what it is sent is ended instead of being buffered for without bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tidings.log.record import Record

from .dialects import DIALECTS
from .dialects.dialect import Dialect
from .requests import Scope


class BroadcastListener(Protocol):
    """A connection, as the hub sees it."""

    def may_see(self, scope: Scope) -> bool:
        """Whether it may be shown a record that it has asked for by name."""
        ...

    def deliver(self, frames: tuple[bytes, ...], last_seq: int) -> None:
        """Frames for it, in seq order, up to this seq. Must not wait."""
        ...


class Hub:
    """The subscriptions of one sync endpoint."""

    def __init__(self) -> None:
        self._by_topic: dict[str, tuple[Dialect, dict[str, dict[BroadcastListener, None]]]] = {
            dialect.topic: (dialect, {}) for dialect in DIALECTS
        }
        self._names: dict[BroadcastListener, tuple[str, frozenset[str]]] = {}
        self._origins: dict[str, tuple[BroadcastListener, ...]] = {}
        self.seq = 0
        """The last seq that was handed out."""
        self.frames_built = 0
        self.deliveries = 0

    def subscribe(self, subscriber: BroadcastListener, topic: str, names: frozenset[str]) -> None:
        """Replace what a connection is subscribed to."""
        _, by_name = self._by_topic[topic]
        _, before = self._names.get(subscriber, (topic, frozenset()))
        for name in before - names:
            self._leave(by_name, name, subscriber)
        for name in names - before:
            by_name.setdefault(name, {})[subscriber] = None
        if names:
            self._names[subscriber] = (topic, names)
        else:
            self._names.pop(subscriber, None)

    def names_of(self, subscriber: BroadcastListener) -> frozenset[str]:
        """Return what a connection is subscribed to."""
        return self._names.get(subscriber, ("", frozenset()))[1]

    def remove(self, subscriber: BroadcastListener) -> None:
        """A connection is gone."""
        topic, names = self._names.pop(subscriber, ("", frozenset()))
        if names:
            for name in names:
                self._leave(self._by_topic[topic][1], name, subscriber)

    @staticmethod
    def _leave(by_name: dict[str, dict[BroadcastListener, None]], name: str, subscriber: BroadcastListener) -> None:
        subscribers = by_name.get(name)
        if subscribers is not None:
            subscribers.pop(subscriber, None)
            if not subscribers:
                del by_name[name]

    @property
    def subscription_count(self) -> int:
        """How many pairs of connection and name there are."""
        return sum(len(names) for _, names in self._names.values())

    # Origins: whoever submitted an event gets its result and not its broadcast

    def expect(self, event_ids: Iterable[str], origin: BroadcastListener) -> None:
        """These are about to be stored for ``origin``. Noted before, since they may be published before it is answered."""
        for event_id in event_ids:
            known = self._origins.get(event_id, ())
            self._origins[event_id] = (*known, origin)

    def forget(self, event_id: str, origin: BroadcastListener, seq: int | None) -> None:
        """An event turned out to be stored at ``seq``, or not at all. If it is still to be published, the note stays."""
        if seq is not None and seq > self.seq:
            return
        left = tuple(other for other in self._origins.get(event_id, ()) if other is not origin)
        if left:
            self._origins[event_id] = left
        else:
            self._origins.pop(event_id, None)

    def committed(self, records: Sequence[Record], now_ms: int) -> None:
        """Announce records, in order."""
        if not records:
            return
        groups: dict[tuple[str, tuple[str, ...], Scope], _Group] = {}
        for record in records:
            meta = record.meta
            place = self._by_topic.get(meta.topic)
            if place is None:
                continue
            dialect, by_name = place
            origins = self._origins.pop(meta.event_id, ()) if self._origins else ()
            if by_name.keys().isdisjoint(meta.partitions):
                continue
            scope = dialect.scope_of(meta.partitions, record.payload_json)
            key = (meta.topic, meta.partitions, scope)
            group = groups.get(key)
            if group is None:
                found = {each: None for name in meta.partitions for each in by_name.get(name, ())}
                group = groups[key] = _Group({each: None for each in found if each.may_see(scope)})
            if len(group.subscribers) <= len(origins) and all(each in origins for each in group.subscribers):
                continue
            frame = dialect.broadcast(record, now_ms)
            if frame is not None:
                self.frames_built += 1
                group.add(record.seq, frame, origins)
        self.seq = records[-1].seq
        for subscriber, frames in _due(list(groups.values())):
            self.deliveries += len(frames)
            subscriber.deliver(frames, self.seq)


class _Group:
    """
    What one dispatch has for the subscribers of the same names.

    All but the origins get the very same tuple, so the transport need not put the same frames together for each of them.
    """

    __slots__ = ("_seqs", "frames", "own", "subscribers")

    def __init__(self, subscribers: dict[BroadcastListener, None]) -> None:
        self.subscribers = subscribers
        self.frames: list[bytes] = []
        self._seqs: list[int] = []
        self.own: dict[BroadcastListener, set[int]] = {}
        """Whoever submitted some of these, and which."""

    def add(self, seq: int, frame: bytes, origins: tuple[BroadcastListener, ...]) -> None:
        self._seqs.append(seq)
        self.frames.append(frame)
        for origin in origins:
            if origin in self.subscribers:
                self.own.setdefault(origin, set()).add(seq)

    def for_one(self, subscriber: BroadcastListener) -> list[tuple[int, bytes]]:
        own = self.own.get(subscriber, ())
        return [(seq, frame) for seq, frame in zip(self._seqs, self.frames, strict=True) if seq not in own]


def _due(groups: list[_Group]) -> Iterator[tuple[BroadcastListener, tuple[bytes, ...]]]:
    """Who gets what, each in seq order. Collected before anything is delivered: delivering may end subscriptions."""
    groups_of: dict[BroadcastListener, list[_Group]] = {}
    for group in groups:
        if group.frames:
            for subscriber in group.subscribers:
                groups_of.setdefault(subscriber, []).append(group)
    shared = {id(group): tuple(group.frames) for group in groups}
    for subscriber, its in groups_of.items():
        if len(its) == 1 and subscriber not in its[0].own:
            yield subscriber, shared[id(its[0])]
        else:
            # An event is of one group only, so that the seqs of several groups differ.
            frames = tuple(frame for _, frame in sorted(pair for group in its for pair in group.for_one(subscriber)))
            if frames:
                yield subscriber, frames
