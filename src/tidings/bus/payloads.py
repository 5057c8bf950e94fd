"""
Typed payloads: what a handler's parameters ask for, and objects as payloads.

A handler's parameters are looked at once, when it is subscribed. Each gets one thing, by its annotation or its name:

- no annotation, ``Any``, ``Event`` or ``ReceivedEvent``: the event
- ``EventMeta``: the envelope
- a dataclass, msgspec ``Struct``, ``TypedDict``, pydantic model, ``dict`` or ``Mapping``: the payload as that type
- the name ``attempt`` (an ``int``): 1 for the first delivery to the group, 2 for the first retry

A handler of lists takes the list of events. A payload that does not fit its type is a dead letter at once: trying again cannot
help. pydantic is used if the program has imported it, and not needed otherwise.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict

import msgspec

from tidings.core.errors import InvalidEvent, InvalidPayload
from tidings.core.events import Actor, Device, Event, EventMeta, QoS, SecurityBand
from tidings.core.validation import explain

from .errors import InvalidHandler, PayloadMismatch
from .events import ReceivedEvent

_Getter = Callable[[ReceivedEvent], object]
_EVENTS: Final = (inspect.Parameter.empty, Any, object, Event, ReceivedEvent)
_BY_NAME: Final[dict[str, object]] = {
    "Any": Any,
    "object": object,
    "Event": Event,
    "ReceivedEvent": ReceivedEvent,
    "EventMeta": EventMeta,
}
"""What an annotation means whose name cannot be looked up: it may be imported for type checkers only."""
_MAPPINGS: Final = (dict, Mapping, collections.abc.MutableMapping)
_LISTS: Final = (list, collections.abc.Sequence)
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def bind_handler(handler: Callable[..., object], *, takes_lists: bool = False) -> Callable[[Any], object]:
    """
    A handler as a function of one event (of one list, if it takes lists): itself, if it is one already.

    Raises:
        InvalidHandler: It cannot be called, or a parameter asks for something that there is not.
    """
    if not callable(handler):
        raise InvalidHandler(handler, f"must be a function or a coroutine function, not {type(handler).__name__}")
    _check_is_handler(handler)
    parameters = _parameters(handler)
    if takes_lists:
        _check_takes_list(handler, parameters)
        return handler
    getters = [(each, _getter(handler, each)) for each in parameters]
    if not getters or (len(getters) == 1 and getters[0][1] is _event and getters[0][0].kind in _POSITIONAL):
        return handler
    if sum(getter is _event for _, getter in getters) > 1:
        raise InvalidHandler(handler, "more than one parameter takes the event")
    by_position = [getter for each, getter in getters if each.kind in _POSITIONAL]
    by_name = {each.name: getter for each, getter in getters if each.kind not in _POSITIONAL}

    def arguments(event: ReceivedEvent) -> tuple[list[object], dict[str, object]]:
        return [get(event) for get in by_position], {name: get(event) for name, get in by_name.items()}

    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004 - an object with an async __call__ is a handler too

        async def call_async(event: ReceivedEvent) -> object:
            given, named = arguments(event)
            return await handler(*given, **named)  # type: ignore[misc]

        return call_async

    def call(event: ReceivedEvent) -> object:
        given, named = arguments(event)
        return handler(*given, **named)

    return call


def _check_is_handler(handler: Callable[..., object]) -> None:
    """
    Refuse what could only ever fail when it is called with an event.

    Raises:
        InvalidHandler: It is a class or a generator, or nothing can be given to it.
    """
    if inspect.isclass(handler):
        raise InvalidHandler(
            handler, "is a class", "subscribe an object of it that has __call__, or one of its methods"
        )
    called = getattr(handler, "__call__", None)  # noqa: B004
    if any(map(inspect.isgeneratorfunction, (handler, called))) or any(
        map(inspect.isasyncgenfunction, (handler, called))
    ):
        raise InvalidHandler(handler, "is a generator", "return Ack(), Nack() or nothing instead of yielding")
    try:
        kinds = {each.kind for each in inspect.signature(handler).parameters.values()}
    except (TypeError, ValueError):  # a builtin: it is given the event
        return
    if not kinds - {inspect.Parameter.VAR_KEYWORD}:
        raise InvalidHandler(handler, "has no parameter that an event could be given to")


def _parameters(handler: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters to fill in, with their annotations looked up; none if nothing is known of them."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # a builtin: it is given the event
        return []
    function = handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004
    function = handler.func if hasattr(handler, "func") and hasattr(handler, "keywords") else function
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return [
        each.replace(annotation=_looked_up(each.annotation, names))
        for each in signature.parameters.values()
        if each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and (each.default is inspect.Parameter.empty or each.name == "attempt")
    ]


def _looked_up(annotation: object, names: dict[str, Any]) -> Any:
    """What an annotation stands for; one that cannot be evaluated stays text."""
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), names)["it"]
    except Exception:  # noqa: BLE001 - whatever evaluating it raises
        return annotation


def takes_list(handler: Callable[..., object]) -> bool:
    """Whether a handler says by its annotation that it takes a list of events."""
    parameters = _parameters(handler) if callable(handler) else []
    return bool(parameters) and typing.get_origin(parameters[0].annotation) in _LISTS


def _check_takes_list(handler: Callable[..., object], parameters: list[inspect.Parameter]) -> None:
    if len(parameters) > 1 or (parameters and parameters[0].kind not in _POSITIONAL):
        raise InvalidHandler(handler, "a handler of lists (batch_count_max) takes one parameter, the list of events")
    for each in parameters:
        items = typing.get_args(each.annotation) or (Any,)
        if typing.get_origin(each.annotation) in _LISTS and items[0] not in _EVENTS:
            raise InvalidHandler(handler, f"{each.name}: a handler of lists (batch_count_max) takes a list of events")


def _getter(handler: Callable[..., object], parameter: inspect.Parameter) -> _Getter:
    wanted = parameter.annotation
    if isinstance(wanted, str):  # could not be looked up
        name = wanted.rpartition(".")[2]
        if name not in _BY_NAME and parameter.name != "attempt":
            problem = f"{parameter.name}: the annotation {wanted!r} cannot be looked up"
            raise InvalidHandler(handler, problem, "define the type at the top level of the handler's module")
        wanted = _BY_NAME.get(name, int)
    if parameter.name == "attempt" and wanted in (inspect.Parameter.empty, int):
        return _attempt
    if any(wanted is each for each in _EVENTS) or (isinstance(wanted, type) and issubclass(wanted, Event)):
        return _event
    if wanted is EventMeta:
        return _meta
    members = typing.get_args(wanted) if isinstance(wanted, types.UnionType) or _is_union(wanted) else (wanted,)
    if Event in members or ReceivedEvent in members:
        return _event
    if wanted in _MAPPINGS:
        return _payload
    if all(is_payload_type(each) for each in members):
        return _converter(handler, parameter.name, wanted)
    raise InvalidHandler(handler, f"{parameter.name}: nothing of an event is {_name_of(wanted)}")


def _event(event: ReceivedEvent) -> object:
    return event


def _meta(event: ReceivedEvent) -> object:
    return event.meta


def _payload(event: ReceivedEvent) -> object:
    return event.payload


def _attempt(event: ReceivedEvent) -> object:
    return event.attempt


def _is_union(wanted: object) -> bool:
    return typing.get_origin(wanted) is typing.Union


def is_payload_type(wanted: object) -> bool:
    """Whether payloads can be read as this type, and objects of it be published."""
    wanted = typing.get_origin(wanted) or wanted
    if not isinstance(wanted, type):
        return False
    return (
        wanted in _MAPPINGS
        or issubclass(wanted, msgspec.Struct)
        or dataclasses.is_dataclass(wanted)
        or typing.is_typeddict(wanted)
        or hasattr(wanted, "__attrs_attrs__")
        or _is_pydantic(wanted)
    )


def _is_pydantic(wanted: object) -> bool:
    """Whether a type is pydantic's, without importing it: a program that has such a type has."""
    return "pydantic" in sys.modules and hasattr(wanted, "__pydantic_validator__")


def _converter(handler: Callable[..., object], name: str, wanted: Any) -> _Getter:
    members = typing.get_args(wanted) if _is_union(wanted) or isinstance(wanted, types.UnionType) else (wanted,)
    shown = _name_of(wanted)
    if any(map(_is_pydantic, members)):
        pydantic: Any = sys.modules["pydantic"]
        adapter = pydantic.TypeAdapter(wanted)

        def validated(event: ReceivedEvent) -> object:
            try:
                return adapter.validate_python(event.payload)
            except pydantic.ValidationError as error:
                found = error.errors(include_url=False)
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                raise PayloadMismatch(shown, _path(found[0]["loc"]), found[0]["msg"] + more) from None

        return validated
    try:
        msgspec.inspect.type_info(wanted)
    except (TypeError, NameError) as error:
        raise InvalidHandler(handler, f"{name}: no payload can be read as {shown}: {error}") from error

    def converted(event: ReceivedEvent) -> object:
        try:
            return msgspec.convert(event.payload, wanted, str_keys=True)
        except msgspec.ValidationError as error:
            problem, path = explain(error)
            path = f"${path}" if path.startswith("[") or not path else f"$.{path}"
            # As a person would say it: ``expected int, got str``.
            raise PayloadMismatch(shown, path, problem[:1].lower() + problem[1:].replace("`", "")) from None

    return converted


def _path(places: tuple[str | int, ...]) -> str:
    return "$" + "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places)


def _name_of(wanted: object) -> str:
    return wanted.__name__ if isinstance(wanted, type) and not typing.get_args(wanted) else str(wanted)


def as_payload(value: object) -> Mapping[str, Any]:
    """
    What can be published as a payload: a mapping, or an object of a type that a handler may ask for.

    Raises:
        InvalidPayload: It is nothing of that kind.
    """
    if isinstance(value, Mapping):
        try:
            # Dates, decimals and UUIDs as in a dataclass; bytes are refused by the log.
            return typing.cast("Mapping[str, Any]", msgspec.to_builtins(value, builtin_types=(bytes, bytearray)))
        except (TypeError, ValueError, RecursionError):
            return value  # the log says which part of it has no JSON form
    if _is_pydantic(type(value)):
        if hasattr(value, "model_dump"):
            value = value.model_dump(mode="json", by_alias=True)
        else:
            pydantic: Any = sys.modules["pydantic"]
            value = pydantic.TypeAdapter(type(value)).dump_python(value, mode="json", by_alias=True)
    elif not isinstance(value, type) and is_payload_type(type(value)):
        try:
            value = msgspec.to_builtins(value, str_keys=True)
        except (TypeError, ValueError) as error:
            raise InvalidPayload("payload", f"{type(value).__name__} has no JSON form: {error}") from error
    if not isinstance(value, Mapping):
        hint = "publish a mapping, a dataclass, a msgspec Struct or a pydantic model"
        raise InvalidPayload("payload", f"must be a JSON object, not {type(value).__name__}", hint)
    return value


_PUBLISH_KEYWORDS: Final = ("type", "space", "delay", "at", "timeout_s", "authorise")


class EnvelopeOptions(TypedDict, total=False):
    """What ``publish(topic, payload, ...)`` takes as keywords beside type and space; see ``EventMeta`` for what each one is."""

    event_id: str
    ts: datetime
    actor: str | Actor | Mapping[str, Any]
    trace_id: str
    idem_key: str
    ttl_sec: int
    device: str | Device | Mapping[str, Any]
    partitions: Iterable[str]
    objects: Iterable[str]
    app: str
    band: SecurityBand | str
    priority: int | str
    qos: QoS | Mapping[str, Any]
    extra: Mapping[str, Any]


def event_of(topic: object, payload: object, type: str | None, space: str | None, meta: EnvelopeOptions) -> Event:
    """
    The event that ``publish(topic, payload, type=..., space=..., ...)`` stands for.

    Raises:
        InvalidEvent: The topic is none, type or space is missing, or the payload cannot be one.
    """
    if not isinstance(topic, str):
        hint = "publish(Event(...)), or publish(topic, payload, type=..., space=...)"
        raise InvalidEvent("event", f"must be an Event or a topic, not {topic.__class__.__name__}", hint)
    if unknown := meta.keys() - EnvelopeOptions.__annotations__.keys():
        name = min(unknown)
        known = (*EnvelopeOptions.__annotations__, *_PUBLISH_KEYWORDS)
        similar = [each for each in known if name in each.split("_")] or difflib.get_close_matches(name, known, 1)
        hint = (
            f"did you mean {similar[0]}=?" if similar else "fields of your own belong in the payload, or in extra={...}"
        )
        raise InvalidEvent(name, "is not a keyword of publish", hint)
    is_typed = type is not None or isinstance(topic, enum.Enum)
    if space is None or not is_typed:
        missing = [*(() if is_typed else ("type",)), *(() if space is not None else ("space_id",))]
        hint = 'say what kind of event it is, and whose data: type="ORDER_PLACED", space="shared:shop"'
        raise InvalidEvent.missing(missing, hint)
    return Event(EventMeta(topic, type, space, **meta), as_payload(payload))


def checked_events(events: Sequence[Event]) -> Sequence[Event]:
    """Events of a list, with payloads that are mappings."""
    if isinstance(events, str | Mapping) or not isinstance(events, Sequence):
        raise InvalidEvent("events", f"must be a list of events, not {type(events).__name__}")
    if set(map(type, events)) <= {Event} and {type(event.payload) for event in events} <= {dict}:
        return events
    checked = list(events)
    for at, event in enumerate(checked):
        if not isinstance(event, Event):
            raise InvalidEvent(f"events[{at}]", f"must be an Event, not {type(event).__name__}")
        if is_payload_type(type(event.payload)):
            checked[at] = Event(event.meta, as_payload(event.payload))
    return checked
