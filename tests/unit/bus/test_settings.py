"""Options of subscriptions and buses: what is out of range is refused by name, before anything is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidings.bus import BusSettings, EventBus, TopicPolicy
from tidings.bus.settings import SubscriptionSettings
from tidings.core.errors import SettingsError
from tidings.subscription import SubscriptionRegistry
from tidings.types import Ack

BAD: dict[str, list[Any]] = {
    "workers": [0, -1, 1.5, "2"],
    "max_inflight": [0, -5],
    "order": ["stric", None],
    "start": ["middle", -1, 0.5],
    "ack_deadline_ms": [0, -5],
    "max_retries": [-1],
    "backoff_base": [-1.0],
    "backoff_mult": [0.5],
    "backoff_max": [-1.0],
    "batch_count_max": [0],
}


async def handler(_: object) -> Ack:
    return Ack()


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in BAD.items() for value in values])
async def test_an_option_out_of_its_range_is_refused(tmp_path: Path, option: str, value: object) -> None:
    """By the bus and by a registry, with the option's name; the group can then be subscribed as it should be."""
    options: dict[str, Any] = {option: value}

    with pytest.raises(SettingsError) as refused:
        SubscriptionRegistry().register_subscription("a", handler, **options)
    assert refused.value.path == option
    async with EventBus(workspace=tmp_path) as bus:
        with pytest.raises(SettingsError):
            await bus.subscribe("a", "g", handler, **options)
        await bus.subscribe("a", "g", handler)


@pytest.mark.parametrize("wrong", ["handler", None, 3])
async def test_a_handler_must_be_something_to_call(tmp_path: Path, wrong: Any) -> None:
    """Anything else is refused at once, not with the first event."""
    async with EventBus(workspace=tmp_path) as bus:
        with pytest.raises(SettingsError, match="handler"):
            await bus.subscribe("a", "g", wrong)


async def test_settings_and_single_options_are_one_or_the_other(tmp_path: Path) -> None:
    """Given both, nobody could say which holds."""
    async with EventBus(workspace=tmp_path) as bus:
        with pytest.raises(SettingsError, match="workers"):
            await bus.subscribe("a", "g", handler, settings=SubscriptionSettings(), workers=7)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (BusSettings(read_ahead_count_max=0), "read_ahead_count_max"),
        (BusSettings(cursor_interval_ms=0), "cursor_interval_ms"),
        (BusSettings(publish_timeout_s=-1.0), "publish_timeout_s"),
        (BusSettings(topics={"a": TopicPolicy(expired="dlq")}), "topics[...].expired"),  # type: ignore[arg-type]
        (BusSettings(topics={"a": TopicPolicy(ack_deadline_ms=0)}), "topics[...].ack_deadline_ms"),
    ],
)
def test_a_bus_looks_at_its_settings(tmp_path: Path, settings: BusSettings, path: str) -> None:
    """A value out of its range is refused when the bus is made."""
    with pytest.raises(SettingsError) as refused:
        EventBus(workspace=tmp_path, settings=settings)
    assert refused.value.path == path
