"""
The access book: the rights in force, folded from the records of the topic ``access``; and a connection's view of them.

The node hands every record of the topic in seq order to ``apply``, from the first one on; the book is that fold and nothing else,
so it can be thrown away and made again. It never waits and never raises over a record: what it cannot read it reports, and
assumes the worst. A grant that cannot be read gives nothing. A revocation that cannot be read revokes its
subject, if at least that is legible. Anything else that might have taken something away from somebody closes the book: everything
is denied, to everybody, until a later record mends it (the policy put anew or removed, the record dismissed).

Of several grants and revocations that cover a resource the last one counts, by seq.

A ``Capsule`` is one connection's rights, decided once each and cached. It is never stale: before it answers from its cache it
compares its version with the book's, so a revocation is in force with the first question after it was applied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from tidings.core.settings import checked
from tidings.core.validation import UNREADABLE
from tidings.log.interface import Query, ReadableLog
from tidings.log.reading import records
from tidings.log.record import Record

from .administration import (
    ACCESS_TOPIC,
    Change,
    Dismissed,
    Grant,
    PolicyPut,
    PolicyRemoved,
    Revoke,
    SubjectRestored,
    SubjectRevoked,
    TokenRevocation,
    change_from_record,
    checked_change,
)
from .context import OperationContext
from .errors import Forbidden, InvalidChange, InvalidPolicy, TokenRevoked
from .policies import Policy, PolicySet, RightsContext, check_new_policy, check_policy
from .resources import UNUSED_KINDS, Action, Resource, ResourceKind, ResourcePattern, normal, space, topic
from .settings import AccessSettings

SLICE_EFFORT: Final = 10_000
"""How much is decided without giving way to other tasks, about in microseconds; see ``AccessBook.effort``."""
_DECISION_EFFORT: Final = 5


class Rule(NamedTuple):
    """One grant or revocation in force."""

    action: Action
    resource: ResourcePattern
    is_grant: bool
    seq: int


_WITHIN_TOPICS: Final = (ResourceKind.SPACE, ResourceKind.PARTITION, ResourceKind.PROJECT)


class SubjectRules:
    """
    The rules of one subject.

    A rule is kept as its seq, below zero for a revocation, so that the last of several is the one with the largest size.
    """

    __slots__ = ("_exact", "_prefixes", "is_revoked", "prefix_count", "revoked_within", "rule_count", "seq")

    def __init__(self) -> None:
        self._exact: dict[tuple[Action, ResourceKind, str], int] = {}
        self._prefixes: dict[tuple[Action, ResourceKind], dict[str, int]] = {}
        self.is_revoked = False
        """The subject as a whole was revoked."""
        self.rule_count = 0
        self.prefix_count = 0
        self.revoked_within: set[tuple[Action, ResourcePattern]] = set()
        """Revocations of spaces, partitions and projects: what they hide is within topics."""
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
            self.prefix_count += pattern.match == "prefix"
        signed = seq if is_grant else -seq
        if pattern.kind in _WITHIN_TOPICS:
            (self.revoked_within.discard if is_grant else self.revoked_within.add)((action, pattern))
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


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something is allowed or not."""

    is_allowed: bool
    seq: int
    """The last access record that was taken into account."""
    is_claimed: bool = False
    """The token's claims give it."""
    granted_at: int | None = None
    """The grant that counts, by its seq."""
    revoked_at: int | None = None
    """The revocation that counts, by its seq."""
    is_revoked: bool = False
    """The token or the subject as a whole was revoked."""
    reasons: tuple[str, ...] = ()
    """The policies that settled it; none if nothing permits it."""
    errors: tuple[str, ...] = ()
    """What could not be evaluated or read, and so denies."""


class Capsule:
    """
    What one bearer of a token may do.

    Made by ``AccessBook.capsule``.
    """

    __slots__ = ("_book", "_count_max", "_decisions", "_marks", "_sees_whole_topics", "_version", "context")

    def __init__(self, book: AccessBook, context: OperationContext, *, decisions_count_max: int) -> None:
        self.context = context
        self._book = book
        self._count_max = decisions_count_max
        self._decisions: dict[tuple[Action, Resource], Literal["allowed", "forbidden", "not_permitted"]] = {}
        self._version = book.version
        self._marks = book.marks(context)
        self._sees_whole_topics: bool | None = None

    def allows(self, action: Action, resource: Resource) -> bool:
        """Whether this may be done, as of the last access record applied to the book."""
        return self._decide(action, resource) == "allowed"

    def forbids(self, action: Action, resource: Resource) -> bool:
        """Whether something forbids this: a revocation, or a policy. What nobody has permitted is not forbidden by that."""
        return self._decide(action, resource) == "forbidden"

    def require(self, action: Action, resource: Resource) -> None:
        """
        Go on only if this may be done.

        Raises:
            TokenRevoked: The token or its subject was revoked.
            Forbidden: It may not.
        """
        if not self.allows(action, resource):
            if self.is_revoked:
                raise TokenRevoked(self.context.subject)
            raise Forbidden(self.context.subject, action, resource)

    def extends_to(self, action: Action, resource: Resource) -> bool:
        """
        Whether a right on a project or topic is one on this partition or project of its events too.

        A token that names such is bound to them; one that names none has all that nothing forbids.
        """
        if self.context.claims.binds(resource.kind):
            return self.allows(action, resource)
        return not self.forbids(action, resource)

    def allows_event(self, action: Action, topic_name: str, space_id: str) -> bool:
        """Whether this may be done to events of a topic in a space: it takes the right on both."""
        return self.allows(action, topic(topic_name)) and self.allows(action, space(space_id))

    def require_event(self, action: Action, topic_name: str, space_id: str) -> None:
        """
        Go on only if this may be done to events of a topic in a space.

        Raises:
            TokenRevoked: The token or its subject was revoked.
            Forbidden: It may not; the error names the one of the two that is missing.
        """
        self.require(action, topic(topic_name))
        self.require(action, space(space_id))

    @property
    def version(self) -> int:
        """What was decided holds for as long as this stays the same, and the token has not expired."""
        return self._book.version

    @property
    def subject(self) -> str:
        """Whose rights these are."""
        return self.context.subject

    @property
    def expires_at_ns(self) -> int | None:
        """When the token ends, in nanoseconds since 1970."""
        return self.context.expires_at_ns

    @property
    def is_revoked(self) -> bool:
        """Whether the token or the subject itself was revoked: there is nothing left to ask for."""
        return self._book.is_revoked(self.context)

    async def decide_ahead(self, questions: Iterable[tuple[Action, Resource]]) -> None:
        """
        Decide many questions in slices, between which other tasks run.

        Afterwards ``allows`` and the others find the policies' decisions made, as long as access does not change.
        """
        slicing, decided = Slicing(self._book), set[tuple[Action, Resource]]()
        for question in questions:
            if question not in decided:
                decided.add(question)
                self._decide(*question)
            if slicing.is_over():
                await asyncio.sleep(0)
                slicing = Slicing(self._book)

    async def sees_whole_topics(self) -> bool:
        """
        Return whether nothing within a topic that it may read is hidden from it: no space, partition or project.

        Where that is not certain the answer is no.
        """
        if self._version != self._book.version:
            self._catch_up()
        if self._sees_whole_topics is None:
            marks, is_whole = self._marks, await self._find_whether_whole()
            if self._book.marks(self.context) != marks:
                return False
            self._sees_whole_topics = is_whole
        return self._sees_whole_topics

    async def _find_whether_whole(self) -> bool:
        names = self._book.samples()
        bound = any(self.context.claims.binds(kind) for kind in _WITHIN_TOPICS)
        if bound or names is None or self._book.is_revoked_within(self.context.subject, Action.READ):
            return False
        resources = [Resource(kind, normal(name)) for kind in _WITHIN_TOPICS for name in names]
        await self.decide_ahead((Action.READ, each) for each in resources)
        return all(
            self.allows(Action.READ, each) if each.kind is ResourceKind.SPACE else not self.forbids(Action.READ, each)
            for each in resources
        )

    def explain(self, action: Action, resource: Resource) -> Explanation:
        """Why ``allows`` answers as it does."""
        return self._book.explain(self.context, action, _in_normal_form(resource))

    def _decide(self, action: Action, resource: Resource) -> Literal["allowed", "forbidden", "not_permitted"]:
        if self._version != self._book.version:
            self._catch_up()
        decision = self._decisions.get((action, resource))
        if decision is None:
            found = self.explain(action, resource)
            is_forbidden = found.reasons or found.errors or found.is_revoked
            decision = "allowed" if found.is_allowed else "forbidden" if is_forbidden else "not_permitted"
            if len(self._decisions) >= self._count_max:
                self._decisions.clear()
            self._decisions[action, resource] = decision
        return decision

    def _catch_up(self) -> None:
        # Somebody else's grant leaves what is cached here true; only a change that concerns this bearer does not.
        marks = self._book.marks(self.context)
        if marks != self._marks:
            self._decisions.clear()
            self._sees_whole_topics = None
            self._marks = marks
        self._version = self._book.version


class Slicing:
    """
    Tells when one stretch of decisions has become long enough.

    Args:
        book: Where they are decided.
    """

    __slots__ = ("_book", "_until")

    def __init__(self, book: AccessBook) -> None:
        self._book = book
        self._until = book.effort + SLICE_EFFORT

    def is_over(self) -> bool:
        """Count one step, and return whether it was the last of the slice."""
        self._until -= 1
        return self._book.effort >= self._until


def _in_normal_form(resource: Resource) -> Resource:
    return Resource(ResourceKind(resource.kind), normal(resource.name))


logger = logging.getLogger(__name__)

_PROBLEMS_MAX: Final = 100
_NOBODY: Final = SubjectRules()

Marks = tuple[int, int, bool]
"""When policies changed last, when the subject's rules did, and whether the token was revoked: what a decision depends on."""


class AccessProblem(msgspec.Struct, frozen=True):
    """An access record that could not be applied."""

    seq: int
    type: str
    problem: str
    effect: str
    """What the book does instead."""


class StoredPolicy(msgspec.Struct, frozen=True):
    """A policy in force, or one that is not and denies everything."""

    policy_id: str
    text: str
    seq: int
    policy: Policy | None = None
    """What was made of it, unless there is a problem."""
    problem: str | None = None


class AccessBook:
    """
    Who may do what, as of the last access record.

    Args:
        settings: Bounds, and whether access is open.
    """

    def __init__(self, settings: AccessSettings | None = None) -> None:
        self._settings = checked(settings or AccessSettings(), "access")
        self.seq = 0
        """The seq of the last access record applied."""
        self._rules: dict[str, SubjectRules] = {}
        self._revoked_tokens: set[str] = set()
        self._trusted: frozenset[str] | None = None
        self.version = 0
        """Counts what can change a decision: access records, and keys that come or go."""
        self.effort = 0
        """What deciding has cost so far, about in microseconds."""
        self._policies: dict[str, StoredPolicy] = {}
        self._broken_policies: tuple[StoredPolicy, ...] = ()
        self._policy_set: PolicySet | None = None
        self._rule_count = 0
        # When something changed last that concerns everybody: policies, and whether the book is closed.
        self._common_seq = 0
        # Why everything is denied, by the seq of the record that is to blame.
        self._doubts: dict[int, AccessProblem] = {}
        self._lost: str | None = None
        self.problems: deque[AccessProblem] = deque(maxlen=_PROBLEMS_MAX)
        """The last records that could not be applied."""
        if self._settings.is_open:
            logger.warning("access is open: everybody may do everything that no policy or revocation forbids")

    # What the dispatcher calls

    def committed(self, records: Sequence[Record]) -> None:
        """Apply those of the records that are access records; the dispatcher's way in."""
        for record in records:
            if record.topic == ACCESS_TOPIC:
                self.apply(record)

    def apply(self, record: Record) -> None:
        """Take one access record into account. One that was applied before is passed over; none makes this raise."""
        if record.seq <= self.seq:
            return
        if self.seq == 0 and record.offset > 0:
            self.close(f"the first {record.offset} access records were dropped from the log", record.seq)
        try:
            change = change_from_record(record)
        except InvalidChange as error:
            self._assume_the_worst(record, error)
        else:
            self._carry_out(change, record)
        # Last, so that whoever compares them finds everything else done.
        self.seq = record.seq
        self.version += 1

    def trust(self, trusts: frozenset[str]) -> None:
        """From now on only contexts verified by one of these keys (``TokenVerifier.trusts``) may do anything; the others are revoked."""
        self._trusted = trusts
        self.version += 1

    def close(self, problem: str, seq: int) -> None:
        """Deny everything from here on: something that the records say is not known. Only a new book opens again."""
        if self._lost is None:
            self._lost = problem
            self._common_seq = seq
            self.version += 1
            logger.error("%s: everything is denied", problem)

    def _carry_out(self, change: Change, record: Record) -> None:
        seq = record.seq
        match change:
            case Grant() | Revoke():
                self._enter(change, record)
            case SubjectRevoked(subject=subject):
                self._revoke_subject(subject, seq)
            case SubjectRestored(subject=subject):
                if (rules := self._rules.get(subject)) is not None:
                    rules.is_revoked = False
                    rules.seq = seq
            case TokenRevocation(token_id=token_id):
                if token_id in self._revoked_tokens or self._has_room_for_revocation(seq):
                    self._rule_count += token_id not in self._revoked_tokens
                    self._revoked_tokens.add(token_id)
            case PolicyPut(policy_id=policy_id, text=text):
                self._put(policy_id, text, record)
            case PolicyRemoved(policy_id=policy_id):
                self._policies.pop(policy_id, None)
                self._change_for_all(seq)
            case Dismissed(seq=dismissed):
                self._doubts.pop(dismissed, None)
                self._change_for_all(seq)

    def _enter(self, change: Grant | Revoke, record: Record) -> None:
        is_grant = isinstance(change, Grant)
        rules = self._rules.get(change.subject, _NOBODY)
        if not rules.knows(change.action, change.resource):
            if is_grant and self._rule_count >= self._settings.rules_count_max:
                self._report(record, f"there are {self._rule_count} rules already", "nothing is granted")
                return
            if not is_grant and not self._has_room_for_revocation(record.seq):
                return
            self._rule_count += 1
        rules = self._rules_of(change.subject)
        rules.enter(change.action, change.resource, is_grant=is_grant, seq=record.seq)
        rules.seq = record.seq

    def _has_room_for_revocation(self, seq: int) -> bool:
        if self._rule_count < 2 * self._settings.rules_count_max:
            return True
        self.close(f"there are {self._rule_count} grants and revocations, more than can be kept", seq)
        return False

    def _revoke_subject(self, subject: str, seq: int) -> None:
        if subject in self._rules or self._has_room_for_revocation(seq):
            self._rule_count += subject not in self._rules
            rules = self._rules_of(subject)
            rules.is_revoked = True
            rules.seq = seq

    def _rules_of(self, subject: str) -> SubjectRules:
        return self._rules.setdefault(subject, SubjectRules())

    def _put(self, policy_id: str, text: str, record: Record) -> None:
        try:
            self._check_policy_id(policy_id)
            policy = check_policy(text, bytes_max=self._settings.policy_bytes_max)
            stored = StoredPolicy(policy_id, text, record.seq, policy)
        except (InvalidPolicy, InvalidChange) as error:
            kept = text[: self._settings.policy_bytes_max]
            stored = StoredPolicy(policy_id, kept, record.seq, problem=str(error))
        self._store(stored, record)

    def _store(self, policy: StoredPolicy, record: Record) -> None:
        name = policy.policy_id
        if policy.problem is not None:
            self._report(record, policy.problem, f"everything is denied until policy {name!r} is put anew or removed")
        if name not in self._policies and len(self._policies) >= 2 * self._settings.policies_count_max + 1:
            self.close(f"there are {len(self._policies)} policies, more than can be kept", record.seq)
        else:
            self._policies[name] = policy
        self._change_for_all(record.seq)

    def _change_for_all(self, seq: int) -> None:
        self._policy_set = None
        self._broken_policies = tuple(each for each in self._policies.values() if each.problem)
        self._common_seq = seq

    # What cannot be read

    def _assume_the_worst(self, record: Record, error: InvalidChange) -> None:
        kind = record.meta.type
        if kind in ("access.grant", "access.subject_restored", "access.dismissed"):
            self._report(record, str(error), "nothing is granted")
        elif not kind.startswith("access."):
            self._report(record, str(error), "none: no version of Tidings writes access records of this type")
        elif kind in ("access.revoke", "access.subject_revoked") and (subject := _legible(record, "subject")):
            self._report(record, str(error), f"{subject!r} may do nothing until it is restored")
            self._revoke_subject(subject, record.seq)
        elif kind == "access.policy_put" and (policy_id := _legible(record, "policy_id")):
            self._store(StoredPolicy(policy_id, "", record.seq, problem=str(error)), record)
        else:
            problem = self._report(record, str(error), "everything is denied until the record is dismissed")
            self._doubts[record.seq] = problem
            self._change_for_all(record.seq)
            if (
                len(self._doubts) > _PROBLEMS_MAX
            ):  # nobody dismisses them one by one, and forgetting one must not open the book
                self.close(f"more than {_PROBLEMS_MAX} access records cannot be read", record.seq)
                self._doubts.clear()

    def _report(self, record: Record, problem: str, effect: str) -> AccessProblem:
        found = AccessProblem(record.seq, record.meta.type, problem, effect)
        self.problems.append(found)
        logger.error("access record at seq %d (%s): %s; effect: %s", found.seq, found.type, problem, effect)
        return found

    # Decisions

    def capsule(self, context: OperationContext) -> Capsule:
        """The rights of whoever is asking, to be held for as long as they stay."""
        return Capsule(self, context, decisions_count_max=self._settings.decisions_count_max)

    def is_revoked(self, context: OperationContext) -> bool:
        """Whether the token, its subject as a whole, or the key that it was believed for is not taken any more."""
        return self._is_token_gone(context) or self._rules.get(context.subject, _NOBODY).is_revoked

    def _is_token_gone(self, context: OperationContext) -> bool:
        is_key_gone = self._trusted is not None and context.trust is not None and context.trust not in self._trusted
        return is_key_gone or context.token_id in self._revoked_tokens

    def marks(self, context: OperationContext) -> Marks:
        """What decisions about this bearer depend on; equal marks, equal decisions."""
        rules = self._rules.get(context.subject, _NOBODY)
        return self._common_seq, rules.seq, self._is_token_gone(context)

    def explain(self, context: OperationContext, action: Action, resource: Resource) -> Explanation:
        """Decide, and say why. ``resource`` is in its normal form."""
        closed = self.closed_by()
        if closed:
            return Explanation(False, self.seq, errors=closed)
        if not context.claims.leave(action):
            return Explanation(False, self.seq, reasons=("the token is for reading only",))
        rules = self._rules.get(context.subject, _NOBODY)
        last = rules.last_about(action, resource)
        facts = RightsContext(context.claims.cover(action, resource), last > 0, last < 0)
        try:
            policies = self._policies_in_force()
            before = policies.effort
            decision = policies.decide(context, action, resource, facts)
            self.effort += _DECISION_EFFORT + rules.prefix_count // 8 + policies.effort - before
        except InvalidPolicy as error:
            return Explanation(False, self.seq, errors=(str(error),))
        for error_text in decision.errors:
            logger.error("policies could not be evaluated for %.100r: %.300r", context.subject, error_text)
        is_revoked = self.is_revoked(context)
        return Explanation(
            is_allowed=decision.is_allowed and not is_revoked,
            seq=self.seq,
            is_claimed=facts.claimed,
            granted_at=last if last > 0 else None,
            revoked_at=-last if last < 0 else None,
            is_revoked=is_revoked,
            reasons=decision.reasons,
            errors=decision.errors,
        )

    def samples(self) -> list[str] | None:
        """Names of which the policies in force decide differently; ``None`` if that is not known, or they cannot be used."""
        try:
            return self._policies_in_force().distinctions.samples
        except InvalidPolicy:
            return None

    def is_revoked_within(self, subject: str, action: Action) -> bool:
        """Return whether a space, partition or project was revoked from a subject."""
        return any(revoked == action for revoked, _ in self._rules.get(subject, _NOBODY).revoked_within)

    def _policies_in_force(self) -> PolicySet:
        if self._policy_set is None:
            policies = {name: each.policy for name, each in self._policies.items() if each.policy is not None}
            self._policy_set = PolicySet(policies, is_open=self._settings.is_open)
        return self._policy_set

    # What operators ask

    def closed_by(self) -> tuple[str, ...]:
        """Why everything is denied; empty if the book is open."""
        if not self._doubts and self._lost is None and not self._broken_policies:
            return ()
        lost = () if self._lost is None else (self._lost,)
        doubts = tuple(f"access record at seq {each.seq}: {each.problem}" for each in self._doubts.values())
        broken = tuple(f"policy {each.policy_id!r}: {each.problem}" for each in self._broken_policies)
        return lost + doubts + broken

    @property
    def policies(self) -> Mapping[str, StoredPolicy]:
        """Users' policies by name."""
        return dict(self._policies)

    def rules(self, subject: str | None = None) -> Iterator[tuple[str, Rule]]:
        """Grants and revocations in force, of one subject or of all."""
        if subject is None:
            for name, rules in self._rules.items():
                yield from ((name, rule) for rule in rules.rules())
        else:
            yield from ((subject, rule) for rule in self._rules.get(subject, _NOBODY).rules())

    def revoked_subjects(self) -> list[str]:
        """Subjects that were revoked as a whole."""
        return sorted(name for name, rules in self._rules.items() if rules.is_revoked)

    def revoked_tokens(self) -> list[str]:
        """Ids of tokens that were revoked."""
        return sorted(self._revoked_tokens)

    def check(self, change: Change) -> Change:
        """
        A change as it should be stored: call this before appending ``event_of`` it.

        Raises:
            InvalidChange: A part of it makes no sense, there is no room, or what it speaks of is not there.
            InvalidPolicy: The policy is not valid.
        """
        change = checked_change(change)
        if isinstance(change, Grant | Revoke) and change.resource.kind in UNUSED_KINDS:
            kind = change.resource.kind.value
            hint = "use a topic, a space or a partition"
            raise InvalidChange(
                "resource.kind", f"no endpoint decides by rights on {kind}s, so it would have no effect", hint
            )
        match change:
            case Grant(subject=subject, action=action, resource=resource):
                known = self._rules.get(subject, _NOBODY).knows(action, resource)
                if not known and self._rule_count >= self._settings.rules_count_max:
                    raise InvalidChange("subject", f"there are {self._rule_count} grants and revocations already")
            case PolicyPut(policy_id=policy_id, text=text):
                self._check_policy_id(policy_id)
                check_new_policy(text, bytes_max=self._settings.policy_bytes_max)
                self._check_policies_size(policy_id, text)
            case PolicyRemoved(policy_id=policy_id) if policy_id not in self._policies:
                raise InvalidChange("policy_id", f"there is no policy {policy_id!r}")
            case Dismissed(seq=seq) if seq not in self._doubts:
                raise InvalidChange("seq", f"no access record in doubt has seq {seq}")
        return change

    def _check_policy_id(self, policy_id: str) -> None:
        count_max = self._settings.policies_count_max
        if policy_id.startswith("tidings."):
            raise InvalidChange("policy_id", "names that begin with 'tidings.' are the built-in policies'")
        if policy_id not in self._policies and len(self._policies) >= count_max:
            raise InvalidChange("policy_id", f"there are {count_max} policies already")

    def _check_policies_size(self, policy_id: str, text: str) -> None:
        bytes_max = self._settings.policies_bytes_max
        others = (each.text for name, each in self._policies.items() if name != policy_id)
        size = sum(len(each.encode(errors="surrogatepass")) for each in (text, *others))
        if size > bytes_max:
            raise InvalidChange(
                "text", f"all policies together would be {size} bytes long; at most {bytes_max} are allowed"
            )


def _legible(record: Record, field: str) -> str | None:
    """A field of a payload that as a whole cannot be read."""
    if record.meta.sealed is not None:
        return None
    try:
        payload = msgspec.json.decode(record.payload_json)
    except UNREADABLE:
        return None
    value = payload.get(field) if isinstance(payload, dict) else None
    return normal(value) if isinstance(value, str) and value else None


async def load_book(log: ReadableLog, settings: AccessSettings | None = None) -> AccessBook:
    """
    The book as of the last access record in the log; closed if the log no longer has them all.

    Raises:
        EpochMismatch, CorruptLog, LogClosed: as for ``Log.read``.
    """
    book = AccessBook(settings)
    info = log.topic(ACCESS_TOPIC)
    if info is not None and info.first_offset > 0:
        book.close(f"the first {info.first_offset} access records were dropped from the log", info.last_seq)
    async for record in records(log, Query(topic=ACCESS_TOPIC)):
        book.apply(record)
    return book
