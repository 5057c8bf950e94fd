"""A capsule answers as a reader would who looks through all access records again at every question."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.access.support import raw_record, record_of
from tidings.access.administration import (
    Change,
    Grant,
    PolicyPut,
    PolicyRemoved,
    Revoke,
    SubjectRestored,
    SubjectRevoked,
    TokenRevocation,
    change_from_request,
)
from tidings.access.book import AccessBook
from tidings.access.context import OperationContext, TokenClaims
from tidings.access.errors import InvalidChange
from tidings.access.resources import Action, Resource, ResourceKind, ResourcePattern
from tidings.access.settings import AccessSettings

SUBJECTS: Final = ("alice", "bob")
ACTIONS: Final = (Action.SYNC, Action.READ)
NAMES: Final = ("a", "ab", "b")
KINDS: Final = (ResourceKind.PARTITION, ResourceKind.TOPIC)
RESOURCES: Final = tuple(Resource(kind, name) for kind in KINDS for name in NAMES)
BEARERS: Final = (
    OperationContext("alice", None, None, "t1", TokenClaims(partitions=frozenset({"ab"}), topic_prefixes=("a",))),
    OperationContext("alice", None, None, "t2", TokenClaims()),
    OperationContext("bob", None, None, None, TokenClaims(roles=frozenset({"admin"}))),
    OperationContext("bob", None, None, "t1", TokenClaims(partition_prefixes=("ab",))),
)

patterns = st.builds(
    ResourcePattern, st.sampled_from(KINDS), st.sampled_from(NAMES), st.sampled_from(["exact", "prefix"])
)
rights = {"subject": st.sampled_from(SUBJECTS), "action": st.sampled_from(ACTIONS), "resource": patterns}


@st.composite
def policies(draw: st.DrawFn) -> PolicyPut:
    """A permit or forbid of one action on one resource, for somebody or for all."""
    effect = draw(st.sampled_from(["permit", "forbid"]))
    subject = draw(st.sampled_from([*SUBJECTS, None]))
    action = draw(st.sampled_from(ACTIONS))
    kind, name = draw(st.sampled_from(RESOURCES))
    who = "principal" if subject is None else f'principal == Subject::"{subject}"'
    text = f'{effect} ({who}, action == Action::"{action}", resource == {kind.capitalize()}::"{name}");'
    return PolicyPut(policy_id=draw(st.sampled_from(["p", "q", "r"])), text=text)


changes = st.one_of(
    # Twice: it is the order of grants and revocations that a capsule can get wrong.
    *(st.builds(kind, **rights) for kind in (Grant, Revoke, Grant, Revoke)),
    st.builds(TokenRevocation, token_id=st.sampled_from(["t1", "t3"])),
    st.builds(SubjectRevoked, subject=st.sampled_from(SUBJECTS)),
    st.builds(SubjectRestored, subject=st.sampled_from(SUBJECTS)),
    st.builds(PolicyRemoved, policy_id=st.sampled_from(["p", "q", "r"])),
    policies(),
)


def is_allowed(history: list[Change], context: OperationContext, action: Action, resource: Resource) -> bool:
    """The naive model: all that was ever said, looked through from the end."""
    last_word = next(
        (
            change
            for change in reversed(history)
            if isinstance(change, SubjectRevoked | SubjectRestored) and change.subject == context.subject
        ),
        None,
    )
    if isinstance(last_word, SubjectRevoked):
        return False
    if any(isinstance(change, TokenRevocation) and change.token_id == context.token_id for change in history):
        return False
    ruling = next(
        (
            change
            for change in reversed(history)
            if isinstance(change, Grant | Revoke)
            and (change.subject, change.action) == (context.subject, action)
            and change.resource.covers(resource)
        ),
        None,
    )
    in_force: dict[str, str] = {}
    for change in history:
        if isinstance(change, PolicyPut):
            in_force[change.policy_id] = change.text
        elif isinstance(change, PolicyRemoved):
            in_force.pop(change.policy_id, None)
    target = f'{resource.kind.capitalize()}::"{resource.name}"'
    said = {
        text.split(" ")[0]
        for text in in_force.values()
        if f'Action::"{action}"' in text
        and target in text
        and ("Subject" not in text or f'"{context.subject}"' in text)
    }
    if "forbid" in said or isinstance(ruling, Revoke):
        return False
    return (
        "permit" in said
        or isinstance(ruling, Grant)
        or "admin" in context.claims.roles
        or context.claims.cover(action, resource)
    )


@pytest.mark.slow
@settings(max_examples=2 * settings().max_examples)
@given(st.lists(changes, max_size=25), st.integers(1, 20))
def test_a_capsule_equals_the_model_at_every_seq(history: list[Change], decisions_count_max: int) -> None:
    """Capsules held from the beginning, and capsules made anew, agree with the model after each record."""
    book = AccessBook(AccessSettings(decisions_count_max=decisions_count_max))
    held = [book.capsule(context) for context in BEARERS]

    for seq in range(len(history) + 1):
        if seq:
            book.apply(record_of(seq, history[seq - 1]))
        # Not every question after every record, or what is remembered would never be older than one record.
        asked = RESOURCES[seq % 2 :: 2]
        for capsule in held:
            for action in ACTIONS:
                for resource in asked:
                    expected = is_allowed(history[:seq], capsule.context, action, resource)
                    assert capsule.allows(action, resource) is expected
    for context in BEARERS:
        fresh = book.capsule(context)
        assert [fresh.allows(action, each) for action in ACTIONS for each in RESOURCES] == [
            is_allowed(history, context, action, each) for action in ACTIONS for each in RESOURCES
        ]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text(max_size=5)
    | st.sampled_from(["alice", "sync", "partition"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
payloads = st.one_of(
    json_values,
    st.dictionaries(
        st.sampled_from(["subject", "action", "resource", "policy_id", "text", "token_id", "seq", "type", "reason"]),
        json_values,
        max_size=5,
    ),
)
kinds = st.sampled_from(
    [
        *("access.grant", "access.revoke", "access.policy_put", "access.policy_removed", "access.token_revoked"),
        *("access.subject_revoked", "access.subject_restored", "access.dismissed", "access.later", "NOTED"),
    ]
)


@given(st.lists(st.tuples(kinds, payloads), max_size=15))
def test_records_that_make_no_sense_never_widen_access(written: list[tuple[str, Any]]) -> None:
    """Whatever stands in the topic, the book neither raises nor allows what was not allowed before, unless a well-formed grant
    or policy was among it."""
    book = AccessBook()
    book.apply(record_of(1, Grant(subject="alice", action=Action.SYNC, resource=ResourcePattern(KINDS[0], "a"))))
    questions = [(context, action, each) for context in BEARERS for action in ACTIONS for each in RESOURCES]
    before = {question for question in questions if book.capsule(question[0]).allows(*question[1:])}

    for seq, (kind, payload) in enumerate(written, 2):
        book.apply(raw_record(seq, kind, payload))
        if _is_readable(kind, payload):
            return

    assert {question for question in questions if book.capsule(question[0]).allows(*question[1:])} <= before


def _is_readable(kind: str, payload: Any) -> bool:
    if kind not in ("access.grant", "access.policy_put", "access.subject_restored") or not isinstance(payload, dict):
        return False
    collection: Any = "policies" if kind == "access.policy_put" else "grants"
    try:
        change_from_request(collection, msgspec.json.encode({**payload, "type": kind}))
    except InvalidChange:
        return False
    return True
