"""Settings that make no sense are refused by their path, before anything is opened."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.sync.support import open_world
from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.sync.errors import InvalidSchema
from tidings.sync.settings import SyncSettings


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"batch_items_max": 0}, "batch_items_max"),
        ({"page_items_min": 200, "page_items_max": 100}, "page_items_min"),
        ({"profiles": ()}, "profiles"),
        ({"profiles": ("sonnet",)}, "profiles[0]"),
        ({"space_id": ""}, "space_id"),
        ({"heartbeat_window_ms": 1}, "heartbeat_window_ms"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_path(change: dict[str, Any], path: str) -> None:
    """The error names the setting."""
    with pytest.raises(SettingsError) as caught:
        checked(msgspec.structs.replace(SyncSettings(), **change))

    assert caught.value.path == path


@pytest.mark.parametrize("schema", [{"type": "wat"}, {"$ref": "http://127.0.0.1:1/schema"}, {"$ref": "#/nowhere"}])
async def test_a_schema_that_cannot_be_compiled_is_refused_at_the_start(schema: dict[str, Any]) -> None:
    """Also one that would have to be fetched from somewhere."""
    with pytest.raises(InvalidSchema) as caught:
        async with open_world(SyncSettings(schemas={"note": schema})):
            pass

    assert caught.value.name == "note"


async def test_a_reload_that_fails_leaves_everything_as_it_was() -> None:
    """The earlier settings stay in force, for connections too."""
    async with open_world() as world:
        peer = await world.client()
        before = world.service.settings

        with pytest.raises(InvalidSchema):
            world.service.reload(SyncSettings(model_version=2, schemas={"x": {"type": "wat"}}))

        assert world.service.settings is before
        assert peer.take() == []
