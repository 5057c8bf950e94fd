"""
Which space a memory is written to.

An explicit wish, if it is permitted; else the shared space that the participants have; else the space the event came in,
if permitted; else the actor's own. What is not permitted, or cannot be found out, ends in the actor's own space: a memory
never lands in front of more eyes than it was cleared for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from tidings.core.actors import SecurityBand

from ..policy import Operation, Verdict, verdict

__all__ = ["Resolution", "SpacePolicy", "StaticSpacePolicy", "resolve_space"]


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
        if space_id != own and verdict(band, Operation.SHARE) is Verdict.DENY:
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
