"""From a token to what its bearer may do: the same way in for HTTP and every endpoint."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from typing import Final

from tidings.core.clock import Clock

from .announcements import Announcer
from .book import AccessBook, Capsule
from .context import anonymous
from .errors import AuthFailed, TokenExpired, TokenRevoked
from .guard import DosGuard, Entrance
from .resources import Action, node
from .tokens import TokenVerifier

_KNOWN_MAX: Final = 1_024
"""Tokens that were found good and are remembered, by their hash; with more, all are verified again."""


class Authenticator:
    """
    Finds out who is asking.

    A token's signature is checked once, and its bearer's decisions are kept from one request to the next. Whether it has expired, was revoked, or
    was signed by a key that is gone is asked every time.

    Args:
        verifier, book, clock: What tokens, grants and time say.
        is_open: Treat those without a token as the anonymous subject, who may do what open access lets everybody do.
        guard: Who is kept out for a time, whatever their token says.
    """

    def __init__(
        self,
        verifier: TokenVerifier,
        book: AccessBook,
        clock: Clock,
        *,
        is_open: bool = False,
        guard: DosGuard | None = None,
    ) -> None:
        self.announcer = Announcer("auth_manager")
        self.failed: Counter[str] = Counter()
        """Those who were not let in, by the error's code."""
        self._verifier = verifier
        self._book = book
        self._clock = clock
        self._is_open = is_open
        self._guard = guard
        self._known: dict[bytes, tuple[int, Capsule]] = {}

    def without_open_access(self) -> Authenticator:
        """The same for a place where everybody shows a token, even if access is open."""
        strict = copy.copy(self)
        strict._is_open = False
        return strict

    def of_header(
        self,
        authorization: str | None,
        *,
        path: str = "",
        is_guarded: bool = True,
        entrance: Entrance = "request",
    ) -> Capsule:
        """
        What the sender of an ``Authorization`` header may do.

        Raises:
            AuthFailed: There is no token, or it is not accepted.
        """
        if authorization is None:
            return self.of_token(None, path=path, is_guarded=is_guarded, entrance=entrance)
        scheme, _, token = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise self._noted(AuthFailed(), path)
        return self.of_token(token.strip(), path=path, is_guarded=is_guarded, entrance=entrance)

    def of_token(
        self, token: str | None, *, path: str = "", is_guarded: bool = True, entrance: Entrance = "request"
    ) -> Capsule:
        """
        What the bearer of a token may do.

        Args:
            token: The token.
            path: Where it was shown, for whoever looks at what was refused.
            is_guarded: Whether the guard is asked too. The place where its directives are lifted asks without it.
            entrance: What the bearer asks for; a directive may deny sockets, and no requests.

        Raises:
            AuthFailed: There is no token, or it is not accepted.
            TemporarilyDenied: The guard keeps its bearer out.
        """
        try:
            return self._capsule_of(token, is_guarded=is_guarded, entrance=entrance)
        except AuthFailed as error:
            raise self._noted(error, path) from None

    def accepts(self, authorization: str | None) -> bool:
        """Return whether an ``Authorization`` header shows a good token. Open access does not count, and nothing is recorded."""
        scheme, _, token = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return False
        try:
            self.check(self._known_capsule(token.strip()))
        except AuthFailed:
            return False
        return True

    def _noted(self, error: AuthFailed, path: str) -> AuthFailed:
        self.failed[error.code] += 1
        subject = error.subject if isinstance(error, TokenRevoked) else None
        about = {"reason": error.code, "path": path[:256]}
        self.announcer.tell("security.authentication_failed", about, requester_identity_id=subject)
        return error

    def _capsule_of(self, token: str | None, *, is_guarded: bool, entrance: Entrance) -> Capsule:
        if token:
            capsule = self._known_capsule(token)
            self.check(capsule)
        elif self._is_open:
            capsule = self._book.capsule(anonymous())
        else:
            raise AuthFailed
        if is_guarded and self._guard is not None:
            self._guard.require(identity=capsule.context.subject, entrance=entrance)
        return capsule

    def _known_capsule(self, token: str) -> Capsule:
        digest = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        reloads, capsule = self._known.get(digest, (-1, None))
        if capsule is None or reloads != self._verifier.reloads:
            capsule = self._book.capsule(self._verifier.verify(token))
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[digest] = self._verifier.reloads, capsule
        return capsule

    def require_administrator(self, capsule: Capsule, action: str) -> None:
        """
        Go on only if this is asked for by somebody who may administer the node; whoever it is, it is told.

        Args:
            capsule: Whose.
            action: What they want to do, for whoever looks at what was asked for.

        Raises:
            TokenRevoked, Forbidden: They may not.
        """
        is_allowed = capsule.allows(Action.ADMINISTER, node())
        about = {"action": action, "result": "allowed" if is_allowed else "denied"}
        self.announcer.tell("security.admin_action", about, requester_identity_id=capsule.subject)
        capsule.require(Action.ADMINISTER, node())

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
