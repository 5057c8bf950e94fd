"""
Encryption at rest: the payloads of a space can be read only with that space's keys.

An ``Encryptor`` seals a payload before its line is written and opens it after it was read. The one here is
AES-256-GCM: what was altered, or moved to another record, is refused, never returned. The envelope stays
plain, and so does the length of a payload: the log orders, finds and drops records without any key.

Each payload gets a random nonce of 96 bits. Under one key that is sound for 2**32 payloads (five days at
ten thousand a second), so the key of a busy space is rotated: the newest key seals, every key still listed
opens. Keys come from a ``KeyFile`` (several to a space; taking them away makes its history unreadable for
good) or from one master key (``DerivedKeys``).

    LogError
    ├── SealBroken              a sealed payload was altered, cut, or moved to another record
    ├── NoSealingKey            the space has no key to seal with; nothing is stored in plain instead
    └── KeyFileError            the file that holds the keys
        ├── KeyFileMissing          it is not there
        ├── KeyFileExists           it is there already, and keys are never overwritten
        ├── KeyFileExposed          others than its owner may read or write it
        ├── KeyFileBusy             another process is changing it
        └── KeyFileUnusable         it cannot be read, is damaged, too large, or of a newer version
"""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import functools
import hmac
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tidings.core.names import check_space

from .errors import LogError, SealedPayload
from .record import Sealed

__all__ = [
    "AesGcmEncryptor",
    "DerivedKeys",
    "Encryptor",
    "KeyFile",
    "KeyFileBusy",
    "KeyFileError",
    "KeyFileExists",
    "KeyFileExposed",
    "KeyFileMissing",
    "KeyFileUnusable",
    "NoSealingKey",
    "SealBroken",
    "SpaceKey",
    "SpaceKeys",
    "open_payload",
    "seal_payload",
]

ALG: Final = "A256GCM"
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_CACHED_COUNT_MAX: Final = 1024
_FILE_BYTES_MAX: Final = 16 << 20
_FILE_FORMAT: Final = 1
_PAYLOAD_HEAD: Final = b'{"sealed":"'
_PAYLOAD_TAIL: Final = b'"}'


class SealBroken(LogError):
    """A sealed payload is not what was sealed for this record."""

    code = "log.seal_broken"
    hint = "the record was altered or moved after it was written; compare it with a backup or the lake"

    def __init__(self, space_id: str, key_id: str, problem: str) -> None:
        super().__init__(space_id, key_id, problem)
        self.space_id = space_id
        self.key_id = key_id
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"a payload of space {self.space_id!r}, sealed with key {self.key_id!r}, cannot be opened: {self.problem}"
        )


class NoSealingKey(LogError):
    """The space has no key to seal with, so nothing can be stored for it."""

    code = "log.no_sealing_key"
    hint = "add a key for the space; what was sealed with keys that are gone stays unreadable"

    def __init__(self, space_id: str) -> None:
        super().__init__(space_id)
        self.space_id = space_id

    def __str__(self) -> str:
        return f"space {self.space_id!r} has no key to seal its payloads with"


class KeyFileError(LogError):
    """Something is the matter with a key file; ``path`` names it."""

    code = "keys.error"

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(str(path), problem)
        self.path = str(path)
        self.problem = problem

    def __str__(self) -> str:
        return f"key file {self.path}: {self.problem}"


class KeyFileMissing(KeyFileError):
    """There is no key file at that place."""

    code = "keys.missing"
    hint = "restore it from its backup; a new one cannot open what was sealed before"


class KeyFileExists(KeyFileError):
    """A key file is there already."""

    code = "keys.exists"
    hint = "open the one that is there, or choose another path; no key is ever overwritten"


class KeyFileExposed(KeyFileError):
    """Others than the owner may read or write the key file."""

    code = "keys.exposed"

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(path, f"its mode {mode:04o} lets others than its owner in")
        self.mode = mode
        self.hint = f"chmod 600 {path}; if others may have read it, rotate the keys too"


class KeyFileBusy(KeyFileError):
    """Another process is changing the key file."""

    code = "keys.busy"
    retryable = True
    hint = "try again in a moment"


class KeyFileUnusable(KeyFileError):
    """The key file cannot be read or written, or does not hold what it should. It was left as it is."""

    code = "keys.unusable"
    hint = "check its owner, or restore it from its backup"


class SpaceKey(msgspec.Struct, frozen=True):
    """
    One key of one space. ``key_id`` is its fingerprint, from which the key cannot be found.

    Raises:
        ValueError: The secret is not 32 bytes long, or is not the one the fingerprint is of.
    """

    key_id: str
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != _KEY_BYTES:
            raise ValueError(f"a key must be {_KEY_BYTES} bytes long, not {len(self.secret)}")
        if self.key_id != _fingerprint(self.secret):
            raise ValueError("the key does not match its id")

    @classmethod
    def of(cls, secret: bytes) -> SpaceKey:
        """The key with this secret."""
        return cls(_fingerprint(secret), secret)

    def __repr__(self) -> str:
        return f"SpaceKey({self.key_id!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # msgspec's own would print the secret
        return [("key_id", self.key_id)]


def _fingerprint(secret: bytes) -> str:
    return hmac.digest(secret, b"tidings key id", "sha256")[:8].hex()


class SpaceKeys(Protocol):
    """Where keys come from. Called for every record: answers must come from memory."""

    def current(self, space_id: str) -> SpaceKey | None:
        """
        The key that seals the space's payloads now; ``None`` if the space is not protected.

        Raises:
            NoSealingKey: It is protected, but its keys are gone.
        """
        ...

    def find(self, space_id: str, key_id: str) -> SpaceKey | None:
        """A key of the space, current or older; ``None`` if it is not (or no longer) at hand."""
        ...


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
        self._cipher = functools.lru_cache(maxsize=_CACHED_COUNT_MAX)(AESGCM)

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
    """Decode the one spelling that encoding gives; several would let an altered byte pass unseen."""
    try:
        data = binascii.a2b_base64(text)
    except binascii.Error:
        return None
    return data if _to_base64(data) == text else None


class DerivedKeys:
    """
    A key for each space, derived from one master key with HKDF-SHA256.

    No file to keep beside the master, which comes from the outside (a secret store). One space cannot be
    made unreadable by itself: whoever has the master has every space.

    Args:
        master: At least 32 random bytes; not a password.
        spaces: The spaces that are protected; ``None`` for all. What was sealed before a space was taken
            from here can still be opened.
        retired: Former master keys, which open what they sealed and seal nothing new.

    Raises:
        ValueError: A master key is too short.
    """

    def __init__(self, master: bytes, spaces: Collection[str] | None = None, *, retired: Sequence[bytes] = ()) -> None:
        if any(len(one) < _KEY_BYTES for one in (master, *retired)):
            raise ValueError(f"a master key must be at least {_KEY_BYTES} bytes long")
        self._spaces = None if spaces is None else frozenset(spaces)
        self._keys_of = functools.lru_cache(maxsize=_CACHED_COUNT_MAX)(functools.partial(_derive, (master, *retired)))

    def current(self, space_id: str) -> SpaceKey | None:
        """The space's key from the master; ``None`` if the space is not one of the protected."""
        if self._spaces is not None and space_id not in self._spaces:
            return None
        return self._keys_of(space_id)[0]

    def find(self, space_id: str, key_id: str) -> SpaceKey | None:
        """The space's key from the master or a retired one, if the id is its own."""
        return next((key for key in self._keys_of(space_id) if key.key_id == key_id), None)


def _derive(masters: tuple[bytes, ...], space_id: str) -> tuple[SpaceKey, ...]:
    info = b"tidings space key\x00" + space_id.encode()
    return tuple(
        SpaceKey.of(HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(master))
        for master in masters
    )


class _KeyForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a key file holds. A space without keys was shredded."""

    format: int
    spaces: dict[str, tuple[SpaceKey, ...]]


class KeyFile:
    """
    Keys in a file that only its owner may read: JSON, a list of keys to a space, the newest last.

    The file is read once and on ``reload``; changes go to the disk, whole or not at all, before they count
    here. Back it up apart from the log: who has both can read everything, and without it nobody can.

    Args:
        path: The file.
        random: Gives that many random bytes, for new keys.

    Raises:
        KeyFileMissing, KeyFileExposed, KeyFileUnusable: Why it cannot be used.
    """

    def __init__(self, path: Path | str, *, random: Callable[[int], bytes] = os.urandom) -> None:
        self._path = Path(path)
        self._random = random
        self._spaces: dict[str, tuple[SpaceKey, ...]] = {}
        self.reload()

    def __repr__(self) -> str:
        return f"KeyFile({str(self._path)!r})"

    @classmethod
    def create(cls, path: Path | str, *, random: Callable[[int], bytes] = os.urandom) -> KeyFile:
        """
        Make a key file without keys, in a folder that exists.

        Raises:
            KeyFileExists: There is one already.
            KeyFileBusy, KeyFileUnusable: It cannot be made now, or at all.
        """
        path = Path(path)
        with _changing(path) as folder:
            if os.path.lexists(path):
                raise KeyFileExists(path, "is there already")
            _replace(path, folder, {})
        return cls(path, random=random)

    def current(self, space_id: str) -> SpaceKey | None:
        """The newest key of the space; ``None`` if the file does not know the space."""
        keys = self._spaces.get(space_id)
        if keys is None:
            return None
        if not keys:
            # Answering None here would have the events of a shredded space stored in plain from now on.
            raise NoSealingKey(space_id)
        return keys[-1]

    def find(self, space_id: str, key_id: str) -> SpaceKey | None:
        """A key of the space by its id."""
        # Backwards, as what is read most was sealed lately.
        return next((key for key in reversed(self._spaces.get(space_id, ())) if key.key_id == key_id), None)

    def reload(self) -> None:
        """
        Take over what the file holds now. If that fails, the keys read before stay in use.

        Raises:
            KeyFileMissing, KeyFileExposed, KeyFileUnusable: Why it cannot be read.
        """
        self._spaces = _read(self._path)

    def add_key(self, space_id: str) -> str:
        """
        Give the space a new key, which seals from now on; its older keys go on opening.

        Returns:
            The new key's id. When this returns, the key is on the disk: a record sealed with a key that a
            crash forgets would be lost.

        Raises:
            InvalidName: That is no space id.
            KeyFileBusy: Another process is changing the file.
            KeyFileMissing, KeyFileExposed, KeyFileUnusable: The file cannot be used.
        """
        space_id = check_space(space_id)
        key = SpaceKey.of(self._random(_KEY_BYTES))
        with _changing(self._path) as folder:
            spaces = _read(self._path)
            spaces[space_id] = (*spaces.get(space_id, ()), key)
            _replace(self._path, folder, spaces)
        self._spaces = spaces
        return key.key_id

    def shred(self, space_id: str) -> int:
        """
        Take all keys of a space away: what they sealed can never be read again, wherever copies of it are.

        The file remembers that the space was protected, and events of it are refused until it gets a new
        key. Copies of the key file, and processes that have not reloaded it, still hold the keys.

        Returns:
            How many keys went. A space that the file does not know has none, and nothing is changed.

        Raises:
            KeyFileBusy, KeyFileMissing, KeyFileExposed, KeyFileUnusable: as for ``add_key``.
        """
        with _changing(self._path) as folder:
            spaces = _read(self._path)
            count = len(spaces.get(space_id, ()))
            if count:
                spaces[space_id] = ()
                _replace(self._path, folder, spaces)
        self._spaces = spaces
        return count


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[int]:
    """
    Be the only one to change key files in this folder; gives the open folder.

    Two processes that each add a key to what they read would otherwise lose one of the two. The folder is
    locked and not the file, because the file is replaced.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileUnusable(path, f"its folder cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    except BlockingIOError as error:
        raise KeyFileBusy(path, "another process is changing it") from error
    except OSError as error:
        raise KeyFileUnusable(path, f"cannot be changed: {error.strerror}") from error
    finally:
        os.close(folder)


def _read(path: Path) -> dict[str, tuple[SpaceKey, ...]]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o7777  # of the file that was opened, whatever the path says now
            if mode & 0o077:
                raise KeyFileExposed(path, mode)
            data = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise KeyFileMissing(path, "is not there") from error
    except OSError as error:
        raise KeyFileUnusable(path, f"cannot be read: {error.strerror}") from error
    if len(data) > _FILE_BYTES_MAX:
        raise KeyFileUnusable(path, f"is larger than {_FILE_BYTES_MAX} bytes")
    try:
        form = msgspec.json.decode(data, type=_KeyForm)
    except msgspec.DecodeError as error:  # says what is wrong and where, and quotes no values
        raise KeyFileUnusable(path, f"is damaged: {error}") from error
    if form.format != _FILE_FORMAT:
        raise KeyFileUnusable(path, f"is of format {form.format}; this version reads {_FILE_FORMAT}")
    return form.spaces


def _replace(path: Path, folder: int, spaces: dict[str, tuple[SpaceKey, ...]]) -> None:
    data = msgspec.json.format(msgspec.json.encode(_KeyForm(_FILE_FORMAT, spaces)), indent=1) + b"\n"
    if len(data) > _FILE_BYTES_MAX:
        raise KeyFileUnusable(path, f"would be larger than {_FILE_BYTES_MAX} bytes")
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)  # it holds keys
        raise
    os.fsync(folder)
