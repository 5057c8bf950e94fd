"""The ledger's commands, executed again in a Spark task; without a loop, a log or PySpark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.core.errors import TidingsError
from tidings.ledger.admin_ledger import AdminLedger
from tidings.ledger.records import CommandReader, StoredCommand, check_rules, execute_again
from tidings.ledger.relations import RelationKey, Relations
from tidings.ledger.standard import STANDARD_PARTS
from tidings.ledger.state import LedgerState
from tidings.schedule.appointments import Appointments
from tidings.schedule.watches import Watches

_ROWS_MAX: Final = 10_000
_SCHEMA: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("source_id", "predicate", "target_id")),
        *((name, pa.int64()) for name in ("from_seq", "to_seq", "from_ms", "to_ms")),
        ("claimants", pa.list_(pa.string())),
        ("is_suppressed", pa.bool_()),
        ("action", pa.string()),
    ]
)


def fold_records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """
    From records (``offset``, ``seq``, ``payload``) in order to relations with their times, and entries of the admin ledger.

    A command that is refused or not known here changes nothing: the first is what a repair of the log may leave, the second one of a part
    that users have added.

    Raises:
        UnknownCommand: A newer version of the rules decided a command.
    """
    fold = _Fold()
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("offset", "seq", "payload"))
        for offset, seq, payload in zip(*columns, strict=True):
            if payload is not None:  # else it is sealed
                fold.apply(offset, seq, payload)
            if len(fold.rows) >= _ROWS_MAX:
                yield fold.take()
    fold.finish()
    yield fold.take()


class _Fold:
    def __init__(self) -> None:
        state = LedgerState(*(make() for make in (*STANDARD_PARTS, Appointments, Watches)))
        self.rows: list[dict[str, Any]] = []
        self._state = state
        self._relations = state.part(Relations)
        self._relations.changed = set()
        self._admin = state.part(AdminLedger)
        self._actions = 0
        self._commands = CommandReader()
        self._decoder = msgspec.json.Decoder(StoredCommand)
        self._open: dict[RelationKey, dict[str, Any]] = {}

    def apply(self, offset: int, seq: int, payload: str) -> None:
        """Execute a record's command, and note what it changed."""
        try:
            stored = self._decoder.decode(payload)
        except msgspec.MsgspecError:
            return
        if not stored.do:
            return
        check_rules(stored, offset)
        try:
            execute_again(self._commands.read(stored.do), self._state, stored)
        except (msgspec.MsgspecError, TidingsError):
            return
        for entry in self._admin.entries()[self._actions :] if len(self._admin) > self._actions else ():
            action = msgspec.json.encode(entry).decode()
            self.rows.append({"from_seq": seq, "from_ms": entry.at_ms, "action": action})
        self._actions = len(self._admin)
        changed = self._relations.changed
        assert changed is not None
        for key in sorted(changed):
            self._note(key, seq, stored.at_ms)
        changed.clear()

    def _note(self, key: RelationKey, seq: int, at_ms: int) -> None:
        before, now = self._open.pop(key, None), self._relations.get(key)
        if before is not None and before["from_seq"] < seq:
            self.rows.append({**before, "to_seq": seq, "to_ms": at_ms})
        if now is not None:
            source_id, predicate, target_id = key
            self._open[key] = {
                "source_id": source_id,
                "predicate": predicate,
                "target_id": target_id,
                "from_seq": seq,
                "from_ms": at_ms,
                "claimants": list(now.claimants),
                "is_suppressed": now.is_suppressed,
            }

    def finish(self) -> None:
        """What is there now has no end."""
        self.rows.extend(self._open.values())
        self._open.clear()

    def take(self) -> pa.RecordBatch:
        """The rows so far."""
        rows, self.rows = self.rows, []
        return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)
