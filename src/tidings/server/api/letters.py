"""
``/v1/dead-letters``: events that groups have given up on; looking, trying again, giving up for good.

Looking takes the right to read the event (see ``event_rights``), since a letter holds it. Changing takes the right on the letter's
group (``redrive``, ``drop``), can be tried dry, and leaves a record in the topic ``audit`` first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final

import msgspec
from starlette.responses import Response

from tidings.access.resources import Action, group_of, topic
from tidings.bus.audit import Audit
from tidings.bus.errors import UnknownDeadLetter
from tidings.bus.store.dead_letters import OPEN, DeadLetter, DeadLetterFilter, DeadLetterState, Reason
from tidings.core.names import check_topic

from ..errors import BadRequest
from ..event_rights import may_read_letter
from .operations import JSON, ApiOperation, Call, json_answer


class LettersQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which letters to list; conditions are joined by and."""

    topic: str | None = None
    group: str | None = None
    state: tuple[DeadLetterState, ...] = OPEN
    reason: Reason | None = None
    error_contains: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1)] = 100
    skip: Annotated[int, msgspec.Meta(ge=0)] = 0


class LetterList(msgspec.Struct, frozen=True, kw_only=True):
    """Letters of topics and spaces that the caller may read, in the order of their events."""

    letters: list[DeadLetter]
    count: int
    """How many fit, on this page or not."""
    next_skip: int | None
    """What to skip for the next page; null if this is the last."""


class ChangeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which letters of a topic are meant: those named, or those that fit; ``all`` where nothing narrows them down."""

    topic: str
    ids: list[str] = []
    group: str | None = None
    reason: Reason | None = None
    error_contains: str | None = None
    all: bool = False
    dry_run: bool = False


class OneBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing more to say."""

    dry_run: bool = False


class LetterRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which letter."""

    id: str
    group: str
    offset: int
    event_id: str


class ChangeOut(msgspec.Struct, frozen=True, kw_only=True):
    """What was, or would be, changed."""

    carried_out: bool
    count: int
    letters: list[LetterRef]
    """Those that the caller may read: the right to change a group's letters does not show its events."""
    has_more: bool
    """More letters fit than one request changes; ask again."""
    audit_seq: int | None = None


async def list_letters(call: Call) -> Response:
    """The letters that fit."""
    query, services = call.query(LettersQuery), call.api.services
    if query.topic is not None:
        topics = [check_topic(query.topic)]
        call.capsule.require(Action.READ, topic(topics[0]))
    else:
        topics = [name for name in sorted(services.log.topics()) if call.capsule.allows(Action.READ, topic(name))]
    wanted = DeadLetterFilter(
        states=query.state, group=query.group, reason=query.reason, error_contains=query.error_contains
    )
    found: list[DeadLetter] = []
    for name in topics:
        chosen = await services.bus.store.dead_letters(name, None, wanted)
        found += [letter for letter in chosen if may_read_letter(call.capsule, letter)]
    end = query.skip + min(query.limit, call.api.settings.letters_count_max)
    page = found[query.skip : end]
    return json_answer(LetterList(letters=page, count=len(found), next_skip=end if end < len(found) else None))


async def show_letter(call: Call) -> Response:
    """One letter."""
    name = check_topic(call.path("topic"))
    call.capsule.require(Action.READ, topic(name))
    letter = await call.api.services.bus.dead_letter(name, call.path("id"))
    if not may_read_letter(call.capsule, letter):
        raise UnknownDeadLetter(name, letter.id)  # what may not be seen is not said to exist
    return json_answer(letter)


async def redrive(call: Call) -> Response:
    """Try letters again."""
    return await _change_many(call, Action.REDRIVE, ("dead",), _redrive)


async def drop(call: Call) -> Response:
    """Give letters up."""
    return await _change_many(call, Action.DROP, OPEN, _drop)


async def redrive_one(call: Call) -> Response:
    """Try one letter again."""
    return await _change_one(call, Action.REDRIVE, ("dead",), _redrive)


async def drop_one(call: Call) -> Response:
    """Give one letter up."""
    return await _change_one(call, Action.DROP, OPEN, _drop)


async def _redrive(call: Call, name: str, ids: list[str], audit: Audit) -> None:
    await call.api.services.bus.redrive(name, ids, audit=audit)


async def _drop(call: Call, name: str, ids: list[str], audit: Audit) -> None:
    await call.api.services.bus.drop_dead_letters(name, ids, audit=audit)


Change = Callable[[Call, str, list[str], Audit], Awaitable[None]]


async def _change_many(call: Call, action: Action, states: tuple[DeadLetterState, ...], change: Change) -> Response:
    body = await call.body(ChangeBody)
    name = check_topic(body.topic)
    await _require_any(call, action, name, body.group)
    wanted = DeadLetterFilter(states=states, group=body.group, reason=body.reason, error_contains=body.error_contains)
    if not (body.ids or wanted.has_conditions or body.all):
        raise BadRequest("body", "nothing says which letters are meant", "name some, narrow them down, or give all")
    chosen = await call.api.services.bus.store.dead_letters(name, body.ids or None, wanted)
    return await _carry_out(call, action, name, chosen, change, is_dry_run=body.dry_run)


async def _change_one(call: Call, action: Action, states: tuple[DeadLetterState, ...], change: Change) -> Response:
    body = await call.body(OneBody)
    name = check_topic(call.path("topic"))
    await _require_any(call, action, name, None)
    chosen = await call.api.services.bus.store.dead_letters(name, [call.path("id")], DeadLetterFilter(states=states))
    return await _carry_out(call, action, name, chosen, change, is_dry_run=body.dry_run)


async def _require_any(call: Call, action: Action, name: str, group: str | None) -> None:
    """Whoever may do this to no group of the topic does not learn which letters there are."""
    bus = call.api.services.bus
    known = [known for _, known in await bus.groups(name)] if group is None else [group]
    if not any(call.capsule.allows(action, group_of(name, each)) for each in known):
        call.capsule.require(action, group_of(name, "*" if group is None else group))


async def _carry_out(
    call: Call, action: Action, name: str, letters: Sequence[DeadLetter], change: Change, *, is_dry_run: bool
) -> Response:
    for group in sorted({letter.group for letter in letters}):
        call.capsule.require(action, group_of(name, group))
    count_max = call.api.settings.letters_count_max
    chosen = letters[:count_max]
    ids = [letter.id for letter in chosen]
    audit = call.audit()
    if ids and not is_dry_run:
        await change(call, name, ids, audit)
    return json_answer(
        ChangeOut(
            carried_out=bool(ids) and not is_dry_run,
            count=len(ids),
            letters=[
                LetterRef(id=each.id, group=each.group, offset=each.offset, event_id=each.event_id)
                for each in chosen
                if may_read_letter(call.capsule, each)
            ],
            has_more=len(letters) > count_max,
            audit_seq=audit.seq,
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
        handle=list_letters,
        query=LettersQuery,
        answers={200: {JSON: LetterList}},
        problems=(403,),
    ),
    ApiOperation(
        method="POST",
        path="/v1/dead-letters/redrive",
        name="redriveDeadLetters",
        summary="Have letters tried again by the groups that failed; no cursor moves, and asking twice is asking once.",
        tag="dead letters",
        handle=redrive,
        body={JSON: ChangeBody},
        answers={200: {JSON: ChangeOut}},
        problems=(403, 404, 415, 503),
    ),
    ApiOperation(
        method="POST",
        path="/v1/dead-letters/drop",
        name="dropDeadLetters",
        summary="Give letters up for good; the events stay in the log.",
        tag="dead letters",
        handle=drop,
        body={JSON: ChangeBody},
        answers={200: {JSON: ChangeOut}},
        problems=(403, 404, 415, 503),
    ),
    ApiOperation(
        method="GET",
        path=_LETTER,
        name="showDeadLetter",
        summary="Show one letter, whatever became of it.",
        tag="dead letters",
        handle=show_letter,
        answers={200: {JSON: DeadLetter}},
        problems=(403, 404),
    ),
    ApiOperation(
        method="POST",
        path=f"{_LETTER}/redrive",
        name="redriveDeadLetter",
        summary="Have one letter tried again.",
        tag="dead letters",
        handle=redrive_one,
        body={JSON: OneBody},
        answers={200: {JSON: ChangeOut}},
        problems=(403, 404, 415, 503),
    ),
    ApiOperation(
        method="POST",
        path=f"{_LETTER}/drop",
        name="dropDeadLetter",
        summary="Give one letter up for good.",
        tag="dead letters",
        handle=drop_one,
        body={JSON: OneBody},
        answers={200: {JSON: ChangeOut}},
        problems=(403, 404, 415, 503),
    ),
)
