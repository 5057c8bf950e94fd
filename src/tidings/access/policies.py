"""
Cedar policies: the built-in ones, users' own beside them, and the decision.

The built-in set permits what claims and grants give, lets the role ``admin`` do everything, and forbids what was revoked.
Users' policies add permits and forbids. A forbid wins, nothing is permitted by default, and a policy that cannot be evaluated
denies: Cedar itself would pass over it, and it might have been the forbid.

A policy sees who (``principal``, with its roles and client id), what (``action``), to what (``resource``, with its ``name``) and, as
``context``, what claims, grants and revocations say. It sees no time: decisions are kept until access changes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final

import cedarpy
import msgspec

from .context import ADMIN_ROLE, OperationContext
from .errors import InvalidPolicy
from .resources import Action, Resource, ResourceKind

# Cedar recurses over nested and chained expressions, and a text that takes it too deep ends the process instead of raising:
# 1,000 brackets in each other did here, or 20,000 dots in a row. What people write stays far below these bounds.
_DEPTH_MAX: Final = 32
_CHAIN_MAX: Final = 1_000
_NOT_CODE: Final = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*', re.DOTALL)
_BRACKET: Final = re.compile(r"[\[({})\]]")
_LINK: Final = re.compile(r"::|\.|&&|\|\||[-+*!\[({]|\bif\b")
_PROBLEMS_MAX: Final = 10

_TYPES: Final = {kind: kind.value.capitalize() for kind in ResourceKind}

SCHEMA: Final = f"""
type RightsContext = {{ claimed: Bool, granted: Bool, revoked: Bool }};
entity Role;
entity Subject in [Role] = {{ id: String, clientId?: String }};
entity Group in [Topic] = {{ name: String, topic: String, group: String }};
{"".join(f"entity {name} = {{ name: String }};" for name in _TYPES.values() if name != "Group")}
action {", ".join(action.value for action in Action)} appliesTo {{
    principal: [Subject], resource: [{", ".join(_TYPES.values())}], context: RightsContext
}};
"""

_RESERVED: Final = ("access", "audit")

BUILT_IN: Final[Mapping[str, str]] = {
    "tidings.administrators": 'permit (principal in Role::"admin", action, resource);',
    "tidings.claimed": "permit (principal, action, resource) when { context.claimed };",
    "tidings.granted": "permit (principal, action, resource) when { context.granted };",
    "tidings.revoked": "forbid (principal, action, resource) when { context.revoked };",
    # Whoever could publish here could grant themselves anything, or write other people's history.
    "tidings.reserved": "\n".join(
        f"""forbid (principal, action in [Action::"publish", Action::"submit"], resource == Topic::"{name}")
            unless {{ principal in Role::"admin" }};"""
        for name in _RESERVED
    ),
}
OPEN: Final[Mapping[str, str]] = {"tidings.open": "permit (principal, action, resource);"}


class RightsContext(msgspec.Struct, frozen=True):
    """What is known about one request beside who asks for what."""

    claimed: bool
    """The token's claims give it."""
    granted: bool
    """The last record about it is a grant."""
    revoked: bool
    """The last record about it is a revocation."""


_LookedAt = tuple[bool, Action, str | None, RightsContext]


class PolicyDecision(msgspec.Struct, frozen=True):
    """What the policies say to one request."""

    is_allowed: bool
    reasons: tuple[str, ...] = ()
    """The policies that settled it, by name and place within it; none if nothing permits it."""
    errors: tuple[str, ...] = ()
    """What could not be evaluated; the answer is no then."""


class Policy(msgspec.Struct, frozen=True):
    """A policy's text that was found good."""

    text: str
    statement_count: int


_SCHEMA: Final = cedarpy.Schema.from_str(SCHEMA)


def check_policy(text: str, *, bytes_max: int) -> Policy:
    """
    A policy's text, if it can be put into force.

    Raises:
        InvalidPolicy: It is too long or too deep, Cedar cannot parse it, it does not fit the schema, or it says nothing.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > bytes_max:
        raise InvalidPolicy((f"it is {size} bytes long; at most {bytes_max} are allowed",))
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InvalidPolicy(("it holds a lone surrogate",))
    _check_depth(text)
    found = cedarpy.validate_policies(text, _SCHEMA)
    if not found.validation_passed:
        problems = tuple(sorted({each.error for each in found.errors}))
        raise InvalidPolicy(problems[:_PROBLEMS_MAX] or ("it does not fit the schema",))
    try:
        parsed = cedarpy.PolicySet.from_str(text)
    except ValueError as error:
        raise InvalidPolicy((str(error),)) from error
    if parsed.templates():
        raise InvalidPolicy(("it holds a template (?principal or ?resource), which would never apply",))
    if not len(parsed):
        raise InvalidPolicy(("it holds no statement",))
    return Policy(text, len(parsed))


def _check_depth(text: str) -> None:
    code = _NOT_CODE.sub(" ", text)
    depth = 0
    for bracket in _BRACKET.findall(code):
        depth += 1 if bracket in "([{" else -1
        if depth > _DEPTH_MAX:
            raise InvalidPolicy((f"it nests deeper than {_DEPTH_MAX} brackets",))
    if any(len(_LINK.findall(statement)) > _CHAIN_MAX for statement in code.split(";")):
        raise InvalidPolicy((f"it has more than {_CHAIN_MAX} operators in one statement",))


@functools.cache
def _own(is_open: bool) -> Mapping[str, Policy]:
    texts = {**BUILT_IN, **OPEN} if is_open else BUILT_IN
    return {name: check_policy(text, bytes_max=len(text)) for name, text in texts.items()}


class PolicySet:
    """
    Policies in force together, the built-in ones among them.

    Args:
        policies: Users' policies by name, as ``check_policy`` gave them.
        is_open: Permit everything that is not forbidden.

    Raises:
        InvalidPolicy: Cedar does not take them.
    """

    def __init__(self, policies: Mapping[str, Policy], *, is_open: bool = False) -> None:
        everything = {**_own(is_open), **policies}
        # Cedar names statements by their place in the text: policy0, policy1, ...
        self._names = [
            f"{name}#{number}" for name, policy in everything.items() for number in range(1, policy.statement_count + 1)
        ]
        try:
            # A newline between them: the last line of one may be a comment.
            self._set = cedarpy.PolicySet.from_str("\n".join(policy.text for policy in everything.values()))
        except ValueError as error:
            raise InvalidPolicy((str(error),)) from error
        if len(self._set) != len(self._names):
            raise InvalidPolicy(("together they hold other statements than each by itself",))
        self._settled: dict[_LookedAt, PolicyDecision] | None = None if policies else {}

    def decide(
        self, context: OperationContext, action: Action, resource: Resource, standpoint: RightsContext
    ) -> PolicyDecision:
        """Whether whoever is asking may do this."""
        if self._settled is None or not _is_ascii(context, resource):
            return self._ask(context, action, resource, standpoint)
        # The built-in policies look at nothing else: what was decided for one holds for all who are alike in this.
        reserved = resource.name if resource.kind == ResourceKind.TOPIC and resource.name in _RESERVED else None
        looked_at = (ADMIN_ROLE in context.claims.roles, action, reserved, standpoint)
        decision = self._settled.get(looked_at)
        if decision is None:
            decision = self._settled[looked_at] = self._ask(context, action, resource, standpoint)
        return decision

    def _ask(
        self, context: OperationContext, action: Action, resource: Resource, standpoint: RightsContext
    ) -> PolicyDecision:
        principal = {"type": "Subject", "id": context.subject}
        target = {"type": _TYPES[resource.kind], "id": resource.name}
        attributes = {"id": context.subject}
        if context.client_id is not None:
            attributes["clientId"] = context.client_id
        roles = [{"type": "Role", "id": role} for role in context.claims.roles]
        entities: list[dict[str, Any]] = [
            {"uid": principal, "attrs": attributes, "parents": roles},
            *_entities_of(resource, target),
        ]
        request = {
            "principal": principal,
            "action": {"type": "Action", "id": action.value},
            "resource": target,
            "context": msgspec.to_builtins(standpoint),
        }
        try:
            answer = cedarpy.is_authorized(request, self._set, entities)
        except (ValueError, TypeError) as error:
            return PolicyDecision(False, errors=(str(error),))
        errors = tuple(answer.diagnostics.errors)
        is_allowed = answer.decision is cedarpy.Decision.Allow and not errors
        return PolicyDecision(is_allowed, tuple(sorted(map(self._name, answer.diagnostics.reasons))), errors)

    def _name(self, reason: str) -> str:
        return self._names[int(reason.removeprefix("policy"))]


def _is_ascii(context: OperationContext, resource: Resource) -> bool:
    """Whether there is nothing in the names that Cedar could refuse to read, and so deny."""
    names = (context.subject, context.client_id or "", resource.name, *context.claims.roles)
    return all(map(str.isascii, names))


def _entities_of(resource: Resource, target: dict[str, str]) -> list[dict[str, Any]]:
    """The resource as Cedar sees it; a group is within its topic."""
    if resource.kind != ResourceKind.GROUP:
        return [{"uid": target, "attrs": {"name": resource.name}, "parents": []}]
    topic_name, _, group = resource.name.partition("/")
    parent = {"type": "Topic", "id": topic_name}
    attributes = {"name": resource.name, "topic": topic_name, "group": group}
    return [
        {"uid": target, "attrs": attributes, "parents": [parent]},
        {"uid": parent, "attrs": {"name": topic_name}, "parents": []},
    ]
