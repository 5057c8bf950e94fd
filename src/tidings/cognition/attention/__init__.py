"""The attention gate: pure deciding modules, and ``AttentionGate`` that lives with the decisions."""

from .gate import AttentionGate
from .requests import (
    CONFIGURED,
    PROFILES,
    README,
    GateAction,
    GateProfile,
    GateRequest,
    GateResponse,
    Intent,
    request_of,
)

__all__ = [
    "CONFIGURED",
    "PROFILES",
    "README",
    "AttentionGate",
    "GateAction",
    "GateProfile",
    "GateRequest",
    "GateResponse",
    "Intent",
    "request_of",
]
