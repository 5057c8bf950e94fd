"""
Middleware: what runs around every publish and every attempt to handle an event.

``base`` says how to write one; ``chain`` runs them. The built-in ones run in the order tracing, metrics, access, content safety,
policies; yours come after.
"""

from .base import (
    Decision,
    DecisionKind,
    FeatureFlags,
    HandleContext,
    InvalidMiddleware,
    Middleware,
    MiddlewareError,
    Outcome,
    OutcomeKind,
    PublishContext,
)
from .chain import MiddlewareChain
from .checks import (
    ContentSafetyMiddleware,
    PolicyDenied,
    PolicyMiddleware,
    RBACMiddleware,
    SafetyFinding,
    SubscriberRule,
    default_classifier,
)
from .telemetry import MetricsMiddleware, TracingMiddleware

__all__ = [
    "ContentSafetyMiddleware",
    "Decision",
    "DecisionKind",
    "FeatureFlags",
    "HandleContext",
    "InvalidMiddleware",
    "MetricsMiddleware",
    "Middleware",
    "MiddlewareChain",
    "MiddlewareError",
    "Outcome",
    "OutcomeKind",
    "PolicyDenied",
    "PolicyMiddleware",
    "PublishContext",
    "RBACMiddleware",
    "SafetyFinding",
    "SubscriberRule",
    "TracingMiddleware",
    "default_classifier",
]
