"""The parts that every ledger has."""

from __future__ import annotations

from typing import Final

from .admin_ledger import AdminLedger
from .catalogue import CurrentCatalogue
from .conflicts import ClaimLog, Conflicts
from .custody import Custodies
from .factories import FactoryInstances
from .flight_mode import FlightModes
from .grammar import GrammarOrphans
from .marks import Marks
from .recovery import PartMaker
from .relations import Relations
from .subjects import Subjects

STANDARD_PARTS: Final[tuple[PartMaker, ...]] = (
    Marks,
    CurrentCatalogue,
    Subjects,
    Relations,
    Conflicts,
    ClaimLog,
    AdminLedger,
    GrammarOrphans,
    Custodies,
    FactoryInstances,
    FlightModes,
)
