"""Limits of access: within them everything holds; beyond them the refusal is named and nothing is loosened."""

from __future__ import annotations

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.unit.access.support import bearer, book_of, record_of
from tests.unit.access.test_endpoint import Echoes, Key
from tests.unit.access.test_guard import World
from tidings.access.administration import Grant, Revoke
from tidings.access.endpoint import ConnectionLimits
from tidings.access.errors import InvalidChange, InvalidPolicy
from tidings.access.policies import _CHAIN_MAX, _DEPTH_MAX, check_policy
from tidings.access.resources import Action, partition, pattern_from_text
from tidings.access.settings import AccessSettings
from tidings.access.visibility import (
    CAPSULE_BYTES_MAX,
    CapsuleDenied,
    CapsuleIssuer,
    ReadCapsule,
    ReadRequest,
    ReadScope,
)
from tidings.testing import VirtualClock


@pytest.mark.bound("access.endpoint.ConnectionLimits.held_messages_max")
@crossed
async def test_a_peer_that_sends_on_while_nothing_is_read_is_closed(beyond: Beyond) -> None:
    """As many messages as allowed are held and answered in order; one more closes the connection, and no other."""
    clock = VirtualClock()
    endpoint = Echoes(clock)
    endpoint.limits = ConnectionLimits(held_messages_max=5)
    endpoint.may_work.clear()
    connection, wire = endpoint.opened(Key())
    other, other_wire = endpoint.opened(Key())
    at_limit, more = ([b"slow %d" % number for number in range(3 + held)] for held in (5, beyond(5)))
    for message in at_limit:
        connection.received(message)
    for message in more:
        other.received(message)
    await clock.advance(0)
    assert other_wire.closed == (1008, "too many messages at once")
    endpoint.may_work.set()
    await clock.advance(0)
    assert (wire.sent, wire.closed, other_wire.sent) == (at_limit, None, [])
    await clock.run_until(endpoint.stop(0.0))


@pytest.mark.bound("access.guard.GuardSettings.denial_s_max")
@crossed
async def test_a_repeated_denial_has_a_longest_time(beyond: Beyond) -> None:
    """Denials double until they would be longer than allowed; from then on they stay as long as that."""
    world = World(denial_s=2.0, denial_s_max=10.0, limits_max=1)
    times: list[int] = []
    while not times or 2 ** len(times) < beyond(10):
        world.abuse.note("limit", identity="alice")
        times.append(world.denied("alice"))
    world.abuse.note("limit", identity="alice")
    assert times[:3] == [2, 4, 8]
    assert {world.denied("alice"), *times[3:]} == {10}
    await world.clock.advance(10.0)
    assert world.denied("alice") == 0


@pytest.mark.bound("access.guard.GuardSettings.limits_max")
@crossed
async def test_an_address_that_goes_over_limits_is_denied_to_callers_without_a_token(beyond: Beyond) -> None:
    """One fewer within the window denies nobody; beyond that callers without a token are denied, and good tokens are let in."""
    world = World(limits_max=4, window_s=10.0)
    for _ in range(3):
        world.abuse.note("limit", identity=None, address="192.0.2.1")
    await world.clock.advance(11.0)
    for _ in range(3):
        world.abuse.note("limit", identity=None, address="192.0.2.1")
    assert world.denied(address="192.0.2.1") == 0
    for _ in range(3, beyond(4)):
        world.abuse.note("limit", identity=None, address="192.0.2.1")
    assert world.denied(address="192.0.2.1") > 0
    assert world.denied(address="192.0.2.2") == 0
    assert world.guard.admit(address="192.0.2.1", has_token=lambda: True).is_allowed
    # A member's sockets are denied by its name, wherever it comes from; its requests are not.
    for _ in range(beyond(4)):
        world.abuse.note("limit", identity="alice", address="192.0.2.9")
    assert not world.guard.admit(identity="alice", entrance="connection").is_allowed
    assert world.guard.admit(identity="alice", entrance="request").is_allowed
    assert world.guard.admit(identity="bob", address="192.0.2.9", entrance="connection").is_allowed


@pytest.mark.bound("access.policies._DEPTH_MAX", "access.policies._CHAIN_MAX")
@crossed
@pytest.mark.parametrize("kind", ["depth", "chain"])
def test_a_policy_that_nests_or_chains_further_is_refused(kind: str, beyond: Beyond) -> None:
    """Brackets and operators are counted before the parser sees the text; a policy at the limit is taken."""

    def policy(size: int) -> str:
        # Of the brackets and operators two are those of the policy itself: its scope and its condition.
        condition = (
            "(" * (size - 1) + "true" + ")" * (size - 1) if kind == "depth" else "true" + " && true" * (size - 2)
        )
        return f"permit (principal, action, resource) when {{ {condition} }};"

    limit = _DEPTH_MAX if kind == "depth" else _CHAIN_MAX
    check_policy(policy(limit), bytes_max=1 << 20)
    with pytest.raises(InvalidPolicy, match=rf"nests deeper than {limit} |more than {limit} operators"):
        check_policy(policy(beyond(limit)), bytes_max=1 << 20)


@pytest.mark.bound("access.settings.AccessSettings.rules_count_max")
@crossed
def test_a_full_book_takes_no_grants_and_closes_rather_than_lose_a_revocation(beyond: Beyond) -> None:
    """Grants beyond the limit are refused, and have no effect if they are in the log; revocations have up to twice as many."""
    alice, claims = bearer("alice"), bearer("bob", partition_prefixes=("q",))
    book = book_of(settings=AccessSettings(rules_count_max=5))
    seq = 0

    def grant(number: int) -> Grant:
        return Grant(subject="alice", action=Action.SYNC, resource=pattern_from_text(f"partition:p{number}"))

    for number in range(beyond(5)):
        if number >= 5:
            with pytest.raises(InvalidChange, match="5 grants and revocations"):
                book.check(grant(number))
        seq += 1
        book.apply(record_of(seq, grant(number)))
        assert book.capsule(alice).allows(Action.SYNC, partition(f"p{number}")) == (number < 5)
    for number in range(beyond(5)):
        change = Revoke(subject="bob", action=Action.SYNC, resource=pattern_from_text(f"partition:q{number}"))
        seq += 1
        book.apply(record_of(seq, change))
        assert not book.capsule(claims).allows(Action.SYNC, partition(f"q{number}"))
        assert book.capsule(alice).allows(Action.SYNC, partition("p0")) == (number < 5)
    assert any("more than can be kept" in reason for reason in book.closed_by())


@pytest.mark.bound("access.visibility.CAPSULE_BYTES_MAX")
@crossed
@pytest.mark.parametrize("letter", ["p", "\u20ac", "\U0001f511"])
def test_a_capsule_is_counted_in_bytes(letter: str, beyond: Beyond) -> None:
    """Whatever the letters of its partitions: one within the limit is made, and beyond it the event is denied to everybody."""

    def ask(count: int, rest: int) -> ReadRequest:
        partitions = (*(f"{number:04}" + letter for number in range(count)), "x" * rest)
        scope = ReadScope("orders", "main", partitions)
        return ReadRequest(
            origin_identity_id="alice", app_id="default", domain_id="orders", subscription_type="graph", scope=scope
        )

    issuer = CapsuleIssuer(book_of())
    (small,) = issuer.issue([ask(0, 1)])
    overhead = len(msgspec.json.encode(small)) - 1

    def of_bytes(size: int) -> ReadRequest:
        each = len(letter.encode()) + 7
        count = (size - overhead - 1) // each
        return ask(count, size - overhead - count * each)

    made, denied = issuer.issue([of_bytes(CAPSULE_BYTES_MAX), of_bytes(beyond(CAPSULE_BYTES_MAX))])
    assert isinstance(made, ReadCapsule)
    assert len(msgspec.json.encode(made)) == CAPSULE_BYTES_MAX
    assert isinstance(denied, CapsuleDenied)
