"""What the steward shows: subjects, racks, lists in pages, and subscriptions. The answers' keys are the wire's own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tidings.core.tasks import in_slices
from tidings.core.validation import explain
from tidings.happenings.coalescing import coalescing_from_json
from tidings.happenings.errors import InvalidHappeningFilter
from tidings.happenings.filters import HappeningFilter, filter_from_json
from tidings.ledger.composing import ProjectionBounds, ProjectionScope
from tidings.ledger.custody import Custodies, CustodyRecord
from tidings.ledger.flight_mode import FlightModes
from tidings.ledger.ledger import Ledger
from tidings.ledger.paging import ListPage
from tidings.ledger.relations import RelationRecord
from tidings.ledger.subjects import Addressing, SubjectRecord, Subjects
from tidings.log.interface import Position
from tidings.wire.steward import answers, requests

from .claimants import Names
from .serving import payload_b64
from .settings import StewardSettings
from .streams import FrameCache, HappeningsStream, SubjectStream

if TYPE_CHECKING:
    from .authority import Caller

T = TypeVar("T")
_SLICE_COUNT: Final = 64
_VALUE_SIZE: Final = 200
"""About what a name in a filter costs beyond its own length."""


class Reading:
    """
    The operations that change nothing.

    Args:
        ledger: What is shown.
        names: How plugins are called.
        settings: Bounds of projections and filters.
    """

    def __init__(self, ledger: Ledger, names: Names, settings: StewardSettings) -> None:
        self._ledger = ledger
        self._names = names
        self._settings = settings
        self._bounds = ProjectionBounds(settings.projection_relations_max, settings.projection_bytes_max)
        self._cache = FrameCache(names.shown)

    @property
    def _seq(self) -> int:
        return self._ledger.happenings.last_seq

    async def project_subject(self, request: requests.ProjectSubjectRequest, caller: Caller) -> Any:
        """The projection alone; of a retired id, within what says how it leads there."""
        found = await self._ledger.projections.project_subject(
            request.canonical_id, _scope(request.scope), follow_aliases=request.follow_aliases, bounds=self._bounds
        )
        subject = await self._names.shown_in_slices(found.subject)
        if found.aliased_from is None:
            return subject
        aliased_from = self._names.shown(found.aliased_from)
        return answers.AliasedProjection(subject=subject, aliased_from=aliased_from)

    async def project_rack(self, request: requests.ProjectRackRequest, caller: Caller) -> Any:
        found = await self._ledger.projections.project_rack(request.rack)
        shelves = [
            {
                name: value
                for name, value in msgspec.structs.asdict(shelf).items()
                if name != "shape_supports" or shelf.shape_supports
            }
            for shelf in found.shelves
        ]
        return answers.RackProjectionAnswer(
            rack=found.rack, charter=found.charter, current_seq=found.current_seq, shelves=shelves
        )

    async def list_plugins(self, request: requests.ListPluginsRequest, caller: Caller) -> Any:
        plugins = [
            {"name": each.name, "shelf": each.shelf, "interaction_kind": each.interaction_kind}
            for each in self._ledger.plugins.inventory()
        ]
        return answers.PluginsInventory(current_seq=self._seq, plugins=plugins)

    async def describe_alias(self, request: requests.DescribeAliasRequest, caller: Caller) -> Any:
        found = await self._ledger.projections.describe_alias(request.subject_id, include_chain=request.include_chain)
        terminal = None if found.record is None else _subject_form(found.record)
        result: dict[str, Any] = {"kind": found.kind}
        if found.kind == "found":
            result["record"] = terminal
        elif found.kind == "aliased":
            result |= {"chain": found.chain, "terminal": terminal}
        return answers.AliasDescription(subject_id=request.subject_id, result=self._names.shown(result))

    async def resolve_addressing(self, request: requests.ResolveAddressingRequest, caller: Caller) -> Any:
        wanted = Addressing(request.addressing.scheme, request.addressing.value)
        found = await self._ledger.read(lambda state: state.part(Subjects).find(wanted))
        return answers.ResolvedAddressing(
            resolved_addressing=request.addressing, canonical_id=found, current_seq=self._seq
        )

    async def list_flight_modes(self, request: requests.ListFlightModesRequest, caller: Caller) -> Any:
        modes = await self._ledger.read(lambda state: state.part(FlightModes).freeze())
        return answers.FlightModesAnswer(flight_modes=modes, current_seq=self._seq)

    # Lists

    async def list_active_custodies(self, request: requests.ListActiveCustodiesRequest, caller: Caller) -> Any:
        """All of them in the form of old; a page, pinned to a seq, if one is asked for."""
        if request.cursor is None and request.page_size is None:
            records = await self._ledger.read(lambda state: list(state.part(Custodies)))
            items = await self._names.shown_in_slices(await in_slices(_forms(records, _custody_form)))
            return answers.ActiveCustodies(active_custodies=items)
        page = await self._ledger.projections.list_custodies(request.cursor, request.page_size)
        items = self._shown(map(_custody_form, page.items))
        return answers.ActiveCustodies(active_custodies=items, **_pin(page))

    async def list_subjects(self, request: requests.ListSubjectsRequest, caller: Caller) -> Any:
        page = await self._ledger.projections.subjects_page(request.cursor, request.page_size)
        return answers.SubjectsPage(subjects=self._shown(map(_subject_form, page.items)), **_pin(page))

    async def list_relations(self, request: requests.ListRelationsRequest, caller: Caller) -> Any:
        page = await self._ledger.projections.list_relations(request.cursor, request.page_size)
        return answers.RelationsPage(relations=self._shown(map(_relation_form, page.items)), **_pin(page))

    async def enumerate_addressings(self, request: requests.EnumerateAddressingsRequest, caller: Caller) -> Any:
        page = await self._ledger.projections.list_addressings(request.cursor, request.page_size)
        keys = ("scheme", "value", "canonical_id")
        items = [dict(zip(keys, each, strict=True)) for each in page.items]
        return answers.AddressingsPage(addressings=items, **_pin(page))

    def _shown(self, items: Iterable[Any]) -> list[Any]:
        shown: list[Any] = self._names.shown(list(items))
        return shown

    # Subscriptions

    async def subscribe_happenings(
        self, request: requests.SubscribeHappeningsRequest, caller: Caller
    ) -> HappeningsStream:
        coalesce = coalescing_from_json(
            coalesce=request.coalesce, labels=request.coalesce_labels, window_ms=request.coalesce_window_ms
        )
        happening_filter = None if request.filter is None else self._charged_filter(request.filter, caller)
        since: int | Position | None = request.since
        if request.since is not None and request.epoch is not None:
            since = Position(seq=request.since, epoch=request.epoch)
        subscription = self._ledger.happenings.subscribe(since=since, filter=happening_filter, coalesce=coalesce)
        return HappeningsStream(subscription, self._cache)

    def _charged_filter(self, value: Any, caller: Caller) -> HappeningFilter:
        """
        Read a filter, within the settings' bounds, and charge the connection's memory with it.

        Raises:
            InvalidHappeningFilter: It is not a filter, or has too many names or too long ones.
        """
        happening_filter = filter_from_json(value)
        count, size = happening_filter.value_count, happening_filter.value_bytes
        if count > self._settings.filter_values_max:
            problem = (
                f"{count} names; at most {self._settings.filter_values_max} are allowed (steward.filter_values_max)"
            )
            raise InvalidHappeningFilter("", problem)
        if size > self._settings.filter_bytes_max:
            problem = f"{size} bytes of names; at most {self._settings.filter_bytes_max} are allowed (steward.filter_bytes_max)"
            raise InvalidHappeningFilter("", problem)
        caller.hold_memory(size + _VALUE_SIZE * count)
        return happening_filter

    async def subscribe_subject(self, request: requests.SubscribeSubjectRequest, caller: Caller) -> SubjectStream:
        subscription = await self._ledger.projections.follow_subject(
            request.canonical_id,
            _scope(request.scope),
            follow_aliases=request.follow_aliases,
            since=request.since,
            bounds=self._bounds,
        )
        return SubjectStream(subscription, self._names.shown_in_slices)


def converted(value: Any, kind: type[T], field: str) -> T:
    """
    A part of a request whose form another module declares.

    Raises:
        RequestInvalid: It does not have that form.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, place = explain(error)
        raise requests.RequestInvalid(f"{'.'.join(filter(None, (field, place)))}: {problem}") from None


def _scope(value: Any) -> ProjectionScope | None:
    return None if value is None else converted(value, ProjectionScope, "scope")


def _pin(page: ListPage[Any]) -> dict[str, Any]:
    return {"next_cursor": page.next_cursor, "current_seq": page.current_seq}


def _forms(records: Iterable[T], form: Callable[[T], dict[str, Any]]) -> Generator[None, None, list[dict[str, Any]]]:
    """Apply ``form`` in slices."""
    items: list[dict[str, Any]] = []
    for record in records:
        items.append(form(record))
        if len(items) % _SLICE_COUNT == 0:
            yield
    return items


def _subject_form(record: SubjectRecord) -> dict[str, Any]:
    return {
        "canonical_id": record.canonical_id,
        "subject_type": record.subject_type,
        "addressings": [{**held.addressing._asdict(), "claimant": held.claimant} for held in record.addressings],
    }


def _relation_form(record: RelationRecord) -> dict[str, Any]:
    return {**record.triple._asdict(), "claimants": list(record.claimants), "suppressed": record.is_suppressed}


def _custody_form(record: CustodyRecord) -> dict[str, Any]:
    """All keys are always there; what is not known is ``None``."""
    last = record.last_state
    return {
        "plugin": record.plugin,
        "handle_id": record.handle_id,
        "shelf": record.shelf,
        "custody_type": record.custody_type,
        "last_state": None
        if last is None
        else {"payload_b64": payload_b64(last.payload), "health": last.health, "reported_at_ms": last.reported_at_ms},
        "state": msgspec.to_builtins(record.state),
        "started_at_ms": record.started_at_ms,
        "last_updated_ms": record.last_updated_ms,
    }
