"""
Cedar policies: the built-in ones, users' own beside them, and the decision.

The built-in set permits what claims and grants give, lets the role ``admin`` do everything, and forbids what was revoked.
Users' policies add permits and forbids. A forbid wins, nothing is permitted by default, and a policy that cannot be evaluated
denies: Cedar itself would pass over it, and it might have been the forbid.

A policy sees who (``principal``, with its roles and client id), what (``action``), to what (``resource``, with its ``name``) and, as
``context``, what claims, grants and revocations say. It sees no time: decisions are kept until access changes.

Cedar compares names with literals, with patterns (``like``) and with each other, and knows nothing else about them. So names that no literal
equals, that match the same patterns and that equal the same other names get the same decision, and Cedar is called once for all of them: see
``Distinctions``.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import cedarpy
import msgspec

from .context import OperationContext
from .errors import InvalidPolicy
from .resources import UNUSED_KINDS, Action, Resource, ResourceKind

# Cedar recurses over nested and chained expressions, and a text that takes it too deep ends the process instead of raising:
# 1,000 brackets in each other did here, or 20,000 dots in a row. What people write stays far below these bounds.
_DEPTH_MAX: Final = 32
_CHAIN_MAX: Final = 1_000
_NOT_CODE: Final = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*', re.DOTALL)
_BRACKET: Final = re.compile(r"[\[({})\]]")
_LINK: Final = re.compile(r"::|\.|&&|\|\||[-+*!\[({]|\bif\b")
_PROBLEMS_MAX: Final = 10

_TOKEN: Final = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|@\s*[A-Za-z_]\w*|[A-Za-z_]\w*', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:u\{([0-9A-Fa-f]{1,6})\}|x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}

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


_DECISIONS_MAX: Final = 16_384
"""Decisions, and classes of names, that a policy set remembers; with more it forgets all and decides again."""
_EVALUATION_EFFORT: Final = 60
_BEARERS_MAX: Final = 1_024
"""Bearers whose classes a policy set remembers."""


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

_WORDS: Final = frozenset(
    [
        "permit",
        "forbid",
        "when",
        "unless",
        "if",
        "then",
        "else",
        "true",
        "false",
        "in",
        "is",
        "has",
        "like",
        "principal",
        "action",
        "resource",
        "context",
        "Action",
        "Role",
        "Subject",
        "contains",
        "containsAll",
        "containsAny",
        "isEmpty",
        "id",
        "clientId",
        "name",
        "topic",
        "group",
        "claimed",
        "granted",
        "revoked",
    ]
) | frozenset(_TYPES.values())
"""What policies may be made of for their names to be classified. Anything else, such as an extension function, and every name is its own class."""


class Distinctions:
    """
    Which names a set of policies can tell apart.

    Args:
        texts: The policies, each of which was checked.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.effort = 0
        """What finding classes has cost so far, about in microseconds."""
        literals: set[str] = set()
        patterns: set[tuple[str, ...]] = set()
        self.literals: frozenset[str] | None = None
        """Every string that the policies compare names with; ``None`` if they do more than compare."""
        self._patterns: tuple[tuple[str, ...], ...] = ()
        for text in texts:
            before = ""
            for token in _TOKEN.findall(text):
                if token.startswith('"'):
                    if before == "like":
                        patterns.add(_pattern_of(token[1:-1]))
                    else:
                        literals.add("".join(_unescaped(token[1:-1])))
                elif token.startswith("//"):
                    continue
                elif not token.startswith("@") and token not in _WORDS:
                    return
                before = token
        self.literals = frozenset(literals)
        self._patterns = tuple(sorted(patterns))
        self._classes: dict[str, int] = {}

    @property
    def samples(self) -> list[str] | None:
        """Names of which the policies decide differently: each literal, one for each pattern, and another; ``None`` if that is not known."""
        if self.literals is None:
            return None
        other = "other"
        while other in self.literals:
            other += "'"
        return [*sorted(self.literals), *("".join(parts) for parts in self._patterns), other]

    def class_of(self, name: str) -> str | int:
        """Return the name itself if a policy mentions it, otherwise the set of patterns that it matches."""
        if self.literals is None or name in self.literals:
            return name
        if not self._patterns:
            return 0
        matched = self._classes.get(name)
        if matched is None:
            matched = 0
            for number, pattern in enumerate(self._patterns):
                if name.startswith(pattern[0]) and _matches(name, pattern):
                    matched |= 1 << number
            if len(self._classes) >= _DECISIONS_MAX:
                self._classes.clear()
            self._classes[name] = matched
            self.effort += len(self._patterns) // 3
        return matched


def _unescaped(text: str, star: str = "*") -> list[str]:
    """Return the characters of a Cedar string, whose escaped ``*`` is ``star``."""
    characters: list[str] = []
    end = 0
    for escape in _ESCAPE.finditer(text):
        characters += text[end : escape.start()]
        code_point, byte, letter = escape.groups()
        characters.append(
            chr(int(code_point or byte, 16))
            if letter is None
            else star
            if letter == "*"
            else _ESCAPED.get(letter, letter)
        )
        end = escape.end()
    return [*characters, *text[end:]]


def _pattern_of(text: str) -> tuple[str, ...]:
    """Return the literal parts of a pattern, between which anything may stand."""
    parts: list[str] = [""]
    for character in _unescaped(text, star="**"):
        if character == "*":
            parts.append("")
        else:
            parts[-1] += "*" if character == "**" else character
    return tuple(parts)


def _matches(name: str, pattern: tuple[str, ...]) -> bool:
    """Match in one pass: taking the first occurrence of each part leaves the most for the parts behind it."""
    first, *between = pattern
    if not between:
        return name == first
    last = between.pop()
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    start, end = len(first), len(name) - len(last)
    for part in between:
        at = name.find(part, start, end)
        if at < 0:
            return False
        start = at + len(part)
    return True


@functools.lru_cache(maxsize=16)  # A policy is checked when it is put, and again when its record is applied.
def check_policy(text: str, *, bytes_max: int) -> Policy:
    """
    A policy's text, if it can be put into force.

    Raises:
        InvalidPolicy: It is too long or too deep, Cedar cannot parse it, it does not fit the schema, a name is not in Unicode's form NFC,
            or it says nothing.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > bytes_max:
        raise InvalidPolicy((f"it is {size} bytes long; at most {bytes_max} are allowed",))
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InvalidPolicy(("it holds a lone surrogate",))
    _check_depth(text)
    _check_spelling(text)
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


def check_new_policy(text: str, *, bytes_max: int) -> Policy:
    """
    Check a policy before it is stored.

    Stored policies are read back with ``check_policy``: what is refused here alone has no effect, and does no harm.

    Raises:
        InvalidPolicy: As ``check_policy``; or it names types of resources by which no endpoint decides.
    """
    policy = check_policy(text, bytes_max=bytes_max)
    unused = sorted({_TYPES[kind] for kind in UNUSED_KINDS}.intersection(_TOKEN.findall(text)))
    if unused:
        raise InvalidPolicy(
            (f"no endpoint decides by rights on {' or '.join(unused)}, so it would have no effect there",)
        )
    return policy


def _check_spelling(text: str) -> None:
    """Names are compared in Unicode's form NFC: a string in another form would match none of them, and forbid nothing."""
    if text.isascii() and "\\" not in text:
        return
    before = ""
    for token in _TOKEN.findall(text):
        is_compared = token.startswith('"') and not before.startswith("@")
        before = token
        name = "".join(_unescaped(token[1:-1])) if is_compared else ""
        if not unicodedata.is_normalized("NFC", name):
            composed = unicodedata.normalize("NFC", name)
            raise InvalidPolicy((f"the string {name!a} is not in Unicode's form NFC; write {composed!a}",))


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
        self.distinctions = Distinctions(policy.text for policy in everything.values())
        self._decisions: dict[Any, PolicyDecision] = {}
        self._bearers: dict[Any, _Bearer] = {}
        self.evaluation_count = 0
        """Calls of the policy engine."""
        self._evaluation_effort = _EVALUATION_EFFORT + len(self._names)

    @property
    def effort(self) -> int:
        """What deciding has cost so far, about in microseconds; so work can be cut into slices without a clock."""
        return self.evaluation_count * self._evaluation_effort + self.distinctions.effort

    def decide(
        self, context: OperationContext, action: Action, resource: Resource, standpoint: RightsContext
    ) -> PolicyDecision:
        """Return the decision for one request; Cedar is called once for all requests that the policies cannot tell apart."""
        bearer = self._bearer_of(context)
        if bearer is None or not _is_encodable(resource.name):
            return self._ask(context, action, resource, standpoint)  # Cedar cannot read it, and so denies.
        key = (action, bearer.key, self._class_of(bearer, resource), standpoint)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._ask(context, action, resource, standpoint)
            if len(self._decisions) >= _DECISIONS_MAX:
                self._decisions.clear()
            self._decisions[key] = decision
        return decision

    def _bearer_of(self, context: OperationContext) -> _Bearer | None:
        given = (context.subject, context.client_id, context.claims.roles)
        bearer = self._bearers.get(given)
        if bearer is None:
            names = (context.subject, context.client_id or "", *context.claims.roles)
            if not all(map(_is_encodable, names)):
                return None
            class_of, literals = self.distinctions.class_of, self.distinctions.literals
            key = (
                class_of(context.subject),
                None if context.client_id is None else class_of(context.client_id),
                context.subject == context.client_id,
                context.claims.roles if literals is None else context.claims.roles & literals,
            )
            bearer = _Bearer(key, context.subject, context.client_id)
            if len(self._bearers) >= _BEARERS_MAX:
                self._bearers.clear()
            self._bearers[given] = bearer
        return bearer

    def _class_of(self, bearer: _Bearer, resource: Resource) -> tuple[Any, ...]:
        """Return what the policies can see of a resource: its kind, the classes of its names, and which of them equal the bearer's."""
        kind, name = resource
        class_of, subject, client_id = self.distinctions.class_of, bearer.subject, bearer.client_id
        if kind != ResourceKind.GROUP:
            return (kind, class_of(name), name == subject, name == client_id)
        topic_name, _, group = name.partition("/")
        names = (name, topic_name, group)
        same = tuple(each == other for each in names for other in (subject, client_id))
        return (kind, *map(class_of, names), *same, name == topic_name, name == group, topic_name == group)

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
        self.evaluation_count += 1
        try:
            answer = cedarpy.is_authorized(request, self._set, entities)
        except (ValueError, TypeError) as error:
            return PolicyDecision(False, errors=(str(error),))
        errors = tuple(answer.diagnostics.errors)
        is_allowed = answer.decision is cedarpy.Decision.Allow and not errors
        return PolicyDecision(is_allowed, tuple(sorted(map(self._name, answer.diagnostics.reasons))), errors)

    def _name(self, reason: str) -> str:
        return self._names[int(reason.removeprefix("policy"))]


class _Bearer(NamedTuple):
    """The caller, as policies see it."""

    key: tuple[Any, ...]
    subject: str
    client_id: str | None


def _is_encodable(name: str) -> bool:
    """Return whether Cedar can read the name: it must have no lone surrogate."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


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
