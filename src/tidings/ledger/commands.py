"""
Commands: how the ledger changes.

A command is a value that holds everything needed to make its change again: who, what, the ids it mints, and nothing that would come out
differently another time. ``execute`` checks it against the state, changes the state and returns the happenings, in their order. The
same call runs when the command is given and when the log is read again after a restart: there is one implementation, so state that is
folded from the log is the state that was there before.

A command that is refused has changed nothing.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from tidings.core.names import snake_case
from tidings.happenings.happening import Happening

from .errors import CommandDeclaredTwice, CommandTooLarge, InvalidCommand
from .state import FIRST_RULES, LedgerState, Rehearsed

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
TEXT_BYTES_MAX: Final = 4096
HAPPENINGS_COUNT_MAX: Final = 1_000_000
"""What one command may emit, about: a merge of 500,000 relations, for example."""
PAYLOAD_BYTES_MAX: Final = 1 << 20
JSON_BYTES_MAX: Final = 65_536
JSON_DEPTH_MAX: Final = 100


class CommandOutcome(NamedTuple):
    """What a command did."""

    happenings: Sequence[Happening] = ()
    result: Any = None
    """The answer to whoever gave the command."""
    is_changed: bool = True
    """Whether there is anything to store. A command without effect is answered and leaves no record."""


class _CommandType(msgspec.StructMeta, abc.ABCMeta):
    """Lets a Struct have abstract methods."""


class Command(
    msgspec.Struct,
    metaclass=_CommandType,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="command",
    tag=snake_case,
):
    """A change of the ledger. The class's name in snake case is its name in records, and stays."""

    is_rehearsable: ClassVar[bool] = False
    """Whether ``execute`` calls ``state.begin_change()`` before its first change, so that its checks can be made without it."""

    is_weighed: ClassVar[bool] = False
    """Whether it may take long, so that ``weight`` is asked before it is executed."""

    def weight(self, state: LedgerState) -> int:
        """About how many relations it changes. With thousands it is executed in another thread, while the ledger's readers wait."""
        return 1

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        name = snake_case(cls.__name__)
        known = COMMANDS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise CommandDeclaredTwice(name, f"{known.__module__}.{known.__qualname__}")
        COMMANDS[name] = cls

    @abc.abstractmethod
    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """
        Check, change, tell.

        Args:
            state: All of the ledger's state.
            at_ms: When the command was given; of all its happenings too.

        Raises:
            LedgerError: It cannot be done. Nothing has changed.
        """


class Rehearsal(NamedTuple):
    """What a command would come to."""

    would_change: bool
    result: Any = None
    """What it would answer, if it would change nothing."""


def rehearse(command: Command, state: LedgerState, at_ms: int) -> Rehearsal:
    """
    Make a command's checks, and change nothing.

    Raises:
        LedgerError: It would be refused.
    """
    assert command.is_rehearsable
    state.is_rehearsal = True
    try:
        return Rehearsal(False, command.execute(state, at_ms).result)
    except Rehearsed:
        return Rehearsal(True)
    finally:
        state.is_rehearsal = False


def check_emission(state: LedgerState, command: str, count: int) -> None:
    """
    See that a command emits no more than one command may; to be called before its first change.

    Args:
        state: The ledger's state.
        command: The command's class.
        count: About how many happenings it would emit.

    Raises:
        CommandTooLarge: It would emit more than ``HAPPENINGS_COUNT_MAX``.
    """
    if count > HAPPENINGS_COUNT_MAX and state.rules > FIRST_RULES:
        raise CommandTooLarge(command, count, HAPPENINGS_COUNT_MAX, "happenings")


def check_text(field: str, value: object) -> str:
    """
    A reason or the like: text of 1 to 4,096 bytes.

    Raises:
        InvalidCommand: It is something else; ``field`` names it.
    """
    if not isinstance(value, str) or not value:
        raise InvalidCommand(field, f"must be a text that is not empty, not {value!r:.80}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidCommand(field, f"{value!r:.80} cannot be written as UTF-8") from None
    if size > TEXT_BYTES_MAX:
        raise InvalidCommand(field, f"is {size} bytes long; at most {TEXT_BYTES_MAX} are allowed")
    return value


def check_reason(reason: str | None, field: str = "reason") -> None:
    """
    See that a reason is a text, or none.

    Raises:
        InvalidCommand: It is something else.
    """
    if reason is not None:
        check_text(field, reason)


def check_name(field: str, value: object) -> str:
    """
    A name or id: a text (``check_text``) without control characters.

    Raises:
        InvalidCommand: It is something else; ``field`` names it.
    """
    name = check_text(field, value)
    if _CONTROL.search(name) is not None:
        raise InvalidCommand(field, f"{name!r:.80} holds a control character")
    return name


def check_payload(payload: bytes) -> None:
    """
    Bytes of a plugin's own, which the ledger keeps: 1 MiB at most.

    Raises:
        InvalidCommand: There are more.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidCommand("payload", f"is {len(payload)} bytes long; at most {PAYLOAD_BYTES_MAX} are allowed")


def check_json(field: str, value: Any) -> None:
    """
    A JSON value of a plugin's own, of 64 KiB and 100 levels at most.

    Raises:
        InvalidCommand: It is longer or deeper.
    """
    text = msgspec.json.encode(value)
    if len(text) > JSON_BYTES_MAX:
        raise InvalidCommand(field, f"is {len(text)} bytes of JSON; at most {JSON_BYTES_MAX} are allowed")
    if text.count(b"{") + text.count(b"[") > JSON_DEPTH_MAX and not _is_within(value, JSON_DEPTH_MAX):
        raise InvalidCommand(field, f"nests deeper than {JSON_DEPTH_MAX} levels")


def _is_within(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    within = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_within(each, levels - 1) for each in within)


COMMANDS: dict[str, type[Command]] = {}
"""Every command by the name that records have for it."""
