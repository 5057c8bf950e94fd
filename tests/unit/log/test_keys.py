"""A space's keys come from a master or a file, are never lost by accident, and are never shown."""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import stat
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import rich.console
import rich.pretty

from tidings.core.errors import InvalidName, TidingsError
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import SealedPayload
from tidings.log.keys import (
    DerivedKeys,
    KeyFile,
    KeyFileBusy,
    KeyFileExists,
    KeyFileExposed,
    KeyFileMissing,
    KeyFileUnusable,
    NoSealingKey,
    SpaceKey,
)
from tidings.log.record import Sealed

MASTER = bytes(range(100, 132))
PAYLOAD = b'{"amount":42}'
HERE = b"orders/ev-1"


def encryptor(master: bytes = MASTER) -> AesGcmEncryptor:
    return AesGcmEncryptor(DerivedKeys(master))


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    return KeyFile.create(tmp_path / "keys.json")


# Keys from a master key


def test_derived_keys_differ_by_space_and_by_master() -> None:
    """What one space's key sealed no other space's key opens, and a key is the same whenever it is derived."""
    found = {
        (master, space_id): DerivedKeys(master).current(space_id)
        for master in (MASTER, bytes(32))
        for space_id in ("home", "work", "home/work")
    }

    assert len({key.secret for key in found.values() if key is not None}) == 6
    assert found[MASTER, "home"] == DerivedKeys(MASTER).current("home")
    sealed, ciphertext = encryptor().seal("home", PAYLOAD, HERE)
    with pytest.raises(SealedPayload):
        encryptor().open("work", sealed, ciphertext, HERE)


def test_derivation_is_hkdf_sha256_and_must_never_change() -> None:
    """The key of a space is a fixed function of the master: another result would lose every record."""
    key = DerivedKeys(bytes(32)).current("home")

    assert key is not None
    assert key.key_id == "3ee8f87224631361"


def test_only_the_spaces_named_are_protected() -> None:
    """Others stay plain; a space that was protected once can still be read."""
    some = AesGcmEncryptor(DerivedKeys(MASTER, spaces={"home"}))
    sealed, ciphertext = encryptor().seal("work", PAYLOAD, HERE)

    assert (some.protects("home"), some.protects("work"), encryptor().protects("work")) == (True, False, True)
    assert some.open("work", sealed, ciphertext, HERE) == PAYLOAD
    with pytest.raises(NoSealingKey):
        some.seal("work", PAYLOAD, HERE)


def test_a_retired_master_opens_and_does_not_seal() -> None:
    """Rotating the master keeps history readable."""
    old, new = encryptor(), AesGcmEncryptor(DerivedKeys(bytes(32), retired=[MASTER]))
    sealed, ciphertext = old.seal("home", PAYLOAD, HERE)

    assert new.open("home", sealed, ciphertext, HERE) == PAYLOAD
    assert new.seal("home", PAYLOAD, HERE)[0].key != sealed.key


@pytest.mark.parametrize(("master", "retired"), [(b"short", []), (MASTER, [b"short"])])
def test_a_short_master_is_refused(master: bytes, retired: list[bytes]) -> None:
    """A password is no master key."""
    with pytest.raises(ValueError, match="at least 32 bytes"):
        DerivedKeys(master, retired=retired)


# Keys from a file


def test_a_key_file_gives_spaces_keys(key_file: KeyFile, tmp_path: Path) -> None:
    """A space has protection from its first key on, for whoever opens the file; other spaces have none."""
    key_id = key_file.add_key("home")
    again = AesGcmEncryptor(KeyFile(tmp_path / "keys.json"))

    sealed, ciphertext = AesGcmEncryptor(key_file).seal("home", PAYLOAD, HERE)

    assert sealed.key == key_id
    assert again.open("home", sealed, ciphertext, HERE) == PAYLOAD
    assert (again.protects("home"), again.protects("work")) == (True, False)


def test_the_newest_key_seals_and_all_open(key_file: KeyFile) -> None:
    """Rotation takes effect at once and loses nothing."""
    rotating = AesGcmEncryptor(key_file)
    key_ids, seals = [], []
    for _ in range(3):
        key_ids.append(key_file.add_key("home"))
        seals.append(rotating.seal("home", PAYLOAD, HERE))

    assert [sealed.key for sealed, _ in seals] == key_ids
    assert len(set(key_ids)) == 3
    assert [rotating.open("home", *sealed, HERE) for sealed in seals] == [PAYLOAD] * 3


def test_a_shredded_space_is_unreadable_and_takes_nothing_in_plain(key_file: KeyFile, tmp_path: Path) -> None:
    """Without its keys a space's history is gone, other spaces are not, and it stays protected."""
    shredding = AesGcmEncryptor(key_file)
    key_file.add_key("home")
    key_file.add_key("work")
    first, other = shredding.seal("home", PAYLOAD, HERE), shredding.seal("work", PAYLOAD, HERE)
    key_file.add_key("home")

    assert key_file.shred("home") == 2

    for now in (shredding, AesGcmEncryptor(KeyFile(tmp_path / "keys.json"))):
        with pytest.raises(SealedPayload):
            now.open("home", *first, HERE)
        assert now.open("work", *other, HERE) == PAYLOAD
        assert now.protects("home")
        with pytest.raises(NoSealingKey, match="home"):
            now.seal("home", PAYLOAD, HERE)


def test_a_shredded_space_can_begin_anew(key_file: KeyFile) -> None:
    """A new key takes new events; the old ones stay sealed."""
    keys = AesGcmEncryptor(key_file)
    key_file.add_key("home")
    old = keys.seal("home", PAYLOAD, HERE)
    key_file.shred("home")

    key_file.add_key("home")

    assert keys.open("home", *keys.seal("home", PAYLOAD, HERE), HERE) == PAYLOAD
    with pytest.raises(SealedPayload):
        keys.open("home", *old, HERE)


def test_shredding_a_space_that_has_no_keys_changes_nothing(key_file: KeyFile, tmp_path: Path) -> None:
    """A misspelt space is seen by its count, and does not become a protected one."""
    before = (tmp_path / "keys.json").read_bytes()

    assert key_file.shred("hoem") == 0
    assert not AesGcmEncryptor(key_file).protects("hoem")
    assert (tmp_path / "keys.json").read_bytes() == before


def test_reloading_takes_over_what_others_changed(key_file: KeyFile, tmp_path: Path) -> None:
    """Keys that another process added or took away count from the next reload on."""
    other = KeyFile(tmp_path / "keys.json")
    key_id = other.add_key("home")
    assert key_file.current("home") is None

    key_file.reload()

    found = key_file.find("home", key_id)
    assert found is not None
    assert found.key_id == key_id


def test_two_writers_lose_no_key(key_file: KeyFile, tmp_path: Path) -> None:
    """A key is added to what the file holds, not to what was read from it earlier."""
    other = KeyFile(tmp_path / "keys.json")

    key_ids = {key_file.add_key("home"), other.add_key("home"), key_file.add_key("home")}

    fresh = KeyFile(tmp_path / "keys.json")
    assert {key_id for key_id in key_ids if fresh.find("home", key_id) is not None} == key_ids


def test_a_file_that_is_being_changed_is_busy(key_file: KeyFile, tmp_path: Path) -> None:
    """Nobody waits for another writer; trying again helps."""
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(KeyFileBusy) as caught:
            key_file.add_key("home")
    finally:
        os.close(folder)

    assert caught.value.retryable
    assert key_file.add_key("home")


def test_the_file_is_its_owners_alone(key_file: KeyFile, tmp_path: Path) -> None:
    """Whatever the umask, nobody else may read it, and no copy is left beside it."""
    before = os.umask(0)
    try:
        key_file.add_key("home")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_a_file_that_others_can_get_at_is_refused(key_file: KeyFile, tmp_path: Path, mode: int) -> None:
    """Opening, reloading and changing are all refused, with the command that helps."""
    path = tmp_path / "keys.json"
    path.chmod(mode)

    doings: list[Callable[[], object]] = [
        lambda: KeyFile(path),
        key_file.reload,
        lambda: key_file.add_key("home"),
        lambda: key_file.shred("home"),
    ]
    for doing in doings:
        with pytest.raises(KeyFileExposed) as caught:
            doing()
        assert caught.value.mode == mode
        assert caught.value.hint is not None
        assert f"chmod 600 {path}" in caught.value.hint


def test_creating_never_overwrites(key_file: KeyFile, tmp_path: Path) -> None:
    """A second create leaves the keys alone."""
    key_id = key_file.add_key("home")

    with pytest.raises(KeyFileExists):
        KeyFile.create(tmp_path / "keys.json")

    assert KeyFile(tmp_path / "keys.json").find("home", key_id) is not None


def test_a_missing_file_is_no_empty_file(tmp_path: Path) -> None:
    """A path that is wrong must not look like a log without protection."""
    with pytest.raises(KeyFileMissing):
        KeyFile(tmp_path / "keys.json")
    with pytest.raises(KeyFileUnusable):
        KeyFile.create(tmp_path / "nowhere" / "keys.json")


def test_a_failed_change_leaves_file_and_keys_as_they_were(
    key_file: KeyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails to sync costs nothing but the new key, which nobody has used."""
    key_id = key_file.add_key("home")
    before = (tmp_path / "keys.json").read_bytes()

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(KeyFileUnusable, match="Input/output error"):
            key_file.add_key("home")

    assert (tmp_path / "keys.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["keys.json"]
    current = key_file.current("home")
    assert current is not None
    assert current.key_id == key_id


def test_a_leftover_of_a_crash_is_in_nobodys_way(key_file: KeyFile, tmp_path: Path) -> None:
    """A half-written new file from a crash is replaced, and never read."""
    (tmp_path / "keys.json.new").write_bytes(b'{"format":1,"spa')

    key_file.add_key("home")

    assert os.listdir(tmp_path) == ["keys.json"]


def _without_braces(data: bytes) -> bytes:
    return data[:-3]


def _with_another_id(data: bytes) -> bytes:
    form = json.loads(data)
    form["spaces"]["home"][0]["key_id"] = "0" * 16
    return json.dumps(form).encode()


def _with_a_short_key(data: bytes) -> bytes:
    form = json.loads(data)
    form["spaces"]["home"][0]["secret"] = base64.b64encode(bytes(16)).decode()
    return json.dumps(form).encode()


def _of_a_newer_format(data: bytes) -> bytes:
    return data.replace(b'"format": 1', b'"format": 2')


def _too_large(data: bytes) -> bytes:
    return data + b" " * (16 << 20)


@pytest.mark.parametrize(
    "damage", [_without_braces, _with_another_id, _with_a_short_key, _of_a_newer_format, _too_large]
)
def test_a_damaged_file_is_refused_and_left_alone(
    key_file: KeyFile, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    """What cannot be read whole is not used in part, and never written over."""
    path = tmp_path / "keys.json"
    key_file.add_key("home")
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)

    for doing in (lambda: KeyFile(path), key_file.reload, lambda: key_file.add_key("home")):
        with pytest.raises(KeyFileUnusable):
            doing()

    assert path.read_bytes() == damaged
    assert key_file.current("home") is not None


def test_a_full_file_takes_no_more_keys(key_file: KeyFile, tmp_path: Path) -> None:
    """A file never grows past the size it could be read at; it is refused before it is replaced."""
    path = tmp_path / "keys.json"
    spaces: dict[str, list[str]] = {f"{number:0120d}": [] for number in range((16 << 20) // 126)}
    path.write_bytes(msgspec.json.encode({"format": 1, "spaces": spaces}))
    before = path.stat()
    key_file.reload()

    with pytest.raises(KeyFileUnusable, match="would be larger"):
        key_file.add_key("home")

    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


def test_a_space_has_to_be_a_name(key_file: KeyFile) -> None:
    """A key for a space that no event can name is refused."""
    with pytest.raises(InvalidName):
        key_file.add_key("")


# Keys stay secret


def _spellings(secret: bytes) -> list[str]:
    return [secret.hex(), base64.b64encode(secret).decode().rstrip("="), repr(secret)[2:-1], str(list(secret))[1:-1]]


def _rich(value: object) -> str:
    console = rich.console.Console(file=io.StringIO(), width=1000)
    console.print(rich.pretty.Pretty(value))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_no_object_shows_a_key(key_file: KeyFile) -> None:
    """Printing keys, their sources or an encryptor shows names and fingerprints only."""
    key_file.add_key("home")
    derived = DerivedKeys(MASTER)
    keys = [key for key in (key_file.current("home"), derived.current("home")) if key is not None]
    assert len(keys) == 2

    things: list[object] = [*keys, keys, key_file, derived, AesGcmEncryptor(key_file), AesGcmEncryptor(derived)]
    shown = "\n".join(f"{thing!r} {thing} {_rich(thing)}" for thing in things)

    for secret in (MASTER, *(key.secret for key in keys)):
        assert not [spelling for spelling in _spellings(secret) if spelling in shown]
    assert all(key.key_id in shown for key in keys)


def test_a_fingerprint_is_short_and_not_part_of_the_key() -> None:
    """An id may be shown anywhere: it differs by key and holds nothing of it."""
    secrets = [bytes([value]) * 32 for value in range(50)]

    ids = [SpaceKey.of(secret).key_id for secret in secrets]

    assert len(set(ids)) == 50
    assert {len(key_id) for key_id in ids} == {16}
    assert not [1 for key_id, secret in zip(ids, secrets, strict=True) if secret.hex()[:6] in key_id]


def test_a_key_and_its_id_belong_together() -> None:
    """A key of another length, or under another's id, cannot be made."""
    with pytest.raises(ValueError, match="32 bytes"):
        SpaceKey.of(b"short")
    with pytest.raises(ValueError, match="does not match"):
        SpaceKey(SpaceKey.of(bytes(32)).key_id, MASTER)


def test_no_error_shows_a_key(key_file: KeyFile, tmp_path: Path) -> None:
    """Whatever goes wrong, message, arguments and traceback are free of key material."""
    path = tmp_path / "keys.json"
    key_file.add_key("home")
    key = key_file.current("home")
    assert key is not None
    working = AesGcmEncryptor(key_file)
    sealed, ciphertext = working.seal("home", PAYLOAD, HERE)
    intact = path.read_bytes()

    def read_damaged(damage: Callable[[bytes], bytes]) -> Callable[[], object]:
        def read() -> object:
            path.write_bytes(damage(intact))
            return KeyFile(path)

        return read

    def read_exposed() -> object:
        path.chmod(0o644)
        return KeyFile(path)

    doings: list[Callable[[], object]] = [
        lambda: working.open("home", sealed, ciphertext, b"elsewhere"),
        lambda: working.open("home", Sealed("A256GCM", "unknown", sealed.nonce), ciphertext, HERE),
        lambda: working.seal("work", PAYLOAD, HERE),
        *map(read_damaged, (_without_braces, _with_another_id, _of_a_newer_format)),
        read_exposed,
    ]
    for doing in doings:
        with pytest.raises(TidingsError) as caught:
            doing()
        error = caught.value
        told = f"{error} {error!r} {error.args} {error.hint} {vars(error)}" + "".join(traceback.format_exception(error))
        assert not [spelling for spelling in _spellings(key.secret) if spelling in told]
        assert error.code.split(".")[0] in ("log", "keys")
