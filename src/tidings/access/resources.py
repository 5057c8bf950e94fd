"""
What can be done, and to what: the vocabulary of claims, grants, policies and endpoints.

Names are compared in Unicode's form NFC, because that is how the log stores partitions: two spellings that look alike
are one resource, and one grant.
"""

from __future__ import annotations

import enum
import re
import unicodedata
from typing import Final, Literal, NamedTuple

import msgspec

from .errors import InvalidChange

NAME_BYTES_MAX: Final = 256
NODE_NAME: Final = "local"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Action(enum.StrEnum):
    """What somebody wants to do."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    SUBMIT = "submit"
    SYNC = "sync"
    READ = "read"
    ADMINISTER = "administer"
    JOIN = "join"
    CREATE = "create"
    MOVE = "move"
    PAUSE = "pause"
    REDRIVE = "redrive"
    DROP = "drop"
    DELETE = "delete"

    __hash__ = str.__hash__  # an enum's own is a Python function, and this is hashed for every record delivered


class ResourceKind(enum.StrEnum):
    """What kinds of thing it can be done to."""

    TOPIC = "topic"
    PARTITION = "partition"
    PROJECT = "project"
    SPACE = "space"
    ACTOR = "actor"
    DOMAIN = "domain"
    OBJECT = "object"
    NODE = "node"
    GROUP = "group"

    __hash__ = str.__hash__


UNUSED_KINDS: Final = frozenset({ResourceKind.DOMAIN, ResourceKind.OBJECT})
"""Kinds by which no endpoint decides. A change about them would be stored and have no effect, so it is refused."""


class Resource(NamedTuple):
    """One thing that access is decided on."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return self.kind.value if self.kind is ResourceKind.NODE else f"{self.kind.value}:{self.name}"


class ResourcePattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One resource, or all of a kind whose names begin alike."""

    kind: ResourceKind
    name: str
    match: Literal["exact", "prefix"] = "exact"

    def covers(self, resource: Resource) -> bool:
        """Whether the resource, in its normal form, is meant."""
        if resource.kind != self.kind:
            return False
        return resource.name == self.name if self.match == "exact" else resource.name.startswith(self.name)

    def __str__(self) -> str:
        return f"{Resource(self.kind, self.name)}{'*' if self.match == 'prefix' else ''}"


def normal(name: str) -> str:
    """The name in the form that names are compared in."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def topic(name: str) -> Resource:
    """A topic of the log."""
    return Resource(ResourceKind.TOPIC, normal(name))


def partition(name: str) -> Resource:
    """A partition that sync clients ask for."""
    return Resource(ResourceKind.PARTITION, normal(name))


def project(name: str) -> Resource:
    """A project of sync's second dialect."""
    return Resource(ResourceKind.PROJECT, normal(name))


def space(name: str) -> Resource:
    """A space: whose data it is."""
    return Resource(ResourceKind.SPACE, normal(name))


def actor(name: str) -> Resource:
    """Somebody in whose name events can be published."""
    return Resource(ResourceKind.ACTOR, normal(name))


def group_of(topic_name: str, group: str) -> Resource:
    """A durable group of a topic."""
    return Resource(ResourceKind.GROUP, normal(f"{topic_name}/{group}"))


_NODE: Final = Resource(ResourceKind.NODE, NODE_NAME)


def node() -> Resource:
    """The node as a whole, for its administration."""
    return _NODE


def checked_text(field: str, text: str, *, bytes_max: int = NAME_BYTES_MAX, may_be_empty: bool = False) -> str:
    """
    A name in its normal form.

    Raises:
        InvalidChange: It is empty, too long, or holds a control character.
    """
    if not text and not may_be_empty:
        raise InvalidChange(field, "must not be empty")
    if _CONTROL.search(text) is not None:
        raise InvalidChange(field, "holds a control character or a lone surrogate")
    name = normal(text)
    if len(name.encode()) > bytes_max:
        raise InvalidChange(field, f"is longer than {bytes_max} bytes")
    return name


def resource_from_text(text: str) -> Resource:
    """
    A resource as people write it: ``topic:orders``, ``partition:home-1``, ``group:orders/billing``, ``node``.

    Raises:
        InvalidChange: It is not one.
    """
    kind_text, colon, name = text.partition(":")
    try:
        kind = ResourceKind(kind_text)
    except ValueError:
        kinds = ", ".join(each.value for each in ResourceKind)
        raise InvalidChange("resource", f"{kind_text!r} is no kind of resource", f"there are: {kinds}") from None
    if kind is ResourceKind.NODE:
        if colon and name != NODE_NAME:
            raise InvalidChange("resource", "there is one node, written 'node'")
        return _NODE
    if not colon:
        raise InvalidChange("resource", "has no name", f"write it as {kind.value}:NAME")
    return Resource(kind, checked_text("resource", name))


def pattern_from_text(text: str) -> ResourcePattern:
    """
    A resource, or with ``*`` at its end all whose names begin like that: ``partition:home-*``, ``topic:*``.

    Raises:
        InvalidChange: It is neither.
    """
    kind_text, _, name = text.partition(":")
    if name == "*":
        kind, _ = resource_from_text(f"{kind_text}:any")
        return ResourcePattern(kind, "", "prefix")
    kind, name = resource_from_text(text.removesuffix("*"))
    return ResourcePattern(kind, name, "prefix" if text.endswith("*") else "exact")
