"""
What access answers when it says no, or cannot say.

    AccessError
    ├── AuthFailed              nobody we know is asking
    │   ├── TokenInvalid            the token is malformed, forged, for somebody else, or not valid yet
    │   ├── TokenExpired            it was valid once
    │   ├── TokenRevoked            it, or its subject, was revoked
    │   └── TemporarilyDenied       whoever is asking is kept out for a time
    ├── Forbidden               we know who is asking, and they may not
    ├── InvalidChange           a grant, revocation or policy change that makes no sense
    ├── InvalidPolicy           a policy that Cedar does not take, or that does not fit our schema
    ├── AccessUnavailable       who may do what is not known
    ├── AuditUnavailable        what has to be on record cannot be recorded
    ├── InvalidApp              an app, an event type or a channel that makes no sense
    ├── UnknownApp             no app of that name is registered
    ├── InvalidDirective        an instruction to deny or allow that makes no sense
    ├── NodeUnreachable         the node that was to make a change did not answer
    └── NodeRefused             it said no

No message holds a token, a key or a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidings.core.errors import TidingsError

if TYPE_CHECKING:
    from .resources import Action, Resource


class AccessError(TidingsError):
    """The root of what access raises."""

    code = "access.error"


class AuthFailed(AccessError):
    """It is not known who is asking."""

    code = "access.auth_failed"
    text = "there is no valid token"


class TokenInvalid(AuthFailed):
    """The token cannot be believed; ``reason`` is for whoever issued it."""

    code = "access.token_invalid"
    text = "the token is not valid: {reason}"
    reason: str
    hint: str | None = None


class TokenExpired(AuthFailed):
    """The token was valid once."""

    code = "access.token_expired"
    hint = "get a new token"
    text = "the token has expired"
    expired_at_ns: int


class TokenRevoked(AuthFailed):
    """The token or its subject was revoked."""

    code = "access.token_revoked"
    text = "access of {subject!r} was revoked"
    subject: str


class Forbidden(AccessError):
    """Whoever is asking may not do this."""

    code = "access.forbidden"
    text = "{subject!r} may not {action.value} {resource}"
    subject: str
    action: Action
    resource: Resource


class InvalidChange(AccessError):
    """A change of access cannot be taken as it is; ``field`` names the part at fault."""

    code = "access.invalid_change"
    text = "{field}: {problem}"
    field: str
    problem: str
    hint: str | None = None


class InvalidPolicy(AccessError):
    """A policy cannot be taken; ``problems`` has one sentence for each thing that is wrong with it."""

    code = "access.invalid_policy"
    problems: tuple[str, ...]

    def describe(self) -> str:
        return f"the policy is not valid: {'; '.join(self.problems)}"


class AccessUnavailable(AccessError):
    """The access book is closed: everything is denied, and nothing is decided that would hold later."""

    code = "access.unavailable"
    retryable = True
    hint = "put the policy anew, or dismiss the record: `tidings policy dismiss`"
    text = "access cannot be decided: {problem}"
    problem: str

    @property
    def public_text(self) -> str:
        """Not what the record says: it is for administrators, and as long as this lasts nobody is one."""
        return "access cannot be decided now"


class AuditUnavailable(AccessError):
    """A record of the topic ``audit`` was not taken, and what it would have told of must not happen without it."""

    code = "access.audit_unavailable"
    retryable = True
    text = "nothing can be put on record: {problem}"
    problem: str


class InvalidApp(AccessError):
    """A change of the app registry cannot be taken as it is; ``field`` names the part at fault."""

    code = "access.invalid_app"
    text = "{field}: {problem}"
    field: str
    problem: str
    hint: str | None = None


class UnknownApp(AccessError):
    """No app of that name is registered, or it is disabled."""

    code = "access.unknown_app"
    text = "there is no app {slug!r}"
    slug: str


class InvalidDirective(AccessError):
    """A directive cannot be taken as it is, and nothing was loosened; ``field`` names the part at fault."""

    code = "access.invalid_directive"
    text = "{field}: {problem}"
    field: str
    problem: str
    hint: str | None = None


class TemporarilyDenied(AuthFailed):
    """A directive keeps whoever is asking out for a time."""

    code = "access.temporarily_denied"
    retryable = True
    hint = "come back later, and less often"
    text = "denied for another {retry_after_s} s ({reason_code})"
    retry_after_s: int
    reason_code: str


class NodeUnreachable(AccessError):
    """A node was asked, and did not answer."""

    code = "access.node_unreachable"
    retryable = True
    hint = "see that it runs, and that this is its address"
    text = "the node at {url} did not answer: {problem}"
    url: str
    problem: str


class NodeRefused(AccessError):
    """A node said no, and why: ``error_code`` is the code of the error that it met, if it said that."""

    code = "access.node_refused"
    status: int
    problem: str
    hint: str | None = None
    error_code: str | None = None
    may_retry: bool = False

    def describe(self) -> str:
        return self.problem if self.error_code else f"the node refused ({self.status}): {self.problem}"
