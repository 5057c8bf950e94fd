"""
What the node answers when it cannot do what it was asked.

    NodeError
    ├── AddressInUse            another process listens there
    ├── AddressUnusable         the host cannot be listened on
    ├── CertificateUnusable     certificate or key cannot be read, or do not fit
    ├── InternalError           a request met an error of ours; the log has it under the request's id
    └── TrafficRefused ...      what the edge refuses before any door or route sees it
        ├── NodeStopping            the node is stopping and lets nobody in
        ├── MalformedRequest        what came is no HTTP request
        ├── BadHandshake            an upgrade is asked for in a way that no WebSocket is
        ├── HeadTooLarge            the request's head is over the limit
        ├── BodyTooLarge            the request's body is over the limit
        ├── TooManyConnections      a connection limit is reached
        ├── TooManyRequests         as many requests are being answered as may be
        ├── OriginRefused           the page's origin is not among those allowed
        ├── HostRefused             the node is not known by that name
        ├── NoSuchDoor              no door answers at that path
        └── RequestRefused          no route answers at that path, or not with that method
"""

from __future__ import annotations

from typing import ClassVar

from tidings.core.errors import TidingsError

__all__ = [
    "AddressInUse",
    "AddressUnusable",
    "BadHandshake",
    "BodyTooLarge",
    "CertificateUnusable",
    "HeadTooLarge",
    "HostRefused",
    "InternalError",
    "MalformedRequest",
    "NoSuchDoor",
    "NodeError",
    "NodeStopping",
    "OriginRefused",
    "RequestRefused",
    "TooManyConnections",
    "TooManyRequests",
    "TrafficRefused",
]


class NodeError(TidingsError):
    """The root of what the node raises."""

    code = "node.error"


class AddressInUse(NodeError):
    """Another process listens at the address."""

    code = "node.address_in_use"
    retryable = True
    hint = "choose another --port (0 takes a free one), or stop the process that listens there"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address

    def describe(self) -> str:
        return f"{self.address} is in use by another process"


class AddressUnusable(NodeError):
    """The address cannot be listened on."""

    code = "node.address_unusable"

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(address, problem)
        self.address = address
        self.problem = problem

    def describe(self) -> str:
        return f"cannot listen on {self.address}: {self.problem}"


class CertificateUnusable(NodeError):
    """The certificate or its key cannot be used."""

    code = "node.certificate_unusable"
    hint = "server.tls_cert_file is a PEM chain, server.tls_key_file its unencrypted PEM key"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def describe(self) -> str:
        return f"{self.path}: {self.problem}"


class InternalError(NodeError):
    """A request met an error of ours."""

    code = "node.internal_error"
    retryable = True
    hint = "the node's log has the cause under this request id"

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def describe(self) -> str:
        return "the node failed to answer"


class TrafficRefused(NodeError):
    """The edge refuses a request before anybody looks at what it says."""

    code = "node.traffic_refused"
    status: ClassVar[int] = 400


class NodeStopping(TrafficRefused):
    """The node is stopping and takes no new connections."""

    code = "node.stopping"
    retryable = True
    status = 503
    hint = "connect to another node, or again in a moment"

    def describe(self) -> str:
        return "the node is stopping"


class MalformedRequest(TrafficRefused):
    """What came is no HTTP request, or its body breaks off its own form."""

    code = "node.malformed_request"

    def describe(self) -> str:
        return "this is no HTTP request"


class BadHandshake(TrafficRefused):
    """A WebSocket is asked for, and the request is not one that RFC 6455 has."""

    code = "node.bad_handshake"
    hint = "send GET with Sec-WebSocket-Version: 13 and a Sec-WebSocket-Key of 16 bytes"

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def describe(self) -> str:
        return f"the WebSocket handshake is not valid: {self.problem}"


class HeadTooLarge(TrafficRefused):
    """A request's head is over the limit."""

    code = "node.head_too_large"
    status = 431

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self.bytes_max = bytes_max

    def describe(self) -> str:
        return f"the head is larger than {self.bytes_max} bytes"


class BodyTooLarge(TrafficRefused):
    """A request's body is over the limit."""

    code = "node.body_too_large"
    status = 413
    hint = "send fewer events a request; the limit is the setting server.body_bytes_max"

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self.bytes_max = bytes_max

    def describe(self) -> str:
        return f"the body is larger than {self.bytes_max} bytes"


class TooManyConnections(TrafficRefused):
    """A connection limit is reached: of sockets, over all or from one address, or of HTTP from one address."""

    code = "node.too_many_connections"
    retryable = True
    status = 503
    hint = (
        "try again later; the limits are the settings server.connections_max, server.connections_per_address_max"
        " and server.requests_per_address_max"
    )

    def __init__(self, limit: int, scope: str) -> None:
        super().__init__(limit, scope)
        self.limit = limit
        self.scope = scope

    def describe(self) -> str:
        return f"there are {self.limit} connections {self.scope} already"


class TooManyRequests(TrafficRefused):
    """As many HTTP connections are open as may be."""

    code = "node.too_many_requests"
    retryable = True
    status = 503
    hint = "try again later; the limit is the setting server.requests_max"

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit

    def describe(self) -> str:
        return f"there are {self.limit} HTTP connections already"


class TooManyPublishes(NodeError):
    """As many publishes are under way, or wait, as may be: the other places are for those who read."""

    code = "node.too_many_publishes"
    retryable = True
    status = 503
    hint = "try again later; publishes have half of server.requests_max"

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit

    def describe(self) -> str:
        return f"{self.limit} publishes are under way or wait already"


class OriginRefused(TrafficRefused):
    """The page that asks for a connection comes from an origin that is not allowed."""

    code = "node.origin_refused"
    status = 403
    hint = "allow it with the setting server.origins"

    def __init__(self, origin: str) -> None:
        super().__init__(origin)
        self.origin = origin

    def describe(self) -> str:
        return f"origin {self.origin!r} may not connect"


class HostRefused(TrafficRefused):
    """The request was sent to a name that is not the node's: a web page may have made its own name lead here."""

    code = "node.host_refused"
    status = 421
    hint = "reach the node by its address or localhost, or add the name to the setting server.hosts"

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.host = host

    def describe(self) -> str:
        return f"this node is not known as {self.host!r}"


class NoSuchDoor(TrafficRefused):
    """No door answers at that path."""

    code = "node.no_such_door"
    status = 404

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def describe(self) -> str:
        return f"no door answers at {self.path!r}"


class RequestRefused(TrafficRefused):
    """No route answers such a request."""

    code = "node.request_refused"

    def __init__(self, method: str, path: str, status: int, reason: str) -> None:
        super().__init__(method, path, status, reason)
        self.method = method
        self.path = path
        self.answered = status
        self.reason = reason

    def describe(self) -> str:
        return f"{self.method} {self.path}: {self.reason}"
