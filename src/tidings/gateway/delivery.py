"""
The fifth engine: bound envelopes go to everybody who is meant by them.

Classes take turns by their weights. Each envelope gets its ordinal, its place in the one order in which all subscribers see all classes, and an entry
in the buffer of each subscriber. Envelopes that follow each other and go to the same subscribers go together: one look-up, one shared
tuple of encoded frames. A subscriber whose buffer cannot take what is for it is closed; nothing is ever sent twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tidings.wire.gateway import CloseReason

from .ceiling import Ceiling
from .constants import STEP_DELIVERIES_MAX
from .matching import Matching
from .names import EventClass
from .queues import ClassQueues
from .registry import SubscriberRegistry
from .resume_index import ResumeIndex, Retained
from .subscribers import Subscriber
from .telemetry import Telemetry


class Deliverer:
    """
    Moves envelopes from the queues of their classes into subscribers' buffers, and from there to their connections.

    Args:
        bound: Envelopes with their capsules, by class.
        index: Gives each its ordinal, and keeps it for those who come back.
        matching: Finds who is meant.
        registry: Who is subscribed.
        ceiling: Counts entries.
        make_room: Asked for room below the ceiling; gives up what may be, and says whether something was.
        telemetry: Counts.
    """

    def __init__(
        self,
        bound: ClassQueues[Retained],
        *,
        index: ResumeIndex,
        matching: Matching,
        registry: SubscriberRegistry,
        ceiling: Ceiling,
        make_room: Callable[[], bool],
        telemetry: Telemetry,
    ) -> None:
        self._bound = bound
        self._index = index
        self._matching = matching
        self._registry = registry
        self._ceiling = ceiling
        self._make_room = make_room
        self._telemetry = telemetry

    def run(self, count_max: int, now_s: float) -> int:
        """Deliver up to so many envelopes, fewer if they are for many; returns how many."""
        run: list[Retained] = []
        of_run: Mapping[Subscriber, None] = {}
        done = entries = 0
        while done < count_max and entries < STEP_DELIVERIES_MAX and (retained := self._bound.take()) is not None:
            done += 1
            self._index.number(retained)
            audience = self._audience(retained)
            entries += len(audience)
            if audience is not of_run and run:
                self._fan_out(run, of_run, now_s)
                run = []
            of_run = audience
            run.append(retained)
        if run:
            self._fan_out(run, of_run, now_s)
        return done

    def flush(self, now_s: float) -> bool:
        """Send what waits in buffers, as far as each subscriber's pace allows; says whether anything was sent."""
        waiting = self._registry.waiting
        sent: Counter[EventClass] = Counter()
        for subscriber in list(waiting):
            sent.update(each.event_class for each in subscriber.flush(now_s))
            if not subscriber.unsent or subscriber.is_blocked:
                waiting.pop(subscriber, None)
        for event_class, count in sent.items():
            self._telemetry.delivered(event_class, count)
        return bool(sent)

    def _audience(self, retained: Retained) -> Mapping[Subscriber, None]:
        audience = self._matching.audience(retained)
        if retained.event_class is EventClass.GRAPH and retained.anchor <= self._registry.since_max:
            # Somebody subscribed while this was on its way, and was told to read over HTTP up to a seq that it is not above.
            seq = retained.anchor
            return {each: None for each in audience if each.is_resumed or each.since < seq}
        return audience

    def _fan_out(self, run: Sequence[Retained], audience: Mapping[Subscriber, None], now_s: float) -> None:
        members = tuple(audience)
        if len(members) * len(run) <= self._ceiling.room:
            self._offer(run, members, now_s)
        else:
            for each in run:
                self._offer((each,), self._with_room(members), now_s)

    def _with_room(self, members: tuple[Subscriber, ...]) -> tuple[Subscriber, ...]:
        """Those of them who are left when there is room for one entry each."""
        members = tuple(each for each in members if each.is_open)
        while len(members) > self._ceiling.room:
            if not self._make_room():
                # Nothing is left to give up, and there are more subscribers than the ceiling has room for entries.
                for each in members[self._ceiling.room :]:
                    self._registry.close(each, CloseReason.QUEUE_FULL)
            members = tuple(each for each in members if each.is_open)
        return members

    def _offer(self, run: Sequence[Retained], members: tuple[Subscriber, ...], now_s: float) -> None:
        registry, ceiling = self._registry, self._ceiling
        count, waiting = len(run), registry.waiting
        if members:
            prefixes = tuple([each.prefix for each in run])
            ceiling.hold_entries(len(members) * count)
            for each in run:
                each.holders += len(members)
            sent = 0
            for subscriber in members:
                taken = subscriber.offer(run, prefixes, now_s) if subscriber.is_open else 0
                if taken != count:
                    registry.released(run[taken:])
                    for each in run[taken:]:
                        self._telemetry.dropped(each.event_class, CloseReason.BUFFER_OVERFLOW.reason)
                    registry.close(subscriber, CloseReason.BUFFER_OVERFLOW)
                elif subscriber.unsent:
                    if not subscriber.is_blocked:
                        waiting[subscriber] = None
                elif not subscriber.send_failures:
                    sent += 1
            self._note(run, sent, now_s)
        for each in run:
            registry.let_go(each)

    def _note(self, run: Sequence[Retained], sent: int, now_s: float) -> None:
        if sent:
            for event_class, count in Counter([each.event_class for each in run]).items():
                self._telemetry.delivered(event_class, count * sent)
            self._telemetry.waited(now_s - run[0].envelope.emitted_at / 1e6, len(run) * sent)
