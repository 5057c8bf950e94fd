"""What a client may ask: one class an operation, and how a message is read as one."""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tidings.core.errors import TidingsError
from tidings.core.names import snake_case
from tidings.core.validation import UNREADABLE, RepeatedKey, parse_strict


class RequestInvalid(TidingsError):
    """A frame holds no request: no JSON, no known operation, a field that is missing, unknown or of the wrong kind."""

    code = "steward.invalid_request"
    text = "the request is not understood: {problem}"
    problem: str


Seq = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=1_024)]
Reason = Annotated[str, msgspec.Meta(max_length=16_384)]


class AddressingArgument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An external name of a subject."""

    scheme: Name
    value: Name


SubjectName = AddressingArgument | str
"""A subject by an addressing, or by its canonical id."""


class CustodyHandleArgument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A custody, as ``take_custody`` answers it; only ``id`` counts."""

    id: Name
    started_at: Any = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal. ``message`` is for people; programs look at the class and, in ``details``, the ``subclass``."""

    error_class: str = msgspec.field(name="class")
    message: str
    details: dict[str, Any] | UnsetType = UNSET


Twice = Literal["read", "same", "more"]
"""
What asking twice comes to: ``read`` changes nothing (that it was asked may be noted); after ``same`` things are as after the first time,
and the second may be refused for that; ``more`` is done twice.
"""


def _name_of(name: str) -> str:
    return snake_case(name.removesuffix("Request"))


class StewardRequest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="op",
    tag=_name_of,
):
    """What a client asks for. ``op`` is the class's name in snake case, without ``StewardRequest``."""

    capability: ClassVar[str | None] = None
    """What must have been negotiated."""
    need: ClassVar[Literal["nothing", "read", "subscribe", "act"]] = "read"
    """The right that it takes at ``/happenings``, beside the capability. Whoever can open the Unix socket has these."""
    twice: ClassVar[Twice] = "read"

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if not cls.__name__.startswith(("_", "Rehearsable", "Administration")):
            REQUESTS[_name_of(cls.__name__)] = cls

    @property
    def changes(self) -> bool:
        """Whether being asked it may change something."""
        return self.twice != "read"

    @property
    def op(self) -> str:
        """The operation's name."""
        return _name_of(type(self).__name__)


REQUESTS: Final[dict[str, type[StewardRequest]]] = {}
"""Every operation, in the order that ``describe_capabilities`` lists them in."""


class RehearsableRequest(StewardRequest, frozen=True, kw_only=True):
    """What can be asked for with its checks only."""

    dry_run: bool = False
    """Say whether it would be refused or change something, and change nothing."""

    @property
    def changes(self) -> bool:
        return not self.dry_run


class RequestRequest(StewardRequest, frozen=True, kw_only=True, tag="request"):
    """Ask the plugin on a shelf for something."""

    twice = "more"
    need = "act"
    shelf: Name
    request_type: Name
    payload_b64: str = ""
    instance_id: Name | None = None


class ProjectSubjectRequest(StewardRequest, frozen=True, kw_only=True):
    """A subject and what it is related to."""

    canonical_id: Name
    scope: Any = None
    follow_aliases: bool = True


class ProjectRackRequest(StewardRequest, frozen=True, kw_only=True):
    """A rack, its shelves, and the plugins on them."""

    rack: Name


class ListPluginsRequest(StewardRequest, frozen=True, kw_only=True):
    """The plugins that are there, in the order they came."""


class DescribeAliasRequest(StewardRequest, frozen=True, kw_only=True):
    """What became of an id."""

    subject_id: Name
    include_chain: bool = True


class _Paged(StewardRequest, frozen=True, kw_only=True):
    cursor: str | None = None
    page_size: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ListActiveCustodiesRequest(_Paged, frozen=True, kw_only=True):
    """What is in somebody's custody; all of it, unless a page is asked for."""


class ListSubjectsRequest(_Paged, frozen=True, kw_only=True):
    """A page of subjects."""


class ListRelationsRequest(_Paged, frozen=True, kw_only=True):
    """A page of relations, suppressed ones too."""


class EnumerateAddressingsRequest(_Paged, frozen=True, kw_only=True):
    """A page of addressings."""


class SubscribeHappeningsRequest(StewardRequest, frozen=True, kw_only=True):
    """Hear of happenings: those after ``since`` that are still kept, then live ones."""

    need = "subscribe"
    since: Seq | None = None
    filter: Any = None
    coalesce_labels: list[str] | None = None
    coalesce_window_ms: int | None = None
    coalesce: Any = None
    epoch: str | None = None
    """The life of the log that ``since`` was counted in; another one's is refused."""


class SubscribeSubjectRequest(StewardRequest, frozen=True, kw_only=True):
    """A subject's projection, now and whenever it changes."""

    need = "subscribe"
    canonical_id: Name
    scope: Any = None
    follow_aliases: bool = False
    since: Seq | None = None


SubscribeRequest = SubscribeHappeningsRequest | SubscribeSubjectRequest
"""What turns a connection round."""


class AuthenticateRequest(StewardRequest, frozen=True, kw_only=True):
    """Who is there; at ``/happenings`` only, where a token came neither with the upgrade nor before, or is replaced."""

    need = "nothing"
    token: str


class DescribeCapabilitiesRequest(StewardRequest, frozen=True, kw_only=True):
    """What this server can do."""

    need = "nothing"


class NegotiateRequest(StewardRequest, frozen=True, kw_only=True):
    """Ask for capabilities; replaces those that were granted before."""

    need = "nothing"
    capabilities: list[str]


class ResolveClaimantsRequest(StewardRequest, frozen=True, kw_only=True):
    """The names behind tokens."""

    capability = "resolve_claimants"
    tokens: Annotated[list[str], msgspec.Meta(max_length=10_000)]


class TakeCustodyRequest(StewardRequest, frozen=True, kw_only=True):
    """Have the plugin on a shelf take custody of something."""

    twice = "more"
    need = "act"
    shelf: Name
    custody_type: Name
    payload_b64: str = ""


class CourseCorrectRequest(StewardRequest, frozen=True, kw_only=True):
    """Change the course of what a plugin has custody of."""

    twice = "more"
    need = "act"
    shelf: Name
    handle: CustodyHandleArgument | str
    correction_type: Name
    payload_b64: str = ""


class ReleaseCustodyRequest(StewardRequest, frozen=True, kw_only=True):
    """Have a plugin let go."""

    twice = "same"
    need = "act"
    shelf: Name
    handle: CustodyHandleArgument | str


class _OfAppointments(StewardRequest, frozen=True, kw_only=True):
    capability = "appointments_admin"


class CreateAppointmentRequest(_OfAppointments, frozen=True, kw_only=True):
    """Make an appointment, in the place of an earlier one of the same name."""

    twice = "more"

    creator: Name
    spec: Any
    action: Any


class CancelAppointmentRequest(RehearsableRequest, frozen=True, kw_only=True):
    """Cancel an appointment; what is none is no error."""

    capability = "appointments_admin"
    twice = "same"

    creator: Name
    appointment_id: Name


class ListAppointmentsRequest(_Paged, frozen=True, kw_only=True):
    """Appointments; all of them, unless a page is asked for."""

    capability = "appointments_admin"


class ProjectAppointmentRequest(_OfAppointments, frozen=True, kw_only=True):
    """One appointment."""

    creator: Name
    appointment_id: Name


class _OfWatches(StewardRequest, frozen=True, kw_only=True):
    capability = "watches_admin"


class CreateWatchRequest(_OfWatches, frozen=True, kw_only=True):
    """Set up a watch, in the place of an earlier one of the same name."""

    twice = "more"

    creator: Name
    spec: Any
    action: Any


class CancelWatchRequest(RehearsableRequest, frozen=True, kw_only=True):
    """Cancel a watch; what is none is no error."""

    capability = "watches_admin"
    twice = "same"

    creator: Name
    watch_id: Name


class ListWatchesRequest(_Paged, frozen=True, kw_only=True):
    """Watches; all of them, unless a page is asked for."""

    capability = "watches_admin"


class ProjectWatchRequest(_OfWatches, frozen=True, kw_only=True):
    """One watch."""

    creator: Name
    watch_id: Name


class _OfGrammar(StewardRequest, frozen=True, kw_only=True):
    capability = "grammar_admin"


class ListGrammarOrphansRequest(_OfGrammar, frozen=True, kw_only=True):
    """Types of subjects that the catalogue does not declare."""


class AcceptGrammarOrphansRequest(_OfGrammar, frozen=True, kw_only=True):
    """Leave the subjects of such a type as they are, for a reason."""

    twice = "same"

    from_type: Name
    reason: Reason


class MigrateGrammarOrphansRequest(_OfGrammar, frozen=True, kw_only=True):
    """Give the subjects of such a type another type."""

    twice = "same"

    from_type: Name
    strategy: Any
    dry_run: bool = False
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    max_subjects: Annotated[int, msgspec.Meta(ge=0)] | None = None
    reason: Reason | None = None


class SetCatalogueRequest(_OfGrammar, frozen=True, kw_only=True):
    """Use another catalogue from now on."""

    twice = "same"

    catalogue: Annotated[str, msgspec.Meta(max_length=1 << 20)]
    """The document, as TOML."""


class ResolveAddressingRequest(StewardRequest, frozen=True, kw_only=True):
    """The subject that an addressing belongs to."""

    addressing: AddressingArgument


class ListFlightModesRequest(StewardRequest, frozen=True, kw_only=True):
    """Which classes of radios are switched off."""


class _OfPlugins(StewardRequest, frozen=True, kw_only=True):
    twice: ClassVar[Twice] = "same"
    capability = "plugins"
    need = "act"


class LoadPluginRequest(_OfPlugins, frozen=True, kw_only=True):
    """
    Be a plugin. With an ``interaction_kind`` it is called over this connection: from the acknowledgement on ``call`` frames come between
    the answers. When the connection ends it is no longer there to be called; what it announced and claimed stays.
    """

    plugin: Name
    interaction_kind: Literal["respondent", "warden"] | None = None
    manifest: Any = None


class UnloadPluginRequest(_OfPlugins, frozen=True, kw_only=True):
    """End a plugin's part: instances and addressings are retracted, custodies released."""

    plugin: Name


class AnswerRequest(_OfPlugins, frozen=True, kw_only=True):
    """The answer to a call; nothing is answered to it."""

    call: int
    payload_b64: str = ""
    error: ErrorBody | None = None


class EquivalentClaim(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="kind",
    tag="equivalent",
):
    """Two addressings are of one thing."""

    a: AddressingArgument
    b: AddressingArgument
    confidence: Literal["asserted", "inferred", "tentative"] = "asserted"
    reason: Reason | None = None


class DistinctClaim(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="kind",
    tag="distinct",
):
    """Two addressings are not of one thing."""

    a: AddressingArgument
    b: AddressingArgument
    reason: Reason | None = None


class AnnounceSubjectRequest(_OfPlugins, frozen=True, kw_only=True):
    """Say that there is a subject, or that one has further addressings."""

    plugin: Name
    subject_type: Name
    addressings: list[AddressingArgument]
    claims: list[EquivalentClaim | DistinctClaim] = []
    state: Any = None


class RetractAddressingRequest(_OfPlugins, frozen=True, kw_only=True):
    """Take back an addressing."""

    plugin: Name
    addressing: AddressingArgument
    reason: Reason | None = None


class UpdateStateRequest(_OfPlugins, frozen=True, kw_only=True):
    """Replace the state of a subject; ``null`` clears it."""

    plugin: Name
    subject: SubjectName
    state: Any


class _OfRelation(_OfPlugins, frozen=True, kw_only=True):
    plugin: Name
    source: SubjectName
    predicate: Name
    target: SubjectName
    reason: Reason | None = None


class ClaimRelationRequest(_OfRelation, frozen=True, kw_only=True):
    """Say that two subjects are related."""


class RetractRelationRequest(_OfRelation, frozen=True, kw_only=True):
    """Take back a claim on a relation."""


class ReportCustodyStateRequest(_OfPlugins, frozen=True, kw_only=True):
    """Report how work is doing."""

    twice = "more"

    plugin: Name
    handle: CustodyHandleArgument | str
    health: Literal["healthy", "degraded", "unhealthy"]
    payload_b64: str = ""


class _FailedCustody(_OfPlugins, frozen=True, kw_only=True):
    twice = "more"
    plugin: Name
    handle: CustodyHandleArgument | str
    reason: Reason


class AbortCustodyRequest(_FailedCustody, frozen=True, kw_only=True):
    """Mark work as over before its time."""


class DegradeCustodyRequest(_FailedCustody, frozen=True, kw_only=True):
    """Mark work as going on with less than was asked for."""


class AnnounceInstanceRequest(_OfPlugins, frozen=True, kw_only=True):
    """Say that there is an instance of what a plugin makes."""

    plugin: Name
    instance_id: Name
    shelf: Name | None = None
    payload_b64: str = ""


class RetractInstanceRequest(_OfPlugins, frozen=True, kw_only=True):
    """Say that an instance is gone."""

    plugin: Name
    instance_id: Name


class SetFlightModeRequest(_OfPlugins, frozen=True, kw_only=True):
    """Say that a class of radios was switched; ``on`` means that they are off."""

    plugin: Name
    shelf: Name
    on: bool


class ReportEventRequest(_OfPlugins, frozen=True, kw_only=True):
    """Tell an event of the plugin's own."""

    twice = "more"

    plugin: Name
    event_type: Name
    payload: Any = None


class AdministrationRequest(RehearsableRequest, frozen=True, kw_only=True):
    """What an administrator does."""

    twice = "same"
    capability = "ledger_admin"
    admin: Name | None = None
    """In whose name; the caller's own unless given."""


class MergeSubjectsRequest(AdministrationRequest, frozen=True, kw_only=True):
    """Make one subject of two."""

    a: SubjectName
    b: SubjectName
    reason: Reason | None = None


class SplitAssignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a relation of a subject that is split goes: to the group of this number, from 0."""

    source: SubjectName
    predicate: Name
    target: SubjectName
    target_new_id_index: int


class SplitSubjectRequest(AdministrationRequest, frozen=True, kw_only=True):
    """Make several subjects of one, each with some of its addressings."""

    source: SubjectName
    partition: list[list[AddressingArgument]]
    strategy: Literal["to_both", "to_first", "explicit"]
    assignments: list[SplitAssignment] = []
    reason: Reason | None = None


class ForceRetractAddressingRequest(AdministrationRequest, frozen=True, kw_only=True):
    """Take back another plugin's addressing."""

    target_plugin: Name
    addressing: AddressingArgument
    reason: Reason | None = None


class _AdministeredRelation(AdministrationRequest, frozen=True, kw_only=True):
    source: SubjectName
    predicate: Name
    target: SubjectName


class ForceRetractRelationRequest(_AdministeredRelation, frozen=True, kw_only=True):
    """Take back another plugin's claim on a relation."""

    target_plugin: Name
    reason: Reason | None = None


class SuppressRelationRequest(_AdministeredRelation, frozen=True, kw_only=True):
    """Hide a relation from neighbours and walks."""

    reason: Reason | None = None


class UnsuppressRelationRequest(_AdministeredRelation, frozen=True, kw_only=True):
    """Show a hidden relation again."""


class ListAdminEntriesRequest(StewardRequest, frozen=True, kw_only=True):
    """What administrators did, oldest first."""

    capability = "ledger_admin"
    admin_plugin: Name | None = None
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many entries to pass over."""
    page_size: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ListClaimsRequest(StewardRequest, frozen=True, kw_only=True):
    """What was said about which names are of one thing, and what became of it, oldest first."""

    capability = "ledger_admin"
    claimant: Name | None = None
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many entries to pass over."""
    page_size: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ListConflictsRequest(StewardRequest, frozen=True, kw_only=True):
    """Subjects that a plugin takes for one, as long as nobody has settled it, oldest first."""

    capability = "ledger_admin"


@functools.cache
def _decoder() -> msgspec.json.Decoder[Any]:
    every: Any = functools.reduce(operator.or_, REQUESTS.values())
    return msgspec.json.Decoder(every)


def decode_request(message: bytes) -> StewardRequest:
    """
    The request in a frame.

    Raises:
        RequestInvalid: There is none.
    """
    try:
        request: StewardRequest = _decoder().decode(message)
        parse_strict(message, "request")
    except UNREADABLE as error:
        raise RequestInvalid(str(error)[:300]) from error
    except RepeatedKey as error:
        raise RequestInvalid(error.problem) from error
    except ValueError as error:
        raise RequestInvalid("it nests too deep") from error
    return request
