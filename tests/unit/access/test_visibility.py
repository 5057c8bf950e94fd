"""Capsules: who may read one event, as a value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.access.support import bearer, book_of, raw_record, record_of
from tidings.access.administration import Grant
from tidings.access.book import AccessBook
from tidings.access.context import ADMIN_ROLE
from tidings.access.errors import AccessUnavailable
from tidings.access.resources import Action, pattern_from_text
from tidings.access.visibility import (
    CAPSULE_BYTES_MAX,
    Audience,
    CapsuleDenied,
    CapsuleIssuer,
    ReadCapsule,
    ReadRequest,
    ReadScope,
)

SCOPE = ReadScope("orders", "main")


def request(**changes: Any) -> ReadRequest:
    values: dict[str, Any] = {
        "origin_identity_id": "alice",
        "app_id": "default",
        "domain_id": "orders",
        "subscription_type": "graph",
        "object_ids": ("order:1", "order:2"),
        "scope": SCOPE,
    }
    return ReadRequest(**{**values, **changes})


def issued(one: ReadRequest, book: AccessBook | None = None) -> ReadCapsule:
    (capsule,) = CapsuleIssuer(book or book_of()).issue([one])
    assert isinstance(capsule, ReadCapsule)
    return capsule


@pytest.mark.req("R171", "R72", "R216")
@pytest.mark.parametrize(
    "other",
    [
        {"origin_identity_id": "bob"},
        {"origin_identity_id": None},
        {"app_id": "shop"},
        {"domain_id": "other"},
        {"subscription_type": "app.shop"},
        {"object_ids": ("order:1",)},
        {"object_ids": ("order:1", "order:3")},
        {"scope": ReadScope("orders", "other")},
        {"scope": None, "audience": Audience.APP},
    ],
    ids=str,
)
def test_a_capsule_fits_the_request_it_was_made_for_and_no_other(other: dict[str, Any]) -> None:
    """It bears origin, scope and a digest of the objects: another identity's, app's or event's request is not its own, and has another id."""
    capsule = issued(request())

    assert capsule.fits(request())
    assert capsule.fits(request(object_ids=("order:2", "order:1")))
    assert not capsule.fits(request(**other))
    assert issued(request(**other)).capsule_id != capsule.capsule_id
    with pytest.raises(AttributeError):
        capsule.origin_identity_id = "bob"  # type: ignore[misc]


@pytest.mark.req("R176")
def test_capsules_are_small_and_what_would_not_be_is_denied() -> None:
    """The largest that is made stays below its bound; too many objects or partitions make none. It holds names, and no content."""
    largest = request(
        object_ids=tuple(f"order:{number}" * 20 for number in range(64)),
        scope=ReadScope("orders", "main", tuple(f"partition-{number:04}" for number in range(70))),
    )

    assert len(msgspec.json.encode(issued(largest))) <= CAPSULE_BYTES_MAX
    assert "order:1" not in msgspec.json.encode(issued(largest)).decode()
    for denied in (
        request(object_ids=tuple(f"order:{number}" for number in range(65))),
        request(scope=ReadScope("orders", "main", tuple(f"partition-{number:04}" for number in range(200)))),
        request(scope=None),
        request(audience=Audience.ADMINISTRATORS),
    ):
        assert isinstance(CapsuleIssuer(book_of()).issue([denied])[0], CapsuleDenied)


def test_a_capsule_knows_the_state_of_access_that_it_was_made_in() -> None:
    """Its epoch is the last access record that the book had."""
    book = book_of(Grant(subject="bob", action=Action.READ, resource=pattern_from_text("topic:orders")))

    assert issued(request(), book).acl_epoch == 1


@pytest.mark.req("R74", "R220")
@pytest.mark.parametrize(
    ("audience", "who"),
    [
        (Audience.READERS, {"reader", "admin"}),
        (Audience.ADMINISTRATORS, {"admin"}),
        (Audience.OBSERVERS, {"observer", "admin"}),
        (Audience.APP, {"reader", "admin", "observer", "nobody"}),
    ],
)
def test_the_access_book_decides_who_is_of_an_audience(audience: Audience, who: set[str]) -> None:
    """Readers by the scope, administrators and observers by the node, everybody of an app by nothing else."""
    book = book_of(Grant(subject="observer", action=Action.READ, resource=pattern_from_text("node")))
    people = {
        "reader": book.capsule(bearer("reader", topics=frozenset({"orders"}))),
        "admin": book.capsule(bearer("admin", roles=frozenset({ADMIN_ROLE}))),
        "observer": book.capsule(bearer("observer")),
        "nobody": book.capsule(bearer("nobody")),
    }
    capsule = issued(request(audience=audience, scope=SCOPE if audience is Audience.READERS else None), book)

    assert {name for name, rights in people.items() if capsule.admits(rights)} == who


@pytest.mark.req("R173", "R174")
def test_while_the_book_is_closed_no_capsule_is_made() -> None:
    """Neither a capsule nor a denial: who asks has to wait."""
    book = book_of()
    book.apply(raw_record(1, "access.policy_removed", {}, offset=0))
    issuer = CapsuleIssuer(book)

    with pytest.raises(AccessUnavailable):
        issuer.issue([request()])
    assert issuer.unavailable_for is not None
    book.apply(record_of(2, Grant(subject="x", action=Action.READ, resource=pattern_from_text("topic:a"))))
    assert issuer.unavailable_for is not None
