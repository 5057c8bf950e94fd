"""
One declaration an operation: what is checked, what is done, and what the document says, from the same structs.

An ``ApiOperation`` names its method, path, parameters, body and answers. ``Call`` gives the handler the checked values, ``resources_of``
makes the routes, ``openapi`` the document; so what is documented is what is enforced.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from tidings.access.audit import Audit
from tidings.access.book import Capsule
from tidings.core.errors import TidingsError
from tidings.core.validation import UNREADABLE, explain, refuse_repeated_keys

from ..edge import problem_response
from ..envelope_history import EnvelopeHistory
from ..errors import BadRequest, BodyTooLarge, MethodNotAllowed, TooManyPublishes, UnknownPath, UnsupportedMedia
from ..memory import MemoryAccount
from ..services import Services
from ..settings import ApiSettings

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"

BODY_BYTES_MAX: Final = 65_536
"""The longest body of an operation that does not store events."""

_S = TypeVar("_S", bound=msgspec.Struct)


class OneOf:
    """For the document: any of these types."""

    __slots__ = ("kinds",)

    def __init__(self, *kinds: Any) -> None:
        self.kinds = kinds


_SHARES: Final = 4
"""One identity gets one part in this many of the places."""


class Places:
    """
    Publishes under way or waiting, and how many there may be: over all, and of one identity.

    Args:
        count_max: Over all.
    """

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.own_count_max = max(1, count_max // _SHARES)
        self._taken: Counter[str] = Counter()
        self._count = 0

    @contextlib.contextmanager
    def take(self, subject: str) -> Iterator[None]:
        """
        Take a place for the duration of the block.

        Raises:
            TooManyPublishes: All places, or those of one identity, are taken.
        """
        if self._count >= self.count_max:
            raise TooManyPublishes(self.count_max)
        if self._taken[subject] >= self.own_count_max:
            raise TooManyPublishes(self.own_count_max)
        self._count += 1
        self._taken[subject] += 1
        try:
            yield
        finally:
            self._count -= 1
            self._taken[subject] -= 1
            if not self._taken[subject]:
                del self._taken[subject]


@dataclass(frozen=True, slots=True)
class Api:
    """What the handlers work with."""

    services: Services
    settings: ApiSettings
    publishes: Places
    """Publishes that are under way or wait: some requests are left to those who read."""
    envelopes: EnvelopeHistory
    """What those read who missed something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOperation:
    """
    One thing that can be asked for.

    Args:
        method, path: Where; the path's parameters in braces.
        name: The document's ``operationId``.
        summary: One sentence.
        tag: The section of the document.
        handle: What is done.
        query: The parameters, as a struct that refuses unknown ones.
        body: The types of the body by media type.
        body_bytes_max: A longer body is refused; ``None`` for the node's limit.
        answers: Status to types by media type; an empty mapping for no body.
        problems: The statuses of the problems to expect beside 400, 401, 500 and 503.
        is_public: Whether it is answered without a token.
        is_administrative: Whether it takes the right to administer the node. Who asks for it, and whether they may, is told.
        is_guarded: Whether the guard can keep callers out; not where its directives are lifted.
    """

    method: str
    path: str
    name: str
    summary: str
    tag: str
    handle: Callable[[Call], Awaitable[Response]]
    query: type[msgspec.Struct] | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    body_bytes_max: int | None = BODY_BYTES_MAX
    answers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    problems: tuple[int, ...] = ()
    is_public: bool = False
    is_administrative: bool = False
    is_guarded: bool = True


@functools.cache
def _repeatable(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The parameters that may be given more than once."""
    fields = msgspec.structs.fields(kind)
    return frozenset(each.encode_name for each in fields if typing.get_origin(each.type) is tuple)


class Call:
    """
    One request to one operation.

    Args:
        api, operation: What is asked for.
        scope, receive: The request, as ASGI gives it.
        headers: Its headers, names in lower case; of one that is given twice, the first.
        capsule: What the caller may do; ``None`` for public operations.
    """

    __slots__ = ("_capsule", "_receive", "_scope", "api", "headers", "operation")

    def __init__(
        self,
        api: Api,
        operation: ApiOperation,
        scope: Scope,
        receive: Receive,
        headers: Mapping[str, str],
        capsule: Capsule | None,
    ) -> None:
        self.api = api
        self.operation = operation
        self.headers = headers
        self._scope = scope
        self._receive = receive
        self._capsule = capsule

    @property
    def capsule(self) -> Capsule:
        """What the caller may do; not for public operations."""
        assert self._capsule is not None
        return self._capsule

    @property
    def subject(self) -> str:
        """Who is asking."""
        return self.capsule.context.subject

    def audit(self) -> Audit:
        """The caller, as the audit names who has something changed."""
        return Audit(self.subject, "api", self.request_id)

    @property
    def request_id(self) -> str:
        """What the request is called in answers and records."""
        given: str = self._scope["state"]["request_id"]
        return given

    @property
    def method(self) -> str:
        """How it is asked: ``HEAD`` comes to the operation of ``GET``."""
        given: str = self._scope["method"]
        return given

    @property
    def address(self) -> str | None:
        """Where it comes from; ``None`` for the Unix socket."""
        client = self._scope.get("client")
        return None if client is None else str(client[0])

    def path(self, name: str) -> str:
        """A parameter of the path."""
        value: str = self._scope["path_params"][name]
        return value

    def query(self, kind: type[_S]) -> _S:
        """
        The parameters, checked.

        Raises:
            BadRequest: One is unknown, repeated, or not what it must be.
        """
        assert kind is self.operation.query
        lists = _repeatable(kind)
        values: dict[str, Any] = {}
        query: bytes = self._scope["query_string"]
        for name, value in QueryParams(query).multi_items() if query else ():
            if name in lists:
                values.setdefault(name, []).append(value)
            elif name in values:
                raise BadRequest(f"query.{name[:100]}", "is given twice")
            else:
                values[name] = value
        try:
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise invalid("query", error) from error

    async def body(self, kind: type[_S]) -> _S:
        """
        The body, checked.

        Raises:
            BadRequest: It is not what it must be.
            UnsupportedMedia: It is not JSON.
        """
        assert self.operation.body[JSON] is kind
        try:
            return msgspec.json.decode(await self.json_body() or b"{}", type=kind)
        except msgspec.ValidationError as error:
            raise invalid("body", error) from error
        except UNREADABLE as error:
            raise BadRequest("body", f"is not JSON: {error}") from error

    async def json_body(self) -> bytes:
        """
        The body as it came; empty if there is none.

        Raises:
            RepeatedKey: An object in it has a key twice.
            UnsupportedMedia: It does not say that it is JSON. A web page can send anything else without being asked first.
        """
        body = await self.content()
        if (media := self.media_type) != JSON and (body or media):
            raise UnsupportedMedia(media, self.operation.body)
        refuse_repeated_keys(body, "body")
        return body

    async def content(self) -> bytes:
        """
        The body as it came, whatever it is; to be asked for once. What it takes is charged to the caller.

        Raises:
            ClientDisconnect: The caller has gone.
            BodyTooLarge: It is longer than the operation's may be.
            MemoryExhausted: The caller makes the node hold as much as it may.
        """
        limit, size = self.operation.body_bytes_max, 0
        declared = self.headers.get("content-length", "")
        if limit is not None and declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(limit)
        memory: MemoryAccount | None = self._scope.get("tidings.memory")
        if memory is not None and self._capsule is not None:
            memory.identify(self.subject, self.address)
        parts: list[bytes] = []
        try:
            while True:
                message = await self._receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if limit is not None and size > limit:
                    raise BodyTooLarge(limit)
                if not message.get("more_body", False):
                    return b"".join(parts)
        finally:
            parts.clear()  # the connection keeps the error of a refused body, and its traceback this frame

    @property
    def media_type(self) -> str:
        """The body's type in lower case, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def accepts(self, *media_types: str) -> str:
        """The first of these that the caller asks for by name; else the first of all."""
        accepted = self.headers.get("accept", "").lower()
        wanted = [part.partition(";")[0].strip() for part in accepted.split(",")]
        return next((each for each in wanted if each in media_types), media_types[0])


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A struct as the answer."""
    return JsonAnswer(msgspec.json.encode(value), status, headers)


_SEPARATORS: Final = (("\u2028", rb"\u2028"), ("\u2029", rb"\u2029"), ("\u0085", rb"\u0085"))


def escape_separators(json: bytes) -> bytes:
    """
    Escape U+2028, U+2029 and U+0085 in JSON text. They are legal in its strings, but clients that split text into lines, as Python's
    ``splitlines`` does, take them for ends of lines.
    """
    if json.isascii():
        return json
    for character, escaped in _SEPARATORS:
        encoded = character.encode()
        if encoded[:1] in json and encoded in json:  # looking for one byte is far quicker, and most text has none
            json = json.replace(encoded, escaped)
    return json


class JsonAnswer(Response):
    """
    An answer whose body is ready: a ``Response`` without what that does for all other kinds.

    Args:
        body: JSON, or lines of JSON.
        status, headers: As for ``Response``.
        media: The body's type.
    """

    def __init__(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, media: str = JSON
    ) -> None:
        self.status_code = status
        self.body = body = escape_separators(body)
        self.background = None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media.encode())]
        if headers:
            self.raw_headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def invalid(place: str, error: msgspec.ValidationError) -> BadRequest:
    """What is wrong with a part of a request."""
    problem, path = explain(error)
    return BadRequest(f"{place}.{path}" if path else place, problem, "see /v1/openapi.json")


def resources_of(api: Api, operations: Iterable[ApiOperation]) -> list[BaseRoute]:
    """The routes of these operations, and at last one that says that there is nothing else."""
    by_path: dict[str, dict[str, ApiOperation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    routes: list[BaseRoute] = [Route(path, _Resource(api, methods)) for path, methods in by_path.items()]
    return [*routes, Route("/v1/{path:path}", _Resource(api, {}))]


class _Resource:
    """What answers at one path, whatever the method."""

    def __init__(self, api: Api, operations: Mapping[str, ApiOperation]) -> None:
        self._api = api
        self._operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except TidingsError as error:
            answer = problem_response(error, scope.get("state", {}).get("request_id"))
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        method, client = scope["method"], scope.get("client")
        if not self._operations:
            raise UnknownPath(scope["path"])
        operation = self._operations.get("GET" if method == "HEAD" else method)
        if operation is None:
            raise MethodNotAllowed(method, self._operations)
        capsule, services = None, self._api.services
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        if operation.is_guarded and client is not None:
            accepts = functools.partial(services.authenticator.accepts, headers.get("authorization"))
            services.guard.require(address=client[0], has_token=accepts)
        if not operation.is_public:
            header = headers.get("authorization")
            capsule = services.authenticator.of_header(header, path=operation.path, is_guarded=operation.is_guarded)
        if operation.is_administrative:
            assert capsule is not None
            services.authenticator.require_administrator(capsule, operation.name)
        query = scope["query_string"] if operation.query is None else b""
        if query and (given := next(iter(QueryParams(query)), None)) is not None:
            # Passing over it could carry out what was to be tried only: ?dry_run=true where the body says it.
            raise BadRequest(f"query.{given[:100]}", "is no parameter of this request", "see /v1/openapi.json")
        return await operation.handle(Call(self._api, operation, scope, receive, headers, capsule))
