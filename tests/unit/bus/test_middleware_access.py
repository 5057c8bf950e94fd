"""Access and content safety: what a subscriber may not have never reaches its handler."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from tidings.bus.events import ReceivedEvent
from tidings.core.events import Capability, Event, EventMeta, SecurityBand
from tidings.log.record import Record, RecordMeta
from tidings.middleware import (
    ContentSafetyMiddleware,
    DecisionKind,
    HandleContext,
    InvalidMiddleware,
    Middleware,
    MiddlewareError,
    RBACMiddleware,
    SafetyFinding,
    SubscriberRule,
)

from .chains import MiddlewareChain

AT = "2026-01-01T00:00:00.000000Z"
RECALL = frozenset({Capability.RECALL})
PNG = "iVBORw0KGgo" + "A" * 100


def handling(
    capabilities: frozenset[Capability] = RECALL,
    payload: dict[str, Any] | None = None,
    group: str = "workers",
    space_id: str = "shared:home",
    **meta: Any,
) -> HandleContext:
    stored = RecordMeta(written_at=AT, topic="orders", type="ORDER", space_id=space_id, event_id="e1", ts=AT, **meta)
    record = Record.of(0, 1, stored, msgspec.Raw(orjson.dumps(payload or {})))
    return HandleContext(ReceivedEvent(record, group, 1), capabilities)


async def denial(middleware: Middleware, ctx: HandleContext) -> str | None:
    decision = await MiddlewareChain([middleware]).run_before_handle(ctx)
    if decision is None:
        return None
    assert decision.kind is DecisionKind.DENY
    assert decision.by == "rbac"
    return decision.reason


@pytest.mark.req("F78", "F101")
async def test_a_subscriber_without_the_capability_is_denied() -> None:
    """
    By default receiving needs RECALL; a subscriber that came with nothing gets nothing.
    """
    rbac = RBACMiddleware()

    assert await denial(rbac, handling()) is None
    assert "RECALL" in (await denial(rbac, handling(frozenset())) or "")
    assert "RECALL" in (await denial(rbac, handling(frozenset({Capability.WRITE}))) or "")


@pytest.mark.req("F78", "F101")
async def test_topics_and_types_ask_for_capabilities() -> None:
    """
    What topic and type ask for adds up; topics and types not named fall under the star.
    """
    by_both = RBACMiddleware({"orders": ["RECALL"], "ORDER": [Capability.SCHEDULE], "*": [Capability.WRITE]})
    other = RBACMiddleware({"else": [Capability.RECALL], "*": [Capability.WRITE]})

    assert "SCHEDULE" in (await denial(by_both, handling()) or "")
    assert await denial(by_both, handling(RECALL | {Capability.SCHEDULE})) is None
    assert "WRITE" in (await denial(other, handling()) or "")
    assert await denial(other, handling(frozenset({Capability.WRITE}))) is None
    assert await denial(RBACMiddleware({}), handling(frozenset())) is None


@pytest.mark.req("F101")
async def test_a_rule_is_a_groups_own_allow_list() -> None:
    """
    A group with a rule has the rule's capabilities, whatever its subscription came with.
    """
    rbac = RBACMiddleware(
        rules={"trusted": SubscriberRule(capabilities=RECALL), "shut out": SubscriberRule(capabilities=frozenset())}
    )

    assert await denial(rbac, handling(frozenset(), group="trusted")) is None
    assert await denial(rbac, handling(RECALL, group="shut out")) is not None


@pytest.mark.req("F78")
@pytest.mark.parametrize(
    ("band", "rule", "is_allowed"),
    [
        (None, SubscriberRule(band_max=SecurityBand.GREEN), True),
        ("GREEN", SubscriberRule(band_max=SecurityBand.GREEN), True),
        ("AMBER", SubscriberRule(band_max=SecurityBand.GREEN), False),
        ("RED", SubscriberRule(), True),
        ("BLACK", SubscriberRule(), False),
        ("BLACK", SubscriberRule(band_max=SecurityBand.BLACK), False),
        ("BLACK", SubscriberRule(allow_black=True), True),
        ("RED", SubscriberRule(band_max=SecurityBand.AMBER, allow_black=True), False),
        ("PURPLE", SubscriberRule(allow_black=True), False),
    ],
)
async def test_bands_above_the_ceiling_are_denied(band: str | None, rule: SubscriberRule, is_allowed: bool) -> None:
    """
    A ceiling holds, BLACK needs its own permission, and a band nobody knows is denied.
    """
    reason = await denial(RBACMiddleware(default=rule), handling(band=band))

    assert (reason is None) is is_allowed


async def test_what_is_sensitive_is_not_projected() -> None:
    """
    An event that asks for PROJECT is denied from RED on, capability or not.
    """
    rbac = RBACMiddleware({"orders": [Capability.PROJECT]}, default=SubscriberRule(allow_black=True))
    caps = frozenset({Capability.PROJECT})

    assert await denial(rbac, handling(caps, band="AMBER")) is None
    assert "projected" in (await denial(rbac, handling(caps, band="RED")) or "")
    assert "projected" in (await denial(rbac, handling(caps, band="BLACK")) or "")


@pytest.mark.req("F78")
@pytest.mark.parametrize(
    ("space_id", "is_allowed"),
    [("shared:home", True), ("personal:alice", True), ("personal:bob", False), ("sharedhome", False)],
)
async def test_spaces_off_the_list_are_denied(space_id: str, is_allowed: bool) -> None:
    """
    A space is on the list by its id or by a prefix; an empty list has none.
    """
    rbac = RBACMiddleware(default=SubscriberRule(spaces=frozenset({"shared:*", "personal:alice"})))

    assert (await denial(rbac, handling(space_id=space_id)) is None) is is_allowed
    assert await denial(RBACMiddleware(default=SubscriberRule(spaces=frozenset())), handling()) is not None


async def test_no_middleware_can_rewrite_what_access_is_decided_by() -> None:
    """
    The stored envelope counts: an event replaced by a harmless-looking one is still denied.
    """

    ctx = handling(band="BLACK")
    ctx.event.meta = EventMeta("orders", "ORDER", "shared:home", band="GREEN")

    assert await denial(RBACMiddleware(), ctx) is not None


def test_a_wrong_rule_is_refused() -> None:
    """
    An unknown capability or a rule that is none is named when the middleware is made.
    """
    with pytest.raises(InvalidMiddleware, match="orders"):
        RBACMiddleware({"orders": ["FLY"]})
    with pytest.raises(InvalidMiddleware, match="workers"):
        RBACMiddleware(rules={"workers": {"band_max": "RED"}})  # type: ignore[dict-item]


@pytest.mark.req("F136")
@pytest.mark.parametrize(
    ("payload", "finding"),
    [
        ({"text": "hello", "n": [1, None, {"deep": ["fine"]}]}, None),
        ({"icon": "data:image/png;base64,AAAA"}, "raw_media at payload.icon"),
        ({"a": [{"frame": PNG}]}, "raw_media at payload.a.0.frame"),
        ({"code": "iVBORw0KGgo"}, None),
        ({"sound": "SUQz" + "B" * 100}, "raw_media at payload.sound"),
        ({"text": "-----BEGIN RSA PRIVATE KEY-----\nabc"}, "secret at payload.text"),
        ({"text": "the key is AKIAABCDEFGHIJKLMNOP ok"}, "secret at payload.text"),
        ({"login": {"Password": "hunter2"}}, "secret at payload.login.Password"),
        ({"login": {"api-key": "k"}}, "secret at payload.login.api-key"),
        ({"login": {"password": ""}}, None),
        ({"password_changed": "yes"}, None),
    ],
)
async def test_raw_media_and_secrets_are_quarantined(payload: dict[str, Any], finding: str | None) -> None:
    """
    The default classifier says what it found and where, and leaves ordinary content alone.
    """
    decision = await MiddlewareChain([ContentSafetyMiddleware()]).run_before_handle(handling(payload=payload))

    if finding is None:
        assert decision is None
    else:
        assert decision is not None
        assert (decision.kind, decision.reason) == (DecisionKind.QUARANTINE, finding)
        assert "hunter2" not in decision.reason


@pytest.mark.req("F136")
@pytest.mark.parametrize(
    ("safety", "is_quarantined"),
    [
        ({"quarantine": True}, True),
        ({"pressure": 0.6}, True),
        ({"pressure": 0.59}, False),
        ({"quarantine": False}, False),
        ("odd", False),
    ],
)
async def test_safety_signals_are_heeded(safety: Any, is_quarantined: bool) -> None:
    """
    What the safety pipeline wrote into the envelope quarantines the event without a look at its payload.
    """
    ctx = handling(extra={"safety": safety})

    decision = await MiddlewareChain([ContentSafetyMiddleware()]).run_before_handle(ctx)

    assert (decision is not None) is is_quarantined


@pytest.mark.req("F136")
async def test_what_is_too_large_to_look_through_is_quarantined() -> None:
    """
    Looking is bounded, and content that was not looked at is not passed on.
    """
    ctx = handling(payload={"words": ["x"] * 100_001})

    decision = await MiddlewareChain([ContentSafetyMiddleware()]).run_before_handle(ctx)

    assert decision is not None
    assert decision.reason == "too_large at payload"


@pytest.mark.req("F136", "F84")
async def test_the_classifier_is_yours_to_give() -> None:
    """
    A classifier, plain or async, decides alone; if it raises, the event is not handled.
    """

    async def no_cats(event: Event) -> SafetyFinding | None:
        return SafetyFinding("cat", "payload.pet") if event.payload.get("pet") == "cat" else None

    def broken(event: Event) -> SafetyFinding | None:
        raise ConnectionError("classifier is gone")

    chain = MiddlewareChain([ContentSafetyMiddleware(no_cats)])
    decision = await chain.run_before_handle(handling(payload={"pet": "cat"}))
    assert decision is not None
    assert (decision.kind, decision.reason) == (DecisionKind.QUARANTINE, "cat at payload.pet")
    assert await chain.run_before_handle(handling(payload={"pet": "dog", "icon": PNG})) is None
    with pytest.raises(MiddlewareError):
        await MiddlewareChain([ContentSafetyMiddleware(broken)]).run_before_handle(handling())
    with pytest.raises(InvalidMiddleware):
        ContentSafetyMiddleware("strict")  # type: ignore[arg-type]
