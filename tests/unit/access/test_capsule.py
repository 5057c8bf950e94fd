"""A capsule remembers what was decided, and never longer than it is true."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.access.support import bearer, book_of, record_of
from tidings.access.administration import Grant, PolicyPut, Revoke, SubjectRevoked, TokenRevocation
from tidings.access.book import AccessBook
from tidings.access.context import anonymous
from tidings.access.errors import Forbidden, TokenRevoked
from tidings.access.policies import PolicySet
from tidings.access.resources import Action, Resource, ResourceKind, partition, pattern_from_text, topic
from tidings.access.settings import AccessSettings

P1 = partition("p1")
GRANT = Grant(subject="alice", action=Action.SYNC, resource=pattern_from_text("partition:p*"))
REVOKE = Revoke(subject="alice", action=Action.SYNC, resource=pattern_from_text("partition:p1"))


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Resource]:
    """What the policy engine was asked about."""
    asked: list[Resource] = []
    decide = PolicySet.decide

    def counted(self: PolicySet, context: object, action: Action, resource: Resource, standpoint: object) -> object:
        asked.append(resource)
        return decide(self, context, action, resource, standpoint)  # type: ignore[arg-type]

    monkeypatch.setattr(PolicySet, "decide", counted)
    return asked


def test_a_decision_is_made_once(decided: list[Resource]) -> None:
    """The policy engine is asked once for each thing, allowed or not."""
    capsule = book_of(GRANT).capsule(bearer())

    for _ in range(3):
        assert capsule.allows(Action.SYNC, P1)
        assert not capsule.allows(Action.READ, P1)

    assert decided == [P1, P1]


def test_a_change_that_concerns_others_costs_no_decision(decided: list[Resource]) -> None:
    """Another subject's grant and another token's revocation leave what is remembered as it is."""
    book = book_of(GRANT)
    capsule = book.capsule(bearer())
    assert capsule.allows(Action.SYNC, P1)

    book.apply(record_of(2, Grant(subject="bob", action=Action.SYNC, resource=pattern_from_text("partition:p1"))))
    book.apply(record_of(3, TokenRevocation(token_id="another")))

    assert capsule.allows(Action.SYNC, P1)
    assert len(decided) == 1


@pytest.mark.parametrize(
    "change",
    [
        REVOKE,
        SubjectRevoked(subject="alice"),
        TokenRevocation(token_id="t1"),
        PolicyPut(policy_id="a", text='forbid (principal, action, resource == Partition::"p1");'),
    ],
    ids=lambda change: type(change).__name__,
)
def test_a_change_that_concerns_the_bearer_is_in_force_with_the_next_question(change: Revoke) -> None:
    """Of a capsule that was made, and had answered, long before."""
    book = book_of(GRANT)
    capsule = book.capsule(bearer(token_id="t1"))
    assert capsule.allows(Action.SYNC, P1)

    book.apply(record_of(2, change))

    assert not capsule.allows(Action.SYNC, P1)


def test_a_capsule_from_before_the_first_grant_learns_of_it() -> None:
    """Somebody who connected with nothing gets what is granted while they stay."""
    book = AccessBook()
    capsule = book.capsule(bearer())
    assert not capsule.allows(Action.SYNC, P1)

    book.apply(record_of(1, GRANT))

    assert capsule.allows(Action.SYNC, P1)


def test_what_is_remembered_is_bounded(decided: list[Resource]) -> None:
    """With more than the bound, everything is forgotten and decided anew; answers stay right."""
    capsule = book_of(GRANT, settings=AccessSettings(decisions_count_max=4)).capsule(bearer())
    names = [f"{letter}{n}" for n in range(10) for letter in "pq"]

    for name in names + names:
        assert capsule.allows(Action.SYNC, partition(name)) == name.startswith("p")

    assert len(decided) == 40


def test_a_name_in_another_form_gets_the_same_answer() -> None:
    """A resource made by hand with combining accents is the one that was granted."""
    grant = Grant(subject="alice", action=Action.SYNC, resource=pattern_from_text("partition:caf\u00e9"))
    capsule = book_of(grant).capsule(bearer())

    assert capsule.allows(Action.SYNC, Resource(ResourceKind.PARTITION, "cafe\u0301"))


def test_requiring_says_no_by_name() -> None:
    """The error knows who, what and to what; a revoked token has its own."""
    book = book_of(GRANT)
    capsule = book.capsule(bearer())
    capsule.require(Action.SYNC, P1)
    with pytest.raises(Forbidden) as caught:
        capsule.require(Action.PUBLISH, topic("news"))
    assert caught.value.describe() == "'alice' may not publish topic:news"

    book.apply(record_of(2, SubjectRevoked(subject="alice")))

    with pytest.raises(TokenRevoked):
        capsule.require(Action.SYNC, P1)


def test_an_explanation_names_what_counts() -> None:
    """Grant, revocation, claim and policy, each where it is the reason."""
    book = book_of(GRANT, REVOKE)
    capsule = book.capsule(bearer(partitions=frozenset({"p1"})))

    granted = capsule.explain(Action.SYNC, partition("p2"))
    revoked = capsule.explain(Action.SYNC, P1)
    claimed = capsule.explain(Action.SUBMIT, P1)
    nothing = capsule.explain(Action.READ, topic("a"))

    assert (granted.is_allowed, granted.granted_at, granted.reasons) == (True, 1, ("tidings.granted#1",))
    assert (revoked.is_allowed, revoked.revoked_at, revoked.reasons) == (False, 2, ("tidings.revoked#1",))
    assert (claimed.is_allowed, claimed.is_claimed, claimed.reasons) == (True, True, ("tidings.claimed#1",))
    assert (nothing.is_allowed, nothing.reasons, nothing.seq) == (False, (), 2)


def test_nobody_in_particular_may_do_nothing() -> None:
    """Without a token there is a context to ask with, and the answer is no."""
    assert not book_of(GRANT).capsule(anonymous()).allows(Action.SYNC, P1)


@pytest.mark.parametrize(
    ("claims", "action", "resource", "expected"),
    [
        ({"partitions": frozenset({"p"})}, Action.SYNC, partition("p"), True),
        ({"partitions": frozenset({"p"})}, Action.SUBMIT, partition("p"), True),
        ({"partitions": frozenset({"p"})}, Action.READ, partition("p"), True),
        ({"partitions": frozenset({"p"})}, Action.ADMINISTER, partition("p"), False),
        ({"partitions": frozenset({"p"})}, Action.SYNC, partition("p1"), False),
        ({"partitions": frozenset({"p"})}, Action.SYNC, topic("p"), False),
        ({"partition_prefixes": ("p",)}, Action.SYNC, partition("p1"), True),
        ({"partition_prefixes": ("p",)}, Action.SYNC, partition("q"), False),
        ({"partition_prefixes": ("",)}, Action.SYNC, partition("q"), False),
        ({"projects": frozenset({"x"})}, Action.SUBMIT, Resource(ResourceKind.PROJECT, "x"), True),
        ({"projects": frozenset({"x"})}, Action.SUBMIT, partition("x"), False),
        ({"topics": frozenset({"t"})}, Action.PUBLISH, topic("t"), True),
        ({"topics": frozenset({"t"})}, Action.SUBSCRIBE, topic("t"), True),
        ({"topics": frozenset({"t"})}, Action.ADMINISTER, topic("t"), False),
        ({"topic_prefixes": ("t.",)}, Action.READ, topic("t.x"), True),
        ({"topic_prefixes": ("a",)}, Action.PUBLISH, topic("access"), False),
        ({"spaces": frozenset({"s"})}, Action.READ, Resource(ResourceKind.SPACE, "s"), True),
        ({"space_prefixes": ("team:",)}, Action.READ, Resource(ResourceKind.SPACE, "team:a"), True),
        ({"spaces": frozenset({"s"})}, Action.READ, Resource(ResourceKind.SPACE, "s2"), False),
        ({"spaces": frozenset({"s"})}, Action.SUBMIT, Resource(ResourceKind.SPACE, "s"), False),
        ({"space_prefixes": ("team:",)}, Action.PUBLISH, Resource(ResourceKind.SPACE, "home"), False),
        ({"topics": frozenset({"t"})}, Action.PUBLISH, Resource(ResourceKind.SPACE, "any"), True),
        ({"topics": frozenset({"t"})}, Action.ADMINISTER, Resource(ResourceKind.SPACE, "any"), False),
        ({"topics": frozenset({"t"})}, Action.PUBLISH, Resource(ResourceKind.ACTOR, "bob"), False),
        ({"roles": frozenset({"admin"})}, Action.ADMINISTER, Resource(ResourceKind.NODE, "local"), True),
        ({"roles": frozenset({"root"})}, Action.ADMINISTER, Resource(ResourceKind.NODE, "local"), False),
        ({"partitions": frozenset({"local"})}, Action.READ, Resource(ResourceKind.NODE, "local"), False),
    ],
)
def test_what_claims_give(claims: dict[str, Any], action: Action, resource: Resource, expected: bool) -> None:
    """Each claim gives its own actions on its own kind of resource, and nothing else."""
    assert AccessBook().capsule(bearer(**claims)).allows(action, resource) is expected


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"topics": frozenset({"t"})}, [True, True]),
        ({"topics": frozenset({"t"}), "spaces": frozenset({"home"})}, [True, False]),
        ({"spaces": frozenset({"home"})}, [False, False]),
        ({}, [False, False]),
        ({"roles": frozenset({"admin"}), "spaces": frozenset({"home"})}, [True, True]),
    ],
)
def test_an_event_takes_the_right_on_its_topic_and_on_its_space(claims: dict[str, Any], expected: list[bool]) -> None:
    """A token that names spaces is bound to them, one that names none is not; a right on spaces alone opens nothing."""
    capsule = AccessBook().capsule(bearer(**claims))

    assert [capsule.allows_event(Action.READ, "t", name) for name in ("home", "work")] == expected


def test_a_space_can_be_taken_and_given() -> None:
    """Revoking a space binds whoever is bound to none, granting one widens a token that names others; the error names it."""
    all_spaces, home = pattern_from_text("space:*"), pattern_from_text("space:home")
    book = book_of(
        Revoke(subject="alice", action=Action.READ, resource=all_spaces),
        Grant(subject="alice", action=Action.READ, resource=home),
        Grant(subject="bob", action=Action.READ, resource=home),
    )
    capsule = book.capsule(bearer(topics=frozenset({"t"})))
    bound = book.capsule(bearer("bob", topics=frozenset({"t"}), spaces=frozenset({"attic"})))

    assert [bound.allows_event(Action.READ, "t", name) for name in ("attic", "home", "work")] == [True, True, False]
    assert [capsule.allows_event(Action.READ, "t", name) for name in ("home", "work")] == [True, False]
    with pytest.raises(Forbidden) as refused:
        capsule.require_event(Action.READ, "t", "work")
    assert str(refused.value.resource) == "space:work"
