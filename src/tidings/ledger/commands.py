"""
Commands: how the ledger changes.

A command is a value that holds everything needed to make its change again: who, what, the ids it mints, and nothing that would come out
differently another time. ``execute`` checks it against the state, changes the state and returns the happenings, in their order. The
same call runs when the command is given and when the log is read again after a restart: there is one implementation, so state that is
folded from the log is the state that was there before.

A command that is refused has changed nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tidings.happenings.variants import Happening

if TYPE_CHECKING:
    from .state import LedgerState

_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")


class Outcome(NamedTuple):
    """What a command did."""

    happenings: Sequence[Happening] = ()
    result: Any = None
    """The answer to whoever gave the command."""
    is_changed: bool = True
    """Whether there is anything to store. A command without effect is answered and leaves no record."""


def _name_of(name: str) -> str:
    return _CAPITAL.sub("_", name).lower()


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="command", tag=_name_of):
    """A change of the ledger. The class's name in snake case is its name in records, and stays."""

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        COMMANDS[_name_of(cls.__name__)] = cls

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """
        Check, change, tell.

        Args:
            state: All of the ledger's state.
            at_ms: When the command was given; of all its happenings too.

        Raises:
            LedgerError: It cannot be done. Nothing has changed.
        """
        raise NotImplementedError


COMMANDS: dict[str, type[Command]] = {}
"""Every command by the name that records have for it."""
