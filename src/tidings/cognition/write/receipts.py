"""
Receipts: what was written, where, by whom, under which rules; signed, so that it can be shown later.

A receipt holds the content's hash and never the content. The signature covers every field but itself, in canonical
form.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..errors import MemoryStoreError


class Signer(Protocol):
    """Signs, and checks what it signed."""

    @property
    def algorithm(self) -> str: ...

    @property
    def key_id(self) -> str: ...

    def sign(self, data: bytes) -> bytes: ...

    def is_valid(self, data: bytes, signature: bytes) -> bool: ...


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a memory comes from."""

    source: str
    confidence: float
    stages: tuple[str, ...]


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Proof of one write."""

    receipt_id: str
    memory_id: str
    actor: str
    space_id: str
    operation: str
    content_hash: str
    policy_version: str
    redactions: dict[str, int]
    provenance: Provenance
    timestamp: datetime
    mls_epoch: int | None = None
    algorithm: str | None = None
    key_id: str | None = None
    signature: str | None = None


class HmacSigner:
    """Signs with a shared secret (HMAC-SHA-256): for receipts that only the signer has to check."""

    algorithm = "hmac-sha256"

    def __init__(self, key: bytes, key_id: str) -> None:
        if len(key) < 16:
            raise ValueError("a signing key has at least 16 bytes")
        self._key = key
        self.key_id = key_id

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``."""
        return hmac.digest(self._key, data, hashlib.sha256)

    def is_valid(self, data: bytes, signature: bytes) -> bool:
        """Whether the signature is this key's and of ``data``."""
        return hmac.compare_digest(self.sign(data), signature)


class Ed25519Signer:
    """Signs with a private key: for receipts that others check."""

    algorithm = "ed25519"

    def __init__(self, key: Ed25519PrivateKey, key_id: str) -> None:
        self._key = key
        self.key_id = key_id

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``."""
        return self._key.sign(data)

    def is_valid(self, data: bytes, signature: bytes) -> bool:
        """Whether the signature is this key's and of ``data``."""
        try:
            self._key.public_key().verify(signature, data)
        except InvalidSignature:
            return False
        return True


def content_hash(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content in canonical form, in hex."""
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def sign_receipt(receipt: Receipt, signer: Signer | None) -> Receipt:
    """
    The receipt with its signature; unsigned without a signer.

    Raises:
        MemoryStoreError: The signer failed, perhaps for now only: its key may be kept elsewhere.
    """
    if signer is None:
        return receipt
    try:
        named = msgspec.structs.replace(receipt, algorithm=signer.algorithm, key_id=signer.key_id, signature=None)
        return msgspec.structs.replace(named, signature=signer.sign(_signed_bytes(named)).hex())
    except Exception as error:
        raise MemoryStoreError("sign", f"{type(error).__name__}: {error}") from error


def is_genuine(receipt: Receipt, signer: Signer) -> bool:
    """Whether the signer signed this receipt, and nothing of it was changed since."""
    if receipt.signature is None or receipt.algorithm != signer.algorithm or receipt.key_id != signer.key_id:
        return False
    try:
        signature = bytes.fromhex(receipt.signature)
    except ValueError:
        return False
    return signer.is_valid(_signed_bytes(receipt), signature)


def _signed_bytes(receipt: Receipt) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(receipt, signature=None), order="sorted")
