"""Limits of filters, switches and content checks: at the limit they work; beyond it they are rejected."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.beyond import Beyond, crossed
from tests.scenarios.bus.support import SETTINGS, World
from tidings.bus.filtering import InvalidFilter, base, filters, jsonpaths, matching
from tidings.bus.middleware import base as switches
from tidings.bus.middleware import checks
from tidings.bus.middleware.base import FeatureFlags, InvalidMiddleware
from tidings.core.errors import TidingsError
from tidings.filters import CompoundFilter, Filter, FilterManager, JSONPathFilter, SimpleFilter
from tidings.middleware import ContentSafetyMiddleware


def leaf() -> Filter:
    return SimpleFilter("payload.n", 1)


def nested(depth: int) -> Filter:
    """A filter of so many compound levels."""
    made: Filter = leaf()
    for _ in range(depth):
        made = CompoundFilter("NOT", [made])
    return made


def written(depth: int) -> dict[str, Any]:
    """The written form of a filter of so many levels."""
    form: dict[str, Any] = leaf().to_dict()
    for _ in range(depth - 1):
        form = {"type": "compound", "config": {"operator": "NOT", "filters": [form]}}
    return form


@pytest.mark.bound("bus.filtering.base._CHILDREN_COUNT_MAX", "bus.filtering.base._DEPTH_MAX")
@crossed
def test_a_compound_filter_is_limited_in_parts_and_depth(beyond: Beyond) -> None:
    """More parts, or more levels, raise ``InvalidFilter``."""
    CompoundFilter("AND", [leaf()] * base._CHILDREN_COUNT_MAX)
    with pytest.raises(InvalidFilter):
        CompoundFilter("AND", [leaf()] * beyond(base._CHILDREN_COUNT_MAX))
    nested(base._DEPTH_MAX)
    with pytest.raises(InvalidFilter):
        nested(beyond(base._DEPTH_MAX))


@pytest.mark.bound("bus.filtering.filters._DEPTH_MAX")
@crossed
def test_a_written_filter_is_limited_in_depth(beyond: Beyond) -> None:
    """``FilterManager`` rejects a form with more levels."""
    FilterManager().from_dict(written(filters._DEPTH_MAX))
    with pytest.raises(InvalidFilter):
        FilterManager().from_dict(written(beyond(filters._DEPTH_MAX)))


@pytest.mark.bound("bus.filtering.jsonpaths._EXPRESSION_CHARS_MAX", "bus.filtering.matching._STEPS_MAX")
@crossed
def test_paths_are_limited_in_length_and_steps(beyond: Beyond) -> None:
    """A longer JSONPath, or a path of more steps, raises ``InvalidFilter``."""
    prefix = "$.payload."
    JSONPathFilter(prefix + "a" * (jsonpaths._EXPRESSION_CHARS_MAX - len(prefix)), 1)
    with pytest.raises(InvalidFilter):
        JSONPathFilter(prefix + "a" * (beyond(jsonpaths._EXPRESSION_CHARS_MAX) - len(prefix)), 1)
    SimpleFilter("payload" + ".a" * matching._STEPS_MAX, 1)
    with pytest.raises(InvalidFilter):
        SimpleFilter("payload" + ".a" * beyond(matching._STEPS_MAX), 1)


@pytest.mark.bound("bus.middleware.base._FLAGS_COUNT_MAX")
@crossed
def test_feature_flags_are_limited_in_number(beyond: Beyond) -> None:
    """Switching one name too many raises ``InvalidMiddleware``; names that are known can still be switched."""
    flags = FeatureFlags({f"flag{number}": True for number in range(switches._FLAGS_COUNT_MAX)})
    for number in range(switches._FLAGS_COUNT_MAX, beyond(switches._FLAGS_COUNT_MAX)):
        with pytest.raises(InvalidMiddleware):
            flags.switch(f"flag{number}", False)
    flags.switch("flag0", False)


@pytest.mark.bound("bus.middleware.checks._NODES_COUNT_MAX")
@crossed
async def test_the_content_check_rejects_a_payload_that_it_cannot_look_through(
    world: World, monkeypatch: pytest.MonkeyPatch, beyond: Beyond
) -> None:
    """A payload of too many values is not published, and takes no seq; one at the limit is."""
    monkeypatch.setattr(checks, "_NODES_COUNT_MAX", 100)
    bus = await world.open(cast("Any", ContentSafetyMiddleware()), log_settings=SETTINGS)

    def payload(values: int) -> dict[str, Any]:
        return {"texts": ["a"] * (values - 2)}  # the payload and the list are values too

    with pytest.raises(TidingsError, match="too_large"):
        await world.run(bus.publish(world.event(payload=payload(beyond(100)))))
    assert (await world.run(bus.publish(world.event(payload=payload(100))))).seq == 1
