"""When to connect to a node again, and when not: for everything that keeps a connection to one."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Final

from tidings.core.clock import Clock
from tidings.wire.groups import CLOSE_AUTH_FAILED, CLOSE_PROTOCOL, CLOSE_REVOKED

from .errors import ConnectFailed, LinkClosed, LinkError, RemoteStopped, RemoteUnavailable

logger = logging.getLogger(__name__)

_SECONDS_MIN: Final = 0.2
_SECONDS_MAX: Final = 15.0
_RETRY_AFTER_S_MAX: Final = 60
_AUTH_TRIES_MAX: Final = 5
_TOO_BIG: Final = 1009
_HOPELESS_CODES: Final = frozenset({_TOO_BIG, CLOSE_PROTOCOL, CLOSE_REVOKED})
"""The node closes for what we said, or who we are: it would do so again."""


def full_jitter(attempt: int, seconds_min: float, seconds_max: float, rng: random.Random) -> float:
    """
    How long to wait before the next attempt: anything between nothing and a bound that doubles from attempt to attempt.

    The whole range is random, so that clients that lost their server at the same moment do not come back at the same moment.
    """
    return rng.uniform(0.0, min(seconds_max, seconds_min * 2.0 ** min(attempt, 32)))


def retry_after_of(headers: Mapping[str, str]) -> int | None:
    """After how many seconds an answer says to come again, if it does; a minute at most, since what keeps us out may be lifted."""
    said = headers.get("retry-after", "")
    return min(int(said), _RETRY_AFTER_S_MAX) if said.isascii() and said.isdigit() and len(said) < 10 else None


class Reconnecting:
    """
    The pauses between attempts, and the end of them.

        while True:
            try:
                link = await open_link(...)
                ...
                reconnecting.succeeded()
                ...
            except LinkError as problem:
                await reconnecting.pause(problem)

    Args:
        url: For messages.
        clock, rng: Replaceable for tests.
        patience_s: How long to go on without success; ``None`` for as long as it takes, 0 for not at all.
        may_differ: Whether each connection shows a fresh token, so that one that is not accepted need not be the end.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        rng: random.Random,
        patience_s: float | None = None,
        may_differ: bool = False,
    ) -> None:
        self._url = url
        self._clock = clock
        self._rng = rng
        self._patience_s = patience_s
        self._may_differ = may_differ
        self._failing_since: float | None = None
        self._failures = self._refusals = 0

    def succeeded(self) -> None:
        """The node has answered: the next failure is the first again."""
        self._failing_since = None
        self._failures = self._refusals = 0

    async def pause(self, problem: LinkError, *, delay_s_min: float = 0.0) -> None:
        """
        Wait before the next attempt, after one that ended like this.

        Args:
            problem: How it ended.
            delay_s_min: Wait at least this long.

        Raises:
            RemoteStopped: Connecting again would end the same way.
            RemoteUnavailable: The patience is over.
        """
        code = problem.close_code if isinstance(problem, LinkClosed) else None
        self._refusals += code == CLOSE_AUTH_FAILED
        is_refused = self._refusals > 0 and not (self._may_differ and self._refusals < _AUTH_TRIES_MAX)
        if is_refused or code in _HOPELESS_CODES:
            raise RemoteStopped(self._url, str(problem)) from problem
        delay_s = full_jitter(self._failures, _SECONDS_MIN, _SECONDS_MAX, self._rng)
        if isinstance(problem, ConnectFailed):
            delay_s += problem.retry_after_s or 0
        delay_s += delay_s_min
        now = self._clock.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if self._patience_s is not None:
            left_s = self._failing_since + self._patience_s - now
            if left_s <= 0:
                raise RemoteUnavailable(self._url, str(problem)) from problem
            delay_s = min(delay_s, left_s)
        self._failures += 1
        logger.warning("%s; connecting again in %.1f s", problem, delay_s)
        await self._clock.sleep(delay_s)
