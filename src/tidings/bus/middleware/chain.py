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

import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
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

__all__ = ["HandleHooks", "MiddlewareChain", "PublishHooks"]

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

    def run_before_publish(self, ctx: PublishContext) -> Coroutine[Any, Any, None] | None:
        """
        Call every ``before_publish``; after that, ``ctx.event`` is the event to store.

        Raises:
            MiddlewareError: A hook refused the event or failed; no further one was called. ``run_after_publish`` is due all the
                same, with this error.
        """
        return self._before_publish(ctx, iter(self.publish_hooks))

    def _before_publish(
        self, ctx: PublishContext, remaining: Iterator[PublishHooks]
    ) -> Coroutine[Any, Any, None] | None:
        for hooks in remaining:
            if not hooks.middleware.enabled:
                continue
            ctx.entered.append(hooks)
            if hooks.before is not None:
                answer = _call(hooks.middleware, "before_publish", hooks.before, ctx)
                if answer is not None:
                    return self._replace_published(ctx, hooks.middleware, answer, remaining)
        return None

    async def _replace_published(
        self, ctx: PublishContext, middleware: Middleware, answer: Any, remaining: Iterator[PublishHooks]
    ) -> None:
        replacement = await _answer(middleware, "before_publish", answer)
        if replacement is not None:
            if not isinstance(replacement, Event):
                raise _wrong_answer(middleware, "before_publish", replacement, "an Event or None")
            ctx.event = replacement
        if (rest := self._before_publish(ctx, remaining)) is not None:
            await rest

    def run_after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> Coroutine[Any, Any, None] | None:
        """
        Call ``after_publish`` of all that were entered, in reverse, also after one that raised.

        Raises:
            MiddlewareError: A hook raised. What the log committed stays committed: do not take this for a failed publish.
        """
        entered, ctx.entered = ctx.entered, []
        return _call_all(
            iter([(m, "after_publish", after, (ctx, verdict)) for m, _, after in reversed(entered) if after]), iter(())
        )

    def run_before_handle(self, ctx: HandleContext) -> Coroutine[Any, Any, Decision | None] | None:
        """
        Call every ``before_handle``, up to the first decision that keeps the event from its handler.

        Returns:
            What to await for that decision, or None: then ``ctx.event``, which may have been replaced, goes to the handler.

        Raises:
            MiddlewareError: A hook failed. ``run_after`` is due all the same.
        """
        return self._before_handle(ctx, iter(self.handle_hooks))

    def _before_handle(
        self, ctx: HandleContext, remaining: Iterator[HandleHooks]
    ) -> Coroutine[Any, Any, Decision | None] | None:
        for hooks in remaining:
            if not hooks.middleware.enabled:
                continue
            ctx.entered.append(hooks)
            if hooks.before is not None:
                answer = _call(hooks.middleware, "before_handle", hooks.before, ctx)
                if answer is not None:
                    return self._decide(ctx, hooks.middleware, answer, remaining)
        return None

    async def _decide(
        self, ctx: HandleContext, middleware: Middleware, answer: Any, remaining: Iterator[HandleHooks]
    ) -> Decision | None:
        decision = await _answer(middleware, "before_handle", answer)
        if decision is not None:
            if not isinstance(decision, Decision):
                raise _wrong_answer(middleware, "before_handle", decision, "a Decision or None")
            if decision.kind is not DecisionKind.REPLACE:
                return msgspec.structs.replace(decision, by=middleware.name)
            if decision.event is None:
                raise _wrong_answer(middleware, "before_handle", decision, "an event to replace this one")
            ctx.event = _received(ctx.event, decision.event)
        rest = self._before_handle(ctx, remaining)
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
        calls: list[_Call] = [(m, "after_handle", after, (ctx, outcome)) for m, _, after, _, _ in entered if after]
        if outcome.error is not None:
            arguments = (ctx, outcome.error)
            calls = [*[(m, "on_error", hook, arguments) for m, _, _, hook, _ in entered if hook], *calls]
        return _call_all(iter(calls), iter([(m, "cleanup", hook, (ctx,)) for m, _, _, _, hook in entered if hook]))


def _hook(middleware: Middleware, name: str) -> _Hook | None:
    if getattr(type(middleware), name) is getattr(Middleware, name) and name not in vars(middleware):
        return None
    hook: _Hook = getattr(middleware, name)
    return hook


def _call(middleware: Middleware, name: str, hook: _Hook, *arguments: object) -> Any:
    """What a hook returns; perhaps something to be awaited, see ``_answer``."""
    try:
        return hook(*arguments)
    except BaseException as error:
        raise _as_ours(middleware, name, error) from error


async def _answer(middleware: Middleware, name: str, given: Any) -> Any:
    """A hook's answer itself."""
    try:
        return await given if inspect.isawaitable(given) else given
    except BaseException as error:
        raise _as_ours(middleware, name, error) from error


def _as_ours(middleware: Middleware, name: str, error: BaseException) -> MiddlewareError:
    """The error to raise for what a hook raised; what is no failure of the hook (see ``is_failure``) is raised at once."""
    if not is_failure(error):
        raise error
    return MiddlewareError(middleware.name, name, error)


def _call_all(calls: Iterator[_Call], cleanups: Iterator[_Call]) -> Coroutine[Any, Any, None] | None:
    """Call hooks whose answer does not count, and then the clean-ups, whatever is raised; the first error is raised at the end."""
    errors: list[MiddlewareError] = []
    rest = closing = None
    try:
        rest = _collect(errors, calls)
    finally:
        if rest is None:
            closing = _collect(errors, cleanups)
    if rest is None and closing is None:
        if errors:
            _raise_first(errors)
        return None
    return _await_all(errors, rest, cleanups, closing)


async def _await_all(
    errors: list[MiddlewareError],
    rest: Coroutine[Any, Any, None] | None,
    cleanups: Iterator[_Call],
    closing: Coroutine[Any, Any, None] | None,
) -> None:
    if rest is not None:
        try:
            await rest
        finally:  # also when the task is cancelled in a hook: what was opened is closed
            if (more := _collect(errors, cleanups)) is not None:
                await more
    if closing is not None:
        await closing
    _raise_first(errors)


def _collect(errors: list[MiddlewareError], calls: Iterator[_Call]) -> Coroutine[Any, Any, None] | None:
    """Make the calls and collect what they raise; if one returns something to await, what is left to be done."""
    for middleware, name, hook, arguments in calls:
        try:
            given = hook(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised on unless it is the hook's own failure
            errors.append(_collected(middleware, name, error))
            continue
        if given is not None:
            return _collect_rest(errors, calls, middleware, name, given)
    return None


async def _collect_rest(
    errors: list[MiddlewareError], calls: Iterator[_Call], middleware: Middleware, name: str, given: Any
) -> None:
    try:
        if inspect.isawaitable(given):
            await given
    except BaseException as error:  # noqa: BLE001 - as above
        errors.append(_collected(middleware, name, error))
    if (rest := _collect(errors, calls)) is not None:
        await rest


def _collected(middleware: Middleware, name: str, error: BaseException) -> MiddlewareError:
    ours = _as_ours(middleware, name, error)
    ours.__cause__ = error
    return ours


def _raise_first(errors: list[MiddlewareError]) -> None:
    if errors:
        errors[0].others = tuple(errors[1:])
        raise errors[0]


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
