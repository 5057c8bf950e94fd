"""Payloads of protected spaces are sealed in the log, and open only with their key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conformance.support import SMALL, OpenEngine, append_all, drop_sealed, event, numbered, read_all
from tidings.log import Appended, Duplicate, LogSettings, Query, Refused
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import IdConflict, SealedPayload
from tidings.log.keys import DerivedKeys, KeyFile, NoSealingKey, SpaceKey

MASTER = bytes(range(32))


class Switch:
    """Keys that can be taken away and given back while a log is open."""

    def __init__(self) -> None:
        self.keys = DerivedKeys(MASTER, spaces={"secret"})
        self.gone = False

    def current(self, space_id: str) -> SpaceKey | None:
        return self.keys.current(space_id)

    def find(self, space_id: str, key_id: str) -> SpaceKey | None:
        return None if self.gone else self.keys.find(space_id, key_id)


async def test_a_sealed_payload_reads_as_it_was(open_engine: OpenEngine) -> None:
    """With the key at hand readers see the payload, and no sign of the seal."""
    log = await open_engine(encryptor=AesGcmEncryptor(DerivedKeys(MASTER)))
    await append_all(log, [event("a", {"n": n, "text": "ü"}, space_id="secret") for n in range(5)])

    for query in (Query(), Query(topic="a"), Query(backwards=True)):
        records = await read_all(log, query)
        assert sorted(record.payload["n"] for record in records) == [0, 1, 2, 3, 4]
        assert {record.payload["text"] for record in records} == {"ü"}
        assert {record.meta.sealed for record in records} == {None}


async def test_the_payload_is_not_in_the_log_in_plain(open_engine: OpenEngine) -> None:
    """Without the key a record says that it is sealed, with which key, and nothing of its payload."""
    keys = Switch()
    log = await open_engine(encryptor=AesGcmEncryptor(keys))
    await log.append(event("a", {"pin": "4711-very-secret"}, space_id="secret", event_id="e1", partitions=["p"]))
    keys.gone = True

    (record,) = await read_all(log, Query())

    assert b"4711" not in bytes(record.payload_json)
    assert record.meta.sealed is not None
    with pytest.raises(SealedPayload) as caught:
        record.payload  # noqa: B018 - reading it is what must fail
    assert (caught.value.space_id, caught.value.key_id) == ("secret", record.meta.sealed.key)
    assert (record.meta.event_id, record.meta.partitions) == ("e1", ("p",))


async def test_a_sealed_record_does_not_hide_its_neighbours(open_engine: OpenEngine) -> None:
    """Records of other spaces read as ever beside those whose key is gone, on the same page."""
    keys = Switch()
    log = await open_engine(encryptor=AesGcmEncryptor(keys))
    await append_all(log, [event("a", {"n": n}, space_id="secret" if n % 2 else "open") for n in range(6)])
    keys.gone = True

    records = await read_all(log, Query())

    assert [record.meta.sealed is not None for record in records] == [False, True] * 3
    assert [record.payload["n"] for record in records if record.meta.sealed is None] == [0, 2, 4]


async def test_spaces_without_keys_stay_plain(open_engine: OpenEngine) -> None:
    """Only protected spaces are sealed; a line of another space is as long as without encryption."""
    plain = await open_engine()
    mixed = await open_engine(encryptor=AesGcmEncryptor(DerivedKeys(MASTER, spaces={"secret"})))
    for log in (plain, mixed):
        await append_all(log, [*numbered("open", 3, space_id="open"), *numbered("secret", 3, space_id="secret")])

    assert plain.topics()["open"].size_bytes == mixed.topics()["open"].size_bytes
    assert plain.topics()["secret"].size_bytes < mixed.topics()["secret"].size_bytes


async def test_a_rotated_key_opens_what_it_sealed(open_engine: OpenEngine, tmp_path: Path) -> None:
    """After a new key was added, older and newer records of a space both read."""
    keys = KeyFile.create(tmp_path / "keys.json")
    keys.add_key("secret")
    log = await open_engine(encryptor=AesGcmEncryptor(keys))
    await log.append(event("a", {"n": 0}, space_id="secret"))
    keys.add_key("secret")
    await log.append(event("a", {"n": 1}, space_id="secret"))

    assert [record.payload["n"] for record in await read_all(log, Query())] == [0, 1]


async def test_dedupe_sees_through_the_seal(open_engine: OpenEngine) -> None:
    """A retry of a sealed event is a duplicate and other content a conflict, by id and by key."""
    log = await open_engine(encryptor=AesGcmEncryptor(DerivedKeys(MASTER)))
    first = await log.append(event("a", {"n": 1}, event_id="e1", idem_key="k"))

    assert await log.append(event("a", {"n": 1}, event_id="e1")) == Duplicate(first.seq, first.offset, "e1")
    assert await log.append(event("a", {"n": 1}, idem_key="k")) == Duplicate(first.seq, first.offset, "e1")
    for other in (event("a", {"n": 2}, event_id="e1"), event("a", {"n": 2}, idem_key="k")):
        with pytest.raises(IdConflict):
            await log.append(other)


async def test_kept_ids_see_through_the_seal(open_engine: OpenEngine) -> None:
    """Ids of sealed records that were dropped still tell a retry from other content."""
    settings = LogSettings(journal_bytes=SMALL.journal_bytes, segment_lines_max=5)
    log = await open_engine(settings, encryptor=AesGcmEncryptor(DerivedKeys(MASTER)))
    await append_all(log, [event("a", {"n": n}, event_id=f"e{n}") for n in range(8)])
    await drop_sealed(log, keep_ids=True)

    assert await log.append(event("a", {"n": 1}, event_id="e1")) == Duplicate(2, 1, "e1")
    with pytest.raises(IdConflict):
        await log.append(event("a", {"n": 2}, event_id="e1"))


async def test_nothing_is_stored_in_plain_for_want_of_a_key(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Events of a space whose keys were shredded are refused; the rest of the batch and of the log goes on."""
    keys = KeyFile.create(tmp_path / "keys.json")
    keys.add_key("secret")
    log = await open_engine(encryptor=AesGcmEncryptor(keys))
    await log.append(event("a", {"n": 0}, space_id="secret"))
    keys.shred("secret")

    with pytest.raises(NoSealingKey):
        await log.append(event("a", {"n": 1}, space_id="secret"))
    verdicts = await log.append_many(
        [event("a", {"n": 2}, space_id="open"), event("a", {"n": 3}, space_id="secret"), event("a", {"n": 4})]
    )

    match verdicts:
        case [Appended(seq=2, offset=1), Refused(NoSealingKey(space_id="secret")), Appended(seq=3, offset=2)]:
            pass
        case _:
            pytest.fail(f"{verdicts}")
    records = await read_all(log, Query())
    assert [record.meta.sealed is not None for record in records] == [True, False, False]
    assert log.health().is_writable


async def test_an_event_that_cannot_be_sealed_holds_nobody_up(open_engine: OpenEngine, tmp_path: Path) -> None:
    """The first event of an idle log is refused as it is about to be sealed; what comes after it is stored, and the log closes."""
    keys = KeyFile.create(tmp_path / "keys.json")
    keys.add_key("secret")
    keys.shred("secret")
    log = await open_engine(encryptor=AesGcmEncryptor(keys))
    with pytest.raises(NoSealingKey):
        await log.append(event("a", {"n": 1}, space_id="secret"))

    async with asyncio.timeout(10):
        done = await log.append(event("a", {"n": 2}, space_id="open"))
        await log.close()
    assert (type(done), done.seq, done.offset) == (Appended, 1, 0)


async def test_an_event_refused_for_want_of_a_key_can_be_sent_later(open_engine: OpenEngine, tmp_path: Path) -> None:
    """When the space has a key again, the very event that was refused is stored."""
    keys = KeyFile.create(tmp_path / "keys.json")
    keys.add_key("secret")
    keys.shred("secret")
    log = await open_engine(encryptor=AesGcmEncryptor(keys))
    unlucky = event("a", {"n": 1}, space_id="secret")
    with pytest.raises(NoSealingKey):
        await log.append(unlucky)

    keys.add_key("secret")

    done = await log.append(unlucky)
    assert (type(done), done.seq, done.offset) == (Appended, 1, 0)
    assert [record.payload for record in await read_all(log, Query())] == [{"n": 1}]
