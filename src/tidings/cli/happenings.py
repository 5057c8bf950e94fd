"""``tidings happenings tail``: what happens in the ledger, as it happens."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from tidings.happenings.filters import HappeningFilter
from tidings.wire.steward import requests

from .ledger_access import ledger_of
from .output import Output, plain
from .session import Session, command

app = typer.Typer(help="Follow what happens in the ledger.", rich_markup_mode=None)

Names = list[str] | None


@command(
    app,
    "tail",
    asks_node=True,
    ends_on_interrupt=True,
    examples="""
        tidings happenings tail
        tidings happenings tail --since 0 --variant custody_taken --variant custody_released --json
        tidings happenings tail --coalesce variant --coalesce handle_id --window-ms 1000
        tidings happenings tail --subject 2f9c… --count 10
    """,
)
async def tail(
    session: Session,
    *,
    since: Annotated[
        int | None,
        typer.Option("--since", min=0, metavar="SEQ", help="Begin after this seq; with what is new if left out."),
    ] = None,
    variants: Annotated[
        Names, typer.Option("--variant", metavar="NAME", help="Only of this kind; again for more.")
    ] = None,
    plugins: Annotated[
        Names, typer.Option("--plugin", metavar="NAME", help="Only of this plugin; again for more.")
    ] = None,
    shelves: Annotated[
        Names, typer.Option("--shelf", metavar="NAME", help="Only of this shelf; again for more.")
    ] = None,
    subjects: Annotated[
        Names, typer.Option("--subject", metavar="ID", help="Only what touches this subject; again for more.")
    ] = None,
    labels: Annotated[
        Names,
        typer.Option(
            "--coalesce", metavar="LABEL", help="Of those alike in this label show one a window; again for more."
        ),
    ] = None,
    window_ms: Annotated[
        int | None,
        typer.Option("--window-ms", min=1, max=5000, metavar="MS", help="How long a window is; 100 if left out."),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", min=1, metavar="N", help="End after so many.")] = None,
) -> None:
    """
    Show happenings as they happen, until Ctrl-C; with --since, first those that are still kept.

    Values of one kind of filter are alternatives; kinds are combined. What was missed because this end was too slow is said.
    """
    wanted = HappeningFilter(
        variants=tuple(variants or ()),
        plugins=tuple(plugins or ()),
        shelves=tuple(shelves or ()),
        subjects=tuple(subjects or ()),
    )
    request = requests.SubscribeHappeningsRequest(
        since=since,
        filter=msgspec.to_builtins(wanted),
        coalesce_labels=labels or None,
        coalesce_window_ms=window_ms,
    )
    shown = 0
    async with ledger_of(session) as ledger:
        async for frame in ledger.frames(request):
            if "happening" in frame:
                _show(session.out, frame)
                shown += 1
                if shown == count:
                    return
            elif "lagged" in frame:
                session.out.note(f"{frame['lagged']['missed_count']} happenings were missed")


def _show(out: Output, frame: dict[str, Any]) -> None:
    if out.is_json:
        out.json(frame)
    else:
        happening = dict(frame["happening"])
        variant, at_ms = happening.pop("type"), happening.pop("at_ms", "-")
        fields = "  ".join(f"{name}={_text(value)}" for name, value in happening.items() if value is not None)
        out.text(plain(f"{frame['seq']:>8}  {at_ms}  {variant}  {fields}"))
    out.flush()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
