"""
What retention may take the lake's word for: how far it holds each topic.

The word of a state file is not enough. Before anything is dropped for good, the table itself has to reach as far, and its files
have to be there; a lake that cannot be looked at, or that is damaged, ends retention with an error, and the log keeps everything.
"""

from __future__ import annotations

import importlib.util
import os

from tidings.core.clock import SYSTEM_CLOCK

from .state_files import archived_seq, load_archived
from .storage import Storage

# No library of the lake is imported above: nodes ask what is archived on machines that have none.


def held_by_lake(place: Storage, epoch: str, *, is_kept: bool) -> dict[str, int] | None:
    """
    For each topic the offset up to which the lake holds it, as ``plan_retention`` wants it; ``None`` where no lake is kept.

    Where the lake's libraries are not installed, what its last run noted is all that can be known.

    Args:
        place: Where the lake is, or would be.
        epoch: The log's.
        is_kept: Whether somebody said that there is one. Otherwise there is one if there is such a folder, or a link to one.

    Raises:
        LakeError: The lake is not what it was.
    """
    if not is_kept and not os.path.lexists(place.path):
        return None
    found = load_archived(place, epoch)
    if found and importlib.util.find_spec("deltalake") is not None:
        from .damage import check_held
        from .lake import Lake

        check_held(Lake(place, SYSTEM_CLOCK), epoch, archived_seq(place, epoch))
    return found
