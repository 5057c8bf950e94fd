"""
The guard: who is kept out for a time, whatever their token says.

Every endpoint and the HTTP API ask it before they do any work. A directive says what to do with newcomers, and for how long: an
administrator gives it, or the guard itself when it is told of abuse. Directives live in memory: a node that starts again has none, and what
they did is in the topic ``audit``.

A directive reaches only what was abused: the guard denies new subscriptions to an identity whose subscriptions overflow, and not its publishing and
reading. An address is denied to callers without a good token, since many users may share it; never one of ``never_denied``.

A decision that cannot be carried out here denies, as no challenge can be posed to a subscriber; and nothing that cannot be read loosens
anything.
"""

from __future__ import annotations

import functools
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from tidings.core.clock import Clock
from tidings.core.ids import new_event_id
from tidings.core.settings import Settings

from .announcements import Announcer
from .audit import AuditLog, AuditRecord
from .context import ANONYMOUS
from .errors import InvalidChange, InvalidDirective, TemporarilyDenied
from .resources import checked_text

AbuseKind = Literal["overflow", "rejection", "limit"]
TargetKind = Literal["all", "identity", "app", "address", "connection"]
Reach = Literal["everything", "connections", "subscriptions", "unauthenticated"]
Entrance = Literal["request", "connection", "subscription"]
"""What a newcomer asks for: an HTTP request, a socket, or a subscription to the gateway, over a socket or HTTP."""

_REACHED: Final[Mapping[Reach, tuple[Entrance, ...]]] = {
    "everything": ("request", "connection", "subscription"),
    "connections": ("connection", "subscription"),
    "subscriptions": ("subscription",),
    "unauthenticated": ("request", "connection", "subscription"),
}

_KEPT_MAX: Final = 10_000
"""Peers whose offences are counted, and denials that are in force; the oldest make room."""
_TARGET: Final = re.compile(r"all|(identity|app|address|connection):(.+)")
_REACH_OF: Final[Mapping[AbuseKind, Reach]] = {
    "overflow": "subscriptions",
    "rejection": "subscriptions",
    "limit": "connections",
}
_T = TypeVar("_T")
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
    never_denied: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Addresses and networks that are never denied, such as ``192.0.2.7`` or ``10.0.0.0/8``: those of proxies and monitoring."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """An address that is none."""
        for number, network in enumerate(self.never_denied):
            try:
                ip_network(network)
            except ValueError as error:
                yield f"never_denied[{number}]", f"is not an address or a network: {error}"

    def spares(self, address: str) -> bool:
        """Return whether an address is never denied."""
        return bool(self.never_denied) and _is_within(address, self.never_denied)


@functools.lru_cache(maxsize=1024)
def _is_within(address: str, networks: tuple[str, ...]) -> bool:
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in ip_network(network) for network in networks)


class Directive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to do with newcomers, and with those who are there."""

    decision: Literal["allow", "deny", "require_challenge"]
    """``require_challenge`` denies: no challenge can be posed here."""
    target: str
    """``all``, ``identity:NAME``, ``app:SLUG``, ``address:1.2.3.4`` or ``connection:ID``; of IPv6 the first 64 bits are the address."""
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=7 * 86_400_000)] = 60_000
    """How long it holds."""
    reason_code: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "administrator"
    reach: Reach = "everything"
    """What is denied: everything; sockets; subscriptions to the gateway only; or everything to callers without a good token."""
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

    def reaches(self, entrance: Entrance) -> bool:
        """Return whether what a newcomer asks for is denied."""
        return entrance in _REACHED[self.reach]

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
        self._denials: OrderedDict[tuple[str, Reach], DirectiveInForce] = OrderedDict()
        self._rates: OrderedDict[str, DirectiveInForce] = OrderedDict()
        self._strikes: OrderedDict[tuple[str, Reach], tuple[int, float]] = OrderedDict()

    # What endpoints ask

    def admit(
        self,
        *,
        identity: str | None = None,
        app: str | None = None,
        address: str | None = None,
        entrance: Entrance = "subscription",
        has_token: Callable[[], bool] = lambda: False,
    ) -> Verdict:
        """
        Whether a newcomer may come in, as far as it is known who it is.

        Args:
            identity, app, address: The newcomer.
            entrance: What it asks for.
            has_token: Whether it shows a good token; called only if that makes a difference.
        """
        if not self._denials and not self._rates:
            return _ALLOWED
        network = None if address is None or self.settings.spares(address) else network_of(address)
        targets = ("all", f"identity:{identity}", f"app:{app}", f"address:{network}")
        for target in targets:
            denial = self._denial_of(target, entrance, has_token)
            if denial is not None:
                self.denied_count += 1
                left_s = max(1, math.ceil(denial.expires_at_s - self._clock.monotonic()))
                return Verdict(False, left_s, denial.directive.reason_code)
        rates = [
            found.directive.msgs_per_sec_max
            for target in targets
            if (found := self._in_force(self._rates, target)) is not None
        ]
        return Verdict(True, msgs_per_sec_max=min((rate for rate in rates if rate is not None), default=None))

    def _denial_of(self, target: str, entrance: Entrance, has_token: Callable[[], bool]) -> DirectiveInForce | None:
        for reach in _REACHED:
            denial = self._in_force(self._denials, (target, reach)) if self._denials else None
            if denial is None or not denial.directive.reaches(entrance):
                continue
            if reach != "unauthenticated" or not has_token():
                return denial
        return None

    def require(
        self,
        *,
        identity: str | None = None,
        app: str | None = None,
        address: str | None = None,
        entrance: Entrance = "request",
        has_token: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Go on only if a newcomer may come in; see ``admit``.

        Raises:
            TemporarilyDenied: It may not.
        """
        verdict = self.admit(identity=identity, app=app, address=address, entrance=entrance, has_token=has_token)
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

    def _in_force(self, kept: OrderedDict[_T, DirectiveInForce], target: _T) -> DirectiveInForce | None:
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
        named = None if report.identity_id in (None, ANONYMOUS) else report.identity_id
        target = f"identity:{named}" if named else self._target_of(report.address)
        reach = _REACH_OF[report.kind] if named or report.kind == "overflow" else "unauthenticated"
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
                    "reach": reach,
                },
            )
        )
        if target is not None:
            ttl_ms = round(self._denial_s((target, reach)) * 1_000)
            reason = f"abuse.{report.kind}"
            self.apply(
                Directive(decision="deny", target=target, ttl_ms=ttl_ms, reason_code=reason, reach=reach),
                by="dos_guard_manager",
            )

    def _target_of(self, address: str | None) -> str | None:
        """The address as a target; none where it may be that of a proxy, behind which everybody is, or is never denied."""
        try:
            if address is None or ip_address(address).is_loopback or self.settings.spares(address):
                return None
        except ValueError:  # a Unix socket
            return None
        return f"address:{address}"

    def _denial_s(self, target: tuple[str, Reach]) -> float:
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
            if directive.reach != "everything":
                raise InvalidDirective("reach", "is for those who are denied")
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
                if directive.is_denial and self.settings.spares(name):
                    raise InvalidDirective("target", f"{name} is never denied", "see the setting guard.never_denied")
                name = _checked_network(name)
            target = f"{match[1]}:{name}"
        return msgspec.structs.replace(directive, target=target, directive_id=self._new_id())

    def _enter(self, directive: Directive) -> None:
        entry = DirectiveInForce(directive, self._clock.monotonic() + directive.ttl_ms / 1_000)
        if directive.is_denial:
            if directive.target_kind != "connection":
                key = directive.target, directive.reach
                self._denials.pop(key, None)
                self._denials[key] = entry
                _shrink(self._denials)
            return
        if directive.target == "all":
            self._denials.clear()
            self._rates.clear()
        for reach in _REACHED:
            self._denials.pop((directive.target, reach), None)
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
        peer = identity if identity not in (None, ANONYMOUS) else address
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
