"""
Middlewares that decide whether an event may be handled or published: access, policies, content safety.

``RBACMiddleware`` denies everything that is not allowed: a subscriber without the capability an event asks for, a band above the
subscriber's ceiling or one that is not known, a space that is not on its list. A BLACK event is denied unless the subscriber's
rule allows it by ``allow_black``.

``PolicyMiddleware`` asks a function of your own.

``ContentSafetyMiddleware`` looks for content that no payload should hold. Payloads are meant to be redacted before they are
published; this is the second line. The classifier looks when the event is published, and again before it is handled, as the
event may have reached the log in another way. The default one refuses raw media and what looks like a secret, and quarantines
events with a safety signal (``meta.extra["safety"]``). Its reports name the kind and the place, never the content.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec

from tidings.core.events import Capability, Event, SecurityBand

from ..errors import BusError
from .base import Decision, HandleContext, InvalidMiddleware, Middleware, PublishContext

ANY: Final = "*"
_RANKS: Final = {band.value: band.rank for band in SecurityBand}
_BLACK_RANK: Final = SecurityBand.BLACK.rank
_RED_RANK: Final = SecurityBand.RED.rank


class SubscriberRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one subscriber (a group) may have."""

    capabilities: frozenset[Capability] | None = None
    """Its allow list, instead of the capabilities that the subscription itself came with."""
    band_max: SecurityBand = SecurityBand.RED
    spaces: frozenset[str] | None = None
    """Spaces whose events it may have: exact ids, or a prefix as ``shared:*``. None is all spaces."""
    allow_black: bool = False
    """BLACK events too, whatever ``band_max`` says."""


class RBACMiddleware(Middleware):
    """
    Deny events before the handler runs.

    Args:
        required: Capabilities an event asks of its subscriber, by topic or by event type; both apply. ``*`` is for topics and
            types not named. An event that asks for PROJECT is denied in band RED: what is sensitive is not projected.
        rules: What each group may have.
        default: What groups not named may have.

    Raises:
        InvalidMiddleware: A capability or band is not one.
    """

    name = "rbac"
    priority = 30

    def __init__(
        self,
        required: Mapping[str, Iterable[Capability | str]] | None = None,
        *,
        rules: Mapping[str, SubscriberRule] | None = None,
        default: SubscriberRule | None = None,
    ) -> None:
        asked = {ANY: (Capability.RECALL,)} if required is None else required
        self._required = {str.__str__(name): self._capabilities(name, caps) for name, caps in asked.items()}
        self._required_else = self._required.get(ANY, frozenset())
        self._rules = dict(rules or {})
        self._default = SubscriberRule() if default is None else default
        for group, rule in self._rules.items():
            if not isinstance(rule, SubscriberRule):
                raise InvalidMiddleware(self.name, f"rules[{group!r}]", "is no SubscriberRule")

    def before_handle(self, ctx: HandleContext) -> Decision | None:
        """Deny, or let pass."""
        problem = self._problem(ctx)
        return None if problem is None else Decision.deny(problem)

    def _problem(self, ctx: HandleContext) -> str | None:
        # The stored envelope, not the event's own: no middleware before this one can rewrite what access is decided by.
        meta = ctx.event.record.meta
        rule = self._rules.get(ctx.group, self._default)
        held = ctx.capabilities if rule.capabilities is None else rule.capabilities
        of_topic, of_type = self._required.get(meta.topic), self._required.get(meta.type)
        if of_topic is None and of_type is None:
            required = self._required_else
        else:
            required = (of_topic or frozenset()) | (of_type or frozenset())
        if not required <= held:
            lacking = ", ".join(sorted(required - held))
            return f"group {ctx.group!r} lacks the capability {lacking} for topic {meta.topic!r}"
        rank = 0 if meta.band is None else _RANKS.get(meta.band)
        if rank is None:
            return f"band {meta.band!r} is not known"
        if rank == _BLACK_RANK:
            if not rule.allow_black:
                return f"group {ctx.group!r} is not allowed BLACK events"
        elif rank > rule.band_max.rank:
            return f"band {meta.band} is above the ceiling {rule.band_max} of group {ctx.group!r}"
        if rank >= _RED_RANK and Capability.PROJECT in required:
            return f"band {meta.band} events are not projected"
        if rule.spaces is not None and not _is_listed(meta.space_id, rule.spaces):
            return f"group {ctx.group!r} has no access to space {meta.space_id!r}"
        return None

    def _capabilities(self, name: str, capabilities: Iterable[Capability | str]) -> frozenset[Capability]:
        try:
            return frozenset(Capability(capability) for capability in capabilities)
        except ValueError as error:
            raise InvalidMiddleware(self.name, f"required[{str.__str__(name)!r}]", str(error)) from error


def _is_listed(space_id: str, spaces: frozenset[str]) -> bool:
    return space_id in spaces or any(space.endswith("*") and space_id.startswith(space[:-1]) for space in spaces)


# Policies

HandleAnswer = Decision | str | bool | None
HandleCheck = Callable[[HandleContext], HandleAnswer | Awaitable[HandleAnswer]]
PublishAnswer = str | bool | None
PublishCheck = Callable[[PublishContext], PublishAnswer | Awaitable[PublishAnswer]]


class PolicyDenied(BusError):
    """A policy refused the event; it was not stored."""

    code = "bus.policy_denied"
    text = "policy {policy!r} refused the event: {reason}"
    policy: str
    reason: str


class PolicyMiddleware(Middleware):
    """
    Ask a function whether an event may be handled, and another whether it may be published.

    A check answers None or True to allow, and False or a reason to deny; before a handler it may also answer a ``Decision``. One
    that raises denies nothing for good: the attempt is tried again, and the publish fails.

    Args:
        check: Asked before each handler.
        on_publish: Asked before each publish.
        name: What feature flags and errors call it.

    Raises:
        InvalidMiddleware: There is no check, or one is not callable.
    """

    priority = 50

    def __init__(
        self, check: HandleCheck | None = None, *, on_publish: PublishCheck | None = None, name: str = "policy"
    ) -> None:
        if check is None and on_publish is None:
            raise InvalidMiddleware(name, "check", "there is nothing to check")
        for argument, function in (("check", check), ("on_publish", on_publish)):
            if function is not None and not callable(function):
                raise InvalidMiddleware(name, argument, "must be callable")
        self.name = name
        self._check = check
        self._on_publish = on_publish

    async def before_publish(self, ctx: PublishContext) -> None:
        """Refuse, or let pass."""
        if self._on_publish is None:
            return
        answer = self._on_publish(ctx)
        if inspect.isawaitable(answer):
            answer = await answer
        if (reason := self._reason(answer)) is not None:
            raise PolicyDenied(self.name, reason)

    async def before_handle(self, ctx: HandleContext) -> Decision | None:
        """Deny, decide otherwise, or let pass."""
        if self._check is None:
            return None
        answer = self._check(ctx)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Decision):
            return answer
        reason = self._reason(answer)
        return None if reason is None else Decision.deny(reason)

    def _reason(self, answer: object) -> str | None:
        if answer is None or answer is True:
            return None
        if answer is False:
            return f"denied by {self.name}"
        if isinstance(answer, str):
            return answer or f"denied by {self.name}"
        # Anything else is a mistake in the check, and a mistake must not let an event through.
        raise TypeError(f"the check answered {type(answer).__name__}; None, a bool or a reason was expected")


# Content safety

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
