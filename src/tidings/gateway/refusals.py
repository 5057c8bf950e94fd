"""
What the gateway answers whoever may not subscribe: before the upgrade an HTTP status, after it a close reason.

    SubscriptionRefused         before the upgrade, as a problem document; nothing was opened
    ├── AuthRequired                no token was shown
    ├── AuthInvalid                 the token is not accepted
    │   ├── AuthExpired                 it was valid once
    │   └── AuthRevoked                 it, or its subject, was revoked
    ├── BadUpgrade                  a parameter or header is malformed
    ├── FilterDenied                a read asks for what the identity may not see
    ├── AppNotFound                 there is no such app
    ├── AdmissionDenied             over a limit, or denied for a time
    ├── GatewayNotReady             the gateway cannot deliver now
    └── GatewayDraining             the node is stopping
    SubscriptionClosed          after the upgrade, with a close reason; nothing stays registered
"""

from __future__ import annotations

from typing import ClassVar

from tidings.core.errors import TidingsError
from tidings.wire.gateway import CloseReason


class SubscriptionRefused(TidingsError):
    """No connection is opened; ``status`` is what HTTP answers, ``reason`` what is counted and audited."""

    code = "gateway.subscription_refused"
    status: ClassVar[int] = 400
    reason: ClassVar[str] = "subscription_rejected"


class AuthRequired(SubscriptionRefused):
    """No token was shown."""

    code = "auth_required"
    status = 401
    reason = "auth_failed"
    hint = "send the token as Authorization: Bearer, or as the query's token"
    text = "a token is needed"


class AuthInvalid(SubscriptionRefused):
    """The token is malformed, forged or not for this node, or two differ."""

    code = "auth_invalid"
    status = 401
    reason = "auth_failed"
    text = "the token is not valid"


class AuthExpired(AuthInvalid):
    """The token was valid once."""

    code = "ERR_AUTH_TOKEN_EXPIRED"
    hint = "get a new token"
    text = "the token has expired"


class AuthRevoked(AuthInvalid):
    """The token or its subject was revoked."""

    code = "ERR_AUTH_TOKEN_REVOKED"
    text = "the token was revoked"


class BadUpgrade(SubscriptionRefused):
    """A parameter or a header of the upgrade is not what it must be."""

    code = "envelope_invalid"
    reason = "frame_invalid"
    text = "{field}: {problem}"
    field: str
    problem: str


class FilterDenied(SubscriptionRefused):
    """The filters of a read ask for what the identity may not see."""

    code = "acl_denied"
    status = 403
    reason = "acl_denied"
    text = "{problem}"
    problem: str


class AppNotFound(SubscriptionRefused):
    """There is no such app, or it is not enabled."""

    code = "app_not_found"
    status = 404
    reason = "acl_denied"
    text = "there is no app {app!r}"
    app: str


class AdmissionDenied(SubscriptionRefused):
    """A limit on connections is reached, or new ones are denied for a time."""

    code = "network_rejected"
    status = 503
    retryable = True
    text = "{problem}"
    problem: str
    protocol_code: str
    """``ERR_RESOURCE_RATE_LIMIT``, or ``ERR_RESOURCE_PEER_LIMIT`` for the limit of one identity."""
    retry_after_s: int = 1


class GatewayNotReady(SubscriptionRefused):
    """Something that delivery depends on is not there."""

    code = "ERR_SVC_SYS_NOT_READY"
    status = 503
    retryable = True
    text = "events are not delivered now: {problem}"
    problem: str


class GatewayDraining(SubscriptionRefused):
    """The node is stopping."""

    code = "ERR_SVC_SYS_DRAINING"
    status = 503
    retryable = True
    text = "the node is stopping"


class SubscriptionClosed(TidingsError):
    """A subscription is refused or ended after the upgrade: ``close_reason`` says how the connection is closed, ``data`` goes with it."""

    code = "gateway.subscription_closed"
    text = "{problem}"
    close_reason: CloseReason
    problem: str
    data: dict[str, object] | None = None
