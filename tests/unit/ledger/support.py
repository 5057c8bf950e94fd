"""Running commands on a state, without a ledger around it."""

from __future__ import annotations

from typing import Any

import msgspec

from tidings.happenings.happening import Happening, to_json
from tidings.ledger.commands import COMMANDS, Command, CommandOutcome
from tidings.ledger.state import LedgerState, Part


def run(state: LedgerState, command: Command, at_ms: int = 1000) -> CommandOutcome:
    """Execute a command as the ledger does that reads it back from the log."""
    encoded = msgspec.json.encode(command)
    name = msgspec.json.decode(encoded)["command"]
    return msgspec.json.decode(encoded, type=COMMANDS[name]).execute(state, at_ms)


def told(outcome: CommandOutcome) -> list[dict[str, Any]]:
    """The happenings of a command as JSON has them, without their time."""
    happenings = msgspec.json.decode(msgspec.json.encode([to_json(each) for each in outcome.happenings]))
    return [{key: value for key, value in each.items() if key != "at_ms"} for each in happenings]


def variants_of(happenings: list[Happening]) -> list[str]:
    """The happenings' variants, in their order."""
    return [each.variant for each in happenings]


def thawed(part: Part) -> Any:
    """A new part that was restored from what a snapshot of this one holds."""
    stored = msgspec.msgpack.encode(part.freeze())
    again = type(part)()
    again.restore(msgspec.msgpack.decode(stored, type=part.frozen_type))
    return again
