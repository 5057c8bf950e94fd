"""
What the HTTP API answers when a request cannot be taken as it is.

    ApiError
    ├── BadRequest          a parameter, a header or the body is not what the schema says
    ├── UnsupportedMedia        the body is of a kind that this place does not take
    ├── TooManyEvents           more events in one request than the settings allow
    ├── ReservedTopic           the topic is written by Tidings itself
    ├── ForeignActor            the event is said to be somebody else's
    ├── UnknownPath             nothing is there
    ├── MethodNotAllowed        something is there, and cannot be asked for that
    ├── UnknownEvent            no record has that seq
    └── GroupNotRunning         the group has no members now, so there is nothing to pause or resume
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import NodeError

__all__ = [
    "ApiError",
    "BadRequest",
    "ForeignActor",
    "GroupNotRunning",
    "MethodNotAllowed",
    "ReservedTopic",
    "TooManyEvents",
    "UnknownEvent",
    "UnknownPath",
    "UnsupportedMedia",
]


class ApiError(NodeError):
    """The root of what the HTTP API raises itself."""

    code = "api.error"
    status = 400


class BadRequest(ApiError):
    """Part of a request is not what it must be; ``field`` names it."""

    code = "api.invalid_request"

    def __init__(self, field: str, problem: str, hint: str | None = None) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem
        self.hint = hint

    def describe(self) -> str:
        return f"{self.field}: {self.problem}"


class UnsupportedMedia(ApiError):
    """The body is of a kind that is not taken here."""

    code = "api.unsupported_media"
    status = 415

    def __init__(self, given: str, taken: Iterable[str]) -> None:
        super().__init__(given)
        self.given = given
        self.taken = tuple(taken)
        self.hint = f"send {', '.join(self.taken)}"

    def describe(self) -> str:
        return (
            f"a body of type {self.given[:100]!r} is not taken here" if self.given else "the body has no content type"
        )


class TooManyEvents(ApiError):
    """A request has more events than one may have; none was stored."""

    code = "api.too_many_events"
    status = 413
    hint = "send them in several requests; the limit is the setting api.events_count_max"

    def __init__(self, count: int, count_max: int) -> None:
        super().__init__(count, count_max)
        self.count = count
        self.count_max = count_max

    def describe(self) -> str:
        return f"the request has {self.count} events; at most {self.count_max} are allowed"


class ReservedTopic(ApiError):
    """Tidings believes what stands in this topic: it writes it itself, or takes it at another door only."""

    code = "api.reserved_topic"
    status = 403
    hint = "changes of access go to /v1/access, events of sync clients to /sync; what is done here is audited by itself"

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def describe(self) -> str:
        return f"topic {self.topic!r} is not published to"


class ForeignActor(ApiError):
    """An event names an actor that its publisher is not, and may not publish for; ``field`` says where."""

    code = "api.foreign_actor"
    status = 403
    field = "meta.actor"
    hint = "leave meta.actor out, or have the right to publish for that actor granted (publish on actor:NAME)"

    def __init__(self, subject: str, actor: str | None) -> None:
        super().__init__(subject, actor)
        self.subject = subject
        self.actor = actor

    def describe(self) -> str:
        named = "names nobody" if self.actor is None else f"{self.actor[:100]!r} is somebody else"
        return f"{self.field}: {named}; {self.subject!r} is publishing"


class UnknownPath(ApiError):
    """Nothing is at that path."""

    code = "api.unknown_path"
    status = 404
    hint = "/v1/openapi.json lists what there is"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def describe(self) -> str:
        return f"there is nothing at {self.path[:200]!r}"


class MethodNotAllowed(ApiError):
    """The path is known, the method is not one of its own."""

    code = "api.method_not_allowed"
    status = 405

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        super().__init__(method)
        self.method = method
        self.allowed = tuple(allowed)
        self.hint = f"this place takes {', '.join(self.allowed)}"

    def describe(self) -> str:
        return f"{self.method} is not possible here"


class UnknownEvent(ApiError):
    """No record that the caller may see has that seq."""

    code = "api.unknown_event"
    status = 404

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq

    def describe(self) -> str:
        return f"there is no event at seq {self.seq}"


class GroupNotRunning(ApiError):
    """The group has a place, and nobody who handles its events."""

    code = "api.group_not_running"
    status = 409
    hint = "a group is paused while it has members; it stays so when they leave and come back"

    def __init__(self, topic: str, group: str) -> None:
        super().__init__(topic, group)
        self.topic = topic
        self.group = group

    def describe(self) -> str:
        return f"group {self.group!r} of topic {self.topic!r} has no members now"
