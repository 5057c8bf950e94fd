"""A ledger whose ids are chosen, so that what it tells can be compared word for word."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec

from tidings.ledger import Admin, Ledger, Plugin, open_ledger
from tidings.ledger.admin_ledger import AdminEntry, AdminLedger
from tidings.ledger.catalogue import Catalogue, parse_catalogue
from tidings.ledger.relations import RelationRecord, Relations, Triple
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import SubjectRecord, Subjects
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .support import told

T = TypeVar("T")

CATALOGUE: Final = parse_catalogue(
    """
schema_version = 1

[[subjects]]
name = "track"
[[subjects]]
name = "album"

[[relation]]
predicate = "album_of"
source_type = "track"
target_type = "album"
source_cardinality = "at_most_one"

[[relation]]
predicate = "opens"
source_type = "track"
target_type = "album"
source_cardinality = "exactly_one"
target_cardinality = "at_most_one"

[[relation]]
predicate = "like"
source_type = "*"
target_type = ["track", "album"]
source_cardinality = "at_least_one"

[[relation]]
predicate = "next"
source_type = "*"
target_type = "*"
source_cardinality = "at_most_one"
target_cardinality = "at_most_one"
"""
)


class Graph:
    """A ledger, and short names for what its plugins and administrators do."""

    def __init__(self, ledger: Ledger, ids: deque[str], clock: VirtualClock) -> None:
        self.ledger = ledger
        self.clock = clock
        self._ids = ids
        self.result: Any = None

    def plugin(self, name: str) -> Plugin:
        """A plugin of this name."""
        return self.ledger.plugin(name)

    @property
    def admin(self) -> Admin:
        """The administrator."""
        return self.ledger.admin("adm")

    def will_make(self, *new_ids: str) -> None:
        """What is made next gets these ids."""
        self._ids.extend(new_ids)

    async def tells(self, action: Callable[[], Awaitable[Any]], *new_ids: str) -> list[dict[str, Any]]:
        """Do something; what a subscriber is told meanwhile, without times. ``result`` has the answer; new ids are these."""
        with self.ledger.happenings.subscribe() as subscription:
            self.will_make(*new_ids)
            self.result = await action()
            assert not self._ids
            happenings = await told(self.ledger, subscription)
        plain: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(happenings))
        return plain

    async def subject(self, canonical_id: str, *names: str, by: str = "p1", kind: str = "track") -> None:
        """Announce a subject under names ``scheme:value``, by default ``id:`` and its id."""
        addressings = [addressing(name) for name in names or (f"id:{canonical_id}",)]
        plugin = self.plugin(by)
        self.will_make(canonical_id)
        announced = await plugin.announce_subject(kind, addressings)
        assert (announced.kind, announced.canonical_id) == ("created", canonical_id)

    async def relate(self, source: str, predicate: str, target: str, *by: str) -> None:
        """Claim a relation between two ids, for each of these plugins."""
        for plugin in by or ("p1",):
            await self.plugin(plugin).claim_relation(source, predicate, target)

    async def suppress(self, source: str, predicate: str, target: str, reason: str | None = None) -> str:
        """Hide a relation."""
        return await self.admin.suppress_relation(source, predicate, target, reason=reason)

    async def read(self, view: Callable[[LedgerState], T]) -> T:
        """Look at the state."""
        return await self.ledger.read(view)

    async def record(self, canonical_id: str) -> SubjectRecord | None:
        """A live subject."""
        return await self.read(lambda state: state.part(Subjects).get(canonical_id))

    async def relation(self, source: str, predicate: str, target: str) -> RelationRecord | None:
        """A relation, suppressed or not."""
        return await self.read(lambda state: state.part(Relations).get((source, predicate, target)))

    async def edges(self) -> dict[Triple, tuple[str, ...]]:
        """Every relation, and who claims it."""
        found = (await self.ledger.projections.list_relations(page_size=1000)).items
        return {record.triple: record.claimants for record in found}

    async def entries(self) -> tuple[AdminEntry, ...]:
        """The admin ledger."""
        return await self.read(lambda state: state.part(AdminLedger).entries())

    async def frozen(self) -> list[Any]:
        """All state, to compare."""
        await self.ledger.finish_waiting()
        return await self.read(lambda state: [part.freeze() for part in state.parts])


@asynccontextmanager
async def open_graph(catalogue: Catalogue | None = CATALOGUE, log: MemoryLog | None = None) -> AsyncIterator[Graph]:
    """A graph on a log in memory."""
    ids: deque[str] = deque()
    spare = iter(range(10**9))
    clock = VirtualClock()
    async with await open_ledger(
        log or MemoryLog(clock=clock),
        catalogue=catalogue,
        clock=clock,
        ids=lambda: ids.popleft() if ids else f"spare-{next(spare)}",
    ) as ledger:
        yield Graph(ledger, ids, clock)


def addressing(name: str) -> tuple[str, str]:
    """The addressing that is written ``scheme:value``."""
    scheme, value = name.split(":")
    return scheme, value
