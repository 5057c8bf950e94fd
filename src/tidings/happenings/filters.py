"""
Which happenings a subscriber wants. ``filter_index`` finds the subscribers that want one.

Within a dimension any value will do, and every dimension that is set must agree. A happening without the attribute that a dimension
compares is not let through.
"""

from __future__ import annotations

from typing import Annotated, Final

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

    @property
    def value_count(self) -> int:
        """Number of names in all lists together."""
        return len(self.variants) + len(self.plugins) + len(self.shelves) + len(self.subjects)

    @property
    def value_bytes(self) -> int:
        """Length of these names in UTF-8."""
        names = (*self.variants, *self.plugins, *self.shelves, *self.subjects)
        return sum(len(name) if name.isascii() else len(name.encode()) for name in names)

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
