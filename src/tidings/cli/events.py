"""``tidings events tail``: what a node's gateway delivers, as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from .administration import running_node_of
from .ledger_access import trusting
from .output import Output, as_typed, plain
from .session import Session, command

if TYPE_CHECKING:
    from tidings.client.http import ReceivedEnvelope

app = typer.Typer(help="Follow a node's events.", rich_markup_mode=None)

_PATIENCE_S = 60.0


@command(
    app,
    "tail",
    asks_node=True,
    ends_on_interrupt=True,
    examples="""
        tidings events tail
        tidings events tail --since 0 --domain orders --object order:42 --json
        tidings events tail --channel 'security.*' --channel 'system.*'
    """,
)
async def tail(
    session: Session,
    *,
    since: Annotated[
        int | None,
        typer.Option("--since", min=0, metavar="SEQ", help="Begin after this seq; with what is new if left out."),
    ] = None,
    app_: Annotated[str, typer.Option("--app", metavar="APP", help="The app whose events to show.")] = "default",
    channels: Annotated[
        list[str] | None,
        typer.Option("--channel", metavar="NAME", help="A family as system.*, or an event type; again for more."),
    ] = None,
    domain: Annotated[str | None, typer.Option("--domain", metavar="TOPIC", help="Only of this topic.")] = None,
    objects: Annotated[
        list[str] | None,
        typer.Option("--object", metavar="TYPE:ID", help="Only about this object; again for more."),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", min=1, metavar="N", help="End after so many.")] = None,
) -> None:
    """
    Show the events that the node which holds the workspace delivers, until Ctrl-C; graph events unless channels are given.

    A graph event tells of a record that names `objects`; one that names none is told to nobody, and stands in `tidings log tail`.
    Graph events are shown once each, in order, also if the node is restarted meanwhile. Of other events some may be missing then, which is said.
    """
    from tidings.client.events import EventStream

    node = running_node_of(session)
    shown = gaps = 0
    stream = EventStream(
        node.address.url,
        token=node.token,
        app=app_,
        channels=channels or None,
        domain=domain,
        objects=objects or None,
        since=since,
        patience_s=_PATIENCE_S,
        ssl_context=trusting(node.address),
    )
    if not channels:
        session.out.note(
            as_typed("events that name objects (--object) are shown; `tidings log tail` shows every record")
        )
    with node.naming_token():
        async with stream as events:
            async for envelope in events:
                if channels and events.gap_count > gaps:
                    gaps = events.gap_count
                    session.out.note(
                        "the connection could not be resumed: events that are not graph events may be missing"
                    )
                _show(session.out, envelope)
                shown += 1
                if shown == count:
                    return


def _show(out: Output, envelope: ReceivedEnvelope) -> None:
    if out.is_json:
        out.json(msgspec.to_builtins(envelope))
    else:
        summary = dict(envelope.payload_summary)
        about = " ".join(summary.pop("object_ids", ()))
        place = next(iter(envelope.sequence_anchor.values()), "-")
        where = envelope.scope.get("domain_id") or envelope.source_manager
        fields = "  ".join(f"{name}={_text(value)}" for name, value in summary.items() if value is not None)
        out.text(plain(f"{place:>8}  {envelope.event_type}  {where}  {about}  {fields}".rstrip()))
    out.flush()


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
