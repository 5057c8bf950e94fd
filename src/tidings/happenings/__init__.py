"""Happenings: notices of changes in the ledger, live and replayed."""

from .bus import Envelope, HappeningsBus, Receiver
from .coalescing import Coalescing
from .facade import Happenings
from .filters import HappeningFilter
from .subscription import HappeningSubscription, History
from .variants import AnyHappening, Happening, UnknownHappening

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
