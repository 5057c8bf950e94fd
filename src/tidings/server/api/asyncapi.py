"""The AsyncAPI 3.0 document of the sockets, made from the frames that both ends decode."""

from __future__ import annotations

import typing
from typing import Any, Final

import msgspec

from tidings import __version__
from tidings.wire import groups, sync_frames
from tidings.wire.events import EventIn

__all__ = ["asyncapi_document"]

_REF: Final = "#/components/schemas/{name}"


def asyncapi_document() -> dict[str, Any]:
    """The document."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for name, address, summary, incoming, outgoing, is_enveloped in (
        (
            "groups",
            "/groups",
            "Members of durable groups, and publishers, in other processes.",
            _members(groups.ClientFrame),
            _members(groups.NodeFrame),
            False,
        ),
        (
            "sync",
            "/sync",
            "Offline-first clients: submit, catch up in pages, hear broadcasts. Each payload travels in an envelope.",
            _members(sync_frames.ClientPayload),
            _members(sync_frames.ServerPayload),
            True,
        ),
    ):
        shown: dict[str, Any] = {}
        for direction, kinds in (("receive", incoming), ("send", outgoing)):
            listed = []
            for kind in kinds:
                key = f"{name}.{kind.__name__}"
                messages[key] = _message(name, kind, schemas, is_enveloped=is_enveloped)
                shown[kind.__name__] = {"$ref": f"#/components/messages/{key}"}
                listed.append({"$ref": f"#/channels/{name}/messages/{kind.__name__}"})
            operations[f"{name}.{direction}"] = {
                "action": direction,
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": listed,
            }
        channels[name] = {"address": address, "summary": summary, "messages": shown, "bindings": {"ws": {}}}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Tidings", "version": __version__, "license": {"name": "Apache-2.0"}},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }


def _members(union: Any) -> tuple[type[msgspec.Struct], ...]:
    return typing.get_args(union)


def _message(door: str, kind: type[msgspec.Struct], schemas: dict[str, Any], *, is_enveloped: bool) -> dict[str, Any]:
    """A message, and the schemas it needs; those of two doors are kept apart, as their structs may share names."""
    kinds = [kind, EventIn] if kind is groups.Publish else [kind]
    (schema, *_), components = msgspec.json.schema_components(
        kinds, ref_template=_REF.replace("{name}", f"{door}.{{name}}")
    )
    for name, each in components.items():
        schemas[f"{door}.{name}"] = each
    if is_enveloped:
        schema = {
            "type": "object",
            "properties": {"type": {"const": _wire_name(kind)}, "payload": schema},
            "required": ["type", "payload"],
        }
    return {"name": _wire_name(kind), "title": kind.__name__, "summary": _summary(kind), "payload": schema}


def _wire_name(kind: type[msgspec.Struct]) -> str:
    tag = kind.__struct_config__.tag
    return str(tag) if tag is not None else str(getattr(kind, "TYPE", getattr(kind, "type", kind.__name__)))


def _summary(kind: type[msgspec.Struct]) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]
