"""The attention gate: pure deciding modules, and ``AttentionGate`` that lives with the decisions."""

from .gate import AttentionGate
from .profiles import CONFIGURED, PROFILES, README, GateProfile
from .requests import Action, GateRequest, GateResponse, Intent, request_of

__all__ = [
    "CONFIGURED",
    "PROFILES",
    "README",
    "Action",
    "AttentionGate",
    "GateProfile",
    "GateRequest",
    "GateResponse",
    "Intent",
    "request_of",
]
