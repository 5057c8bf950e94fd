"""Bounds of the HTTP API."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["ApiSettings"]


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the HTTP API."""

    events_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Events in one request; with more the request is refused as a whole, before anything is stored."""
    page_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Events on one page; who asks for more gets this many."""
    page_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 28)] = 4 << 20
    """About the size of one page."""
    scan_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 20_000
    """Records that one request looks at for those that fit; then the page ends, with ``next`` to go on from."""
    wait_s_max: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30.0
    """How long a read waits for something to be committed; who asks for more gets this long."""
    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """How long a publish waits for the full window of a group; then it is refused, and may be tried again."""
    letters_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Dead letters on one page, and changed by one request."""
