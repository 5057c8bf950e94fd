"""From a token to what its bearer may do: the same way in for HTTP and every endpoint."""

from __future__ import annotations

from tidings.core.clock import Clock

from .book import AccessBook, Capsule
from .context import anonymous
from .errors import AuthFailed, TokenExpired, TokenRevoked
from .tokens import TokenVerifier


class Authenticator:
    """
    Finds out who is asking.

    Args:
        verifier, book, clock: What tokens, grants and time say.
        is_open: Treat those without a token as the anonymous subject, who may do what open access lets everybody do.
    """

    def __init__(self, verifier: TokenVerifier, book: AccessBook, clock: Clock, *, is_open: bool = False) -> None:
        self._verifier = verifier
        self._book = book
        self._clock = clock
        self._is_open = is_open

    def of_header(self, authorization: str | None) -> Capsule:
        """
        What the sender of an ``Authorization`` header may do.

        Raises:
            AuthFailed: There is no token, or it is not accepted.
        """
        if authorization is None:
            return self.of_token(None)
        scheme, _, token = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise AuthFailed
        return self.of_token(token.strip())

    def of_token(self, token: str | None) -> Capsule:
        """
        What the bearer of a token may do.

        Raises:
            AuthFailed: There is no token, or it is not accepted.
        """
        if not token:
            if not self._is_open:
                raise AuthFailed
            return self._book.capsule(anonymous())
        capsule = self._book.capsule(self._verifier.verify(token))
        self.check(capsule)
        return capsule

    def check(self, capsule: Capsule) -> None:
        """
        Make sure that a capsule that has been held for a while is still valid.

        Raises:
            TokenRevoked, TokenExpired: It is not.
        """
        if capsule.is_revoked:
            raise TokenRevoked(capsule.context.subject)
        expires_at_ns = capsule.expires_at_ns
        if expires_at_ns is not None and self._clock.now_ns() >= expires_at_ns:
            raise TokenExpired(expires_at_ns)
