"""
``tidings appointment``, ``tidings watch`` and ``tidings grammar``: what is done later, and types that the catalogue lost.

All of it takes the administrator's right, and what is changed leaves an entry in the admin ledger (``tidings subject admin-log``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from tidings.wire.steward import requests

from .ledger import LIST_PAGE_SIZE, LimitOption, ReasonOption, change, goes_ahead, pages, show_answer, show_rehearsal
from .ledger_access import ledger_of, parsed_json
from .output import UsageProblem, shown_time
from .session import DryRunOption, Session, YesOption, check_dry_run, command, confirm, read_text

appointment_app = typer.Typer(help="Have something done at a time, once or again and again.", rich_markup_mode=None)
watch_app = typer.Typer(help="Have something done when something holds.", rich_markup_mode=None)
grammar_app = typer.Typer(
    help="Say which types of subjects there are, and look after those whose type is gone.", rich_markup_mode=None
)

_APPOINTMENTS: Final = ("appointments_admin",)
_WATCHES: Final = ("watches_admin",)
_GRAMMAR: Final = ("grammar_admin",)

CreatorArgument = Annotated[str, typer.Argument(metavar="CREATOR", help="Whose it is: a plugin, or a word for you.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Its name among the creator's own.")]
ActionOption = Annotated[
    str,
    typer.Option(
        "--action",
        metavar="JSON",
        help="What to do: target_shelf, request_type and payload; or topic, event_type, space and payload. @FILE reads a file.",
    ),
]
TypeArgument = Annotated[str, typer.Argument(metavar="TYPE", help="The type that is not declared.")]


@command(appointment_app, "list", asks_node=True, examples="tidings appointment list\ntidings appointment list --json")
async def list_appointments(session: Session, *, limit: LimitOption = None) -> None:
    """List the appointments, also those that have ended of late."""
    async with ledger_of(session, capabilities=_APPOINTMENTS) as ledger:
        request = requests.ListAppointmentsRequest(page_size=LIST_PAGE_SIZE)
        found = [each async for each in pages(ledger, request, "entries", limit)]
    columns = ("creator", "id", "when", "state", "next", "fired>")
    session.out.listing("Appointments", columns, found, _appointment_row, empty="there are no appointments")


def _appointment_row(each: dict[str, Any]) -> tuple[object, ...]:
    spec = each["spec"]
    when = " ".join(filter(None, (spec["recurrence"]["kind"], spec.get("time"))))
    return (
        each["creator"],
        spec["appointment_id"],
        when,
        each["state"],
        shown_time(each.get("next_fire_ms")),
        each["fires_completed"],
    )


@command(appointment_app, "show", asks_node=True, examples="tidings appointment show clock wake-up")
async def show_appointment(session: Session, creator: CreatorArgument, appointment_id: IdArgument) -> None:
    """Show one appointment."""
    request = requests.ProjectAppointmentRequest(creator=creator, appointment_id=appointment_id)
    await _show(session, request, _APPOINTMENTS, f"Appointment {creator}/{appointment_id}")


@command(
    appointment_app,
    "create",
    asks_node=True,
    examples="""
        tidings appointment create clock --spec '{"appointment_id": "wake-up", "time": "06:30", "recurrence": {"kind": "weekdays"}}' --action @ring.json
        tidings appointment create clock --spec '{"appointment_id": "soon", "recurrence": {"kind": "one_shot", "fire_at_ms": 1893456000000}}' --action @ring.json
    """,
)
async def create_appointment(
    session: Session,
    creator: CreatorArgument,
    *,
    spec: Annotated[
        str,
        typer.Option(
            "--spec", metavar="JSON", help="When: appointment_id, recurrence, time, zone, ... @FILE reads a file."
        ),
    ],
    action: ActionOption,
) -> None:
    """Make an appointment, in the place of an earlier one of the same name."""
    request = requests.CreateAppointmentRequest(
        creator=creator, spec=parsed_json("--spec", spec), action=parsed_json("--action", action)
    )
    await change(session, request, _APPOINTMENTS)


@command(appointment_app, "cancel", asks_node=True, examples="tidings appointment cancel clock wake-up --yes")
async def cancel_appointment(
    session: Session,
    creator: CreatorArgument,
    appointment_id: IdArgument,
    *,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Cancel an appointment. One that there is not is no error."""
    request = requests.CancelAppointmentRequest(creator=creator, appointment_id=appointment_id)
    plan = f"cancel the appointment {creator}/{appointment_id}"
    await _cancel(session, request, _APPOINTMENTS, plan, is_dry_run=is_dry_run, is_yes=is_yes)


# Watches


@command(watch_app, "list", asks_node=True, examples="tidings watch list\ntidings watch list --json")
async def list_watches(session: Session, *, limit: LimitOption = None) -> None:
    """List the watches, also those that were cancelled of late."""
    async with ledger_of(session, capabilities=_WATCHES) as ledger:
        request = requests.ListWatchesRequest(page_size=LIST_PAGE_SIZE)
        found = [each async for each in pages(ledger, request, "entries", limit)]
    columns = ("creator", "id", "condition", "trigger", "state", "fired>")
    session.out.listing("Watches", columns, found, _watch_row, empty="there are no watches")


def _watch_row(each: dict[str, Any]) -> tuple[object, ...]:
    spec = each["spec"]
    trigger = spec.get("trigger", {"kind": "edge"})["kind"]
    kind = spec["condition"]["kind"]
    return each["creator"], spec["watch_id"], kind, trigger, each["state"], each["fires_completed"]


@command(watch_app, "show", asks_node=True, examples="tidings watch show guard front-door")
async def show_watch(session: Session, creator: CreatorArgument, watch_id: IdArgument) -> None:
    """Show one watch."""
    request = requests.ProjectWatchRequest(creator=creator, watch_id=watch_id)
    await _show(session, request, _WATCHES, f"Watch {creator}/{watch_id}")


@command(
    watch_app,
    "create",
    asks_node=True,
    examples="tidings watch create guard --spec @front-door.json --action @ring.json",
)
async def create_watch(
    session: Session,
    creator: CreatorArgument,
    *,
    spec: Annotated[
        str,
        typer.Option(
            "--spec", metavar="JSON", help="What to watch: watch_id, condition and trigger. @FILE reads a file."
        ),
    ],
    action: ActionOption,
) -> None:
    """Set up a watch, in the place of an earlier one of the same name."""
    request = requests.CreateWatchRequest(
        creator=creator, spec=parsed_json("--spec", spec), action=parsed_json("--action", action)
    )
    await change(session, request, _WATCHES)


@command(watch_app, "cancel", asks_node=True, examples="tidings watch cancel guard front-door --yes")
async def cancel_watch(
    session: Session,
    creator: CreatorArgument,
    watch_id: IdArgument,
    *,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Cancel a watch. One that there is not is no error."""
    request = requests.CancelWatchRequest(creator=creator, watch_id=watch_id)
    plan = f"cancel the watch {creator}/{watch_id}"
    await _cancel(session, request, _WATCHES, plan, is_dry_run=is_dry_run, is_yes=is_yes)


# Types that the catalogue lost


@command(grammar_app, "list", asks_node=True, examples="tidings grammar list\ntidings grammar list --json")
async def list_orphans(session: Session) -> None:
    """List the types of subjects that the catalogue does not declare, and what became of each."""
    async with ledger_of(session, capabilities=_GRAMMAR) as ledger:
        found = (await ledger.call(requests.ListGrammarOrphansRequest()))["entries"]
    columns = ("type", "subjects>", "status", "accepted because")
    session.out.listing("Types that are not declared", columns, found, _orphan_row, empty="every type is declared")


def _orphan_row(each: dict[str, Any]) -> tuple[object, ...]:
    return each["subject_type"], each["count"], each["status"], each.get("accepted_reason", "-")


@command(grammar_app, "use", asks_node=True, examples="tidings grammar use catalogue.toml")
async def use(
    session: Session,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The catalogue, as TOML.")],
) -> None:
    """
    Use this catalogue from now on: the types of subjects, the predicates, the racks and shelves that there may be.

    What is there already stays. A folder without a log gets one. A node whose settings name a catalogue_file takes that one again when it starts.
    """
    text = read_text(path, 1 << 20)
    await change(session, requests.SetCatalogueRequest(catalogue=text), _GRAMMAR, may_create=True)


@command(grammar_app, "accept", asks_node=True, examples="tidings grammar accept cassette --reason 'kept as they are'")
async def accept(
    session: Session,
    subject_type: TypeArgument,
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept on record.")],
) -> None:
    """Leave the subjects of a type as they are: no notice is given of them any more."""
    await change(session, requests.AcceptGrammarOrphansRequest(from_type=subject_type, reason=reason), _GRAMMAR)


@command(
    grammar_app,
    "migrate",
    asks_node=True,
    examples="""
        tidings grammar migrate cassette --to recording --dry-run
        tidings grammar migrate cassette --to recording --yes
        tidings grammar migrate cassette --strategy @by-length.json --limit 1000 --yes
    """,
)
async def migrate(
    session: Session,
    subject_type: TypeArgument,
    *,
    to_type: Annotated[str | None, typer.Option("--to", metavar="TYPE", help="Give all of them this type.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", metavar="JSON", help="Or decide for each: rename, map or filter. @FILE reads a file."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, max=1000, metavar="N", help="So many in one step; 100 if left out."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="At most so many.")] = None,
    reason: ReasonOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """
    Give the subjects of a type other types, in batches. Relations move along; old ids stay as aliases.

    Stopped in between, the same command goes on with what is left.
    """
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    if (to_type is None) == (strategy is None):
        raise UsageProblem("say which type they get", "give --to or --strategy")
    chosen = {"kind": "rename", "to_type": to_type} if strategy is None else parsed_json("--strategy", strategy)
    request = requests.MigrateGrammarOrphansRequest(
        from_type=subject_type,
        strategy=chosen,
        dry_run=is_dry_run,
        batch_size=batch_size,
        max_subjects=limit,
        reason=reason,
    )
    if not is_dry_run:
        confirm(session.out, f"Migrate the subjects of type {subject_type}?", is_yes=is_yes)
    await change(session, request, _GRAMMAR)


async def _show(session: Session, request: requests.StewardRequest, capabilities: tuple[str, ...], title: str) -> None:
    async with ledger_of(session, capabilities=capabilities) as ledger:
        answer = await ledger.call(request)
    if session.out.is_json:
        session.out.json(answer["entry"])
    elif answer["entry"] is None:
        session.out.text("there is none of this name")
    else:
        facts = ((name, _text(value)) for name, value in answer["entry"].items())
        session.out.facts(title, facts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _cancel(
    session: Session,
    request: requests.RehearsableRequest,
    capabilities: tuple[str, ...],
    plan: str,
    *,
    is_dry_run: bool,
    is_yes: bool,
) -> None:
    if is_dry_run:
        await show_rehearsal(session, request, capabilities, plan=plan, is_yes=is_yes)
        return
    if not goes_ahead(session, plan, is_dry_run=False, is_yes=is_yes):
        return
    async with ledger_of(session, capabilities=capabilities) as ledger:
        answer = await ledger.call(request)
    if session.out.is_json:
        show_answer(session.out, answer)
    else:
        session.out.text("cancelled" if answer["cancelled"] else "there was nothing to cancel")
