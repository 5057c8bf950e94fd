"""
What the node answers when it cannot do what it was asked.

    NodeError
    ├── AddressInUse            another process listens there
    ├── AddressUnusable         the host cannot be listened on
    ├── CertificateUnusable     certificate or key cannot be read, or do not fit
    ├── InternalError           a request met an error of ours; the log has it under the request's id
    ├── InvalidSignal           a part says of its health what makes no sense
    ├── SettingsVetoed          a setting cannot be changed while the node runs
    ├── TooManyPublishes        as many publishes are under way, or wait, as may be
    ├── ApiError ...            a request to the HTTP API cannot be accepted as it is
    │   ├── BadRequest          a parameter, a header or the body is not what the schema says
    │   ├── UnsupportedMedia        the body is of a kind that this place does not take
    │   ├── TooManyEvents           more events in one request than the settings allow
    │   ├── ReservedTopic           the topic is written by Tidings itself
    │   ├── ForeignActor            the event is said to be somebody else's
    │   ├── UnknownPath             nothing is there
    │   ├── MethodNotAllowed        something is there, and cannot be asked for that
    │   └── UnknownEvent            no record has that seq
    └── TrafficRefused ...      what the edge refuses before any endpoint or route sees it
        ├── NodeStopping            the node is stopping and lets nobody in
        ├── MalformedRequest        what came is no HTTP request
        ├── BadHandshake            an upgrade is asked for in a way that no WebSocket is
        │   └── UnknownSocketVersion    it is of another version than 13
        ├── HeadTooLarge            the request's head is over the limit
        ├── TooManyHeaders          the request has more headers than one may have
        ├── BodyTooLarge            the request's body is over the limit
        ├── TooManyConnections      a connection limit is reached
        ├── MemoryExhausted         clients make the node hold as much memory as they may
        ├── TooManyRequests         as many requests are being answered as may be
        ├── OriginRefused           the page's origin is not among those allowed
        ├── HostRefused             the node is not known by that name
        ├── NoSuchEndpoint          no endpoint answers at that path
        └── RequestRefused          no route answers at that path, or not with that method
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from tidings.core.errors import TidingsError


class NodeError(TidingsError):
    """The root of what the node raises."""

    code = "node.error"


class NodeNotStarted(NodeError):
    """A part of a node is used before it was started."""

    code = "node.not_started"
    text = "the node has not been started"
    hint = "use its bus, ledger and log within `async with node:`, or after `await node.start()`; `@node.bus.subscriber(...)` goes there too"


class AddressInUse(NodeError):
    """Another process listens at the address."""

    code = "node.address_in_use"
    retryable = True
    hint = "choose another port (--port, or `port` in ServerSettings; 0 takes a free one), or stop the process that listens there"
    text = "{address} is in use by another process"
    address: str


class AddressUnusable(NodeError):
    """The address cannot be listened on."""

    code = "node.address_unusable"
    text = "cannot listen on {address}: {problem}"
    address: str
    problem: str


class CertificateUnusable(NodeError):
    """The certificate or its key cannot be used."""

    code = "node.certificate_unusable"
    hint = "server.tls_cert_file is a PEM chain, server.tls_key_file its unencrypted PEM key"
    text = "{path}: {problem}"
    path: str
    problem: str


class InternalError(NodeError):
    """A request met an error of ours."""

    code = "node.internal_error"
    retryable = True
    hint = "the node's log has the cause under this request id"
    text = "the node failed to answer"
    request_id: str


class InvalidSignal(NodeError):
    """A component's signal was rejected: nobody registered it, or what it says makes no sense."""

    code = "node.invalid_signal"
    text = "component {component!r}: {problem}"
    component: str
    problem: str


class SettingsVetoed(NodeError):
    """A part of the node cannot go on with a new value; nothing was changed."""

    code = "node.settings_vetoed"
    status = 409
    text = "{owner} does not take {setting}: it {problem}"
    owner: str
    setting: str
    problem: str


class TrafficRefused(NodeError):
    """The edge refuses a request before anybody looks at what it says."""

    code = "node.traffic_refused"
    status: ClassVar[int] = 400
    headers: ClassVar[Mapping[str, str]] = {}
    """More headers of the answer."""


class NodeStopping(TrafficRefused):
    """The node is stopping and takes no new connections."""

    code = "node.stopping"
    retryable = True
    status = 503
    hint = "connect to another node, or again in a moment"
    text = "the node is stopping"


class MalformedRequest(TrafficRefused):
    """What came is no HTTP request, or its body breaks off its own form."""

    code = "node.malformed_request"
    problem: str = ""

    def describe(self) -> str:
        return f"this is no HTTP request: {self.problem}" if self.problem else "this is no HTTP request"


class BadHandshake(TrafficRefused):
    """A WebSocket is asked for, and the request is not one that RFC 6455 has."""

    code = "node.bad_handshake"
    hint = "send GET with Sec-WebSocket-Version: 13 and a Sec-WebSocket-Key of 16 bytes"
    headers: ClassVar[Mapping[str, str]] = {"sec-websocket-version": "13"}
    text = "the WebSocket handshake is not valid: {problem}"
    problem: str


class UnknownSocketVersion(BadHandshake):
    """A WebSocket of another version than 13 is asked for."""

    code = "node.unknown_socket_version"
    status = 426
    headers: ClassVar[Mapping[str, str]] = {"sec-websocket-version": "13", "upgrade": "websocket"}
    text = "version {problem!r} of WebSocket is not supported here, only 13"


class HeadTooLarge(TrafficRefused):
    """A request's head is over the limit."""

    code = "node.head_too_large"
    status = 431
    text = "the head is larger than {bytes_max} bytes"
    bytes_max: int


class TooManyHeaders(TrafficRefused):
    """A request has more headers than one may have."""

    code = "node.too_many_headers"
    status = 431
    text = "the request has more than {count_max} headers"
    count_max: int


class BodyTooLarge(TrafficRefused):
    """A request's body is over the limit."""

    code = "node.body_too_large"
    status = 413
    headers: ClassVar[Mapping[str, str]] = {"connection": "close"}  # the rest of the body is not worth reading
    hint = "send fewer events a request, within server.body_bytes_max; other requests have short bodies"
    text = "the body is larger than {bytes_max} bytes"
    bytes_max: int


class TooManyConnections(TrafficRefused):
    """A connection limit is reached: of sockets, over all or from one address, or of HTTP from one address."""

    code = "node.too_many_connections"
    retryable = True
    status = 503
    hint = (
        "try again later; the limits are the settings server.connections_max, server.connections_per_address_max"
        " and server.requests_per_address_max"
    )
    text = "there are {limit} connections {scope} already"
    limit: int
    scope: str


class TooManyRequests(TrafficRefused):
    """As many HTTP connections are open as may be."""

    code = "node.too_many_requests"
    retryable = True
    status = 503
    hint = "try again later; the limit is the setting server.requests_max"
    text = "there are {limit} HTTP connections already"
    limit: int


class MemoryExhausted(TrafficRefused):
    """A connection, an identity, an address, or all clients together make the node hold as much memory as they may."""

    code = "node.memory_exhausted"
    retryable = True
    status = 503
    headers: ClassVar[Mapping[str, str]] = {"connection": "close"}  # the rest of a body has no room
    scope: str
    """``connection``, ``identity``, ``address``, ``total``, ``unauthenticated`` or ``unauthenticated_address``."""
    limit_bytes: int
    setting: str

    def __init__(self, scope: str, limit_bytes: int, setting: str) -> None:
        super().__init__(scope, limit_bytes, setting)
        self.hint = f"send less at a time, or try again later; the limit is the setting {setting}"

    def describe(self) -> str:
        scope = self.scope.replace("_", " ")
        return f"the node holds as much as it may for the scope {scope!r}: {self.limit_bytes} bytes"


class TooManyPublishes(NodeError):
    """As many publishes are under way, or wait, as may be: the other places are for those who read."""

    code = "node.too_many_publishes"
    retryable = True
    status = 503
    hint = "try again later; publishes have half of server.requests_max, and those of one identity a quarter of that"
    text = "{limit} publishes are under way or wait already"
    limit: int


class OriginRefused(TrafficRefused):
    """The page that asks for a connection comes from an origin that is not allowed."""

    code = "node.origin_refused"
    status = 403
    hint = "allow it with the setting server.origins"
    text = "origin {origin!r} may not connect"
    origin: str


class HostRefused(TrafficRefused):
    """The request was sent to a name that is not the node's: a web page may have made its own name lead here."""

    code = "node.host_refused"
    status = 421
    hint = "reach the node by its address or localhost, or add the name to the setting server.hosts"
    text = "this node is not known as {host!r}"
    host: str


class NoSuchEndpoint(TrafficRefused):
    """No endpoint answers at that path."""

    code = "node.no_such_endpoint"
    status = 404
    text = "no endpoint answers at {path!r}"
    path: str


class RequestRefused(TrafficRefused):
    """No route answers such a request."""

    code = "node.request_refused"
    text = "{method} {path}: {reason}"
    method: str
    path: str
    answered: int
    reason: str


class ApiError(NodeError):
    """The root of what the HTTP API raises itself."""

    code = "api.error"
    status = 400


class BadRequest(ApiError):
    """Part of a request is not what it must be; ``field`` names it."""

    code = "api.invalid_request"
    text = "{field}: {problem}"
    field: str
    problem: str
    hint: str | None = None


class UnsupportedMedia(ApiError):
    """The body is of a kind that is not taken here."""

    code = "api.unsupported_media"
    status = 415

    given: str

    def __init__(self, given: str, taken: Iterable[str]) -> None:
        super().__init__(given)
        self.taken = tuple(taken)
        self.hint = f"send {', '.join(self.taken)}"

    def describe(self) -> str:
        return (
            f"a body of type {self.given[:100]!r} is not taken here" if self.given else "the body has no content type"
        )


class TooManyPartitions(ApiError):
    """The events of a request name more partitions than one request may; none was stored."""

    code = "api.too_many_partitions"
    status = 413
    hint = "send the events in several requests; the limit is the setting api.partitions_count_max"
    text = "the events of the request name {count} partitions; at most {count_max} are allowed"
    count: int
    count_max: int


class TooManyEvents(ApiError):
    """A request has more events than one may have; none was stored."""

    code = "api.too_many_events"
    status = 413
    hint = "send them in several requests; the limit is the setting api.events_count_max"
    text = "the request has {count} events; at most {count_max} are allowed"
    count: int
    count_max: int


class ReservedTopic(ApiError):
    """Tidings acts on the records of this topic: it writes them itself, or accepts them through sync only."""

    code = "api.reserved_topic"
    status = 403
    hint = "changes of access go to /v1/access, those of apps to /v1/apps, events of sync clients to /sync, commands to the ledger; what is done here is audited by itself"
    text = "topic {topic!r} is not published to"
    topic: str


class ForeignActor(ApiError):
    """An event names an actor that its publisher is not, and may not publish for; ``field`` says where."""

    code = "api.foreign_actor"
    status = 403
    field = "meta.actor"
    hint = "leave meta.actor out, or have the right to publish for that actor granted (publish on actor:NAME)"
    subject: str
    actor: str | None

    def describe(self) -> str:
        named = "names nobody" if self.actor is None else f"{self.actor[:100]!r} is somebody else"
        return f"{self.field}: {named}; {self.subject!r} is publishing"


class UnknownPath(ApiError):
    """Nothing is at that path."""

    code = "api.unknown_path"
    status = 404
    hint = "/v1/openapi.json lists what there is"
    path: str

    def describe(self) -> str:
        return f"there is nothing at {self.path[:200]!r}"


class MethodNotAllowed(ApiError):
    """The path is known, the method is not one of its own."""

    code = "api.method_not_allowed"
    status = 405
    text = "{method} is not possible here"
    method: str

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        super().__init__(method)
        self.allowed = tuple(allowed)
        self.hint = f"this place takes {', '.join(self.allowed)}"


class UnknownEvent(ApiError):
    """No record that the caller may see has that seq."""

    code = "api.unknown_event"
    status = 404
    text = "there is no event at seq {seq}"
    seq: int
