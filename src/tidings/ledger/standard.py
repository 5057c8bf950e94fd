"""The parts that every ledger has."""

from __future__ import annotations

from typing import Final

from .custody import Custodies
from .flight_mode import FlightModes
from .marks import Marks
from .recovery import PartMaker

STANDARD_PARTS: Final[tuple[PartMaker, ...]] = (
    Marks,
    Custodies,
    FlightModes,
)
