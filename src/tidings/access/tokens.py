"""
Tokens: verified into an ``OperationContext``, and issued.

A token is a signed JWT. Its signature is checked with a key of ours before anything in it is read, and its times are compared
with the clock that was handed in. A key's kind fixes its algorithm, whatever a token says about itself: a public RSA key can never
serve as the secret of an HMAC, and ``none`` is no algorithm at all.

A claim of the wrong type refuses the token. It is not ignored: the issuer meant something by it, and guessing what could give
its bearer more than was meant.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from typing import Annotated, Any, Final, get_args

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tidings.core.clock import Clock
from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.core.validation import explain

from .context import OperationContext, TokenClaims
from .errors import InvalidChange, TokenExpired, TokenInvalid
from .resources import ResourceKind, checked_text, normal
from .settings import Algorithm, TokenSettings

logger = logging.getLogger(__name__)

_ED25519: Final = "Ed25519"
_ALGORITHMS: Final = get_args(Algorithm)
_RSA_BITS_MIN: Final = 2048
_KEYS_MAX: Final = 100
_KEY_ID_CHARS_MAX: Final = 256
_PATH: Final = "access.tokens.key_set"
# Of this process only: what is compared with it never leaves the memory.
_SALT: Final = secrets.token_bytes(16)


class _UnknownKey(SettingsError):
    """A key of a kind, or for an algorithm, that is not known here. In a set it is left out; alone it is refused."""


class VerifyingKey(msgspec.Struct, frozen=True):
    """A key and the one algorithm it is for."""

    algorithm: Algorithm
    material: Any
    key_id: str | None = None
    trust: str = ""
    """Names the key, and the audience and issuer that its tokens must have: what a session depends on. It cannot be reversed."""


class KeyRing:
    """
    Finds the key for a token.

    Raises:
        SettingsError: The secret is too short, or the key set holds something else than public keys of the kinds that are taken.
    """

    def __init__(self, settings: TokenSettings) -> None:
        settings = checked(settings, "access.tokens")
        found = [] if settings.key_set is None else _keys_of(settings.key_set)
        if settings.secret is not None:
            found.append(VerifyingKey("HS256", settings.secret.encode()))
        self._keys = tuple(
            msgspec.structs.replace(key, trust=_trust_in(key, settings))
            for key in found
            if key.algorithm in settings.algorithms
        )
        self._by_id = {key.key_id: key for key in self._keys if key.key_id is not None}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def trusts(self) -> frozenset[str]:
        """What the sessions of these keys' tokens depend on."""
        return frozenset(key.trust for key in self._keys)

    def key_for(self, algorithm: object, key_id: object) -> VerifyingKey:
        """
        The key that a token's header asks for.

        Raises:
            TokenInvalid: There is none, it is for another algorithm, or there are several and the token does not say which.
        """
        if not self._keys:
            raise TokenInvalid("this node has no keys to verify tokens with", "set access.tokens.secret or key_set")
        if not isinstance(algorithm, str) or (key_id is not None and not isinstance(key_id, str)):
            raise TokenInvalid("its header is malformed")
        named = self._by_id.get(key_id) if key_id is not None else None
        if named is not None:
            if named.algorithm != _plain(algorithm):
                raise TokenInvalid("its algorithm is not the one of its key")
            return named
        # The secret has no id, so a token made with it may carry any. A public key is known by its id, if it has one.
        fitting = [
            key for key in self._keys if key.algorithm == _plain(algorithm) and (key_id is None or key.key_id is None)
        ]
        if len(fitting) != 1:
            raise TokenInvalid("no key fits it" if not fitting else "several keys fit it, and it does not say which")
        return fitting[0]


def _plain(algorithm: str) -> str:
    """Return our name of an algorithm. RFC 9864 names EdDSA by its curve; a key has one curve, so both names say the same."""
    return "EdDSA" if algorithm == _ED25519 else algorithm


def _trust_in(key: VerifyingKey, settings: TokenSettings) -> str:
    material = key.material
    if not isinstance(material, bytes):
        material = material.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    parties = msgspec.json.encode([key.algorithm, key.key_id, settings.audience, settings.issuer])
    return hashlib.blake2b(material, salt=_SALT, person=hashlib.blake2b(parties, digest_size=16).digest()).hexdigest()


def _keys_of(key_set: str) -> list[VerifyingKey]:
    try:
        given = msgspec.json.decode(key_set)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise SettingsError(_PATH, "is not JSON") from error
    entries = given.get("keys") if isinstance(given, dict) else None
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise SettingsError(_PATH, 'must be a JSON object with a list "keys"')
    if len(entries) > _KEYS_MAX:
        raise SettingsError(_PATH, f"holds {len(entries)} keys; at most {_KEYS_MAX} are allowed")
    found: list[VerifyingKey] = []
    unknown: list[SettingsError] = []
    for index, entry in enumerate(entries):
        if entry.get("use") not in (None, "sig"):
            continue
        try:
            found.append(_key_of(entry, f"{_PATH}.keys[{index}]"))
        except _UnknownKey as error:
            unknown.append(error)
    if unknown and not found:
        raise unknown[0]
    # RFC 7517, section 5: an issuer may add keys of kinds that not all of its readers know yet.
    for problem in unknown:
        logger.warning("a key is left out: %s", problem)
    ids = [key.key_id for key in found if key.key_id is not None]
    if len(set(ids)) != len(ids):
        raise SettingsError(_PATH, "holds two keys with the same kid")
    return found


def _key_of(entry: dict[str, Any], path: str) -> VerifyingKey:
    if entry.get("kty") == "oct":
        raise SettingsError(path, "is a secret, not a public key; a secret belongs into access.tokens.secret")
    if "d" in entry:
        raise SettingsError(path, "is a private key; the node needs the public one only")
    key_id = entry.get("kid")
    if key_id is not None and not (isinstance(key_id, str) and 0 < len(key_id) <= _KEY_ID_CHARS_MAX):
        raise SettingsError(path, "has a kid that is no short text")
    algorithm, material = _material(entry, path)
    named = entry.get("alg")
    if named is not None and not (isinstance(named, str) and _plain(named) == algorithm):
        kind = SettingsError if named in _ALGORITHMS else _UnknownKey
        raise kind(path, f"says alg {named!r}, but keys of its kind are for {algorithm}")
    return VerifyingKey(algorithm, material, key_id)


def signing_key_from(entry: dict[str, Any]) -> VerifyingKey:
    """
    A private key from a JSON Web Key, for issuing tokens.

    Raises:
        SettingsError: It is no private key of a kind that is taken.
    """
    algorithm, material = _material(entry, "signing_key")
    if not isinstance(material, Ed25519PrivateKey | EllipticCurvePrivateKey | RSAPrivateKey):
        raise SettingsError("signing_key", "is a public key; signing needs the private one")
    return VerifyingKey(algorithm, material, entry.get("kid"))


def _material(entry: dict[str, Any], path: str) -> tuple[Algorithm, Any]:
    # PyJWT would take the algorithm from the entry; here only the key itself says what it is for.
    plain = {name: value for name, value in entry.items() if name != "alg"}
    try:
        material = jwt.PyJWK(plain).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
        raise _UnknownKey(path, "is no key that can be read") from error
    match material:
        case Ed25519PublicKey() | Ed25519PrivateKey():
            return "EdDSA", material
        case EllipticCurvePublicKey() | EllipticCurvePrivateKey() if isinstance(material.curve, SECP256R1):
            return "ES256", material
        case RSAPublicKey() | RSAPrivateKey() if material.key_size >= _RSA_BITS_MIN:
            return "RS256", material
        case RSAPublicKey() | RSAPrivateKey():
            raise SettingsError(path, f"is an RSA key of {material.key_size} bits; at least {_RSA_BITS_MIN} are needed")
    raise _UnknownKey(path, "is no Ed25519, P-256 or RSA key")


_NAMES_MAX: Final = 10_000
_NS: Final = 1_000_000_000
_SECONDS_MAX: Final = 253_402_300_799  # the last second of the year 9999

Names = Annotated[list[str], msgspec.Meta(max_length=_NAMES_MAX)]
Seconds = Annotated[int, msgspec.Meta(ge=0, le=_SECONDS_MAX)] | Annotated[float, msgspec.Meta(ge=0, le=_SECONDS_MAX)]
Absent = msgspec.UnsetType
ABSENT: Final = msgspec.UNSET


class TokenPayload(msgspec.Struct, frozen=True, kw_only=True):
    """The claims that are read; others are passed over."""

    sub: str | Absent = ABSENT
    iss: str | Absent = ABSENT
    aud: str | Names | Absent = ABSENT
    exp: Seconds | Absent = ABSENT
    nbf: Seconds | Absent = ABSENT
    iat: Seconds | Absent = ABSENT
    jti: str | Absent = ABSENT
    client_id: str | Absent = ABSENT
    client_id_camel: str | Absent = msgspec.field(default=ABSENT, name="clientId")
    user_id: str | Absent = ABSENT
    user_id_camel: str | Absent = msgspec.field(default=ABSENT, name="userId")
    allowed_partitions: Names | Absent = ABSENT
    allowed_partition_prefixes: Names | Absent = ABSENT
    project_ids: Names | Absent = ABSENT
    project_ids_camel: Names | Absent = msgspec.field(default=ABSENT, name="projectIds")
    topics: Names = []
    topic_prefixes: Names = []
    spaces: Names | Absent = ABSENT
    space_prefixes: Names | Absent = ABSENT
    allowed_groups: Names = []
    allowed_group_prefixes: Names = []
    roles: Names = []
    read_only: bool = False


_CLAIM_FIELDS: Final = {
    "allowed_partitions": "partitions",
    "allowed_partition_prefixes": "partition_prefixes",
    "projectIds": "projects",
    "topics": "topics",
    "topic_prefixes": "topic_prefixes",
    "spaces": "spaces",
    "space_prefixes": "space_prefixes",
    "allowed_groups": "groups",
    "allowed_group_prefixes": "group_prefixes",
    "roles": "roles",
}
"""Claims that are lists of names, with the field of ``TokenClaims`` that holds them."""
_DECODER: Final = msgspec.json.Decoder(TokenPayload)


def payload_from(data: bytes) -> TokenPayload:
    """
    The claims of a payload.

    Raises:
        TokenInvalid: It is no JSON object, or a claim has the wrong type.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.ValidationError as error:
        problem, path = explain(error)
        raise TokenInvalid(f"claim {path}: {problem}" if path else "its payload is no JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise TokenInvalid("its payload is not JSON") from error


def nanoseconds(seconds: int | float) -> int:
    """A time of a token in nanoseconds; whole seconds stay exact."""
    return seconds * _NS if isinstance(seconds, int) else int(seconds * _NS)


def context_from(payload: TokenPayload, *, leeway_s: int, trust: str | None = None) -> OperationContext:
    """
    The context that a token whose times and signature are valid gives.

    Raises:
        TokenInvalid: It names nobody, contradicts itself, or holds a name that none can have.
    """
    try:
        client_id = _one("client_id", payload.client_id, "clientId", payload.client_id_camel)
        user_id = _one("user_id", payload.user_id, "userId", payload.user_id_camel)
        # A token of a sync client may name the client only; then that is who is asking.
        subject = client_id if payload.sub is ABSENT else _text("sub", payload.sub)
        if subject is None:
            raise TokenInvalid("it has neither sub nor client_id")
        projects = _one_list("project_ids", payload.project_ids, "projectIds", payload.project_ids_camel)
        bounds = {
            ResourceKind.PARTITION: (payload.allowed_partitions, payload.allowed_partition_prefixes),
            ResourceKind.PROJECT: (payload.project_ids, payload.project_ids_camel),
            ResourceKind.SPACE: (payload.spaces, payload.space_prefixes),
        }
        lists = {claim: _given(getattr(payload, claim, ABSENT)) for claim in _CLAIM_FIELDS} | {"projectIds": projects}
        named: dict[str, Any] = {
            field: (_prefixes if field.endswith("_prefixes") else _names)(claim, lists[claim])
            for claim, field in _CLAIM_FIELDS.items()
        }
        names_none_of = frozenset(
            kind
            for kind, claimed in bounds.items()
            if any(each is not ABSENT for each in claimed) and not any(_given(each) for each in claimed)
        )
        claims = TokenClaims(**named, is_read_only=payload.read_only, names_none_of=names_none_of)
        token_id = None if payload.jti is ABSENT else _text("jti", payload.jti)
    except InvalidChange as error:
        raise TokenInvalid(f"claim {error.field}: {error.problem}") from error
    expires_at_ns = None if payload.exp is ABSENT else nanoseconds(payload.exp) + leeway_s * _NS
    return OperationContext(subject, client_id, expires_at_ns, token_id, claims, user_id, trust)


def _text(claim: str, value: Any) -> str:
    return checked_text(claim, value)


def _one(first: str, value: str | Absent, second: str, other: str | Absent) -> str | None:
    if value is not ABSENT and other is not ABSENT and value != other:
        raise TokenInvalid(f"{first} and {second} differ")
    found = other if value is ABSENT else value
    return None if found is ABSENT else _text(first, found)


def _one_list(first: str, value: list[str] | Absent, second: str, other: list[str] | Absent) -> list[str]:
    if value is not ABSENT and other is not ABSENT and set(value) != set(other):
        raise TokenInvalid(f"{first} and {second} differ")
    return _given(other if value is ABSENT else value)


def _given(names: list[str] | Absent) -> list[str]:
    return [] if names is ABSENT else names


def _names(claim: str, names: list[str]) -> frozenset[str]:
    return frozenset(checked_text(claim, name) for name in names)


def _prefixes(claim: str, names: list[str]) -> tuple[str, ...]:
    return tuple(sorted(_names(claim, names)))


_LIFETIME_S: Final = 3_600
_JWS: Final = jwt.PyJWS()
_JWS.register_algorithm(_ED25519, jwt.algorithms.OKPAlgorithm())


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
        self.reloads = 0
        """How often settings or keys were changed: what was verified before may not be good any more."""

    def reload(self, settings: TokenSettings) -> None:
        """
        Verify with other keys from now on. Hand ``trusts`` to the access book then: contexts of removed keys end by that.

        Raises:
            SettingsError: They cannot be used; the earlier ones stay.
        """
        ring = KeyRing(settings)
        self._settings, self._ring = settings, ring
        self.reloads += 1

    @property
    def trusts(self) -> frozenset[str]:
        """What contexts may depend on now; see ``AccessBook.trust``."""
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
            names = [key.algorithm, _ED25519] if key.algorithm == "EdDSA" else [key.algorithm]
            data = _JWS.decode(token, key.material, algorithms=names)
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
        claims: TokenClaims | None = None,
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
        payload |= _claims_as_json(claims or TokenClaims())
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


def _claims_as_json(claims: TokenClaims) -> dict[str, Any]:
    given = {claim: getattr(claims, field) for claim, field in _CLAIM_FIELDS.items()}
    shown: dict[str, Any] = {name: sorted(normal(each) for each in names) for name, names in given.items() if names}
    if claims.is_read_only:
        shown["read_only"] = True
    return shown | {_CLAIM_OF[kind]: [] for kind in claims.names_none_of}
