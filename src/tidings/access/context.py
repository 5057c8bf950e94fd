"""Who is asking: made once from a token, frozen, and passed on as it is."""

from __future__ import annotations

import msgspec

from .claims import ADMIN_ROLE, Claims

__all__ = ["Claims", "OperationContext", "anonymous"]


class OperationContext(msgspec.Struct, frozen=True):
    """On whose behalf something is done, and until when that can be believed."""

    subject: str
    client_id: str | None = None
    """The device or program, where the token names one."""
    expires_at_ns: int | None = None
    """From this moment on the token is refused, allowance for skewed clocks included. ``None`` if it never expires."""
    token_id: str | None = None
    """What the token can be revoked by (``jti``)."""
    claims: Claims = Claims()
    user_id: str | None = None
    """Whom the token names as the user of an application (``userId``), apart from its subject."""
    trust: str | None = None
    """What the token was believed for: its key, audience and issuer. ``None`` if there was no token."""

    @property
    def is_administrator(self) -> bool:
        """Whether the token has the administrators' role. What they may do is still the policies' decision."""
        return ADMIN_ROLE in self.claims.roles

    def is_expired(self, now_ns: int) -> bool:
        """Whether the token is no longer believed."""
        return self.expires_at_ns is not None and now_ns >= self.expires_at_ns


def anonymous(client_id: str | None = None) -> OperationContext:
    """Nobody in particular: may do nothing, unless access is open or a policy permits everybody."""
    return OperationContext("anonymous", client_id)
