"""
Up to which seq each job's summary went to the log.

A job commits its tables first and is summed up after that. If a run dies in between, this file says that the summary is
still owed. Said twice is no harm: the ids of summaries depend on what they say, and the log knows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from .positions import replace_atomically

__all__ = ["load_published", "save_published"]

_NAME: Final = "published.json"


class _Published(msgspec.Struct, frozen=True):
    epoch: str
    jobs: dict[str, int]


def load_published(lake: Path, epoch: str) -> dict[str, int]:
    """The seq of each job's last summary; nothing if that cannot be told."""
    try:
        found = msgspec.json.decode((lake / _NAME).read_bytes(), type=_Published)
    except (OSError, msgspec.DecodeError):
        return {}
    return dict(found.jobs) if found.epoch == epoch else {}


def save_published(lake: Path, epoch: str, jobs: dict[str, int]) -> None:
    """Note the seq of each job's last summary."""
    replace_atomically(lake / _NAME, msgspec.json.encode(_Published(epoch, jobs)) + b"\n")
