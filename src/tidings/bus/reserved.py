"""
The group that the bus keeps for itself: ``delayed`` of the topic ``schedule``, whose position is where delayed events are read from.

A position that others move would skip events that wait. So no subscription, member, seek, pause or redrive is accepted for it; it may be deleted
only while no event waits.
"""

from __future__ import annotations

from typing import Final

from .errors import ReservedGroup

SCHEDULE_TOPIC: Final = "schedule"
DELAYED_GROUP: Final = "delayed"


def check_not_reserved(topic: str, group: str) -> None:
    """
    Make sure that a group is not the bus's own.

    Raises:
        ReservedGroup: It is.
    """
    if topic == SCHEDULE_TOPIC and group == DELAYED_GROUP:
        raise ReservedGroup(topic, group)
