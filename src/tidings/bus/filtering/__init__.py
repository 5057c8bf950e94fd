"""
Filters: which events of a topic a subscription wants.

They are built once, with everything compiled and every argument checked, and then asked about each event. See ``base`` for
what becomes of an event whose filter raises.
"""

from .base import (
    CompoundFilter,
    Filter,
    FilterChain,
    FilterError,
    FilterResult,
    FilterStatistics,
    InvalidFilter,
)
from .filters import (
    CustomFunctionFilter,
    FilterManager,
    JSONPathFilter,
    SimpleFilter,
    is_error_event,
    is_high_priority,
)

__all__ = [
    "CompoundFilter",
    "CustomFunctionFilter",
    "Filter",
    "FilterChain",
    "FilterError",
    "FilterManager",
    "FilterResult",
    "FilterStatistics",
    "InvalidFilter",
    "JSONPathFilter",
    "SimpleFilter",
    "is_error_event",
    "is_high_priority",
]
