"""
Fires triggers when they are due, and publishes what becomes of them.

A queue of moments (``core.timers``) and a loop that sleeps until the first of them, a minute at most. Each firing is published before it counts,
under an id that follows from its slot: a firing that is tried again is still one. A slot found more than a minute late is
skipped, and an event says so; the next one is always in the future. Triggers are kept by space and id: an event of one space
changes nothing in another.

``PROS_TRIGGER_*`` events each hold the whole trigger as it then is, so the last event of each trigger says what it is, and
``fold`` reads them back. ``PROSPECTIVE_TRIGGER`` is what others act on: that a trigger fired, and what for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec

from tidings.bus.events import Ack
from tidings.core.clock import Clock, datetime_of, ns_of
from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta, EventType
from tidings.core.ids import content_id, derived_id
from tidings.core.timers import TimerQueue, WallClockAlarm

from ..errors import InvalidRequest, TriggerLimit, UnknownTrigger
from ..payloads import payload_of
from ..ports import MetricSink, Publish, no_metrics, zone_of
from .triggers import (
    Signals,
    Trigger,
    TriggerAction,
    TriggerKey,
    TriggerStatus,
    check_trigger,
    eligibility,
    next_fire,
    skip_reasons,
)

logger = logging.getLogger(__name__)

PROSPECTIVE_TOPIC: Final = "prospective"
UPSERT: Final = "PROS_TRIGGER_UPSERT"
_TOLD: Final = frozenset(
    f"PROS_TRIGGER_{word}" for word in ("UPSERTED", "FIRED", "SKIPPED", "SNOOZED", "CANCELLED", "ERROR")
)


class ProspectiveTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of ``PROSPECTIVE_TRIGGER``: a trigger fired, for the arbiter and the workspace."""

    id: str
    person_id: str
    space_id: str
    title: str
    action: TriggerAction
    slot: datetime
    """The moment it was due at; with the space and the id it names this firing."""
    args: dict[str, Any] = {}


def fired_event(trigger: Trigger, slot: datetime, now: datetime) -> Event:
    """
    ``PROSPECTIVE_TRIGGER``, under the slot's own id.

    It follows from the trigger and the slot alone: published again after a crash, it is the same event.
    """
    fired = ProspectiveTrigger(
        id=trigger.id,
        person_id=trigger.person_id,
        space_id=trigger.space_id,
        title=trigger.title,
        action=trigger.action,
        slot=slot,
        args=trigger.args,
    )
    return Event(
        _meta(trigger, EventType.PROSPECTIVE_TRIGGER.value, _slot_id(trigger, slot.isoformat()), now),
        payload_of(fired),
    )


def trigger_event(word: str, trigger: Trigger, cause: str, now: datetime, **more: Any) -> Event:
    """
    ``PROS_TRIGGER_<word>`` about a trigger.

    Args:
        word: What happened.
        trigger: As it is afterwards.
        cause: What makes this event one of its own: a slot, a command. A slot that does not fire bears the id that
            its firing would have had, so that it cannot be both; a command that has another effect when it comes again
            is published again.
        now: When.
        more: Further keys of the payload.
    """
    kind = f"PROS_TRIGGER_{word}"
    assert kind in _TOLD
    payload = {"trigger": msgspec.to_builtins(trigger), **more}
    if "slot" not in more:
        event_id = content_id("pros", payload, trigger.space_id, trigger.id, word, cause)
    elif word == "FIRED":
        event_id = derived_id("pros", trigger.space_id, trigger.id, cause, word)
    else:
        event_id = _slot_id(trigger, cause)
    return Event(_meta(trigger, kind, event_id, now), payload)


def own_trigger(event: Event) -> Trigger:
    """
    The trigger that an event holds.

    Raises:
        InvalidRequest: It holds none, or one of another space. Whoever may publish in one space has no say in another.
    """
    trigger = check_trigger(event.payload.get("trigger"))
    if trigger.space_id != event.meta.space_id:
        problem = f"is {trigger.space_id!r}, and the event comes from {event.meta.space_id!r}"
        raise InvalidRequest("trigger.space_id", problem)
    return trigger


def fold(events: Iterable[Event]) -> dict[TriggerKey, Trigger]:
    """
    The triggers as a history of events leaves them, by space and id; events of other types are passed over.

    So is an event that no runner would publish, such as one about a trigger of another space: one publisher's forgery must
    not keep everybody's triggers from being read. It is logged.
    """
    triggers: dict[TriggerKey, Trigger] = {}
    for event in events:
        if event.meta.type in _TOLD:
            try:
                trigger = own_trigger(event)
            except InvalidRequest as error:
                logger.warning("passed over %s %s: %s", event.meta.type, event.meta.event_id, error)
                continue
            triggers[trigger.key] = trigger
    return triggers


def _slot_id(trigger: Trigger, slot: str) -> str:
    return derived_id("pros", trigger.space_id, trigger.id, slot)


def _meta(trigger: Trigger, kind: str, event_id: str, now: datetime) -> EventMeta:
    return EventMeta(
        topic=PROSPECTIVE_TOPIC,
        type=kind,
        space_id=trigger.space_id,
        event_id=event_id,
        ts=now,
        actor=trigger.person_id,
    )


_PUBLISH_RETRY_S: Final = 1.0


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many triggers, how often to look, how late is too late, how unfit a moment is too unfit."""

    triggers_max: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    tick_s_max: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    late_s_max: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    eligibility_min: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class TriggerRunner:
    """
    Holds triggers and fires them.

    Args:
        publish: Where events go.
        clock: Where the time comes from.
        signals: How things are for a trigger's person; by default calm.
        settings: Limits.
        metrics: Gets ``trigger_refusals_total`` by field, for commands over the bus that were refused.
    """

    def __init__(
        self,
        publish: Publish,
        clock: Clock,
        signals: Callable[[Trigger], Signals] | None = None,
        settings: RunnerSettings | None = None,
        *,
        metrics: MetricSink = no_metrics,
    ) -> None:
        self._publish = publish
        self._clock = clock
        self._signals = signals if signals is not None else _calm
        self._settings = settings if settings is not None else RunnerSettings()
        self._metrics = metrics
        self._triggers: dict[TriggerKey, Trigger] = {}
        self._due: TimerQueue[TriggerKey] = TimerQueue()
        self._pending_slot: tuple[Trigger, datetime, tuple[Event, ...], Trigger] | None = None
        self._alarm = WallClockAlarm(clock, self._settings.tick_s_max)
        # Firing and commands change the same triggers and wait for the bus in between.
        self._lock = asyncio.Lock()

    def triggers(self) -> list[Trigger]:
        """All triggers held, by space and id."""
        return [self._triggers[each] for each in sorted(self._triggers)]

    def restore(self, triggers: Mapping[TriggerKey, Trigger]) -> None:
        """
        Load triggers of an earlier process (see ``fold``), without publishing anything.

        Slots missed meanwhile stay missed: the next ``fire_due`` says so once a trigger, and goes on with the next slot.
        """
        for trigger in triggers.values():
            if trigger.status.can_fire or trigger.status is TriggerStatus.DRAFT:
                self._make_room(trigger.key)
                is_planned = trigger.next_fire_at is not None or trigger.status is TriggerStatus.DRAFT
                self._put(trigger if is_planned else self._scheduled(trigger, self._now()))

    async def __call__(self, event: Event) -> Ack:
        """
        The bus's way in: ``PROS_TRIGGER_UPSERT`` with a trigger of the event's own space; other types are passed over.

        Raises:
            InvalidRequest: It holds no valid trigger, or one of another space. The bus makes a dead letter of it in the
                end, with the reason: a command that somebody gave does not vanish with an ``Ack``.
            TriggerLimit: There are too many.
        """
        if event.meta.type == UPSERT:
            try:
                await self.upsert(own_trigger(event), cause=event.meta.event_id)
            except InvalidRequest as error:
                self._metrics("trigger_refusals_total", 1.0, {"field": error.field})
                logger.warning("refused %s %s: %s", UPSERT, event.meta.event_id, error)
                raise
        return Ack()

    async def upsert(self, trigger: Trigger, *, cause: str) -> Trigger:
        """
        Add a trigger, or replace the one of its space and id. How often it fired before is kept.

        Raises:
            InvalidRequest: It is no valid trigger.
            TriggerLimit: There are too many.
        """
        checked = check_trigger(trigger)
        zone_of(checked.tz)
        async with self._lock:
            self._make_room(checked.key)
            known = self._triggers.get(checked.key)
            if known is not None:
                checked = msgspec.structs.replace(checked, fires_count=known.fires_count, fired_at=known.fired_at)
            if checked.status.can_fire:
                checked = self._scheduled(msgspec.structs.replace(checked, status=TriggerStatus.ACTIVE), self._now())
            await self._publish(trigger_event("UPSERTED", checked, cause, self._now()))
            self._put(checked)
        return checked

    async def snooze(self, trigger_id: str, until: datetime, *, space_id: str | None = None) -> Trigger:
        """
        Let a trigger fire at ``until`` and not before.

        Args:
            trigger_id: Which one.
            until: The end of the pause.
            space_id: Its space; needed where triggers of several spaces have that id.

        Raises:
            UnknownTrigger: There is none of that id that can fire.
            InvalidRequest: ``until`` has no zone or has passed, or the id alone does not say which trigger is meant.
        """
        if until.tzinfo is None:
            raise InvalidRequest("until", "has no zone")
        async with self._lock:
            known = self._held(trigger_id, space_id)
            if not known.status.can_fire:
                raise UnknownTrigger(trigger_id)
            now = self._now()
            if until <= now:
                raise InvalidRequest("until", "a snooze ends in the future")
            snoozed = msgspec.structs.replace(known, status=TriggerStatus.SNOOZED, next_fire_at=until)
            await self._publish(trigger_event("SNOOZED", snoozed, now.isoformat(), now))
            self._put(snoozed)
        return snoozed

    async def cancel(self, trigger_id: str, *, space_id: str | None = None) -> Trigger:
        """
        End a trigger.

        Args:
            trigger_id: Which one.
            space_id: Its space; needed where triggers of several spaces have that id.

        Raises:
            UnknownTrigger: There is none of that id.
            InvalidRequest: The id alone does not say which trigger is meant.
        """
        async with self._lock:
            known = self._held(trigger_id, space_id)
            cancelled = msgspec.structs.replace(known, status=TriggerStatus.CANCELLED, next_fire_at=None)
            now = self._now()
            # By its moment: a trigger that was made again after its end may be ended again.
            await self._publish(trigger_event("CANCELLED", cancelled, now.isoformat(), now))
            self._put(cancelled)
        return cancelled

    async def fire_due(self) -> int:
        """
        Fire or skip everything that is due; returns how many were looked at.

        Raises:
            Exception: Whatever ``publish`` raises; the trigger stays due.
        """
        looked_at = 0
        async with self._lock:
            while (first := self._due.first) is not None and first[0] <= self._clock.now_ns():
                trigger = self._triggers[first[1]]
                due = trigger.next_fire_at
                assert due is not None
                events, after = self._verdict(trigger, due)
                await self._publish_slot(events, after, due)
                looked_at += 1
                self._pending_slot = None
                self._put(after)
        return looked_at

    async def run(self) -> None:
        """Fire triggers as they come due, until cancelled; a bus that refuses is tried again a second later."""
        while True:
            try:
                await self.fire_due()
            except (TidingsError, OSError):
                await self._clock.sleep(_PUBLISH_RETRY_S)
            except Exception:
                logger.exception("triggers cannot be fired at the moment; they are tried again")
                await self._clock.sleep(_PUBLISH_RETRY_S)
            else:
                await self._alarm.wait(self._due.first_ns)

    async def _publish_slot(self, events: tuple[Event, ...], after: Trigger, due: datetime) -> None:
        try:
            for event in events:
                await self._publish(event)
        except TidingsError as error:
            if error.retryable:
                raise
            # Trying for ever would hold up every other trigger. Above all this is a slot that another runner has published
            # already. Should the log itself be the trouble, this fails too, and the slot stays due.
            problem = trigger_event("ERROR", after, f"{due.isoformat()}|{error.code}", self._now(), problem=error.code)
            await self._publish(problem)

    def _verdict(self, trigger: Trigger, due: datetime) -> tuple[tuple[Event, ...], Trigger]:
        # A publish that failed may have stored the event all the same. The slot's id then stands for what was said, so
        # the next try says that again and does not judge anew.
        if self._pending_slot is None or self._pending_slot[:2] != (trigger, due):
            self._pending_slot = (trigger, due, *self._judge(trigger, due))
        return self._pending_slot[2:]

    def _judge(self, trigger: Trigger, due: datetime) -> tuple[tuple[Event, ...], Trigger]:
        now = self._now()
        cause = due.isoformat()
        after = self._scheduled(msgspec.structs.replace(trigger, status=TriggerStatus.ACTIVE), now)
        late_s = (now - due).total_seconds()
        if late_s > self._settings.late_s_max:
            return (trigger_event("SKIPPED", after, cause, now, slot=cause, reasons=["missed"], late_s=late_s),), after
        try:
            signals = self._signals(trigger)
            fitness = eligibility(signals.arousal, signals.safety_pressure)
            reasons = list(skip_reasons(trigger, signals, now))
        except Exception as error:
            # Not knowing whether the moment is fit is no leave to interrupt.
            logger.exception("the signals for a trigger cannot be had")
            problem = type(error).__name__
            return (trigger_event("ERROR", after, cause, now, slot=cause, problem=problem),), after
        if fitness < self._settings.eligibility_min:
            reasons.append("not_eligible")
        if reasons:
            skipped = trigger_event("SKIPPED", after, cause, now, slot=cause, reasons=reasons, eligibility=fitness)
            return (skipped,), after
        fired = msgspec.structs.replace(trigger, status=TriggerStatus.ACTIVE, fires_count=trigger.fires_count + 1)
        after = self._scheduled(msgspec.structs.replace(fired, fired_at=now), now)
        kept = trigger_event("FIRED", after, cause, now, slot=cause, eligibility=fitness, action=trigger.action)
        # What others act on goes first: a crash in between publishes it again under its id, and loses no reminder.
        return (fired_event(trigger, due, now), kept), after

    def _scheduled(self, trigger: Trigger, now: datetime) -> Trigger:
        upcoming = next_fire(trigger.schedule, now, zone_of(trigger.tz), trigger.fires_count)
        status = TriggerStatus.EXPIRED if upcoming is None else trigger.status
        return msgspec.structs.replace(trigger, next_fire_at=upcoming, status=status)

    def _held(self, trigger_id: str, space_id: str | None) -> Trigger:
        found = [key for key in self._triggers if key[1] == trigger_id and space_id in (None, key[0])]
        if not found:
            raise UnknownTrigger(trigger_id)
        if len(found) > 1:
            raise InvalidRequest("space_id", f"{len(found)} spaces have a trigger {trigger_id!r}; name one of them")
        return self._triggers[found[0]]

    def _put(self, trigger: Trigger) -> None:
        if (before := self._triggers.pop(trigger.key, None)) is not None and before.next_fire_at is not None:
            self._due.discard(ns_of(before.next_fire_at), before.key)
        # Ended triggers are in the history; kept here they would fill the runner up.
        if trigger.status.can_fire or trigger.status is TriggerStatus.DRAFT:
            self._triggers[trigger.key] = trigger
            if trigger.next_fire_at is not None and trigger.status.can_fire:
                self._due.add(ns_of(trigger.next_fire_at), trigger.key)
        self._alarm.ring()

    def _make_room(self, key: TriggerKey) -> None:
        if key not in self._triggers and len(self._triggers) >= self._settings.triggers_max:
            raise TriggerLimit(self._settings.triggers_max)

    def _now(self) -> datetime:
        return datetime_of(self._clock.now_ns())


def _calm(trigger: Trigger) -> Signals:
    return Signals()
