"""The app registry is the fold of its records: what it cannot read registers nothing, and takes away."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.access.support import raw_record
from tidings.access.apps import (
    AppChange,
    AppEnabled,
    AppEventType,
    AppRegistered,
    AppRegistry,
    AppRemoved,
    ChannelRemoved,
    CrossAppChannel,
    EventTypeWithdrawn,
    event_of,
)
from tidings.access.errors import InvalidApp, UnknownApp
from tidings.log.record import Record

DECLARED = AppEventType(slug="contacts", event_type="app.contacts.sent", topic="messages", payload_fields=("n",))
CHANNEL = CrossAppChannel(
    channel="feed", owner_app_id="contacts", reader_app_ids=("social",), domain_ids=("messages",), acl_validated=True
)


def record(seq: int, kind: str, payload: object) -> Record:
    found = raw_record(seq, kind, {}, offset=seq - 1)
    meta = msgspec.structs.replace(found.meta, topic="apps")
    return Record.of(seq - 1, seq, meta, msgspec.Raw(msgspec.json.encode(payload)))


def registry(*changes: AppChange) -> AppRegistry:
    apps = AppRegistry()
    for seq, change in enumerate(changes, 1):
        event = event_of(change, actor="root")
        apps.committed([record(seq, str(event.meta.type), dict(event.payload))])
    return apps


def full() -> AppRegistry:
    return registry(AppRegistered(slug="contacts"), AppRegistered(slug="social"), DECLARED, CHANNEL)


def test_a_disabled_app_tells_nothing_reads_nothing_and_is_not_found() -> None:
    """Its event types, its channels and its subscribers are gone until it is enabled again."""
    apps = full()
    assert apps.event_types_of("messages", "X", "contacts") == [DECLARED]
    assert apps.readable_domains("social", "contacts") == {"messages"}
    for is_enabled in (False, True):
        change = event_of(AppEnabled(slug="contacts", is_enabled=is_enabled), actor="root")
        apps.apply(record(5 + is_enabled, "app.enabled", dict(change.payload)))

        assert apps.is_enabled("contacts") is is_enabled
        assert bool(apps.event_types_of("messages", "X", "contacts")) is is_enabled
        assert bool(apps.readable_domains("social", "contacts")) is is_enabled


def test_a_removed_app_takes_its_types_and_channels_along() -> None:
    """Registered again, it begins anew; only the names of its event types stay taken, with their fields."""
    apps = full()
    again: tuple[AppChange, ...] = (AppRemoved(slug="contacts"), AppRegistered(slug="contacts"))
    for seq, change in enumerate(again, 5):
        event = event_of(change, actor="root")
        apps.apply(record(seq, str(event.meta.type), dict(event.payload)))

    assert apps.is_enabled("contacts")
    assert (apps.channels(), apps.event_types_of("messages", "X", "contacts")) == ([], [])
    with pytest.raises(InvalidApp, match="frozen"):
        apps.check(msgspec.structs.replace(DECLARED, payload_fields=("other",)))
    apps.check(DECLARED)


@pytest.mark.parametrize(
    "change",
    [
        ChannelRemoved(channel="nowhere"),
        EventTypeWithdrawn(slug="contacts", event_type="app.contacts.never"),
        AppRemoved(slug="nobody"),
        AppEnabled(slug="default", is_enabled=False),
    ],
)
def test_a_record_that_takes_away_what_is_not_there_takes_nothing_else(change: AppChange) -> None:
    """It can be read, and what it speaks of is gone already or always there: it has no effect, and is on the list of problems."""
    apps = full()
    event = event_of(change, actor="root")
    apps.apply(record(9, str(event.meta.type), dict(event.payload)))

    assert all(apps.is_enabled(slug) for slug in ("contacts", "social", "default"))
    assert (apps.event_types_of("messages", "X", "contacts"), len(apps.problems)) == ([DECLARED], 1)


def test_records_of_another_app_are_not_told_as_an_apps_events() -> None:
    """Neither another app's nor those that name none, which belong to the default app."""
    apps = full()

    assert apps.event_types_of("messages", "X", "social") == []
    assert apps.event_types_of("messages", "X", None) == []


@pytest.mark.parametrize(
    ("kind", "payload", "enabled"),
    [
        ("app.registered", {"slug": 7}, {"contacts", "social"}),
        ("app.event_type_declared", {"slug": "contacts"}, {"contacts", "social"}),
        ("somebody.else", {}, {"contacts", "social"}),
        ("app.enabled", {"slug": "contacts", "is_enabled": "perhaps"}, {"social"}),
        ("app.removed", {"slug": "contacts", "why": "a later version says"}, {"social"}),
        ("app.of_a_later_version", {"slug": "social"}, {"contacts"}),
        ("app.removed", {"id": 7}, set()),
        ("app.of_a_later_version", [], set()),
    ],
)
def test_a_record_that_cannot_be_read_adds_nothing_and_may_take_away(
    kind: str, payload: object, enabled: set[str]
) -> None:
    """One that can only add is passed over; one that may have taken something away disables whom it names, or all that can be disabled."""
    apps = full()
    apps.apply(record(9, kind, payload))

    assert {slug for slug in ("contacts", "social", "nobody") if apps.is_enabled(slug)} == enabled
    assert apps.is_enabled("default")
    assert apps.is_enabled("system")
    assert len(apps.problems) == 1


def test_a_record_is_applied_once() -> None:
    """What was folded at the start and comes again with the dispatcher changes nothing."""
    apps = full()
    version = apps.version
    apps.committed([record(1, "app.removed", {"type": "app.removed", "slug": "contacts"})])

    assert (apps.version, apps.is_enabled("contacts")) == (version, True)


def test_no_event_type_is_made_of_the_records_of_what_was_refused() -> None:
    """An event of topic ``audit`` that is refused would be on record there, and be told again, for ever."""
    with pytest.raises(InvalidApp, match="never end"):
        full().check(msgspec.structs.replace(DECLARED, event_type="app.contacts.x", topic="audit"))


def test_a_channel_that_was_not_validated_gives_nothing() -> None:
    """Whoever wrote such a record into the topic by hand has opened nothing."""
    apps = registry(
        AppRegistered(slug="contacts"),
        AppRegistered(slug="social"),
        msgspec.structs.replace(CHANNEL, acl_validated=False),
    )

    assert apps.readable_domains("social", "contacts") == frozenset()
    with pytest.raises(UnknownApp):
        apps.require("nobody")
