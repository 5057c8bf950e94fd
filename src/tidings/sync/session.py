"""
One connection's dialogue as a state machine: messages and facts in, effects out. It decides and does nothing.

    await_connect --connect--> admitting --admitted--> active --disconnect, error, expiry, silence--> closed

The driver (``connection``) carries effects out in order. ``Admit``, ``Submit`` and ``ReadPage`` are work that takes time: it is
done one at a time, in the order asked for, and its outcome comes back through ``admitted``, ``submitted``, ``plan_page`` and
``page_read``. No clock is read here; times come in as milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

from tidings.access.endpoint import EndReason
from tidings.access.resources import Action
from tidings.log.record import Record
from tidings.wire.sync_frames import CloseCode, ItemError, MalformedFrame, UnknownMessageType, UnsupportedVersion

from .canonical import judge_repeated_keys
from .dialects import choose_dialect
from .dialects.camel import project_key
from .dialects.dialect import ConnectedAnswer, Dialect, is_client, stored_names
from .profiles import TREE_TYPES, choose_profile
from .requests import (
    Admit,
    Answer,
    Close,
    ConnectRequest,
    DisconnectRequest,
    Effect,
    HeartbeatRequest,
    PageAnswer,
    PagePlan,
    ReadPage,
    Request,
    Scope,
    SendFrame,
    SessionState,
    Submit,
    SubmitRequest,
    SubmittedItem,
    SyncRequest,
)
from .rights import ClientRights
from .settings import SyncSettings

SUPPORTED_VERSIONS: Final = ["1.0"]
_AT_ONCE_MAX: Final = 64
"""Names that are decided when a message comes in."""
_ENDINGS: Final = {
    EndReason.STOPPING: (CloseCode.RESTART, "the server is stopping"),
    EndReason.FULL: (CloseCode.TRY_AGAIN_LATER, "too many connections"),
    EndReason.NOT_AUTHENTICATED: (CloseCode.SILENT, "no connect"),
    EndReason.REVOKED: (CloseCode.AUTH_FAILED, "the token was revoked"),
    EndReason.EXPIRED: (CloseCode.TOKEN_EXPIRED, "the token has expired"),
    EndReason.SILENT: (CloseCode.SILENT, "no heartbeat"),
    EndReason.TOO_SLOW: (CloseCode.TRY_AGAIN_LATER, "too slow"),
    EndReason.LIMIT: (CloseCode.AUTH_FAILED, "a limit was exceeded"),
    EndReason.DENIED: (CloseCode.TRY_AGAIN_LATER, "denied for a time"),
    EndReason.FAILED: (CloseCode.SERVER_ERROR, "the request failed"),
    EndReason.COMMITS_MISSED: (CloseCode.SERVER_ERROR, "commits cannot be followed"),
}


class ClientLoad:
    """How much of one client is under way, over all of its connections, also those that are closed by now."""

    __slots__ = ("__weakref__", "drafts")

    def __init__(self) -> None:
        self.drafts = 0
        """Drafts that wait for their verdict."""


class SyncSession:
    """
    One connection.

    Args:
        settings: Of the endpoint; replaced when they are reloaded.
    """

    __slots__ = (
        "_authorised_version",
        "_cycle",
        "_frames_made",
        "_is_rechecking",
        "_wanted",
        "client_id",
        "dialect",
        "is_holding",
        "load",
        "profile",
        "project",
        "project_id",
        "rights",
        "settings",
        "state",
        "subscriptions",
    )

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings
        self.state = SessionState.AWAIT_CONNECT
        self.dialect: Dialect | None = None
        self.rights: ClientRights | None = None
        self.client_id = ""
        self.profile = ""
        self.project_id: str | None = None
        self.project: str | None = None
        self.subscriptions: frozenset[str] = frozenset()
        """What it gets broadcasts of: partitions, or the project."""
        self._wanted: frozenset[str] = frozenset()
        self._is_rechecking = False
        """Whether access has changed and it is not decided yet what that takes away."""
        self._authorised_version: int | None = None
        """The state of access for which the batch that is stored now was authorised."""
        """What it has asked for, and gets as long as its rights allow it."""
        self.load = ClientLoad()
        """Of its client; the service gives the connections of one client the same."""
        self.is_holding = False
        """Whether broadcasts wait for the end of paging."""
        self._frames_made = 0
        self._cycle: tuple[tuple[str, ...], int, int, int] | None = None

    # Messages

    def receive(self, message: bytes, now_ms: int, queued: int = 0) -> list[Effect]:
        """A message came in, while ``queued`` requests are still queued."""
        if self.state is SessionState.CLOSED:
            return []
        dialect = self.dialect if self.dialect is not None else choose_dialect(message)
        details: dict[str, Any]
        if len(message) > self.settings.message_bytes_max:
            details = {"max_message_bytes": self.settings.message_bytes_max}
            msg_id = dialect.msg_id_of(message)
            return self._fail(dialect, msg_id, "bad_request", "the message is too large", details, now_ms)
        try:
            request = dialect.decode(message, self.settings)
            judge_repeated_keys(message, request)
        except UnsupportedVersion as error:
            details = {"supported_versions": SUPPORTED_VERSIONS, "requested_version": error.requested[:80]}
            failure = self._fail(
                dialect, dialect.msg_id_of(message), "protocol_version_unsupported", error.describe(), details, now_ms
            )
            return [*failure, *self.close(CloseCode.VERSION, "protocol version")]
        except (MalformedFrame, UnknownMessageType) as error:
            return self._malformed(dialect, error, dialect.msg_id_of(message), now_ms)
        match request:
            case HeartbeatRequest():
                if foreign := self._refuse_foreign(dialect, request, now_ms):
                    return foreign
                return [SendFrame(dialect.heartbeat_ack(self._msg_id(dialect, request.msg_id), now_ms))]
            case ConnectRequest():
                if self.state is not SessionState.AWAIT_CONNECT:
                    return self._fail(dialect, request.msg_id, "bad_request", "already connected", None, now_ms)
                self.dialect = dialect
                self.state = SessionState.ADMITTING
                return [Admit(request)]
            case _ if self.state is not SessionState.ACTIVE:
                return self._fail(dialect, request.msg_id, "bad_request", "connect first", None, now_ms)
        if foreign := self._refuse_foreign(dialect, request, now_ms):
            return foreign
        if isinstance(request, DisconnectRequest):
            return self.close(CloseCode.NORMAL, "goodbye")
        if queued >= self.settings.requests_queued_max and not dialect.hangs_on_errors:
            return self.rate_limited(request.msg_id, "too many requests at once", now_ms)
        match request:
            case SubmitRequest():
                return self._submit(dialect, request, now_ms)
            case SyncRequest():
                return self._sync(dialect, request, now_ms)

    def _malformed(
        self, dialect: Dialect, error: MalformedFrame | UnknownMessageType, msg_id: str | None, now_ms: int
    ) -> list[Effect]:
        if dialect.hangs_on_errors and error.type == "submit_events" and self.state is SessionState.ACTIVE:
            return self.server_error(f"the batch cannot be read: {error.describe()}", now_ms, msg_id=msg_id)
        details = {"field": error.field} if isinstance(error, MalformedFrame) and error.field else None
        return self._fail(dialect, msg_id, "bad_request", error.describe(), details, now_ms)

    def _refuse_foreign(self, dialect: Dialect, request: Request, now_ms: int) -> list[Effect]:
        """Whoever speaks for another client is sent away."""
        client_id = request.client_id
        if client_id is None or self.state is not SessionState.ACTIVE or is_client(client_id, self.client_id):
            return []
        return self._auth_failed(
            dialect, request.msg_id, "client_id is not the connection's", CloseCode.AUTH_FAILED, now_ms
        )

    # Connecting

    def admitted(
        self, request: ConnectRequest, rights: ClientRights | None, watermark: int, now_ms: int
    ) -> list[Effect]:
        """The token was verified: ``rights`` are what it gives, ``None`` if it is not valid."""
        if self.state is not SessionState.ADMITTING:
            return []
        dialect = self._spoken
        # One name, however it is spelled: the token's claim is in Unicode's form NFC, the client's own word for itself need not be.
        client_id = None if rights is None else rights.client_id
        if rights is None or client_id is None or not is_client(request.client_id, client_id) or rights.is_revoked:
            problem = "the token is not valid" if rights is None else "the token is not this client's"
            return self._auth_failed(dialect, request.msg_id, problem, CloseCode.AUTH_FAILED, now_ms)
        settings = self.settings
        profile = "canonical"
        if dialect.name == "a":
            chosen = choose_profile(settings.profiles, request)
            if chosen is None:
                details = {"supported_profiles": list(settings.profiles)}
                frame = dialect.error(
                    self._msg_id(dialect, request.msg_id), "profile_unsupported", "no common profile", details, now_ms
                )
                return [SendFrame(frame), *self.close(CloseCode.VERSION, "profile")]
            profile = chosen
        if request.project_id is not None:
            project = project_key(request.project_id)
            if project is None or not rights.may_sync(Scope(project)):
                failure = self._fail(dialect, request.msg_id, "forbidden", "not your project", None, now_ms)
                return [*failure, *self.close(CloseCode.AUTH_FAILED, "forbidden")]
            self.project, self.project_id = project, request.project_id
            self.subscriptions = self._wanted = frozenset((project,))
        self.state = SessionState.ACTIVE
        self.rights = rights
        self.client_id = client_id
        self.profile = profile
        hello = ConnectedAnswer(
            client_id=request.client_id,
            project_id=request.project_id,
            watermark=watermark,
            profile=profile,
            accepted_types=("event",) if profile == "canonical" else TREE_TYPES,
            model_version=settings.model_version if profile == "canonical" else None,
            limits={
                "max_batch_size": settings.batch_items_max,
                "sync_limit_min": settings.page_items_min,
                "sync_limit_max": settings.page_items_max,
                "max_message_bytes": settings.message_bytes_max,
                "max_in_flight_drafts": settings.in_flight_drafts_max,
            },
        )
        return [SendFrame(dialect.connected(self._msg_id(dialect, request.msg_id), hello, now_ms))]

    # Submitting

    def _submit(self, dialect: Dialect, request: SubmitRequest, now_ms: int) -> list[Effect]:
        items = request.items
        if dialect.hangs_on_errors:
            if not request.count:
                # As the client's own server; a client with nothing in flight does not hang on an error.
                problem = "payload.events must contain at least one item"
                return self._fail(dialect, request.msg_id, "bad_request", problem, None, now_ms)
        else:
            settings = self.settings
            problem, details = None, None
            if not request.count:
                problem = "the batch is empty"
            elif request.count > settings.batch_items_max:
                problem, details = "the batch is too long", {"max_batch_size": settings.batch_items_max}
            elif len({item.id for item in items}) != len(items):
                problem = "the batch has an id twice"
            if problem is not None:
                return self._fail(dialect, request.msg_id, "bad_request", problem, details, now_ms)
            if self.load.drafts + len(items) > settings.in_flight_drafts_max:
                return self.rate_limited(request.msg_id, "too many drafts under way", now_ms)
        for item in items:
            if item.client_id is not None and not is_client(item.client_id, self.client_id):
                return self._auth_failed(
                    dialect, request.msg_id, "an item is another client's", CloseCode.AUTH_FAILED, now_ms
                )
        self.load.drafts += len(items)
        return [Submit(request)]

    @property
    def judges_each_item(self) -> bool:
        """Whether what becomes of an item does not depend on those before it, unless they have its id."""
        return self.profile == "canonical" and not self._spoken.stops_at_rejection

    def release(self, request: SubmitRequest) -> None:
        """A batch is not under way any more, whatever became of it."""
        self.load.drafts -= len(request.items)

    def authorise(self, items: list[SubmittedItem]) -> None:
        """Note on each item whether this connection may submit it. Asked right before storing: rights may change."""
        rights = self._rights
        user_id = rights.user_id
        for item in items:
            self._spoken.attribute(item, self.client_id)
            # Where the token names no user the word is the application's own, and nothing here believes it.
            if user_id is not None and item.user_id is not None and not is_client(item.user_id, user_id):
                _forbid(item, "userId", "is not the token's")
        asked: dict[Scope, bool] = {}
        self._authorised_version = rights.version
        for item in items:
            # What cannot be read is in no scope, and rejected for that.
            scope = item.scope or Scope(self.project)
            may = asked.get(scope)
            if may is None:
                may = asked[scope] = scope.project == self.project and rights.may_submit(scope)
            if not may:
                self.forbid(item)

    def require_submit(self, item: SubmittedItem, now_ns: int) -> None:
        """
        Make sure that an item that was authorised may still be submitted, as the log accepts it.

        Raises:
            TokenExpired, Forbidden: It may not.
        """
        scope = item.scope or Scope(self.project)
        self._rights.require_submit(scope, now_ns, as_of=self._authorised_version)

    def forbid(self, item: SubmittedItem) -> None:
        """Note that an item may not be submitted."""
        scope = item.scope or Scope(self.project)
        if scope.project is None:
            _forbid(item, "partitions")
        else:
            is_allowed = scope.project == self.project and self._rights.may_submit(Scope(scope.project))
            _forbid(item, "partition" if is_allowed else "projectId")

    def submitted(self, request: SubmitRequest, answers: list[Answer], now_ms: int) -> list[Effect]:
        """Every item of a batch has its verdict."""
        if self.state is not SessionState.ACTIVE:
            return []
        dialect = self._spoken
        return [SendFrame(dialect.result(self._msg_id(dialect, request.msg_id), answers, now_ms))]

    def refuse_batch(self, request: SubmitRequest, message: str, now_ms: int) -> list[Effect]:
        """Nothing of a batch was stored, and it may be sent again later."""
        if self.state is not SessionState.ACTIVE:
            return []
        if self._spoken.hangs_on_errors:
            return self.server_error(message, now_ms, msg_id=request.msg_id)
        return self.rate_limited(request.msg_id, message, now_ms)

    def rate_limited(self, msg_id: str | None, message: str, now_ms: int) -> list[Effect]:
        """Too much was asked for."""
        details = {"retry_after_ms": self.settings.retry_after_ms}
        return self._fail(self._spoken, msg_id, "rate_limited", message, details, now_ms)

    # Syncing

    def _sync(self, dialect: Dialect, request: SyncRequest, now_ms: int) -> list[Effect]:
        names = self._names(dialect, request)
        if isinstance(names, str):
            return self._fail(dialect, request.msg_id, "bad_request", names, None, now_ms)
        asked = names[0] + (names[1] or ())
        # What is refused for one name is refused at once; many names are decided in slices, before the page is planned.
        if len(asked) <= _AT_ONCE_MAX and (refused := self._refused(asked)):
            return self._refuse_sync(request, refused, now_ms)
        return [ReadPage(request)]

    async def decide_ahead(self, request: SyncRequest | SubmitRequest) -> None:
        """Decide about the partitions of a request in slices, so that what follows does not hold up other tasks."""
        if isinstance(request, SubmitRequest):
            names = [name for item in request.items if item.scope is not None for name in item.scope.partitions]
            await self._rights.decide_ahead(Action.SUBMIT, names)
        elif not self._spoken.is_by_project:
            settled = self._names(self._spoken, request)
            if not isinstance(settled, str):
                await self._rights.decide_ahead(Action.SYNC, settled[0] + (settled[1] or ()))

    def _refuse_sync(self, request: SyncRequest, names: list[str], now_ms: int) -> list[Effect]:
        """The cycle ends here, and with it the holding back of broadcasts: there will be no last page."""
        self._cycle, self.is_holding = None, False
        return self._forbidden(self._spoken, request.msg_id, names, now_ms)

    def plan_page(self, request: SyncRequest, published_seq: int, now_ms: int) -> PagePlan | list[Effect]:
        """
        What to read, decided in one step with what was published.

        Everything up to ``published_seq`` was sent to subscribers and is taken into account by the rights; everything
        above it will be sent to whoever subscribes now. So between page and broadcasts nothing is left out.
        """
        if self.state is not SessionState.ACTIVE:
            return []
        dialect, settings = self._spoken, self.settings
        names = self._names(dialect, request)
        if isinstance(names, str):  # the settings were changed since it was asked for
            return self._fail(dialect, request.msg_id, "bad_request", names, None, now_ms)
        partitions, subscriptions = names
        refused = self._refused(partitions + (subscriptions or ()))
        if refused:
            return self._refuse_sync(request, refused, now_ms)
        until, begins = published_seq, True
        if self._cycle is not None:
            of, next_since, sync_to, _ = self._cycle
            if of == partitions and next_since == request.since:
                until, begins = sync_to, False
        floor = settings.page_items_min if dialect.has_page_min else 1
        wanted = settings.page_items_default if request.limit is None else request.limit
        if subscriptions is not None:
            self.subscriptions = self._wanted = frozenset(subscriptions)
        if dialect.holds_while_paging:
            self.is_holding = True
        return PagePlan(
            request=request,
            partitions=partitions,
            since=request.since,
            until=until,
            limit=min(max(wanted, floor), settings.page_items_max),
            subscriptions=None if subscriptions is None else self.subscriptions,
            begins=begins,
        )

    def page_read(
        self,
        plan: PagePlan,
        records: list[Record],
        *,
        has_more: bool,
        sync_to: int,
        now_ms: int,
        pruned_through: int | None = None,
        snapshot: tuple[int, dict[str, bytes]] | None = None,
        goes_on_until: int | None = None,
    ) -> list[Effect]:
        """
        A page was read. ``sync_to`` is the watermark to tell: the log's, or in dialect B the project's.

        What was read is shown only if the rights still allow it: they may have changed while the disk was busy.
        ``goes_on_until`` lengthens the cycle: what was published meanwhile was too much to hold back, and is read instead.
        """
        if self.state is not SessionState.ACTIVE:
            return []
        dialect, request = self._spoken, plan.request
        refused = self._refused(plan.partitions)
        if refused:
            return self._refuse_sync(request, refused, now_ms)
        if records:
            next_since = records[-1].seq
            records = [
                record
                for record in records
                if self.may_see(dialect.scope_of(record.meta.partitions, record.payload_json))
            ]
        elif snapshot is not None:
            next_since = snapshot[0]
        elif request.since > sync_to and not dialect.echoes_future_cursor:
            next_since = sync_to
        else:
            next_since = request.since
        if not plan.begins and self._cycle is not None:
            sync_to = self._cycle[3]
        until = plan.until
        if goes_on_until is not None and not has_more:
            until, has_more = goes_on_until, True
        self._cycle = (plan.partitions, next_since, until, sync_to) if has_more else None
        self.is_holding = has_more and dialect.holds_while_paging
        page = PageAnswer(
            partitions=plan.partitions if self.project_id is None else (self.project_id,),
            subscriptions=tuple(sorted(self.subscriptions, key=str.encode)),
            records=records,
            next_since=next_since,
            sync_to=sync_to,
            has_more=has_more,
            model_version=self.settings.model_version if self.profile == "canonical" else None,
            pruned_through=pruned_through,
            snapshot=snapshot,
        )
        return [SendFrame(dialect.page(self._msg_id(dialect, request.msg_id), page, now_ms))]

    def may_see(self, scope: Scope) -> bool:
        """
        Whether a record may be shown that it has asked for by name.

        Partitions were asked for by their own names, and are allowed if the name is. A project has partitions within it.
        """
        if scope.project is not None:
            return self._rights.may_sync(Scope(self.project, scope.partitions))
        if not self._is_rechecking:
            return True
        return any(
            self._rights.may_sync(Scope(None, (name,))) for name in self.subscriptions.intersection(scope.partitions)
        )

    def history_pruned(self, request: SyncRequest, through_seq: int, now_ms: int) -> list[Effect]:
        """For dialects that have no word for a gap: refuse, loudly, instead of passing over it."""
        self.is_holding = False
        if self.state is not SessionState.ACTIVE:
            return []
        return self._fail(
            self._spoken,
            request.msg_id,
            "bad_request",
            f"the history up to {through_seq} is not kept any more",
            {"prunedThroughCommittedId": through_seq},
            now_ms,
        )

    # Rights and time

    def recheck_rights(self, now_ms: Callable[[], int]) -> Generator[None, None, list[Effect]]:
        """
        The access book changed: what is no longer allowed ends, and the client is informed. What is allowed again goes on.

        The steps decide one name each, and return the effects; from this call until then ``may_see`` decides for each record.
        """
        self._is_rechecking = True
        return self._recheck_steps(now_ms)

    def _recheck_steps(self, now_ms: Callable[[], int]) -> Generator[None, None, list[Effect]]:
        refused: list[str] = []
        for name in sorted(self._wanted):
            if self.state is not SessionState.ACTIVE:
                return []
            refused += self._refused((name,))
            yield
        return self._rechecked(refused, now_ms()) if self.state is SessionState.ACTIVE else []

    def _rechecked(self, refused: list[str], now_ms: int) -> list[Effect]:
        dialect = self._spoken
        heard = self.subscriptions
        self._is_rechecking = False
        self.subscriptions = self._wanted.difference(refused)
        lost = sorted(heard - self.subscriptions, key=str.encode)
        if not lost:
            return []
        if dialect.is_by_project:  # whatever it was reading, it will not be read to its end
            self._cycle, self.is_holding = None, False
        return self._forbidden(dialect, None, lost, now_ms)

    def model_changed(self, old: int, new: int, now_ms: int) -> list[Effect]:
        """The model version was changed while the connection is open."""
        if self.state is not SessionState.ACTIVE or self.profile != "canonical":
            return []
        dialect = self._spoken
        frame = dialect.version_changed(self._msg_id(dialect, None), old, new, now_ms)
        return [] if frame is None else [SendFrame(frame)]

    # Ending

    def server_error(
        self, message: str, now_ms: int, code: CloseCode = CloseCode.SERVER_ERROR, *, msg_id: str | None = None
    ) -> list[Effect]:
        """Something failed that the client can only answer by starting over."""
        if self.state is SessionState.CLOSED:
            return []
        if self.dialect is None:
            return self.close(code, "server error")
        return [
            *self._fail(self.dialect, msg_id, "server_error", message, None, now_ms),
            *self.close(code, "server error"),
        ]

    def end(self, why: EndReason, detail: str, now_ms: int) -> list[Effect]:
        """The endpoint ends the connection. A client of dialect B does not notice a closed socket; an error it does."""
        if self.state is SessionState.CLOSED:
            return []
        code, text = _ENDINGS[why]
        if why in (EndReason.REVOKED, EndReason.EXPIRED):
            return self._auth_failed(self._spoken, None, text, code, now_ms)
        hangs = self.dialect is not None and self.dialect.hangs_on_errors
        if why in (EndReason.FAILED, EndReason.COMMITS_MISSED) or (
            hangs and why in (EndReason.STOPPING, EndReason.TOO_SLOW)
        ):
            return self.server_error(detail or text, now_ms, code)
        return self.close(code, detail or text)

    def close(self, code: CloseCode, reason: str) -> list[Effect]:
        """End the session; what it was subscribed to ends with it."""
        if self.state is SessionState.CLOSED:
            return []
        self.gone()
        return [Close(code, reason)]

    def gone(self) -> None:
        """The connection is no more."""
        self.state = SessionState.CLOSED
        self.subscriptions = self._wanted = frozenset()
        self.is_holding = False
        self._cycle = None

    # Details

    @property
    def client_key(self) -> tuple[str, str]:
        """Which client this is: a client's id is its subject's, and another subject may use the same one."""
        return ("" if self.rights is None else self.rights.subject), self.client_id

    @property
    def _spoken(self) -> Dialect:
        assert self.dialect is not None
        return self.dialect

    @property
    def _rights(self) -> ClientRights:
        assert self.rights is not None
        return self.rights

    def _names(self, dialect: Dialect, request: SyncRequest) -> tuple[tuple[str, ...], tuple[str, ...] | None] | str:
        """The names of a sync as they are stored, or what is wrong with them."""
        if dialect.is_by_project:
            asked = self.project if not request.partitions else project_key(request.partitions[0])
            return ((asked,), None) if asked is not None else "projectId is not a valid name"
        partitions = stored_names(request.partitions, self.settings.sync_partitions_max)
        if isinstance(partitions, str):
            return f"partitions: {partitions}"
        if not partitions:
            return "partitions: must name at least one partition"
        if request.subscriptions is None:
            return partitions, None
        subscriptions = stored_names(request.subscriptions, self.settings.sync_partitions_max)
        if isinstance(subscriptions, str):
            return f"subscription_partitions: {subscriptions}"
        return partitions, subscriptions

    def _refused(self, names: frozenset[str] | tuple[str, ...]) -> list[str]:
        may_sync = self._rights.may_sync
        if self._spoken.is_by_project:
            return [name for name in names if name != self.project or not may_sync(Scope(name))]
        return sorted(name for name in set(names) if not may_sync(Scope(None, (name,))))

    def _forbidden(self, dialect: Dialect, msg_id: str | None, names: list[str], now_ms: int) -> list[Effect]:
        kind = "projects" if dialect.is_by_project else "partitions"
        # Only names that the client itself has given; at most a few, so that the answer stays small.
        return self._fail(dialect, msg_id, "forbidden", f"not allowed: {kind}", {kind: names[:16]}, now_ms)

    def _auth_failed(
        self, dialect: Dialect, msg_id: str | None, message: str, code: CloseCode, now_ms: int
    ) -> list[Effect]:
        return [*self._fail(dialect, msg_id, "auth_failed", message, None, now_ms), *self.close(code, "auth_failed")]

    def _fail(
        self,
        dialect: Dialect,
        msg_id: str | None,
        code: str,
        message: str,
        details: dict[str, Any] | None,
        now_ms: int,
    ) -> list[Effect]:
        return [SendFrame(dialect.error(self._msg_id(dialect, msg_id), code, message, details, now_ms))]

    def _msg_id(self, dialect: Dialect, asked: str | None) -> str | None:
        if dialect.name != "a":
            return asked
        self._frames_made += 1
        return f"s{self._frames_made}"


def _forbid(item: SubmittedItem, field: str, message: str = "not allowed") -> None:
    item.reason = "forbidden"
    item.errors = (ItemError(field=field, message=message),)
