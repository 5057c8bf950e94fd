"""
The keys that tokens are verified with. A key's kind fixes its algorithm, whatever a token says about itself.

So a public RSA key can never serve as the secret of an HMAC, and ``none`` is no algorithm at all.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tidings.core.errors import SettingsError
from tidings.core.settings import checked

from .errors import TokenInvalid
from .settings import Algorithm, TokenSettings

__all__ = ["KeyRing", "VerifyingKey", "signing_key_from"]

_RSA_BITS_MIN: Final = 2048
_KEYS_MAX: Final = 100
_KEY_ID_CHARS_MAX: Final = 256
_PATH: Final = "access.tokens.key_set"
# Of this process only: what is compared with it never leaves the memory.
_SALT: Final = secrets.token_bytes(16)


class VerifyingKey(msgspec.Struct, frozen=True):
    """A key and the one algorithm it is for."""

    algorithm: Algorithm
    material: Any
    key_id: str | None = None
    trust: str = ""
    """Names the key, and the audience and issuer that its tokens must have: what a session stands on. It cannot be turned back."""


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
        """What the sessions of these keys' tokens stand on."""
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
            if named.algorithm != algorithm:
                raise TokenInvalid("its algorithm is not the one of its key")
            return named
        # The secret has no id, so a token made with it may carry any. A public key is known by its id, if it has one.
        fitting = [key for key in self._keys if key.algorithm == algorithm and (key_id is None or key.key_id is None)]
        if len(fitting) != 1:
            raise TokenInvalid("no key fits it" if not fitting else "several keys fit it, and it does not say which")
        return fitting[0]


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
    found = [
        _key_of(each, f"{_PATH}.keys[{at}]") for at, each in enumerate(entries) if each.get("use") in (None, "sig")
    ]
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
    if entry.get("alg") not in (None, algorithm):
        raise SettingsError(path, f"says alg {entry['alg']!r}, but keys of its kind are for {algorithm}")
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
        raise SettingsError(path, "is no key that can be read") from error
    match material:
        case Ed25519PublicKey() | Ed25519PrivateKey():
            return "EdDSA", material
        case EllipticCurvePublicKey() | EllipticCurvePrivateKey() if isinstance(material.curve, SECP256R1):
            return "ES256", material
        case RSAPublicKey() | RSAPrivateKey() if material.key_size >= _RSA_BITS_MIN:
            return "RS256", material
        case RSAPublicKey() | RSAPrivateKey():
            raise SettingsError(path, f"is an RSA key of {material.key_size} bits; at least {_RSA_BITS_MIN} are needed")
    raise SettingsError(path, "is no Ed25519, P-256 or RSA key")
