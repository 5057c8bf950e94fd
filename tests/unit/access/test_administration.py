"""A change of access says the same on every way in, or is refused there."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from tests.access_events import grant_event, policy_event, revoke_event
from tests.unit.access.support import record_of
from tidings.access.administration import (
    Change,
    Collection,
    Dismissed,
    Grant,
    PolicyPut,
    PolicyRemoved,
    Revoke,
    SubjectRestored,
    SubjectRevoked,
    TokenRevocation,
    change_from_record,
    change_from_request,
    event_of,
    request_of,
)
from tidings.access.errors import InvalidChange
from tidings.access.resources import (
    Action,
    Resource,
    ResourceKind,
    ResourcePattern,
    node,
    partition,
    pattern_from_text,
    project,
    resource_from_text,
    space,
    topic,
)

HOME = ResourcePattern(ResourceKind.PARTITION, "home-", "prefix")
CHANGES: list[Change] = [
    Grant(subject="alice", action=Action.SYNC, resource=HOME),
    Grant(
        subject="alice",
        action=Action.ADMINISTER,
        resource=ResourcePattern(ResourceKind.NODE, "local"),
        reason="on call",
    ),
    Revoke(subject="alice", action=Action.SYNC, resource=ResourcePattern(ResourceKind.TOPIC, "orders")),
    PolicyPut(policy_id="a", text="permit (principal, action, resource);"),
    PolicyRemoved(policy_id="a"),
    TokenRevocation(token_id="t1"),
    SubjectRevoked(subject="alice", reason="left"),
    SubjectRestored(subject="alice"),
    Dismissed(seq=7),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_a_change_survives_both_ways(change: Change) -> None:
    """Through the log and through a request the same change arrives."""
    method, path, body = request_of(change)
    collection: Collection = next(each for each in get_args(Collection) if path == f"/v1/access/{each}")

    assert method == "POST"
    assert change_from_request(collection, body) == change
    assert change_from_record(record_of(1, change)) == change


def test_events_are_access_records() -> None:
    """Topic, type, space and actor stand in the envelope."""
    event = grant_event("alice", Action.SYNC, partition("p1"), actor="cli:uid-0", reason="asked")

    assert (event.meta.topic, event.meta.type, event.meta.space_id, event.meta.actor) == (
        "access",
        "access.grant",
        "system",
        "cli:uid-0",
    )
    assert event.payload == {
        "type": "access.grant",
        "subject": "alice",
        "action": "sync",
        "resource": {"kind": "partition", "name": "p1"},
        "reason": "asked",
    }
    assert revoke_event("alice", Action.SYNC, HOME, actor="x").payload["resource"]["match"] == "prefix"
    assert policy_event("a", "text", actor="x").meta.type == "access.policy_put"
    assert event_of(Dismissed(seq=1), actor="x", event_id="mine").meta.event_id == "mine"


def test_a_request_may_be_short() -> None:
    """The type may be left out where it is obvious, and a resource may be text."""
    body = b'{"subject": "alice", "action": "sync", "resource": "partition:home-*"}'

    assert change_from_request("grants", body) == CHANGES[0]
    assert isinstance(change_from_request("revocations", body), Revoke)
    assert isinstance(change_from_request("policies", b'{"policy_id": "a", "text": ""}'), PolicyPut)


GOOD: dict[str, Any] = {"subject": "alice", "action": "sync", "resource": "partition:p"}


@pytest.mark.parametrize(
    ("collection", "body", "field"),
    [
        ("grants", b"", "body"),
        ("grants", b"{", "body"),
        ("grants", b"[]", "body"),
        ("grants", b"\xff", "body"),
        ("grants", b"{}", "body"),
        ("grants", {**GOOD, "extra": 1}, "body"),
        ("grants", {**GOOD, "subject": 1}, "subject"),
        ("grants", {**GOOD, "subject": ""}, "subject"),
        ("grants", {**GOOD, "subject": "a\u0007"}, "subject"),
        ("grants", {**GOOD, "subject": "\u00e9" * 200}, "subject"),
        ("grants", {**GOOD, "action": "fly"}, "action"),
        ("grants", {**GOOD, "resource": "partition:"}, "resource"),
        ("grants", {**GOOD, "resource": "partition"}, "resource"),
        ("grants", {**GOOD, "resource": "planet:x"}, "resource"),
        ("grants", {**GOOD, "resource": "node:other"}, "resource"),
        ("grants", {**GOOD, "resource": "node:*"}, "resource"),
        ("grants", {**GOOD, "resource": "topic:a/b"}, "resource.name"),
        ("grants", {**GOOD, "resource": {"kind": "topic", "name": "a", "deep": 1}}, "resource"),
        ("grants", {**GOOD, "reason": "x" * 1001}, "reason"),
        ("grants", {**GOOD, "type": "access.revoke"}, "type"),
        ("grants", {**GOOD, "type": "access.unheard_of"}, "type"),
        ("grants", {"type": "access.dismissed", "seq": 0}, "seq"),
        ("revocations", {"type": "access.grant", **GOOD}, "type"),
        ("policies", {"policy_id": "a"}, "body"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(collection: Collection, body: Any, field: str) -> None:
    """The answer names the part at fault."""
    with pytest.raises(InvalidChange) as caught:
        change_from_request(collection, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "resource"),
    [
        ("topic:orders", topic("orders")),
        ("partition:a:b", partition("a:b")),
        ("project:x", project("x")),
        ("space:shared:home", space("shared:home")),
        ("node", node()),
        ("node:local", node()),
        ("object:o1", Resource(ResourceKind.OBJECT, "o1")),
        ("partition:cafe\u0301", partition("caf\u00e9")),
    ],
)
def test_resources_have_a_text(text: str, resource: Resource) -> None:
    """What people type and what errors show."""
    assert resource_from_text(text) == resource
    assert resource_from_text(str(resource)) == resource


@pytest.mark.parametrize("text", ["partition:home-*", "topic:*", "topic:orders", "node"])
def test_patterns_have_a_text(text: str) -> None:
    """A star at the end means all whose names begin like that."""
    assert str(pattern_from_text(text)) == text
    assert pattern_from_text(text).match == ("prefix" if text.endswith("*") else "exact")


def test_a_pattern_covers_its_own() -> None:
    """Kind and name, or the beginning of the name."""
    assert [HOME.covers(each) for each in (partition("home-1"), partition("hom"), topic("home-1"))] == [
        True,
        False,
        False,
    ]
    assert not ResourcePattern(ResourceKind.TOPIC, "a").covers(topic("ab"))
