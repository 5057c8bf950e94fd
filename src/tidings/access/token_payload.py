"""
A token's payload: every claim we read, with its type, turned into a context or refused.

A claim of the wrong type refuses the token. It is not passed over: the issuer meant something by it, and guessing what could give
its bearer more than was meant.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from tidings.core.validation import explain

from .claims import Claims
from .context import OperationContext
from .errors import InvalidChange, TokenInvalid
from .resources import ResourceKind, checked_text

__all__ = ["TokenPayload", "context_from", "payload_from"]

_NAMES_MAX: Final = 10_000
_NS: Final = 1_000_000_000
_SECONDS_MAX: Final = 253_402_300_799  # the last second of the year 9999

Names = Annotated[list[str], msgspec.Meta(max_length=_NAMES_MAX)]
Seconds = Annotated[int, msgspec.Meta(ge=0, le=_SECONDS_MAX)] | Annotated[float, msgspec.Meta(ge=0, le=_SECONDS_MAX)]
Absent = msgspec.UnsetType
ABSENT: Final = msgspec.UNSET


class TokenPayload(msgspec.Struct, frozen=True, kw_only=True):
    """The claims that are read; others are passed over."""

    sub: str | Absent = ABSENT
    iss: str | Absent = ABSENT
    aud: str | Names | Absent = ABSENT
    exp: Seconds | Absent = ABSENT
    nbf: Seconds | Absent = ABSENT
    iat: Seconds | Absent = ABSENT
    jti: str | Absent = ABSENT
    client_id: str | Absent = ABSENT
    client_id_camel: str | Absent = msgspec.field(default=ABSENT, name="clientId")
    user_id: str | Absent = ABSENT
    user_id_camel: str | Absent = msgspec.field(default=ABSENT, name="userId")
    allowed_partitions: Names | Absent = ABSENT
    allowed_partition_prefixes: Names | Absent = ABSENT
    project_ids: Names | Absent = ABSENT
    project_ids_camel: Names | Absent = msgspec.field(default=ABSENT, name="projectIds")
    topics: Names = []
    topic_prefixes: Names = []
    spaces: Names | Absent = ABSENT
    space_prefixes: Names | Absent = ABSENT
    allowed_groups: Names = []
    allowed_group_prefixes: Names = []
    roles: Names = []


_DECODER: Final = msgspec.json.Decoder(TokenPayload)


def payload_from(data: bytes) -> TokenPayload:
    """
    The claims of a payload.

    Raises:
        TokenInvalid: It is no JSON object, or a claim has the wrong type.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.ValidationError as error:
        problem, path = explain(error)
        raise TokenInvalid(f"claim {path}: {problem}" if path else "its payload is no JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise TokenInvalid("its payload is not JSON") from error


def nanoseconds(seconds: int | float) -> int:
    """A time of a token in nanoseconds; whole seconds stay exact."""
    return seconds * _NS if isinstance(seconds, int) else int(seconds * _NS)


def context_from(payload: TokenPayload, *, leeway_s: int, trust: str | None = None) -> OperationContext:
    """
    The context that a token whose times and signature are good stands for.

    Raises:
        TokenInvalid: It names nobody, contradicts itself, or holds a name that none can have.
    """
    try:
        client_id = _one("client_id", payload.client_id, "clientId", payload.client_id_camel)
        user_id = _one("user_id", payload.user_id, "userId", payload.user_id_camel)
        # A token of a sync client may name the client only; then that is who is asking.
        subject = client_id if payload.sub is ABSENT else _text("sub", payload.sub)
        if subject is None:
            raise TokenInvalid("it has neither sub nor client_id")
        projects = _one_list("project_ids", payload.project_ids, "projectIds", payload.project_ids_camel)
        bounds = {
            ResourceKind.PARTITION: (payload.allowed_partitions, payload.allowed_partition_prefixes),
            ResourceKind.PROJECT: (payload.project_ids, payload.project_ids_camel),
            ResourceKind.SPACE: (payload.spaces, payload.space_prefixes),
        }
        claims = Claims(
            partitions=_names("allowed_partitions", _given(payload.allowed_partitions)),
            partition_prefixes=_prefixes("allowed_partition_prefixes", _given(payload.allowed_partition_prefixes)),
            projects=_names("project_ids", projects),
            topics=_names("topics", payload.topics),
            topic_prefixes=_prefixes("topic_prefixes", payload.topic_prefixes),
            spaces=_names("spaces", _given(payload.spaces)),
            space_prefixes=_prefixes("space_prefixes", _given(payload.space_prefixes)),
            groups=_names("allowed_groups", payload.allowed_groups),
            group_prefixes=_prefixes("allowed_group_prefixes", payload.allowed_group_prefixes),
            roles=_names("roles", payload.roles),
            names_none_of=frozenset(
                kind
                for kind, claimed in bounds.items()
                if any(each is not ABSENT for each in claimed) and not any(_given(each) for each in claimed)
            ),
        )
        token_id = None if payload.jti is ABSENT else _text("jti", payload.jti)
    except InvalidChange as error:
        raise TokenInvalid(f"claim {error.field}: {error.problem}") from error
    expires_at_ns = None if payload.exp is ABSENT else nanoseconds(payload.exp) + leeway_s * _NS
    return OperationContext(subject, client_id, expires_at_ns, token_id, claims, user_id, trust)


def _text(claim: str, value: Any) -> str:
    return checked_text(claim, value)


def _one(first: str, value: str | Absent, second: str, other: str | Absent) -> str | None:
    if value is not ABSENT and other is not ABSENT and value != other:
        raise TokenInvalid(f"{first} and {second} differ")
    found = other if value is ABSENT else value
    return None if found is ABSENT else _text(first, found)


def _one_list(first: str, value: list[str] | Absent, second: str, other: list[str] | Absent) -> list[str]:
    if value is not ABSENT and other is not ABSENT and set(value) != set(other):
        raise TokenInvalid(f"{first} and {second} differ")
    return _given(other if value is ABSENT else value)


def _given(names: list[str] | Absent) -> list[str]:
    return [] if names is ABSENT else names


def _names(claim: str, names: list[str]) -> frozenset[str]:
    return frozenset(checked_text(claim, name) for name in names)


def _prefixes(claim: str, names: list[str]) -> tuple[str, ...]:
    return tuple(sorted(_names(claim, names)))
