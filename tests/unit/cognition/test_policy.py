"""Bands rise with the circumstances, and the strictest verdict holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.policy import Circumstances, PolicyOperation, PolicyVerdict, effective_band, strictest, verdict
from tidings.core.events import SecurityBand


@pytest.mark.parametrize(
    ("seen", "reasons"),
    [
        (Circumstances(), ()),
        (Circumstances(is_screen_locked=True), ()),
        (Circumstances(is_screen_locked=True, operation=PolicyOperation.SHARE), ("locked_or_low_resources",)),
        (Circumstances(is_low_on_resources=True, operation=PolicyOperation.PROJECT), ("locked_or_low_resources",)),
        (Circumstances(is_minor=True, local_hour=21), ()),
        (Circumstances(is_minor=True, local_hour=22), ("minor_at_night",)),
        (Circumstances(is_minor=True, local_hour=5), ("minor_at_night",)),
        (Circumstances(is_minor=True, local_hour=6), ()),
        (Circumstances(arousal=0.7), ("high_arousal",)),
        (Circumstances(arousal=0.7, valence=-0.4), ("high_arousal", "distress")),
        (Circumstances(safety_pressure=0.6), ("safety_pressure",)),
    ],
)
def test_circumstances_raise_a_band_to_amber(seen: Circumstances, reasons: tuple[str, ...]) -> None:
    """Each rule at its limit."""
    band, found = effective_band(SecurityBand.GREEN, seen)

    assert found == reasons
    assert band is (SecurityBand.AMBER if reasons else SecurityBand.GREEN)


@given(st.sampled_from(list(SecurityBand)), st.floats(0, 1), st.floats(-1, 1))
def test_circumstances_never_lower_a_band(band: SecurityBand, arousal: float, valence: float) -> None:
    """Floors win."""
    assert effective_band(band, Circumstances(arousal=arousal, valence=valence))[0].rank >= band.rank


def test_black_is_not_shared_and_red_not_projected() -> None:
    """The two denials, and what else the bands say."""
    assert verdict(SecurityBand.BLACK, PolicyOperation.SHARE) is PolicyVerdict.DENY
    assert verdict(SecurityBand.RED, PolicyOperation.PROJECT) is PolicyVerdict.DENY
    assert verdict(SecurityBand.RED, PolicyOperation.SHARE) is PolicyVerdict.ALLOW_REDACTED
    assert verdict(SecurityBand.GREEN, PolicyOperation.PROJECT) is PolicyVerdict.ALLOW


def test_the_strictest_verdict_holds_and_none_is_a_denial() -> None:
    """DENY over ALLOW_REDACTED over ALLOW."""
    assert strictest([PolicyVerdict.ALLOW, PolicyVerdict.DENY, PolicyVerdict.ALLOW_REDACTED]) is PolicyVerdict.DENY
    assert strictest([PolicyVerdict.ALLOW, PolicyVerdict.ALLOW_REDACTED]) is PolicyVerdict.ALLOW_REDACTED
    assert strictest([]) is PolicyVerdict.DENY
