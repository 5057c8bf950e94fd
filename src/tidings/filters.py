"""The bus's filters, under the name its document imports them by."""

from tidings.bus.filtering import (
    CompoundFilter,
    CustomFunctionFilter,
    Filter,
    FilterChain,
    FilterError,
    FilterManager,
    FilterResult,
    FilterStatistics,
    InvalidFilter,
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
