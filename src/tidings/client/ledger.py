"""
The ledger of a node, from another process: read it, subscribe to happenings, be a plugin, administer.

    async with LedgerClient("http://127.0.0.1:8787", token=token) as ledger:
        print(await ledger.project_subject(canonical_id))
        async with ledger.subscribe(since=last_seq) as happenings:
            async for each in happenings:
                print(each["seq"], each["happening"]["type"])

``LedgerClient.unix(path)`` speaks to the steward's Unix socket instead, where the kernel says who is there. Requests share a connection and are
answered one after another; a subscription, and a plugin that is served, have each one of their own.

A connection that breaks is opened again, after pauses that grow, within the client's patience. What only reads is asked again, and a
subscription goes on after the last happening that it gave. What changes something is never sent twice by itself: if its answer was lost,
``AnswerLost`` says whether it may be asked again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import urlsplit

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.happenings.filters import HappeningFilter
from tidings.ledger.handlers import Handler, Manifest, Warden
from tidings.wire.groups import CLOSE_AUTH_FAILED, CLOSE_NORMAL
from tidings.wire.steward import requests

from .conversation import Conversation, answer_of
from .errors import AnswerLost, LedgerRefused, LinkClosed, LinkError
from .link import Connector, TokenSource, fresh_token, open_link
from .reconnecting import Reconnecting
from .remote_plugins import RemotePlugin, as_base64, serve_calls
from .unix_socket import UnixConnector
from .websocket import WebSocketConnector

_CONNECT_S_MAX: Final = 10.0
_SILENCE_S: Final = 15.0
_PATIENCE_S: Final = 60.0
_PAGE_SIZE: Final = 1_000


class LedgerClient:
    """
    The ledger of a node.

    Args:
        url: The node's address, ``http`` or ``https``.
        token: What to show it, or what makes a fresh token for each connection.
        capabilities: What to ask for; an operation that takes one which was not granted is refused.
        ssl_context: For ``https``; the system's own unless given.
        patience_s: How long to go on trying to reach the node; ``None`` for as long as it takes, 0 for a single attempt.
        connector, clock, rng: Replaceable for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        token: TokenSource | None = None,
        capabilities: Sequence[str] = (),
        ssl_context: ssl.SSLContext | None = None,
        patience_s: float | None = _PATIENCE_S,
        connector: Connector | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        self._url = f"{scheme}://{parts.netloc}/happenings" if parts.netloc else url
        self._token = token
        self._capabilities = list(capabilities)
        self._connector = connector or WebSocketConnector(ssl_context=ssl_context, silence_s=_SILENCE_S)
        self._clock = clock
        self._rng = rng or random.Random()
        self.patience_s = patience_s
        self._reconnecting = self.reconnecting()
        self._talk: Conversation | None = None
        self._turn = asyncio.Lock()
        self.granted: frozenset[str] = frozenset()
        """The capabilities that the node granted, once there was a connection."""

    @classmethod
    def unix(
        cls,
        path: Path | str,
        *,
        capabilities: Sequence[str] = (),
        patience_s: float | None = _PATIENCE_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> LedgerClient:
        """The ledger behind a steward's Unix socket."""
        return cls(str(path), capabilities=capabilities, patience_s=patience_s, connector=UnixConnector(), clock=clock)

    # Asking

    async def call(self, request: requests.StewardRequest) -> dict[str, Any]:
        """
        The answer to a request, as JSON has it.

        Raises:
            LedgerRefused: The node said no.
            AnswerLost: The request changes something, and the connection broke before the answer came.
            RemoteUnavailable: The node was not reached; nothing was changed.
            RemoteStopped: The node does not want us, and will not; nothing was changed.
        """
        async with self._turn:
            while True:
                if self._talk is None or not self._talk.is_open:
                    self._talk = await self.connect(self._reconnecting)
                try:
                    answer = await self._talk.ask(request)
                except LedgerRefused:
                    self._reconnecting.succeeded()
                    raise
                except BaseException as error:  # an answer that nobody waited for would be taken for the next one's
                    talk, self._talk = self._talk, None
                    await talk.close()
                    if not isinstance(error, LinkClosed):
                        raise
                    if request.changes:
                        raise AnswerLost(request.op, request.twice == "same", str(error)) from error
                    await self._reconnecting.pause(error)
                else:
                    self._reconnecting.succeeded()
                    return answer

    def reconnecting(self) -> Reconnecting:
        """When a connection of this client is opened again."""
        return Reconnecting(
            self._url,
            clock=self._clock,
            rng=self._rng,
            patience_s=self.patience_s,
            may_differ=callable(self._token),
        )

    async def connect(self, reconnecting: Reconnecting) -> Conversation:
        """
        A new connection that has shown its token and has its capabilities, after as many attempts as it takes.

        Raises:
            LedgerRefused: The node said no.
            RemoteStopped, RemoteUnavailable: As of ``Reconnecting.pause``.
        """
        while True:
            try:
                return await self._open()
            except LinkError as problem:
                await reconnecting.pause(problem)

    async def _open(self) -> Conversation:
        talk = Conversation(await open_link(self._connector, self._url, self._clock, _CONNECT_S_MAX))
        try:
            if self._token is not None:
                await self._authenticate(talk, self._token)
            if self._capabilities:
                answer = await talk.ask(requests.NegotiateRequest(capabilities=self._capabilities))
                self.granted = frozenset(answer["granted"])
        except BaseException:
            await talk.close()
            raise
        return talk

    async def _authenticate(self, talk: Conversation, token: TokenSource) -> None:
        try:
            await talk.ask(requests.AuthenticateRequest(token=await fresh_token(token)))
        except LedgerRefused as refused:
            if not callable(token):
                raise
            raise LinkClosed(CLOSE_AUTH_FAILED, refused.problem) from refused  # the next one may be accepted

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

    def appointments(self) -> AsyncIterator[dict[str, Any]]:
        """All appointments, page by page. Takes the capability ``appointments_admin``."""
        return self._pages(requests.ListAppointmentsRequest(page_size=_PAGE_SIZE), "entries")

    def watches(self) -> AsyncIterator[dict[str, Any]]:
        """All watches, page by page. Takes the capability ``watches_admin``."""
        return self._pages(requests.ListWatchesRequest(page_size=_PAGE_SIZE), "entries")

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
                shelf=shelf, request_type=request_type, payload_b64=as_base64(payload), instance_id=instance_id
            )
        )
        return base64.b64decode(answer["payload_b64"])

    async def take_custody(self, shelf: str, custody_type: str, payload: bytes = b"") -> str:
        """Have the plugin on a shelf take custody; the handle's id."""
        answer = await self.call(
            requests.TakeCustodyRequest(shelf=shelf, custody_type=custody_type, payload_b64=as_base64(payload))
        )
        return str(answer["handle"]["id"])

    async def correct_course(self, shelf: str, handle: str, correction_type: str, payload: bytes = b"") -> None:
        """Have it change its work."""
        await self.call(
            requests.CourseCorrectRequest(
                shelf=shelf, handle=handle, correction_type=correction_type, payload_b64=as_base64(payload)
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
        self,
        canonical_id: str,
        *,
        scope: dict[str, Any] | None = None,
        follow_aliases: bool = True,
        since: int | None = None,
    ) -> RemoteHappenings:
        """A subject's projection, now and whenever it changes; the first has the seq of the last happening after ``since`` that touched it."""
        request = requests.SubscribeSubjectRequest(
            canonical_id=canonical_id, scope=scope, follow_aliases=follow_aliases, since=since
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
        talk = await self.connect(self.reconnecting())
        serving: asyncio.Task[None] | None = None
        try:
            kind: Literal["warden", "respondent"] = "warden" if isinstance(handler, Warden) else "respondent"
            await talk.ask(
                requests.LoadPluginRequest(plugin=name, interaction_kind=kind, manifest=msgspec.to_builtins(manifest))
            )
            serving = asyncio.create_task(serve_calls(talk, handler), name=f"tidings-plugin-{name}")
            yield RemotePlugin(self, name)
        finally:
            await talk.close()
            if serving is not None:
                await asyncio.gather(serving, return_exceptions=True)

    async def close(self) -> None:
        """Close the connection of requests. Closing twice is fine."""
        talk, self._talk = self._talk, None
        if talk is not None:
            await talk.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class RemoteHappenings:
    """
    A subscription. Entering it connects and waits for the acknowledgement; iterating gives frames as JSON has them: happenings
    (``seq``, ``happening``), projections, and ``lagged`` where some were missed.

    When the connection breaks it is opened again, and the subscription goes on: happenings after the last one that was given, without a gap or a
    repeat (with coalescing, what was held back when it broke is told one by one, and some of it may have been told); a subject with its
    projection as it is then. What was told meanwhile without being written down is missed. Iterating ends when a subject was split, and for a
    client without patience when the node ends the stream.

    Iterating raises ``LedgerRefused`` if the node does not have the rest any more, or has begun another log; and ``RemoteStopped`` and
    ``RemoteUnavailable`` as ``LedgerClient.call`` does.
    """

    def __init__(self, client: LedgerClient, request: requests.SubscribeRequest) -> None:
        self._client = client
        self._request = request
        self._reconnecting = client.reconnecting()
        self._talk: Conversation | None = None
        self._is_over = False
        self.current_seq = 0
        """The newest seq when it began."""
        self.resume_seq: int | None = request.since
        """What to subscribe ``since`` so that nothing is missed after the last frame."""
        self.epoch = ""
        """The life of the log that seqs are counted in."""

    async def __aenter__(self) -> Self:
        self.current_seq = await self._begin(self._request)
        if self.resume_seq is None:
            self.resume_seq = self.current_seq
        return self

    async def _begin(self, request: requests.StewardRequest) -> int:
        """Connect and subscribe; the newest seq."""
        while True:
            talk = await self._client.connect(self._reconnecting)
            try:
                if not self.epoch:
                    self.epoch = (await talk.ask(requests.DescribeCapabilitiesRequest()))["epoch"]
                answer = await talk.ask(request)
            except BaseException as error:
                await talk.close()
                if not isinstance(error, LinkClosed):
                    raise
                await self._reconnecting.pause(error)
            else:
                self._talk = talk
                self._reconnecting.succeeded()
                return int(answer["current_seq"])

    def _continuation(self) -> requests.StewardRequest:
        """What to ask for after a break."""
        if isinstance(self._request, requests.SubscribeHappeningsRequest):
            return msgspec.structs.replace(self._request, since=self.resume_seq, epoch=self.epoch)
        return self._request

    async def __aexit__(self, *exc: object) -> None:
        self._is_over = True
        if self._talk is not None:
            await self._talk.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        assert self._talk is not None
        while True:
            try:
                frame = answer_of(await self._talk.next())
                break
            except LinkClosed as closed:
                if self._is_over or (closed.close_code == CLOSE_NORMAL and self._client.patience_s == 0):
                    raise StopAsyncIteration from None
                await self._talk.close()
                await self._reconnecting.pause(closed)
                await self._begin(self._continuation())
        if "happening" in frame:
            self.resume_seq = frame.get("resume_seq", frame["seq"])
        elif isinstance(self._request, requests.SubscribeSubjectRequest) and "canonical_id" in frame:
            # Merged or migrated meanwhile, the subject is followed from here; split, there is nothing to follow.
            self._is_over = "new_ids" in frame
            self._request = msgspec.structs.replace(
                self._request, canonical_id=frame["canonical_id"], follow_aliases=True, since=None
            )
        return frame
