"""
``tidings gateway``, ``app``, ``guard`` and ``config``: the managers of the node that holds the workspace, over its HTTP API.

They are a running node's affair, so there is nothing to ask without one; only ``tidings gateway audit`` can read the files.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
import typer

from tidings.access.audit import AUDIT_TOPIC
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.log.record import Record

from .administration import running_node_of
from .output import UsageProblem
from .session import Session, YesOption, command, confirm, parse_span

gateway_app = typer.Typer(help="Look at who is subscribed to events, and at what is on record.", rich_markup_mode=None)
app_app = typer.Typer(help="Register apps, and declare their events.", rich_markup_mode=None)
guard_app = typer.Typer(help="Keep somebody out for a time.", rich_markup_mode=None)
config_app = typer.Typer(help="Look at the settings of a running node, and change them.", rich_markup_mode=None)

SlugArgument = Annotated[str, typer.Argument(metavar="SLUG", help="The app.")]
Names = list[str] | None
_GATEWAYS: Final = ("security.event.", "operational.event.")


async def _ask(session: Session, method: str, path: str, body: object = None) -> dict[str, Any]:
    """
    What the node that holds the workspace answers.

    Raises:
        UsageProblem: No node holds it, or there is no token.
        NodeUnreachable, NodeRefused: It did not do it.
    """
    return await running_node_of(session).ask(method, path, body)


# The gateway


@command(gateway_app, "connections", asks_node=True, examples="tidings gateway connections")
async def connections(session: Session) -> None:
    """List who is subscribed, and how full their buffers are."""
    found = await _ask(session, "GET", "/v1/gateway/connections")
    session.out.listing(
        "Subscribers",
        ("connection", "identity", "app", "channels", "open for>", "delivered>", "unacked>", "unsent>", "buffer>"),
        found["connections"],
        lambda each: (
            each["connection_id"],
            each["identity_id"] or "-",
            each["app_id"],
            ", ".join(each["channels"]),
            f"{each['opened_s_ago']:.0f} s",
            each["delivered_count"],
            each["unacked_count"],
            each["unsent_count"],
            f"{each['use']:.0%}",
        ),
        empty="nobody is subscribed",
    )


@command(gateway_app, "stats", asks_node=True, examples="tidings gateway stats --json")
async def stats(session: Session) -> None:
    """Show what the gateway counts, and whether it is ready."""
    found = await _ask(session, "GET", "/v1/gateway/stats")
    if session.out.is_json:
        session.out.json(found)
        return
    state = "ready" if found["is_ready"] else f"not ready: {', '.join(found['reasons'])}"
    session.out.facts(
        "Gateway",
        [
            ("state", state),
            ("subscribers", found["connections"]),
            ("opened, resumed", f"{found['opened']}, {found['resumed']}"),
            ("events queued", found["total_queued"]),
            ("refused or ended, by reason", _counts(found["failures"])),
            ("delivery, half and 99 %", _times(found["delivery_latency"])),
            ("acknowledgement, half and 99 %", _times(found["ack_latency"])),
        ],
    )
    classes = sorted({*found["produced"], *found["delivered"], *found["dropped"]})
    session.out.table(
        "Events",
        ("class", "made>", "delivered>", "dropped>", "waiting>"),
        [
            (
                each,
                found["produced"].get(each, 0),
                found["delivered"].get(each, 0),
                sum(found["dropped"].get(each, {}).values()),
                found["queue_depths"].get(each, 0),
            )
            for each in classes
        ],
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _times(summary: dict[str, Any]) -> str:
    if not summary["count"]:
        return "none yet"
    bounds = [summary["p50_s"], summary["p99_s"]]
    return ", ".join("over 10 s" if each is None else f"up to {each * 1000:g} ms" for each in bounds)


@command(
    gateway_app,
    "audit",
    asks_node=True,
    examples="""
        tidings gateway audit
        tidings gateway audit --all --count 20 --json
    """,
)
async def audit(
    session: Session,
    *,
    has_all: Annotated[bool, typer.Option("--all", help="Show what other parts of the node recorded too.")] = False,
    count: Annotated[int, typer.Option("--count", min=1, max=100_000, metavar="N", help="The last so many.")] = 100,
) -> None:
    """Show what is on record of subscriptions: opened, refused, dropped, resumed; and of what was shed or refused."""
    async with session.reading() as log:
        found: deque[Record] = deque(maxlen=count)
        async for record in records(log, Query(topic=AUDIT_TOPIC)):
            if has_all or record.meta.type.startswith(_GATEWAYS):
                found.append(record)
        for record in found:
            session.out.record(record)
        if not found:
            session.out.note("nothing is on record yet")


# Apps


@command(app_app, "list", asks_node=True, examples="tidings app list")
async def list_apps(session: Session) -> None:
    """List the apps with their event types."""
    found = await _ask(session, "GET", "/v1/apps")
    session.out.listing(
        "Apps",
        ("app", "title", "version", "enabled", "event types"),
        found["apps"],
        lambda each: (
            each["slug"],
            each["title"],
            each["version"],
            "yes" if each["is_enabled"] else "no",
            ", ".join(declared["event_type"] for declared in each["event_types"]),
        ),
        empty="there are no apps",
    )


async def _change(session: Session, change: dict[str, Any], line: str) -> None:
    done = await _ask(session, "POST", "/v1/apps", change)
    session.out.result(done, f"{line}, from seq {done['seq']} on")


@command(app_app, "register", asks_node=True, examples="tidings app register contacts --title Contacts")
async def register(
    session: Session,
    slug: SlugArgument,
    *,
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="What people call it.")] = "",
    version: Annotated[str, typer.Option("--version", metavar="TEXT", help="Its version.")] = "",
) -> None:
    """Register an app, or change its title and version."""
    await _change(session, {"slug": slug, "title": title, "version": version}, f"{slug} is registered")


@command(app_app, "enable", asks_node=True, examples="tidings app enable contacts")
async def enable(session: Session, slug: SlugArgument) -> None:
    """Let an app be used again."""
    await _change(session, {"type": "app.enabled", "slug": slug, "is_enabled": True}, f"{slug} is enabled")


@command(app_app, "disable", asks_node=True, examples="tidings app disable contacts")
async def disable(session: Session, slug: SlugArgument) -> None:
    """Close an app's subscribers, and let nobody in until it is enabled."""
    await _change(session, {"type": "app.enabled", "slug": slug, "is_enabled": False}, f"{slug} is disabled")


@command(app_app, "remove", asks_node=True, examples="tidings app remove contacts --yes")
async def remove(session: Session, slug: SlugArgument, *, is_yes: YesOption = False) -> None:
    """Remove an app with its event types and channels."""
    confirm(session.out, f"remove {slug} with its event types and channels?", is_yes=is_yes)
    done = await _ask(session, "DELETE", f"/v1/apps/{quote(slug, safe='')}")
    session.out.result(done, f"{slug} is removed, from seq {done['seq']} on")


@command(
    app_app,
    "declare",
    asks_node=True,
    examples="tidings app declare contacts app.contacts.message_created --topic messages --field thread",
)
async def declare(
    session: Session,
    slug: SlugArgument,
    event_type: Annotated[str, typer.Argument(metavar="EVENT", help="Its name, app.SLUG.NAME.")],
    *,
    topic: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="Made of the records of this topic,")],
    record_type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="and of this type; of any if left out.")
    ] = None,
    fields: Annotated[
        Names, typer.Option("--field", metavar="NAME", help="What it says of their payload; again for more.")
    ] = None,
    optional: Annotated[
        Names, typer.Option("--optional", metavar="NAME", help="What it may say; again for more.")
    ] = None,
    is_for_app: Annotated[
        bool, typer.Option("--for-app", help="For all of the app, not only for who may read the record.")
    ] = False,
) -> None:
    """Declare an event of an app. Its fields cannot be changed afterwards."""
    change = {
        "type": "app.event_type_declared",
        "slug": slug,
        "event_type": event_type,
        "topic": topic,
        "record_type": record_type,
        "payload_fields": fields or [],
        "optional_fields": optional or [],
        "audience": "app" if is_for_app else "acl",
    }
    await _change(session, change, f"{event_type} is declared")


# The guard


@command(guard_app, "list", asks_node=True, examples="tidings guard list")
async def list_directives(session: Session) -> None:
    """List the directives in force."""
    found = await _ask(session, "GET", "/v1/guard/directives")
    session.out.listing(
        "Directives",
        ("decision", "target", "reach", "reason", "ends in>"),
        found["directives"],
        lambda each: (
            each["directive"]["decision"],
            each["directive"]["target"],
            each["directive"].get("reach", "everything"),
            each["directive"].get("reason_code", "administrator"),
            f"{each['ends_in_s']:.0f} s",
        ),
        empty="nobody is kept out",
    )


TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="all, identity:NAME, app:SLUG, address:ADDRESS or, to close it, connection:ID."
    ),
]


@command(
    guard_app,
    "deny",
    asks_node=True,
    examples="""
        tidings guard deny identity:alice --for 10m --reason too_loud
        tidings guard deny all --for 1m --close
    """,
)
async def deny(
    session: Session,
    target: TargetArgument,
    *,
    span: Annotated[str, typer.Option("--for", metavar="SPAN", help="How long: 90s, 15m, 2h.")] = "10m",
    reason: Annotated[
        str, typer.Option("--reason", metavar="CODE", help="Why, in lower snake case.")
    ] = "administrator",
    reach: Annotated[
        str,
        typer.Option(
            "--reach", metavar="WHAT", help="everything, connections, subscriptions, or unauthenticated callers only."
        ),
    ] = "everything",
    closes: Annotated[bool, typer.Option("--close", help="End their open connections too.")] = False,
) -> None:
    """Let nobody in that is meant, for a time."""
    seconds = parse_span(span)
    if seconds is None:
        raise UsageProblem(f"--for: {span!r} is no span", "give one as 90s, 15m, 2h or 7d")
    directive = {"decision": "deny", "target": target, "ttl_ms": seconds * 1000, "reason_code": reason, "reach": reach}
    done = await _ask(session, "POST", "/v1/guard/directives", {**directive, "close_existing": closes})
    session.out.result(done, f"{target} is denied for {span}; {done['closed']} connections were closed")


@command(guard_app, "allow", asks_node=True, examples="tidings guard allow identity:alice")
async def allow(session: Session, target: TargetArgument) -> None:
    """Lift a denial; of all, every one."""
    done = await _ask(session, "POST", "/v1/guard/directives", {"decision": "allow", "target": target})
    session.out.result(done, f"{target} is allowed")


# Settings


@command(config_app, "show", asks_node=True, examples="tidings config show --json")
async def show_config(session: Session) -> None:
    """Show the settings in force, and what was changed since the start."""
    found = await _ask(session, "GET", "/v1/config")
    if session.out.is_json:
        session.out.json(found)
        return
    for section, values in found["settings"].items():
        session.out.facts(section, _flat(values))
    session.out.facts(
        "Changed while the node runs", [*found["overrides"].items(), ("changes since the start", found["cfg_seq"] - 1)]
    )


def _flat(values: dict[str, Any], path: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{path}{name}.")
        else:
            found.append((f"{path}{name}", value))
    return found


@command(
    config_app,
    "set",
    asks_node=True,
    examples="""
        tidings config set event.delivery.max_msgs_per_sec=50
        tidings config set server.log_level=debug event.telemetry.emit_samples=true
        tidings config set server.log_level=
    """,
)
async def set_config(
    session: Session,
    values: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Settings; without a value as at the start.")
    ],
) -> None:
    """Change settings of the running node, all of them or none; until it ends or they are taken back."""
    wanted: dict[str, Any] = {}
    for given in values:
        name, equals, text = given.partition("=")
        if not equals:
            raise UsageProblem(f"{given!r} has no value", "write NAME=VALUE")
        wanted[name] = _value(text)
    done = await _ask(session, "PATCH", "/v1/config", {"values": wanted})
    session.out.result(done, f"changed {', '.join(done['applied']) or 'nothing'}")


def _value(text: str) -> Any:
    """A number, true, false, a list or a table as JSON writes them; anything else is text, and nothing is nothing."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text
