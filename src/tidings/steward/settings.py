"""Settings of the steward's socket and of ``/happenings``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tidings.core.settings import Settings
from tidings.ledger.settings import LedgerSettings

_MIB = 1 << 20


class NodeLedgerSettings(LedgerSettings, frozen=True, kw_only=True):
    """The ledger of a node."""

    catalogue_file: str | None = None
    """The catalogue: types of subjects, predicates, racks and shelves, as TOML. One that cannot be used is passed over, loudly, and the last
    good one stays in use."""


class StewardSettings(Settings, frozen=True, kw_only=True):
    """How other processes reach the ledger."""

    socket_path: str | None = None
    """A Unix socket that speaks the steward's wire. Without it the ledger is reached at ``/happenings`` only."""
    socket_mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)] = 0o600
    """Who may open the socket, as permissions of a file: 0o660 is the group too. Whoever opens it may read and ask."""
    policy_file: str | None = None
    """Which peers of the socket get which capability, as TOML. Without it only the user who runs the node gets any."""
    claimants: Literal["names", "tokens"] = "names"
    """How plugins are called in happenings and snapshots. Tokens hide the names; ``resolve_claimants`` gives them, with the right."""
    connections_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4_096
    """Open connections of the socket; one more is closed at once."""
    unsent_bytes_max: Annotated[int, msgspec.Meta(ge=4_096, le=1 << 30)] = _MIB
    """What may wait for a peer that does not read; then nothing more is read from it, and a subscription begins to miss happenings."""
    partial_bytes_max: Annotated[int, msgspec.Meta(ge=65 * _MIB, le=1 << 40)] = 256 * _MIB
    """What the socket's peers together may have sent of frames that are not complete; who goes beyond it is closed."""
    calls_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """Calls that a plugin in another process has not answered; one more is refused."""
    projection_relations_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 5_000
    """Relations that one projection shows. If there are more, it shows the nearest and ``walk_truncated`` is set."""
    projection_bytes_max: Annotated[int, msgspec.Meta(ge=65_536, le=64 * _MIB)] = 4 * _MIB
    """Size of one projection, counted roughly. A larger one is refused with ``answer_too_large``."""
    filter_values_max: Annotated[int, msgspec.Meta(ge=1, le=40_000)] = 10_000
    """Names in the filter of one subscription, in all its lists together. A larger filter is refused."""
    filter_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=64 * _MIB)] = _MIB
    """Length of these names together."""
