"""
The keys of encryption at rest: where a space's keys come from, and how they are kept.

A key has a fingerprint, by which a seal names it. Keys come from a ``KeyFile`` (several to a space; taking
them away makes its history unreadable for good) or from one master key (``DerivedKeys``). Either answers
from memory. No object and no error here shows a key.

    LogError
    ├── NoSealingKey            the space has no key to seal with; nothing is stored in plain instead
    └── KeyFileError            the file that holds the keys
        ├── KeyFileMissing          it is not there
        ├── KeyFileExists           it is there already, and keys are never overwritten
        ├── KeyFileExposed          others than its owner may read or write it
        ├── KeyFileBusy             another process is changing it
        └── KeyFileUnusable         it cannot be read, is damaged, too large, or of a newer version
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hmac
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tidings.core.names import check_space

from .errors import LogError

_DERIVED_COUNT_MAX: Final = 1024
_KEY_BYTES: Final = 32
_FILE_BYTES_MAX: Final = 16 << 20
_FILE_FORMAT: Final = 1


class NoSealingKey(LogError):
    """The space has no key to seal with, so nothing can be stored for it."""

    code = "log.no_sealing_key"
    hint = "add a key for the space; what was sealed with keys that are gone stays unreadable"
    text = "space {space_id!r} has no key to seal its payloads with"
    space_id: str


class KeyFileError(LogError):
    """Something is the matter with a key file; ``path`` names it."""

    code = "keys.error"
    text = "key file {path}: {problem}"

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(str(path), problem)
        self.path = str(path)
        self.problem = problem


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
        self._keys_of = functools.lru_cache(maxsize=_DERIVED_COUNT_MAX)(functools.partial(_derive, (master, *retired)))

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
        self._path = Path(path).absolute()  # read again later, wherever the process is then
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
