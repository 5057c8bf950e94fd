"""A chain runs the hooks that are there, in order in and in reverse out, and loses no failure."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tidings.bus.events import ReceivedEvent
from tidings.core.errors import InvalidPayload
from tidings.core.events import Event, EventMeta
from tidings.log.interface import Appended, Verdict
from tidings.log.record import Record, RecordMeta
from tidings.middleware import (
    Decision,
    DecisionKind,
    FeatureFlags,
    HandleContext,
    InvalidMiddleware,
    MetricsMiddleware,
    Middleware,
    MiddlewareError,
    Outcome,
    OutcomeKind,
    PolicyDenied,
    PolicyMiddleware,
    PublishContext,
    RBACMiddleware,
    TracingMiddleware,
)

from .chains import MiddlewareChain

AT = "2026-01-01T00:00:00.000000Z"
ACKED = Outcome(OutcomeKind.ACKED)
STORED = Appended(1, 0, "e1")


def handling() -> HandleContext:
    meta = RecordMeta(written_at=AT, topic="orders", type="ORDER", space_id="s", event_id="e1", ts=AT)
    return HandleContext(ReceivedEvent(Record.of(5, 9, meta, msgspec.Raw(b'{"n":1}')), "workers", 2))


def publishing() -> PublishContext:
    return PublishContext(Event(EventMeta("orders", "ORDER", "s"), {"n": 1}), "orders")


class Noting(Middleware):
    """Notes every hook; half of them are coroutines."""

    def __init__(self, name: str, notes: list[str], priority: int = 100, decision: Decision | None = None) -> None:
        self.name = name
        self.priority = priority
        self._notes = notes
        self._decision = decision

    def before_publish(self, ctx: PublishContext) -> None:
        self._notes.append(f"{self.name}.before_publish")

    async def after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        self._notes.append(f"{self.name}.after_publish")

    async def before_handle(self, ctx: HandleContext) -> Decision | None:
        self._notes.append(f"{self.name}.before")
        return self._decision

    def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
        self._notes.append(f"{self.name}.after:{outcome.kind}")

    async def on_error(self, ctx: HandleContext, error: BaseException) -> None:
        self._notes.append(f"{self.name}.error:{error}")

    def cleanup(self, ctx: HandleContext) -> None:
        self._notes.append(f"{self.name}.cleanup")


@pytest.mark.req("F81")
async def test_hooks_run_in_order_on_the_way_in_and_in_reverse_on_the_way_out() -> None:
    """
    Lower priorities are the outer layers; among equals the order given holds.
    """
    notes: list[str] = []
    chain = MiddlewareChain([Noting("c", notes), Noting("a", notes, 1), Noting("d", notes), Noting("b", notes, 2)])
    ctx = handling()

    assert await chain.run_before_handle(ctx) is None
    await chain.run_after(ctx, ACKED)

    assert notes == [
        *("a.before", "b.before", "c.before", "d.before"),
        *("d.after:acked", "c.after:acked", "b.after:acked", "a.after:acked"),
        *("d.cleanup", "c.cleanup", "b.cleanup", "a.cleanup"),
    ]


@pytest.mark.req("F76")
def test_the_order_is_tracing_metrics_access_then_your_own() -> None:
    """
    However they are listed, the built-in middlewares stand in the document's order, before custom ones.
    """
    custom = Noting("custom", [])

    chain = MiddlewareChain([custom, RBACMiddleware(), MetricsMiddleware(), TracingMiddleware()])

    assert [member.name for member in chain.middlewares] == ["tracing", "metrics", "rbac", "custom"]


@pytest.mark.req("F77")
@pytest.mark.parametrize(
    ("decision", "kind"),
    [
        (Decision.skip("seen"), DecisionKind.SKIP),
        (Decision.deny("not yours"), DecisionKind.DENY),
        (Decision.quarantine("unsafe"), DecisionKind.QUARANTINE),
    ],
)
async def test_a_decision_stops_the_event(decision: Decision, kind: DecisionKind) -> None:
    """
    The first decision is what the bus gets, with its author; layers further in are neither entered nor left.
    """
    notes: list[str] = []
    chain = MiddlewareChain([Noting("a", notes), Noting("b", notes, decision=decision), Noting("c", notes)])
    ctx = handling()

    answer = await chain.run_before_handle(ctx)
    await chain.run_after(ctx, Outcome(OutcomeKind.SKIPPED))

    assert answer is not None
    assert (answer.kind, answer.reason, answer.by) == (kind, decision.reason, "b")
    assert notes == ["a.before", "b.before", "b.after:skipped", "a.after:skipped", "b.cleanup", "a.cleanup"]


@pytest.mark.req("F77")
async def test_a_replaced_event_goes_on_at_the_place_of_the_first() -> None:
    """
    Later layers and the handler see the replacement, with the offset and attempt of the event it stands for.
    """
    seen: list[Any] = []

    class Redact(Middleware):
        def before_handle(self, ctx: HandleContext) -> Decision:
            return Decision.replace(Event(ctx.event.meta, {"n": "redacted"}))

    class Look(Middleware):
        def before_handle(self, ctx: HandleContext) -> None:
            seen.append(ctx.event.payload)

    ctx = handling()
    before = ctx.event

    assert await MiddlewareChain([Redact(), Look()]).run_before_handle(ctx) is None

    assert seen == [{"n": "redacted"}]
    assert ctx.event.payload == {"n": "redacted"}
    assert (ctx.event.offset, ctx.event.seq, ctx.event.attempt, ctx.event.group) == (5, 9, 2, "workers")
    assert before.payload == {"n": 1}


@pytest.mark.req("F84")
@pytest.mark.parametrize("hook", ["before_handle", "on_error", "after_handle", "cleanup"])
async def test_a_hook_that_raises_fails_the_attempt_and_everything_is_cleaned_up(hook: str) -> None:
    """
    The error names middleware, hook and cause, can be retried, and every layer that was entered is still left.
    """
    notes: list[str] = []

    async def broken(*_: object) -> None:
        raise RuntimeError("broken")

    failing = Noting("b", notes)
    setattr(failing, hook, broken)
    chain = MiddlewareChain([Noting("a", notes), failing])
    ctx = handling()

    async def attempt() -> None:
        try:
            await chain.run_before_handle(ctx)
        except MiddlewareError as error:
            await chain.run_after(ctx, Outcome(OutcomeKind.RETRY, error=error))
            raise
        await chain.run_after(ctx, Outcome(OutcomeKind.RETRY, error=ValueError("handler")))

    with pytest.raises(MiddlewareError) as failed:
        await attempt()

    assert (failed.value.name, failed.value.hook) == ("b", hook)
    assert isinstance(failed.value.cause, RuntimeError)
    assert failed.value.retryable
    assert "a.cleanup" in notes
    assert "a.after:retry" in notes
    assert ("b.cleanup" in notes) is (hook != "cleanup")


async def test_several_failures_are_all_kept() -> None:
    """
    The first failure on the way out is raised, and carries the others.
    """

    class Broken(Middleware):
        def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
            raise RuntimeError("after")

        def cleanup(self, ctx: HandleContext) -> None:
            raise RuntimeError("cleanup")

    ctx = handling()
    chain = MiddlewareChain([Broken()])
    await chain.run_before_handle(ctx)

    with pytest.raises(MiddlewareError) as failed:
        await chain.run_after(ctx, ACKED)

    assert failed.value.hook == "after_handle"
    assert [other.hook for other in failed.value.others] == ["cleanup"]
    await chain.run_after(ctx, ACKED)  # left already: nothing runs twice


async def test_a_cancelled_attempt_is_cleaned_up() -> None:
    """
    Cancelling a task in the middle of a hook still closes what was opened.
    """
    notes: list[str] = []
    waiting = asyncio.Event()

    class Slow(Middleware):
        async def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
            waiting.set()
            await asyncio.Event().wait()

    ctx = handling()
    chain = MiddlewareChain([Noting("a", notes), Slow()])
    await chain.run_before_handle(ctx)
    task = asyncio.create_task(chain.run_after(ctx, ACKED))
    await waiting.wait()

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert notes == ["a.before", "a.cleanup"]


@pytest.mark.req("F84")
async def test_a_wrong_answer_is_a_failure() -> None:
    """
    A hook that answers something else than it may has not let the event pass.
    """

    class Vague(Middleware):
        def before_handle(self, ctx: HandleContext) -> Any:
            return False

        def before_publish(self, ctx: PublishContext) -> Any:
            return {"n": 2}

    chain = MiddlewareChain([Vague()])

    with pytest.raises(MiddlewareError, match="returned bool"):
        await chain.run_before_handle(handling())
    with pytest.raises(MiddlewareError, match="returned dict"):
        await chain.run_before_publish(publishing())


@pytest.mark.req("F81")
def test_a_chain_holds_only_the_hooks_that_were_written() -> None:
    """
    A middleware takes part in what it overrides and in nothing else; without any the chain is empty.
    """

    class Idle(Middleware):
        pass

    class OnlyPublish(Middleware):
        def before_publish(self, ctx: PublishContext) -> None:
            return None

    class OnlyCleanup(Middleware):
        async def cleanup(self, ctx: HandleContext) -> None:
            return None

    assert MiddlewareChain().is_empty
    assert MiddlewareChain([Idle()]).is_empty
    publish = MiddlewareChain([Idle(), OnlyPublish()])
    assert not publish.is_empty
    assert len(publish.publish_hooks) == 1
    assert publish.handle_hooks == ()
    handle = MiddlewareChain([OnlyCleanup()]).handle_hooks
    assert [hook is not None for hook in handle[0][1:]] == [False, False, False, True]
    assert Idle().name == "Idle"


@pytest.mark.req("F83")
async def test_flags_switch_members_while_the_chain_is_in_use() -> None:
    """
    A member switched off takes no part from the next event on, and the chain is empty when all are off.
    """
    notes: list[str] = []
    flags = FeatureFlags({"b": False})
    chain = MiddlewareChain([Noting("a", notes), Noting("b", notes)], flags)

    await chain.run_before_handle(handling())
    flags.enable("b")
    flags.disable("a")
    await chain.run_before_handle(handling())
    flags.disable("b")

    assert notes == ["a.before", "b.before"]
    assert chain.is_empty
    assert flags.as_dict() == {"a": False, "b": False}
    assert flags.is_enabled("never named")


@pytest.mark.req("F83")
async def test_an_event_on_its_way_leaves_the_layers_it_entered() -> None:
    """
    Switching a member off between in and out does not leave its layer open, nor open one on the way out.
    """
    notes: list[str] = []
    flags = FeatureFlags({"late": False})
    a, late = Noting("a", notes), Noting("late", notes)
    chain = MiddlewareChain([a, late], flags)
    ctx, sent = handling(), publishing()
    await chain.run_before_handle(ctx)
    await chain.run_before_publish(sent)

    flags.disable("a")
    flags.enable("late")
    a.enabled = False
    await chain.run_after(ctx, ACKED)
    await chain.run_after_publish(sent, STORED)

    assert notes == ["a.before", "a.before_publish", "a.after:acked", "a.cleanup", "a.after_publish"]


@pytest.mark.req("F83")
async def test_enabled_can_be_changed_on_the_middleware_itself() -> None:
    """
    A member that is not enabled is passed over.
    """
    notes: list[str] = []
    a = Noting("a", notes)
    a.enabled = False
    chain = MiddlewareChain([a])

    await chain.run_before_handle(handling())
    await chain.run_before_publish(publishing())

    assert notes == []


async def test_a_publish_can_be_replaced_and_its_end_is_told_in_reverse() -> None:
    """
    The replacement is what is stored; everybody on the way in hears of the verdict.
    """
    notes: list[str] = []

    class Stamp(Middleware):
        async def before_publish(self, ctx: PublishContext) -> Event:
            return Event(ctx.event.meta, {**ctx.event.payload, "stamped": True})

    ctx = publishing()
    chain = MiddlewareChain([Noting("a", notes), Stamp(), Noting("b", notes)])

    await chain.run_before_publish(ctx)
    sent = ctx.event
    await chain.run_after_publish(ctx, STORED)

    assert sent.payload == {"n": 1, "stamped": True}
    assert ctx.event is sent
    assert notes == ["a.before_publish", "b.before_publish", "b.after_publish", "a.after_publish"]


async def test_a_refusal_keeps_its_own_retryability() -> None:
    """
    An error that trying again cannot help is not made retryable by the middleware that raised it.
    """

    class Strict(Middleware):
        def before_publish(self, ctx: PublishContext) -> None:
            raise InvalidPayload("payload", "too odd", hint="make it plainer")

    with pytest.raises(MiddlewareError) as refused:
        await MiddlewareChain([Strict()]).run_before_publish(publishing())

    assert not refused.value.retryable
    assert refused.value.hint == "make it plainer"


def test_what_is_no_middleware_is_refused() -> None:
    """
    A stranger in the list, or the same member twice, is named when the chain is made.
    """
    a = Noting("a", [])

    with pytest.raises(InvalidMiddleware, match=r"middlewares\[1\]"):
        MiddlewareChain([a, object()])  # type: ignore[list-item]
    with pytest.raises(InvalidMiddleware, match="twice"):
        MiddlewareChain([a, a])


def test_flags_are_bounded() -> None:
    """
    Names beyond the bound are refused; those there are can still be switched.
    """
    flags = FeatureFlags({f"f{n}": True for n in range(1024)})

    with pytest.raises(InvalidMiddleware):
        flags.disable("one more")
    flags.disable("f3")
    assert not flags.is_enabled("f3")


@pytest.mark.req("F82")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(None, None), (True, None), (False, "denied by house rules"), ("after hours", "after hours")],
)
async def test_a_policy_is_a_function(answer: Any, reason: str | None) -> None:
    """
    A check of your own, plain or async, allows or denies an attempt and a publish.
    """

    async def check(_: object) -> Any:
        return answer

    chain = MiddlewareChain([PolicyMiddleware(check, on_publish=lambda _: answer, name="house rules")])

    decision = await chain.run_before_handle(handling())

    if reason is None:
        assert decision is None
        await chain.run_before_publish(publishing())
    else:
        assert decision == Decision(DecisionKind.DENY, reason, by="house rules")
        with pytest.raises(MiddlewareError) as refused:
            await chain.run_before_publish(publishing())
        assert isinstance(refused.value.cause, PolicyDenied)
        assert refused.value.cause.reason == reason
        assert not refused.value.retryable


@pytest.mark.req("F82", "F84")
async def test_a_policy_that_cannot_answer_lets_nothing_through() -> None:
    """
    A check that raises or answers nonsense fails the attempt; one that decides is heeded; no check at all is refused.
    """

    def broken(_: HandleContext) -> bool:
        raise ConnectionError("policy server is gone")

    with pytest.raises(MiddlewareError):
        await MiddlewareChain([PolicyMiddleware(broken)]).run_before_handle(handling())
    with pytest.raises(MiddlewareError):
        await MiddlewareChain([PolicyMiddleware(lambda _: 1)]).run_before_handle(handling())  # type: ignore[arg-type, return-value]
    decision = await MiddlewareChain([PolicyMiddleware(lambda _: Decision.skip("old"))]).run_before_handle(handling())
    assert decision is not None
    assert decision.kind is DecisionKind.SKIP
    with pytest.raises(InvalidMiddleware):
        PolicyMiddleware()
    with pytest.raises(InvalidMiddleware):
        PolicyMiddleware("check")  # type: ignore[arg-type]
