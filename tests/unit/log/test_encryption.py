"""A sealed payload is read with its space's key, at its own record and unaltered, or not at all."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from tidings.log.encryption import AesGcmEncryptor, SealBroken, open_payload, seal_payload
from tidings.log.errors import SealedPayload
from tidings.log.keys import (
    DerivedKeys,
    SpaceKey,
)

MASTER = bytes(range(100, 132))
PAYLOAD = b'{"amount":42}'
HERE = b"orders/ev-1"


def encryptor(master: bytes = MASTER) -> AesGcmEncryptor:
    return AesGcmEncryptor(DerivedKeys(master))


@given(st.binary(max_size=200), st.binary(max_size=40), st.text(min_size=1, max_size=20))
def test_what_was_sealed_can_be_opened(plaintext: bytes, bound_to: bytes, space_id: str) -> None:
    """Any bytes come back as they were, and do not stand in the ciphertext."""
    sealing = encryptor()

    sealed, ciphertext = sealing.seal(space_id, plaintext, bound_to)

    assert encryptor().open(space_id, sealed, ciphertext, bound_to) == plaintext
    assert len(plaintext) < 8 or plaintext not in ciphertext


def test_the_seal_is_plain_aes_256_gcm() -> None:
    """Another implementation can open it: the nonce is in the seal, the record's name is associated data."""
    key = DerivedKeys(MASTER).current("home")
    assert key is not None

    sealed, ciphertext = encryptor().seal("home", PAYLOAD, HERE)

    assert (sealed.alg, sealed.key) == ("A256GCM", key.key_id)
    assert AESGCM(key.secret).decrypt(base64.b64decode(sealed.nonce), ciphertext, HERE) == PAYLOAD


def test_a_payload_stays_json_in_its_line() -> None:
    """The stand-in for a sealed payload is a JSON object, and opening gives the payload's own bytes."""
    sealed, line_payload = seal_payload(encryptor(), "home", PAYLOAD, HERE)

    assert list(json.loads(line_payload)) == ["sealed"]
    assert line_payload == msgspec.json.encode(json.loads(line_payload))
    assert open_payload(encryptor(), "home", sealed, line_payload, HERE) == PAYLOAD


def test_every_payload_gets_a_nonce_of_its_own() -> None:
    """The same payload sealed again is another ciphertext under another nonce."""
    sealing = encryptor()

    seals = [sealing.seal("home", PAYLOAD, HERE) for _ in range(100)]

    assert len({sealed.nonce for sealed, _ in seals}) == len({ciphertext for _, ciphertext in seals}) == 100


def test_randomness_comes_in_as_an_argument() -> None:
    """With the same random bytes sealing gives the same result, and a source that gives too few is refused."""
    sealing = AesGcmEncryptor(DerivedKeys(MASTER), random=lambda count: bytes(count))

    assert sealing.seal("home", PAYLOAD, HERE) == sealing.seal("home", PAYLOAD, HERE)
    with pytest.raises(ValueError, match="gave 3 bytes"):
        AesGcmEncryptor(DerivedKeys(MASTER), random=lambda _: b"abc").seal("home", PAYLOAD, HERE)


def test_no_altered_byte_of_the_ciphertext_passes() -> None:
    """Every single-bit change of ciphertext and tag is found."""
    opening = encryptor()
    sealed, ciphertext = opening.seal("home", PAYLOAD, HERE)

    for at in range(len(ciphertext)):
        for bit in range(8):
            altered = bytearray(ciphertext)
            altered[at] ^= 1 << bit
            with pytest.raises(SealBroken):
                opening.open("home", sealed, bytes(altered), HERE)


def test_no_altered_byte_of_the_line_passes() -> None:
    """Every other byte at every place of the stand-in is found, also where base64 has bits to spare."""
    opening = encryptor()
    sealed, line_payload = seal_payload(opening, "home", PAYLOAD, HERE)
    assert line_payload.endswith(b'="}')

    for at in range(len(line_payload)):
        for value in set(range(256)) - {line_payload[at]}:
            altered = line_payload[:at] + bytes([value]) + line_payload[at + 1 :]
            with pytest.raises(SealBroken):
                open_payload(opening, "home", sealed, altered, HERE)


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 20])
def test_a_cut_ciphertext_does_not_pass(cut: int) -> None:
    """A shorter ciphertext is broken, down to none at all."""
    opening = encryptor()
    sealed, ciphertext = opening.seal("home", PAYLOAD, HERE)

    with pytest.raises(SealBroken):
        opening.open("home", sealed, ciphertext[:cut], HERE)


@pytest.mark.parametrize(
    "changes",
    [{"nonce": "AAAAAAAAAAAAAAAA"}, {"nonce": ""}, {"nonce": "AAAA"}, {"nonce": "é" * 16}, {"alg": "A128GCM"}],
    ids=["other nonce", "no nonce", "short nonce", "no base64", "other algorithm"],
)
def test_an_altered_seal_does_not_pass(changes: dict[str, str]) -> None:
    """The seal in the envelope is as protected as the ciphertext."""
    opening = encryptor()
    sealed, ciphertext = opening.seal("home", PAYLOAD, HERE)

    with pytest.raises(SealBroken) as caught:
        opening.open("home", msgspec.structs.replace(sealed, **changes), ciphertext, HERE)

    assert (caught.value.space_id, caught.value.key_id) == ("home", sealed.key)


def test_a_payload_cannot_be_moved_to_another_record() -> None:
    """Two records of one space and key cannot swap their payloads."""
    opening = encryptor()
    one = seal_payload(opening, "home", b'{"n":1}', b"ev-1")
    two = seal_payload(opening, "home", b'{"n":2}', b"ev-2")

    assert open_payload(opening, "home", *one, b"ev-1") == b'{"n":1}'
    for (sealed, line_payload), bound_to in ((one, b"ev-2"), (two, b"ev-1")):
        with pytest.raises(SealBroken):
            open_payload(opening, "home", sealed, line_payload, bound_to)


def test_a_plain_payload_is_not_taken_for_a_sealed_one() -> None:
    """An envelope with a seal over a plain payload was tampered with."""
    sealed, _ = encryptor().seal("home", PAYLOAD, HERE)

    with pytest.raises(SealBroken, match="no sealed payload"):
        open_payload(encryptor(), "home", sealed, PAYLOAD, HERE)


def test_a_key_that_is_not_at_hand_is_named() -> None:
    """Without the key the payload stays sealed, and the answer says which key it takes."""
    sealed, ciphertext = encryptor().seal("home", PAYLOAD, HERE)

    with pytest.raises(SealedPayload) as caught:
        encryptor(bytes(32)).open("home", sealed, ciphertext, HERE)

    assert (caught.value.space_id, caught.value.key_id) == ("home", sealed.key)


def test_a_wrong_key_under_the_right_name_opens_nothing() -> None:
    """The id of a key is only its name; a key source that answers with another key gives nothing away."""

    class Muddled:
        def current(self, space_id: str) -> SpaceKey | None:
            return DerivedKeys(MASTER).current(space_id)

        def find(self, space_id: str, key_id: str) -> SpaceKey | None:
            return SpaceKey.of(bytes(32))

    muddled = AesGcmEncryptor(Muddled())
    sealed, ciphertext = muddled.seal("home", PAYLOAD, HERE)

    with pytest.raises(SealBroken):
        muddled.open("home", sealed, ciphertext, HERE)


def test_many_keys_are_in_use_at_once() -> None:
    """More spaces than ciphers are kept ready still seal and open."""
    busy = encryptor()
    seals = {f"space-{at}": busy.seal(f"space-{at}", PAYLOAD, HERE) for at in range(1100)}

    assert all(busy.open(space_id, *sealed, HERE) == PAYLOAD for space_id, sealed in seals.items())
