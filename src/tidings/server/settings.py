"""
A node's settings: the structs of all parts, where their values come from, and which of them a running node can change.

Values come from defaults, a TOML file, the environment and the command line; each overrides those before it. This is the only module that
reads the environment. ``TIDINGS_SERVER__PORT=9000`` sets ``server.port``: a section, two underscores, a key; values that are lists or tables
are written as JSON. ``TIDINGS_JWT_SECRET`` (or ``TIDINGS_JWT_SECRET_FILE``, the name of a file that holds it) is the secret of the tokens.

Everything is decoded at once, before anything starts: a misspelt key is refused by its full path, with the name that was
probably meant. A secret's value is in no message and in no print-out.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import msgspec.inspect

from tidings.access.guard import GuardSettings
from tidings.access.settings import AccessSettings
from tidings.bus.settings import BusSettings
from tidings.core.errors import SettingsError
from tidings.core.settings import Settings, is_secret, settings_from
from tidings.gateway.settings import NOT_RELOADABLE, EventSettings
from tidings.log.settings import LogSettings
from tidings.schedule.settings import ScheduleSettings
from tidings.schedule.watches import WatchSettings
from tidings.steward.settings import NodeLedgerSettings, StewardSettings
from tidings.sync.settings import SyncSettings

from .group_settings import GroupsSettings


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the HTTP API."""

    events_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Events in one request; with more the request is refused as a whole, before anything is stored."""
    partitions_count_max: Annotated[int, msgspec.Meta(ge=64, le=1_000_000)] = 4_096
    """Different partitions that the events of one request may name; with more the request is refused as a whole."""
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
    """The lake that the pipeline writes for this workspace: a folder, or an address such as ``s3://bucket/lake``, for which keys and
    the like are taken from the environment. With it, what retention dropped from the log is read from there."""
    retention_interval_s: Annotated[float, msgspec.Meta(gt=0, le=86_400 * 7)] = 3_600.0
    """How often the rules of ``log.retention`` are applied. Without such rules nothing is ever dropped."""
    default_app: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)] = "default"
    """The app of records that name none; always registered."""
    key_set_file: str | None = None
    """A file with the JSON Web Key Set of ``access.tokens.key_set``; read again on SIGHUP."""

    origins: tuple[str, ...] = ()
    """Origins of web pages that may open sockets and send requests, as ``https://app.example``; ``*`` allows every one. A client
    that sends no origin is no web page and is let in: its token decides; and so are the node's own pages."""
    hosts: tuple[str, ...] = ()
    """Names by which the node is reached, as ``bus.example``, beside its addresses and ``localhost``. With any of them, and always
    where access is open, a request for another name is refused with 421."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies, as ``10.0.0.0/8``: of what comes from them the address is the rightmost one of ``X-Forwarded-For``
    that is not theirs, for every limit and directive by address, and for the log."""
    connections_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Open sockets over all endpoints; one more is refused with 503."""
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
    front is one address: name it in ``trusted_proxies``."""
    message_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=64 * _MIB)] = 2 * _MIB
    """A longer message on a socket closes it with 1009."""
    body_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1024 * _MIB)] = 16 * _MIB
    """A longer body of a request is answered with 413."""
    write_buffer_bytes_max: Annotated[int, msgspec.Meta(ge=65_536, le=1024 * _MIB)] = 16 * _MIB
    """What may wait for one peer that does not read; beyond it the socket is closed with 1013, and so is one that has taken nothing
    for a whole ``ping_interval_s``. Endpoints have lower bounds of their own."""
    memory_bytes_max: Annotated[int, msgspec.Meta(ge=_MIB, le=1 << 40)] = 512 * _MIB
    """What all clients with a token together may make the node hold: bodies of requests, unread input, publishes that wait. More is
    refused with 503, or closes the socket with 1013."""
    memory_bytes_per_connection_max: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 40)] = 64 * _MIB
    """The same for one connection."""
    memory_bytes_per_identity_max: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 40)] = 256 * _MIB
    """The same for all connections of one identity."""
    memory_bytes_per_address_max: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 40)] = 256 * _MIB
    """The same for all connections with a token from one address."""
    unauthenticated_memory_bytes_max: Annotated[int, msgspec.Meta(ge=65_536, le=64 * _MIB)] = 32 * _MIB
    """What all clients without a token together may make the node hold; those of one address half of it."""
    read_buffer_bytes: Annotated[int, msgspec.Meta(ge=2_048, le=_MIB)] = 2_048
    """What a socket reserves for reading at first; it grows up to the longest message."""
    held_messages_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Messages that came in with one read after an endpoint paused its reading; more close the socket with 1008."""
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

    dispatch_interval_s: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.005
    """Endpoints are told of a commit at once, and then at most so often: what comes in between is told together, in one write for each socket."""
    dispatch_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 512
    """Records given to the endpoints at once."""
    dispatch_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=64 * _MIB)] = _MIB
    """About how many bytes of them."""
    dispatch_lag_max: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Committed records not given to the endpoints yet; with more the node is not ready."""

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
        """A proxy that is no address; a certificate without its key, or a key without its certificate."""
        for name in self.trusted_proxies:
            try:
                ip_network(name, strict=False)
            except ValueError:
                yield "trusted_proxies", f"{name[:100]!r} is neither an address nor a network"
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            missing = "tls_cert_file" if self.tls_cert_file is None else "tls_key_file"
            yield missing, "certificate and key are given together or not at all"


class NodeSettings(Settings, frozen=True, kw_only=True):
    """Everything about one node, a section a part."""

    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    bus: BusSettings = BusSettings()
    access: AccessSettings = AccessSettings()
    guard: GuardSettings = GuardSettings()
    api: ApiSettings = ApiSettings()
    groups: GroupsSettings = GroupsSettings()
    sync: SyncSettings = SyncSettings()
    ledger: NodeLedgerSettings = NodeLedgerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    watches: WatchSettings = WatchSettings()
    steward: StewardSettings = StewardSettings()
    event: EventSettings = EventSettings()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Sections that contradict each other."""
        if self.sync.message_bytes_max > self.server.message_bytes_max:
            yield "sync.message_bytes_max", "is above server.message_bytes_max, which cuts messages first"


REDACTED: Final = "<secret>"
_PREFIX: Final = "TIDINGS_"
_CONFIG_BYTES_MAX: Final = 1 << 20
_FILE_BYTES_MAX: Final = 256 << 10
# Read by options of the command line, or by its environment; not settings of the node.
_NOT_SETTINGS: Final = frozenset(
    {"TIDINGS_WORKSPACE", "TIDINGS_KEY_FILE", "TIDINGS_TOKEN", "TIDINGS_CONFIG", "TIDINGS_URL"}
)


def load_settings(
    config_file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> NodeSettings:
    """
    A node's settings.

    Args:
        config_file: A TOML file with a table a section.
        environment: The variables to look at; the process's own if left out.
        overrides: Values by dotted path (``server.port``), as the command line gives them; ``None`` leaves a setting alone.
        defaults: Values by dotted path, for what neither the file nor the environment says.

    Raises:
        SettingsError: The file cannot be read, a key is unknown, or a value is out of its range.
    """
    tree = _from_file(config_file) if config_file is not None else {}
    shape = msgspec.inspect.type_info(NodeSettings)
    for path, text in _from_environment(os.environ if environment is None else environment):
        _put(tree, path, _parsed(text, _type_at(shape, path)))
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _put(tree, tuple(dotted.split(".")), value)
    for dotted, value in (defaults or {}).items():
        _put_if_missing(tree, tuple(dotted.split(".")), value)
    _refuse_unknown(tree, shape, ())
    _read_key_set(tree)
    return settings_from(NodeSettings, tree)


def printable(settings: NodeSettings) -> dict[str, Any]:
    """The settings as plain values for people and programs, without secrets."""
    plain: dict[str, Any] = _without_secrets(msgspec.to_builtins(settings))
    return plain


def changed_paths(old: NodeSettings, new: NodeSettings) -> list[str]:
    """The dotted paths of the settings that differ, in their order."""
    return list(_differences(old, new, ""))


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_CONFIG_BYTES_MAX + 1)
        if len(text) > _CONFIG_BYTES_MAX:
            raise SettingsError(str(path), f"is longer than {_CONFIG_BYTES_MAX} bytes")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise SettingsError(str(path), f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(str(path), "is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(str(path), f"is not TOML: {error}") from None


def _read_key_set(tree: dict[str, Any]) -> None:
    """Put the key set's file in the place of its text."""
    server = tree.get("server")
    path = server.get("key_set_file") if isinstance(server, dict) else None
    if isinstance(path, str):
        _put(tree, ("access", "tokens", "key_set"), _text_in(path, "server.key_set_file"))


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in _NOT_SETTINGS:
            continue
        value = environment[name]
        if name == "TIDINGS_JWT_SECRET":
            yield _JWT_SECRET, value
        elif name == "TIDINGS_JWT_SECRET_FILE":
            yield _JWT_SECRET, _text_in(value, name)
        elif "__" in name:
            yield tuple(part.lower() for part in name.removeprefix(_PREFIX).split("__")), value
        else:
            known = [*_NOT_SETTINGS, "TIDINGS_JWT_SECRET", "TIDINGS_JWT_SECRET_FILE", *_environment_names()]
            raise SettingsError(name, f"no such variable{_meant(name, known)}")


_JWT_SECRET: Final = ("access", "tokens", "secret")


def _text_in(path: str, setting: str) -> str:
    try:
        with open(path, "rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
        if len(text) > _FILE_BYTES_MAX:
            raise SettingsError(setting, f"{path}: is longer than {_FILE_BYTES_MAX} bytes")
        return text.decode().strip()
    except OSError as error:
        raise SettingsError(setting, f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise SettingsError(setting, f"{path}: is not UTF-8") from None


def _parsed(value: str, kind: msgspec.inspect.Type | None) -> object:
    """A value from the environment: JSON where the setting is a list or a table, text otherwise."""
    if isinstance(kind, _MANY) and value[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value


_MANY: Final = (
    msgspec.inspect.DictType,
    msgspec.inspect.ListType,
    msgspec.inspect.StructType,
    msgspec.inspect.VarTupleType,
)


def _type_at(kind: msgspec.inspect.Type, path: Sequence[str]) -> msgspec.inspect.Type | None:
    """The type of the setting at a path, as far as the path tells."""
    for part in path:
        match kind:
            case msgspec.inspect.StructType(fields=fields):
                found = next((field.type for field in fields if field.encode_name == part), None)
                if found is None:
                    return None
                kind = found
            case msgspec.inspect.DictType(value_type=value_type):
                kind = value_type
            case _:
                return None
    return kind


def _put(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    for depth, part in enumerate(path[:-1]):
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingsError(".".join(path[: depth + 1]), "is a section, and was given a single value")
        tree = inner
    tree[path[-1]] = value


def _put_if_missing(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    place: object = tree
    for part in path:
        place = place.get(part) if isinstance(place, dict) else None
    if place is None:
        _put(tree, path, value)


def _refuse_unknown(tree: object, kind: msgspec.inspect.Type, path: tuple[str, ...]) -> None:
    """Walk the given values along the settings' types; the first key that is no setting is refused by its path."""
    match kind:
        case msgspec.inspect.StructType(fields=fields) if isinstance(tree, dict):
            known = {field.encode_name: field.type for field in fields}
            for name, value in tree.items():
                if name not in known:
                    raise SettingsError(".".join((*path, str(name))), f"no such setting{_meant(name, known)}")
                _refuse_unknown(value, known[name], (*path, name))
        case msgspec.inspect.DictType(value_type=value_type) if isinstance(tree, dict):
            for name, value in tree.items():
                _refuse_unknown(value, value_type, (*path, str(name)))
        case msgspec.inspect.UnionType(types=types):
            for each in types:
                if isinstance(each, msgspec.inspect.StructType | msgspec.inspect.DictType):
                    _refuse_unknown(tree, each, path)
        case _:
            pass


def _meant(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _environment_names() -> Iterator[str]:
    described = msgspec.inspect.type_info(NodeSettings)
    assert isinstance(described, msgspec.inspect.StructType)
    for section in described.fields:
        if isinstance(section.type, msgspec.inspect.StructType):
            for field in section.type.fields:
                yield f"{_PREFIX}{section.name.upper()}__{field.name.upper()}"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: REDACTED if inner and is_secret(name) else _without_secrets(inner) for name, inner in value.items()
        }
    return value


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, msgspec.Struct) and type(old) is type(new):
        for name in old.__struct_fields__:
            yield from _differences(getattr(old, name), getattr(new, name), f"{path}.{name}".lstrip("."))
    elif old != new:
        yield path


RELOADABLE: Final = (
    *("origins", "hosts", "trusted_proxies"),
    *("connections_max", "connections_per_address_max", "requests_per_address_max"),
    *("unauthenticated_max", "unauthenticated_per_address_max", "unauthenticated_timeout_s"),
    *("unauthenticated_bytes_max", "unauthenticated_messages_max", "messages_per_s_max", "control_frames_per_s_max"),
    *("message_bytes_max", "body_bytes_max"),
    *(
        "memory_bytes_max",
        "memory_bytes_per_connection_max",
        "memory_bytes_per_identity_max",
        "memory_bytes_per_address_max",
    ),
    *("unauthenticated_memory_bytes_max",),
    *("write_buffer_bytes_max", "held_messages_max", "ping_interval_s", "close_timeout_s", "dispatch_lag_max"),
    "dispatch_interval_s",
    *("drain_delay_s", "stop_deadline_s", "log_level", "access_log", "key_set_file", "tls_cert_file", "tls_key_file"),
)
"""The fields of ``server`` that take effect without a restart."""


class Reload(msgspec.Struct, frozen=True):
    """What a reload changes."""

    settings: NodeSettings
    """The settings from now on."""
    applied: tuple[str, ...]
    """The paths of the settings that changed."""
    kept: tuple[str, ...]
    """The paths of the settings that differ and need a restart."""


def with_values(settings: NodeSettings, values: Mapping[str, Any]) -> NodeSettings:
    """
    The settings with some of them replaced.

    Args:
        values: By dotted path. ``None`` is a value.

    Raises:
        SettingsError: One is unknown, a whole section, out of its range, or a secret: those come by a file or the environment only.
    """
    tree = msgspec.to_builtins(settings)
    for path, value in values.items():
        if is_secret(path):
            raise SettingsError(path, "is a secret", "give it to the node by a file or its environment")
        kind = _type_at(msgspec.inspect.type_info(NodeSettings), path.split("."))
        kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
        if any(isinstance(each, msgspec.inspect.StructType) for each in kinds) or "." not in path:
            # A section as a whole could hold a secret, or leave one out.
            raise SettingsError(path, "is not a setting", "write section.name, as in event.delivery.max_msgs_per_sec")
        if path == "server.key_set_file":
            raise SettingsError(path, "is read at a start and on SIGHUP only", "name it in the file of settings")
        _put(tree, path.split("."), value)
    _refuse_unknown(tree, msgspec.inspect.type_info(NodeSettings), ())
    return settings_from(NodeSettings, tree, strict=True)


def _with_kept(old: EventSettings, new: EventSettings) -> EventSettings:
    tree, kept = msgspec.to_builtins(new), msgspec.to_builtins(old)
    for path in NOT_RELOADABLE:
        section, _, name = path.partition(".")
        tree[section][name] = kept[section][name]
    return msgspec.convert(tree, EventSettings)


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
        guard=new.guard,
        sync=new.sync,
        event=_with_kept(old.event, new.event),
    )
    return Reload(effective, tuple(changed_paths(old, effective)), tuple(changed_paths(effective, new)))
