"""Feature flags: members of the chain, switched on and off by name while the bus runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .contract import InvalidMiddleware

__all__ = ["FeatureFlags"]

_FLAGS_COUNT_MAX: Final = 1024


class FeatureFlags:
    """
    Switches by name. A name that was never switched is on.

    Args:
        initial: How some switches stand at first.
    """

    __slots__ = ("_off", "_on", "version")

    def __init__(self, initial: Mapping[str, bool] | None = None) -> None:
        self._on: set[str] = set()
        self._off: set[str] = set()
        self.version = 0
        """Rises with every change, so that a chain knows when to compile itself anew."""
        for name, is_on in (initial or {}).items():
            self.switch(name, is_on)

    def switch(self, name: str, is_on: bool) -> None:
        """
        Turn a name on or off, for events whose turn comes from now on.

        Raises:
            InvalidMiddleware: There are too many names.
        """
        if name not in self._on and name not in self._off and len(self._on) + len(self._off) >= _FLAGS_COUNT_MAX:
            raise InvalidMiddleware(name, "flags", f"there are {_FLAGS_COUNT_MAX} flags already")
        (self._on if is_on else self._off).add(name)
        (self._off if is_on else self._on).discard(name)
        self.version += 1

    def enable(self, name: str) -> None:
        """Turn a name on."""
        self.switch(name, True)

    def disable(self, name: str) -> None:
        """Turn a name off."""
        self.switch(name, False)

    def is_enabled(self, name: str) -> bool:
        """How a switch stands."""
        return name not in self._off

    def as_dict(self) -> dict[str, bool]:
        """Every name that was switched, and how it stands."""
        return {name: name in self._on for name in sorted(self._on | self._off)}
