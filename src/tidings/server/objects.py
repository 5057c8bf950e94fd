"""
Which objects a record is about.

A publisher says so: ``meta.objects``. Records of Tidings' own topics name theirs by what they hold:

| topic               | objects                                                                                            |
|---------------------|----------------------------------------------------------------------------------------------------|
| ``ledger``            | ``subject:<canonical id>``, ``address:<scheme>:<value>``, ``relation:<source> <predicate> <target>``       |
| those of sync       | ``partition:<name>``, ``item:<event id>``                                                              |
| ``access``            | ``identity:<subject>``, ``policy:<id>``, ``<kind>:<name>`` of a resource, with ``*`` for all that begin so |

A command of the ledger names its subjects by their ids or by their addressings, as it was given; what it told names them by their ids. A name
that is too long for an object's id is told by its digest, ``<type>:sha256-<hex>``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from tidings.access.administration import ACCESS_TOPIC
from tidings.core.names import OBJECT_BYTES_MAX
from tidings.core.validation import UNREADABLE
from tidings.happenings.happening import facts_of, variant_count, variants
from tidings.ledger.records import LEDGER_TOPIC
from tidings.log.record import Record
from tidings.sync.dialects import DIALECTS

_LEFT_ENDS: Final = ("source_id", "subject_id", "old_subject_id", "new_subject_id")
"""Where happenings that tell of a relation have its source."""
_ADDRESSINGS: Final = ("addressing", "target_addressing", "source", "target", "subject", "a", "b")
"""Where commands have the name of a subject."""


def objects_of(record: Record) -> tuple[str, ...]:
    """The objects that a record is about, without repeats, in order; none for most."""
    meta = record.meta
    finder = _FINDERS.get(meta.topic)
    if finder is None or meta.sealed is not None:
        return meta.objects
    try:
        return tuple(sorted({*meta.objects, *finder(record)}))
    except UNREADABLE:  # written by hand, or by another version: what it is about cannot be known
        return meta.objects


def _object(kind: str, name: str) -> str:
    text = f"{kind}:{name}"
    size = len(text.encode(errors="surrogatepass"))
    if size <= OBJECT_BYTES_MAX:
        return text
    return f"{kind}:sha256-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()}"


def _of_sync(record: Record) -> Iterator[str]:
    yield _object("item", record.meta.event_id)
    for name in record.meta.partitions:
        yield _object("partition", name)


class _AccessChange(msgspec.Struct):
    subject: str | None = None
    policy_id: str | None = None
    resource: dict[str, str] | None = None


_ACCESS: Final = msgspec.json.Decoder(_AccessChange)


def _of_access(record: Record) -> Iterator[str]:
    change = _ACCESS.decode(record.payload_json)
    if change.subject is not None:
        yield _object("identity", change.subject)
    if change.policy_id is not None:
        yield _object("policy", change.policy_id)
    if change.resource is not None:
        ending = "*" if change.resource.get("match") == "prefix" else ""
        yield _object(change.resource.get("kind", "resource"), f"{change.resource.get('name', '')}{ending}")


class _LedgerRecord(msgspec.Struct):
    do: dict[str, Any] = {}
    happenings: list[dict[str, Any]] = []


_LEDGER: Final = msgspec.json.Decoder(_LedgerRecord)


def _of_ledger(record: Record) -> Iterator[str]:
    stored = _LEDGER.decode(record.payload_json)
    yield from _of_command(stored.do)
    for happening in stored.happenings:
        yield from _of_happening(happening)


def _of_command(do: Mapping[str, Any]) -> Iterator[str]:
    named = [do[field] for field in _ADDRESSINGS if field in do]
    named += [each for group in (do.get("addressings"), *_list(do.get("partition"))) for each in _list(group)]
    yield from filter(None, map(_subject, named))
    source, target = _name(do.get("source")), _name(do.get("target"))
    if "predicate" in do and source and target:
        yield _object("relation", f"{source} {do['predicate']} {target}")


def _of_happening(told: Mapping[str, Any]) -> Iterator[str]:
    variant = told.get("type")
    for field in _subject_fields(variant, variant_count()) if isinstance(variant, str) else ():
        given = told.get(field)
        for name in given if isinstance(given, list) else (given,):
            if isinstance(name, str):
                yield _object("subject", name)
    if "predicate" in told and "target_id" in told:
        for field in _LEFT_ENDS:
            if field in told:
                yield _object("relation", f"{told[field]} {told['predicate']} {told['target_id']}")


@functools.lru_cache(maxsize=1024)
def _subject_fields(variant: str, count: int) -> tuple[str, ...]:
    """The fields of a variant that name subjects; ``count`` is how many variants were declared when this was asked."""
    declared = variants().get(variant)
    return () if declared is None else facts_of(declared).subjects


def _list(given: object) -> list[Any]:
    """What a field holds if it is a list. Commands of a user's own have fields of any form under the same names."""
    return given if isinstance(given, list) else []


def _subject(given: object) -> str | None:
    name = _name(given)
    return None if name is None else _object("subject" if isinstance(given, str) else "address", name)


def _name(given: object) -> str | None:
    """A subject's name in a command: its id, or an addressing's scheme and value."""
    if isinstance(given, str):
        return given
    return f"{given[0]}:{given[1]}" if isinstance(given, list) and len(given) == 2 else None


_FINDERS: Final[Mapping[str, Callable[[Record], Iterable[str]]]] = {
    LEDGER_TOPIC: _of_ledger,
    ACCESS_TOPIC: _of_access,
    **{dialect.topic: _of_sync for dialect in DIALECTS},
}
