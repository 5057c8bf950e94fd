"""
Registry and graph do what a simple model does, whatever is said in whatever order.

Hypothesis draws announcements, claims, merges, splits and the rest over a few names, so that they meet. Each is executed by the ledger's
command and by the model, which has no index and searches everything. What is told has to be the same, in the same order; so have
the answers to every question afterwards. What is refused changes nothing, and a rehearsal says before what comes of it. Now and then the state is written to a snapshot and read back;
at the end all commands are executed once more, and come to the same state and the same happenings.
"""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scenarios.ledger.graph_support import CATALOGUE
from tests.unit.ledger.support import run, thawed
from tidings.happenings.happening import Happening
from tidings.happenings.variants import SplitStrategy
from tidings.ledger.admin_ledger import AdminLedger
from tidings.ledger.administration import (
    ForceRetractAddressing,
    ForceRetractRelation,
    SuppressRelation,
    UnsuppressRelation,
)
from tidings.ledger.catalogue import CurrentCatalogue, SetCatalogue
from tidings.ledger.claims import AnnounceSubject, ClaimRelation, RetractAddressing, RetractRelation, UpdateSubjectState
from tidings.ledger.commands import Command, CommandOutcome, Rehearsal, rehearse
from tidings.ledger.conflicts import ClaimLog, Conflicts
from tidings.ledger.errors import LedgerError
from tidings.ledger.merging import MergeSubjects, RelationAssignment, SplitSubject, migrate_subject
from tidings.ledger.relations import Relations, WalkDirection
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import Addressing, SubjectName, Subjects

from .ledger_model import PREDICATES, TYPED, TYPES, Edge, Model, Refused, Told

NAMES: Final = [f"n:{number}" for number in range(14)]
PLUGINS: Final = st.sampled_from(["p1", "p2", "p3"])
NAME: Final = st.sampled_from(NAMES)
PREDICATE: Final = st.sampled_from([*PREDICATES, *PREDICATES, *PREDICATES, *PREDICATES, "sings"])
REASON: Final = st.sampled_from(["a", "b"])
PICK: Final = st.integers(0, 1000)


def addressing(name: str) -> Addressing:
    return Addressing(*name.split(":"))


def subject_name(name: str) -> SubjectName:
    return addressing(name) if ":" in name else name


def empty_state() -> LedgerState:
    return LedgerState(CurrentCatalogue(), Subjects(), Relations(), ClaimLog(), Conflicts(), AdminLedger())


class MigrateForTest(Command, frozen=True, kw_only=True):
    """Give a subject another type."""

    subject: str
    to_type: str
    new_id: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        return CommandOutcome(
            migrate_subject(
                state,
                at_ms,
                admin="adm",
                old_id=self.subject,
                new_id=self.new_id,
                to_type=self.to_type,
                migration_id="mig_1",
            )
        )


def brief(happening: Happening) -> tuple[Any, ...]:
    """A happening as the model tells it."""
    told: Any = happening
    name = happening.variant

    def edge() -> Edge:
        return told.source_id, told.predicate, told.target_id

    match name:
        case "subject_announced":
            names = tuple(f"{each.scheme}:{each.value}" for each in told.addressings)
            return name, told.plugin, told.canonical_id, told.subject_type, names
        case "subject_addressing_added" | "subject_addressing_removed":
            return name, told.plugin, told.canonical_id, f"{told.scheme}:{told.value}"
        case "relation_asserted" | "relation_claim_added" | "relation_claim_retracted":
            return name, told.plugin, edge()
        case "subject_conflict_detected":
            return name, told.plugin, told.canonical_ids
        case "subject_forgotten":
            return name, told.plugin, told.canonical_id
        case "relation_forgotten":
            return name, told.plugin, edge(), told.reason.__struct_config__.tag
        case "subject_state_changed":
            return name, told.canonical_id, told.prev_state, told.new_state
        case "relation_cardinality_violation":
            return name, edge(), told.side, told.observed_count
        case "subject_addressing_forced_retract":
            return name, told.target_plugin, told.canonical_id, f"{told.scheme}:{told.value}"
        case "relation_claim_forced_retract":
            return name, told.target_plugin, edge()
        case "relation_suppressed":
            return name, edge(), told.reason
        case "relation_suppression_reason_updated":
            return name, edge(), told.old_reason, told.new_reason
        case "relation_unsuppressed":
            return name, edge()
        case "subject_merged":
            return name, told.source_ids, told.new_id
        case "subject_split":
            return name, told.source_id, told.new_ids
        case "subject_migrated":
            return name, told.old_id, told.new_id
        case "relation_rewritten":
            return name, told.predicate, told.old_subject_id, told.new_subject_id, told.target_id
        case "relation_split_ambiguous":
            return name, told.predicate, told.other_endpoint_id
        case "relation_cardinality_violated_post_rewrite":
            return name, told.subject_id, told.predicate, told.side, told.observed_count
        case "relation_claim_suppression_collapsed":
            return name, (told.subject_id, told.predicate, told.target_id), told.demoted_claimant
        case "claim_reassigned":
            what = f"{told.scheme}:{told.value}" if told.kind == "addressing" else (told.predicate, told.target_id)
            return name, told.plugin, told.old_subject_id, told.new_subject_id, what
        case _:
            raise AssertionError(name)


class LedgerMatchesModel(RuleBasedStateMachine):
    """The commands on a state, beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.state = empty_state()
        self.made = 0
        self.done: list[tuple[Command, int, list[Happening]]] = []
        self._execute(SetCatalogue(catalogue=CATALOGUE))

    def _execute(self, command: Command) -> CommandOutcome:
        at_ms = 1000 + len(self.done)
        outcome = run(self.state, command, at_ms)
        if outcome.is_changed:
            self.done.append((command, at_ms, list(outcome.happenings)))
        return outcome

    def do(self, command: Command, expected: Told | Refused) -> None:
        """Execute a command; it tells what the model tells, or is refused with the same error and changes nothing."""
        before = self.frozen()
        rehearsed = self._rehearsed(command)
        assert self.frozen() == before
        outcome: CommandOutcome | Refused
        try:
            outcome = self._execute(command)
        except LedgerError as error:
            outcome = Refused(error.code)
        if rehearsed is not None:
            result = None if isinstance(outcome, Refused) or outcome.is_changed else outcome.result
            assert rehearsed == (
                outcome if isinstance(outcome, Refused) else Rehearsal(would_change=outcome.is_changed, result=result)
            )
        if isinstance(outcome, Refused):
            assert outcome == expected
            assert self.frozen() == before
            return
        assert [brief(each) for each in outcome.happenings] == expected
        assert outcome.is_changed or (not outcome.happenings and self.frozen() == before)
        assert all(each.at_ms == outcome.happenings[0].at_ms for each in outcome.happenings)

    def _rehearsed(self, command: Command) -> Rehearsal | Refused | None:
        """What a rehearsal says of a command; none if it cannot be rehearsed."""
        if not command.is_rehearsable:
            return None
        try:
            return rehearse(command, self.state, 1000 + len(self.done))
        except LedgerError as error:
            return Refused(error.code)

    def frozen(self) -> list[Any]:
        return [part.freeze() for part in self.state.parts]

    def new_id(self) -> str:
        self.made += 1
        return f"s{self.made * 7919 % 1000:03}-{self.made}"  # so that later ids may sort first

    # Most of what is drawn is sound, or nothing would ever be there to be merged; one in ten is whatever comes.

    def live(self, pick: int, kind: str | None = None) -> str:
        """One of the live subjects of a type; or a retired id, or one of another type."""
        ids = sorted(each for each, its_kind in self.model.types.items() if kind in (None, its_kind))
        if pick % 10 == 0:
            ids = sorted({*self.model.types, *self.model.retired})
        return ids[pick // 10 % len(ids)] if ids else "nobody"

    def a_name(self, pick: int) -> tuple[str, str]:
        """A name of a subject, and the plugin whose it is; or of another."""
        names = sorted(self.model.names)
        if pick % 10 == 0 or not names:
            return NAMES[pick // 10 % len(NAMES)], "p2"
        name = names[pick // 10 % len(names)]
        return name, self.model.names[name][1]

    def an_edge(self, pick: int) -> tuple[Edge, str]:
        """A relation, and one of the plugins that claim it; or another."""
        edges = sorted(self.model.relations)
        if not edges:
            return ("nobody", "like", "nobody"), "p1"
        edge = edges[pick // 10 % len(edges)]
        claimants = self.model.relations[edge].claimants
        return edge, "p2" if pick % 10 == 0 else claimants[pick % len(claimants)]

    @initialize(
        kinds=st.lists(st.sampled_from(TYPES), min_size=5, max_size=7),
        edges=st.lists(st.tuples(PLUGINS, PICK, st.sampled_from(list(PREDICATES)), PICK), min_size=10, max_size=20),
    )
    def some_subjects_and_relations(self, kinds: list[str], edges: list[tuple[str, int, str, int]]) -> None:
        for number, kind in enumerate(kinds):
            self._announce(f"p{number % 3 + 1}", kind, NAMES[2 * number : 2 * number + 2])
        for plugin, a, predicate, b in edges:
            self._claim({plugin}, a, predicate, b)

    @rule(plugin=PLUGINS, kind=st.sampled_from(TYPES), names=st.lists(NAME, min_size=1, max_size=3))
    def announce(self, plugin: str, kind: str, names: list[str]) -> None:
        self._announce(plugin, kind, names)

    @rule(plugin=PLUGINS, pick=PICK, name=NAME)
    def announce_a_further_name(self, plugin: str, pick: int, name: str) -> None:
        first, _ = self.a_name(pick)
        owner = self.model.id_of(first)
        self._announce(plugin, self.model.types[owner] if owner else "track", [first, name])

    def _announce(self, plugin: str, kind: str, names: list[str]) -> None:
        new_id = self.new_id()
        command = AnnounceSubject(
            plugin=plugin, subject_type=kind, addressings=tuple(map(addressing, names)), new_id=new_id
        )
        self.do(command, self.model.announce(plugin, kind, tuple(names), new_id))

    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        name, plugin = self.a_name(pick)
        self.do(RetractAddressing(plugin=plugin, addressing=addressing(name)), self.model.retract(plugin, name))

    @rule(pick=PICK, state=st.sampled_from([None, {"on": True}, 3]))
    def update_state(self, pick: int, state: Any) -> None:
        name, plugin = self.a_name(pick)
        command = UpdateSubjectState(plugin=plugin, subject=addressing(name), state=state)
        self.do(command, self.model.update_state(plugin, name, state))

    @rule(plugins=st.sets(PLUGINS, min_size=1), a=PICK, predicate=PREDICATE, b=PICK)
    def claim(self, plugins: set[str], a: int, predicate: str, b: int) -> None:
        self._claim(plugins, a, predicate, b)

    def _claim(self, plugins: set[str], a: int, predicate: str, b: int) -> None:
        kinds = TYPES if predicate in TYPED else (None, None)
        source, target = self.live(a, kinds[0]), self.live(b, kinds[1])
        for plugin in sorted(plugins):
            command = ClaimRelation(plugin=plugin, source=source, predicate=predicate, target=target)
            self.do(command, self.model.claim(plugin, source, predicate, target))

    @rule(plugin=PLUGINS, a=PICK, b=PICK)
    def claim_by_names(self, plugin: str, a: int, b: int) -> None:
        source, target = self.a_name(a)[0], self.a_name(b)[0]
        command = ClaimRelation(plugin=plugin, source=addressing(source), predicate="like", target=addressing(target))
        self.do(command, self.model.claim(plugin, source, "like", target))

    @rule(pick=PICK)
    def unclaim(self, pick: int) -> None:
        (source, predicate, target), plugin = self.an_edge(pick)
        command = RetractRelation(plugin=plugin, source=source, predicate=predicate, target=target)
        self.do(command, self.model.unclaim(plugin, source, predicate, target))

    @rule(pick=PICK, reason=REASON)
    def suppress(self, pick: int, reason: str) -> None:
        (source, predicate, target), _ = self.an_edge(pick)
        command = SuppressRelation(admin="adm", source=source, predicate=predicate, target=target, reason=reason)
        self.do(command, self.model.suppress(source, predicate, target, reason))

    @rule(pick=PICK)
    def unsuppress(self, pick: int) -> None:
        (source, predicate, target), _ = self.an_edge(pick)
        command = UnsuppressRelation(admin="adm", source=source, predicate=predicate, target=target)
        self.do(command, self.model.unsuppress(source, predicate, target))

    @rule(pick=PICK)
    def force_retract(self, pick: int) -> None:
        name, plugin = self.a_name(pick)
        command = ForceRetractAddressing(admin="adm", target_plugin=plugin, addressing=addressing(name), is_loaded=True)
        self.do(command, self.model.force_retract(plugin, name))

    @rule(pick=PICK)
    def force_unclaim(self, pick: int) -> None:
        (source, predicate, target), plugin = self.an_edge(pick)
        command = ForceRetractRelation(
            admin="adm", target_plugin=plugin, source=source, predicate=predicate, target=target, is_loaded=True
        )
        self.do(command, self.model.force_unclaim(plugin, source, predicate, target))

    @rule(a=PICK, b=PICK, kind=st.sampled_from(TYPES))
    def merge(self, a: int, b: int, kind: str) -> None:
        first, second = self.live(a, kind), self.live(b, kind)
        if a % 3 == 0 and first in self.model.order:
            first = self.model.order[first][0]
        self._merge(first, second)

    @rule(pick=PICK, other=PICK, plugins=st.sets(PLUGINS, min_size=1), hidden=st.integers(0, 3), is_first=st.booleans())
    def merge_of_two_with_the_same_relation(
        self, pick: int, other: int, plugins: set[str], hidden: int, is_first: bool
    ) -> None:
        (source, predicate, target), _ = self.an_edge(pick)
        if source not in self.model.types:
            return
        twin = self.live(10 * other + 1, self.model.types[source])
        for plugin in sorted(plugins):
            command: Command = ClaimRelation(plugin=plugin, source=twin, predicate=predicate, target=target)
            self.do(command, self.model.claim(plugin, twin, predicate, target))
        for number, subject in enumerate((source, twin)):
            if hidden & (number + 1):
                command = SuppressRelation(
                    admin="adm", source=subject, predicate=predicate, target=target, reason=f"{number}"
                )
                self.do(command, self.model.suppress(subject, predicate, target, f"{number}"))
        self._merge(*(source, twin) if is_first else (twin, source))

    def _merge(self, first: str, second: str) -> None:
        new_id = self.new_id()
        command = MergeSubjects(admin="adm", a=subject_name(first), b=subject_name(second), new_id=new_id)
        self.do(command, self.model.merge(first, second, new_id))

    @rule(pick=PICK, cuts=st.lists(st.integers(0, 2), min_size=4, max_size=4), plan=st.data())
    def split(self, pick: int, cuts: list[int], plan: st.DataObject) -> None:
        """Into as many groups as the cuts give, which need not be two or more."""
        source = self.live(pick)
        names = self.model.order.get(source, ["n:0"])
        numbers = [cuts[place % 4] for place in range(len(names))]
        groups = tuple(
            tuple(name for name, number in zip(names, numbers, strict=True) if number == group)
            for group in sorted(set(numbers))
        )
        new_ids = tuple(self.new_id() for _ in groups)
        strategy = plan.draw(st.sampled_from(SplitStrategy))
        edges = sorted(edge for edge in self.model.relations if source in (edge[0], edge[2]))
        goes: dict[Edge, int] = {}
        if strategy is SplitStrategy.EXPLICIT:
            for edge in edges:
                index = plan.draw(st.one_of(st.none(), st.integers(0, len(groups) - 1)))
                if index is not None:
                    goes[edge] = index
        command = SplitSubject(
            admin="adm",
            source=source,
            partition=tuple(tuple(map(addressing, group)) for group in groups),
            new_ids=new_ids,
            strategy=strategy,
            assignments=tuple(
                RelationAssignment(source=s, predicate=p, target=t, target_new_id_index=index)
                for (s, p, t), index in goes.items()
            ),
        )
        expected = self.model.split(
            source, groups, goes if strategy is SplitStrategy.EXPLICIT else strategy.value, new_ids
        )
        self.do(command, expected)

    @precondition(lambda self: self.model.types)
    @rule(pick=PICK, to_type=st.sampled_from(TYPES))
    def migrate(self, pick: int, to_type: str) -> None:
        source, new_id = self.live(10 * pick + 1), self.new_id()
        self.do(
            MigrateForTest(subject=source, to_type=to_type, new_id=new_id), self.model.migrate(source, to_type, new_id)
        )

    @rule()
    def restart_from_a_snapshot(self) -> None:
        before = self.frozen()
        self.state = LedgerState(*(thawed(part) for part in self.state.parts))
        assert self.frozen() == before

    @invariant()
    def subjects_are_the_same(self) -> None:
        subjects, model = self.state.part(Subjects), self.model
        records = [subjects.require(canonical_id) for canonical_id in subjects.ids.after(None, 1000)]
        assert [record.canonical_id for record in records] == sorted(model.types)
        assert {record.canonical_id: record.subject_type for record in records} == model.types
        assert {
            record.canonical_id: [str(held.addressing) for held in record.addressings] for record in records
        } == model.order
        assert {record.canonical_id: record.state for record in records if record.state is not None} == {
            key: value for key, value in model.states.items() if value is not None
        }
        held = {
            str(held.addressing): (record.canonical_id, held.claimant)
            for record in records
            for held in record.addressings
        }
        assert held == model.names
        assert [str(Addressing(*key)) for key in subjects.addressings.after(None, 1000)] == sorted(model.names)
        for name in NAMES:
            assert subjects.find(addressing(name)) == model.id_of(name)
        for plugin in ("p1", "p2", "p3"):
            claimed = {name for name, (_, claimant) in model.names.items() if claimant == plugin}
            assert set(map(str, subjects.claimed_by(plugin))) == claimed
        assert {kind: count for kind, count in subjects.type_counts().items() if count} == {
            kind: count for kind in TYPES if (count := list(model.types.values()).count(kind))
        }

    @invariant()
    def no_id_is_used_twice(self) -> None:
        subjects = self.state.part(Subjects)
        for old_id, (kind, new_ids) in self.model.retired.items():
            alias = subjects.alias(old_id)
            assert alias is not None
            assert (alias.kind, alias.new_ids) == (kind, new_ids)
            assert subjects.get(old_id) is None

    @invariant()
    def relations_are_the_same(self) -> None:
        relations, model = self.state.part(Relations), self.model
        edges = list(relations.triples.after(None, 1000))
        assert edges == sorted(model.relations)
        for edge, expected in model.relations.items():
            record = relations.get(edge)
            assert record is not None
            assert list(record.claimants) == expected.claimants
            assert (record.suppression and record.suppression.reason) == expected.hidden
        for subject in [*model.types, *model.retired]:
            assert relations.touching(subject) == [edge for edge in edges if subject in (edge[0], edge[2])]
            for predicate in PREDICATES:
                targets, sources = model.targets(subject, predicate), model.sources(subject, predicate)
                assert relations.forward_count(subject, predicate) == len(targets)
                assert relations.inverse_count(subject, predicate) == len(sources)
                assert relations.neighbours(subject, predicate) == targets
                assert relations.neighbours(subject, predicate, WalkDirection.INVERSE) == sources
                assert relations.neighbours(subject, predicate, WalkDirection.BOTH) == sorted({*targets, *sources})
        for plugin in ("p1", "p2", "p3"):
            count = sum(plugin in relation.claimants for relation in model.relations.values())
            assert relations.claim_count(plugin) == count

    @invariant()
    def ledgers_are_the_same(self) -> None:
        assert len(self.state.part(AdminLedger)) == self.model.admin_count
        pending = [conflict for conflict in self.state.part(Conflicts).all() if conflict.ended is None]
        assert [
            (conflict.plugin, tuple(map(str, conflict.addressings)), conflict.canonical_ids) for conflict in pending
        ] == self.model.open_conflicts

    def teardown(self) -> None:
        self.restart_from_a_snapshot()
        self.subjects_are_the_same()
        self.relations_are_the_same()
        again = empty_state()
        for command, at_ms, happenings in self.done:
            assert list(run(again, command, at_ms).happenings) == happenings
        assert [part.freeze() for part in again.parts] == self.frozen()


TestLedgerMatchesModel = LedgerMatchesModel.TestCase
