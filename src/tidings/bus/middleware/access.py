"""
Access before the handler: capabilities, bands and spaces.

Everything is denied that is not allowed: a subscriber without the capability an event asks for, a band above the
subscriber's ceiling or one that is not known, a space that is not on its list. A BLACK event is denied unless the
subscriber's rule says in so many words that it may have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tidings.core.actors import Capability, SecurityBand

from .contract import Decision, HandleContext, InvalidMiddleware, Middleware

__all__ = ["RBACMiddleware", "SubscriberRule"]

ANY: Final = "*"
_RANKS: Final = {band.value: band.rank for band in SecurityBand}
_BLACK_RANK: Final = SecurityBand.BLACK.rank
_RED_RANK: Final = SecurityBand.RED.rank


class SubscriberRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one subscriber (a group) may have."""

    capabilities: frozenset[Capability] | None = None
    """Its allow list, instead of the capabilities that the subscription itself came with."""
    band_max: SecurityBand = SecurityBand.RED
    spaces: frozenset[str] | None = None
    """Spaces whose events it may have: exact ids, or a prefix as ``shared:*``. None is all spaces."""
    allow_black: bool = False
    """BLACK events too, whatever ``band_max`` says."""


class RBACMiddleware(Middleware):
    """
    Deny events before the handler runs.

    Args:
        required: Capabilities an event asks of its subscriber, by topic or by event type; both apply. ``*`` is for topics and
            types not named. An event that asks for PROJECT is denied in band RED: what is sensitive is not projected.
        rules: What each group may have.
        default: What groups not named may have.

    Raises:
        InvalidMiddleware: A capability or band is not one.
    """

    name = "rbac"
    priority = 30

    def __init__(
        self,
        required: Mapping[str, Iterable[Capability | str]] | None = None,
        *,
        rules: Mapping[str, SubscriberRule] | None = None,
        default: SubscriberRule | None = None,
    ) -> None:
        asked = {ANY: (Capability.RECALL,)} if required is None else required
        self._required = {str.__str__(name): self._capabilities(name, caps) for name, caps in asked.items()}
        self._required_else = self._required.get(ANY, frozenset())
        self._rules = dict(rules or {})
        self._default = SubscriberRule() if default is None else default
        for group, rule in self._rules.items():
            if not isinstance(rule, SubscriberRule):
                raise InvalidMiddleware(self.name, f"rules[{group!r}]", "is no SubscriberRule")

    def before_handle(self, ctx: HandleContext) -> Decision | None:
        """Deny, or let pass."""
        problem = self._problem(ctx)
        return None if problem is None else Decision.deny(problem)

    def _problem(self, ctx: HandleContext) -> str | None:
        # The stored envelope, not the event's own: no middleware before this one can rewrite what access is decided by.
        meta = ctx.event.record.meta
        rule = self._rules.get(ctx.group, self._default)
        held = ctx.capabilities if rule.capabilities is None else rule.capabilities
        of_topic, of_type = self._required.get(meta.topic), self._required.get(meta.type)
        if of_topic is None and of_type is None:
            required = self._required_else
        else:
            required = (of_topic or frozenset()) | (of_type or frozenset())
        if not required <= held:
            lacking = ", ".join(sorted(required - held))
            return f"group {ctx.group!r} lacks the capability {lacking} for topic {meta.topic!r}"
        rank = 0 if meta.band is None else _RANKS.get(meta.band)
        if rank is None:
            return f"band {meta.band!r} is not known"
        if rank == _BLACK_RANK:
            if not rule.allow_black:
                return f"group {ctx.group!r} is not allowed BLACK events"
        elif rank > rule.band_max.rank:
            return f"band {meta.band} is above the ceiling {rule.band_max} of group {ctx.group!r}"
        if rank >= _RED_RANK and Capability.PROJECT in required:
            return f"band {meta.band} events are not projected"
        if rule.spaces is not None and not _is_listed(meta.space_id, rule.spaces):
            return f"group {ctx.group!r} has no access to space {meta.space_id!r}"
        return None

    def _capabilities(self, name: str, capabilities: Iterable[Capability | str]) -> frozenset[Capability]:
        try:
            return frozenset(Capability(capability) for capability in capabilities)
        except ValueError as error:
            raise InvalidMiddleware(self.name, f"required[{str.__str__(name)!r}]", str(error)) from error


def _is_listed(space_id: str, spaces: frozenset[str]) -> bool:
    return space_id in spaces or any(space.endswith("*") and space_id.startswith(space[:-1]) for space in spaces)
