"""
Whether the node is fit to serve, and why not: decided on plain values.

``/healthz`` says that the process lives and its loop turns. ``/readyz`` says whether to send it traffic; each reason has a code
that a machine can match and a sentence for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tidings.log.interface import Health

__all__ = ["Readiness", "Reason", "judge"]

_SUMMARIES: Final = {
    "node.starting": "the node is starting",
    "node.stopping": "the node is stopping",
    "node.stopped": "the node has stopped",
    "node.dispatcher_stopped": "nothing is handed out any more",
    "node.listener_failed": "part of the node has failed",
    "node.dispatcher_lag": "committed records were not handed out yet",
    "log.storage_full": "there is no room for events",
    "log.fenced": "the log takes no events",
    "log.not_durable": "acknowledged events can be lost in a crash",
    "bus.stands_still": "a group or a topic stands still",
    "access.closed": "everything is denied",
    "access.no_keys": "no token can be verified",
}


class Reason(msgspec.Struct, frozen=True):
    """One thing that stands in the way, or that somebody should look at."""

    code: str
    detail: str

    @property
    def summary(self) -> str:
        """The same for strangers: no path, no name, no number of ours."""
        return _SUMMARIES.get(self.code, "ask the operator of this node")


class Readiness(msgspec.Struct, frozen=True):
    """What ``/readyz`` answers."""

    is_ready: bool
    reasons: tuple[Reason, ...] = ()
    """Why it is not ready."""
    warnings: tuple[Reason, ...] = ()
    """What is wrong and keeps nobody from using the rest."""
    seq: int = 0
    """The last seq committed."""
    dispatched_seq: int = 0
    """The last seq handed to the doors."""


def judge(
    phase: str,
    log: Health,
    *,
    seq: int,
    dispatched_seq: int,
    lag_max: int,
    problems: Sequence[str] = (),
    has_dispatcher_stopped: bool = False,
    bus_problem: str | None = None,
) -> Readiness:
    """
    Whether a node in this state is ready.

    Args:
        phase: ``starting``, ``running`` or ``stopping``.
        log: The log's own health.
        seq, dispatched_seq, lag_max: How far the doors are behind the log, and how far they may be.
        problems: Listeners that failed, or the dispatcher itself.
        has_dispatcher_stopped: Whether nothing is handed out any more.
        bus_problem: A group or topic that stands still.
    """
    reasons: list[Reason] = []
    if phase != "running":
        reasons.append(Reason(f"node.{phase}", f"the node is {phase}"))
    if log.is_storage_full:
        reasons.append(Reason("log.storage_full", log.problem or "there is no room for events"))
    elif not log.is_writable:
        reasons.append(Reason("log.fenced", log.problem or "the log takes no events"))
    if has_dispatcher_stopped:
        reasons.append(Reason("node.dispatcher_stopped", "; ".join(problems) or "nothing is handed out any more"))
    elif problems:
        reasons.append(Reason("node.listener_failed", "; ".join(problems)))
    elif seq - dispatched_seq > lag_max:
        detail = f"{seq - dispatched_seq} committed records were not handed out yet, more than {lag_max}"
        reasons.append(Reason("node.dispatcher_lag", detail))
    warnings: list[Reason] = []
    if not log.is_durable:
        warnings.append(
            Reason("log.not_durable", "acknowledged events can be lost in a crash: log.durability is not 'sync'")
        )
    if bus_problem is not None and log.is_writable:
        warnings.append(Reason("bus.stands_still", bus_problem))
    return Readiness(not reasons, tuple(reasons), tuple(warnings), seq, dispatched_seq)
