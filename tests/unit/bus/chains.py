"""A chain for tests: what it leaves to be awaited is awaited."""

from __future__ import annotations

from typing import Any

from tidings.bus.middleware import chain
from tidings.log.interface import Verdict
from tidings.middleware import Decision, HandleContext, Outcome, PublishContext


class MiddlewareChain(chain.MiddlewareChain):
    """Every ``run_...`` as a coroutine."""

    async def run_before_publish(self, ctx: PublishContext, hooks: Any = None) -> None:
        if (rest := super().run_before_publish(ctx, hooks)) is not None:
            await rest

    async def run_after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        if (rest := super().run_after_publish(ctx, verdict)) is not None:
            await rest

    async def run_before_handle(self, ctx: HandleContext, hooks: Any = None) -> Decision | None:
        rest = super().run_before_handle(ctx, hooks)
        return None if rest is None else await rest

    async def run_after(self, ctx: HandleContext, outcome: Outcome) -> None:
        if (rest := super().run_after(ctx, outcome)) is not None:
            await rest
