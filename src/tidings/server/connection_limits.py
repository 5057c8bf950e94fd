"""
What one socket may do: little before its peer has shown a token, and at a bounded rate after that.

Every endpoint gets these limits by being one: they are kept where frames come in (``sockets``), for all paths and dialects alike. Before
authentication there is a number of messages and control frames, and no refill. After it, both have a rate; a second's worth may come at
once.
"""

from __future__ import annotations

from typing import Final

from .settings import ServerSettings

__all__ = ["ConnectionLimits"]

_NEVER: Final = -1.0


class ConnectionLimits:
    """
    The allowances of one connection.

    Args:
        settings: The bounds.
        now_s: When it was opened, by the clock that never goes back.
    """

    __slots__ = ("_at_s", "_controls", "_controls_rate", "_messages", "_messages_rate", "is_authenticated", "opened_s")

    def __init__(self, settings: ServerSettings, now_s: float) -> None:
        self.opened_s = self._at_s = now_s
        self.is_authenticated = False
        self._messages = self._controls = float(settings.unauthenticated_messages_max)
        self._messages_rate = self._controls_rate = 0.0

    def authenticated(self, settings: ServerSettings, now_s: float) -> None:
        """The peer has shown a token: from now on it has a rate."""
        self.is_authenticated = True
        self._at_s = now_s
        self._messages = self._messages_rate = float(settings.messages_per_s_max)
        self._controls = self._controls_rate = float(settings.control_frames_per_s_max)

    def take_message(self, now_s: float) -> float:
        """Room for one message: 0 if there was, the seconds until there is some, below 0 if there will be none."""
        self._refill(now_s)
        if self._messages >= 1.0:
            self._messages -= 1.0
            return 0.0
        return (1.0 - self._messages) / self._messages_rate if self._messages_rate else _NEVER

    def take_control(self, now_s: float) -> bool:
        """Room for one control frame."""
        self._refill(now_s)
        if self._controls < 1.0:
            return False
        self._controls -= 1.0
        return True

    def _refill(self, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        if passed_s > 0.0 and self._messages_rate:
            self._messages = min(self._messages_rate, self._messages + passed_s * self._messages_rate)
            self._controls = min(self._controls_rate, self._controls + passed_s * self._controls_rate)
