"""On whose behalf something happened, or is asked for: frozen when it is made, and never made before authentication."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tidings.access.announcements import SYSTEM_APP as SYSTEM_APP

AppId = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
TraceId = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{1,128}$")]


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who asked for what an event tells of, or who subscribes."""

    app_id: AppId
    requester_identity_id: str | None
    """The token's subject; ``None`` only where no token was asked for, as within the process."""
    trace_id: TraceId
    actor_type: Literal["user", "service", "automation", "delegation"] = "user"
    device_id: str | None = None
    capability: str | None = None
    """The one verb attempted."""
    correlation_id: str | None = None
    is_remote: bool = False
    is_admin: bool = False
    """Whether the identity may administer the node, as the access layer says."""


class ReducedVisibility(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    In place of a context where there is no requester: the node itself has something to tell.

    It names no identity, so it can never widen an audience.
    """

    source_manager: str
    app_id: AppId
    trace_id: TraceId
    domain_id: str | None = None
    origin: Literal["node"] = "node"


EventContext = RequestContext | ReducedVisibility
