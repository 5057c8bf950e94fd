"""
Which happenings a subscriber wants, and finding all who want one without asking each of them.

Within a dimension any value will do, and every dimension that is set must agree. A happening without the attribute that a dimension
compares is not let through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from tidings.core.validation import explain

from .errors import InvalidHappeningFilter
from .happening import AnyHappening

_VALUES_COUNT_MAX: Final = 10_000

Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=_VALUES_COUNT_MAX)]


class HappeningFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    What is let through. A dimension without values is not looked at; without any, everything passes.

    Names that nobody has declared are no error: they may come with a later version, and until then match nothing.
    """

    variants: Names = ()
    plugins: Names = ()
    """The plugin that the variant's declaration marks with ``Plugin``."""
    shelves: Names = ()
    """The shelf that it marks with ``Shelf``."""
    subjects: Names = ()
    """Canonical ids of subjects that it touches: at least one of them."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if isinstance(getattr(self, name), str):  # which would be taken for the list of its letters
                raise InvalidHappeningFilter(name, "a list of names is needed, not one name")

    @property
    def is_empty(self) -> bool:
        """Whether everything passes."""
        return not (self.variants or self.plugins or self.shelves or self.subjects)

    def matches(self, happening: AnyHappening) -> bool:
        """Whether this happening is let through."""
        return (
            (not self.variants or happening.variant in self.variants)
            and (not self.plugins or happening.filter_plugin in self.plugins)
            and (not self.shelves or happening.filter_shelf in self.shelves)
            and (not self.subjects or any(each in self.subjects for each in happening.subjects))
        )


EVERYTHING: Final = HappeningFilter()


def filter_from_json(value: object) -> HappeningFilter:
    """
    The filter in a JSON object.

    Raises:
        InvalidHappeningFilter: It has a dimension that there is not, or something else than a list of names.
    """
    try:
        return msgspec.convert(value, HappeningFilter)
    except msgspec.ValidationError as error:
        problem, field = explain(error)
        raise InvalidHappeningFilter(field, problem) from None


T = TypeVar("T")


class _Dimension:
    """
    Who accepts which value, as sets of bits: bit ``n`` is the wanter number ``n``.

    ``anything`` are those that do not look at this dimension.
    """

    __slots__ = ("anything", "by_value", "values_of")

    def __init__(self, values_of: Callable[[AnyHappening], tuple[str, ...]]) -> None:
        self.values_of = values_of
        self.anything = 0
        self.by_value: dict[str, int] = {}

    def add(self, bit: int, values: tuple[str, ...]) -> None:
        if not values:
            self.anything |= bit
        for value in values:
            self.by_value[value] = self.by_value.get(value, 0) | bit

    def remove(self, bit: int, values: tuple[str, ...]) -> None:
        self.anything &= ~bit
        for value in set(values):
            self.by_value[value] &= ~bit
            if not self.by_value[value]:
                del self.by_value[value]

    def accepting(self, happening: AnyHappening) -> int:
        accepting = self.anything
        for value in self.values_of(happening):
            accepting |= self.by_value.get(value, 0)
        return accepting


class FilterIndex(Generic[T]):
    """
    Finds everything whose filter lets a happening through.

    The cost is that of a few operations on sets of bits and of what is found, not of how many filters there are.
    """

    def __init__(self) -> None:
        self._dimensions = {
            "variants": _Dimension(lambda happening: (happening.variant,)),
            "plugins": _Dimension(lambda happening: _present(happening.filter_plugin)),
            "shelves": _Dimension(lambda happening: _present(happening.filter_shelf)),
            "subjects": _Dimension(lambda happening: happening.subjects),
        }
        self._wanters: list[tuple[HappeningFilter, T] | None] = []
        self._free: list[int] = []
        self._everybody = 0

    def __bool__(self) -> bool:
        return self._everybody != 0

    def add(self, filter: HappeningFilter, wanter: T) -> int:
        """Enter one; the number takes it out again."""
        if self._free:
            number = self._free.pop()
            self._wanters[number] = (filter, wanter)
        else:
            number = len(self._wanters)
            self._wanters.append((filter, wanter))
        bit = 1 << number
        self._everybody |= bit
        for name, dimension in self._dimensions.items():
            dimension.add(bit, getattr(filter, name))
        return number

    def remove(self, number: int) -> None:
        """Take one out."""
        entry = self._wanters[number]
        assert entry is not None
        self._wanters[number] = None
        self._free.append(number)
        bit = 1 << number
        self._everybody &= ~bit
        for name, dimension in self._dimensions.items():
            dimension.remove(bit, getattr(entry[0], name))

    def matching(self, happening: AnyHappening) -> Iterator[T]:
        """All that let it through."""
        found = self._everybody
        for dimension in self._dimensions.values():
            if dimension.by_value:  # else nobody looks at it
                found &= dimension.accepting(happening)
        while found:
            lowest = found & -found
            entry = self._wanters[lowest.bit_length() - 1]
            assert entry is not None
            yield entry[1]
            found ^= lowest


def _present(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,)
