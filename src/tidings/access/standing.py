"""
What the records say about one subject: its grants and revocations, the last one first.

A right can be named exactly or by a prefix. Of all records that cover a request the last one counts, be it a grant or a
revocation, exact or by prefix: as if each had been carried out in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .resources import Action, Resource, ResourceKind, ResourcePattern

__all__ = ["Rule", "Standing"]


class Rule(NamedTuple):
    """One grant or revocation in force."""

    action: Action
    resource: ResourcePattern
    is_grant: bool
    seq: int


class Standing:
    """
    The rules of one subject.

    A rule is kept as its seq, below zero for a revocation, so that the last of several is the one with the largest size.
    """

    __slots__ = ("_exact", "_prefixes", "is_revoked", "rule_count", "seq")

    def __init__(self) -> None:
        self._exact: dict[tuple[Action, ResourceKind, str], int] = {}
        self._prefixes: dict[tuple[Action, ResourceKind], dict[str, int]] = {}
        self.is_revoked = False
        """The subject as a whole was revoked."""
        self.rule_count = 0
        self.seq = 0
        """The last record about this subject."""

    def knows(self, action: Action, pattern: ResourcePattern) -> bool:
        """Whether there is a rule for exactly this already, which a further one would replace."""
        if pattern.match == "prefix":
            return pattern.name in self._prefixes.get((action, pattern.kind), ())
        return (action, pattern.kind, pattern.name) in self._exact

    def enter(self, action: Action, pattern: ResourcePattern, *, is_grant: bool, seq: int) -> None:
        """Note a grant or a revocation."""
        if not self.knows(action, pattern):
            self.rule_count += 1
        signed = seq if is_grant else -seq
        if pattern.match == "prefix":
            self._prefixes.setdefault((action, pattern.kind), {})[pattern.name] = signed
        else:
            self._exact[action, pattern.kind, pattern.name] = signed

    def last_about(self, action: Action, resource: Resource) -> int:
        """The seq of the last record that covers this; below zero if it is a revocation, 0 if there is none."""
        kind, name = resource
        last = self._exact.get((action, kind, name), 0)
        for prefix, signed in self._prefixes.get((action, kind), {}).items():
            if abs(signed) > abs(last) and name.startswith(prefix):
                last = signed
        return last

    def rules(self) -> Iterator[Rule]:
        """Every rule in force."""
        for (action, kind, name), signed in self._exact.items():
            yield Rule(action, ResourcePattern(kind, name), signed > 0, abs(signed))
        for (action, kind), prefixes in self._prefixes.items():
            for prefix, signed in prefixes.items():
                yield Rule(action, ResourcePattern(kind, prefix, "prefix"), signed > 0, abs(signed))
