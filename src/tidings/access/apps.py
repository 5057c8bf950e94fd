"""
The app registry: which apps there are, which events of their own they tell of, and who else may hear those; folded from the topic ``apps``.

An app is named by its slug. ``system`` is the node's own, and the node's default app is always there too; the others are registered by an
administrator. Everything the registry knows is a record of the log, so a node that starts again knows the same.

An event type of an app is made of records: every committed record of the app that is in the type's topic (and of its record type) is told
of as one event, with those fields of its payload that were declared. Its field list is frozen: whoever needs other fields declares a new version, as
``app.contacts.message_created.v2``.

The registry never waits and never raises over a record. One that cannot be read registers nothing; one that might have taken something away
disables the app it names, or, if not even that is legible, all of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.names import check_topic, check_type
from tidings.core.validation import explain
from tidings.log.interface import Log, Query
from tidings.log.reading import records
from tidings.log.record import Record

from .announcements import SYSTEM_APP, Announcer
from .audit import AUDIT_TOPIC
from .errors import InvalidApp, UnknownApp

logger = logging.getLogger(__name__)

APPS_TOPIC: Final = "apps"

_SLUG: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_APPS_MAX: Final = 1_000
_EVENT_TYPES_MAX: Final = 256
"""Of one app."""
_CHANNELS_MAX: Final = 1_000
Slug = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
ScopeAnchor = Literal["domain_id", "requester_identity_id"]


class _AppChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class AppRegistered(_AppChange, frozen=True, tag="app.registered"):
    """From here on there is this app; registering it again changes title and version."""

    slug: Slug
    title: Annotated[str, msgspec.Meta(max_length=256)] = ""
    version: Annotated[str, msgspec.Meta(max_length=64)] = ""


class AppEnabled(_AppChange, frozen=True, tag="app.enabled"):
    """From here on the app may be used, or may not."""

    slug: Slug
    is_enabled: bool


class AppRemoved(_AppChange, frozen=True, tag="app.removed"):
    """From here on there is no such app, nor its event types and channels."""

    slug: Slug


class AppEventType(_AppChange, frozen=True, tag="app.event_type_declared"):
    """An event of an app: from here on it may be told of."""

    slug: Slug
    event_type: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """``app.<slug>.<name>``, and a last part ``v2`` and so on for later versions."""
    topic: str
    """The records that it is made of: those of this topic,"""
    record_type: str | None = None
    """and of this type, if one is named."""
    scope_anchors: tuple[ScopeAnchor, ...] = ("domain_id",)
    """What events of this type are bound to, beside the app: the topic; whoever published the record, who then is the only one to see it."""
    payload_fields: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)] = ()
    """What every event of this type says; a record that lacks one of these is not told of."""
    optional_fields: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)] = ()
    """What an event of this type may say."""
    is_object_scoped: bool = False
    """Whether subscribers may ask for objects; the events then say ``object_ids``, as the record names them."""
    audience: Literal["acl", "app"] = "acl"
    """Who may see it: who may read the record, or everybody of the app."""


class EventTypeWithdrawn(_AppChange, frozen=True, tag="app.event_type_withdrawn"):
    """From here on the event is not told of any more. Its name is not free again."""

    slug: Slug
    event_type: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class CrossAppChannel(_AppChange, frozen=True, tag="app.channel_registered"):
    """From here on these apps may subscribe to events of another one, as far as the rights of each subscriber go."""

    channel: Slug
    owner_app_id: Slug
    reader_app_ids: Annotated[tuple[Slug, ...], msgspec.Meta(min_length=1, max_length=64)]
    domain_ids: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
    acl_validated: bool = False
    """Set by the node, when the access book has let whoever registers the channel read all its topics. Without it the channel gives nothing."""


class ChannelRemoved(_AppChange, frozen=True, tag="app.channel_removed"):
    """From here on the channel gives nothing any more."""

    channel: Slug


AppChange = (
    AppRegistered | AppEnabled | AppRemoved | AppEventType | EventTypeWithdrawn | CrossAppChannel | ChannelRemoved
)
_ANY_CHANGE: Final[Any] = AppChange
_TYPES: Final = frozenset(str(kind.__struct_config__.tag) for kind in AppChange.__args__)
_TAKES_AWAY: Final = frozenset({"app.enabled", "app.removed", "app.event_type_withdrawn", "app.channel_removed"})


class App(msgspec.Struct, frozen=True, kw_only=True):
    """An app as it is registered."""

    slug: str
    title: str = ""
    version: str = ""
    is_enabled: bool = True
    seq: int = 0
    """The last record about it."""
    event_types: dict[str, AppEventType] = {}
    withdrawn: dict[str, AppEventType] = {}
    """Event types that were declared once; their names are not declared again with other fields."""


def event_of(change: AppChange, *, actor: str) -> Event:
    """The event that puts a change into force once it is committed."""
    payload: dict[str, Any] = msgspec.to_builtins(change)
    return Event(EventMeta(APPS_TOPIC, str(payload["type"]), "system", actor=actor), payload)


class AppRegistry:
    """
    The apps, as of the last record of the topic ``apps``.

    Args:
        default_app: The app of records that name none; always there.
        check_declaration: Raises a ``TidingsError`` if there may be no such event type: name, fields and anchors have the gateway's rules.
    """

    def __init__(
        self, default_app: str = "default", check_declaration: Callable[[AppEventType], object] = lambda _: None
    ) -> None:
        self.default_app = default_app
        self._check_declaration = check_declaration
        self.seq = 0
        """The last record applied."""
        self.version = 0
        """Counts what can change an answer."""
        self.announcer = Announcer("app_manager")
        self.on_change: list[Callable[[AppChange], None]] = []
        """Each is called when a change is in force."""
        self.problems: list[str] = []
        self.changing: Final = asyncio.Lock()
        """Held by whoever checks a change, until that is applied."""
        self._fixed = frozenset({SYSTEM_APP, default_app})
        self._apps: dict[str, App] = {slug: App(slug=slug) for slug in sorted(self._fixed)}
        self._channels: dict[str, CrossAppChannel] = {}
        self._taken: dict[str, dict[str, AppEventType]] = {}
        """Event types of apps that were removed: whoever registers such an app again cannot give their names other fields."""
        self._by_topic: dict[str, list[AppEventType]] = {}
        self._is_lost = False

    # What others ask

    def apps(self) -> list[App]:
        """All of them, by slug."""
        return [self._apps[slug] for slug in sorted(self._apps)]

    def channels(self) -> list[CrossAppChannel]:
        """All of them, by name."""
        return [self._channels[name] for name in sorted(self._channels)]

    def is_enabled(self, slug: str) -> bool:
        """Whether there is such an app, and it may be used."""
        app = self._apps.get(slug)
        return app is not None and (slug in self._fixed or (app.is_enabled and not self._is_lost))

    def require(self, slug: str) -> App:
        """
        An app that may be used.

        Raises:
            UnknownApp: There is none of that name.
        """
        if not self.is_enabled(slug):
            raise UnknownApp(slug[:100])
        return self._apps[slug]

    def event_types_of(self, topic: str, record_type: str, app: str | None) -> list[AppEventType]:
        """The event types that a record of this topic, type and app is told of as: those of its own app, while that is enabled."""
        slug = app or self.default_app
        return [
            each
            for each in self._by_topic.get(topic, ())
            if each.slug == slug and each.record_type in (None, record_type) and self.is_enabled(slug)
        ]

    def readable_domains(self, reader: str, owner: str) -> frozenset[str]:
        """The topics of another app that subscribers of an app may ask for, by registered and validated channels."""
        if not self.is_enabled(reader) or not self.is_enabled(owner):
            return frozenset()
        return frozenset(
            domain
            for each in self._channels.values()
            if each.acl_validated and each.owner_app_id == owner and reader in each.reader_app_ids
            for domain in each.domain_ids
        )

    # What administrators change

    def check(self, change: AppChange) -> None:
        """
        Make sure that a change can be made: call this before appending ``event_of`` it.

        Raises:
            InvalidApp: A part of it makes no sense, or there is no room.
            DeclarationRefused: There may be no such event type.
            UnknownApp: It is about an app that there is not.
        """
        match change:
            case AppRegistered(slug=slug):
                _check_slug("slug", slug)
                if slug not in self._apps and len(self._apps) >= _APPS_MAX:
                    raise InvalidApp("slug", f"there are {_APPS_MAX} apps already")
            case AppEnabled(slug=slug) | AppRemoved(slug=slug):
                self._known(slug)
                if slug in self._fixed:
                    raise InvalidApp("slug", f"{slug!r} is always there")
            case AppEventType():
                self._check_event_type(change)
            case EventTypeWithdrawn(slug=slug, event_type=name):
                if name not in self._known(slug).event_types:
                    raise InvalidApp("event_type", f"there is no event type {name!r}")
            case CrossAppChannel():
                self._check_channel(change)
            case ChannelRemoved(channel=channel):
                if channel not in self._channels:
                    raise InvalidApp("channel", f"there is no channel {channel!r}")

    def _known(self, slug: str) -> App:
        app = self._apps.get(slug)
        if app is None:
            raise UnknownApp(slug[:100])
        return app

    def _check_event_type(self, change: AppEventType) -> None:
        app, name = self._known(change.slug), change.event_type
        self._check_declaration(change)
        if change.topic == AUDIT_TOPIC:
            raise InvalidApp("topic", "events that are not told are on record there: telling of it would never end")
        try:
            check_topic(change.topic)
            if change.record_type is not None:
                check_type(change.record_type)
        except InvalidEvent as error:
            raise InvalidApp("topic", error.problem, error.hint) from error
        before = app.event_types.get(name) or app.withdrawn.get(name)
        if before is not None and before != change:
            raise InvalidApp("event_type", f"{name!r} is declared, and frozen", "declare a new version, as NAME.v2")
        if before is None and len(app.event_types) + len(app.withdrawn) >= _EVENT_TYPES_MAX:
            raise InvalidApp("event_type", f"the app has {_EVENT_TYPES_MAX} event types already")

    def _check_channel(self, change: CrossAppChannel) -> None:
        _check_slug("channel", change.channel)
        for slug in (change.owner_app_id, *change.reader_app_ids):
            self._known(slug)
        if change.owner_app_id in change.reader_app_ids:
            raise InvalidApp("reader_app_ids", "the owner reads its own events anyway")
        for domain in change.domain_ids:
            try:
                check_topic(domain)
            except InvalidEvent as error:
                raise InvalidApp("domain_ids", error.problem, error.hint) from error
        if change.channel not in self._channels and len(self._channels) >= _CHANNELS_MAX:
            raise InvalidApp("channel", f"there are {_CHANNELS_MAX} channels already")

    # What the dispatcher calls

    def committed(self, records: Sequence[Record]) -> None:
        """Apply those of the records that are about apps; the dispatcher's way in."""
        for record in records:
            if record.topic == APPS_TOPIC:
                self.apply(record)

    def apply(self, record: Record) -> None:
        """Take one record into account. One that was applied before is passed over; none makes this raise."""
        if record.seq <= self.seq:
            return
        self.seq = record.seq
        self.version += 1
        try:
            change: AppChange = msgspec.json.decode(record.payload_json, type=_ANY_CHANGE)
        except (msgspec.DecodeError, TidingsError) as error:
            self._assume_the_worst(record, error)
            return
        try:
            self.check(change)
        except TidingsError as error:
            # What it says is legible, and takes nothing away that is there.
            self._note(record, error)
            return
        self._carry_out(change, record.seq)
        self._by_topic = {}
        for app in self._apps.values():
            for each in app.event_types.values():
                self._by_topic.setdefault(each.topic, []).append(each)
        for listener in list(self.on_change):
            listener(change)
        self._tell(change)

    def _carry_out(self, change: AppChange, seq: int) -> None:
        replace = msgspec.structs.replace
        match change:
            case AppRegistered(slug=slug, title=title, version=version):
                before = self._apps.get(slug) or App(slug=slug, withdrawn=self._taken.pop(slug, {}))
                self._apps[slug] = replace(before, title=title, version=version, seq=seq)
            case AppEnabled(slug=slug, is_enabled=is_enabled):
                self._apps[slug] = replace(self._apps[slug], is_enabled=is_enabled, seq=seq)
            case AppRemoved(slug=slug):
                removed = self._apps.pop(slug)
                self._taken[slug] = {**removed.withdrawn, **removed.event_types}
                self._channels = {
                    name: each
                    for name, each in self._channels.items()
                    if slug != each.owner_app_id and slug not in each.reader_app_ids
                }
            case AppEventType(slug=slug, event_type=name):
                app = self._apps[slug]
                withdrawn = {key: each for key, each in app.withdrawn.items() if key != name}
                types = {**app.event_types, name: change}
                self._apps[slug] = replace(app, event_types=types, withdrawn=withdrawn, seq=seq)
            case EventTypeWithdrawn(slug=slug, event_type=name):
                app = self._apps[slug]
                types = {key: each for key, each in app.event_types.items() if key != name}
                withdrawn = {**app.withdrawn, name: app.event_types[name]}
                self._apps[slug] = replace(app, event_types=types, withdrawn=withdrawn, seq=seq)
            case CrossAppChannel(channel=channel):
                self._channels[channel] = change
            case ChannelRemoved(channel=channel):
                del self._channels[channel]

    def _tell(self, change: AppChange) -> None:
        state = str(change.__struct_config__.tag).removeprefix("app.")
        if isinstance(change, AppEnabled) and not change.is_enabled:
            state = "disabled"
        app: str = getattr(change, "slug", "") or getattr(change, "owner_app_id", SYSTEM_APP)
        self.announcer.tell("system.app_state_changed", {"app": app, "state": state})

    def _note(self, record: Record, error: Exception) -> None:
        problem = f"app record at seq {record.seq} ({record.meta.type}): {_explained(error)}"
        logger.error("%s", problem)
        self.problems = [*self.problems[-99:], problem]

    def _assume_the_worst(self, record: Record, error: Exception) -> None:
        kind = record.meta.type
        self._note(record, error)
        if kind in _TYPES - _TAKES_AWAY or not kind.startswith("app."):
            return
        slug = _legible_slug(record)
        if slug is None:
            self._is_lost = True
        elif slug in self._apps:
            self._apps[slug] = msgspec.structs.replace(self._apps[slug], is_enabled=False, seq=record.seq)
        for listener in list(self.on_change):
            listener(AppEnabled(slug=slug or SYSTEM_APP, is_enabled=False))


def _check_slug(field: str, slug: str) -> None:
    if _SLUG.fullmatch(slug) is None:
        raise InvalidApp(
            field,
            f"{slug[:100]!r} is no name",
            "1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit",
        )


def _explained(error: Exception) -> str:
    return explain(error, "payload")[0] if isinstance(error, msgspec.ValidationError) else str(error)


def _legible_slug(record: Record) -> str | None:
    try:
        payload = msgspec.json.decode(record.payload_json)
    except (msgspec.DecodeError, TidingsError):
        return None
    slug = payload.get("slug") if isinstance(payload, dict) else None
    return slug if isinstance(slug, str) else None


async def load_apps(
    log: Log, default_app: str = "default", check_declaration: Callable[[AppEventType], object] = lambda _: None
) -> AppRegistry:
    """
    The registry as of the last record in the log.

    Raises:
        EpochMismatch, CorruptLog, LogClosed: as for ``Log.read``.
    """
    registry = AppRegistry(default_app, check_declaration)
    async for record in records(log, Query(topic=APPS_TOPIC)):
        registry.apply(record)
    return registry
