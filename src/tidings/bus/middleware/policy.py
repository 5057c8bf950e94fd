"""Plugging in checks of your own, without writing a class."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from ..errors import BusError
from .contract import Decision, HandleContext, InvalidMiddleware, Middleware, PublishContext

__all__ = ["HandleCheck", "PolicyDenied", "PolicyMiddleware", "PublishCheck"]

HandleAnswer = Decision | str | bool | None
HandleCheck = Callable[[HandleContext], HandleAnswer | Awaitable[HandleAnswer]]
PublishAnswer = str | bool | None
PublishCheck = Callable[[PublishContext], PublishAnswer | Awaitable[PublishAnswer]]


class PolicyDenied(BusError):
    """A policy refused the event; it was not stored."""

    code = "bus.policy_denied"

    def __init__(self, policy: str, reason: str) -> None:
        super().__init__(policy, reason)
        self.policy = policy
        self.reason = reason

    def describe(self) -> str:
        return f"policy {self.policy!r} refused the event: {self.reason}"


class PolicyMiddleware(Middleware):
    """
    Ask a function whether an event may be handled, and another whether it may be published.

    A check answers None or True to allow, and False or a reason to deny; before a handler it may also answer a ``Decision``. One
    that raises denies nothing for good: the attempt is tried again, and the publish fails.

    Args:
        check: Asked before each handler.
        on_publish: Asked before each publish.
        name: What feature flags and errors call it.

    Raises:
        InvalidMiddleware: There is no check, or one is not callable.
    """

    priority = 50

    def __init__(
        self, check: HandleCheck | None = None, *, on_publish: PublishCheck | None = None, name: str = "policy"
    ) -> None:
        if check is None and on_publish is None:
            raise InvalidMiddleware(name, "check", "there is nothing to check")
        for argument, function in (("check", check), ("on_publish", on_publish)):
            if function is not None and not callable(function):
                raise InvalidMiddleware(name, argument, "must be callable")
        self.name = name
        self._check = check
        self._on_publish = on_publish

    async def before_publish(self, ctx: PublishContext) -> None:
        """Refuse, or let pass."""
        if self._on_publish is None:
            return
        answer = self._on_publish(ctx)
        if inspect.isawaitable(answer):
            answer = await answer
        if (reason := self._reason(answer)) is not None:
            raise PolicyDenied(self.name, reason)

    async def before_handle(self, ctx: HandleContext) -> Decision | None:
        """Deny, decide otherwise, or let pass."""
        if self._check is None:
            return None
        answer = self._check(ctx)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Decision):
            return answer
        reason = self._reason(answer)
        return None if reason is None else Decision.deny(reason)

    def _reason(self, answer: object) -> str | None:
        if answer is None or answer is True:
            return None
        if answer is False:
            return f"denied by {self.name}"
        if isinstance(answer, str):
            return answer or f"denied by {self.name}"
        # Anything else is a mistake in the check, and a mistake must not let an event through.
        raise TypeError(f"the check answered {type(answer).__name__}; None, a bool or a reason was expected")
