"""The reference of what a node shows: its metrics, from one that is asked, and its wires, from the documents that it serves."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from prometheus_client import Metric

from tidings.bus.middleware import MetricsMiddleware
from tidings.server.api import OPERATIONS
from tidings.server.api.documents import asyncapi_document, openapi_document
from tidings.steward.settings import StewardSettings
from tidings.testing.node import node_settings, running_node

__all__ = ["http_page", "metrics_page", "sockets_page"]

_MADE: Final = "This page is made by `python -m tools.reference`, and a test keeps it current."
_INT_MAX: Final = 2**53 - 1
"""What every JSON number can hold: no bound worth saying."""
_SUFFIXES: Final = {"counter": "_total"}


# Metrics


def metrics_page() -> str:
    """Every metric of a node, and of a bus without one."""
    lines = [
        "# Metrics",
        "",
        f"{_MADE} What to do with them: [observability](../topics/observability.md), [run a node](../howto/run-a-node.md#measure-it).",
        "",
        "A histogram `x` is read as `x_bucket`, `x_count` and `x_sum`.",
        "",
        "## Of a bus",
        "",
        "Counted by `MetricsMiddleware`; a node has them too, but for `events_publish_count` and `events_publish_seconds`.",
        "",
        *_metrics_table(MetricsMiddleware().collect()),
        "",
        "## Of a node",
        "",
        "At `/metrics`, beside those of the process (`process_...`, `python_info`).",
        "",
        *_metrics_table(asyncio.run(_of_a_node())),
    ]
    return "\n".join(lines) + "\n"


async def _of_a_node() -> list[Metric]:
    with tempfile.TemporaryDirectory() as folder:
        steward = StewardSettings(socket_path=str(Path(folder) / "steward.sock"))
        settings = msgspec.structs.replace(node_settings(), steward=steward)
        async with running_node(Path(folder) / "workspace", settings) as node, httpx.AsyncClient() as client:
            await client.get(f"{node.url}/healthz")  # what counts requests has its labels from the first one on
            found = node.registry.collect()
            return [each for each in found if each.name.startswith("tidings_")]


def _metrics_table(metrics: Any) -> Iterator[str]:
    yield from ("| metric | kind | labels | meaning |", "|---|---|---|---|")
    for each in sorted(metrics, key=lambda metric: metric.name):
        kind = "untyped" if each.type == "unknown" else each.type
        labels = ", ".join(f"`{label}`" for label in _labels(each))
        yield f"| `{each.name}{_SUFFIXES.get(each.type, '')}` | {kind} | {labels} | {each.documentation} |"


def _labels(metric: Metric) -> list[str]:
    """Those that it is declared with; those of its samples, if it does not say."""
    declared = getattr(metric, "_labelnames", None)
    shown = dict.fromkeys(name for each in metric.samples for name in each.labels if name != "le")
    return list(shown if declared is None else declared)


# Wires


def http_page() -> str:
    """Every operation of the HTTP API, then every form."""
    document = openapi_document(OPERATIONS)
    lines = [
        "# HTTP: operations and forms",
        "",
        f"{_MADE} A node serves the same as OpenAPI 3.1 at `/v1/openapi.json`.",
        "What the API does and why: [the HTTP API](http-api.md).",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += ["", f"## {method.upper()} {path}", "", operation["summary"], *_operation(operation)]
    lines += ["", "## Forms"]
    for name, schema in document["components"]["schemas"].items():
        lines += ["", *_schema(name, schema)]
    return "\n".join(lines) + "\n"


def _operation(operation: dict[str, Any]) -> Iterator[str]:
    if operation.get("security") == []:
        yield "Takes no token."
    if operation["parameters"]:
        yield from ("", "| parameter | in | form | default |", "|---|---|---|---|")
        for each in operation["parameters"]:
            default = "required" if each.get("required") else _default(each["schema"])
            about = f"; {_prose(each['description'])}" if "description" in each else ""
            yield f"| `{each['name']}` | {each['in']} | {_form(each['schema'])}{about} | {default} |"
    yield ""
    if "requestBody" in operation:
        yield f"- Body: {_content(operation['requestBody']['content'])}"
    problems = []
    for status, answer in operation["responses"].items():
        if "application/problem+json" in answer["content"]:
            problems.append(status)
        else:
            yield f"- {status}: {_content(answer['content'])}"
    if problems:
        yield f"- {', '.join(problems)}: [ProblemOut](#problemout)"


def _content(content: dict[str, Any]) -> str:
    return "; ".join(f"{_form(each.get('schema', {}))} as `{media}`" for media, each in content.items())


def sockets_page() -> str:
    """Every frame of the sockets."""
    document = asyncapi_document()
    schemas = document["components"]["schemas"]
    lines = [
        "# Sockets: frames",
        "",
        f"{_MADE} A node serves the same as AsyncAPI 3.0 at `/v1/asyncapi.json`.",
        "How they are used: [sharing a group](../howto/share-a-group.md), [the sync protocol](sync-protocol.md), [the gateway's wire](gateway.md), [the steward](../topics/steward.md).",
    ]
    for name, channel in document["channels"].items():
        lines += ["", f"## {channel['address']}", "", channel["summary"]]
        for direction, title in (("receive", "A client sends"), ("send", "The node sends")):
            lines += ["", f"{title}:", "", "| frame | form | meaning |", "|---|---|---|"]
            for reference in document["operations"][f"{name}.{direction}"]["messages"]:
                message = document["components"]["messages"][f"{name}.{reference['$ref'].rpartition('/')[2]}"]
                form = _form(message["payload"])
                lines.append(f"| `{message['name']}` | {form} | {_prose(message['summary'])} |")
        for key, schema in schemas.items():
            if key.startswith(f"{name}."):
                lines += ["", *_schema(key, schema)]
    return "\n".join(lines) + "\n"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield from (f"### {name}", "")
    if about := schema.get("description"):
        yield from (*(_prose(line) for line in about.splitlines()), "")
    if "properties" not in schema:
        yield f"{_form({**schema, 'title': None}).capitalize()}."
        return
    if not schema["properties"]:
        yield "Without fields."
        return
    yield from ("| field | form | default |", "|---|---|---|")
    for field, form in schema["properties"].items():
        default = "required" if field in schema.get("required", ()) else _default(form)
        yield f"| `{field}` | {_form(form)} | {default} |"


def _default(schema: dict[str, Any]) -> str:
    if "default" not in schema:
        return ""
    return f"`{msgspec.json.encode(schema['default']).decode()}`"


def _form(schema: dict[str, Any]) -> str:
    """A schema in words."""
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            return f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"
        case {"anyOf": options} | {"oneOf": options}:
            return " or ".join(dict.fromkeys(map(_form, options)))
        case {"const": value}:
            return f"`{value}`"
        case {"enum": values}:
            return " or ".join(f"`{value}`" for value in values)
        case {"type": "array"}:
            return f"list of {_form(schema['items'])}" if schema.get("items") else "list"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"object of {_form(values)} by name"
        case {"type": "object", "properties": fields} if "title" not in schema:
            return "{" + ", ".join(f"`{name}`: {_form(each)}" for name, each in fields.items()) + "}"
        case {"type": kind}:
            return f"{kind}{_bounds(schema)}"
    return "any value"


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
        "minLength": "at least",
        "maxLength": "at most",
        "pattern": "like",
    }
    said = [
        f"{text} {_value(name, schema[name])}"
        for name, text in words.items()
        if name in schema and schema[name] != _INT_MAX
    ]
    return f" ({', '.join(said)})" if said else ""


def _value(name: str, value: Any) -> str:
    if name == "pattern":
        return f"`{str(value).replace('|', chr(92) + '|')}`"
    return f"{value:_} character{'s' * (value > 1)}" if name.endswith("Length") else f"{value:_}"


def _prose(text: str) -> str:
    return text.replace("``", "`")
