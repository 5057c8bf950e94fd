"""
What a running node can take over from new settings, decided on plain values.

Limits, origins, levels, keys and the sync model are read where they are used. Where the node listens, where its log is and how it is
laid out are not: those need a restart, and the one who reloads is told so.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .config import changed_paths
from .settings import NodeSettings

__all__ = ["RELOADABLE", "Reload", "plan_reload"]

RELOADABLE: Final = (
    *("origins", "hosts", "connections_max", "connections_per_address_max", "requests_per_address_max"),
    *("unauthenticated_max", "unauthenticated_per_address_max", "unauthenticated_timeout_s"),
    *("unauthenticated_bytes_max", "unauthenticated_messages_max", "messages_per_s_max", "control_frames_per_s_max"),
    *("message_bytes_max", "body_bytes_max"),
    *("write_buffer_bytes_max", "held_messages_max", "ping_interval_s", "close_timeout_s", "dispatch_lag_max"),
    *("drain_delay_s", "stop_deadline_s", "log_level", "access_log", "key_set_file", "tls_cert_file", "tls_key_file"),
)
"""The fields of ``server`` that take effect without a restart."""


class Reload(msgspec.Struct, frozen=True):
    """What a reload comes to."""

    settings: NodeSettings
    """What holds from now on."""
    applied: tuple[str, ...]
    """The paths of the settings that changed."""
    kept: tuple[str, ...]
    """The paths of the settings that differ and need a restart."""


def plan_reload(old: NodeSettings, new: NodeSettings) -> Reload:
    """What of ``new`` a node with the settings ``old`` takes over."""
    taken = {name: getattr(new.server, name) for name in RELOADABLE}
    if (old.server.tls_cert_file is None) != (new.server.tls_cert_file is None):
        # A port that speaks TLS goes on speaking it, and one that does not cannot begin.
        taken.update(tls_cert_file=old.server.tls_cert_file, tls_key_file=old.server.tls_key_file)
    effective = msgspec.structs.replace(
        old,
        server=msgspec.structs.replace(old.server, **taken),
        access=msgspec.structs.replace(old.access, tokens=new.access.tokens),
        sync=new.sync,
    )
    return Reload(effective, tuple(changed_paths(old, effective)), tuple(changed_paths(effective, new)))
