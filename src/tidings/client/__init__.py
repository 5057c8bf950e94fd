"""
The Python client of a node.

``SyncClient`` works offline on a local view and syncs when it can; see ``docs/topics/client.md``. ``RemoteBus`` publishes and
works in durable groups; see ``docs/howto/share-a-group.md``. ``tidings.client.events`` follows what happens; see
``docs/howto/follow-events.md``. ``tidings.client.http`` is for plain HTTP. These two need httpx.
"""

from tidings.sync.client_effects import ResetReason
from tidings.sync.settings import ClientSettings
from tidings.wire.sync_frames import ItemError

from .drafts import (
    Change,
    Changes,
    ChangesMissed,
    ClientStatus,
    Committed,
    Draft,
    DraftRejected,
    EventCommitted,
    GapReported,
    HistoryReset,
    LocalEvent,
    Pending,
    QuarantinedDraft,
    Rejected,
    State,
    Verdict,
)
from .groups import RemoteBus
from .link import EndpointConnector
from .store import ClientStore
from .sync_client import NewEvent, SyncClient
from .view import ViewOf, event_list, tree_view

__all__ = [
    "Change",
    "Changes",
    "ChangesMissed",
    "ClientSettings",
    "ClientStatus",
    "ClientStore",
    "Committed",
    "Draft",
    "DraftRejected",
    "EndpointConnector",
    "EventCommitted",
    "GapReported",
    "HistoryReset",
    "ItemError",
    "LocalEvent",
    "NewEvent",
    "Pending",
    "QuarantinedDraft",
    "Rejected",
    "RemoteBus",
    "ResetReason",
    "State",
    "SyncClient",
    "Verdict",
    "ViewOf",
    "event_list",
    "tree_view",
]
