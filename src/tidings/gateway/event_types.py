"""
The event types there are: who may tell of each, what its summary holds, and who may see it.

The node's own are the table below. Those of apps come and go with their apps. The field list of a type never changes once it was declared, not
even while its app is away: other fields take a new version of the name, and the older one stays valid beside it. A type leaves the table only
with a new release of the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from tidings.access.visibility import Audience

from .constants import APP_EVENT_TYPES_MAX, APP_SOURCES_MAX, SUMMARY_KEYS_MAX
from .errors import DeclarationRefused, InvalidDescriptor
from .names import EventClass, channel_of, check_event_name, class_of

APP_MANAGER: Final = "app_manager"
AUTH_MANAGER: Final = "auth_manager"
CONFIG_MANAGER: Final = "config_manager"
DOS_GUARD_MANAGER: Final = "dos_guard_manager"
EVENT_MANAGER: Final = "event_manager"
"""The gateway itself."""
GRAPH_MANAGER: Final = "graph_manager"
"""What tells of committed records."""
HEALTH_MANAGER: Final = "health_manager"
LOG_MANAGER: Final = "log_manager"
"""The audit log."""
NETWORK_MANAGER: Final = "network_manager"

SOURCE_MANAGERS: Final = frozenset(
    {
        APP_MANAGER,
        AUTH_MANAGER,
        CONFIG_MANAGER,
        DOS_GUARD_MANAGER,
        EVENT_MANAGER,
        GRAPH_MANAGER,
        HEALTH_MANAGER,
        LOG_MANAGER,
        NETWORK_MANAGER,
    }
)
CLASS_SOURCES: Final = {
    EventClass.GRAPH: frozenset({GRAPH_MANAGER}),
    EventClass.SYSTEM: frozenset({CONFIG_MANAGER, APP_MANAGER, HEALTH_MANAGER, LOG_MANAGER, EVENT_MANAGER}),
    EventClass.NETWORK: frozenset({NETWORK_MANAGER, DOS_GUARD_MANAGER}),
    EventClass.SECURITY: frozenset({AUTH_MANAGER, DOS_GUARD_MANAGER, LOG_MANAGER, EVENT_MANAGER, HEALTH_MANAGER}),
}
"""Which managers may tell of a class at all. An app's events are the app's."""

SCOPE_KEYS: Final = frozenset({"app_id", "domain_id", "requester_identity_id", "peer_identity_id"})
FORBIDDEN_FIELDS: Final = frozenset(
    {
        "address",
        "body",
        "endpoint",
        "envelope",
        "ops",
        "payload",
        "private_key",
        "secret",
        "signature",
        "token",
        "value",
        "value_json",
    }
)
"""Names under which contents and secrets travel: no summary has them, whoever declares it."""
_SECRETS: Final = re.compile(r"(.+_)?(api_key|credentials?|passphrase|password|private_key|secret|token)")
"""Names that are about a secret, as ``access_token``: nobody declares them."""

_CLASS_ANCHORS: Final = {
    EventClass.GRAPH: frozenset({"app_id", "domain_id", "requester_identity_id"}),
    EventClass.SYSTEM: frozenset({"app_id", "domain_id"}),
    EventClass.NETWORK: frozenset({"peer_identity_id"}),
    EventClass.SECURITY: frozenset({"app_id", "domain_id", "requester_identity_id"}),
}
_CLASS_AUDIENCES: Final = {
    EventClass.GRAPH: Audience.READERS,
    EventClass.SYSTEM: Audience.ADMINISTRATORS,
    EventClass.NETWORK: Audience.OBSERVERS,
    EventClass.SECURITY: Audience.ADMINISTRATORS,
}


class EventDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """An event type, as its owner declares it before the first such event."""

    event_type: str
    event_class: EventClass
    sources: frozenset[str]
    fields: frozenset[str]
    """What every summary has."""
    optional_fields: frozenset[str] = frozenset()
    """What one may have beside that: whoever reads it can rely on nothing else coming."""
    scope_anchors: frozenset[str]
    """The keys that the scope of such an event may have."""
    audience: Audience
    is_object_scoped: bool = False
    """Whether a subscription may be for some objects only: then every summary has ``object_ids``."""
    is_deprecated: bool = False
    """Still told, and to be replaced by a newer version."""


def app_declaration(
    event_type: str,
    *,
    slug: str,
    fields: Iterable[str],
    optional_fields: Iterable[str] = (),
    scope_anchors: Iterable[str] = ("app_id", "domain_id"),
    audience: Audience = Audience.READERS,
    is_object_scoped: bool = False,
    is_deprecated: bool = False,
) -> EventDeclaration:
    """
    The declaration of an app's event type.

    Raises:
        DeclarationRefused: The name is not the app's, or breaks the grammar; or a field or anchor is none that an app may have.
    """
    declaration = EventDeclaration(
        event_type=event_type,
        event_class=EventClass.APP,
        sources=frozenset({f"app.{slug}"}),
        fields=frozenset(fields),
        optional_fields=frozenset(optional_fields),
        scope_anchors=frozenset(scope_anchors),
        audience=audience,
        is_object_scoped=is_object_scoped,
        is_deprecated=is_deprecated,
    )
    _check(declaration)
    return declaration


class EventDeclarations:
    """
    Every type that may be told of now.

    Args:
        node: The node's own types.
    """

    def __init__(self, node: Iterable[EventDeclaration] | None = None) -> None:
        self._active: dict[str, EventDeclaration] = {}
        self._known: dict[str, EventDeclaration] = {}
        self._sources: dict[str, set[str]] = {}
        for declaration in NODE_DECLARATIONS if node is None else node:
            _check(declaration)
            self._active[declaration.event_type] = self._known[declaration.event_type] = declaration

    def get(self, event_type: str) -> EventDeclaration | None:
        """The declaration of a type, if such events may be told now."""
        return self._active.get(event_type)

    def is_app_source(self, source: str) -> bool:
        """Whether an app has declared types, and has them now."""
        return source in self._sources

    def of_channel(self, channel: str) -> list[EventDeclaration]:
        """The types of a channel, by name."""
        return [self._active[name] for name in sorted(self._active) if channel_of(name) == channel]

    def declare(self, declaration: EventDeclaration) -> None:
        """
        Add an app's type. The same declaration again changes nothing; one may become deprecated.

        Raises:
            DeclarationRefused: It is the node's, breaks a rule, or the type was declared before with other fields.
        """
        _check(declaration)
        name = declaration.event_type
        if declaration.event_class is not EventClass.APP:
            raise DeclarationRefused(name, "the node's own types come with the node")
        known = self._known.get(name)
        if known is not None and known != msgspec.structs.replace(declaration, is_deprecated=known.is_deprecated):
            raise DeclarationRefused(name, "was declared before, with other fields, anchors or another audience")
        (source,) = declaration.sources
        if known is None:
            if sum(source in each.sources for each in self._known.values()) >= APP_EVENT_TYPES_MAX:
                raise DeclarationRefused(
                    name, f"{source} has declared {APP_EVENT_TYPES_MAX} types, which is all that an app may"
                )
            if source not in self._sources and len(self._sources) >= APP_SOURCES_MAX:
                raise DeclarationRefused(name, f"{APP_SOURCES_MAX} apps have declared types, which is all that may")
        self._known[name] = self._active[name] = declaration
        self._sources.setdefault(source, set()).add(name)

    def withdraw(self, source: str) -> None:
        """An app is away: nobody tells of its types until they are declared again, as they were."""
        for name in self._sources.pop(source, ()):
            del self._active[name]


def _check(declaration: EventDeclaration) -> None:
    name = declaration.event_type
    try:
        check_event_name(name)
    except InvalidDescriptor as error:
        raise DeclarationRefused(name, error.problem) from error
    channel, fields = channel_of(name), declaration.fields | declaration.optional_fields
    problem = None
    if class_of(channel) is not declaration.event_class:
        problem = f"does not begin with its class, {declaration.event_class}"
    elif declaration.event_class is EventClass.APP and declaration.sources != {channel}:
        problem = (
            f"is told by {', '.join(sorted(declaration.sources))}, and an app's names begin with its own app.<slug>"
        )
    elif not declaration.sources <= CLASS_SOURCES.get(declaration.event_class, declaration.sources):
        problem = "has a source that may not tell of its class"
    elif len(fields) > SUMMARY_KEYS_MAX or declaration.fields & declaration.optional_fields:
        problem = f"has a field twice, or more than {SUMMARY_KEYS_MAX}"
    elif refused := sorted(each for each in fields if _is_forbidden(each)):
        problem = (
            f"fields {', '.join(map(repr, refused))}: contents and secrets are not told, and names are lower snake case"
        )
    elif not declaration.scope_anchors <= SCOPE_KEYS:
        problem = f"anchors are among {', '.join(sorted(SCOPE_KEYS))}"
    elif declaration.event_class is EventClass.APP and "app_id" not in declaration.scope_anchors:
        problem = "an app's events are anchored to their app: app_id is among the anchors"
    elif declaration.event_class is EventClass.APP and declaration.audience not in (Audience.READERS, Audience.APP):
        problem = "an app's events are for those who may read what they tell of, or for the app"
    elif declaration.is_object_scoped and "object_ids" not in declaration.fields:
        problem = "can be subscribed to by objects, and does not name any: object_ids is among the fields"
    if problem is not None:
        raise DeclarationRefused(name, problem)


def _is_forbidden(name: str) -> bool:
    is_name = class_of(f"app.{name}") is not None and len(name) <= 64
    return not is_name or name in FORBIDDEN_FIELDS or _SECRETS.fullmatch(name) is not None


def _own(name: str, sources: str | tuple[str, ...], fields: str = "", optional: str = "") -> EventDeclaration:
    event_class = EventClass(channel_of(name))
    always = {EventClass.GRAPH: (), EventClass.SYSTEM: ("count", "node_id")}.get(event_class, ("count",))
    return EventDeclaration(
        event_type=name,
        event_class=event_class,
        sources=frozenset({sources} if isinstance(sources, str) else sources),
        fields=frozenset((*fields.split(), *always)),
        optional_fields=frozenset(optional.split()),
        scope_anchors=_CLASS_ANCHORS[event_class],
        audience=_CLASS_AUDIENCES[event_class],
        is_object_scoped=event_class is EventClass.GRAPH,
    )


_GRAPH_FIELDS: Final = ("object_ids", "op_kinds op_count owner_identity_id part parts space_id")
_SUBSCRIPTION_FIELDS: Final = ("connection_id", "reason")

NODE_DECLARATIONS: Final = (
    _own("graph.object_mutated", GRAPH_MANAGER, *_GRAPH_FIELDS),
    _own("graph.acl_changed", GRAPH_MANAGER, *_GRAPH_FIELDS),
    _own("graph.rating_changed", GRAPH_MANAGER, *_GRAPH_FIELDS),
    _own("system.app_state_changed", APP_MANAGER, "app state"),
    _own("system.config_changed", CONFIG_MANAGER, "cfg_seq keys"),
    _own("system.config_rejected", CONFIG_MANAGER, "keys owner reason"),
    _own("system.event_config_applied", EVENT_MANAGER, "keys"),
    _own("system.event_config_rejected", EVENT_MANAGER, "keys reason"),
    _own("system.event_descriptor_rejected", EVENT_MANAGER, "source error"),
    _own("system.event_pipeline_degraded", EVENT_MANAGER, "reasons"),
    _own("system.event_pipeline_recovered", EVENT_MANAGER, "reasons"),
    _own("system.event_queue_overflow", EVENT_MANAGER, "classes"),
    _own("system.health_state_changed", HEALTH_MANAGER, "component state reasons previous_state health_seq"),
    _own("system.log_record_created", LOG_MANAGER, "record_id"),
    _own("network.delivery_failed", NETWORK_MANAGER, "connection_id path reason"),
    _own("network.peer_admitted", NETWORK_MANAGER, "connection_id path"),
    _own("network.peer_denied", DOS_GUARD_MANAGER, "reason ttl_ms"),
    _own("network.peer_dropped", NETWORK_MANAGER, "connection_id path reason"),
    _own("security.admin_action", AUTH_MANAGER, "action result"),
    _own("security.audience_binding_failed", EVENT_MANAGER, "reason"),
    _own("security.authentication_failed", AUTH_MANAGER, "reason path"),
    _own("security.cross_app_violation", EVENT_MANAGER, "source"),
    _own("security.dos_abuse_detected", DOS_GUARD_MANAGER, "kind offences window_ms"),
    _own(
        "security.dos_directive_applied",
        DOS_GUARD_MANAGER,
        "directive_id decision outcome target_kind ttl_ms reason closed",
    ),
    _own("security.health_degraded", HEALTH_MANAGER, "component state reasons"),
    _own("security.log_alert", LOG_MANAGER, "record_id"),
    _own("security.resume_accepted", EVENT_MANAGER, *_SUBSCRIPTION_FIELDS),
    _own("security.resume_refused", EVENT_MANAGER, *_SUBSCRIPTION_FIELDS),
    _own("security.subscription_closed", EVENT_MANAGER, *_SUBSCRIPTION_FIELDS),
    _own("security.subscription_dropped", EVENT_MANAGER, *_SUBSCRIPTION_FIELDS),
    _own("security.subscription_opened", EVENT_MANAGER, *_SUBSCRIPTION_FIELDS),
    _own("security.subscription_rejected", EVENT_MANAGER, *_SUBSCRIPTION_FIELDS),
)
"""The node's own types. The fields of a released one do not change; other fields take another version."""
