"""
Find everything whose filter accepts a happening, for one happening or a batch, without checking each filter.

Equal filters form a group. A group is entered under the values of one dimension, the one whose values the fewest groups share; a
group with subjects always under those. A happening is looked up by its values, and the groups found are checked in the other
dimensions. In a batch, happenings that no filter can distinguish are looked up once. Memory is linear in the number of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from .filters import HappeningFilter
from .happening import AnyHappening

_DIMENSIONS: Final = ("variants", "plugins", "shelves")

T = TypeVar("T")
Key = tuple[str | None, str | None, str | None]
"""Variant, plugin and shelf of a happening; ``None`` for one that no filter names."""


class Carrier(Protocol):
    """Something that carries a happening, such as an ``Envelope``."""

    @property
    def happening(self) -> AnyHappening: ...


CarrierT = TypeVar("CarrierT", bound=Carrier)


class _Group(Generic[T]):
    """The entries of one filter, by number."""

    __slots__ = ("accepted", "dimension", "entries", "filter")

    def __init__(self, filter: HappeningFilter, dimension: str) -> None:
        self.filter = filter
        self.dimension = dimension
        """The one whose values the group is entered under; empty if the filter accepts everything."""
        self.accepted = tuple(
            None if name == dimension else frozenset(getattr(filter, name)) or None for name in _DIMENSIONS
        )
        """By dimension the values to check; ``None`` where every value that was found by will do."""
        self.entries: dict[int, T] = {}

    def accepts(self, key: Key) -> bool:
        variants, plugins, shelves = self.accepted
        return (
            (variants is None or key[0] in variants)
            and (plugins is None or key[1] in plugins)
            and (shelves is None or key[2] in shelves)
        )


class _Values(Generic[T]):
    """The groups under each value of a dimension. Most values have one group, which then needs no container."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[str, _Group[T] | dict[_Group[T], None]] = {}

    def __contains__(self, value: str) -> bool:
        return value in self._groups

    def __bool__(self) -> bool:
        return bool(self._groups)

    def get(self, value: str) -> Iterable[_Group[T]]:
        groups = self._groups.get(value)
        if groups is None:
            return ()
        return groups if isinstance(groups, dict) else (groups,)

    def count(self, value: str) -> int:
        groups = self._groups.get(value)
        return 0 if groups is None else len(groups) if isinstance(groups, dict) else 1

    def add(self, value: str, group: _Group[T]) -> None:
        groups = self._groups.get(value)
        if groups is None or groups is group:
            self._groups[value] = group
        elif isinstance(groups, dict):
            groups[group] = None
        else:
            self._groups[value] = {groups: None, group: None}

    def remove(self, value: str, group: _Group[T]) -> None:
        groups = self._groups.get(value)
        if groups is group:
            del self._groups[value]
        elif isinstance(groups, dict) and group in groups:
            del groups[group]
            if len(groups) == 1:
                (self._groups[value],) = groups


class FilterIndex(Generic[T]):
    """
    Entries with a filter each.

    A look-up costs the groups that share a value with the happening, not the number of filters.
    """

    def __init__(self) -> None:
        self._groups: dict[HappeningFilter, _Group[T]] = {}
        self._group_of: dict[int, _Group[T]] = {}
        self._everything: dict[_Group[T], None] = {}
        self._by_dimension: dict[str, _Values[T]] = {name: _Values() for name in _DIMENSIONS}
        self._by_subject: _Values[T] = _Values()
        self._named: dict[str, Counter[str]] = {name: Counter() for name in _DIMENSIONS}
        """How many groups name a value, in any way: happenings with other values cannot be distinguished by it."""
        self._next_number = 0

    def __bool__(self) -> bool:
        return bool(self._group_of)

    def add(self, filter: HappeningFilter, entry: T) -> int:
        """Enter ``entry``. Return the number to remove it by."""
        group = self._groups.get(filter)
        if group is None:
            group = self._groups[filter] = self._enter(filter)
        number = self._next_number
        self._next_number += 1
        group.entries[number] = entry
        self._group_of[number] = group
        return number

    def remove(self, number: int) -> None:
        """Remove an entry."""
        group = self._group_of.pop(number)
        del group.entries[number]
        if group.entries:
            return
        del self._groups[group.filter]
        for name in _DIMENSIONS:
            named = self._named[name]
            for value in set(getattr(group.filter, name)):
                named[value] -= 1
                if not named[value]:
                    del named[value]
        if not group.dimension:
            del self._everything[group]
            return
        values = self._values(group.dimension)
        for value in getattr(group.filter, group.dimension):
            values.remove(value, group)

    def matching(self, happening: AnyHappening) -> list[T]:
        """Return all entries whose filter accepts a happening, in the order of their numbers."""
        key = self._key(happening)
        groups = [*self._matching_key(key), *self._matching_subjects(key, self._subjects(happening))]
        entries = [item for group in groups for item in group.entries.items()]
        entries.sort(key=lambda item: item[0])
        return [entry for _, entry in entries]

    def matching_batches(self, carriers: Sequence[CarrierT]) -> Iterator[tuple[T, Sequence[CarrierT]]]:
        """Iterate over the entries that accept any of several happenings, each with all that it accepts, in order."""
        if len(carriers) == 1:
            for entry in self.matching(carriers[0].happening):
                yield entry, carriers
            return
        # Positions of the happenings that look alike to the filters without subjects, and to those with.
        alike: dict[Key, list[int]] = {}
        touching: dict[tuple[Key, tuple[str, ...]], list[int]] = {}
        for position, carrier in enumerate(carriers):
            key = self._key(carrier.happening)
            alike.setdefault(key, []).append(position)
            if self._by_subject and (subjects := self._subjects(carrier.happening)):
                touching.setdefault((key, subjects), []).append(position)
        parts = list(alike.values())
        parts_of: dict[_Group[T], list[int]] = {}
        for number, key in enumerate(alike):
            for group in self._matching_key(key):
                parts_of.setdefault(group, []).append(number)
        for number, (key, subjects) in enumerate(touching, len(parts)):
            for group in self._matching_subjects(key, subjects):
                parts_of.setdefault(group, []).append(number)
        parts += touching.values()
        # Groups that accept the same parts share one list.
        groups_of: dict[tuple[int, ...], list[_Group[T]]] = {}
        for group, numbers in parts_of.items():
            groups_of.setdefault(tuple(numbers), []).append(group)
        for part_numbers, groups in groups_of.items():
            positions = parts[part_numbers[0]]
            if len(part_numbers) > 1:
                positions = sorted(position for number in part_numbers for position in parts[number])
            accepted = carriers if len(positions) == len(carriers) else [carriers[position] for position in positions]
            for group in groups:
                for entry in group.entries.values():
                    yield entry, accepted

    def _enter(self, filter: HappeningFilter) -> _Group[T]:
        for name in _DIMENSIONS:
            self._named[name].update(set(getattr(filter, name)))
        if filter.subjects:
            dimension = "subjects"
        else:
            named = [name for name in _DIMENSIONS if getattr(filter, name)]
            dimension = min(named, key=lambda name: self._shared_count(name, filter), default="")
        group: _Group[T] = _Group(filter, dimension)
        if not dimension:
            self._everything[group] = None
            return group
        values = self._values(dimension)
        for value in getattr(filter, dimension):
            values.add(value, group)
        return group

    def _shared_count(self, name: str, filter: HappeningFilter) -> int:
        """Count the groups that are entered under a filter's values in a dimension already."""
        values = self._by_dimension[name]
        return sum(map(values.count, getattr(filter, name)))

    def _values(self, dimension: str) -> _Values[T]:
        return self._by_subject if dimension == "subjects" else self._by_dimension[dimension]

    def _key(self, happening: AnyHappening) -> Key:
        variants, plugins, shelves = self._named.values()
        variant: str | None = happening.variant
        plugin = happening.filter_plugin if plugins else None
        shelf = happening.filter_shelf if shelves else None
        return (
            variant if variant in variants else None,
            plugin if plugin in plugins else None,
            shelf if shelf in shelves else None,
        )

    def _subjects(self, happening: AnyHappening) -> tuple[str, ...]:
        """Return the subjects that it touches and that a filter names."""
        by_subject = self._by_subject
        return tuple(subject for subject in happening.subjects if subject in by_subject) if by_subject else ()

    def _matching_key(self, key: Key) -> Iterator[_Group[T]]:
        """Iterate over the groups without subjects that accept a happening with this key, each once."""
        yield from self._everything
        for values, value in zip(self._by_dimension.values(), key, strict=True):
            if value is not None:
                for group in values.get(value):
                    if group.accepts(key):
                        yield group

    def _matching_subjects(self, key: Key, subjects: tuple[str, ...]) -> Iterable[_Group[T]]:
        """Return the groups with subjects that accept a happening that touches these, each once."""
        return dict.fromkeys(
            group for subject in subjects for group in self._by_subject.get(subject) if group.accepts(key)
        )
