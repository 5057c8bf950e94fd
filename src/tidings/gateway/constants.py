"""Bounds and weights of the gateway that are no settings."""

from __future__ import annotations

from typing import Final

ENTRIES_PER_ENVELOPE: Final = 16
"""An envelope that waits counts as much against the ceiling as this many entries of it in subscribers' buffers."""
ENTRIES_SHARE: Final = 32
"""One part in this many of the ceiling is kept for entries: what was taken in must be able to go out."""
PAUSE_PERCENT: Final = 80
"""At this much of the ceiling, intake takes graph events only."""
RESUME_PERCENT: Final = 60
"""At this much it takes all classes again."""
OWN_EVENTS_RESERVE: Final = 16
"""Places below the ceiling that are kept for what the gateway itself has to tell."""
SOURCE_SHARE: Final = 4
"""One source, but that of graph events, gets at most one part in this many of the ceiling."""
STEP_ENVELOPES_MAX: Final = 512
"""Envelopes that an engine moves before others get their turn."""
STEP_DELIVERIES_MAX: Final = 10_000
"""Entries that are made in buffers before others get their turn: an envelope for many subscribers is more work than one for few."""

SUMMARY_KEYS_MAX: Final = 16
SUMMARY_CHARS_MAX: Final = 256
"""Of one text in a payload summary."""
SUMMARY_ITEMS_MAX: Final = 64
"""Texts in one list of a payload summary, and so objects in one event."""
SUMMARY_BYTES_MAX: Final = 4_096
"""Of a payload summary, encoded."""
ENVELOPE_BYTES_MAX: Final = 8_192
"""Of what follows ``payload`` in a frame."""

APP_EVENT_TYPES_MAX: Final = 256
"""Event types that one app may declare."""
APP_SOURCES_MAX: Final = 4_096
"""Apps that may declare event types."""

CHANNELS_MAX: Final = 32
"""Channels of one subscription."""
SUBSCRIBE_TIMEOUT_S: Final = 10.0
SEND_FAILURES_MAX: Final = 3
"""As many failed sends in a row end a connection."""
FLUSH_TIMEOUT_S: Final = 2.0
"""How long a stop waits for audit records."""
OWN_EVENTS_PER_S_MAX: Final = 10
"""Of each name, from each manager; what is more is merged."""
