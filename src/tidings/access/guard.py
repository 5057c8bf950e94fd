"""
The guard: who is kept out for a time, whatever their token says.

Every endpoint and the HTTP API ask it before they do any work. A directive says what to do with newcomers, and for how long: an
administrator gives it, or the guard itself when it is told of abuse. Directives live in memory: a node that starts again has none, and what
they did is in the topic ``audit``.

A decision that cannot be carried out here denies, as no challenge can be posed to a subscriber; and nothing that cannot be read loosens
anything.
"""

from __future__ import annotations

import functools
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Annotated, Any, Final, Literal

import msgspec

from tidings.core.clock import Clock
from tidings.core.ids import new_event_id
from tidings.core.settings import Settings

from .announcements import Announcer
from .audit import AuditLog, AuditRecord
from .errors import InvalidChange, InvalidDirective, TemporarilyDenied
from .resources import checked_text

AbuseKind = Literal["overflow", "rejection", "limit"]
TargetKind = Literal["all", "identity", "app", "address", "connection"]

_KEPT_MAX: Final = 10_000
"""Peers whose offences are counted, and denials that are in force; the oldest make room."""
_TARGET: Final = re.compile(r"all|(identity|app|address|connection):(.+)")
_REASON: Final = re.compile(r"[a-z][a-z0-9]*(?:[._][a-z0-9]+)*")


@functools.lru_cache(maxsize=1024)
def network_of(address: str) -> str:
    """What one peer can hardly change: of IPv6 the first 64 bits, since a household has all addresses that begin so."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Address(int(found) >> 64 << 64))


class GuardSettings(Settings, frozen=True, kw_only=True):
    """When the guard steps in by itself."""

    window_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 60.0
    """The time over which offences are counted."""
    overflows_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 3
    """Of one identity: subscriptions closed because it took or acknowledged too little."""
    rejections_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10
    """Of one identity: subscriptions refused."""
    limits_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 30
    """From one address: sockets closed for going over a limit."""
    denial_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 30.0
    """How long newcomers are denied then; twice as long each time again, up to ``denial_s_max``."""
    denial_s_max: Annotated[float, msgspec.Meta(gt=0, le=7 * 86_400)] = 3_600.0
    """The longest denial that the guard decides on by itself."""


class Directive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to do with newcomers, and with those who are there."""

    decision: Literal["allow", "deny", "require_challenge"]
    """``require_challenge`` denies: no challenge can be posed here."""
    target: str
    """``all``, ``identity:NAME``, ``app:SLUG``, ``address:1.2.3.4`` or ``connection:ID``; of IPv6 the first 64 bits are the address."""
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=7 * 86_400_000)] = 60_000
    """How long it holds."""
    reason_code: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "administrator"
    close_existing: bool = False
    """Close those who are there too; a directive about a connection always does."""
    msgs_per_sec_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """With ``allow``: envelopes a second to each such subscriber. Never more than the settings allow."""
    directive_id: str = ""
    """Given by the guard."""

    @property
    def target_kind(self) -> TargetKind:
        """What the target is."""
        kind: TargetKind = self.target.partition(":")[0]  # type: ignore[assignment]  # checked when it was applied
        return kind

    @property
    def target_name(self) -> str:
        """Which one; empty for ``all``."""
        return self.target.partition(":")[2]

    @property
    def is_denial(self) -> bool:
        """Whether it keeps newcomers out."""
        return self.decision != "allow"

    @property
    def closes(self) -> bool:
        """Whether those who are there are to be closed."""
        return self.is_denial and (self.close_existing or self.target_kind == "connection")

    def covers(self, *, identity: str | None, app: str | None, address: str | None, connection: str | None) -> bool:
        """Whether somebody is meant."""
        kind, name = self.target_kind, self.target_name
        network = None if address is None else network_of(address)
        known = {"identity": identity, "app": app, "address": network, "connection": connection}
        return kind == "all" or known[kind] == name


class Verdict(msgspec.Struct, frozen=True):
    """The answer to who wants to come in."""

    is_allowed: bool
    retry_after_s: int = 0
    reason_code: str = ""
    msgs_per_sec_max: int | None = None
    """The rate that a directive leaves; ``None`` if none speaks of it."""


class AbuseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody went over a threshold."""

    kind: AbuseKind
    count: int
    window_ms: int
    identity_id: str | None = None
    app_id: str | None = None
    address: str | None = None


class DirectiveInForce(msgspec.Struct, frozen=True):
    """A directive, and when it ends."""

    directive: Directive
    expires_at_s: float
    """By the monotonic clock."""


_ALLOWED: Final = Verdict(True)


class DosGuard:
    """
    Denies and allows.

    Args:
        settings: When it steps in by itself.
        clock: When directives end.
        audit: Where each directive and its outcome is put on record.
    """

    def __init__(
        self, settings: GuardSettings, clock: Clock, audit: AuditLog, *, new_id: Callable[[], str] = new_event_id
    ) -> None:
        self.settings = settings
        self.announcer = Announcer("dos_guard_manager")
        self.on_directive: list[Callable[[Directive], int]] = []
        """Each is called with a directive that was applied; closes whom it means, if it ``closes``, and says how many those were."""
        self.denied_count = 0
        self._clock = clock
        self._audit = audit
        self._new_id = new_id
        self._denials: OrderedDict[str, DirectiveInForce] = OrderedDict()
        self._rates: OrderedDict[str, DirectiveInForce] = OrderedDict()
        self._strikes: OrderedDict[str, tuple[int, float]] = OrderedDict()

    # What endpoints ask

    def admit(self, *, identity: str | None = None, app: str | None = None, address: str | None = None) -> Verdict:
        """Whether a newcomer may come in, as far as it is known who it is."""
        if not self._denials and not self._rates:
            return _ALLOWED
        network = None if address is None else network_of(address)
        targets = ("all", f"identity:{identity}", f"app:{app}", f"address:{network}")
        for target in targets:
            found = self._in_force(self._denials, target)
            if found is not None:
                self.denied_count += 1
                left_s = max(1, math.ceil(found.expires_at_s - self._clock.monotonic()))
                return Verdict(False, left_s, found.directive.reason_code)
        rates = [
            found.directive.msgs_per_sec_max
            for target in targets
            if (found := self._in_force(self._rates, target)) is not None
        ]
        return Verdict(True, msgs_per_sec_max=min((rate for rate in rates if rate is not None), default=None))

    def require(self, *, identity: str | None = None, app: str | None = None, address: str | None = None) -> None:
        """
        Go on only if a newcomer may come in.

        Raises:
            TemporarilyDenied: It may not.
        """
        verdict = self.admit(identity=identity, app=app, address=address)
        if not verdict.is_allowed:
            raise TemporarilyDenied(verdict.retry_after_s, verdict.reason_code)

    def note_refused(self, field: str, problem: str, *, by: str) -> None:
        """Put on record that a directive was refused, since it makes no sense."""
        data = {"field": field, "problem": problem}
        record = AuditRecord(category="guard.directive_refused", severity="warn", subject=by, data=data)
        self._audit.note(record)

    def directives(self) -> list[DirectiveInForce]:
        """What is in force, the oldest first."""
        now_s = self._clock.monotonic()
        return [each for each in (*self._denials.values(), *self._rates.values()) if each.expires_at_s > now_s]

    def _in_force(self, kept: OrderedDict[str, DirectiveInForce], target: str) -> DirectiveInForce | None:
        found = kept.get(target)
        if found is not None and found.expires_at_s <= self._clock.monotonic():
            del kept[target]
            return None
        return found

    # What is decided

    def apply(self, directive: Directive, *, by: str) -> tuple[Directive, int]:
        """
        Put a directive into force; it is on record before it is.

        Args:
            directive: What to do.
            by: Who decided it.

        Returns:
            The directive with its id, and how many connections were closed.

        Raises:
            InvalidDirective: It makes no sense. That is on record too, and nothing has changed.
            AuditUnavailable: An ``allow`` cannot be put on record; it is not applied. A denial is, whether or not it can be recorded.
        """
        try:
            directive = self._checked(directive)
        except InvalidDirective as error:
            self.note_refused(error.field, error.problem, by=by)
            raise
        self._record(directive, by, "applied", is_required=not directive.is_denial)
        self._enter(directive)
        closed = sum(listener(directive) for listener in list(self.on_directive))
        self._record(directive, by, "carried_out", closed=closed)
        self.announcer.tell(
            "security.dos_directive_applied",
            {
                "directive_id": directive.directive_id,
                "decision": directive.decision,
                "outcome": "applied",
                "target_kind": directive.target_kind,
                "ttl_ms": directive.ttl_ms,
                "reason": directive.reason_code,
                "closed": closed,
            },
            requester_identity_id=directive.target_name if directive.target_kind == "identity" else None,
        )
        if directive.is_denial and directive.target_kind == "identity":
            self.announcer.tell(
                "network.peer_denied",
                {"reason": directive.reason_code, "ttl_ms": directive.ttl_ms},
                peer_identity_id=directive.target_name,
            )
        return directive, closed

    def report(self, report: AbuseReport) -> None:
        """Somebody went over a threshold: keep them out for a time, longer each time again."""
        named = None if report.identity_id in (None, "anonymous") else report.identity_id
        target = f"identity:{named}" if named else _target_of(report.address)
        self.announcer.tell(
            "security.dos_abuse_detected",
            {"kind": report.kind, "offences": report.count, "window_ms": report.window_ms},
            requester_identity_id=named,
        )
        self._audit.note(
            AuditRecord(
                category="guard.abuse_reported",
                severity="warn",
                subject=report.identity_id,
                data={
                    "kind": report.kind,
                    "count": report.count,
                    "window_ms": report.window_ms,
                    "app_id": report.app_id,
                    "address": report.address,
                    "target": target,
                },
            )
        )
        if target is not None:
            ttl_ms = round(self._denial_s(target) * 1_000)
            self.apply(
                Directive(decision="deny", target=target, ttl_ms=ttl_ms, reason_code=f"abuse.{report.kind}"),
                by="dos_guard_manager",
            )

    def _denial_s(self, target: str) -> float:
        settings, now_s = self.settings, self._clock.monotonic()
        count, last_s = self._strikes.pop(target, (0, now_s))
        if now_s - last_s > settings.denial_s_max + settings.window_s:
            count = 0
        self._strikes[target] = (count + 1, now_s)
        _shrink(self._strikes)
        return float(min(settings.denial_s * 2.0 ** min(count, 40), settings.denial_s_max))

    def _checked(self, directive: Directive) -> Directive:
        match = _TARGET.fullmatch(directive.target)
        if match is None:
            raise InvalidDirective(
                "target",
                f"{directive.target[:100]!r} is no target",
                "write all, identity:NAME, app:SLUG, address:ADDRESS or connection:ID",
            )
        if _REASON.fullmatch(directive.reason_code) is None:
            raise InvalidDirective("reason_code", "must be lower snake case, with dots between its parts")
        if directive.decision == "allow":
            if directive.close_existing:
                raise InvalidDirective("close_existing", "closes nobody who is allowed")
            if directive.target_kind == "connection":
                raise InvalidDirective("target", "a connection can only be denied")
        elif directive.msgs_per_sec_max is not None:
            raise InvalidDirective("msgs_per_sec_max", "is for those who are allowed")
        if directive.directive_id:
            raise InvalidDirective("directive_id", "is given by the guard")
        target = directive.target
        if match[2] is not None:
            try:
                name = checked_text("target", match[2])
            except InvalidChange as error:
                raise InvalidDirective("target", error.problem) from error
            if match[1] == "address":
                name = _checked_network(name)
            target = f"{match[1]}:{name}"
        return msgspec.structs.replace(directive, target=target, directive_id=self._new_id())

    def _enter(self, directive: Directive) -> None:
        entry = DirectiveInForce(directive, self._clock.monotonic() + directive.ttl_ms / 1_000)
        if directive.is_denial:
            if directive.target_kind != "connection":
                self._denials.pop(directive.target, None)
                self._denials[directive.target] = entry
                _shrink(self._denials)
            return
        if directive.target == "all":
            self._denials.clear()
            self._rates.clear()
        self._denials.pop(directive.target, None)
        self._rates.pop(directive.target, None)
        if directive.msgs_per_sec_max is not None:
            self._rates[directive.target] = entry
            _shrink(self._rates)

    def _record(
        self, directive: Directive, by: str, outcome: str, *, closed: int | None = None, is_required: bool = False
    ) -> None:
        record = AuditRecord(
            category="guard.directive",
            severity="warn",
            subject=by,
            data={
                **msgspec.to_builtins(directive),
                "outcome": outcome,
                **({} if closed is None else {"closed": closed}),
            },
        )
        if is_required:
            self._audit.submit(record, is_required=True)
        else:
            self._audit.note(record)


def _checked_network(address: str) -> str:
    """What peers of the address are known by; anything else would keep nobody out."""
    try:
        ip_address(address.partition("%")[0])
    except ValueError as error:
        raise InvalidDirective("target", f"{address!r} is no address", "write one address, as 192.0.2.7") from error
    return network_of(address)


def _target_of(address: str | None) -> str | None:
    """The address as a target; none where it may be that of a proxy, behind which everybody is."""
    try:
        return None if address is None or ip_address(address).is_loopback else f"address:{address}"
    except ValueError:  # a Unix socket
        return None


class AbuseCounter:
    """
    Counts offences of each peer within a window, and reports whoever goes over a threshold.

    Args:
        guard: Where to report; its settings have window and thresholds.
        clock: For the window.
    """

    def __init__(self, guard: DosGuard, clock: Clock) -> None:
        self._guard = guard
        self._clock = clock
        self._times: OrderedDict[tuple[AbuseKind, str], deque[float]] = OrderedDict()

    def note(
        self, kind: AbuseKind, *, identity: str | None, app: str | None = None, address: str | None = None
    ) -> None:
        """One more offence."""
        peer = identity if identity not in (None, "anonymous") else address
        if peer is None:
            return
        settings, now_s = self._guard.settings, self._clock.monotonic()
        limits: Mapping[AbuseKind, int] = {
            "overflow": settings.overflows_max,
            "rejection": settings.rejections_max,
            "limit": settings.limits_max,
        }
        times = self._times.pop((kind, peer), None) or deque()
        times.append(now_s)
        while times[0] <= now_s - settings.window_s:
            times.popleft()
        if len(times) >= limits[kind]:
            window_ms = round(settings.window_s * 1_000)
            self._guard.report(
                AbuseReport(
                    kind=kind,
                    count=len(times),
                    window_ms=window_ms,
                    identity_id=identity,
                    app_id=app,
                    address=address,
                )
            )
        else:
            self._times[kind, peer] = times
            _shrink(self._times)


def _shrink(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > _KEPT_MAX:
        kept.popitem(last=False)
