"""Requests to plugins, custody, and the verbs of plugins that live in other processes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from tidings.happenings.variants import HealthStatus
from tidings.ledger.conflicts import ClaimConfidence, Distinct, Equivalent, SubjectClaim
from tidings.ledger.errors import ErrorClass, LedgerError
from tidings.ledger.handlers import Manifest
from tidings.ledger.ledger import Ledger
from tidings.ledger.plugins import Plugin
from tidings.ledger.subjects import Addressing, SubjectName
from tidings.wire.steward import answers, requests

from .reading import converted
from .serving import RemoteRespondent, RemoteWarden, ServedPlugin, payload_b64, payload_of

if TYPE_CHECKING:
    from .authority import Caller


_ADMIN: Final = "ledger_admin"


class ServesAlready(LedgerError):
    """A connection serves a plugin, and was asked for another, or for a subscription."""

    code = "steward.serves_already"
    subclass = "serves_already"
    text = "this connection serves {plugin!r} already"
    hint = "open another connection for that"
    plugin: str


class ServedElsewhere(LedgerError):
    """A plugin is served by another connection or by the node, and only an administrator may unload it from here."""

    code = "steward.served_elsewhere"
    error_class = ErrorClass.PERMISSION_DENIED
    subclass = "served_elsewhere"
    text = "{plugin!r} is served elsewhere"
    hint = "unload it where it is served, or negotiate the capability ledger_admin"
    plugin: str


def subject_name(name: requests.SubjectName) -> SubjectName:
    """A subject's name as commands have it."""
    return name if isinstance(name, str) else Addressing(name.scheme, name.value)


def handle_id(handle: requests.CustodyHandleArgument | str) -> str:
    """The id of a custody, however it was named."""
    return handle if isinstance(handle, str) else handle.id


def _claim(claim: requests.EquivalentClaim | requests.DistinctClaim) -> SubjectClaim:
    a, b = Addressing(claim.a.scheme, claim.a.value), Addressing(claim.b.scheme, claim.b.value)
    if isinstance(claim, requests.DistinctClaim):
        return Distinct(a=a, b=b, reason=claim.reason)
    return Equivalent(a=a, b=b, confidence=ClaimConfidence(claim.confidence), reason=claim.reason)


class Acting:
    """
    The operations of plugins and of those who ask them.

    Args:
        ledger: Whose plugins they are.
        calls_count_max: Calls that a plugin elsewhere may leave unanswered.
    """

    def __init__(self, ledger: Ledger, *, calls_count_max: int) -> None:
        self._ledger = ledger
        self._calls_count_max = calls_count_max
        self._served: WeakValueDictionary[str, ServedPlugin] = WeakValueDictionary()
        """Plugins that connections serve, for as long as these are there."""

    # Whoever stands on a shelf

    async def request(self, request: requests.RequestRequest, caller: Caller) -> Any:
        answer = await self._ledger.plugins.request(
            request.shelf, request.request_type, payload_of(request.payload_b64), instance_id=request.instance_id
        )
        return answers.RequestAnswer(payload_b64=payload_b64(answer))

    async def take_custody(self, request: requests.TakeCustodyRequest, caller: Caller) -> Any:
        handle = await self._ledger.plugins.take_custody(
            request.shelf, request.custody_type, payload_of(request.payload_b64)
        )
        return answers.CustodyTakenAnswer(
            shelf=request.shelf, handle=requests.CustodyHandleArgument(handle.id, handle.started_at_ms)
        )

    async def course_correct(self, request: requests.CourseCorrectRequest, caller: Caller) -> Any:
        handle = handle_id(request.handle)
        payload = payload_of(request.payload_b64)
        await self._ledger.plugins.correct_course(request.shelf, handle, request.correction_type, payload)
        return answers.CourseCorrected(shelf=request.shelf, handle_id=handle)

    async def release_custody(self, request: requests.ReleaseCustodyRequest, caller: Caller) -> Any:
        handle = handle_id(request.handle)
        await self._ledger.plugins.release_custody(request.shelf, handle)
        return answers.CustodyReleasedAnswer(shelf=request.shelf, handle_id=handle)

    # Plugins elsewhere

    async def load_plugin(self, request: requests.LoadPluginRequest, caller: Caller) -> Any:
        self._check_name(request.plugin, caller)
        if caller.served is not None:
            raise ServesAlready(caller.served.plugin.name)
        manifest = Manifest() if request.manifest is None else converted(request.manifest, Manifest, "manifest")
        handler: RemoteRespondent | None = None
        if request.interaction_kind is not None:
            kind = RemoteWarden if request.interaction_kind == "warden" else RemoteRespondent
            handler = kind(request.plugin, caller, self._calls_count_max)
        plugin = self._ledger.plugins.plugin(request.plugin, handler, manifest)
        caller.served = self._served[plugin.name] = ServedPlugin(plugin, handler, self._ledger.plugins)
        return answers.PluginLoaded(plugin=plugin.name, shelves=list(manifest.shelves))

    async def unload_plugin(self, request: requests.UnloadPluginRequest, caller: Caller) -> Any:
        self._check_name(request.plugin, caller)
        self._check_serves(request.plugin, caller)
        done = await self._ledger.plugins.plugin(request.plugin).unload()
        if caller.served is not None and caller.served.plugin.name == request.plugin:
            caller.served = None
        return answers.Done(done=request.op, result=done._asdict())

    def _check_serves(self, plugin: str, caller: Caller) -> None:
        """
        Check that a plugin is not served elsewhere, or that the caller is an administrator.

        Raises:
            ServedElsewhere: Another connection serves it, or this process.
        """
        if caller.served is not None and caller.served.plugin.name == plugin:
            return
        served = self._served.get(plugin)
        is_connected = served is not None and served.plugin in self._ledger.plugins.loaded
        if not is_connected and not self._ledger.plugins.has_handler(plugin):
            return
        assert caller.authority is not None
        if not (_ADMIN in caller.granted and caller.authority.may_have(_ADMIN)):
            raise ServedElsewhere(plugin)

    async def announce_subject(self, request: requests.AnnounceSubjectRequest, caller: Caller) -> Any:
        done = await self._plugin(request.plugin, caller).announce_subject(
            request.subject_type,
            [(each.scheme, each.value) for each in request.addressings],
            claims=map(_claim, request.claims),
            state=request.state,
        )
        return answers.SubjectAnnounced(
            announced=done.kind, canonical_id=done.canonical_id, conflicting_ids=list(done.conflicting_ids)
        )

    async def retract_addressing(self, request: requests.RetractAddressingRequest, caller: Caller) -> Any:
        named = (request.addressing.scheme, request.addressing.value)
        return await self._done(
            request, self._plugin(request.plugin, caller).retract_addressing(named, reason=request.reason)
        )

    async def update_state(self, request: requests.UpdateStateRequest, caller: Caller) -> Any:
        subject = subject_name(request.subject)
        return await self._done(request, self._plugin(request.plugin, caller).update_state(subject, request.state))

    async def claim_relation(self, request: requests.ClaimRelationRequest, caller: Caller) -> Any:
        ends = (subject_name(request.source), request.predicate, subject_name(request.target))
        return await self._done(
            request, self._plugin(request.plugin, caller).claim_relation(*ends, reason=request.reason)
        )

    async def retract_relation(self, request: requests.RetractRelationRequest, caller: Caller) -> Any:
        ends = (subject_name(request.source), request.predicate, subject_name(request.target))
        return await self._done(
            request, self._plugin(request.plugin, caller).retract_relation(*ends, reason=request.reason)
        )

    async def report_custody_state(self, request: requests.ReportCustodyStateRequest, caller: Caller) -> Any:
        handle, payload = handle_id(request.handle), payload_of(request.payload_b64)
        plugin = self._plugin(request.plugin, caller)
        return await self._done(request, plugin.report_custody_state(handle, HealthStatus(request.health), payload))

    async def abort_custody(self, request: requests.AbortCustodyRequest, caller: Caller) -> Any:
        plugin = self._plugin(request.plugin, caller)
        return await self._done(request, plugin.abort_custody(handle_id(request.handle), request.reason))

    async def degrade_custody(self, request: requests.DegradeCustodyRequest, caller: Caller) -> Any:
        plugin = self._plugin(request.plugin, caller)
        return await self._done(request, plugin.degrade_custody(handle_id(request.handle), request.reason))

    async def announce_instance(self, request: requests.AnnounceInstanceRequest, caller: Caller) -> Any:
        plugin = self._plugin(request.plugin, caller)
        payload = payload_of(request.payload_b64)
        return await self._done(request, plugin.announce_instance(request.instance_id, payload, shelf=request.shelf))

    async def retract_instance(self, request: requests.RetractInstanceRequest, caller: Caller) -> Any:
        return await self._done(request, self._plugin(request.plugin, caller).retract_instance(request.instance_id))

    async def set_flight_mode(self, request: requests.SetFlightModeRequest, caller: Caller) -> Any:
        plugin = self._plugin(request.plugin, caller)
        return await self._done(request, plugin.set_flight_mode(request.shelf, request.on))

    async def report_event(self, request: requests.ReportEventRequest, caller: Caller) -> Any:
        plugin = self._plugin(request.plugin, caller)
        return await self._done(request, plugin.report_event(request.event_type, request.payload))

    def _plugin(self, name: str, caller: Caller) -> Plugin:
        """The plugin in whose name something is done; it need not be loaded, and is not by that."""
        self._check_name(name, caller)
        plugins = self._ledger.plugins
        if plugins.is_loaded(name):
            return plugins.plugin(name)
        return Plugin(name, None, Manifest(), ledger=self._ledger, directory=plugins)

    @staticmethod
    def _check_name(name: str, caller: Caller) -> None:
        assert caller.authority is not None
        caller.authority.require_name(name)

    @staticmethod
    async def _done(request: requests.StewardRequest, doing: Awaitable[Any]) -> answers.Done:
        return answers.Done(done=request.op, result=await doing)
