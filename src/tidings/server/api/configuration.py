"""
``/v1/config`` and ``/v1/health``: the settings in force, and how the node's components are.

Settings are changed by administrators, one or several at once, all or nothing; such a change holds until it is taken back with ``null``, or until
the node ends.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.responses import Response

from tidings.access.resources import Action, node

from ..health import HealthSnapshot
from ..settings import printable
from .operations import JSON, ApiOperation, Call, json_answer


class ConfigPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change."""

    values: dict[str, Any]
    """By dotted path, as ``event.delivery.max_msgs_per_sec``; ``null`` takes a change back."""


class ConfigOut(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in force."""

    cfg_seq: int
    """Counts changes since the node started, whichever way they came."""
    overrides: dict[str, Any]
    """What was changed here."""
    settings: dict[str, Any]
    """All of them, a section a part; secrets are not shown."""


class ConfigChanged(msgspec.Struct, frozen=True, kw_only=True):
    """What a change has done."""

    cfg_seq: int
    applied: list[str]
    overrides: dict[str, Any]


async def show_config(call: Call) -> Response:
    """The settings in force."""
    config = call.api.services.config
    return json_answer(
        ConfigOut(cfg_seq=config.cfg_seq, overrides=dict(config.overrides), settings=printable(config.settings))
    )


async def change_config(call: Call) -> Response:
    """Change settings while the node runs."""
    wanted = await call.body(ConfigPatch)
    config = call.api.services.config
    plan = config.override(wanted.values, by=call.subject)
    return json_answer(
        ConfigChanged(cfg_seq=config.cfg_seq, applied=list(plan.applied), overrides=dict(config.overrides))
    )


async def show_health(call: Call) -> Response:
    """How the components are."""
    call.capsule.require(Action.READ, node())
    return json_answer(call.api.services.health.snapshot())


OPERATIONS: Final = (
    ApiOperation(
        method="GET",
        path="/v1/config",
        name="showConfig",
        summary="Show the settings in force.",
        tag="node",
        handle=show_config,
        is_administrative=True,
        answers={200: {JSON: ConfigOut}},
        problems=(403,),
    ),
    ApiOperation(
        method="PATCH",
        path="/v1/config",
        name="changeConfig",
        summary="Change settings while the node runs.",
        tag="node",
        handle=change_config,
        is_administrative=True,
        body={JSON: ConfigPatch},
        answers={200: {JSON: ConfigChanged}},
        problems=(403, 409),
    ),
    ApiOperation(
        method="GET",
        path="/v1/health",
        name="showHealth",
        summary="Show how each component of the node is.",
        tag="node",
        handle=show_health,
        answers={200: {JSON: HealthSnapshot}},
        problems=(403,),
    ),
)
