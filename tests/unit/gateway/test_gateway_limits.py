"""Limits of the gateway's engines: at the limit an event or a connection is taken; beyond it the refusal is named, and others go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.gateway_world import GatewayWorld
from tests.unit.gateway.engines import Engines, app_event, graph_event, request
from tidings.gateway import event_types, forms, intake, resuming
from tidings.gateway.constants import APP_EVENT_TYPES_MAX, SEND_FAILURES_MAX, SUMMARY_CHARS_MAX, SUMMARY_KEYS_MAX
from tidings.gateway.descriptors import SEQ_MAX, EventDescriptor
from tidings.gateway.envelopes import encode
from tidings.gateway.errors import DeclarationRefused, InvalidDescriptor
from tidings.gateway.event_types import EventDeclarations, app_declaration
from tidings.gateway.refusals import SubscriptionClosed
from tidings.wire.gateway import CloseReason


def refused(engines: Engines, descriptor: EventDescriptor, problem: str) -> None:
    """A descriptor is refused with the limit named, nothing of it is taken, and the next event is."""
    with pytest.raises(InvalidDescriptor, match=problem):
        engines.tell(descriptor)
    assert len(engines.rejections) == 1
    engines.tell(graph_event(1))
    assert len(engines.taken) == 1


@pytest.mark.bound("gateway.constants.SUMMARY_KEYS_MAX", "gateway.constants.SUMMARY_CHARS_MAX")
@crossed
@pytest.mark.parametrize("kind", ["keys", "chars"])
def test_a_summary_with_more_keys_or_longer_texts_is_refused(kind: str, beyond: Beyond) -> None:
    """The refusal names the limit; a text of exactly that length is taken."""
    engines = Engines()
    objects = ("note:1",)
    if kind == "keys":
        many = {f"field_{number}": number for number in range(beyond(SUMMARY_KEYS_MAX))}
        refused(engines, graph_event(1, payload_summary=many), f"more than {SUMMARY_KEYS_MAX} keys")
    else:
        long = {"object_ids": objects, "owner_identity_id": "x" * beyond(SUMMARY_CHARS_MAX)}
        refused(engines, graph_event(1, payload_summary=long), f"longer than {SUMMARY_CHARS_MAX} characters")
    full = {"object_ids": objects, "owner_identity_id": "x" * SUMMARY_CHARS_MAX}
    engines.tell(graph_event(2, payload_summary=full))
    assert len(engines.taken) == 2


@pytest.mark.bound("gateway.constants.SUMMARY_BYTES_MAX")
@crossed
def test_a_summary_of_more_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, beyond: Beyond) -> None:
    """Counted as they are sent; a summary of exactly that many is taken."""
    monkeypatch.setattr(forms, "SUMMARY_BYTES_MAX", 400)

    def of_bytes(count: int) -> dict[str, Any]:
        objects = [f"note:{number:02}" + "x" * 100 for number in range((count - 150) // 110)]
        rest = count - len(encode({"object_ids": [*objects, "note:"]}))
        return {"object_ids": (*objects, "note:" + "x" * rest)}

    assert len(encode(of_bytes(400))) == 400
    engines = Engines()
    refused(engines, graph_event(1, payload_summary=of_bytes(beyond(400))), "more than 400")
    engines.tell(graph_event(2, payload_summary=of_bytes(400)))
    assert len(engines.taken) == 2


@pytest.mark.bound("gateway.constants.ENVELOPE_BYTES_MAX")
@crossed
def test_an_event_with_a_longer_envelope_is_refused(monkeypatch: pytest.MonkeyPatch, beyond: Beyond) -> None:
    """What names and summary take together is bounded, since identities take up to six bytes a character."""
    room = 400
    monkeypatch.setattr(intake, "ENVELOPE_BYTES_MAX", intake._OTHER_FIELDS + room)
    anchors = ("app_id", "domain_id", "peer_identity_id", "requester_identity_id")
    declaration = app_declaration("app.shop.order_paid", slug="shop", fields=("orders",), scope_anchors=anchors)

    def of_bytes(size: int) -> EventDescriptor:
        hint = {"peer_identity_id": "\x01", "requester_identity_id": "alice"}
        summary = {"orders": ("x" * 100,) * ((size - 150) // 103)}
        scope = {"app_id": "shop", "domain_id": "orders", **hint}
        hint["peer_identity_id"] += "x" * (size - len(encode(scope)) - len(encode(summary)))
        context = request("shop", requester="alice")
        return app_event(1, payload_summary=summary, scope_hint=hint, operation_context=context)

    engines = Engines()
    engines.declarations.declare(declaration)
    refused(engines, of_bytes(beyond(room)), "makes an envelope")
    engines.tell(of_bytes(room))
    assert len(engines.taken) == 2


def test_the_longest_names_and_the_longest_summary_do_not_fit_into_one_envelope() -> None:
    """With the limits as they are: each is within its own, and together they are refused."""
    anchors = ("app_id", "domain_id", "peer_identity_id", "requester_identity_id")
    engines = Engines()
    engines.declarations.declare(
        app_declaration("app.shop.order_paid", slug="shop", fields=("orders",), scope_anchors=anchors)
    )
    hint = {"peer_identity_id": "\x01" * 256, "requester_identity_id": "\x02" * 256}
    context = request("shop", requester="\x02" * 256)
    longest = app_event(1, payload_summary={"orders": ("x" * 60,) * 64}, scope_hint=hint, operation_context=context)
    refused(engines, longest, "more than 8192")


@pytest.mark.bound("gateway.descriptors.SEQ_MAX")
@crossed
def test_a_larger_seq_is_refused(beyond: Beyond) -> None:
    """No JSON reader would keep it exact; the largest one is taken."""
    engines = Engines()
    engines.committed_seq = SEQ_MAX
    refused(engines, graph_event(beyond(SEQ_MAX)), "is not between")
    engines.tell(graph_event(SEQ_MAX))
    assert len(engines.taken) == 2


@pytest.mark.bound("gateway.constants.APP_EVENT_TYPES_MAX", "gateway.constants.APP_SOURCES_MAX")
@crossed
@pytest.mark.parametrize("kind", ["types", "apps"])
def test_more_event_types_or_apps_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str, beyond: Beyond) -> None:
    """The declarations within the limit stay in force, and those of others are taken."""
    monkeypatch.setattr(event_types, "APP_SOURCES_MAX", 8)
    limit = APP_EVENT_TYPES_MAX if kind == "types" else 8
    declarations = EventDeclarations()

    def declare(number: int) -> None:
        slug = "shop" if kind == "types" else f"shop{number}"
        declarations.declare(app_declaration(f"app.{slug}.kind_{number}", slug=slug, fields=("order_id",)))

    for number in range(limit):
        declare(number)
    for number in range(limit, beyond(limit)):
        with pytest.raises(DeclarationRefused, match=r"which is all that"):
            declare(number)
    declare(0)
    if kind == "types":
        declarations.declare(app_declaration("app.notes.note_read", slug="notes", fields=("note_id",)))


@pytest.mark.bound("gateway.constants.SEND_FAILURES_MAX")
@crossed
async def test_failed_sends_end_a_connection(beyond: Beyond) -> None:
    """One fewer is borne; as many in a row end the connection, and nothing more is tried on it. Others are sent to."""
    async with GatewayWorld.running() as world:
        of_system = {"subscription_type": "system", "event_type": "system.config_changed"}
        root = await world.administrator(**of_system)
        other = await world.administrator("other", **of_system)
        sent = 0

        async def tell(count: int) -> None:
            nonlocal sent
            for _ in range(count):
                sent += 1
                world.tell("config_manager", "system.config_changed", {"cfg_seq": sent, "keys": ("k",)})
                await world.settle(0.1)

        for _ in range(2):
            root.fails = True
            await tell(SEND_FAILURES_MAX - 1)
            root.fails = False
            await tell(1)
        assert (root.reason, len(root.frames)) == (None, 2)
        before = world.gateway.telemetry.send_failures
        root.fails = True
        await tell(beyond(SEND_FAILURES_MAX))
        assert root.reason is CloseReason.INTERNAL_ERROR
        assert world.gateway.telemetry.send_failures - before == SEND_FAILURES_MAX
        assert (other.reason, len(other.frames)) == (None, sent)


@pytest.mark.bound("gateway.resuming._ENDED_MAX", "gateway.resuming._ENDED_OF_IDENTITY_MAX")
@crossed
@pytest.mark.parametrize("name", ["_ENDED_MAX", "_ENDED_OF_IDENTITY_MAX"])
async def test_the_oldest_ended_connection_cannot_be_resumed(
    monkeypatch: pytest.MonkeyPatch, name: str, beyond: Beyond
) -> None:
    """As many as allowed can be, of one identity and of all; what an identity forgets costs no other identity anything."""
    monkeypatch.setattr(resuming, name, 3)
    async with GatewayWorld.running() as world:
        quiet = await world.subscribe("quiet")
        ended = []
        for number in range(beyond(3)):
            identity = "restless" if name == "_ENDED_OF_IDENTITY_MAX" else f"reader{number}"
            reader = await world.subscribe(identity)
            world.commit()
            await world.settle()
            ended.append((identity, reader.tokens[0]))
            reader.leave()
            if number == 0 and name == "_ENDED_OF_IDENTITY_MAX":
                quiet.leave()
        for identity, token in ended[:-3]:
            with pytest.raises(SubscriptionClosed) as caught:
                await world.subscribe(identity, resume=token)
            assert caught.value.close_reason is CloseReason.RESUME_INVALID
        for identity, token in ended[-3:]:
            await world.subscribe(identity, resume=token)
        if name == "_ENDED_OF_IDENTITY_MAX":
            await world.subscribe("quiet", resume=quiet.tokens[0])
