"""
``/v1/apps``: the node's apps, their event types and the channels between them, as records of the topic ``apps``.

For administrators. A change is checked, put on record, committed, and answered when it is in force on this node.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.responses import Response

from tidings.access import apps
from tidings.access.apps import App, AppChange, AppEventType, AppRemoved, CrossAppChannel, event_of
from tidings.access.resources import Action, topic
from tidings.core.validation import UNREADABLE

from ..errors import BadRequest
from .operations import JSON, ApiOperation, Call, OneOf, invalid, json_answer

_ANY_CHANGE: Final[Any] = AppChange


class AppChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The change is in force since ``seq``."""

    type: str
    seq: int
    audit_seq: int | None


class AppOut(msgspec.Struct, frozen=True, kw_only=True):
    """An app."""

    slug: str
    title: str
    version: str
    is_enabled: bool
    seq: int
    event_types: list[AppEventType]
    withdrawn: list[str]
    """Event types that are not told of any more; their names stay taken."""


class AppList(msgspec.Struct, frozen=True, kw_only=True):
    """What is registered."""

    apps: list[AppOut]
    channels: list[CrossAppChannel]
    default_app: str
    apps_seq: int


async def change_app(call: Call) -> Response:
    """Make any change that the body says."""
    try:
        given = msgspec.json.decode(await call.json_body() or b"{}")
        if isinstance(given, dict):
            given.setdefault("type", "app.registered")
        change: AppChange = msgspec.convert(given, _ANY_CHANGE)
    except msgspec.ValidationError as error:
        raise invalid("body", error) from error
    except UNREADABLE as error:
        raise BadRequest("body", f"is not JSON: {error}") from error
    if isinstance(change, CrossAppChannel):
        # A channel gives nothing by itself, and whoever opens one can read what goes through it.
        for domain in change.domain_ids:
            call.capsule.require(Action.READ, topic(domain))
        change = msgspec.structs.replace(change, acl_validated=True)
    return await _make(call, change)


async def remove_app(call: Call) -> Response:
    """Remove an app."""
    return await _make(call, AppRemoved(slug=call.path("slug")))


async def _make(call: Call, change: AppChange) -> Response:
    services = call.api.services
    kind = str(change.__struct_config__.tag)
    async with services.apps.changing:  # so that what was checked still holds when it is applied
        services.apps.check(change)
        async with call.audit().of(services.log, kind, msgspec.to_builtins(change)) as audit_seq:
            done = await services.log.append(event_of(change, actor=call.subject), from_reserve=True)
            await services.dispatcher.reached(done.seq)
    return json_answer(AppChanged(type=kind, seq=done.seq, audit_seq=audit_seq), 201)


async def list_apps(call: Call) -> Response:
    """What is registered."""
    registry = call.api.services.apps
    return json_answer(
        AppList(
            apps=[_shown(each) for each in registry.apps()],
            channels=registry.channels(),
            default_app=registry.default_app,
            apps_seq=registry.seq,
        )
    )


def _shown(app: App) -> AppOut:
    return AppOut(
        slug=app.slug,
        title=app.title,
        version=app.version,
        is_enabled=app.is_enabled,
        seq=app.seq,
        event_types=list(app.event_types.values()),
        withdrawn=sorted(app.withdrawn),
    )


OPERATIONS: Final = (
    ApiOperation(
        method="POST",
        path="/v1/apps",
        name="changeApp",
        summary="Register an app, enable or disable it, declare or withdraw an event type, open or close a channel to other apps.",
        tag="apps",
        handle=change_app,
        is_administrative=True,
        body={
            JSON: OneOf(
                apps.AppRegistered,
                apps.AppEnabled,
                apps.AppEventType,
                apps.EventTypeWithdrawn,
                apps.CrossAppChannel,
                apps.ChannelRemoved,
                apps.AppRemoved,
            )
        },
        answers={201: {JSON: AppChanged}},
        problems=(403, 404, 503),
    ),
    ApiOperation(
        method="GET",
        path="/v1/apps",
        name="listApps",
        summary="List apps, their event types, and channels between them.",
        tag="apps",
        handle=list_apps,
        is_administrative=True,
        answers={200: {JSON: AppList}},
        problems=(403,),
    ),
    ApiOperation(
        method="DELETE",
        path="/v1/apps/{slug}",
        name="removeApp",
        summary="Remove an app with its event types and channels.",
        tag="apps",
        handle=remove_app,
        is_administrative=True,
        answers={201: {JSON: AppChanged}},
        problems=(403, 404, 503),
    ),
)
