"""
What administrators do to subjects and relations, what they and plugins did before, and the names behind tokens.

Each change leaves an entry in the admin ledger, under the name that the caller gave or its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.happenings.variants import SplitStrategy
from tidings.ledger.admin_ledger import AdminLedger, RecordAdminAction
from tidings.ledger.admins import Admin
from tidings.ledger.conflicts import ClaimLog, Conflicts
from tidings.ledger.custody import Custodies
from tidings.ledger.ledger import Ledger
from tidings.ledger.merging import RelationAssignment
from tidings.ledger.paging import clamp_page_size
from tidings.ledger.relations import Relations, Triple
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import Addressing, Subjects
from tidings.wire.steward import answers, requests

from .acting import subject_name
from .claimants import Names, Tokens

if TYPE_CHECKING:
    from .authority import Caller


class Administering:
    """
    The operations of administrators.

    Args:
        ledger: What they change.
        names: How plugins are called.
    """

    def __init__(self, ledger: Ledger, names: Names) -> None:
        self._ledger = ledger
        self._names = names

    async def merge_subjects(self, request: requests.MergeSubjectsRequest, caller: Caller) -> Any:
        new_id = await self._admin(request, caller).merge_subjects(
            subject_name(request.a), subject_name(request.b), reason=request.reason
        )
        return answers.Done(done=request.op, result={"new_id": new_id})

    async def split_subject(self, request: requests.SplitSubjectRequest, caller: Caller) -> Any:
        new_ids = await self._admin(request, caller).split_subject(
            subject_name(request.source),
            [[(each.scheme, each.value) for each in group] for group in request.partition],
            strategy=SplitStrategy(request.strategy),
            assignments=[
                RelationAssignment(
                    source=subject_name(each.source),
                    predicate=each.predicate,
                    target=subject_name(each.target),
                    target_new_id_index=each.target_new_id_index,
                )
                for each in request.assignments
            ],
            reason=request.reason,
        )
        return answers.Done(done=request.op, result={"new_ids": list(new_ids)})

    async def force_retract_addressing(self, request: requests.ForceRetractAddressingRequest, caller: Caller) -> Any:
        named = (request.addressing.scheme, request.addressing.value)
        admin = self._admin(request, caller)
        outcome = await admin.force_retract_addressing(request.target_plugin, named, reason=request.reason)
        return answers.Done(done=request.op, result={"outcome": outcome})

    async def force_retract_relation(self, request: requests.ForceRetractRelationRequest, caller: Caller) -> Any:
        ends = (subject_name(request.source), request.predicate, subject_name(request.target))
        admin = self._admin(request, caller)
        outcome = await admin.force_retract_relation(request.target_plugin, *ends, reason=request.reason)
        return answers.Done(done=request.op, result={"outcome": outcome})

    async def suppress_relation(self, request: requests.SuppressRelationRequest, caller: Caller) -> Any:
        ends = (subject_name(request.source), request.predicate, subject_name(request.target))
        outcome = await self._admin(request, caller).suppress_relation(*ends, reason=request.reason)
        return answers.Done(done=request.op, result={"outcome": outcome})

    async def unsuppress_relation(self, request: requests.UnsuppressRelationRequest, caller: Caller) -> Any:
        ends = (subject_name(request.source), request.predicate, subject_name(request.target))
        outcome = await self._admin(request, caller).unsuppress_relation(*ends)
        return answers.Done(done=request.op, result={"outcome": outcome})

    async def list_admin_entries(self, request: requests.ListAdminEntriesRequest, caller: Caller) -> Any:
        """A page of what administrators did, oldest first."""
        entries, next_after = await self._page(
            request, lambda state: state.part(AdminLedger).entries(request.admin_plugin)
        )
        return answers.AdminEntries(admin_entries=entries, next_after=next_after, current_seq=self._seq)

    async def list_claims(self, request: requests.ListClaimsRequest, caller: Caller) -> Any:
        """A page of the claim log, oldest first."""
        claims, next_after = await self._page(request, lambda state: state.part(ClaimLog).entries(request.claimant))
        return answers.ClaimsPage(claims=claims, next_after=next_after, current_seq=self._seq)

    async def list_conflicts(self, request: requests.ListConflictsRequest, caller: Caller) -> Any:
        found = await self._ledger.read(lambda state: state.part(Conflicts).pending())
        return answers.OpenConflicts(conflicts=self._names.shown(_form(found)), current_seq=self._seq)

    async def _page(
        self,
        request: requests.ListAdminEntriesRequest | requests.ListClaimsRequest,
        entries_of: Callable[[LedgerState], Sequence[Any]],
    ) -> tuple[list[Any], int | None]:
        """Some entries, and how many to pass over to get the next."""
        end = request.after + clamp_page_size(request.page_size)

        def look(state: LedgerState) -> tuple[Sequence[Any], int]:
            entries = entries_of(state)
            return entries[request.after : end], len(entries)

        page, count = await self._ledger.read(look)
        return self._names.shown(_form(page)), end if end < count else None

    @property
    def _seq(self) -> int:
        return self._ledger.happenings.last_seq

    async def resolve_claimants(self, request: requests.ResolveClaimantsRequest, caller: Caller) -> Any:
        """The names behind tokens; those that are not known are left out. Nothing is told of it, and it is on record."""
        found: dict[str, str] = {}
        if isinstance(self._names, Tokens):
            known = await self._ledger.read(lambda state: set(_claimants(state)))
            known.update(each.name for each in self._ledger.plugins.loaded)
            found = dict(self._names.resolve(request.tokens, known))
        assert caller.authority is not None
        reason = f"{len(found)} of {len(request.tokens)} tokens"
        await self._ledger.execute(
            RecordAdminAction(kind="resolve_claimants", admin=caller.authority.subject, reason=reason)
        )
        versions = {each.name: each.version for each in self._ledger.plugins.inventory()}
        return answers.Resolutions(
            resolutions=[
                {"token": token, "plugin_name": found[token], "plugin_version": versions.get(found[token])}
                for token in dict.fromkeys(request.tokens)
                if token in found
            ]
        )

    def _admin(self, request: requests.AdministrationRequest, caller: Caller) -> Admin:
        authority = caller.authority
        assert authority is not None
        if request.admin is not None:
            authority.require_name(request.admin)
        name = authority.subject if request.admin is None else request.admin
        return self._ledger.plugins.admin(name, is_rehearsal=request.dry_run)


def _claimants(state: LedgerState) -> Iterator[str]:
    """Every name that an answer can have."""
    yield from state.part(Subjects).claimants
    yield from state.part(Relations).claimants
    yield from (custody.plugin for custody in state.part(Custodies))
    for entry in state.part(AdminLedger).entries():
        yield from filter(None, (entry.admin_plugin, entry.target_plugin))


def _form(value: Any) -> Any:
    """Entries as JSON has them: addressings and relations by the names of their parts."""
    if isinstance(value, Addressing | Triple):
        return value._asdict()
    if isinstance(value, msgspec.Struct):
        shown = {name: _form(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        said = {name: each for name, each in shown.items() if each not in (None, [])}
        return said if tag is None else {"kind": tag, **said}
    if isinstance(value, tuple):
        return [_form(each) for each in value]
    return value
