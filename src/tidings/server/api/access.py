"""
``/v1/access``: grants, revocations and policies, as records of the topic ``access``.

For administrators. A change is checked, committed, and answered when it is in force on this node: whoever lost a right by it gets
nothing that is committed later. ``GET`` shows what is in force.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from starlette.responses import Response

from tidings.access import administration
from tidings.access.administration import Collection, change_from_request, event_of, type_of

from .operations import BODY_BYTES_MAX, JSON, ApiOperation, Call, OneOf, json_answer


class ChangeQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to make a change."""

    dry_run: bool = False
    """Check it only."""


class RulesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose rules to show."""

    subject: str | None = None


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """The change is in force since ``seq``; or, dry, it would be taken."""

    carried_out: bool
    type: str
    seq: int | None = None
    event_id: str | None = None
    delayed_waiting: int | None = None
    """Of a subject revoked as a whole: its delayed events that wait. They are refused when they are due, and put on the audit record."""


class RuleOut(msgspec.Struct, frozen=True, kw_only=True):
    """A grant or a revocation in force."""

    subject: str
    action: str
    resource: str
    is_grant: bool
    seq: int


class RuleList(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force."""

    rules: list[RuleOut]
    revoked_subjects: list[str]
    revoked_tokens: list[str]
    access_seq: int


class PolicyOut(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in force; one with a problem denies everything."""

    policy_id: str
    text: str
    seq: int
    problem: str | None


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """Users' policies."""

    policies: list[PolicyOut]
    closed_by: list[str]
    """Why everything is denied, if it is."""
    access_seq: int


def _changing(collection: Collection) -> Callable[[Call], Awaitable[Response]]:
    async def change(call: Call) -> Response:
        query = call.query(ChangeQuery)
        services = call.api.services
        wanted = services.book.check(change_from_request(collection, await call.json_body()))
        waiting = (
            services.bus.delayed_count_of(wanted.subject) if isinstance(wanted, administration.SubjectRevoked) else None
        )
        if query.dry_run:
            return json_answer(Changed(carried_out=False, type=type_of(wanted), delayed_waiting=waiting))
        done = await services.log.append(event_of(wanted, actor=call.subject), from_reserve=True)
        await services.dispatcher.reached(done.seq)
        changed = Changed(
            carried_out=True, type=type_of(wanted), seq=done.seq, event_id=done.event_id, delayed_waiting=waiting
        )
        return json_answer(changed, 201)

    return change


def _showing(*, is_grant: bool) -> Callable[[Call], Awaitable[Response]]:
    async def show(call: Call) -> Response:
        query = call.query(RulesQuery)
        book = call.api.services.book
        rules = [
            RuleOut(
                subject=subject,
                action=rule.action.value,
                resource=str(rule.resource),
                is_grant=rule.is_grant,
                seq=rule.seq,
            )
            for subject, rule in book.rules(query.subject)
            if rule.is_grant == is_grant
        ]
        subjects = [] if is_grant else [each for each in book.revoked_subjects() if query.subject in (None, each)]
        tokens = [] if is_grant or query.subject is not None else book.revoked_tokens()
        return json_answer(RuleList(rules=rules, revoked_subjects=subjects, revoked_tokens=tokens, access_seq=book.seq))

    return show


async def show_policies(call: Call) -> Response:
    """Users' policies."""
    book = call.api.services.book
    shown = [
        PolicyOut(policy_id=each.policy_id, text=each.text, seq=each.seq, problem=each.problem)
        for each in book.policies.values()
    ]
    return json_answer(PolicyList(policies=shown, closed_by=list(book.closed_by()), access_seq=book.seq))


def _change_operation(collection: Collection, name: str, summary: str, *kinds: type[msgspec.Struct]) -> ApiOperation:
    return ApiOperation(
        method="POST",
        path=f"/v1/access/{collection}",
        name=name,
        summary=summary,
        tag="access",
        handle=_changing(collection),
        is_administrative=True,
        query=ChangeQuery,
        body={JSON: OneOf(*kinds)},
        body_bytes_max=2 * BODY_BYTES_MAX,  # a policy may have 64 KiB, and be longer as JSON
        answers={200: {JSON: Changed}, 201: {JSON: Changed}},
        problems=(403, 503),
    )


OPERATIONS: Final = (
    _change_operation(
        "grants",
        "grant",
        "Grant a right, restore a subject, or dismiss an access record that cannot be read.",
        administration.Grant,
        administration.SubjectRestored,
        administration.Dismissed,
    ),
    _change_operation(
        "revocations",
        "revoke",
        "Revoke a right, a token, or all of a subject's access.",
        administration.Revoke,
        administration.TokenRevocation,
        administration.SubjectRevoked,
    ),
    _change_operation(
        "policies",
        "putPolicy",
        "Put a policy into force, or remove one.",
        administration.PolicyPut,
        administration.PolicyRemoved,
    ),
    ApiOperation(
        method="GET",
        path="/v1/access/grants",
        name="listGrants",
        summary="List the grants in force.",
        tag="access",
        handle=_showing(is_grant=True),
        is_administrative=True,
        query=RulesQuery,
        answers={200: {JSON: RuleList}},
        problems=(403,),
    ),
    ApiOperation(
        method="GET",
        path="/v1/access/revocations",
        name="listRevocations",
        summary="List the revocations in force.",
        tag="access",
        handle=_showing(is_grant=False),
        is_administrative=True,
        query=RulesQuery,
        answers={200: {JSON: RuleList}},
        problems=(403,),
    ),
    ApiOperation(
        method="GET",
        path="/v1/access/policies",
        name="listPolicies",
        summary="List users' policies.",
        tag="access",
        handle=show_policies,
        is_administrative=True,
        answers={200: {JSON: PolicyList}},
        problems=(403,),
    ),
)
