"""A ledger with a small catalogue of records and tracks, and short names for what its plugins and administrators say."""

from __future__ import annotations

from typing import Any

from tests.unit.ledger.support import run, told
from tidings.ledger.administration import AdminLedger
from tidings.ledger.catalogue import CurrentCatalogue, SetCatalogue, parse_catalogue
from tidings.ledger.claims import AnnounceSubject, ClaimRelation
from tidings.ledger.commands import Command
from tidings.ledger.conflicts import ClaimLog, Conflicts
from tidings.ledger.relations import Relations, Triple
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import Addressing, Subjects

CATALOGUE = """
schema_version = 1

[[racks]]
name = "audio"
charter = "what can be heard"
[[racks.shelves]]
name = "player"
shape = 1

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
target_cardinality = "exactly_one"

[[relation]]
predicate = "like"
source_type = "*"
target_type = ["track", "album"]
source_cardinality = "at_least_one"
"""


def named(name: str) -> Addressing:
    """An addressing, as ``scheme:value``."""
    return Addressing.parse(name)


class Graph:
    """The state of registry and graph, changed by commands that take the way through their JSON."""

    def __init__(self) -> None:
        self.state = LedgerState(CurrentCatalogue(), Subjects(), Relations(), ClaimLog(), Conflicts(), AdminLedger())
        self.now_ms = 0
        self.result: Any = None
        self.do(SetCatalogue(catalogue=parse_catalogue(CATALOGUE)))

    def do(self, command: Command) -> list[dict[str, Any]]:
        """Execute a command; what was told, without times. ``result`` has the answer."""
        outcome = run(self.state, command, self.now_ms)
        assert outcome.is_changed or not outcome.happenings
        self.result = outcome.result
        return told(outcome)

    def subject(self, canonical_id: str, *names: str, plugin: str = "p1", kind: str = "track") -> None:
        """Announce a subject under names, by default its id's."""
        addressings = tuple(named(name) for name in names or (f"id:{canonical_id}",))
        self.do(AnnounceSubject(plugin=plugin, subject_type=kind, addressings=addressings, new_id=canonical_id))
        assert self.result.kind == "created"

    def relate(self, source: str, predicate: str, target: str, *plugins: str) -> list[dict[str, Any]]:
        """Claim a relation between two ids; what was told."""
        happenings = []
        for plugin in plugins or ("p1",):
            command = ClaimRelation(plugin=plugin, source=source, predicate=predicate, target=target)
            happenings += self.do(command)
        return happenings

    @property
    def subjects(self) -> Subjects:
        return self.state.part(Subjects)

    @property
    def relations(self) -> Relations:
        return self.state.part(Relations)

    @property
    def admin_ledger(self) -> AdminLedger:
        return self.state.part(AdminLedger)

    def edges(self) -> dict[Triple, tuple[str, ...]]:
        """Every relation, and who claims it."""
        found = map(self.relations.get, self.relations.triples.after(None, 10_000))
        return {record.triple: record.claimants for record in found if record is not None}

    def frozen(self) -> list[Any]:
        """All state, to compare."""
        return [part.freeze() for part in self.state.parts]
