"""
What a manager of the node has to tell: an announcement, made after what it tells of is done.

A manager knows nothing of who hears it. The node joins its ``Announcer`` with the gateway, which checks what is told against the manager's
declared event types, and delivers it to those who may know; until then, and where there is no gateway, nobody hears it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

SYSTEM_APP: Final = "system"
"""The app of what concerns the node and no app."""


Summary = Mapping[str, bool | int | str | tuple[str, ...] | None]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    source_manager: str
    event_type: str
    payload: Summary
    app_id: str = SYSTEM_APP
    requester_identity_id: str | None = None
    """Whom it is about."""
    peer_identity_id: str | None = None
    """The peer it is about, for ``network``."""


class Announcer:
    """
    One manager's voice.

    Args:
        source_manager: The manager's name: ``config_manager``.
    """

    def __init__(self, source_manager: str) -> None:
        self.source_manager = source_manager
        self.listener: Callable[[Announcement], None] | None = None
        """Called with each announcement; must not raise."""

    def tell(
        self,
        event_type: str,
        payload: Summary,
        *,
        app_id: str = SYSTEM_APP,
        requester_identity_id: str | None = None,
        peer_identity_id: str | None = None,
    ) -> None:
        """Tell of something that has happened."""
        if self.listener is not None:
            self.listener(
                Announcement(
                    source_manager=self.source_manager,
                    event_type=event_type,
                    payload=payload,
                    app_id=app_id,
                    requester_identity_id=requester_identity_id,
                    peer_identity_id=peer_identity_id,
                )
            )
