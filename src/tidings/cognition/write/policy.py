"""
What policy says about a write: which space it goes to, and what is removed from it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

import msgspec

from tidings.core.events import SecurityBand

from ..policy import PolicyOperation, PolicyVerdict, verdict
from ..words import PERSONAL_DATA, redact


class SpacePolicy(Protocol):
    """Who may write where."""

    def may_write(self, actor_id: str, space_id: str) -> bool:
        """Whether the actor may write to the space."""
        ...

    def shared_space(self, actor_id: str, participants: tuple[str, ...]) -> str | None:
        """The space that all of them share, if there is one."""
        ...

    def redactions(self, space_id: str) -> frozenset[str]:
        """The kinds of personal data that the space does not keep."""
        ...


class StaticSpacePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy written down: members by space, and what each space does not keep."""

    members: Mapping[str, frozenset[str]] = {}
    redacted: Mapping[str, frozenset[str]] = {}

    def may_write(self, actor_id: str, space_id: str) -> bool:
        """Members may, and everyone in their own space."""
        return space_id == personal_space(actor_id) or actor_id in self.members.get(space_id, frozenset())

    def shared_space(self, actor_id: str, participants: tuple[str, ...]) -> str | None:
        """The smallest space all of them are members of; by name, where two are equally small."""
        people = {actor_id, *participants}
        fitting = [space for space, members in self.members.items() if people <= members]
        return min(fitting, key=lambda space: (len(self.members[space]), space), default=None)

    def redactions(self, space_id: str) -> frozenset[str]:
        """As written down."""
        return self.redacted.get(space_id, frozenset())


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The space, and how it was found."""

    space_id: str
    how: str
    notes: tuple[str, ...] = ()


def personal_space(actor_id: str) -> str:
    """An actor's own space."""
    return f"personal:{actor_id}"


def resolve_space(
    *,
    actor_id: str,
    band: SecurityBand,
    hint: str | None,
    participants: tuple[str, ...],
    envelope_space: str,
    policy: SpacePolicy,
) -> Resolution:
    """Find the space to write to. Always finds one; a policy that fails is noted and the actor's own space taken."""
    own = personal_space(actor_id)
    notes: list[str] = []

    def is_open(space_id: str, why: str) -> bool:
        if space_id != own and verdict(band, PolicyOperation.SHARE) is PolicyVerdict.DENY:
            notes.append(f"{why}:band_denies_sharing")
            return False
        if not policy.may_write(actor_id, space_id):
            notes.append(f"{why}:not_permitted")
            return False
        return True

    try:
        if hint is not None and is_open(hint, "hint"):
            return Resolution(space_id=hint, how="hint")
        if participants:
            shared = policy.shared_space(actor_id, participants)
            if shared is not None and is_open(shared, "participants"):
                return Resolution(space_id=shared, how="participants", notes=tuple(notes))
        if envelope_space != own and is_open(envelope_space, "envelope"):
            return Resolution(space_id=envelope_space, how="envelope", notes=tuple(notes))
    except Exception as error:  # noqa: BLE001 - a policy is a stranger's code, and whatever it raises is a failed policy
        return Resolution(space_id=own, how="fallback", notes=(*notes, f"policy_failed:{type(error).__name__}"))
    return Resolution(space_id=own, how="personal", notes=tuple(notes))


CONSERVATIVE: Final = "[redacted]"
_DEPTH_MAX: Final = 16


class Redacted(msgspec.Struct, frozen=True, kw_only=True):
    """What may be kept."""

    content: dict[str, Any]
    counts: dict[str, int]
    kinds: frozenset[str] = frozenset()
    is_conservative: bool = False


NOTHING_KEPT: Final = Redacted(content={"text": CONSERVATIVE}, counts={}, is_conservative=True)
"""What is left when it is not known what may be kept."""


def kinds_to_redact(band: SecurityBand, obligations: Collection[str], space_kinds: frozenset[str]) -> frozenset[str]:
    """All kinds under an obligation or outside GREEN; else what the space does not keep."""
    if "REDACT_PII" in obligations or band is not SecurityBand.GREEN:
        return frozenset(PERSONAL_DATA) | space_kinds
    return space_kinds


def redact_content(content: Mapping[str, Any], kinds: frozenset[str]) -> Redacted:
    """Clean every string of the content, keys included."""
    counts: Counter[str] = Counter()
    try:
        cleaned = _clean(content, kinds, counts, 0)
    except (KeyError, ValueError, TypeError):  # an unknown kind, nested too deeply, not JSON
        return NOTHING_KEPT
    return Redacted(content=cleaned, counts=dict(sorted(counts.items())), kinds=kinds)


def redact_words(words: tuple[str, ...], redacted: Redacted) -> tuple[str, ...]:
    """Tags and the like, cleaned as the content was; none, where nothing of the content was kept."""
    return () if redacted.is_conservative else tuple(redact(word, redacted.kinds)[0] for word in words)


def _clean(value: Any, kinds: frozenset[str], counts: Counter[str], depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        text, found = redact(value, kinds)
        counts.update(found)
        return text
    if isinstance(value, Mapping):
        return {
            _clean(str(key), kinds, counts, depth + 1): _clean(each, kinds, counts, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean(each, kinds, counts, depth + 1) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON")
