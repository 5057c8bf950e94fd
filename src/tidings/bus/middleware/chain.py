"""
The chain: middlewares in order, compiled to the hooks they really have.

Compiling happens when the chain is made and when a feature flag changes, never for an event: an event pays for the hooks that
are there, and with none (``is_empty``) the bus leaves the chain out altogether.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec

from tidings.core.events import Event
from tidings.log.interface import Verdict

from ..events import ReceivedEvent
from ..outcomes import is_failure
from .contract import (
    Decision,
    DecisionKind,
    HandleContext,
    InvalidMiddleware,
    Middleware,
    MiddlewareError,
    Outcome,
    PublishContext,
)
from .flags import FeatureFlags

__all__ = ["HandleHooks", "MiddlewareChain", "PublishHooks"]

_Hook = Callable[..., Any]


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
        self._is_empty = True
        self._version = -1

    @property
    def publish_hooks(self) -> tuple[PublishHooks, ...]:
        """Who takes part in a publish, as the flags stand. Empty: leave the publish half out."""
        if self._version != self.flags.version:
            self._compile()
        return self._publish

    @property
    def handle_hooks(self) -> tuple[HandleHooks, ...]:
        """Who takes part in an attempt, as the flags stand. Empty: leave the handle half out."""
        if self._version != self.flags.version:
            self._compile()
        return self._handle

    @property
    def is_empty(self) -> bool:
        """Whether nobody takes part in anything, as the flags stand."""
        if self._version != self.flags.version:
            self._compile()
        return self._is_empty

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
        self._is_empty = not self._handle and not self._publish
        self._version = self.flags.version

    async def run_before_publish(self, ctx: PublishContext) -> Event:
        """
        Ask every ``before_publish``.

        Returns:
            The event to store, which is ``ctx.event`` as well.

        Raises:
            MiddlewareError: A hook refused the event or failed; nothing more was asked. ``run_after_publish`` is due all the
                same, with this error.
        """
        for hooks in self.publish_hooks:
            if not hooks.middleware.enabled:
                continue
            ctx.entered.append(hooks)
            if hooks.before is None:
                continue
            replacement = _call(hooks.middleware, "before_publish", hooks.before, ctx)
            if replacement is not None:
                replacement = await _answer(hooks.middleware, "before_publish", replacement)
            if replacement is not None:
                if not isinstance(replacement, Event):
                    raise _wrong_answer(hooks.middleware, "before_publish", replacement, "an Event or None")
                ctx.event = replacement
        return ctx.event

    async def run_after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        """
        Tell every ``after_publish`` of those whose turn came, in reverse, also after one that raised.

        Raises:
            MiddlewareError: A hook raised. What the log committed stays committed: do not take this for a failed publish.
        """
        entered, ctx.entered = ctx.entered, []
        errors: list[MiddlewareError] = []
        for hooks in reversed(entered):
            if hooks.after is not None and (
                rest := _collect(errors, hooks.middleware, "after_publish", hooks.after, ctx, verdict)
            ):
                await rest
        _raise_first(errors)

    async def run_before_handle(self, ctx: HandleContext) -> Decision | None:
        """
        Ask every ``before_handle``, up to the first decision that keeps the event from its handler.

        Returns:
            That decision, or None: then ``ctx.event``, which may have been replaced, goes to the handler.

        Raises:
            MiddlewareError: A hook failed. ``run_after`` is due all the same.
        """
        for hooks in self.handle_hooks:
            if not hooks.middleware.enabled:
                continue
            ctx.entered.append(hooks)
            if hooks.before is None:
                continue
            decision = _call(hooks.middleware, "before_handle", hooks.before, ctx)
            if decision is not None:
                decision = await _answer(hooks.middleware, "before_handle", decision)
            if decision is None:
                continue
            if not isinstance(decision, Decision):
                raise _wrong_answer(hooks.middleware, "before_handle", decision, "a Decision or None")
            if decision.kind is not DecisionKind.REPLACE:
                return msgspec.structs.replace(decision, by=hooks.middleware.name)
            if decision.event is None:
                raise _wrong_answer(hooks.middleware, "before_handle", decision, "an event to replace this one")
            ctx.event = _received(ctx.event, decision.event)
        return None

    async def run_after(self, ctx: HandleContext, outcome: Outcome) -> None:
        """
        Tell those whose turn came how it ended: ``on_error`` (if there was one), ``after_handle``, then ``cleanup``.

        Each of the three goes round in reverse order, and all of it runs, also after a hook that raised. A second call for
        the same context does nothing.

        Raises:
            MiddlewareError: A hook raised; the attempt counts as failed.
        """
        entered, ctx.entered = ctx.entered, []
        entered.reverse()
        errors: list[MiddlewareError] = []
        try:
            if outcome.error is not None:
                for hooks in entered:
                    if hooks.on_error is not None and (
                        rest := _collect(errors, hooks.middleware, "on_error", hooks.on_error, ctx, outcome.error)
                    ):
                        await rest
            for hooks in entered:
                if hooks.after is not None and (
                    rest := _collect(errors, hooks.middleware, "after_handle", hooks.after, ctx, outcome)
                ):
                    await rest
        finally:
            # Also when the task is cancelled in a hook above: what was opened is closed.
            for hooks in entered:
                if hooks.cleanup is not None and (
                    rest := _collect(errors, hooks.middleware, "cleanup", hooks.cleanup, ctx)
                ):
                    await rest
        _raise_first(errors)


def _hook(middleware: Middleware, name: str) -> _Hook | None:
    if getattr(type(middleware), name) is getattr(Middleware, name) and name not in vars(middleware):
        return None
    hook: _Hook = getattr(middleware, name)
    return hook


# Most hooks are plain functions that answer nothing: for those no coroutine is made, and nothing is awaited.


def _call(middleware: Middleware, name: str, hook: _Hook, *arguments: object) -> Any:
    """What a hook answers; perhaps something to be awaited, see ``_answer``."""
    try:
        return hook(*arguments)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise MiddlewareError(middleware.name, name, error) from error


async def _answer(middleware: Middleware, name: str, given: Any) -> Any:
    """A hook's answer itself."""
    try:
        return await given if inspect.isawaitable(given) else given
    except BaseException as error:
        if not is_failure(error):
            raise
        raise MiddlewareError(middleware.name, name, error) from error


def _collect(
    errors: list[MiddlewareError], middleware: Middleware, name: str, hook: _Hook, *arguments: object
) -> Coroutine[Any, Any, None] | None:
    """Call a hook whose answer does not count; what is left to be awaited."""
    try:
        given = _call(middleware, name, hook, *arguments)
    except MiddlewareError as error:
        errors.append(error)
        return None
    return None if given is None else _collect_answer(errors, middleware, name, given)


async def _collect_answer(errors: list[MiddlewareError], middleware: Middleware, name: str, given: Any) -> None:
    try:
        await _answer(middleware, name, given)
    except MiddlewareError as error:
        errors.append(error)


def _raise_first(errors: list[MiddlewareError]) -> None:
    if errors:
        errors[0].others = tuple(errors[1:])
        raise errors[0]


def _wrong_answer(middleware: Middleware, hook: str, answer: object, wanted: str) -> MiddlewareError:
    return MiddlewareError(middleware.name, hook, TypeError(f"returned {type(answer).__name__}, not {wanted}"))


def _received(place: ReceivedEvent, event: Event) -> ReceivedEvent:
    """The replacement, at the place of the event it stands for."""
    if isinstance(event, ReceivedEvent):
        return event
    received = ReceivedEvent(place.record, place.group, place.attempt)
    received.meta = event.meta
    received.payload = event.payload
    return received
