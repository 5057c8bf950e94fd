"""
Tokens: verified into an ``OperationContext``, and issued.

A token is a signed JWT. Its signature is checked with a key of ours before anything in it is read, and its times are compared
with the clock that was handed in.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

import jwt
import msgspec

from tidings.core.clock import Clock
from tidings.core.errors import SettingsError
from tidings.core.settings import checked

from .context import Claims, OperationContext
from .errors import TokenExpired, TokenInvalid
from .key_ring import KeyRing, VerifyingKey, signing_key_from
from .resources import ResourceKind, normal
from .settings import TokenSettings
from .token_payload import ABSENT, TokenPayload, context_from, nanoseconds, payload_from

__all__ = ["TokenIssuer", "TokenSettings", "TokenVerifier", "read_unverified"]

_NS: Final = 1_000_000_000
_LIFETIME_S: Final = 3_600
_JWS: Final = jwt.PyJWS()


class TokenVerifier:
    """
    Turns tokens into contexts, or says why not.

    Args:
        settings: Which tokens are believed.
        clock: What tells whether they still are.

    Raises:
        SettingsError: The secret is too short, or the key set cannot be used.
    """

    def __init__(self, settings: TokenSettings, clock: Clock) -> None:
        self._clock = clock
        self._settings = settings
        self._ring = KeyRing(settings)

    def reload(self, settings: TokenSettings) -> None:
        """
        Verify with other keys from now on. Hand ``trusts`` to the access book then: contexts of removed keys end by that.

        Raises:
            SettingsError: They cannot be used; the earlier ones stay.
        """
        ring = KeyRing(settings)
        self._settings, self._ring = settings, ring

    @property
    def trusts(self) -> frozenset[str]:
        """What contexts may stand on now; see ``AccessBook.trust``."""
        return self._ring.trusts

    def verify(self, token: str) -> OperationContext:
        """
        Who a token speaks for.

        Raises:
            TokenExpired: It was valid once.
            TokenInvalid: It cannot be believed.
        """
        settings = self._settings
        if len(token) > settings.token_bytes_max:
            raise TokenInvalid(f"it is longer than {settings.token_bytes_max} bytes")
        header = _header_of(token)
        if "crit" in header or "b64" in header:
            raise TokenInvalid("it asks for an extension that is not supported")
        key = self._ring.key_for(header.get("alg"), header.get("kid"))
        try:
            data = _JWS.decode(token, key.material, algorithms=[key.algorithm])
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise TokenInvalid("its signature does not match") from error
        payload = payload_from(data)
        self._check_times(payload)
        self._check_parties(payload)
        return context_from(payload, leeway_s=settings.leeway_s, trust=key.trust)

    def _check_times(self, payload: TokenPayload) -> None:
        now_ns, leeway_ns = self._clock.now_ns(), self._settings.leeway_s * _NS
        if payload.exp is ABSENT:
            raise TokenInvalid("it never expires (no exp)")
        expires_at_ns = nanoseconds(payload.exp) + leeway_ns
        if now_ns >= expires_at_ns:
            raise TokenExpired(expires_at_ns)
        for name, moment in (("nbf", payload.nbf), ("iat", payload.iat)):
            if moment is not ABSENT and nanoseconds(moment) > now_ns + leeway_ns:
                raise TokenInvalid(f"it is not valid yet ({name} lies ahead)", "compare the clocks of issuer and node")
        begins_ns = now_ns if payload.iat is ABSENT else min(now_ns, nanoseconds(payload.iat))
        if nanoseconds(payload.exp) - begins_ns > self._settings.lifetime_s_max * _NS + leeway_ns:
            raise TokenInvalid(
                f"it lives longer than {self._settings.lifetime_s_max} s",
                "issue it for a shorter time; the limit is the setting access.tokens.lifetime_s_max",
            )

    def _check_parties(self, payload: TokenPayload) -> None:
        settings = self._settings
        audiences = [] if payload.aud is ABSENT else [payload.aud] if isinstance(payload.aud, str) else payload.aud
        if settings.audience is None:
            if payload.aud is not ABSENT:
                raise TokenInvalid("it is meant for an audience, and this node has none", "set access.tokens.audience")
        elif settings.audience not in audiences:
            raise TokenInvalid("it is meant for another audience")
        if settings.issuer is not None and payload.iss != settings.issuer:
            raise TokenInvalid("it comes from another issuer")


def _header_of(token: str) -> dict[str, Any]:
    if not token.isascii():
        raise TokenInvalid("it is not a JWT")
    try:
        return _JWS.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
        raise TokenInvalid("it is not a JWT") from error


def read_unverified(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Header and payload of a token, for people to look at. Nothing in it is to be believed.

    Raises:
        TokenInvalid: It is not a JWT.
    """
    header = _header_of(token)
    try:
        data = _JWS.decode(token, options={"verify_signature": False})
        payload = msgspec.json.decode(data)
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise TokenInvalid("it is not a JWT") from error
    if not isinstance(payload, dict):
        raise TokenInvalid("its payload is no JSON object")
    return header, payload


class TokenIssuer:
    """
    Makes tokens that a ``TokenVerifier`` with the same settings believes.

    Args:
        settings: The secret to sign with, audience and issuer to name.
        clock: What dates them.
        signing_key: A private JSON Web Key to sign with instead of the secret.
        make_id: Where token ids come from.

    Raises:
        SettingsError: There is nothing to sign with, or it cannot be used.
    """

    def __init__(
        self,
        settings: TokenSettings,
        clock: Clock,
        *,
        signing_key: dict[str, Any] | None = None,
        make_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._settings = checked(settings, "access.tokens")
        self._clock = clock
        self._make_id = make_id
        if signing_key is not None:
            self._key = signing_key_from(signing_key)
        elif settings.secret is not None:
            self._key = VerifyingKey("HS256", settings.secret.encode())
        else:
            raise SettingsError("access.tokens.secret", "is needed to issue tokens, or a signing key")

    def issue(
        self,
        subject: str,
        *,
        client_id: str | None = None,
        user_id: str | None = None,
        claims: Claims | None = None,
        lifetime_s: int = _LIFETIME_S,
        token_id: str | None = None,
        not_before_ns: int | None = None,
    ) -> str:
        """
        A token for a subject.

        Args:
            subject: Whom it speaks for.
            client_id: The device or program.
            user_id: The user of an application, where its events say one (``userId``).
            claims: What it gives.
            lifetime_s: How long it is valid.
            token_id: What it can be revoked by; made if left out.
            not_before_ns: When it begins to be valid; at once if left out.

        Raises:
            TokenInvalid: No verifier would take it.
        """
        now_s = self._clock.now_ns() // _NS
        if lifetime_s > self._settings.lifetime_s_max:
            raise TokenInvalid(
                f"it would live longer than {self._settings.lifetime_s_max} s",
                "the limit is the setting access.tokens.lifetime_s_max",
            )
        payload: dict[str, Any] = {
            "sub": subject,
            "iat": now_s,
            "exp": now_s + lifetime_s,
            "jti": token_id or self._make_id(),
        }
        if not_before_ns is not None:
            payload["nbf"] = not_before_ns // _NS
        given = {"aud": self._settings.audience, "iss": self._settings.issuer, "client_id": client_id}
        given["user_id"] = user_id
        payload |= {name: value for name, value in given.items() if value is not None}
        payload |= _claims_as_json(claims or Claims())
        data = msgspec.json.encode(payload)
        # What we would refuse we do not sign.
        context_from(payload_from(data), leeway_s=0)
        headers = None if self._key.key_id is None else {"kid": self._key.key_id}
        token = _JWS.encode(data, self._key.material, algorithm=self._key.algorithm, headers=headers)
        if len(token) > self._settings.token_bytes_max:
            raise TokenInvalid(f"it is longer than {self._settings.token_bytes_max} bytes", "use grants for long lists")
        return token


_CLAIM_OF: Final = {
    ResourceKind.PARTITION: "allowed_partitions",
    ResourceKind.PROJECT: "projectIds",
    ResourceKind.SPACE: "spaces",
}


def _claims_as_json(claims: Claims) -> dict[str, list[str]]:
    given = {
        "allowed_partitions": claims.partitions,
        "allowed_partition_prefixes": claims.partition_prefixes,
        "projectIds": claims.projects,
        "topics": claims.topics,
        "topic_prefixes": claims.topic_prefixes,
        "spaces": claims.spaces,
        "space_prefixes": claims.space_prefixes,
        "allowed_groups": claims.groups,
        "allowed_group_prefixes": claims.group_prefixes,
        "roles": claims.roles,
    }
    shown = {name: sorted(normal(each) for each in names) for name, names in given.items() if names}
    return shown | {_CLAIM_OF[kind]: [] for kind in claims.names_none_of}
