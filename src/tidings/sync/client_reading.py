"""What a server's message says, read with care: ids that are ids, delays that are delays, names that are names."""

from __future__ import annotations

from typing import Final

from msgspec import UnsetType

from tidings.wire.sync_frames import ErrorFrame, EventBroadcast, ServerPayload, Snapshot, SubmitResult, SyncResponse

__all__ = ["forbidden_names", "has_sane_ids", "retry_after_s"]

_ID_MAX: Final = 2**63 - 1
_DELAY_S_MIN: Final = 0.01
_DELAY_S_MAX: Final = 30.0


def has_sane_ids(payload: ServerPayload) -> bool:
    """Whether committed ids lie where ids lie: from 1, and within what a database holds."""
    match payload:
        case EventBroadcast():
            return 0 < payload.committed_id <= _ID_MAX
        case SyncResponse():
            bounds = [payload.next_since_committed_id, payload.sync_to_committed_id]
            if isinstance(payload.snapshot, Snapshot):
                bounds.append(payload.snapshot.committed_id)
            return all(0 <= each <= _ID_MAX for each in bounds) and all(
                0 < event.committed_id <= _ID_MAX for event in payload.events
            )
        case SubmitResult():
            ids = [each.committed_id for each in payload.results if isinstance(each.committed_id, int)]
            return all(0 < each <= _ID_MAX for each in ids)
        case _:
            return True


def retry_after_s(frame: ErrorFrame) -> float | None:
    """How long the server asks to wait, within reason; ``None`` if it does not say."""
    delay_ms = None if isinstance(frame.details, UnsetType) else frame.details.get("retry_after_ms")
    if not isinstance(delay_ms, int | float):
        return None
    return min(max(delay_ms / 1000, _DELAY_S_MIN), _DELAY_S_MAX)


def forbidden_names(frame: ErrorFrame) -> frozenset[str]:
    """The partitions that the server names as not allowed; none if it names none."""
    names = None if isinstance(frame.details, UnsetType) else frame.details.get("partitions")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
