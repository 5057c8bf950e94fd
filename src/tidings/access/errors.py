"""
What access answers when it says no, or cannot say.

    AccessError
    ├── AuthFailed              nobody we know is asking
    │   ├── TokenInvalid            the token is malformed, forged, for somebody else, or not valid yet
    │   ├── TokenExpired            it was valid once
    │   └── TokenRevoked            it, or its subject, was revoked
    ├── Forbidden               we know who is asking, and they may not
    ├── InvalidChange           a grant, revocation or policy change that makes no sense
    ├── InvalidPolicy           a policy that Cedar does not take, or that does not fit our schema
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

    def describe(self) -> str:
        return "there is no valid token"


class TokenInvalid(AuthFailed):
    """The token cannot be believed; ``reason`` is for whoever issued it."""

    code = "access.token_invalid"

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint

    def describe(self) -> str:
        return f"the token is not valid: {self.reason}"


class TokenExpired(AuthFailed):
    """The token was valid once."""

    code = "access.token_expired"
    hint = "get a new token"

    def __init__(self, expired_at_ns: int) -> None:
        super().__init__(expired_at_ns)
        self.expired_at_ns = expired_at_ns

    def describe(self) -> str:
        return "the token has expired"


class TokenRevoked(AuthFailed):
    """The token or its subject was revoked."""

    code = "access.token_revoked"

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.subject = subject

    def describe(self) -> str:
        return f"access of {self.subject!r} was revoked"


class Forbidden(AccessError):
    """Whoever is asking may not do this."""

    code = "access.forbidden"

    def __init__(self, subject: str, action: Action, resource: Resource) -> None:
        super().__init__(subject, action, resource)
        self.subject = subject
        self.action = action
        self.resource = resource

    def describe(self) -> str:
        return f"{self.subject!r} may not {self.action.value} {self.resource}"


class InvalidChange(AccessError):
    """A change of access cannot be taken as it is; ``field`` names the part at fault."""

    code = "access.invalid_change"

    def __init__(self, field: str, problem: str, hint: str | None = None) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem
        self.hint = hint

    def describe(self) -> str:
        return f"{self.field}: {self.problem}"


class InvalidPolicy(AccessError):
    """A policy cannot be taken; ``problems`` has one sentence for each thing that is wrong with it."""

    code = "access.invalid_policy"

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def describe(self) -> str:
        return f"the policy is not valid: {'; '.join(self.problems)}"


class NodeUnreachable(AccessError):
    """A node holds the workspace, and did not answer."""

    code = "access.node_unreachable"
    retryable = True

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url = url
        self.problem = problem

    def describe(self) -> str:
        return f"the node at {self.url} did not answer: {self.problem}"


class NodeRefused(AccessError):
    """The node that holds the workspace said no."""

    code = "access.node_refused"

    def __init__(self, status: int, problem: str, hint: str | None = None) -> None:
        super().__init__(status, problem)
        self.status = status
        self.problem = problem
        self.hint = hint

    def describe(self) -> str:
        return f"the node refused ({self.status}): {self.problem}"
