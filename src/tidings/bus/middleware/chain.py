"""
The chain: middlewares in order, compiled to the hooks that they define.

It is compiled when it is made and when a feature flag changes, never for an event: an event pays for the hooks that exist, and
with none (``is_empty``) the bus leaves the chain out. Most hooks are plain functions that return nothing, so each ``run_...`` is a
plain function too: it returns None when all is done, and only if a hook returned something to await, or a decision, a coroutine
that the caller awaits::

    if (rest := chain.run_after(ctx, outcome)) is not None:
        await rest
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import CoroutineType
from typing import Any, NamedTuple

import msgspec

from tidings.core.events import Event
from tidings.log.interface import Verdict

from ..events import ReceivedEvent
from ..handlers import is_failure
from .base import (
    Decision,
    DecisionKind,
    FeatureFlags,
    HandleContext,
    InvalidMiddleware,
    Middleware,
    MiddlewareError,
    Outcome,
    PublishContext,
)

_Hook = Callable[..., Any]
_Call = tuple[Middleware, str, _Hook, tuple[object, ...]]
"""A hook that is due, and its arguments."""


class PublishHooks(NamedTuple):
    """One middleware's part of a publish; a hook it does not have is None."""

    middleware: Middleware
    before: _Hook | None
    after: _Hook | None


class HandleHooks(NamedTuple):
    """One middleware's part of an attempt; a hook it does not have is None."""

    middleware: Middleware
    before: _Hook | None
    after: _Hook | None
    on_error: _Hook | None
    cleanup: _Hook | None


class MiddlewareChain:
    """
    Middlewares by priority (lower first), and among equals in the order given.

    Args:
        middlewares: The members.
        flags: Switches members by their names; may be changed while the chain is in use.

    Raises:
        InvalidMiddleware: A member is no ``Middleware``, or is there twice.
    """

    def __init__(self, middlewares: Sequence[Middleware] = (), flags: FeatureFlags | None = None) -> None:
        for at, member in enumerate(middlewares):
            if not isinstance(member, Middleware):
                raise InvalidMiddleware(type(member).__name__, f"middlewares[{at}]", "is no Middleware")
            if any(member is other for other in middlewares[:at]):
                raise InvalidMiddleware(member.name, f"middlewares[{at}]", "is in the chain twice")
        self.flags = FeatureFlags() if flags is None else flags
        self.middlewares = tuple(sorted(middlewares, key=lambda member: member.priority))
        self._publish: tuple[PublishHooks, ...] = ()
        self._handle: tuple[HandleHooks, ...] = ()
        self._version = -1

    @property
    def publish_hooks(self) -> tuple[PublishHooks, ...]:
        """Who takes part in a publish, by the flags as they are now. Empty: leave the publish half out."""
        if self._version != self.flags.version:
            self._compile()
        return self._publish

    @property
    def handle_hooks(self) -> tuple[HandleHooks, ...]:
        """Who takes part in an attempt, by the flags as they are now. Empty: leave the handle half out."""
        if self._version != self.flags.version:
            self._compile()
        return self._handle

    @property
    def is_empty(self) -> bool:
        """Whether nobody takes part in anything, by the flags as they are now."""
        return not self.publish_hooks and not self.handle_hooks

    def _compile(self) -> None:
        active = [member for member in self.middlewares if self.flags.is_enabled(member.name)]
        publish = [PublishHooks(m, _hook(m, "before_publish"), _hook(m, "after_publish")) for m in active]
        handle = [
            HandleHooks(
                m, _hook(m, "before_handle"), _hook(m, "after_handle"), _hook(m, "on_error"), _hook(m, "cleanup")
            )
            for m in active
        ]
        self._publish = tuple(hooks for hooks in publish if any(hooks[1:]))
        self._handle = tuple(hooks for hooks in handle if any(hooks[1:]))
        self._version = self.flags.version

    def run_before_publish(
        self, ctx: PublishContext, remaining: Iterator[PublishHooks] | None = None
    ) -> Coroutine[Any, Any, None] | None:
        """
        Call every ``before_publish``, or those that remain; after that, ``ctx.event`` is the event to store.

        Raises:
            MiddlewareError: A hook refused the event or failed; no further one was called. ``run_after_publish`` is due all the
                same, with this error.
        """
        hooks = iter(self.publish_hooks) if remaining is None else remaining
        for each in hooks:
            middleware, before, _ = each
            if not middleware.enabled:
                continue
            ctx.entered.append(each)
            if before is not None:
                try:
                    answer = before(ctx)
                except BaseException as error:
                    raise _as_ours(middleware, "before_publish", error) from error
                if answer is not None:
                    return self._replace_published(ctx, middleware, answer, hooks)
        return None

    async def _replace_published(
        self, ctx: PublishContext, middleware: Middleware, answer: Any, remaining: Iterator[PublishHooks]
    ) -> None:
        try:
            replacement = await answer if _is_awaitable(answer) else answer
        except BaseException as error:
            raise _as_ours(middleware, "before_publish", error) from error
        if replacement is not None:
            if not isinstance(replacement, Event):
                raise _wrong_answer(middleware, "before_publish", replacement, "an Event or None")
            ctx.event = replacement
        if (rest := self.run_before_publish(ctx, remaining)) is not None:
            await rest

    def run_after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> Coroutine[Any, Any, None] | None:
        """
        Call ``after_publish`` of all that were entered, in reverse, also after one that raised.

        Raises:
            MiddlewareError: A hook raised. What the log committed stays committed: do not take this for a failed publish.
        """
        entered, ctx.entered = ctx.entered, []
        return _call_all([(m, "after_publish", after, (ctx, verdict)) for m, _, after in reversed(entered) if after])

    def run_before_handle(
        self, ctx: HandleContext, remaining: Iterator[HandleHooks] | None = None
    ) -> Coroutine[Any, Any, Decision | None] | None:
        """
        Call every ``before_handle``, or those that remain, up to the first decision that keeps the event from its handler.

        Returns:
            What to await for that decision, or None: then ``ctx.event``, which may have been replaced, goes to the handler.

        Raises:
            MiddlewareError: A hook failed. ``run_after`` is due all the same.
        """
        hooks = iter(self.handle_hooks) if remaining is None else remaining
        for each in hooks:
            middleware, before, _, _, _ = each
            if not middleware.enabled:
                continue
            ctx.entered.append(each)
            if before is not None:
                try:
                    answer = before(ctx)
                except BaseException as error:
                    raise _as_ours(middleware, "before_handle", error) from error
                if answer is not None:
                    return self._decide(ctx, middleware, answer, hooks)
        return None

    async def _decide(
        self, ctx: HandleContext, middleware: Middleware, answer: Any, remaining: Iterator[HandleHooks]
    ) -> Decision | None:
        try:
            decision = await answer if _is_awaitable(answer) else answer
        except BaseException as error:
            raise _as_ours(middleware, "before_handle", error) from error
        if decision is not None:
            if not isinstance(decision, Decision):
                raise _wrong_answer(middleware, "before_handle", decision, "a Decision or None")
            if decision.kind is not DecisionKind.REPLACE:
                return msgspec.structs.replace(decision, by=middleware.name)
            if decision.event is None:
                raise _wrong_answer(middleware, "before_handle", decision, "an event to replace this one")
            ctx.event = _received(ctx.event, decision.event)
        rest = self.run_before_handle(ctx, remaining)
        return None if rest is None else await rest

    def run_after(self, ctx: HandleContext, outcome: Outcome) -> Coroutine[Any, Any, None] | None:
        """
        Tell all that were entered how it ended: ``on_error`` (if there was one), ``after_handle``, then ``cleanup``.

        Each of the three is called in reverse order, and all of them are, also after a hook that raised. A second call for the
        same context does nothing.

        Raises:
            MiddlewareError: A hook raised; the attempt counts as failed.
        """
        entered, ctx.entered = ctx.entered, []
        entered.reverse()
        calls: list[_Call] = []
        if outcome.error is not None:
            calls += [(m, "on_error", hook, (ctx, outcome.error)) for m, _, _, hook, _ in entered if hook]
        for middleware, _, after, _, _ in entered:
            if after is not None:
                calls.append((middleware, "after_handle", after, (ctx, outcome)))
        for middleware, _, _, _, cleanup in entered:
            if cleanup is not None:
                calls.append((middleware, "cleanup", cleanup, (ctx,)))
        return _call_all(calls)


def _hook(middleware: Middleware, name: str) -> _Hook | None:
    if getattr(type(middleware), name) is getattr(Middleware, name) and name not in vars(middleware):
        return None
    hook: _Hook = getattr(middleware, name)
    return hook


def _is_awaitable(given: object) -> bool:
    return type(given) is CoroutineType or inspect.isawaitable(given)  # the second takes long to say so


def _as_ours(middleware: Middleware, name: str, error: BaseException) -> MiddlewareError:
    """The error to raise for what a hook raised; what is no failure of the hook (see ``is_failure``) is raised at once."""
    if not is_failure(error):
        raise error
    return MiddlewareError(middleware.name, name, error)


def _call_all(calls: Sequence[_Call], errors: tuple[MiddlewareError, ...] = ()) -> Coroutine[Any, Any, None] | None:
    """Call hooks whose answer does not count, all of them, whatever they raise; the first error is raised at the end."""
    for at, (middleware, name, hook, arguments) in enumerate(calls):
        try:
            given = hook(*arguments)
        except BaseException as error:
            if not is_failure(error):
                _clean_up_now(calls[at + 1 :])
                raise
            errors = (*errors, _caused(middleware, name, error))
            continue
        if given is not None:
            return _call_rest(calls, at, given, errors)
    if errors:
        errors[0].others = errors[1:]
        raise errors[0]
    return None


async def _call_rest(calls: Sequence[_Call], at: int, given: Any, errors: tuple[MiddlewareError, ...]) -> None:
    """Await what a hook returned, and go on with the hooks after it."""
    try:
        if _is_awaitable(given):
            await given
    except BaseException as error:
        if not is_failure(error):  # the task is cancelled: what was opened is closed all the same
            rest = _call_all([call for call in calls[at + 1 :] if call[1] == "cleanup"], errors)
            if rest is not None:
                await rest
            raise
        middleware, name, _, _ = calls[at]
        errors = (*errors, _caused(middleware, name, error))
    if (rest := _call_all(calls[at + 1 :], errors)) is not None:
        await rest


def _clean_up_now(calls: Sequence[_Call]) -> None:
    """The process ends in a hook: close what can be closed without waiting."""
    with contextlib.suppress(MiddlewareError):
        rest = _call_all([call for call in calls if call[1] == "cleanup"])
        if rest is not None:
            rest.close()


def _caused(middleware: Middleware, name: str, error: BaseException) -> MiddlewareError:
    ours = MiddlewareError(middleware.name, name, error)
    ours.__cause__ = error
    return ours


def _wrong_answer(middleware: Middleware, hook: str, answer: object, wanted: str) -> MiddlewareError:
    return MiddlewareError(middleware.name, hook, TypeError(f"returned {type(answer).__name__}, not {wanted}"))


def _received(original: ReceivedEvent, event: Event) -> ReceivedEvent:
    """The replacement, with the offset, group and attempt of the event that it replaces."""
    if isinstance(event, ReceivedEvent):
        return event
    received = ReceivedEvent(original.record, original.group, original.attempt)
    received.meta = event.meta
    received.payload = event.payload
    return received
