"""
Content safety: events that hold what no payload should are refused before they are stored, or set aside before a handler.

Payloads are meant to be redacted before they are published, and hold derived facts only. This is the net below: a
classifier looks at the event when it is published, and again before it is handled, as it may have reached the log by another
way. The one that comes with it looks for raw media and for what looks like a secret, which are refused, and heeds the safety
pipeline's own signals (``meta.extra["safety"]``), which send an event to quarantine. What it reports names the kind and the
place, never the content.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from tidings.core.events import Event

from .contract import Decision, HandleContext, InvalidMiddleware, Middleware, PublishContext
from .policy import PolicyDenied

__all__ = ["ContentSafetyMiddleware", "SafetyFinding", "default_classifier"]

_NODES_COUNT_MAX: Final = 100_000
_PRESSURE_MIN: Final = 0.6
_MEDIA_CHARS_MIN: Final = 64
"""Shorter text that happens to begin like an image is no image."""
_PATH_CHARS_MAX: Final = 200

_MEDIA_URI: Final = re.compile(r"data:(?:image|audio|video)/", re.IGNORECASE)
_MEDIA_BASE64: Final = re.compile(
    r"iVBORw0KGgo"  # PNG
    r"|/9j/"  # JPEG
    r"|R0lGOD[dl]h"  # GIF
    r"|UklGR"  # WAV, WebP, AVI
    r"|SUQz"  # MP3
    r"|T2dnUw"  # Ogg
    r"|ZkxhQ"  # FLAC
    r"|AAAA[A-Za-z0-9+/]{4}Z0eX"  # MP4
    r"|GkXfo"  # WebM
)
_SECRET: Final = re.compile(
    r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{36,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
)
_SECRET_KEYS: Final = frozenset(
    {
        "password",
        "passwd",
        "secret",
        "api_key",
        "apikey",
        "private_key",
        "access_token",
        "refresh_token",
        "client_secret",
    }
)


class SafetyFinding(msgspec.Struct, frozen=True):
    """What is unsafe about an event."""

    kind: str
    """``signal``, ``raw_media``, ``secret``, ``too_large``, or a classifier's own word."""
    path: str
    """Where in the event."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.path}"


Classifier = Callable[[Event], SafetyFinding | Awaitable[SafetyFinding | None] | None]


class ContentSafetyMiddleware(Middleware):
    """
    Refuse to publish, and quarantine before handling, events in which a classifier finds something.

    Args:
        classifier: Takes the event; answers a finding, or None if there is nothing to object to. May be ``async``. If it
            raises, the publish or the attempt fails: an event that could not be looked at is neither stored nor handled.
            A finding of the kind ``signal`` does not keep an event from being stored, only from being handled.

    Raises:
        InvalidMiddleware: The classifier is not callable.
    """

    name = "content_safety"
    priority = 40

    def __init__(self, classifier: Classifier | None = None) -> None:
        self._classify: Classifier = default_classifier if classifier is None else classifier
        if not callable(self._classify):
            raise InvalidMiddleware(self.name, "classifier", "must be callable")

    async def before_publish(self, ctx: PublishContext) -> None:
        """Refuse, or let pass."""
        finding = await self._found(ctx.event)
        if finding is not None and finding.kind != "signal":
            raise PolicyDenied(self.name, str(finding))

    async def before_handle(self, ctx: HandleContext) -> Decision | None:
        """Quarantine, or let pass."""
        finding = await self._found(ctx.event)
        return None if finding is None else Decision.quarantine(str(finding))

    async def _found(self, event: Event) -> SafetyFinding | None:
        finding = self._classify(event)
        return await finding if inspect.isawaitable(finding) else finding


def default_classifier(event: Event) -> SafetyFinding | None:
    """Heed safety signals, and look for raw media and secrets; the first finding counts."""
    return _signal(event) or _inspected(event.payload)


def _signal(event: Event) -> SafetyFinding | None:
    extra = event.meta.extra
    safety = extra.get("safety") if isinstance(extra, Mapping) else None
    if isinstance(safety, Mapping):
        if safety.get("quarantine"):
            return SafetyFinding("signal", "meta.extra.safety.quarantine")
        pressure = safety.get("pressure")
        if isinstance(pressure, int | float) and pressure >= _PRESSURE_MIN:
            return SafetyFinding("signal", "meta.extra.safety.pressure")
    return None


def _inspected(payload: object) -> SafetyFinding | None:
    # A stack of its own, not recursion: payloads may be deep, and paths are made up only for what is found.
    pending: list[tuple[object, tuple[object, ...]]] = [(payload, ("payload",))]
    seen = 0
    while pending:
        value, path = pending.pop()
        seen += 1
        if seen > _NODES_COUNT_MAX:
            # Fail closed: what was not looked at is not known to be safe.
            return SafetyFinding("too_large", "payload")
        if isinstance(value, str):
            if kind := _text_kind(value):
                return SafetyFinding(kind, _shown(path))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if item and isinstance(item, str) and str(key).lower().replace("-", "_") in _SECRET_KEYS:
                    return SafetyFinding("secret", _shown((*path, key)))
                if isinstance(item, str | Mapping | list | tuple):
                    pending.append((item, (*path, key)))
        elif isinstance(value, list | tuple):
            pending.extend(
                (item, (*path, at)) for at, item in enumerate(value) if isinstance(item, str | Mapping | list | tuple)
            )
    return None


def _text_kind(text: str) -> str | None:
    if _MEDIA_URI.match(text) or (len(text) >= _MEDIA_CHARS_MIN and _MEDIA_BASE64.match(text)):
        return "raw_media"
    return "secret" if _SECRET.search(text) else None


def _shown(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))[:_PATH_CHARS_MAX]
