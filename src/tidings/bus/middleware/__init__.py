"""
Middleware: what happens around every publish and every attempt to handle an event.

``contract`` says how to write one; ``chain`` runs them. The ones that come with it stand in the order tracing, metrics, access,
content safety, policies; yours come after.
"""

from .access import RBACMiddleware, SubscriberRule
from .chain import MiddlewareChain
from .contract import (
    Decision,
    DecisionKind,
    HandleContext,
    InvalidMiddleware,
    Middleware,
    MiddlewareError,
    Outcome,
    OutcomeKind,
    PublishContext,
)
from .flags import FeatureFlags
from .metrics import MetricsMiddleware
from .policy import PolicyDenied, PolicyMiddleware
from .safety import ContentSafetyMiddleware, SafetyFinding, default_classifier
from .tracing import TracingMiddleware

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
