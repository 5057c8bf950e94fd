"""The recipe of the ledger's page: page through a list, subscribe since its ``current_seq``, apply what comes. Then the list is right."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from tidings.happenings.bus import Envelope
from tidings.happenings.subscription import HappeningSubscription
from tidings.happenings.variants import (
    ClaimReassigned,
    CustodyReleased,
    CustodyTaken,
    FactoryInstanceAnnounced,
    HealthStatus,
    RelationAsserted,
    RelationForgotten,
    SubjectAddressingAdded,
    SubjectAddressingForcedRetract,
    SubjectAddressingRemoved,
    SubjectAnnounced,
    SubjectForgotten,
    SubjectMerged,
    SubjectMigrated,
    SubjectSplit,
)
from tidings.ledger import Ledger, Manifest, open_ledger
from tidings.ledger.catalogue import SetCatalogue, parse_catalogue
from tidings.ledger.errors import LedgerError
from tidings.ledger.factories import addressing_of
from tidings.ledger.grammar import RenameStrategy
from tidings.ledger.relations import Relations
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .support import CATALOGUE, OUTPUTS, PLAYBACK, settled

SMALLER: Final = parse_catalogue(
    'schema_version = 1\n[[subjects]]\nname = "album"\n'
    '[[relation]]\npredicate = "like"\nsource_type = "*"\ntarget_type = "*"\n'
)


class Lists:
    """Subjects, names, relations and custodies, kept up to date from happenings alone, but for relations of ids that are new."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.subjects: set[str] = set()
        self.names: dict[tuple[str, str], str] = {}
        self.relations: set[tuple[str, str, str]] = set()
        self.custodies: set[tuple[str, str]] = set()
        self.applied: set[str] = set()

    async def begin(self) -> HappeningSubscription:
        """Read all pages, two items each, and subscribe since the first."""
        since: int | None = None
        show = self._ledger.projections
        for pages, add in (
            (show.list_subjects, self._add_subject),
            (show.list_addressings, self._add_name),
            (show.list_relations, self._add_relation),
            (show.list_custodies, self._add_custody),
        ):
            cursor: str | None = None
            while True:
                page: Any = await pages(cursor, 2)
                since = page.current_seq if since is None else since
                for item in page.items:
                    add(item)
                if (cursor := page.next_cursor) is None:
                    break
        return self._ledger.happenings.subscribe(since=since)

    def _add_subject(self, record: Any) -> None:
        self.subjects.add(record.canonical_id)

    def _add_relation(self, record: Any) -> None:
        self.relations.add(tuple(record.triple))

    def _add_name(self, row: Any) -> None:
        scheme, value, canonical_id = row
        self.names[scheme, value] = canonical_id

    def _add_custody(self, record: Any) -> None:
        if record.shelf is not None:
            self.custodies.add((record.plugin, record.handle_id))

    async def apply(self, envelope: Envelope) -> None:
        """Follow one happening."""
        self.applied.add(envelope.happening.variant)
        match envelope.happening:
            case SubjectAnnounced(canonical_id=subject, addressings=names):
                self.subjects.add(subject)
                self.names |= {(each.scheme, each.value): subject for each in names}
            case FactoryInstanceAnnounced(canonical_id=subject, plugin=plugin, instance_id=instance):
                self.subjects.add(subject)
                self.names[addressing_of(plugin, instance)] = subject
            case SubjectAddressingAdded(canonical_id=subject, scheme=scheme, value=value):
                self.names[scheme, value] = subject
            case (
                SubjectAddressingRemoved(scheme=scheme, value=value)
                | SubjectAddressingForcedRetract(scheme=scheme, value=value)
            ):
                self.names.pop((scheme, value), None)
            case ClaimReassigned(kind="addressing", scheme=str(scheme), value=str(value), new_subject_id=subject):
                self.names[scheme, value] = subject
            case SubjectForgotten(canonical_id=subject):
                self.subjects.discard(subject)
                self.names = {name: owner for name, owner in self.names.items() if owner != subject}
            case SubjectMerged(source_ids=old_ids, new_id=new_id):
                await self._replace(old_ids, (new_id,))
            case SubjectMigrated(old_id=old_id, new_id=new_id):
                await self._replace((old_id,), (new_id,))
            case SubjectSplit(source_id=old_id, new_ids=new_ids):
                await self._replace((old_id,), new_ids)
            case RelationAsserted(source_id=source, predicate=predicate, target_id=target):
                self.relations.add((source, predicate, target))
            case RelationForgotten(source_id=source, predicate=predicate, target_id=target):
                self.relations.discard((source, predicate, target))
            case CustodyTaken(plugin=plugin, handle_id=handle_id):
                self.custodies.add((plugin, handle_id))
            case CustodyReleased(plugin=plugin, handle_id=handle_id):
                self.custodies.discard((plugin, handle_id))

    async def _replace(self, old_ids: tuple[str, ...], new_ids: tuple[str, ...]) -> None:
        self.subjects.difference_update(old_ids)
        self.subjects.update(new_ids)
        self.relations = {each for each in self.relations if not {each[0], each[2]} & set(old_ids)}
        for new_id in new_ids:
            touching = await self._ledger.read(
                lambda state, new_id=new_id: state.part(Relations).touching(new_id)  # type: ignore[misc]
            )
            self.relations.update(tuple(each) for each in touching)

    def shown(self) -> dict[str, Any]:
        """All of it, in order."""
        return {
            "subjects": sorted(self.subjects),
            "names": sorted(self.names.items()),
            "relations": sorted(self.relations),
            "custodies": sorted(self.custodies),
        }


class Household:
    """Plugins and an administrator that do something at random."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger = ledger
        self.chance = random.Random(seed)
        self.plugins = [
            ledger.plugin("org.one", manifest=Manifest(shelves=(PLAYBACK,))),
            ledger.plugin("org.two", manifest=Manifest(shelves=(OUTPUTS,))),
        ]
        self.admin = ledger.admin("org.admin")
        self.handles = 0

    def name(self) -> tuple[str, str]:
        """One of a few names."""
        return ("n", str(self.chance.randrange(12)))

    async def act(self) -> None:
        """Do one thing; what is refused is no matter."""
        one, other, plugin = self.name(), self.name(), self.chance.choice(self.plugins)
        [shelf] = plugin.manifest.shelves
        match self.chance.randrange(12):
            case 0 | 1 | 2:
                await plugin.announce_subject("track", [one, other])
            case 3:
                await plugin.retract_addressing(one)
            case 4 | 5:
                await plugin.claim_relation(one, "like", other)
            case 6:
                await plugin.retract_relation(one, "like", other)
            case 7:
                await self.admin.merge_subjects(one, other)
            case 8:
                await self.admin.split_subject(one, [[one], [other]])
            case 9:
                await self.admin.force_retract_addressing(plugin.name, one)
            case 10:
                self.handles += 1
                await plugin.take_custody(shelf, "play", handle_id=str(self.handles))
                await plugin.report_custody_state(str(self.handles), HealthStatus.HEALTHY)
                if self.handles % 2:
                    await plugin.release_custody(str(self.handles))
            case _:
                if self.chance.random() < 0.5:
                    await plugin.announce_instance(one[1])
                else:
                    await plugin.retract_instance(one[1])

    async def go_on(self, count: int) -> None:
        """Do so many things."""
        for _ in range(count):
            try:
                await self.act()
            except LedgerError:
                continue


@pytest.mark.req("H79")
@pytest.mark.parametrize("seed", range(4))
async def test_a_list_is_kept_up_to_date(seed: int) -> None:
    """
    Whatever is made, renamed, related, merged, split, migrated and forgotten: who follows the recipe has what a new reader of the pages has.
    """
    clock = VirtualClock()
    async with await open_ledger(MemoryLog(clock=clock), catalogue=CATALOGUE, clock=clock) as ledger:
        household = Household(ledger, seed)
        await household.go_on(60)
        lists = Lists(ledger)
        with await lists.begin() as changes:
            for _ in range(3):
                await household.go_on(60)
                for envelope in await settled(ledger, changes):
                    await lists.apply(envelope)
                fresh = Lists(ledger)
                (await fresh.begin()).close()
                assert lists.shown() == fresh.shown()
            await ledger.execute(SetCatalogue(catalogue=SMALLER))
            await ledger.grammar.migrate("track", RenameStrategy(to_type="album"), admin="org.admin")
            for envelope in await settled(ledger, changes):
                await lists.apply(envelope)
            fresh = Lists(ledger)
            (await fresh.begin()).close()
            assert lists.shown() == fresh.shown()
        assert {"relation_asserted", "relation_forgotten", "subject_merged", "subject_migrated"} <= lists.applied
