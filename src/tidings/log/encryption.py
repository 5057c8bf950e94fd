"""
Encryption at rest: the payloads of a space can be read only with that space's keys.

An ``Encryptor`` seals a payload before its line is written and opens it after it was read. The one here is
AES-256-GCM: what was altered, or moved to another record, is refused, never returned. The envelope stays
plain, and so does the length of a payload: the log orders, finds and drops records without any key.

Each payload gets a random nonce of 96 bits. Under one key that is sound for 2**32 payloads (five days at
ten thousand a second), so the key of a busy space is rotated: the newest key seals, every key still listed
opens. Keys and what can be wrong with them are in ``keys``.

    LogError
    └── SealBroken              a sealed payload was altered, cut, or moved to another record
"""

from __future__ import annotations

import binascii
import functools
import os
from collections.abc import Callable
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .errors import LogError, SealedPayload
from .keys import NoSealingKey, SpaceKeys
from .record import Sealed

ALG: Final = "A256GCM"
_NONCE_BYTES: Final = 12
_CIPHER_COUNT_MAX: Final = 1024
_PAYLOAD_HEAD: Final = b'{"sealed":"'
_PAYLOAD_TAIL: Final = b'"}'


class SealBroken(LogError):
    """A sealed payload is not what was sealed for this record."""

    code = "log.seal_broken"
    hint = "the record was altered or moved after it was written; compare it with a backup or the lake"
    text = "a payload of space {space_id!r}, sealed with key {key_id!r}, cannot be opened: {problem}"
    space_id: str
    key_id: str
    problem: str


class Encryptor(Protocol):
    """What the log asks of encryption. ``bound_to`` names the record that a payload belongs to."""

    def seal(self, space_id: str, plaintext: bytes, bound_to: bytes) -> tuple[Sealed, bytes]:
        """
        Encrypt; returns how it was sealed, for the envelope, and the ciphertext.

        Raises:
            NoSealingKey: The space has no key to seal with.
        """
        ...

    def open(self, space_id: str, sealed: Sealed, ciphertext: bytes, bound_to: bytes) -> bytes:
        """
        Decrypt what ``seal`` made for the same space and record.

        Raises:
            SealedPayload: The key is not at hand.
            SealBroken: Ciphertext or seal were altered, or belong to another record.
        """
        ...

    def protects(self, space_id: str) -> bool:
        """Whether payloads of this space must be sealed. Those of other spaces stay plain."""
        ...


class AesGcmEncryptor:
    """
    AES-256-GCM with a random nonce for each payload. Safe to use from several threads.

    Args:
        keys: Where keys come from.
        random: Gives that many random bytes. A nonce that comes twice under one key gives both payloads
            away, so outside of tests this is the system's source, which also survives forks and clones.
    """

    def __init__(self, keys: SpaceKeys, *, random: Callable[[int], bytes] = os.urandom) -> None:
        self._keys = keys
        self._random = random
        # Setting up a cipher costs more than sealing a small payload with it.
        self._cipher = functools.lru_cache(maxsize=_CIPHER_COUNT_MAX)(AESGCM)

    def protects(self, space_id: str) -> bool:
        """Whether the space has keys, or had keys that were taken away."""
        try:
            return self._keys.current(space_id) is not None
        except NoSealingKey:
            return True

    def seal(self, space_id: str, plaintext: bytes, bound_to: bytes) -> tuple[Sealed, bytes]:
        """Encrypt with the space's current key."""
        key = self._keys.current(space_id)
        if key is None:
            raise NoSealingKey(space_id)
        nonce = self._random(_NONCE_BYTES)
        if len(nonce) != _NONCE_BYTES:
            raise ValueError(f"the random source gave {len(nonce)} bytes instead of {_NONCE_BYTES}")
        ciphertext = self._cipher(key.secret).encrypt(nonce, plaintext, bound_to)
        return Sealed(ALG, key.key_id, _to_base64(nonce).decode()), ciphertext

    def open(self, space_id: str, sealed: Sealed, ciphertext: bytes, bound_to: bytes) -> bytes:
        """Decrypt with the key that the seal names."""
        if sealed.alg != ALG:
            raise SealBroken(space_id, sealed.key, f"its algorithm {sealed.alg!r} is not known")
        key = self._keys.find(space_id, sealed.key)
        if key is None:
            raise SealedPayload(space_id, sealed.key)
        nonce = _from_base64(sealed.nonce.encode())
        if nonce is None or len(nonce) != _NONCE_BYTES:
            raise SealBroken(space_id, sealed.key, "its nonce is not one")
        try:
            return self._cipher(key.secret).decrypt(nonce, ciphertext, bound_to)
        except InvalidTag as error:
            raise SealBroken(space_id, sealed.key, "it is not what was sealed for this record") from error


def seal_payload(encryptor: Encryptor, space_id: str, payload_json: bytes, bound_to: bytes) -> tuple[Sealed, bytes]:
    """Seal a payload for a line: the seal for the envelope, and ``{"sealed":"<base64>"}`` to stand for it."""
    sealed, ciphertext = encryptor.seal(space_id, payload_json, bound_to)
    return sealed, _PAYLOAD_HEAD + _to_base64(ciphertext) + _PAYLOAD_TAIL


def open_payload(encryptor: Encryptor, space_id: str, sealed: Sealed, payload_json: bytes, bound_to: bytes) -> bytes:
    """
    The payload's JSON, from what ``seal_payload`` put in its place.

    Raises:
        SealedPayload: The key is not at hand.
        SealBroken: It was altered, or belongs to another record.
    """
    ciphertext = None
    if payload_json.startswith(_PAYLOAD_HEAD) and payload_json.endswith(_PAYLOAD_TAIL):
        ciphertext = _from_base64(payload_json[len(_PAYLOAD_HEAD) : -len(_PAYLOAD_TAIL)])
    if ciphertext is None:
        raise SealBroken(space_id, sealed.key, "no sealed payload stands in its place")
    return encryptor.open(space_id, sealed, ciphertext, bound_to)


def _to_base64(data: bytes) -> bytes:
    return binascii.b2a_base64(data, newline=False)


def _from_base64(text: bytes) -> bytes | None:
    """Decode only the form that encoding gives: if others were accepted too, an altered byte could pass unseen."""
    try:
        data = binascii.a2b_base64(text)
    except binascii.Error:
        return None
    return data if _to_base64(data) == text else None
