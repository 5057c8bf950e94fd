"""
Registry and graph as plainly as they can be written: lists and dicts that are searched from end to end.

Each operation answers what is told, as tuples of a variant's name and what matters in it, or the code of the error.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

Told = list[tuple[Any, ...]]
Edge = tuple[str, str, str]

TYPES: Final = ("track", "album")
PREDICATES: Final = {"album_of": (1, 9), "opens": (1, 1), "like": (9, 9), "next": (1, 1)}
"""In the catalogue's order: how many targets a source may have, and how many sources a target."""
TYPED: Final = ("album_of", "opens")
"""Predicates from a track to an album; the others take anything."""


class Relation:
    """A relation."""

    def __init__(self, claimants: list[str], hidden: str | None = None) -> None:
        self.claimants = claimants
        self.hidden = hidden
        """Why it is hidden."""


class Refused(NamedTuple):
    """The code of an error."""

    code: str


class Model:
    """All subjects, relations and retired ids."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.names: dict[str, tuple[str, str]] = {}
        """Whose an addressing is: subject and plugin."""
        self.order: dict[str, list[str]] = {}
        """The addressings of a subject, in their order."""
        self.states: dict[str, Any] = {}
        self.relations: dict[Edge, Relation] = {}
        self.retired: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.admin_count = 0
        self.open_conflicts: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []

    def id_of(self, name: str) -> str | None:
        """The subject of a name: ``n:...`` is an addressing, all else an id."""
        if name.startswith("n:"):
            return self.names[name][0] if name in self.names else None
        return name if name in self.types else None

    # What plugins say

    def announce(self, plugin: str, kind: str, names: tuple[str, ...], new_id: str) -> Told | Refused:
        names = tuple(dict.fromkeys(names))
        owners = sorted({self.names[name][0] for name in names if name in self.names})
        if len(owners) > 1:
            conflict = (plugin, names, tuple(owners))
            if conflict in self.open_conflicts:
                return []
            self.open_conflicts.append(conflict)
            return [("subject_conflict_detected", plugin, tuple(owners))]
        told: Told = []
        if not owners:
            self.types[new_id], self.order[new_id] = kind, []
            owners = [new_id]
            told.append(("subject_announced", plugin, new_id, kind, names))
        elif self.types[owners[0]] != kind:
            return Refused("ledger.subject_type_mismatch")
        for name in names:
            if name not in self.names:
                self.names[name] = (owners[0], plugin)
                self.order[owners[0]].append(name)
                if owners != [new_id]:
                    told.append(("subject_addressing_added", plugin, owners[0], name))
        return told

    def retract(self, plugin: str, name: str, by: str | None = None) -> Told | Refused:
        if name not in self.names:
            return Refused("ledger.unknown_subject")
        subject, claimant = self.names[name]
        if claimant != plugin:
            return Refused("ledger.not_claimant")
        del self.names[name]
        self.order[subject].remove(name)
        if self.order[subject]:
            return [] if by else [("subject_addressing_removed", plugin, subject, name)]
        told: Told = [("subject_forgotten", by or plugin, subject)]
        self._retire(subject, "tombstone")
        for edge in sorted(edge for edge in self.relations if subject in (edge[0], edge[2])):
            del self.relations[edge]
            told.append(("relation_forgotten", by or plugin, edge, "subject_cascade"))
        self._settle()
        return told

    def update_state(self, plugin: str, name: str, state: Any) -> Told | Refused:
        subject = self.id_of(name)
        if subject is None:
            return Refused("ledger.unknown_subject")
        if plugin not in [self.names[each][1] for each in self.order[subject]]:
            return Refused("ledger.not_claimant")
        told: Told = [("subject_state_changed", subject, self.states.get(subject), state)]
        self.states[subject] = state
        return told

    def claim(self, plugin: str, source: str, predicate: str, target: str) -> Told | Refused:
        if predicate not in PREDICATES:
            return Refused("ledger.unknown_predicate")
        ends = self.id_of(source), self.id_of(target)
        if ends[0] is None or ends[1] is None:
            return Refused("ledger.unknown_subject")
        if predicate in TYPED and (self.types[ends[0]], self.types[ends[1]]) != TYPES:
            return Refused("ledger.invalid")
        edge = (ends[0], predicate, ends[1])
        relation = self.relations.get(edge)
        if relation is not None:
            if plugin in relation.claimants:
                return []
            relation.claimants.append(plugin)
            return [("relation_claim_added", plugin, edge)]
        self.relations[edge] = Relation([plugin])
        return [("relation_asserted", plugin, edge)] + [
            ("relation_cardinality_violation", edge, side, count)
            for side, count, bound in (
                ("source", len(self.targets(edge[0], predicate)), PREDICATES[predicate][0]),
                ("target", len(self.sources(edge[2], predicate)), PREDICATES[predicate][1]),
            )
            if bound == 1 and count > 1
        ]

    def unclaim(self, plugin: str, source: str, predicate: str, target: str) -> Told | Refused:
        if predicate not in PREDICATES:
            return Refused("ledger.unknown_predicate")
        ends = self.id_of(source), self.id_of(target)
        if ends[0] is None or ends[1] is None:
            return Refused("ledger.unknown_subject")
        edge = (ends[0], predicate, ends[1])
        if edge not in self.relations:
            return Refused("ledger.unknown_relation")
        if plugin not in self.relations[edge].claimants:
            return Refused("ledger.not_claimant")
        return self._unclaim(edge, plugin, plugin) or [("relation_claim_retracted", plugin, edge)]

    def _unclaim(self, edge: Edge, plugin: str, by: str) -> Told:
        self.relations[edge].claimants.remove(plugin)
        if self.relations[edge].claimants:
            return []
        del self.relations[edge]
        return [("relation_forgotten", by, edge, "claims_retracted")]

    # What administrators do

    def force_retract(self, plugin: str, name: str) -> Told | Refused:
        if name not in self.names or self.names[name][1] != plugin:
            return []
        self.admin_count += 1
        subject = self.names[name][0]
        cascade = self.retract(plugin, name, by="adm")
        assert not isinstance(cascade, Refused)
        return [("subject_addressing_forced_retract", plugin, subject, name), *cascade]

    def force_unclaim(self, plugin: str, source: str, predicate: str, target: str) -> Told | Refused:
        edge = self._edge(source, predicate, target)
        if edge is None or plugin not in self.relations[edge].claimants:
            return []
        self.admin_count += 1
        return [("relation_claim_forced_retract", plugin, edge), *self._unclaim(edge, plugin, "adm")]

    def suppress(self, source: str, predicate: str, target: str, reason: str) -> Told | Refused:
        edge = self._edge(source, predicate, target)
        if edge is None or self.relations[edge].hidden == reason:
            return []
        self.admin_count += 1
        before, self.relations[edge].hidden = self.relations[edge].hidden, reason
        if before is None:
            return [("relation_suppressed", edge, reason)]
        return [("relation_suppression_reason_updated", edge, before, reason)]

    def unsuppress(self, source: str, predicate: str, target: str) -> Told | Refused:
        edge = self._edge(source, predicate, target)
        if edge is None or self.relations[edge].hidden is None:
            return []
        self.admin_count += 1
        self.relations[edge].hidden = None
        return [("relation_unsuppressed", edge)]

    def merge(self, a: str, b: str, new_id: str) -> Told | Refused:
        sources = self.id_of(a), self.id_of(b)
        if sources[0] is None or sources[1] is None:
            return Refused("ledger.merge_source_unknown")
        if sources[0] == sources[1]:
            return Refused("ledger.merge_self_target")
        if self.types[sources[0]] != self.types[sources[1]]:
            return Refused("ledger.merge_cross_type")
        self.admin_count += 1
        kind, names = self.types[sources[0]], self.order[sources[0]] + self.order[sources[1]]
        moved_names: Told = []
        for source in (sources[0], sources[1]):
            moved_names += [
                ("claim_reassigned", self.names[name][1], source, new_id, name) for name in self.order[source]
            ]
            self._retire(source, "merged", new_id)
        self._make(new_id, kind, names)
        told: Told = [("subject_merged", (sources[0], sources[1]), new_id)]
        rewritten: Told = []
        collapsed: Told = []
        moved: Told = []
        touched = {new_id}
        for source in (sources[0], sources[1]):
            for edge, relation in self._take(source):
                self._move(edge, relation, source, new_id, rewritten, collapsed, moved, touched)
        self._settle()
        return told + rewritten + self._violations(touched) + collapsed + moved + moved_names

    def split(
        self, name: str, groups: tuple[tuple[str, ...], ...], plan: dict[Edge, int] | str, new_ids: tuple[str, ...]
    ) -> Told | Refused:
        source = self.id_of(name)
        if source is None:
            return Refused("ledger.unknown_subject")
        named = [each for group in groups for each in group]
        if len(groups) < 2 or not all(groups) or sorted(named) != sorted(self.order[source]):
            return Refused("ledger.invalid")
        self.admin_count += 1
        kind = self.types[source]
        moved_names: Told = [
            ("claim_reassigned", self.names[each][1], source, new_id, each)
            for new_id, group in zip(new_ids, groups, strict=True)
            for each in group
        ]
        self._retire(source, "split", *new_ids)
        for new_id, group in zip(new_ids, groups, strict=True):
            self._make(new_id, kind, list(group))
        rewritten: Told = []
        ambiguous: Told = []
        moved: Told = []
        touched = set(new_ids)
        for edge, relation in self._take(source):
            if plan == "to_first":
                goes_to = new_ids[:1]
            elif isinstance(plan, dict) and edge in plan:
                goes_to = (new_ids[plan[edge]],)
            else:
                goes_to = new_ids
                if isinstance(plan, dict):
                    ambiguous.append(("relation_split_ambiguous", edge[1], edge[2] if edge[0] == source else edge[0]))
            for new_id in goes_to:
                copy = Relation(list(relation.claimants), relation.hidden)
                self._move(edge, copy, source, new_id, rewritten, [], moved, touched)
        self._settle()
        told: Told = [("subject_split", source, new_ids)]
        return told + rewritten + ambiguous + self._violations(touched) + moved + moved_names

    def migrate(self, source: str, to_type: str, new_id: str) -> Told:
        moved_names: Told = [
            ("claim_reassigned", self.names[name][1], source, new_id, name) for name in self.order[source]
        ]
        names, state = self.order[source], self.states.pop(source, None)
        self._retire(source, "type_migrated", new_id)
        self._make(new_id, to_type, names)
        if state is not None:
            self.states[new_id] = state
        rewritten: Told = []
        moved: Told = []
        for edge, relation in self._take(source):
            self._move(edge, relation, source, new_id, rewritten, [], moved, set())
        self.open_conflicts = [
            (plugin, each, tuple(sorted(new_id if old == source else old for old in ids)))
            for plugin, each, ids in self.open_conflicts
        ]
        return [("subject_migrated", source, new_id), *rewritten, *moved, *moved_names]

    # What is to be seen

    def targets(self, source: str, predicate: str) -> list[str]:
        return sorted(
            edge[2]
            for edge, relation in self.relations.items()
            if edge[:2] == (source, predicate) and relation.hidden is None
        )

    def sources(self, target: str, predicate: str) -> list[str]:
        return sorted(
            edge[0]
            for edge, relation in self.relations.items()
            if edge[1:] == (predicate, target) and relation.hidden is None
        )

    # Parts of the above

    def _edge(self, source: str, predicate: str, target: str) -> Edge | None:
        edge = (self.id_of(source), predicate, self.id_of(target))
        return next((each for each in self.relations if each == edge), None)

    def _retire(self, subject: str, kind: str, *new_ids: str) -> None:
        self.retired[subject] = (kind, new_ids)
        del self.types[subject]
        del self.order[subject]
        self.states.pop(subject, None)

    def _make(self, new_id: str, kind: str, names: list[str]) -> None:
        self.types[new_id], self.order[new_id] = kind, names
        for name in names:
            self.names[name] = (new_id, self.names[name][1])

    def _take(self, subject: str) -> list[tuple[Edge, Relation]]:
        edges = sorted(edge for edge in self.relations if subject in (edge[0], edge[2]))
        return [(edge, self.relations.pop(edge)) for edge in edges]

    def _move(
        self,
        edge: Edge,
        relation: Relation,
        old_id: str,
        new_id: str,
        rewritten: Told,
        collapsed: Told,
        moved: Told,
        touched: set[str],
    ) -> None:
        new = (new_id if edge[0] == old_id else edge[0], edge[1], new_id if edge[2] == old_id else edge[2])
        other = new[2] if edge[0] == old_id else new[0]
        rewritten.append(("relation_rewritten", edge[1], old_id, new_id, other))
        moved += [("claim_reassigned", plugin, old_id, new_id, (edge[1], other)) for plugin in relation.claimants]
        touched.add(other)
        there = self.relations.get(new)
        if there is None:
            self.relations[new] = relation
            return
        if (there.hidden is None) != (relation.hidden is None):
            visible = there if there.hidden is None else relation
            collapsed += [("relation_claim_suppression_collapsed", new, plugin) for plugin in visible.claimants]
        there.hidden = relation.hidden if there.hidden is None else there.hidden
        there.claimants += [plugin for plugin in relation.claimants if plugin not in there.claimants]

    def _violations(self, touched: set[str]) -> Told:
        return [
            ("relation_cardinality_violated_post_rewrite", subject, predicate, side, count)
            for subject in sorted(touched)
            for predicate, (source_bound, target_bound) in PREDICATES.items()
            for side, count, bound in (
                ("target", len(self.sources(subject, predicate)), target_bound),
                ("source", len(self.targets(subject, predicate)), source_bound),
            )
            if bound == 1 and count > 1
        ]

    def _settle(self) -> None:
        self.open_conflicts = [each for each in self.open_conflicts if len([i for i in each[2] if i in self.types]) > 1]
