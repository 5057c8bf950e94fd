"""
The ledger of a node, from another process: read it, subscribe to happenings, be a plugin, administer.

    async with LedgerClient("http://127.0.0.1:8787", token=token) as ledger:
        print(await ledger.project_subject(canonical_id))
        async with ledger.subscribe(since=last_seq) as happenings:
            async for each in happenings:
                print(each["seq"], each["happening"]["type"])

``LedgerClient.unix(path)`` speaks to the steward's Unix socket instead, where the kernel says who is there. Requests share a connection and are
answered one after another; a subscription, and a plugin that is served, have each one of their own. A connection that breaks is not mended
behind the caller's back: requests raise ``LinkClosed``, and the next one connects anew; a subscription has ``resume_seq`` to come back with.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import urlsplit

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.errors import TidingsError
from tidings.happenings.filters import HappeningFilter
from tidings.ledger.errors import ErrorClass
from tidings.ledger.handlers import Assignment, Correction, Handler, Manifest, PluginRequest, Warden
from tidings.wire.steward import answers, frames, requests

from .errors import ConnectFailed, LinkClosed, RemoteError
from .link import Connector, Inbox, Link, TokenSource, fresh_token, open_link
from .websocket import WebSocketConnector

logger = logging.getLogger(__name__)

_CONNECT_S_MAX: Final = 10.0
_INBOX_COUNT_MAX: Final = 256
_PAGE_SIZE: Final = 1_000


class LedgerRefused(RemoteError):
    """The node said no. ``error_class`` and ``subclass`` are what programs look at; ``details`` has more where there is more."""

    code = "remote.ledger_refused"
    text = "the ledger refused ({kind}): {problem}"
    error_class: str
    subclass: str
    problem: str
    details: dict[str, Any]

    @property
    def kind(self) -> str:
        """Class and subclass, with a slash between them."""
        return f"{self.error_class}/{self.subclass}" if self.subclass else self.error_class

    def describe(self) -> str:
        return f"the ledger refused ({self.kind}): {self.problem}"


class UnixConnector:
    """Opens connections to a steward's Unix socket; the address is its path."""

    async def connect(self, url: str) -> Link:
        """
        Open one.

        Raises:
            ConnectFailed: It could not be opened.
        """
        try:
            _, link = await asyncio.get_running_loop().create_unix_connection(_UnixLink, url)
        except OSError as error:
            raise ConnectFailed(url, error.strerror or str(error)) from error
        return link


class _UnixLink(asyncio.Protocol):
    def __init__(self) -> None:
        self._reader = frames.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._inbox = Inbox(_INBOX_COUNT_MAX, self._pause, self._resume)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._inbox.put(message)
        except frames.FramingFault as error:
            self._inbox.close(1002, str(error))
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._inbox.close(1000 if error is None else 1006, "" if error is None else str(error))
        if not self._ended.done():
            self._ended.set_result(None)

    def send(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.framed(message))

    async def receive(self) -> list[bytes]:
        return await self._inbox.take()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self._inbox.close(code, reason)
        if self._transport is not None:
            self._transport.close()
        await asyncio.shield(self._ended)

    def _pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


def _answer_of(message: bytes) -> dict[str, Any]:
    """
    An answer.

    Raises:
        LedgerRefused: It is a refusal.
    """
    answer: dict[str, Any] = msgspec.json.decode(message)
    error = answer.get("error")
    if isinstance(error, dict):
        details = dict(error.get("details") or {})
        raise LedgerRefused(
            str(error.get("class")), str(details.pop("subclass", "")), str(error.get("message")), details
        )
    return answer


class _Conversation:
    """One connection, on which requests are answered one after another."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._waiting: list[bytes] = []

    async def next(self) -> bytes:
        """The next message."""
        if not self._waiting:
            self._waiting = (await self.link.receive())[::-1]
        return self._waiting.pop()

    async def ask(self, request: requests.StewardRequest) -> dict[str, Any]:
        """Send a request, and wait for its answer."""
        self.link.send(frames.encode(request))
        return _answer_of(await self.next())


class LedgerClient:
    """
    The ledger of a node.

    Args:
        url: The node's address, ``http`` or ``https``.
        token: What to show it, or what makes a fresh token for each connection.
        capabilities: What to ask for; an operation that takes one which was not granted is refused.
        ssl_context: For ``https``; the system's own unless given.
        connector, clock: Replaceable for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        token: TokenSource | None = None,
        capabilities: Sequence[str] = (),
        ssl_context: ssl.SSLContext | None = None,
        connector: Connector | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        self._url = f"{scheme}://{parts.netloc}/happenings" if parts.netloc else url
        self._token = token
        self._capabilities = list(capabilities)
        self._connector = connector or WebSocketConnector(ssl_context=ssl_context)
        self._clock = clock
        self._talk: _Conversation | None = None
        self._turn = asyncio.Lock()
        self.granted: frozenset[str] = frozenset()
        """The capabilities that the node granted, once there was a connection."""

    @classmethod
    def unix(cls, path: Path | str, *, capabilities: Sequence[str] = (), clock: Clock = SYSTEM_CLOCK) -> LedgerClient:
        """The ledger behind a steward's Unix socket."""
        return cls(str(path), capabilities=capabilities, connector=UnixConnector(), clock=clock)

    # Asking

    async def call(self, request: requests.StewardRequest) -> dict[str, Any]:
        """
        The answer to a request, as JSON has it.

        Raises:
            LedgerRefused: The node said no.
            ConnectFailed, LinkClosed: There is no connection, or none any more; whether a change was made is not known.
        """
        async with self._turn:
            if self._talk is None:
                self._talk = await self.open()
            try:
                return await self._talk.ask(request)
            except LedgerRefused:
                raise
            except BaseException:  # an answer that nobody waited for would be taken for the next one's
                talk, self._talk = self._talk, None
                await talk.link.close()
                raise

    async def open(self) -> _Conversation:
        """A new connection that has shown its token and has its capabilities."""
        talk = _Conversation(await open_link(self._connector, self._url, self._clock, _CONNECT_S_MAX))
        try:
            if self._token is not None:
                await talk.ask(requests.AuthenticateRequest(token=await fresh_token(self._token)))
            if self._capabilities:
                answer = await talk.ask(requests.NegotiateRequest(capabilities=self._capabilities))
                self.granted = frozenset(answer["granted"])
        except BaseException:
            await talk.link.close()
            raise
        return talk

    async def describe_capabilities(self) -> dict[str, Any]:
        """What the node can do."""
        return await self.call(requests.DescribeCapabilitiesRequest())

    async def project_subject(
        self, canonical_id: str, *, scope: dict[str, Any] | None = None, follow_aliases: bool = True
    ) -> dict[str, Any]:
        """A subject and what it is related to; of an id that is retired, what became of it too."""
        return await self.call(
            requests.ProjectSubjectRequest(canonical_id=canonical_id, scope=scope, follow_aliases=follow_aliases)
        )

    async def describe_alias(self, subject_id: str) -> dict[str, Any]:
        """What became of an id."""
        return await self.call(requests.DescribeAliasRequest(subject_id=subject_id))

    async def project_rack(self, rack: str) -> dict[str, Any]:
        """A rack, its shelves and the plugins on them."""
        return await self.call(requests.ProjectRackRequest(rack=rack))

    async def plugins(self) -> list[dict[str, Any]]:
        """The plugins that are there."""
        answer = await self.call(requests.ListPluginsRequest())
        return list(answer["plugins"])

    def subjects(self) -> AsyncIterator[dict[str, Any]]:
        """All subjects, page by page."""
        return self._pages(requests.ListSubjectsRequest(page_size=_PAGE_SIZE), "subjects")

    def relations(self) -> AsyncIterator[dict[str, Any]]:
        """All relations, page by page."""
        return self._pages(requests.ListRelationsRequest(page_size=_PAGE_SIZE), "relations")

    def addressings(self) -> AsyncIterator[dict[str, Any]]:
        """All addressings, page by page."""
        return self._pages(requests.EnumerateAddressingsRequest(page_size=_PAGE_SIZE), "addressings")

    def custodies(self) -> AsyncIterator[dict[str, Any]]:
        """All custodies, page by page."""
        return self._pages(requests.ListActiveCustodiesRequest(page_size=_PAGE_SIZE), "active_custodies")

    async def _pages(self, request: Any, key: str) -> AsyncIterator[dict[str, Any]]:
        while True:
            page = await self.call(request)
            for each in page[key]:
                yield each
            if page["next_cursor"] is None:
                return
            request = msgspec.structs.replace(request, cursor=page["next_cursor"])

    async def request(
        self, shelf: str, request_type: str, payload: bytes = b"", *, instance_id: str | None = None
    ) -> bytes:
        """What the plugin on a shelf answers."""
        answer = await self.call(
            requests.RequestRequest(
                shelf=shelf, request_type=request_type, payload_b64=_b64(payload), instance_id=instance_id
            )
        )
        return base64.b64decode(answer["payload_b64"])

    async def take_custody(self, shelf: str, custody_type: str, payload: bytes = b"") -> str:
        """Have the plugin on a shelf take custody; the handle's id."""
        answer = await self.call(
            requests.TakeCustodyRequest(shelf=shelf, custody_type=custody_type, payload_b64=_b64(payload))
        )
        return str(answer["handle"]["id"])

    async def correct_course(self, shelf: str, handle: str, correction_type: str, payload: bytes = b"") -> None:
        """Have it change its work."""
        await self.call(
            requests.CourseCorrectRequest(
                shelf=shelf, handle=handle, correction_type=correction_type, payload_b64=_b64(payload)
            )
        )

    async def release_custody(self, shelf: str, handle: str) -> None:
        """Have it end its work."""
        await self.call(requests.ReleaseCustodyRequest(shelf=shelf, handle=handle))

    # Listening

    def subscribe(
        self,
        *,
        since: int | None = None,
        filter: HappeningFilter | None = None,
        coalesce_labels: Sequence[str] | None = None,
        coalesce_window_ms: int | None = None,
    ) -> RemoteHappenings:
        """Happenings, those after ``since`` first: an asynchronous context manager, and an iterator of frames within it."""
        request = requests.SubscribeHappeningsRequest(
            since=since,
            filter=None if filter is None else msgspec.to_builtins(filter),
            coalesce_labels=None if coalesce_labels is None else list(coalesce_labels),
            coalesce_window_ms=coalesce_window_ms,
        )
        return RemoteHappenings(self, request)

    def subscribe_subject(
        self, canonical_id: str, *, scope: dict[str, Any] | None = None, follow_aliases: bool = True
    ) -> RemoteHappenings:
        """A subject's projection, now and whenever it changes."""
        request = requests.SubscribeSubjectRequest(
            canonical_id=canonical_id, scope=scope, follow_aliases=follow_aliases
        )
        return RemoteHappenings(self, request)

    # Being a plugin

    def plugin(self, name: str) -> RemotePlugin:
        """The verbs of a plugin, in its name. Takes the capability ``plugins``."""
        return RemotePlugin(self, name)

    @contextlib.asynccontextmanager
    async def serve_plugin(
        self, name: str, handler: Handler, manifest: Manifest | None = None
    ) -> AsyncIterator[RemotePlugin]:
        """
        Be a plugin that others call, within this. What it announced stays when it ends; ``RemotePlugin.unload`` takes it back.

        Raises:
            LedgerRefused: The name or a shelf is taken, or the capability ``plugins`` was not granted.
        """
        talk = await self.open()
        serving: asyncio.Task[None] | None = None
        try:
            kind: Literal["warden", "respondent"] = "warden" if isinstance(handler, Warden) else "respondent"
            await talk.ask(
                requests.LoadPluginRequest(plugin=name, interaction_kind=kind, manifest=msgspec.to_builtins(manifest))
            )
            serving = asyncio.create_task(_serve(talk, handler), name=f"tidings-plugin-{name}")
            yield RemotePlugin(self, name)
        finally:
            await talk.link.close()
            if serving is not None:
                await asyncio.gather(serving, return_exceptions=True)

    async def close(self) -> None:
        """Close the connection of requests. Closing twice is fine."""
        talk, self._talk = self._talk, None
        if talk is not None:
            await talk.link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class RemoteHappenings:
    """
    A subscription. Entering it connects and waits for the acknowledgement; iterating gives frames as JSON has them: happenings
    (``seq``, ``happening``), projections, and ``lagged`` where some were missed. It stops when the node ends the stream; the Unix socket
    says no more than that, so there it stops also when the node is gone. ``resume_seq`` is good either way.
    """

    def __init__(self, client: LedgerClient, request: requests.StewardRequest) -> None:
        self._client = client
        self._request = request
        self._talk: _Conversation | None = None
        self.current_seq = 0
        """The newest seq when it began."""
        self.resume_seq: int | None = None
        """What to subscribe ``since`` so that nothing is missed after the last frame."""

    async def __aenter__(self) -> Self:
        self._talk = await self._client.open()
        try:
            self.current_seq = (await self._talk.ask(self._request))["current_seq"]
        except BaseException:
            await self._talk.link.close()
            raise
        self.resume_seq = getattr(self._request, "since", None)
        if self.resume_seq is None:
            self.resume_seq = self.current_seq
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._talk is not None:
            await self._talk.link.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        assert self._talk is not None
        try:
            frame = _answer_of(await self._talk.next())
        except LinkClosed as closed:
            if closed.close_code == 1000:
                raise StopAsyncIteration from None
            raise
        if "happening" in frame:
            self.resume_seq = frame.get("resume_seq", frame["seq"])
        return frame


class RemotePlugin:
    """The verbs of a plugin; see ``tidings.ledger.plugins.Plugin`` for what each does."""

    def __init__(self, client: LedgerClient, name: str) -> None:
        self._client = client
        self.name = name

    async def announce_subject(
        self, subject_type: str, addressings: Sequence[tuple[str, str]], *, state: Any = None
    ) -> str | None:
        """Say that there is a subject; its canonical id, none after a conflict."""
        answer = await self._client.call(
            requests.AnnounceSubjectRequest(
                plugin=self.name,
                subject_type=subject_type,
                addressings=[requests.AddressingArgument(*each) for each in addressings],
                state=state,
            )
        )
        found: str | None = answer["canonical_id"]
        return found

    async def retract_addressing(self, addressing: tuple[str, str], *, reason: str | None = None) -> None:
        """Take back a name."""
        await self._client.call(
            requests.RetractAddressingRequest(
                plugin=self.name, addressing=requests.AddressingArgument(*addressing), reason=reason
            )
        )

    async def update_state(self, subject: tuple[str, str] | str, state: Any) -> None:
        """Replace a subject's state."""
        await self._client.call(requests.UpdateStateRequest(plugin=self.name, subject=_subject(subject), state=state))

    async def claim_relation(
        self, source: tuple[str, str] | str, predicate: str, target: tuple[str, str] | str, *, reason: str | None = None
    ) -> None:
        """Say that two subjects are related."""
        await self._client.call(
            requests.ClaimRelationRequest(
                plugin=self.name,
                source=_subject(source),
                predicate=predicate,
                target=_subject(target),
                reason=reason,
            )
        )

    async def retract_relation(
        self, source: tuple[str, str] | str, predicate: str, target: tuple[str, str] | str, *, reason: str | None = None
    ) -> None:
        """Take back a claim."""
        await self._client.call(
            requests.RetractRelationRequest(
                plugin=self.name,
                source=_subject(source),
                predicate=predicate,
                target=_subject(target),
                reason=reason,
            )
        )

    async def report_custody_state(self, handle: str, health: Any, payload: bytes = b"") -> None:
        """Report how work is doing."""
        await self._client.call(
            requests.ReportCustodyStateRequest(
                plugin=self.name, handle=handle, health=health, payload_b64=_b64(payload)
            )
        )

    async def report_event(self, event_type: str, payload: Any = None) -> None:
        """Tell an event of the plugin's own."""
        await self._client.call(requests.ReportEventRequest(plugin=self.name, event_type=event_type, payload=payload))

    async def unload(self) -> None:
        """End the plugin's part: instances and addressings are retracted, custodies released."""
        await self._client.call(requests.UnloadPluginRequest(plugin=self.name))


async def _serve(talk: _Conversation, handler: Handler) -> None:
    """Answer calls until the connection ends."""
    running: dict[int, asyncio.Task[None]] = {}
    try:
        while True:
            try:
                frame = msgspec.json.decode(await talk.next())
            except LinkClosed:
                return
            if "withdrawn" in frame:
                if (task := running.get(frame["withdrawn"])) is not None:
                    task.cancel()
            elif "call" in frame:
                number = frame["call"]
                task = running[number] = asyncio.create_task(_answer(talk, handler, frame))
                task.add_done_callback(lambda _, number=number: running.pop(number, None))  # type: ignore[misc]
    finally:
        for task in list(running.values()):
            task.cancel()


async def _answer(talk: _Conversation, handler: Any, frame: dict[str, Any]) -> None:
    payload = base64.b64decode(frame.get("payload_b64", ""))
    named = {name: frame[name] for name in ("shelf", "handle_id") if name in frame}
    doing: Callable[[], Awaitable[Any]]
    match frame["kind"]:
        case "request":
            request = PluginRequest(
                shelf=frame["shelf"],
                request_type=frame["request_type"],
                payload=payload,
                instance_id=frame.get("instance_id"),
            )
            doing = lambda: handler.handle_request(request)  # noqa: E731
        case "take_custody":
            assignment = Assignment(custody_type=frame["custody_type"], payload=payload, **named)
            doing = lambda: handler.take_custody(assignment)  # noqa: E731
        case "correct_course":
            correction = Correction(correction_type=frame["correction_type"], payload=payload, **named)
            doing = lambda: handler.correct_course(correction)  # noqa: E731
        case _:
            doing = lambda: handler.release_custody(frame["handle_id"])  # noqa: E731
    error: requests.ErrorBody | None = None
    answer = b""
    try:
        answer = await doing() or b""
    except TidingsError as failure:
        error_class = str(getattr(failure, "error_class", ErrorClass.CONTRACT_VIOLATION))
        subclass = str(getattr(failure, "subclass", ""))
        error = answers.error_frame(error_class, failure.public_text, subclass).error
    except Exception as failure:
        logger.exception("a call of the plugin failed")
        error = answers.error_frame(ErrorClass.CONTRACT_VIOLATION, type(failure).__name__, "handler_failed").error
    talk.link.send(frames.encode(requests.AnswerRequest(call=frame["call"], payload_b64=_b64(answer), error=error)))


def _b64(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def _subject(name: tuple[str, str] | str) -> requests.SubjectName:
    return name if isinstance(name, str) else requests.AddressingArgument(*name)
