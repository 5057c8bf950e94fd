"""How far the clock is trusted follows from whether it is kept right, and whether it was set."""

from __future__ import annotations

import pytest

from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.happenings.happening import Happening, to_json
from tidings.schedule.settings import ScheduleSettings
from tidings.schedule.time_trust import TimeTrust, TimeTrustTracker, sync_source_of, trust_of
from tidings.testing import VirtualClock

_DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("is_stepped", "is_synced", "sync_age_s", "expected"),
    [
        (True, True, 5.0, TimeTrust.ADJUSTING),
        (True, False, 5.0, TimeTrust.ADJUSTING),
        (True, False, None, TimeTrust.UNTRUSTED),
        (False, True, None, TimeTrust.TRUSTED),
        (False, False, _DAY_S, TimeTrust.TRUSTED),
        (False, False, _DAY_S + 1, TimeTrust.STALE),
        (False, False, None, TimeTrust.UNTRUSTED),
    ],
)
def test_the_states(is_stepped: bool, is_synced: bool, sync_age_s: float | None, expected: TimeTrust) -> None:
    """
    A clock that was set is adjusting if it was ever right; one that nothing keeps right is trusted for a day, then stale.
    """
    found = trust_of(is_stepped=is_stepped, is_synced=is_synced, sync_age_s=sync_age_s, tolerance_s=_DAY_S)

    assert found is expected
    assert found.is_strict is (expected is TimeTrust.TRUSTED)
    assert found.is_lenient is (expected in (TimeTrust.TRUSTED, TimeTrust.STALE))


class World:
    """A tracker over a virtual clock, with what it told and whom it called."""

    def __init__(self, *, is_synced: bool = True) -> None:
        self.clock = VirtualClock()
        self.is_synced = is_synced
        self.told: list[tuple[object, ...]] = []
        self.called: list[float] = []
        self.tracker = TimeTrustTracker(self.clock, lambda: self.is_synced, self._tell)
        self.tracker.on_change(self._call)

    async def _tell(self, happening: Happening) -> None:
        fields = to_json(happening)
        assert fields.pop("at_ms") == self.clock.now_ns() // 1_000_000
        self.told.append(tuple(fields.values()))

    async def _call(self, step_s: float) -> None:
        self.called.append(step_s)


async def test_what_changes_is_told_once() -> None:
    """
    A clock that becomes right, and one that is no longer kept right, are told when the state changes and not at every look.
    """
    world = World(is_synced=False)
    world.tracker.start()
    assert world.tracker.state is TimeTrust.UNTRUSTED

    await world.clock.advance(60)
    assert world.told == []
    world.is_synced = True
    await world.clock.advance(60)
    assert world.told == [("clock_trust_changed", "untrusted", "trusted")]
    world.is_synced = False
    await world.clock.advance(_DAY_S + 60)
    assert world.told[1:] == [("clock_trust_changed", "trusted", "stale")]
    assert world.called == [0.0, 0.0]
    await world.tracker.close()


@pytest.mark.parametrize("step_s", [_DAY_S, -_DAY_S])
async def test_a_clock_that_is_set_is_noticed(step_s: float) -> None:
    """
    A step either way is told with its size, and the clock is adjusting until the next look; a small correction is none.
    """
    world = World()
    world.tracker.start()
    await world.clock.advance(7)
    world.clock.jump(1.5)
    await world.clock.advance(60)
    assert world.told == []

    world.clock.jump(step_s)
    assert await world.tracker.current() is TimeTrust.ADJUSTING
    assert await world.tracker.current() is TimeTrust.ADJUSTING
    await world.clock.advance(10)

    assert world.told == [
        ("clock_adjusted", step_s),
        ("clock_trust_changed", "trusted", "adjusting"),
        ("clock_trust_changed", "adjusting", "trusted"),
    ]
    assert world.called == [step_s, 0.0]
    await world.tracker.close()


def test_sources() -> None:
    """
    A clock that is assumed to be right is; the kernel says yes or no.
    """
    assert sync_source_of(ScheduleSettings())() is True
    assert sync_source_of(ScheduleSettings(clock_source="kernel"))() in (True, False)


def test_the_local_zone_must_exist() -> None:
    """
    A setting that names no zone is refused.
    """
    with pytest.raises(SettingsError, match="Mars"):
        checked(ScheduleSettings(local_zone="Mars/Base"))
