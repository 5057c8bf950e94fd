"""The log on files, inside the process: one writer a workspace, any number of readers."""

from .engine import EmbeddedLog
from .follower import FollowerLog, open_follower
from .opening import open_log

__all__ = ["EmbeddedLog", "FollowerLog", "open_follower", "open_log"]
