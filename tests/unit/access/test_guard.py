"""The guard keeps out whom it was told to, for as long, and by itself whoever goes too far; nothing that makes no sense loosens it."""

from __future__ import annotations

import pytest

from tidings.access.audit import AuditLog
from tidings.access.errors import AuditUnavailable, InvalidDirective
from tidings.access.guard import AbuseCounter, AbuseReport, Directive, DosGuard, Entrance, GuardSettings
from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.log.interface import Health
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock


class World:
    def __init__(self, **settings: float) -> None:
        self.clock = VirtualClock()
        self.audit = AuditLog(MemoryLog(clock=self.clock, epoch="e"), self.clock)
        self.guard = DosGuard(GuardSettings(**settings), self.clock, self.audit)  # type: ignore[arg-type]
        self.abuse = AbuseCounter(self.guard, self.clock)

    def deny(self, target: str, **options: object) -> None:
        self.guard.apply(Directive(decision="deny", target=target, **options), by="root")  # type: ignore[arg-type]

    def denied(self, identity: str | None = None, address: str | None = None, app: str | None = None) -> int:
        """For how many seconds; 0 if not."""
        return self.guard.admit(identity=identity, address=address, app=app).retry_after_s


async def test_a_denial_ends_by_itself() -> None:
    """Until its time is over everybody meant is denied, with the seconds that are left; others are not."""
    world = World()
    world.deny("identity:alice", ttl_ms=2_500)

    assert (world.denied("alice"), world.denied("bob")) == (3, 0)
    await world.clock.advance(2.0)
    assert world.denied("alice") == 1
    await world.clock.advance(0.5)
    assert world.denied("alice") == 0
    assert world.guard.directives() == []


async def test_an_ipv6_address_is_its_network() -> None:
    """Whoever takes another address of the same household is denied all the same; a neighbour, and IPv4, are meant as they are written."""
    world = World()
    world.deny("address:2001:db8::1")
    world.deny("address:192.0.2.1")

    assert world.denied(address="2001:db8::ffff") > 0
    assert world.denied(address="2001:db8:0:1::1") == 0
    assert (world.denied(address="::ffff:192.0.2.1") > 0, world.denied(address="192.0.2.2")) == (True, 0)


async def test_allow_lifts_the_denial_of_its_own_target_and_for_all_every_one() -> None:
    """Allowing somebody does not lift a denial of everybody; allowing everybody lifts all."""
    world = World()
    for target in ("all", "identity:alice", "address:192.0.2.1"):
        world.deny(target)
    world.guard.apply(Directive(decision="allow", target="identity:alice"), by="root")
    assert world.denied("alice") > 0
    world.guard.apply(Directive(decision="allow", target="all"), by="root")

    assert (world.denied("alice"), world.denied(address="192.0.2.1"), world.denied("bob")) == (0, 0, 0)


async def test_a_pace_is_the_lowest_that_any_directive_leaves() -> None:
    """Directives for everybody, an app and an identity hold at the same time; a newer one replaces that of the same target."""
    world = World()
    for target, rate in (("all", 50), ("app:contacts", 20), ("identity:alice", 30), ("app:contacts", 10)):
        world.guard.apply(Directive(decision="allow", target=target, msgs_per_sec_max=rate), by="root")

    assert world.guard.admit(identity="alice", app="contacts").msgs_per_sec_max == 10
    assert world.guard.admit(identity="alice", app="x").msgs_per_sec_max == 30
    assert world.guard.admit(identity="bob", app="x").msgs_per_sec_max == 50


async def test_each_denial_by_the_guard_itself_is_twice_as_long_up_to_a_limit_and_forgiven_later() -> None:
    """Half a minute, a minute, two; no longer than the setting; and after a long time of peace half a minute again."""
    world = World(denial_s_max=100.0)
    times = []
    for _ in range(4):
        world.guard.report(AbuseReport(kind="overflow", count=3, window_ms=60_000, identity_id="alice"))
        times.append(world.denied("alice"))
    await world.clock.advance(161.0)
    world.guard.report(AbuseReport(kind="overflow", count=3, window_ms=60_000, identity_id="alice"))

    assert [*times, world.denied("alice")] == [30, 60, 100, 100, 30]


@pytest.mark.parametrize(
    ("identity", "address", "target"),
    [
        ("alice", "192.0.2.1", "identity:alice"),
        ("anonymous", "192.0.2.1", "address:192.0.2.1"),
        (None, "2001:db8:0:7::1", "address:2001:db8:0:7::"),
        (None, "127.0.0.1", None),
        (None, "::1", None),
        (None, "unix", None),
        ("anonymous", None, None),
    ],
)
async def test_whoever_has_no_identity_is_denied_by_address_unless_that_may_be_a_proxy(
    identity: str | None, address: str | None, target: str | None
) -> None:
    """An identity is denied itself; where there is none, its address, but never the machine's own."""
    world = World()
    world.guard.report(AbuseReport(kind="rejection", count=10, window_ms=60_000, identity_id=identity, address=address))

    assert [each.directive.target for each in world.guard.directives()] == ([] if target is None else [target])


async def test_offences_are_counted_within_a_window_and_by_their_kind() -> None:
    """Three of a kind within a minute are too many; two, then two more after it, or two of each kind, are not."""
    world = World()
    for kind in ("overflow", "rejection", "overflow", "limit"):
        world.abuse.note(kind, identity="alice")
    assert world.denied("alice") == 0
    await world.clock.advance(60.0)
    world.abuse.note("overflow", identity="alice")
    world.abuse.note("overflow", identity="alice")
    world.abuse.note("overflow", identity="bob")
    assert (world.denied("alice"), world.denied("bob")) == (0, 0)
    world.abuse.note("overflow", identity="alice")

    assert (world.denied("alice"), world.denied("bob")) == (30, 0)


async def test_many_peers_take_no_more_memory_than_the_bound() -> None:
    """Offences of twenty thousand peers, and denials of as many: only the newest ten thousand are kept."""
    world = World()
    for number in range(20_000):
        world.abuse.note("overflow", identity=f"peer-{number}")
    assert len(world.abuse._times) == 10_000
    for number in range(10_050):
        world.guard._enter(Directive(decision="deny", target=f"identity:peer-{number}"))

    assert len(world.guard.directives()) == 10_000
    assert (world.denied("peer-0"), world.denied("peer-10049")) == (0, 60)


@pytest.mark.req("R137")
async def test_a_denial_holds_although_it_cannot_be_recorded_and_is_lifted_only_if_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a log that takes nothing, denying works, allowing does not, from the moment on that the log says so: what fails, fails closed."""
    world = World()
    monkeypatch.setattr(MemoryLog, "health", lambda _: Health(is_writable=False, is_durable=True))
    world.deny("identity:alice")
    with pytest.raises(AuditUnavailable):
        world.guard.apply(Directive(decision="allow", target="identity:alice"), by="root")

    assert world.denied("alice") == 60


@pytest.mark.parametrize(
    ("kind", "denied"),
    [
        ("overflow", ["subscription"]),
        ("rejection", ["subscription"]),
        ("limit", ["connection", "subscription"]),
    ],
)
async def test_the_guard_denies_only_what_was_abused(kind: str, denied: list[str]) -> None:
    """Too slow a subscriber may still publish and read; one whose sockets go over limits may still send requests."""
    world = World()
    world.guard.report(AbuseReport(kind=kind, count=3, window_ms=60_000, identity_id="alice"))  # type: ignore[arg-type]

    entrances: tuple[Entrance, ...] = ("request", "connection", "subscription")
    assert [each for each in entrances if not world.guard.admit(identity="alice", entrance=each).is_allowed] == denied


async def test_a_denial_by_the_guard_leaves_an_administrators_longer_one_in_force() -> None:
    """The two reach differently far, and end by themselves; allowing the target lifts both."""
    world = World()
    world.deny("identity:alice", ttl_ms=3_600_000)
    world.guard.report(AbuseReport(kind="overflow", count=3, window_ms=60_000, identity_id="alice"))
    await world.clock.advance(40.0)
    assert not world.guard.admit(identity="alice", entrance="request").is_allowed
    world.guard.apply(Directive(decision="allow", target="identity:alice"), by="root")

    assert world.guard.directives() == []


async def test_an_address_is_denied_to_callers_without_a_good_token_only() -> None:
    """Many users may share an address: whoever shows a good token comes in, while its strangers are denied."""
    world = World()
    world.guard.report(AbuseReport(kind="limit", count=30, window_ms=60_000, address="192.0.2.1"))

    assert not world.guard.admit(address="192.0.2.1", entrance="request").is_allowed
    assert world.guard.admit(address="192.0.2.1", entrance="request", has_token=lambda: True).is_allowed
    world.deny("address:192.0.2.1")
    assert not world.guard.admit(address="192.0.2.1", entrance="request", has_token=lambda: True).is_allowed


@pytest.mark.parametrize("address", ["192.0.2.7", "10.1.2.3", "::ffff:10.1.2.3", "2001:db8::5"])
async def test_addresses_that_are_never_denied(address: str) -> None:
    """Neither by the guard itself nor by a directive, which is refused; their neighbours are."""
    world = World(never_denied=("192.0.2.7", "10.0.0.0/8", "2001:db8::/64"))  # type: ignore[arg-type]
    world.guard.report(AbuseReport(kind="limit", count=30, window_ms=60_000, address=address))
    assert world.guard.directives() == []
    with pytest.raises(InvalidDirective, match="never denied"):
        world.deny(f"address:{address}")
    world.deny("address:192.0.2.8")

    assert world.denied(address="192.0.2.8") > 0


@pytest.mark.parametrize("network", ["", "192.0.2", "10.0.0.1/8", "proxy.example"])
def test_an_address_in_the_settings_that_is_none_is_refused(network: str) -> None:
    """The error names the entry."""
    with pytest.raises(SettingsError, match=r"never_denied\[0\]"):
        checked(GuardSettings(never_denied=(network,)))
