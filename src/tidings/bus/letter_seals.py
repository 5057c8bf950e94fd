"""
What dead letters of encrypted spaces say, sealed with the space's key: the text of an error often quotes the payload.

The texts of a line (its error and those of the attempts) are sealed together and stand beside it; empty texts take their place. Who has the
key reads them as if they had never been sealed; who has not is told so instead. The kind of an error and where in the code it was raised
stay plain, as the envelope of an event does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidings.log.encryption import Encryptor, SealBroken, open_payload, seal_payload
from tidings.log.errors import SealedPayload
from tidings.log.keys import NoSealingKey
from tidings.log.record import Record, Sealed

__all__ = ["LetterSeals", "SealedTexts"]


class SealedTexts(msgspec.Struct, frozen=True):
    """Texts that were sealed, and how."""

    by: Sealed
    texts: msgspec.Raw


class LetterSeals:
    """
    Seals and opens what dead letters say.

    Args:
        encryptor: Knows which spaces are encrypted, and their keys; ``None`` where there are no keys.
    """

    def __init__(self, encryptor: Encryptor | None) -> None:
        self._encryptor = encryptor

    def is_secret(self, record: Record) -> bool:
        """Whether nothing of the record's payload may be written in the open."""
        if record.meta.sealed is not None:
            return True
        return self._encryptor is not None and self._encryptor.protects(record.meta.space_id)

    def seal(self, space_id: str, bound_to: Sequence[str], texts: list[str]) -> SealedTexts | None:
        """Seal texts for the line that ``bound_to`` names; ``None`` if there is no key to do it with."""
        if self._encryptor is None:
            return None
        try:
            by, sealed = seal_payload(self._encryptor, space_id, msgspec.json.encode(texts), _bound(space_id, bound_to))
        except NoSealingKey:
            return None
        return SealedTexts(by, msgspec.Raw(sealed))

    def open(self, space_id: str, bound_to: Sequence[str], sealed: SealedTexts) -> list[str] | str:
        """The texts of a line; or, if they cannot be had, why."""
        if self._encryptor is None:
            return f"sealed with key {sealed.by.key!r} of space {space_id!r}, which is not at hand"
        bound = _bound(space_id, bound_to)
        try:
            opened = open_payload(self._encryptor, space_id, sealed.by, bytes(sealed.texts), bound)
        except SealedPayload as error:
            return f"sealed with key {error.key_id!r} of space {space_id!r}, which is not at hand"
        except SealBroken as error:
            return str(error)
        return msgspec.json.decode(opened, type=list[str])


def _bound(space_id: str, bound_to: Sequence[str]) -> bytes:
    return msgspec.json.encode(["dead letter", space_id, *bound_to])
