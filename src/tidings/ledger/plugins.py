"""
Plugins: who announces subjects, claims relations and looks after work; and what they do, as verbs.

    player = ledger.plugin("org.example.player", Player(), Manifest(shelves=("audio.playback",)))
    await player.announce_subject("track", [("mpd-path", "/music/a.flac")])
    handle = await player.take_custody("audio.playback", "playback")
    await player.report_custody_state(handle, HealthStatus.HEALTHY, b"at 0:00")
    await player.release_custody(handle)

A verb is done, on disk and told as happenings when it returns; one that raises a ``LedgerError`` has changed nothing, unless it says so.
A plugin without a handler drives itself: its verbs write down what it does. With a handler, taking, correcting and releasing ask the handler
first, whoever calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeVar

from tidings.core.clock import within
from tidings.happenings.variants import HealthStatus, PluginEvent

from .claims import (
    Announced,
    AnnounceSubject,
    ClaimRelation,
    RetractAddressing,
    Retracted,
    RetractRelation,
    UpdateSubjectState,
)
from .commands import Command, CommandOutcome, check_json, check_name
from .conflicts import SubjectClaim
from .custody import (
    AbandonCustody,
    Custodies,
    CustodyRecord,
    FailCustody,
    RecordCustody,
    ReleaseCustody,
    ReportCustodyState,
)
from .errors import (
    DuplicateCustody,
    HandlerFailed,
    InstancesFixed,
    InvalidCommand,
    LedgerError,
    Misrouted,
    NotOnShelf,
    PluginUnloaded,
    UndeclaredCorrection,
    UnknownCustody,
)
from .factories import AnnounceInstance, FactoryInstances, RetractInstance
from .flight_mode import SetFlightMode
from .handlers import (
    Assignment,
    Calls,
    Correction,
    CorrectionFailure,
    Handler,
    InstancePolicy,
    InteractionKind,
    Manifest,
    PluginRequest,
    Respondent,
    Warden,
    problem_of,
)
from .state import LedgerState
from .subjects import Addressing, SubjectName, Subjects

if TYPE_CHECKING:
    from .directory import Plugins
    from .ledger import Ledger

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_RETRACTED_TOGETHER: Final = 1000
Named = tuple[str, str] | str
"""How a verb names a subject: by an addressing (scheme and value), or by its canonical id."""


class CustodyHandle(NamedTuple):
    """Names a custody to whoever asked for it."""

    id: str
    started_at_ms: int


class Unloaded(NamedTuple):
    """What unloading a plugin took along."""

    instances: int
    custodies_released: int
    custodies_failed: int
    """Those whose warden would not let go in time. Their records are marked as aborted."""
    addressings: int


class ReportPluginEvent(Command, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a plugin's own."""

    plugin: str
    event_type: str
    payload: Any = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        check_name("plugin", self.plugin)
        check_name("event_type", self.event_type)
        check_json("payload", self.payload)
        event = PluginEvent(at_ms=at_ms, plugin=self.plugin, event_type=self.event_type, payload=self.payload)
        return CommandOutcome([event])


class Plugin:
    """
    A plugin that is loaded; made by ``Ledger.plugin``.

    As a context manager it is unloaded at the end.
    """

    def __init__(
        self, name: str, handler: Handler | None, manifest: Manifest, *, ledger: Ledger, directory: Plugins
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.load_id = ledger.new_id()
        """Which life of the plugin this is; another one each time it is loaded."""
        self._handler = handler
        self._ledger = ledger
        self._directory = directory
        self._calls = Calls(name, ledger.clock)
        self._taking: set[str] = set()
        """Custodies that the warden is about to take, and may report about already."""
        self._verbs: set[asyncio.Task[Any]] = set()
        """Verbs under way that ask the warden as well."""
        self._is_loading = True
        self._is_ending = False
        self._is_unloaded = False

    @property
    def has_handler(self) -> bool:
        """Whether it is called; a plugin without a handler drives itself."""
        return self._handler is not None

    @property
    def interaction_kind(self) -> InteractionKind:
        """How others deal with it. One without a handler looks after its own work."""
        is_warden = self._handler is None or isinstance(self._handler, Warden)
        return InteractionKind.WARDEN if is_warden else InteractionKind.RESPONDENT

    @property
    def is_ending(self) -> bool:
        """Whether it is unloaded, or about to be."""
        return self._is_ending

    # Subjects and relations

    async def announce_subject(
        self,
        subject_type: str,
        addressings: Iterable[tuple[str, str]],
        *,
        claims: Iterable[SubjectClaim] = (),
        state: Any = None,
    ) -> Announced:
        """
        Say that there is a subject, or that one has further names.

        Args:
            subject_type: As the catalogue declares it.
            addressings: Names outside, each a scheme and a value. Those that nobody has yet become this plugin's.
            claims: What else it says about which names are of one thing; goes to the claim log.
            state: What to keep with the subject: any JSON.

        Returns:
            The subject's canonical id, and what was done. Names of several subjects are a conflict: it is recorded, told, and nothing is
            attached.
        """
        self._require_loaded()
        announced: Announced = await self._do(
            AnnounceSubject(
                plugin=self.name,
                subject_type=subject_type,
                addressings=tuple(Addressing.of("addressings", each) for each in addressings),
                new_id=self._ledger.new_id(),
                claims=tuple(claims),
                state=state,
            )
        )
        return announced

    async def retract_addressing(
        self, addressing: tuple[str, str], *, reason: str | None = None
    ) -> Literal["addressing_removed", "subject_forgotten"]:
        """Take back a name. A subject that has no other is forgotten, with all its relations."""
        self._require_loaded()
        command = RetractAddressing(plugin=self.name, addressing=Addressing.of("addressing", addressing), reason=reason)
        retracted: Retracted = await self._do(command)
        return retracted.kind

    async def update_state(self, subject: Named, state: Any) -> None:
        """Replace the state of a subject that this plugin has a name of; ``None`` clears it."""
        self._require_loaded()
        await self._do(UpdateSubjectState(plugin=self.name, subject=name_of(subject), state=state))

    async def claim_relation(
        self,
        source: Named,
        predicate: str,
        target: Named,
        *,
        reason: str | None = None,
    ) -> Literal["created", "claimant_added", "no_change"]:
        """Say that two subjects are related. More ends than the predicate declares are stored, and told as a violation."""
        self._require_loaded()
        done: Literal["created", "claimant_added", "no_change"] = await self._do(
            ClaimRelation(
                plugin=self.name, source=name_of(source), predicate=predicate, target=name_of(target), reason=reason
            )
        )
        return done

    async def retract_relation(
        self,
        source: Named,
        predicate: str,
        target: Named,
        *,
        reason: str | None = None,
    ) -> Literal["claim_removed", "relation_forgotten"]:
        """Take back a claim. A relation that nobody claims any more is forgotten."""
        self._require_loaded()
        done: Literal["claim_removed", "relation_forgotten"] = await self._do(
            RetractRelation(
                plugin=self.name, source=name_of(source), predicate=predicate, target=name_of(target), reason=reason
            )
        )
        return done

    # Custody

    async def take_custody(
        self, shelf: str, custody_type: str, payload: bytes = b"", *, handle_id: str | None = None
    ) -> CustodyHandle:
        """
        Take custody of work on a shelf. A warden is asked to begin it; if it does not, nothing is recorded.

        Args:
            shelf: On which shelf; no other plugin's.
            custody_type: What kind of work.
            payload: For the warden.
            handle_id: To name the custody by; made up unless given.

        Raises:
            DuplicateCustody: The plugin has, or is about to take, custody of something under this handle. The warden was not asked.

        Cancelling the call cancels the warden's. Once the warden has begun, cancelling does not take it back.
        """
        warden = self._warden()
        self._require_own(shelf)
        check_name("custody_type", custody_type)
        handle_id = self._ledger.new_id() if handle_id is None else check_name("handle_id", handle_id)
        assignment = Assignment(handle_id=handle_id, shelf=shelf, custody_type=custody_type, payload=payload)
        if warden is not None:
            await self._begin(warden, assignment)
        return await self._to_the_end(self._record(warden, assignment))

    async def _record(self, warden: Warden | None, assignment: Assignment) -> CustodyHandle:
        handle_id, shelf, custody_type = assignment.handle_id, assignment.shelf, assignment.custody_type
        command = RecordCustody(plugin=self.name, handle_id=handle_id, shelf=shelf, custody_type=custody_type)
        try:
            record: CustodyRecord = await self._do(command)
        except BaseException:
            if warden is not None:  # what is not on record must not go on
                await self._end_again(warden, handle_id)
            raise
        finally:
            self._taking.discard(handle_id)
        return CustodyHandle(handle_id, record.started_at_ms)

    async def _begin(self, warden: Warden, assignment: Assignment) -> None:
        handle_id = assignment.handle_id
        known = await self._ledger.read(lambda state: state.part(Custodies).get(self.name, handle_id))
        if handle_id in self._taking or (known is not None and known.shelf is not None):
            raise DuplicateCustody(self.name, handle_id)
        was_known = known is not None
        has_begun = False

        async def begin() -> None:
            nonlocal has_begun
            await warden.take_custody(assignment)
            has_begun = True

        self._taking.add(handle_id)
        try:
            await self._call("take_custody", begin)
        except BaseException:
            self._taking.discard(handle_id)
            if not was_known:  # the warden may have reported before it gave up
                await self._do(AbandonCustody(plugin=self.name, handle_id=handle_id))
                if has_begun:  # and the caller was cancelled before it knew
                    await self._end_again(warden, handle_id)
            raise

    async def _end_again(self, warden: Warden, handle_id: str) -> None:
        with contextlib.suppress(LedgerError):
            await self._call("release_custody", lambda: warden.release_custody(handle_id))

    async def report_custody_state(
        self, handle: CustodyHandle | str, health: HealthStatus, payload: bytes = b""
    ) -> None:
        """
        Report how work is doing. The ledger keeps the last report.

        Raises:
            UnknownCustody: The plugin neither has such a custody nor is its warden about to take it.
        """
        self._require_loaded()
        handle_id = _id(handle)
        await self._do(
            ReportCustodyState(
                plugin=self.name,
                handle_id=handle_id,
                health=HealthStatus(health),
                payload=payload,
                is_begun=handle_id not in self._taking,
            )
        )

    async def correct_course(self, handle: CustodyHandle | str, correction_type: str, payload: bytes = b"") -> None:
        """
        Have the warden change work that it has custody of.

        Raises:
            UndeclaredCorrection: The plugin does not take such corrections. It was not asked.
            LedgerError: It failed, or took too long. By the plugin's manifest the custody is now marked as aborted or as degraded, with the
                error's text as the reason, and that was told.
        """
        warden = self._warden()
        if warden is None:
            raise Misrouted(self.name, InteractionKind.WARDEN)
        declared = self.manifest.corrections
        check_name("correction_type", correction_type)
        if declared is not None and correction_type not in declared:
            raise UndeclaredCorrection(self.name, correction_type)
        record = await self._custody(handle)
        if record.shelf is None:
            raise InvalidCommand("handle", f"{record.handle_id!r} is being taken; it cannot be corrected yet")
        correction = Correction(
            handle_id=record.handle_id, shelf=record.shelf, correction_type=correction_type, payload=payload
        )
        try:
            await self._calls.run(
                "correct_course", lambda: warden.correct_course(correction), self.manifest.correction_ms_max
            )
        except PluginUnloaded:
            raise  # unloading sees to the custody
        except LedgerError as error:
            is_over = self.manifest.on_failed_correction is CorrectionFailure.ABORT
            with contextlib.suppress(UnknownCustody):  # released meanwhile
                await self._fail(record.handle_id, problem_of(error), is_over=is_over)
            raise

    async def abort_custody(self, handle: CustodyHandle | str, reason: str) -> None:
        """Mark work as over before its time. The record stays until the custody is released."""
        self._require_loaded()
        await self._fail(_id(handle), reason, is_over=True)

    async def degrade_custody(self, handle: CustodyHandle | str, reason: str) -> None:
        """Mark work as going on with less than was asked for."""
        self._require_loaded()
        await self._fail(_id(handle), reason, is_over=False)

    async def _fail(self, handle_id: str, reason: str, *, is_over: bool) -> None:
        await self._do(
            FailCustody(plugin=self.name, handle_id=handle_id, mode="aborted" if is_over else "degraded", reason=reason)
        )

    async def release_custody(self, handle: CustodyHandle | str) -> CustodyRecord:
        """
        End a custody; the warden is asked to end the work first. Returns the record as it was last.

        Cancelling the call does not take it back.
        """
        return await self._to_the_end(self._release(self._warden(), handle))

    async def _release(self, warden: Warden | None, handle: CustodyHandle | str) -> CustodyRecord:
        record = await self._custody(handle)
        if warden is not None:
            await self._call("release_custody", lambda: warden.release_custody(record.handle_id))
        last: CustodyRecord = await self._do(ReleaseCustody(plugin=self.name, handle_id=record.handle_id))
        return last

    # Instances

    async def announce_instance(self, instance_id: str, payload: bytes = b"", *, shelf: str | None = None) -> str:
        """
        Say that there is an instance of what this plugin makes.

        Args:
            instance_id: The plugin's own name for it.
            payload: What others may want to know of it; kept with the record.
            shelf: The shelf that is the instance's type; the plugin's own unless given.

        Returns:
            The canonical id of its subject.
        """
        self._require_loaded(is_new_work=True)
        if self.manifest.instances is InstancePolicy.STARTUP_ONLY and not self._is_loading:
            raise InstancesFixed(self.name, self.manifest.instances, "none is announced after loading")
        if shelf is None:
            if len(self.manifest.shelves) != 1:
                raise NotOnShelf(self.name, f"stands on {len(self.manifest.shelves)} shelves; say which is meant")
            [shelf] = self.manifest.shelves
        self._require_own(shelf)
        canonical_id: str = await self._do(
            AnnounceInstance(
                plugin=self.name,
                instance_id=instance_id,
                shelf=shelf,
                load_id=self.load_id,
                new_id=self._ledger.new_id(),
                payload=payload,
            )
        )
        return canonical_id

    async def retract_instance(self, instance_id: str) -> None:
        """Say that an instance is gone. Its subject is forgotten."""
        self._require_loaded()
        if self.manifest.instances is InstancePolicy.SHUTDOWN_ONLY:
            raise InstancesFixed(self.name, self.manifest.instances, "none is retracted while the plugin is loaded")
        await self._do(RetractInstance(plugin=self.name, instance_id=instance_id))

    def finish_loading(self) -> None:
        """Say that loading is over: from here on a plugin whose instances are ``startup_only`` announces no more."""
        self._is_loading = False

    # The rest

    async def set_flight_mode(self, shelf: str, on: bool) -> bool:
        """
        Say that a class of radios was switched.

        Args:
            shelf: The class: a shelf of the rack ``flight_mode``, no other plugin's.
            on: True if the radios are off now.

        Returns:
            Whether that is a change.
        """
        self._require_loaded()
        self._require_own(shelf)
        is_changed: bool = await self._do(SetFlightMode(rack_class=shelf, on=on))
        return is_changed

    async def report_event(self, event_type: str, payload: Any = None) -> None:
        """Tell an event of the plugin's own, as the happening ``plugin_event`` under its name."""
        self._require_loaded()
        await self._do(ReportPluginEvent(plugin=self.name, event_type=event_type, payload=payload))

    async def handle_request(self, request: PluginRequest) -> bytes:
        """Pass a request to the plugin's respondent. Usually called by ``Plugins.request``, which finds the plugin by its shelf."""
        self._require_loaded(is_new_work=True)
        respondent = self._handler
        if not isinstance(respondent, Respondent):
            raise Misrouted(self.name, InteractionKind.RESPONDENT)
        call = f"request {request.request_type!r}"
        answer = await self._calls.run(call, lambda: respondent.handle_request(request), self.manifest.request_ms_max)
        if not isinstance(answer, bytes):
            raise HandlerFailed(self.name, call, f"answered {answer!r:.80}, no bytes")
        return answer

    # Unloading

    async def unload(self, *, seconds: float = 2.0) -> Unloaded:
        """
        End the plugin's part in the ledger.

        Nothing new is asked of it. Calls under way may finish; its instances are retracted, the last one first; its warden lets go of its
        work; its addressings are retracted, so that subjects nobody else has a name of are forgotten. Claims on relations stay.

        Args:
            seconds: How long calls under way may take, and how long letting go may.
        """
        if self._is_ending:
            return Unloaded(0, 0, 0, 0)
        await self.end_calls(seconds)
        instances = await self.retract_instances()
        released, failed = await self.release_custodies(seconds)
        addressings = await self.leave()
        return Unloaded(instances, released, failed, addressings)

    # The stages of unloading, also called by ``Plugins.drain``

    async def end_calls(self, seconds: float) -> None:
        """Take no more calls, and let those under way finish within so many seconds, and what the plugin has begun itself."""
        self._is_ending = True
        await self._calls.finish(seconds)
        if self._verbs:
            await within(self._ledger.clock, seconds, asyncio.gather(*self._verbs, return_exceptions=True))
        await self._ledger.finish_waiting()

    async def retract_instances(self) -> int:
        """Retract all instances, the last one first, whatever the policy; how many."""
        instances = await self._ledger.read(lambda state: state.part(FactoryInstances).of_plugin(self.name))
        commands = [RetractInstance(plugin=self.name, instance_id=each.instance_id) for each in reversed(instances)]
        return await do_all(self._ledger, commands)

    async def release_custodies(self, seconds: float) -> tuple[int, int]:
        """Let go of all work, all at once and within so many seconds; how many did, and how many did not."""
        records = await self._ledger.read(lambda state: state.part(Custodies).of_plugin(self.name))
        done = await asyncio.gather(*(self._let_go(record, seconds) for record in records))
        return done.count(True), done.count(False)

    async def leave(self) -> int:
        """Retract all addressings; how many. The plugin is unloaded then."""
        self._is_unloaded = True
        await self._ledger.finish_waiting()
        names = await self._ledger.read(lambda state: state.part(Subjects).claimed_by(self.name))
        claimed = sorted(names) if len(names) <= _RETRACTED_TOGETHER else await asyncio.to_thread(sorted, names)
        count = 0
        for begin in range(0, len(claimed), _RETRACTED_TOGETHER):
            some = claimed[begin : begin + _RETRACTED_TOGETHER]
            commands = [RetractAddressing(plugin=self.name, addressing=addressing) for addressing in some]
            count += await do_all(self._ledger, commands)
        self._directory.forget(self)
        await self._ledger.finish_waiting()
        return count

    async def _let_go(self, record: CustodyRecord, seconds: float) -> bool:
        if record.shelf is None:
            await self._do(AbandonCustody(plugin=self.name, handle_id=record.handle_id))
            return True
        warden = self._handler
        if isinstance(warden, Warden):
            try:
                await self._calls.run(
                    "release_custody", lambda: warden.release_custody(record.handle_id), int(seconds * 1000)
                )
            except LedgerError as error:
                await self._fail(record.handle_id, problem_of(error), is_over=True)
                return False
        await self._do(ReleaseCustody(plugin=self.name, handle_id=record.handle_id))
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.unload()

    # What the verbs share

    async def _do(self, command: Command) -> Any:
        return await self._ledger.execute(command)

    async def _to_the_end(self, verb: Coroutine[Any, Any, _T]) -> _T:
        """Do all of a verb, also if its caller no longer waits: what a warden does and what is on record must not come apart."""
        task = asyncio.get_running_loop().create_task(verb, name=f"verb of {self.name}")
        self._verbs.add(task)
        task.add_done_callback(self._verb_ended)
        return await asyncio.shield(task)

    def _verb_ended(self, task: asyncio.Task[Any]) -> None:
        self._verbs.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also when nobody waits any more

    async def _call(self, name: str, call: Callable[[], Awaitable[None]]) -> None:
        await self._calls.run(name, call, self.manifest.custody_ms_max)

    async def _custody(self, handle: CustodyHandle | str) -> CustodyRecord:
        return await self._ledger.read(lambda state: state.part(Custodies).require(self.name, _id(handle)))

    def _require_loaded(self, *, is_new_work: bool = False) -> None:
        # While it ends, what is under way may still report and retract.
        if self._is_unloaded or (self._is_ending and is_new_work):
            raise PluginUnloaded(self.name)

    def _require_own(self, shelf: str) -> None:
        check_name("shelf", shelf)
        occupant = self._directory.occupant(shelf)
        if occupant not in (None, self):
            raise NotOnShelf(self.name, f"{shelf!r} is the shelf of {occupant.name!r}")

    def _warden(self) -> Warden | None:
        """The handler to ask, or none if the plugin drives itself."""
        self._require_loaded(is_new_work=True)
        if self._handler is None or isinstance(self._handler, Warden):
            return self._handler
        raise Misrouted(self.name, InteractionKind.WARDEN)


async def do_all(ledger: Ledger, commands: Sequence[Command]) -> int:
    """Do what can be done of several commands; how many. What is refused is a line in the log."""
    refused = [done for done in await ledger.execute_many(commands) if isinstance(done, LedgerError)]
    for error in refused:
        logger.warning("left undone: %s", error)
    return len(commands) - len(refused)


def _id(handle: CustodyHandle | str) -> str:
    return handle if isinstance(handle, str) else handle.id


def name_of(subject: Named) -> SubjectName:
    """The name of a subject as commands have it."""
    return subject if isinstance(subject, str) else Addressing.of("subject", subject)
