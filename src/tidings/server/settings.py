"""The node's settings: where it listens, what it lets in, how it stops; and the tree of all parts' settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from tidings.access.settings import AccessSettings
from tidings.bus.settings import BusSettings
from tidings.core.settings import Settings
from tidings.log.settings import LogSettings
from tidings.sync.settings import SyncSettings

from .api.settings import ApiSettings
from .group_settings import GroupsSettings

__all__ = ["NodeSettings", "ServerSettings"]

_MIB = 1 << 20


class ServerSettings(Settings, frozen=True, kw_only=True):
    """Where the node listens and what it lets in."""

    host: str = "127.0.0.1"
    """The address to listen on. Anything but loopback is reachable from elsewhere; think of TLS then."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8787
    """0 takes a free one; the start-up line and ``node.json`` say which."""
    unix_path: str | None = None
    """A Unix socket to listen on as well, for the user who runs the node; without TLS."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    """PEM files; both or neither. With them the port speaks TLS only."""

    lake_path: str | None = None
    """The lake that the pipeline writes for this workspace. With it, what retention dropped from the log is read from there."""
    retention_interval_s: Annotated[float, msgspec.Meta(gt=0, le=86_400 * 7)] = 3_600.0
    """How often the rules of ``log.retention`` are applied. Without such rules nothing is ever dropped."""
    key_set_file: str | None = None
    """A file with the JSON Web Key Set of ``access.tokens.key_set``; read again on SIGHUP."""

    origins: tuple[str, ...] = ()
    """Origins of web pages that may open sockets and send requests, as ``https://app.example``; ``*`` allows every one. A client
    that sends no origin is no web page and is let in: its token decides."""
    hosts: tuple[str, ...] = ()
    """Names by which the node is reached, as ``bus.example``, beside its addresses and ``localhost``. With any of them, and always
    where access is open, a request for another name is refused with 421."""
    connections_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Open sockets over all doors; one more is refused with 503."""
    connections_per_address_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 256
    """Open sockets from one address; those of the Unix socket are not counted. Of IPv6 the first 64 bits are the address."""
    unauthenticated_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000
    """Open sockets, over all, whose peers have not shown a token yet; one more is refused with 503."""
    unauthenticated_per_address_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 64
    """The same from one address."""
    unauthenticated_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """How long a socket may take to show a token; then it is closed with 1008. Endpoints may be stricter."""
    unauthenticated_bytes_max: Annotated[int, msgspec.Meta(ge=4_096, le=_MIB)] = 65_536
    """What a socket may send, and what may wait for it, before it has shown a token; more closes it with 1008."""
    unauthenticated_messages_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 16
    """Messages, and control frames, that a socket may send before it has shown a token; more close it with 1008."""
    messages_per_s_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Messages that are taken from one socket; what it sends beyond that is read later."""
    control_frames_per_s_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 20
    """Pings and pongs that are taken from one socket; more close it with 1008."""
    requests_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """HTTP connections at once; one more is answered with 503."""
    requests_per_address_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    """HTTP connections at once from one address, so that none takes all; those of the Unix socket are not counted. A proxy in
    front is one address: raise it there, or have the proxy come by the Unix socket."""
    message_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=64 * _MIB)] = 2 * _MIB
    """A longer message on a socket closes it with 1009."""
    body_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1024 * _MIB)] = 16 * _MIB
    """A longer body of a request is answered with 413."""
    write_buffer_bytes_max: Annotated[int, msgspec.Meta(ge=65_536, le=1024 * _MIB)] = 16 * _MIB
    """What may wait for one peer that does not read; beyond it the socket is closed with 1013, and so is one that has taken nothing
    for a whole ``ping_interval_s``. Endpoints have lower bounds of their own."""
    read_buffer_bytes: Annotated[int, msgspec.Meta(ge=2_048, le=_MIB)] = 2_048
    """What a socket reserves for reading at first; it grows up to the longest message."""
    held_messages_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Messages that came in with one read after a door paused its reading; more close the socket with 1008."""
    head_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=_MIB)] = 65_536
    """A longer head of a request is answered with 431."""
    head_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """How long a peer may take to send a request's head, from its first byte or from connecting; then it is cut."""
    body_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 60.0
    """How long a peer may take to send a request's body."""
    answer_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 60.0
    """How long a peer may take to read an answer; then it is cut."""
    keep_alive_s: Annotated[int, msgspec.Meta(ge=1, le=3_600)] = 30
    """How long an idle HTTP connection stays open."""
    ping_interval_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 30.0
    """A socket that was silent for so long is pinged; one that stays silent as long again is cut."""
    close_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 3.0
    """How long a peer may take to answer a close before it is cut."""

    dispatch_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 512
    """Records handed to the doors at once."""
    dispatch_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=64 * _MIB)] = _MIB
    """About how many bytes of them."""
    dispatch_lag_max: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Committed records not handed out yet; with more the node is not ready."""

    drain_delay_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """How long a stopping node still serves after ``/readyz`` went red, for a balancer to notice."""
    stop_deadline_s: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 20.0
    """Stopping takes at most about so long; then what is still open is cut."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    access_log: bool = True
    """A line for each HTTP request."""
    metrics_without_token: Literal["always", "loopback", "never"] = "loopback"
    """Who may see ``/metrics`` without a token: it names topics and groups. With one, whoever may read the node."""
    metrics_series_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Topics, and groups, with series of their own in ``/metrics``; the rest is counted together."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """A certificate without its key, or a key without its certificate."""
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            missing = "tls_cert_file" if self.tls_cert_file is None else "tls_key_file"
            yield missing, "certificate and key are given together or not at all"


class NodeSettings(Settings, frozen=True, kw_only=True):
    """Everything about one node, a section a part."""

    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    bus: BusSettings = BusSettings()
    access: AccessSettings = AccessSettings()
    api: ApiSettings = ApiSettings()
    groups: GroupsSettings = GroupsSettings()
    sync: SyncSettings = SyncSettings()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Sections that contradict each other."""
        if self.sync.message_bytes_max > self.server.message_bytes_max:
            yield "sync.message_bytes_max", "is above server.message_bytes_max, which cuts messages first"
