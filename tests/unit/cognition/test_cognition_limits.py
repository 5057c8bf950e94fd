"""Limits of the cognitive parts: within them an input counts, and beyond them the refusal names the limit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tidings.cognition.attention.actions import LoadMonitor
from tidings.cognition.attention.requests import LoadLimits
from tidings.cognition.errors import InvalidRequest
from tidings.cognition.routing import Consumer, ScalingSettings, scale_step
from tidings.cognition.working_memory import CANDIDATES_MAX, Candidate, rank
from tidings.cognition.write.policy import _DEPTH_MAX, NOTHING_KEPT, redact_content
from tidings.cognition.write.requests import _TAGS_MAX, WriteSettings, write_request_of
from tidings.core.events import Event, EventMeta


@pytest.mark.bound("cognition.working_memory.CANDIDATES_MAX")
@crossed
def test_more_candidates_are_refused(beyond: Beyond) -> None:
    """As many as allowed are ranked together; more raise with the limit."""
    candidates = [Candidate(key=f"c{number}") for number in range(beyond(CANDIDATES_MAX))]
    assert len(rank(candidates[:CANDIDATES_MAX])) == CANDIDATES_MAX
    with pytest.raises(InvalidRequest, match=f"at most {CANDIDATES_MAX}"):
        rank(candidates)


@pytest.mark.bound("cognition.write.policy._DEPTH_MAX")
@crossed
def test_nothing_of_a_deeper_content_is_kept(beyond: Beyond) -> None:
    """A content at the limit is cleaned and kept; of a deeper one nobody knows what may be kept."""

    def nested(depth: int) -> dict[str, Any]:
        value: Any = "text"
        for _ in range(depth):
            value = {"a": value}
        return dict(value)

    kinds: frozenset[str] = frozenset()
    assert redact_content(nested(_DEPTH_MAX), kinds).content == nested(_DEPTH_MAX)
    assert redact_content(nested(beyond(_DEPTH_MAX)), kinds) == NOTHING_KEPT


@pytest.mark.bound("cognition.write.requests._TAGS_MAX", "cognition.write.requests.WriteSettings.text_chars_max")
@crossed
@pytest.mark.parametrize("name", ["tags", "mentions", "text"])
def test_a_write_with_more_tags_or_a_longer_text_is_refused(name: str, beyond: Beyond) -> None:
    """A request at the limit is read; beyond it the error names the field."""
    text_max = WriteSettings(text_chars_max=100).text_chars_max

    def write(size: int) -> Event:
        more = {"content": {"text": "x" * size}} if name == "text" else {name: [f"t{number}" for number in range(size)]}
        meta = EventMeta("memory", "WRITE", "shared:home", actor="ana")
        return Event(meta, {"content": {"text": "hello"}, **more})

    limit = text_max if name == "text" else _TAGS_MAX
    write_request_of(write(limit), tz_default="UTC", text_chars_max=text_max)
    with pytest.raises(InvalidRequest, match=r"payload\.(content|tags|mentions)"):
        write_request_of(write(beyond(limit)), tz_default="UTC", text_chars_max=text_max)


@pytest.mark.bound(
    "cognition.attention.requests.LoadLimits.outcomes_count_max",
    "cognition.attention.requests.LoadLimits.outcomes_age_s_max",
)
@crossed
@pytest.mark.parametrize("kind", ["count", "age"])
def test_older_outcomes_no_longer_count(kind: str, beyond: Beyond) -> None:
    """Within number and age a failure counts; behind enough newer ones, or when it is old, it does not."""
    monitor = LoadMonitor(LoadLimits(outcomes_count_max=10, outcomes_age_s_max=10.0, outcomes_count_min=1))
    monitor.finished(False, 5.0, 0.0)
    if kind == "count":
        for _ in range(9):
            monitor.finished(True, 1.0, 0.0)
        assert monitor.view(0.0, 0).error_rate == 0.1
        for _ in range(10, beyond(10)):
            monitor.finished(True, 1.0, 0.0)
        assert monitor.view(0.0, 0).error_rate == 0.0
    else:
        assert monitor.view(9.9, 0).error_rate == 1.0
        assert monitor.view(float(beyond(10)), 0).error_rate == 0.0


@pytest.mark.bound("cognition.routing.ScalingSettings.consumers_max")
@crossed
def test_no_further_consumer_is_recommended(beyond: Beyond) -> None:
    """Overloaded consumers get help while there are fewer than allowed, and not beyond."""

    def step(count: int) -> int:
        busy = [Consumer(consumer_id=f"c{number}", queue_depth=100) for number in range(count)]
        return scale_step(busy, ScalingSettings(consumers_max=4), now_s=0.0, scaled_s=None)

    assert (step(3), step(4), step(beyond(4))) == (1, 0, 0)


@pytest.mark.bound("cognition.attention.requests.LoadLimits.requests_per_minute_max")
@crossed
def test_the_load_is_full_at_the_rate(beyond: Beyond) -> None:
    """At the rate the load reads 1, and stays there beyond it, until a minute has passed."""
    monitor = LoadMonitor(LoadLimits(requests_per_minute_max=10))
    for _ in range(9):
        monitor.arrived(0.0)
    assert monitor.pressure(0.0, 0).load == 0.9
    for _ in range(9, beyond(10)):
        monitor.arrived(0.0)
    assert (monitor.pressure(0.0, 0).load, monitor.pressure(60.0, 0).load) == (1.0, 0.0)
