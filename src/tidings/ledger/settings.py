"""The ledger's settings: how much history subscribers can ask for, when snapshots are taken, and every bound."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from tidings.core.settings import Settings

_MIB: Final = 1 << 20


class LedgerSettings(Settings, frozen=True, kw_only=True):
    """How one ledger behaves."""

    buffer_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 1024
    """Commands that a subscriber may be behind, whatever their number of happenings, before it misses some and receives their number. Also the
    happenings that it holds in memory meanwhile; it reads further ones from history."""
    history_count_max: Annotated[int, msgspec.Meta(ge=0)] | None = 1_000_000
    """A subscriber can have the last so many seqs again, in whole commands; ``None`` sets no such limit."""
    history_age_s_max: Annotated[float, msgspec.Meta(ge=0)] | None = 1800.0
    """And of those only what is no older than this; ``None`` sets no such limit."""
    janitor_interval_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 60.0
    """How often history is trimmed to that."""
    snapshot_records_max: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """A snapshot is taken after so many records: what opening has to go through again at most, about."""
    batch_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 4096
    """Commands that one commit takes."""
    waiting_count_max: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Commands that may wait for their turn; whoever gives more waits until there is room."""
    record_bytes_max: Annotated[int, msgspec.Meta(ge=1024, le=64 * _MIB)] = 2 * _MIB
    """A command whose JSON is longer is refused, and happenings that are go to several records. The log's ``payload_bytes_max``
    must be twice that at least."""
    instance_grace_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = 30.0
    """After opening, plugins have so long to announce their factory instances again; the others are retracted. ``None``: not here."""
