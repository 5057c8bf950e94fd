"""
Administrators: what may be done to subjects and to the claims of others, as verbs.

    admin = ledger.admin("org.example.curator")
    await admin.merge_subjects(("mpd-path", "/a.flac"), ("spotify", "track:1"), reason="the same recording")

Each leaves an entry in the admin ledger that is there before its happenings are seen. Who may use them is decided where requests come in
(the node's permissions); in a process, whoever holds the ledger may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from tidings.happenings.variants import SplitStrategy

from .admin_ledger import AdminEntry, AdminLedger
from .administration import ForceRetractAddressing, ForceRetractRelation, SuppressRelation, UnsuppressRelation
from .commands import Command
from .conflicts import ClaimEntry, ClaimLog, Conflict, Conflicts
from .merging import MergeSubjects, RelationAssignment, SplitSubject
from .plugins import Named, name_of
from .state import Rehearsed
from .subjects import Addressing

if TYPE_CHECKING:
    from .directory import Plugins
    from .ledger import Ledger


class Admin:
    """
    An administrator; made by ``Ledger.admin``.

    Args:
        name: Under which the admin ledger and happenings have it.
        ledger: Where it acts.
        plugins: The plugins that are loaded.
        is_rehearsal: Only the checks of each verb are made: it is refused, or answers what it does if there is nothing to change, or
            raises ``Rehearsed``.
    """

    def __init__(self, name: str, *, ledger: Ledger, plugins: Plugins, is_rehearsal: bool = False) -> None:
        self.name = name
        self._ledger = ledger
        self._plugins = plugins
        self._is_rehearsal = is_rehearsal

    async def _do(self, command: Command) -> Any:
        if not self._is_rehearsal:
            return await self._ledger.execute(command)
        would_change, result = await self._ledger.rehearse(command)
        if would_change:
            raise Rehearsed
        return result

    async def merge_subjects(self, a: Named, b: Named, *, reason: str | None = None) -> str:
        """
        Make one subject of two of the same type. The old ids stay as aliases.

        Returns:
            The new id.

        Raises:
            MergeSourceUnknown: One of them is not there.
            MergeSelfTarget: Both are the same.
            MergeCrossType: They are of different types.
        """
        merged: str = await self._do(
            MergeSubjects(admin=self.name, a=name_of(a), b=name_of(b), new_id=self._ledger.new_id(), reason=reason)
        )
        return merged

    async def split_subject(
        self,
        source: Named,
        partition: Iterable[Iterable[tuple[str, str]]],
        *,
        strategy: SplitStrategy = SplitStrategy.TO_BOTH,
        assignments: Iterable[RelationAssignment] = (),
        reason: str | None = None,
    ) -> tuple[str, ...]:
        """
        Make several subjects of one. The old id stays as an alias of all.

        Args:
            source: The subject.
            partition: The addressings of each new subject; together all that the old one has.
            strategy: Where its relations go.
            assignments: With ``explicit``, where each goes. One that is left out goes to all, which is told.
            reason: Why.

        Returns:
            The new ids, in the order of the partition.

        Raises:
            UnknownSubject: There is no such subject.
            SplitTargetIndexOutOfBounds: An assignment names a group that there is not.
            InvalidCommand: The partition does not fit.
        """
        groups = tuple(tuple(Addressing.of("partition", each) for each in group) for group in partition)
        split: tuple[str, ...] = await self._do(
            SplitSubject(
                admin=self.name,
                source=name_of(source),
                partition=groups,
                new_ids=tuple(self._ledger.new_id() for _ in groups),
                strategy=SplitStrategy(strategy),
                assignments=tuple(assignments),
                reason=reason,
            )
        )
        return split

    async def force_retract_addressing(
        self, target_plugin: str, addressing: tuple[str, str], *, reason: str | None = None
    ) -> Literal["addressing_removed", "subject_forgotten", "not_found"]:
        """
        Take another plugin's addressing back.

        Raises:
            TargetPluginUnknown: No such plugin is loaded, and none of that name claims anything.
        """
        done: Literal["addressing_removed", "subject_forgotten", "not_found"] = await self._do(
            ForceRetractAddressing(
                admin=self.name,
                target_plugin=target_plugin,
                addressing=Addressing.of("addressing", addressing),
                is_loaded=self._plugins.is_loaded(target_plugin),
                reason=reason,
            )
        )
        return done

    async def force_retract_relation(
        self, target_plugin: str, source: Named, predicate: str, target: Named, *, reason: str | None = None
    ) -> Literal["claim_removed", "relation_forgotten", "not_found"]:
        """
        Take another plugin's claim on a relation back.

        Raises:
            TargetPluginUnknown: No such plugin is loaded, and none of that name claims anything.
        """
        done: Literal["claim_removed", "relation_forgotten", "not_found"] = await self._do(
            ForceRetractRelation(
                admin=self.name,
                target_plugin=target_plugin,
                source=name_of(source),
                predicate=predicate,
                target=name_of(target),
                is_loaded=self._plugins.is_loaded(target_plugin),
                reason=reason,
            )
        )
        return done

    async def suppress_relation(
        self, source: Named, predicate: str, target: Named, *, reason: str | None = None
    ) -> Literal["newly_suppressed", "reason_updated", "already_suppressed", "not_found"]:
        """Hide a relation from neighbours and walks, or say otherwise why it is hidden."""
        done: Literal["newly_suppressed", "reason_updated", "already_suppressed", "not_found"]
        done = await self._do(
            SuppressRelation(
                admin=self.name, source=name_of(source), predicate=predicate, target=name_of(target), reason=reason
            )
        )
        return done

    async def unsuppress_relation(
        self, source: Named, predicate: str, target: Named
    ) -> Literal["unsuppressed", "not_suppressed", "not_found"]:
        """Show a hidden relation again."""
        done: Literal["unsuppressed", "not_suppressed", "not_found"] = await self._do(
            UnsuppressRelation(admin=self.name, source=name_of(source), predicate=predicate, target=name_of(target))
        )
        return done

    async def entries(self) -> tuple[AdminEntry, ...]:
        """What this administrator did, oldest first."""
        return await self._ledger.read(lambda state: state.part(AdminLedger).entries(self.name))

    async def conflicts(self) -> tuple[Conflict, ...]:
        """The conflicts that are open, oldest first: subjects that a plugin takes for one."""
        return await self._ledger.read(lambda state: state.part(Conflicts).pending())

    async def claim_log(self) -> tuple[ClaimEntry, ...]:
        """What plugins said about which names are of one thing, and what became of it, oldest first."""
        return await self._ledger.read(lambda state: state.part(ClaimLog).entries())
