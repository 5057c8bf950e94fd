"""
What an erasure is, of which space, and with what right: one answer for the jobs, for exports and for the scrub.

A record erases if its type is one of ``ERASURE_TYPES``, and what it names only in the space that it was committed in. Its publisher had
the right to publish there, and that is the right to erase there. A payload that names another space has no right to that one: such
an erasure is refused and listed, and erases nothing, in neither space. So is one that names nothing.

``read_erasure`` decides for one record, in plain values; ``erasures_in`` asks it for each row of a DataFrame, in Spark's tasks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ERASURE_TYPES: Final = ("TOMBSTONE_PROPAGATE", "TOMBSTONE_APPLIED", "DSAR_EXPORT", "DSAR_ERASE")
_REQUESTS: Final = "DSAR_"
_ALWAYS: Final = "DSAR_ERASE"
_WORDS: Final = frozenset({"erase", "erasure", "delete", "deletion", "forget"})
_WISHES: Final = ("request", "kind", "action")
_SUBJECTS: Final = ("subject_id", "person_id", "user_id")
_PERSON: Final = "profile"
_OBJECT: Final = "memory"
OTHER_SPACE: Final = "it names another space than its own"
NO_NAME: Final = "it names nothing"


@dataclass(frozen=True, slots=True)
class Erasure:
    """An object or a person that is to be erased in a space."""

    space_id: str
    is_person: bool
    object_id: str
    object_type: str


@dataclass(frozen=True, slots=True)
class RefusedErasure:
    """An erasure that erases nothing."""

    named_space: str
    """The space that its payload names."""
    reason: str


def read_erasure(kind: str, space_id: str, payload: bytes | str | None) -> Erasure | RefusedErasure | None:
    """
    Decide what a record erases; ``None`` if it is no erasure.

    Names are texts that are not empty: a number, an object or a list in their place counts as left out. Of several fields that may
    name the same, the first with a text counts.

    Args:
        kind: The record's type.
        space_id: The space that the record was committed in.
        payload: As JSON; ``None`` for a sealed one, which cannot be read and erases nothing.
    """
    if kind not in ERASURE_TYPES or payload is None:
        return None
    try:
        said = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(said, dict):
        return None
    is_request = kind.startswith(_REQUESTS)
    if is_request and kind != _ALWAYS and _first(said, *_WISHES).lower() not in _WORDS:
        return None  # an export takes nothing away
    named_space = said.get("space_id")
    if named_space is not None and not isinstance(named_space, str):
        return RefusedErasure(msgspec.json.encode(named_space).decode(), OTHER_SPACE)
    if named_space and unicodedata.normalize("NFC", named_space) != space_id:
        return RefusedErasure(named_space, OTHER_SPACE)
    object_type = _PERSON if is_request else _first(said, "object_type").lower() or _OBJECT
    named = _first(said, *_SUBJECTS) if is_request else _first(said, "object_id", *_SUBJECTS)
    if not named:
        return RefusedErasure(space_id, NO_NAME)
    return Erasure(space_id, object_type == _PERSON, named, object_type)


def _first(said: Mapping[str, Any], *names: str) -> str:
    return next((value for name in names if isinstance(value := said.get(name), str) and value), "")


_READ: Final = pa.schema(
    [
        ("space_id", pa.string()),
        ("is_person", pa.bool_()),
        ("object_id", pa.string()),
        ("object_type", pa.string()),
        ("erased_by", pa.string()),
        ("erased_seq", pa.int64()),
        ("issued_at", pa.timestamp("us", "UTC")),
        ("named_space", pa.string()),
        ("refusal", pa.string()),
    ]
)


def erasures_in(events: DataFrame, issued_at: Column) -> DataFrame:
    """
    Return a row for each erasure among events (rows like those of ``silver.events``).

    The columns are those of ``gold.erasures``, with ``named_space`` and ``refusal``: one that is refused has these two, and neither
    ``object_id`` nor ``object_type``.

    Args:
        events: The events.
        issued_at: When the erasure was asked for.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    return (
        events.where(F.col("type").isin(*ERASURE_TYPES))
        .select("type", "space_id", "payload", "event_id", "seq", issued_at.alias("issued_at"))
        .mapInArrow(_read_batches, from_arrow_schema(_READ))
    )


def _read_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = []
        for row in batch.to_pylist():
            place = {"erased_by": row["event_id"], "erased_seq": row["seq"], "issued_at": row["issued_at"]}
            match read_erasure(row["type"], row["space_id"], row["payload"]):
                case Erasure(space_id, is_person, object_id, object_type):
                    named = {"is_person": is_person, "object_id": object_id, "object_type": object_type}
                    rows.append({"space_id": space_id, **named, **place})
                case RefusedErasure(named_space, reason):
                    rows.append({"space_id": row["space_id"], **place, "named_space": named_space, "refusal": reason})
        yield pa.RecordBatch.from_pylist(rows, schema=_READ)
