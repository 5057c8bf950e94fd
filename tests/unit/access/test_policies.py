"""Policies decide as they are written; a forbid wins, and what cannot be evaluated denies."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.access.support import bearer
from tidings.access.context import OperationContext, TokenClaims
from tidings.access.errors import InvalidPolicy
from tidings.access.policies import PolicySet, RightsContext, check_new_policy, check_policy
from tidings.access.resources import Action, Resource, ResourceKind, node, partition, topic

NOTHING = RightsContext(claimed=False, granted=False, revoked=False)
CLAIMED = RightsContext(claimed=True, granted=False, revoked=False)
GRANTED = RightsContext(claimed=False, granted=True, revoked=False)
REVOKED = RightsContext(claimed=True, granted=False, revoked=True)
ADMIN = bearer("root", roles=frozenset({"admin"}))
EDITOR = bearer("eve", roles=frozenset({"editor"}))
ALICE = bearer()
FORBID_EVEN = (
    "forbid (principal, action, resource) when {" + " || ".join(f'resource.name like "*{n}"' for n in "02468") + "};"
)


def policy_set(*texts: str, is_open: bool = False) -> PolicySet:
    checked = {f"own{number}": check_policy(text, bytes_max=16_384) for number, text in enumerate(texts)}
    return PolicySet(checked, is_open=is_open)


@pytest.mark.parametrize(
    ("who", "action", "resource", "standpoint", "expected"),
    [
        (ALICE, Action.READ, topic("a"), NOTHING, False),
        (ALICE, Action.READ, topic("a"), CLAIMED, True),
        (ALICE, Action.READ, topic("a"), GRANTED, True),
        (ALICE, Action.READ, topic("a"), REVOKED, False),
        (ALICE, Action.ADMINISTER, node(), NOTHING, False),
        (ALICE, Action.ADMINISTER, node(), GRANTED, True),
        (EDITOR, Action.ADMINISTER, node(), NOTHING, False),
        (ADMIN, Action.ADMINISTER, node(), NOTHING, True),
        (ADMIN, Action.SYNC, partition("p"), NOTHING, True),
        (ADMIN, Action.SYNC, partition("p"), REVOKED, False),
        (ALICE, Action.PUBLISH, topic("access"), CLAIMED, False),
        (ALICE, Action.PUBLISH, topic("access"), GRANTED, False),
        (ALICE, Action.PUBLISH, topic("audit"), GRANTED, False),
        (ALICE, Action.READ, topic("access"), GRANTED, True),
        (ADMIN, Action.PUBLISH, topic("access"), NOTHING, True),
        (bearer("x", roles=frozenset({"Admin"})), Action.READ, topic("a"), NOTHING, False),
        (OperationContext('a" || true'), Action.READ, topic("a"), NOTHING, False),
    ],
)
def test_the_built_in_policies(
    who: OperationContext, action: Action, resource: Resource, standpoint: RightsContext, expected: bool
) -> None:
    """Deny by default, permit what claims, grants and the administrators' role give, forbid what was revoked or is reserved."""
    assert policy_set().decide(who, action, resource, standpoint).is_allowed is expected


@pytest.mark.parametrize("is_open", [False, True])
def test_what_was_decided_before_changes_no_decision(is_open: bool) -> None:
    """The built-in policies, asked for everything there is one after another, answer each as those that were never asked before."""
    asked_before = policy_set(is_open=is_open)
    resources = [topic("a"), topic("access"), topic("audit"), Resource(ResourceKind.SPACE, "access"), node()]
    bearers = [ALICE, ADMIN, EDITOR, bearer("\udcff"), bearer("bob", roles=frozenset({"admin", "\udcff"}))]
    for who in bearers:
        for action in (Action.READ, Action.PUBLISH, Action.SUBMIT, Action.ADMINISTER):
            for resource in (*resources, topic("\udcff")):
                for standpoint in (NOTHING, CLAIMED, GRANTED, REVOKED):
                    found = asked_before.decide(who, action, resource, standpoint)
                    assert found == policy_set(is_open=is_open).decide(who, action, resource, standpoint)


@pytest.mark.parametrize(
    ("text", "allowed", "denied"),
    [
        (
            'permit (principal in Role::"editor", action == Action::"publish", resource == Topic::"news");',
            (EDITOR, Action.PUBLISH, topic("news")),
            (ALICE, Action.PUBLISH, topic("news")),
        ),
        (
            'permit (principal == Subject::"alice", action, resource is Topic) when { resource.name like "a.*" };',
            (ALICE, Action.READ, topic("a.b")),
            (ALICE, Action.READ, topic("ab")),
        ),
        (
            'permit (principal, action == Action::"sync", resource is Partition) when { principal.id == resource.name };',
            (ALICE, Action.SYNC, partition("alice")),
            (ALICE, Action.SYNC, partition("bob")),
        ),
        (
            'permit (principal, action, resource) when { principal has clientId && principal.clientId == "phone" };',
            (OperationContext("x", "phone"), Action.READ, topic("a")),
            (ALICE, Action.READ, topic("a")),
        ),
    ],
)
def test_own_policies_permit(
    text: str,
    allowed: tuple[OperationContext, Action, Resource],
    denied: tuple[OperationContext, Action, Resource],
) -> None:
    """A policy gives what it says, by role, subject, name and client, and nothing beside it."""
    policies = policy_set(text)

    assert policies.decide(*allowed, NOTHING).is_allowed
    assert not policies.decide(*denied, NOTHING).is_allowed


def test_a_forbid_wins() -> None:
    """Whatever permits it (claims, grants, the administrators' role, another policy), one forbid denies, and is named."""
    policies = policy_set(
        "permit (principal, action, resource);", 'forbid (principal, action, resource == Topic::"secret");'
    )

    for who, standpoint in ((ALICE, CLAIMED), (ALICE, GRANTED), (ADMIN, NOTHING)):
        decision = policies.decide(who, Action.READ, topic("secret"), standpoint)
        assert (decision.is_allowed, decision.reasons) == (False, ("own1#1",))
        assert policies.decide(who, Action.READ, topic("other"), standpoint).is_allowed


def test_the_policies_that_permit_are_named() -> None:
    """Each statement of a text has its place in the reasons."""
    policies = policy_set(
        'permit (principal, action == Action::"sync", resource);\npermit (principal, action == Action::"read", resource);'
    )

    assert policies.decide(ALICE, Action.READ, topic("a"), CLAIMED).reasons == ("own0#2", "tidings.claimed#1")


def test_an_evaluation_error_denies() -> None:
    """Cedar passes over a policy that it cannot evaluate; here the answer is no, to everybody."""
    text = 'forbid (principal, action, resource == Topic::"a") when { 9223372036854775807 + 1 == 0 };'
    policies = policy_set(text)

    decision = policies.decide(ADMIN, Action.READ, topic("a"), GRANTED)

    assert not decision.is_allowed
    assert "overflow" in decision.errors[0]
    assert policies.decide(ADMIN, Action.READ, topic("b"), GRANTED).is_allowed


def test_open_access_still_forbids() -> None:
    """Open lets everybody do everything but what is forbidden, revoked or reserved."""
    policies = policy_set('forbid (principal, action, resource == Topic::"secret");', is_open=True)

    assert policies.decide(ALICE, Action.READ, topic("a"), NOTHING).is_allowed
    assert not policies.decide(ALICE, Action.READ, topic("secret"), NOTHING).is_allowed
    assert not policies.decide(ALICE, Action.READ, topic("a"), REVOKED).is_allowed
    assert not policies.decide(ALICE, Action.PUBLISH, topic("access"), NOTHING).is_allowed


@pytest.mark.parametrize("name", ["", 'a"b', "a\\b", "a\nb", "\u00e9", "*", "Topic::x", "x" * 10_000])
def test_names_are_data(name: str) -> None:
    """No name of a subject, role or resource is ever read as Cedar."""
    policies = policy_set('permit (principal == Subject::"alice", action, resource);')
    context = bearer(name, roles=frozenset({name}))

    assert policies.decide(context, Action.READ, Resource(ResourceKind.TOPIC, name), NOTHING).errors == ()
    assert not policies.decide(context, Action.READ, Resource(ResourceKind.TOPIC, name), NOTHING).is_allowed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no statement"),
        ("// only a comment", "no statement"),
        ("permit (principal", "parse error"),
        ("permit (principal, action, resource)", "parse error"),
        ('permit (principal, action == Action::"pubish", resource);', "unrecognized action"),
        ('permit (principal == User::"a", action, resource);', "unrecognized entity type"),
        ("permit (principal, action, resource) when { resource.nam == 1 };", "`nam`"),
        ('permit (principal, action, resource) when { principal.clientId == "x" };', "optional attribute"),
        ("permit (principal, action, resource) when { context.now == 1 };", "`now`"),
        ("permit (principal, action, resource) when { 1 };", "unexpected type"),
        ("permit (principal == ?principal, action, resource);", "template"),
        ("permit (principal, action, resource); //" + "x" * 16_384, "bytes long"),
        ('permit (principal, action, resource) when { "\ud800" == "" };', "surrogate"),
        ('forbid (principal == Subject::"e\u0301ve", action, resource);', r"'e\u0301ve' is not in unicode's form nfc"),
        ('forbid (principal == Subject::"\\u{65}\\u{301}ve", action, resource);', r"write '\xe9ve'"),
        ('forbid (principal, action, resource) when { resource.name like "e\u0301*" };', "nfc"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    """Syntax, types, names and size are checked before anything is stored, and the answer says what is wrong."""
    with pytest.raises(InvalidPolicy) as caught:
        check_policy(text, bytes_max=16_384)
    assert problem.lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    "condition",
    [
        "(" * 33 + "true" + ")" * 33,
        '(")" == "" || ' * 40 + "true" + ")" * 40,
        "(// )\n" * 40 + "true" + ")" * 40,
        "[" * 100 + "]" * 100 + " == []",
        "if true then true else " * 1100 + "true",
        "principal" + ".id" * 1100 + " == 1",
        "principal" + '["id"]' * 1100 + " == 1",
    ],
)
def test_a_policy_that_nests_deep_never_reaches_the_parser(condition: str) -> None:
    """Depth is refused by us, also where strings and comments hide it: the parser would take the process with it."""
    with pytest.raises(InvalidPolicy, match=r"nests deeper|more than 1000 operators"):
        check_policy(f"permit (principal, action, resource) when {{ {condition} }};", bytes_max=65_536)


def test_the_bounds_on_depth_are_safe() -> None:
    """The deepest and longest texts that are let through leave the process alive."""
    script = """
from tidings.access.policies import PolicySet, RightsContext, check_policy
from tidings.access.context import OperationContext
from tidings.access.errors import InvalidPolicy
from tidings.access.resources import Action, topic
for text in (
    "(" * 30 + "true" + ")" * 30, "if true then true else " * 990 + "true", "true && " * 990 + "true",
    "!" * 60000, "-" * 60000 + "1 == 1", "-" * 990 + "1 == 1", "principal" + ".id" * 990 + " == 1",
    "1" + " + 1" * 990 + " == 1", "principal" + '["id"]' * 990 + " == 1", "[1].contains(1) && " * 300 + "true",
    "true } when { " * 990 + "true", "[" + "1, " * 20000 + "1].contains(1)", "A::" * 990 + 'B::"x" == principal',
):
    try:
        policy = check_policy("permit (principal, action, resource) when { " + text + " };", bytes_max=65_536)
        found = PolicySet({"a": policy})
        found.decide(OperationContext("a"), Action.READ, topic("a"), RightsContext(False, False, False))
    except InvalidPolicy:
        pass
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (0, "alive\n")


_TEXTS = [
    'permit (principal, action, resource) when { resource.name like "a*b" };',
    'permit (principal, action, resource is Group) when { resource.topic like "a*" && resource.group == "b" };',
    'forbid (principal, action == Action::"read", resource) when { resource.name == principal.id };',
    'permit (principal in Role::"b", action, resource in Topic::"a");',
    'permit (principal, action, resource) when { principal has clientId && principal.clientId like "*b*" };',
    'permit (principal, action, resource) when { ["a/b", "\\u{61}b"].contains(resource.name) };',
    'forbid (principal, action, resource) when { resource.name like "*\\\\**" }; // "a" like',
    "permit (principal, action, resource is Group) when { resource.topic == resource.group };",
    '@note("ab") permit (principal == Subject::"a", action, resource) when { resource.name like "*" };',
    'permit (principal, action, resource) when { {a: resource.name} == {a: "b"} };',
]
_NAMES = st.text(alphabet="ab*/", max_size=4)


@given(
    st.sets(st.sampled_from(_TEXTS), max_size=4),
    st.lists(
        st.tuples(_NAMES, st.none() | _NAMES, st.frozensets(_NAMES, max_size=2), st.sampled_from(ResourceKind), _NAMES),
        max_size=12,
    ),
)
def test_one_decision_for_names_that_policies_cannot_tell_apart(
    texts: set[str],
    requests: list[tuple[str, str | None, frozenset[str], ResourceKind, str]],
) -> None:
    """Whatever was decided before, each request gets the decision that a policy set makes that was never asked."""
    asked_before = policy_set(*sorted(texts))
    for subject, client_id, roles, kind, name in requests:
        who = OperationContext(subject, client_id, claims=TokenClaims(roles=roles))
        asked = (who, Action.READ, Resource(kind, name), NOTHING)
        assert asked_before.decide(*asked) == policy_set(*sorted(texts)).decide(*asked)


@pytest.mark.parametrize("letter", ["p", "é"])
def test_the_policy_engine_is_called_once_for_names_alike(letter: str) -> None:
    """10,000 names of which a policy mentions one and five patterns match half: seven calls, whatever the names are made of."""
    policies = policy_set(f'forbid (principal, action, resource == Partition::"{letter}7");', FORBID_EVEN)
    for number in range(10_000):
        decision = policies.decide(ALICE, Action.READ, partition(f"{letter}{number}"), CLAIMED)
        assert decision.is_allowed == (number != 7 and number % 2 == 1)
    assert policies.evaluation_count == 7


@pytest.mark.parametrize(("count", "calls"), [(1, 1), (10, 10)])
def test_policies_that_do_more_than_compare_are_asked_for_each_name(count: int, calls: int) -> None:
    """Where it is not known what a policy can tell apart, no two names are taken to be alike."""
    policies = policy_set('permit (principal, action, resource) when { ip("127.0.0.1").isLoopback() };')
    for number in range(count):
        assert policies.decide(ALICE, Action.READ, partition(f"p{number}"), NOTHING).is_allowed
    assert policies.evaluation_count == calls


@pytest.mark.parametrize(
    "text",
    [
        'forbid (principal == Subject::"\u00e9ve", action, resource);',
        'forbid (principal == Subject::"\\u{e9}ve", action, resource);',
        '@note("e\u0301") forbid (principal, action, resource); // e\u0301',
    ],
)
def test_only_strings_that_names_are_compared_with_must_be_in_nfc(text: str) -> None:
    """Composed letters, escapes, and anything in a comment or an annotation are taken."""
    assert check_policy(text, bytes_max=16_384).statement_count == 1


@pytest.mark.parametrize(
    "text",
    [
        'forbid (principal, action, resource == Object::"order:vault");',
        "forbid (principal, action, resource is Domain);",
        "forbid (principal, action, resource) when { resource is Object };",
    ],
)
def test_a_new_policy_on_resources_that_no_endpoint_decides_by_is_refused(text: str) -> None:
    """It would be stored and forbid nothing; one that is stored already is still read."""
    assert check_policy(text, bytes_max=16_384).statement_count == 1
    with pytest.raises(InvalidPolicy, match="no endpoint decides"):
        check_new_policy(text, bytes_max=16_384)
