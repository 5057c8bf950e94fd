"""The WebSocket close codes of the sync door. 4000 and above are its own; the others mean what they always mean."""

from __future__ import annotations

import enum

__all__ = ["CloseCode"]


class CloseCode(enum.IntEnum):
    """Why a connection was closed, and so what its client should do next."""

    NORMAL = 1000
    """The client said goodbye."""
    VERSION = 1002
    """Version or profile do not fit: do not come back before one side was updated."""
    AUTH_FAILED = 1008
    """The token was not believed, or what it allowed is not allowed any more: come back with another one."""
    SERVER_ERROR = 1011
    """Something failed here: come back and send again."""
    RESTART = 1012
    """The server is stopping: come back later."""
    TRY_AGAIN_LATER = 1013
    """There is too much to send or too many are connected: come back and catch up by sync."""
    REPLACED = 4001
    """The same client has connected again elsewhere: do not come back by yourself."""
    SILENT = 4002
    """Nothing was heard for too long: come back."""
    TOKEN_EXPIRED = 4003
    """The token has run out: come back with a fresh one."""
