"""Happenings: notices of changes in the ledger, live and replayed."""

from . import variants as _variants  # noqa: F401 - declared with the package
from .bus import Envelope, HappeningsBus, Receiver
from .coalescing import Coalescing
from .facade import Happenings
from .filters import HappeningFilter
from .happening import AnyHappening, Happening, UnknownHappening
from .subscription import HappeningSubscription, History

__all__ = [
    "AnyHappening",
    "Coalescing",
    "Envelope",
    "Happening",
    "HappeningFilter",
    "HappeningSubscription",
    "Happenings",
    "HappeningsBus",
    "History",
    "Receiver",
    "UnknownHappening",
]
