"""The ledger: authoritative stores that are folded from the log, and whose every change is told as a happening."""

from .commands import Command, Outcome
from .ledger import Ledger, open_ledger
from .settings import LedgerSettings
from .state import LedgerState, Part

__all__ = ["Command", "Ledger", "LedgerSettings", "LedgerState", "Outcome", "Part", "open_ledger"]
