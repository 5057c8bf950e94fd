"""The account of memory holds every scope to its limit, and gives everything back."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beyond import Beyond, crossed
from tidings.core.settings import checked
from tidings.server.errors import MemoryExhausted
from tidings.server.memory import MemoryAccount, MemoryBudget
from tidings.server.settings import ServerSettings

_KIB = 1024
_MIB = 1 << 20


def _budget(**settings: int) -> MemoryBudget:
    return MemoryBudget(checked(ServerSettings(**settings)))  # type: ignore[arg-type]


def _fill(budget: MemoryBudget, account: MemoryAccount) -> MemoryExhausted:
    """Charge in steps of 64 KiB until a limit is reached."""
    for _ in range(100_000):
        try:
            account.hold(64 * _KIB)
        except MemoryExhausted as error:
            return error
    raise AssertionError("no limit was reached")


@pytest.mark.bound(
    "server.settings.ServerSettings.memory_bytes_max",
    "server.settings.ServerSettings.memory_bytes_per_address_max",
    "server.settings.ServerSettings.memory_bytes_per_connection_max",
    "server.settings.ServerSettings.memory_bytes_per_identity_max",
)
@crossed
@pytest.mark.parametrize(
    ("scope", "setting", "is_same_address", "is_same_identity"),
    [
        ("connection", "memory_bytes_per_connection_max", False, False),
        ("identity", "memory_bytes_per_identity_max", False, True),
        ("address", "memory_bytes_per_address_max", True, False),
        ("total", "memory_bytes_max", False, False),
    ],
)
def test_a_scope_of_identified_clients_is_held_to_its_limit(
    scope: str, setting: str, is_same_address: bool, is_same_identity: bool, beyond: Beyond
) -> None:
    """A scope takes its limit to the byte over any number of accounts, and refuses what goes beyond it by name."""
    limit = 2 * _MIB
    budget = _budget(**{setting: limit})
    count = 1 if scope == "connection" else 4
    accounts = []
    for number in range(count):
        account = budget.open("192.0.2.1" if is_same_address else f"192.0.2.{number}")
        account.identify("ada" if is_same_identity else f"subject-{number}")
        account.hold(limit // count)
        accounts.append(account)
    assert budget.held_bytes(is_authenticated=True) == limit
    with pytest.raises(MemoryExhausted) as caught:
        accounts[0].hold(beyond(limit) - limit)
    assert (caught.value.scope, caught.value.limit_bytes) == (scope, limit)
    assert caught.value.setting == f"server.{setting}"
    assert budget.held_bytes(is_authenticated=True) == limit
    for account in accounts:
        account.close()
    assert budget.held_bytes(is_authenticated=True) == 0


@pytest.mark.bound("server.settings.ServerSettings.unauthenticated_memory_bytes_max")
@crossed
def test_the_pool_of_clients_without_a_token_is_held_to_its_limit(beyond: Beyond) -> None:
    """The pool takes its limit to the byte over several addresses; identified clients have no part in it."""
    limit = 2 * _MIB
    budget = _budget(unauthenticated_memory_bytes_max=limit)
    accounts = [budget.open(f"192.0.2.{number}") for number in range(4)]
    for account in accounts:
        account.hold(limit // 4)
    with pytest.raises(MemoryExhausted) as caught:
        budget.open("198.51.100.1").hold(beyond(limit) - limit)
    assert (caught.value.scope, caught.value.setting) == ("unauthenticated", "server.unauthenticated_memory_bytes_max")
    assert budget.held_bytes(is_authenticated=False) == limit
    accounts[0].identify("ada")
    accounts[0].hold(limit)


@pytest.mark.parametrize("address_count", [5, 2_000])
def test_clients_without_a_token_share_one_pool(address_count: int) -> None:
    """Any number of addresses together hold no more than the pool, and all of it is returned."""
    budget = _budget()
    accounts = [budget.open(f"10.{number >> 8}.{number & 255}.1") for number in range(address_count)]
    errors = {_fill(budget, account).scope for account in accounts}
    assert "unauthenticated" in errors
    assert budget.held_bytes(is_authenticated=False) == 32 * _MIB
    for account in accounts:
        account.close()
    assert budget.held_bytes(is_authenticated=False) == 0


def test_one_address_has_half_of_the_pool() -> None:
    """One address, and one IPv6 network, cannot keep all others from being served."""
    budget = _budget()
    accounts = [budget.open(f"2001:db8:0:1::{number:x}") for number in range(10)]
    assert {_fill(budget, account).scope for account in accounts} == {"unauthenticated_address"}
    assert budget.held_bytes(is_authenticated=False) == 16 * _MIB
    budget.open("192.0.2.1").hold(_MIB)


def test_identified_clients_do_not_use_the_pool() -> None:
    """What a client held before it showed its token moves to its identity; back again when the next request shows none."""
    budget = _budget()
    account = budget.open("192.0.2.1")
    account.hold(_MIB)
    account.identify("ada")
    assert (budget.held_bytes(is_authenticated=False), budget.held_bytes(is_authenticated=True)) == (0, _MIB)
    account.identify(None)
    assert (budget.held_bytes(is_authenticated=False), budget.held_bytes(is_authenticated=True)) == (_MIB, 0)


def test_a_full_identity_takes_nothing_over() -> None:
    """An account that cannot move to a full identity stays where it is, with all that it holds."""
    budget = _budget(memory_bytes_per_identity_max=_MIB)
    first = budget.open("192.0.2.1")
    first.identify("ada")
    first.hold(_MIB)
    second = budget.open("192.0.2.2")
    second.hold(1)
    with pytest.raises(MemoryExhausted):
        second.identify("ada")
    assert second.subject is None
    assert budget.held_bytes(is_authenticated=False) == 1


def test_an_address_behind_a_proxy_has_its_own_limit() -> None:
    """A request through a trusted proxy is charged to the address of its client."""
    budget = _budget(memory_bytes_per_address_max=_MIB)
    for number in range(3):
        account = budget.open("192.0.2.1")
        account.identify(f"subject-{number}", f"198.51.100.{number}")
        account.hold(_MIB)


def test_work_outlives_its_connection() -> None:
    """A charge stays until its block ends, although the connection has closed; buffers are returned at once."""
    budget = _budget()
    account = budget.open("192.0.2.1")
    account.identify("ada")
    account.hold(100)
    with account.charge(1_000):
        account.close()
        account.hold(5)
        account.release(5)
        assert budget.held_bytes(is_authenticated=True) == 1_000
    assert budget.held_bytes(is_authenticated=True) == 0


def test_limits_can_be_reloaded() -> None:
    """New limits apply from the next charge."""
    budget = _budget()
    account = budget.open("192.0.2.1")
    account.identify("ada")
    account.hold(3 * _MIB)
    budget.settings = ServerSettings(memory_bytes_max=2 * _MIB)
    assert not account.try_hold(1)
    account.release(2 * _MIB)
    assert account.try_hold(1)
    assert budget.refused == {"total": 1}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from(["hold", "release", "identify", "forget", "close"]),
            st.integers(0, 50_000),
        ),
        max_size=60,
    )
)
def test_totals_are_the_sum_of_the_accounts(steps: list[tuple[int, str, int]]) -> None:
    """Whatever is done in whatever order, totals are the sums of the accounts, and nothing is left after all have closed."""
    budget = _budget(unauthenticated_memory_bytes_max=400_000, memory_bytes_per_identity_max=100_000)
    accounts = [budget.open(f"192.0.2.{number % 3}") for number in range(6)]
    for number, step, size in steps:
        account = accounts[number]
        match step:
            case "hold":
                account.try_hold(size)
            case "release":
                account.release(min(size, account.held_bytes))
            case "identify":
                with contextlib.suppress(MemoryExhausted):
                    account.identify(f"subject-{number % 2}")
            case "forget":
                with contextlib.suppress(MemoryExhausted):
                    account.identify(None)
            case _:
                account.close()
        for is_authenticated in (False, True):
            held = sum(each.held_bytes for each in accounts if (each.subject is not None) == is_authenticated)
            assert budget.held_bytes(is_authenticated=is_authenticated) == held
    for account in accounts:
        account.close()
    assert budget.held_bytes(is_authenticated=False) == budget.held_bytes(is_authenticated=True) == 0
