"""
``/v1/dead-letters``: events that groups have given up on; looking, trying again, giving up for good.

Looking takes the right to read the event (see ``event_rights``), since a dead letter holds it. Changing takes the right on the dead letter's
group (``redrive``, ``drop``), can be tried dry, and leaves a record in the topic ``audit`` first.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from starlette.responses import Response

from tidings.access.resources import Action, group_of, topic
from tidings.bus.admin import DeadLetterVerb
from tidings.bus.errors import UnknownDeadLetter
from tidings.bus.store.dead_letters import OPEN, DeadLetter, DeadLetterFilter, DeadLetterState, Reason
from tidings.core.names import check_topic
from tidings.wire.events import time_of

from ..errors import BadRequest
from ..event_rights import may_read_letter
from .groups import DryRunBody
from .operations import JSON, ApiOperation, Call, json_answer


class DeadLetterConditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters are meant; conditions are joined by and."""

    group: str | None = None
    reason: Reason | None = None
    error_type: str | None = None
    """With its module (``builtins.ValueError``) or without (``ValueError``)."""
    error_contains: str | None = None
    since: str | None = None
    """Given up at this time or later."""

    def filter(self, states: tuple[DeadLetterState, ...] = OPEN) -> DeadLetterFilter:
        """The same for the bus."""
        return DeadLetterFilter(
            states=states,
            group=self.group,
            reason=self.reason,
            error_type=self.error_type,
            error_contains=self.error_contains,
            since=None if self.since is None else time_of("since", self.since),
        )


class DeadLettersQuery(DeadLetterConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters to list."""

    topic: str | None = None
    state: tuple[DeadLetterState, ...] = OPEN
    limit: Annotated[int, msgspec.Meta(ge=1)] = 100
    skip: Annotated[int, msgspec.Meta(ge=0)] = 0


class DeadLetterList(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of topics and spaces that the caller may read, in the order of their events."""

    dead_letters: list[DeadLetter]
    count: int
    """How many match, on this page or not."""
    next_skip: int | None
    """What to skip for the next page; null if this is the last."""


class DeadLettersBody(DeadLetterConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters of a topic are meant: those named, or those that match; ``all`` where nothing narrows them down."""

    topic: str
    ids: list[str] = []
    all: bool = False
    dry_run: bool = False


class DeadLetterRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letter."""

    id: str
    group: str
    offset: int
    event_id: str


class DeadLetterChangeOut(msgspec.Struct, frozen=True, kw_only=True):
    """What was, or would be, changed."""

    carried_out: bool
    count: int
    dead_letters: list[DeadLetterRef]
    """Those that the caller may read: the right to change a group's dead letters does not show its events."""
    has_more: bool
    """More match than one request changes; ask again."""
    audit_seq: int | None = None


async def list_dead_letters(call: Call) -> Response:
    """The dead letters that match."""
    query, services = call.query(DeadLettersQuery), call.api.services
    if query.topic is not None:
        topics = [check_topic(query.topic)]
        call.capsule.require(Action.READ, topic(topics[0]))
    else:
        topics = [name for name in sorted(services.log.topics()) if call.capsule.allows(Action.READ, topic(name))]
    found: list[DeadLetter] = []
    for name in topics:
        chosen = await services.bus.store.dead_letters(name, None, query.filter(query.state))
        found += [letter for letter in chosen if may_read_letter(call.capsule, letter)]
    end = query.skip + min(query.limit, call.api.settings.letters_count_max)
    page = found[query.skip : end]
    next_skip = end if end < len(found) else None
    return json_answer(DeadLetterList(dead_letters=page, count=len(found), next_skip=next_skip))


async def show_dead_letter(call: Call) -> Response:
    """One dead letter."""
    name = check_topic(call.path("topic"))
    call.capsule.require(Action.READ, topic(name))
    letter = await call.api.services.bus.dead_letter(name, call.path("id"))
    if not may_read_letter(call.capsule, letter):
        raise UnknownDeadLetter(name, letter.id)  # what may not be seen is not said to exist
    return json_answer(letter)


async def redrive(call: Call) -> Response:
    """Try dead letters again."""
    return await _change_many(call, "redrive")


async def drop(call: Call) -> Response:
    """Give dead letters up."""
    return await _change_many(call, "drop")


async def redrive_one(call: Call) -> Response:
    """Try one dead letter again."""
    return await _change_one(call, "redrive")


async def drop_one(call: Call) -> Response:
    """Give one dead letter up."""
    return await _change_one(call, "drop")


async def _change_many(call: Call, verb: DeadLetterVerb) -> Response:
    body = await call.body(DeadLettersBody)
    wanted = body.filter()
    if not (body.ids or wanted.has_conditions or body.all):
        raise BadRequest(
            "body", "nothing says which dead letters are meant", "name some, narrow them down, or give all"
        )
    return await _change(call, verb, body.topic, body.ids or None, wanted, dry_run=body.dry_run)


async def _change_one(call: Call, verb: DeadLetterVerb) -> Response:
    await _require_any(call, verb, check_topic(call.path("topic")), None)
    body = await call.body(DryRunBody)
    return await _change(call, verb, call.path("topic"), [call.path("id")], DeadLetterFilter(), dry_run=body.dry_run)


async def _require_any(call: Call, verb: DeadLetterVerb, name: str, group: str | None) -> None:
    """A caller who may do this to no group of the topic does not learn which dead letters there are."""
    action = Action(verb)
    names = [known for _, known in await call.api.services.bus.groups(name)] if group is None else [group]
    if not any(call.capsule.allows(action, group_of(name, known)) for known in names):
        call.capsule.require(action, group_of(name, group or "*"))


async def _change(
    call: Call, verb: DeadLetterVerb, name: str, ids: list[str] | None, wanted: DeadLetterFilter, *, dry_run: bool
) -> Response:
    bus, action = call.api.services.bus, Action(verb)
    name = check_topic(name)
    await _require_any(call, verb, name, wanted.group)
    change = bus.admin.redrive if verb == "redrive" else bus.admin.drop
    done = await change(
        name,
        ids,
        wanted,
        dry_run=dry_run,
        count_max=call.api.settings.letters_count_max,
        require=lambda group: call.capsule.require(action, group_of(name, group)),
        audit=call.audit(),
    )
    return json_answer(
        DeadLetterChangeOut(
            carried_out=done.carried_out,
            count=len(done.letters),
            dead_letters=[
                DeadLetterRef(id=each.id, group=each.group, offset=each.offset, event_id=each.event_id)
                for each in done.letters
                if may_read_letter(call.capsule, each)
            ],
            has_more=done.has_more,
            audit_seq=done.audit_seq,
        )
    )


_LETTER: Final = "/v1/dead-letters/{topic}/{id}"

OPERATIONS: Final = (
    ApiOperation(
        method="GET",
        path="/v1/dead-letters",
        name="listDeadLetters",
        summary="List events that groups have given up on.",
        tag="dead letters",
        handle=list_dead_letters,
        query=DeadLettersQuery,
        answers={200: {JSON: DeadLetterList}},
        problems=(403,),
    ),
    ApiOperation(
        method="POST",
        path="/v1/dead-letters/redrive",
        name="redriveDeadLetters",
        summary="Have dead letters tried again by the groups that failed; no cursor moves, and asking twice is asking once.",
        tag="dead letters",
        handle=redrive,
        body={JSON: DeadLettersBody},
        answers={200: {JSON: DeadLetterChangeOut}},
        problems=(403, 404, 415, 503),
    ),
    ApiOperation(
        method="POST",
        path="/v1/dead-letters/drop",
        name="dropDeadLetters",
        summary="Give dead letters up for good; the events stay in the log.",
        tag="dead letters",
        handle=drop,
        body={JSON: DeadLettersBody},
        answers={200: {JSON: DeadLetterChangeOut}},
        problems=(403, 404, 415, 503),
    ),
    ApiOperation(
        method="GET",
        path=_LETTER,
        name="showDeadLetter",
        summary="Show one dead letter, whatever became of it.",
        tag="dead letters",
        handle=show_dead_letter,
        answers={200: {JSON: DeadLetter}},
        problems=(403, 404),
    ),
    ApiOperation(
        method="POST",
        path=f"{_LETTER}/redrive",
        name="redriveDeadLetter",
        summary="Have one dead letter tried again.",
        tag="dead letters",
        handle=redrive_one,
        body={JSON: DryRunBody},
        answers={200: {JSON: DeadLetterChangeOut}},
        problems=(403, 404, 415, 503),
    ),
    ApiOperation(
        method="POST",
        path=f"{_LETTER}/drop",
        name="dropDeadLetter",
        summary="Give one dead letter up for good.",
        tag="dead letters",
        handle=drop_one,
        body={JSON: DryRunBody},
        answers={200: {JSON: DeadLetterChangeOut}},
        problems=(403, 404, 415, 503),
    ),
)
