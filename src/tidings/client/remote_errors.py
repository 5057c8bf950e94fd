"""
What a program that talks to a node is told when something does not work.

    RemoteError
    ├── RemoteRefused           the node said no; ``error_code`` is the node's own code for it
    ├── RemoteUnavailable       the node was not reached in time; whether an event was stored is unknown
    ├── RemoteStopped           connecting again is of no use: the token is not accepted, or the two do not understand each other
    └── RemoteClosed            this end was closed
"""

from __future__ import annotations

from tidings.core.errors import TidingsError
from tidings.wire.events import ErrorInfo

__all__ = ["RemoteClosed", "RemoteError", "RemoteRefused", "RemoteStopped", "RemoteUnavailable"]


class RemoteError(TidingsError):
    """The root of what talking to a node raises."""

    code = "remote.error"


class RemoteRefused(RemoteError):
    """The node refused; ``error_code`` says why and is safe to match on, ``may_retry`` whether trying again can help."""

    code = "remote.refused"

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.code, error.detail)
        self.error_code = error.code
        self.detail = error.detail
        self.may_retry = error.retryable
        self.hint = error.hint

    def describe(self) -> str:
        return f"the node refused: {self.detail} ({self.error_code})"


class RemoteUnavailable(RemoteError):
    """The node was not reached, or did not answer. An event may have been stored; sending it again with its id settles it."""

    code = "remote.unavailable"
    retryable = True

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url = url
        self.problem = problem

    def describe(self) -> str:
        return f"no answer from {self.url}: {self.problem}"


class RemoteStopped(RemoteError):
    """Connecting again as things are would end the same way."""

    code = "remote.stopped"
    hint = "correct the reason, then start anew"

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url = url
        self.problem = problem

    def describe(self) -> str:
        return f"the connection to {self.url} was given up: {self.problem}"


class RemoteClosed(RemoteError):
    """This end was closed."""

    code = "remote.closed"

    def describe(self) -> str:
        return "the connection to the node was closed at this end"
