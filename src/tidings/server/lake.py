"""The lake behind a node's log: what retention has dropped is read from there, and readers notice nothing but the time it takes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from tidings.core.clock import Clock
from tidings.core.errors import SettingsError
from tidings.log.encryption import Encryptor
from tidings.log.interface import Log

__all__ = ["over_lake"]

_NEEDED: Final = ("pyarrow", "deltalake")


def over_lake(log: Log, path: str | None, *, clock: Clock, encryptor: Encryptor | None) -> Log:
    """
    The log, with the lake behind it if there is to be one. The lake's folder need not exist yet.

    Raises:
        SettingsError: What reading a lake takes is not installed.
    """
    if path is None:
        return log
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError("server.lake_path", f"needs {', '.join(missing)}: pip install 'tidings[pipeline]'")
    # Only here: a node without a lake must not pay for loading all that.
    from tidings.pipeline.lake import Lake
    from tidings.pipeline.serving import ArchivedLog, LakeArchive

    return ArchivedLog(log, LakeArchive(Lake(Path(path), clock), encryptor=encryptor))
