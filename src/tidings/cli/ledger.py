"""
``tidings subject``, ``tidings relation`` and ``tidings custody``: what the ledger holds, and what administrators change in it.

Subjects are named by their canonical id or by an addressing, written ``scheme:value``. Everything that changes something is done under the
rights of whoever asks, and what administrators do leaves an entry in the admin ledger (``tidings subject admin-log``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from tidings.wire.steward import requests

from .ledger_access import LedgerAccess, ledger_of, parsed_json
from .output import Output, UsageProblem, shown_time
from .session import DryRunOption, Session, YesOption, check_dry_run, command, confirm

subject_app = typer.Typer(help="Look at subjects, announce them, merge and split them.", rich_markup_mode=None)
relation_app = typer.Typer(help="Look at relations, claim them, hide them.", rich_markup_mode=None)
custody_app = typer.Typer(help="Look at what plugins have custody of, and end it.", rich_markup_mode=None)

_ADMIN: Final = ("ledger_admin",)
_PLUGINS: Final = ("plugins",)
LIST_PAGE_SIZE: Final = 1_000

SubjectArgument = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="A subject: its canonical id, or an addressing as scheme:value.")
]
AddressingArgument = Annotated[str, typer.Argument(metavar="SCHEME:VALUE", help="An addressing.")]
PluginOption = Annotated[str, typer.Option("--plugin", metavar="NAME", help="The plugin in whose name it is done.")]
TargetPluginOption = Annotated[str, typer.Option("--of", metavar="PLUGIN", help="The plugin whose claim it is.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why; kept on record.")]
AdminOption = Annotated[
    str | None, typer.Option("--as", metavar="NAME", help="The administrator's name on record; yours if left out.")
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="At most so many.")]
PredicateArgument = Annotated[str, typer.Argument(metavar="PREDICATE", help="The kind of relation.")]
TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="The subject at the other end.")]


def addressing_of(text: str) -> requests.AddressingArgument:
    """
    An addressing as people write it.

    Raises:
        UsageProblem: It has no colon.
    """
    scheme, colon, value = text.partition(":")
    if not (scheme and colon and value):
        raise UsageProblem(f"{text!r} is no addressing", "write it as scheme:value")
    return requests.AddressingArgument(scheme, value)


def subject_of(text: str) -> requests.SubjectName:
    """A subject's name as people write it: with a colon it is an addressing."""
    return addressing_of(text) if ":" in text else text


async def pages(ledger: LedgerAccess, request: Any, key: str, limit: int | None) -> AsyncIterator[dict[str, Any]]:
    """All items of a list, or the first of them."""
    count = 0
    while True:
        page = await ledger.call(request)
        for item in page[key]:
            if limit is not None and count >= limit:
                return
            yield item
            count += 1
        if page["next_cursor"] is None:
            return
        request = msgspec.structs.replace(request, cursor=page["next_cursor"])


async def _id_of(ledger: LedgerAccess, name: str) -> str:
    """The canonical id of a subject that may be named by an addressing."""
    wanted = subject_of(name)
    if isinstance(wanted, str):
        return wanted
    found = (await ledger.call(requests.ResolveAddressingRequest(addressing=wanted)))["canonical_id"]
    if found is None:
        raise UsageProblem(f"no subject has the addressing {name!r}")
    return str(found)


def goes_ahead(session: Session, plan: str, *, is_dry_run: bool, is_yes: bool) -> bool:
    """
    Whether a plan is to be carried out: by ``--yes``, or by what the person at the terminal answers; a dry run only shows it.

    Args:
        session: Where to show and ask.
        plan: What is done, as a sentence without a subject: ``merge A and B``.
        is_dry_run: Only say so.
        is_yes: Ask nobody.
    """
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    if is_dry_run:
        session.out.result({"would": plan}, f"would {plan}")
        return False
    confirm(session.out, f"{plan[0].upper()}{plan[1:]}?", is_yes=is_yes)
    return True


async def administer(
    session: Session,
    request: requests.RehearsableRequest,
    *,
    plan: str,
    is_dry_run: bool,
    is_yes: bool,
) -> None:
    """Ask, and have something done that takes the administrator's right; see ``goes_ahead``."""
    if is_dry_run:
        await show_rehearsal(session, request, _ADMIN, plan=plan, is_yes=is_yes)
    elif goes_ahead(session, plan, is_dry_run=False, is_yes=is_yes):
        await change(session, request, _ADMIN)


async def show_rehearsal(
    session: Session,
    request: requests.RehearsableRequest,
    capabilities: tuple[str, ...],
    *,
    plan: str,
    is_yes: bool,
) -> None:
    """Have the ledger say whether it would refuse something, or change anything; it changes nothing."""
    check_dry_run(is_dry_run=True, is_yes=is_yes)
    async with ledger_of(session, capabilities=capabilities) as ledger:
        answer = await ledger.call(msgspec.structs.replace(request, dry_run=True))
    if answer["would_change"]:
        session.out.result({"would": plan}, f"would {plan}")
    else:
        outcome = answer["outcome"]
        why = outcome.get("outcome", outcome) if isinstance(outcome, dict) else outcome
        session.out.result({"would": None, "outcome": why}, f"would change nothing{'' if why is None else f' ({why})'}")


async def change(
    session: Session, request: requests.StewardRequest, capabilities: tuple[str, ...], *, may_create: bool = False
) -> None:
    """Have something done, and say what came of it."""
    async with ledger_of(session, capabilities=capabilities, may_create=may_create) as ledger:
        answer = await ledger.call(request)
    show_answer(session.out, answer)


def show_answer(out: Output, answer: dict[str, Any]) -> None:
    """What an operation answered: as it is, or its parts on a line."""
    result = answer.get("result", answer)
    parts = result.items() if isinstance(result, dict) else [("result", result)]
    words = ", ".join(f"{name}: {value}" for name, value in parts if value not in (None, [], True))
    out.result(answer, words if words and result is not None else "done")


# Subjects


@command(subject_app, "list", asks_node=True, examples="tidings subject list\ntidings subject list --type track --json")
async def list_subjects(
    session: Session,
    *,
    subject_type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="Only subjects of this type.")
    ] = None,
    limit: LimitOption = None,
) -> None:
    """List the subjects with their types and addressings, by id."""
    async with ledger_of(session) as ledger:
        found = [
            each
            async for each in pages(ledger, requests.ListSubjectsRequest(page_size=LIST_PAGE_SIZE), "subjects", None)
            if subject_type in (None, each["subject_type"])
        ][:limit]
    session.out.listing("Subjects", ("id", "type", "addressings"), found, _subject_row, empty="there are no subjects")


def _subject_row(each: dict[str, Any]) -> tuple[object, ...]:
    names = ", ".join(f"{name['scheme']}:{name['value']}" for name in each["addressings"])
    return each["canonical_id"], each["subject_type"], names


@command(
    subject_app,
    "show",
    asks_node=True,
    examples="""
        tidings subject show mpd-path:/music/a.flac
        tidings subject show 2f9c… --predicate album_of --depth 2
    """,
)
async def show_subject(
    session: Session,
    subject: SubjectArgument,
    *,
    predicates: Annotated[
        list[str] | None,
        typer.Option("--predicate", metavar="NAME", help="Follow relations of this kind; again for more."),
    ] = None,
    direction: Annotated[
        str, typer.Option("--direction", metavar="WAY", help="Which way to follow them: forward, inverse or both.")
    ] = "forward",
    depth: Annotated[
        int, typer.Option("--depth", min=0, max=32, metavar="N", help="How many steps to follow them.")
    ] = 1,
) -> None:
    """Show a subject, its state and what it is related to; of a retired id, what became of it."""
    scope = {"relation_predicates": predicates or [], "direction": direction, "max_depth": depth}
    async with ledger_of(session) as ledger:
        found = await ledger.call(
            requests.ProjectSubjectRequest(canonical_id=await _id_of(ledger, subject), scope=scope)
        )
    if session.out.is_json:
        session.out.json(found)
        return
    aliased, shown = found.get("aliased_from"), found.get("subject", found) if "aliased_from" in found else found
    if aliased is not None:
        steps = " -> ".join([aliased["queried_id"], *(", ".join(each["new_ids"]) for each in aliased["chain"])])
        session.out.text(f"retired: {steps}")
    if shown is not None:
        session.out.facts(f"Subject {shown['canonical_id']}", _subject_facts(shown))


def _subject_facts(shown: dict[str, Any]) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [("type", shown["subject_type"])]
    facts += [
        ("addressing", f"{each['scheme']}:{each['value']}  ({each.get('claimant', each.get('claimant_token'))})")
        for each in shown["addressings"]
    ]
    facts += [
        (each["predicate"], f"{'->' if each['direction'] == 'forward' else '<-'} {each['target_id']}")
        for each in shown["related"]
    ]
    if shown["state"] is not None:
        facts.append(("state", msgspec.json.encode(shown["state"]).decode()))
    facts += [("degraded", f"{each['kind']}: {each['detail']}") for each in shown["degraded_reasons"]]
    return facts


@command(
    subject_app,
    "announce",
    asks_node=True,
    examples="tidings subject announce track mpd-path:/music/a.flac --plugin org.example.library",
)
async def announce(
    session: Session,
    subject_type: Annotated[str, typer.Argument(metavar="TYPE", help="Its type, as the catalogue declares it.")],
    addressings: Annotated[list[str], typer.Argument(metavar="SCHEME:VALUE...", help="Its addressings.")],
    *,
    plugin: PluginOption,
    state: Annotated[str | None, typer.Option("--state", metavar="JSON", help="What to keep with it.")] = None,
) -> None:
    """Say, in a plugin's name, that there is a subject, or that one has further addressings."""
    request = requests.AnnounceSubjectRequest(
        plugin=plugin,
        subject_type=subject_type,
        addressings=[addressing_of(each) for each in addressings],
        state=None if state is None else parsed_json("--state", state),
    )
    await change(session, request, _PLUGINS)


@command(
    subject_app,
    "retract",
    asks_node=True,
    examples="tidings subject retract mpd-path:/music/a.flac --plugin org.example.library",
)
async def retract(
    session: Session,
    addressing: AddressingArgument,
    *,
    plugin: PluginOption,
    reason: ReasonOption = None,
) -> None:
    """Take back, in a plugin's name, an addressing that it claims. A subject without any is forgotten."""
    request = requests.RetractAddressingRequest(plugin=plugin, addressing=addressing_of(addressing), reason=reason)
    await change(session, request, _PLUGINS)


@command(
    subject_app,
    "merge",
    asks_node=True,
    examples="tidings subject merge mpd-path:/a.flac spotify:track:1 --reason 'the same recording' --yes",
)
async def merge(
    session: Session,
    first: Annotated[str, typer.Argument(metavar="A", help="A subject: its id, or an addressing.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    *,
    reason: ReasonOption = None,
    admin: AdminOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Make one subject of two of the same type. The old ids stay as aliases; relations move along."""
    request = requests.MergeSubjectsRequest(a=subject_of(first), b=subject_of(second), reason=reason, admin=admin)
    plan = f"merge {first} and {second}"
    await administer(session, request, plan=plan, is_dry_run=is_dry_run, is_yes=is_yes)


@command(
    subject_app,
    "split",
    asks_node=True,
    examples="tidings subject split 2f9c… --group mpd-path:/a.flac --group spotify:track:1 --strategy to_both --yes",
)
async def split(
    session: Session,
    subject: SubjectArgument,
    *,
    groups: Annotated[
        list[str],
        typer.Option(
            "--group",
            metavar="SCHEME:VALUE,...",
            help="Addressings of one new subject; at least twice. A JSON list of texts where an addressing contains a comma.",
        ),
    ],
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="HOW", help="Where relations go: to_both, to_first or explicit.")
    ] = "to_both",
    assignments: Annotated[
        str | None,
        typer.Option(
            "--assignments", metavar="JSON", help="With explicit: source, predicate, target and group of each."
        ),
    ] = None,
    reason: ReasonOption = None,
    admin: AdminOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Make several subjects of one, each with some of its addressings. The old id stays as an alias of all."""
    try:
        request = requests.SplitSubjectRequest(
            source=subject_of(subject),
            partition=[[addressing_of(addressing) for addressing in _group(group)] for group in groups],
            strategy=msgspec.convert(strategy, Literal["to_both", "to_first", "explicit"]),
            assignments=msgspec.convert(
                [] if assignments is None else parsed_json("--assignments", assignments), list[requests.SplitAssignment]
            ),
            reason=reason,
            admin=admin,
        )
    except msgspec.ValidationError as error:
        raise UsageProblem(f"the split cannot be made like this: {error}") from None
    plan = f"split {subject} into {len(groups)}"
    await administer(session, request, plan=plan, is_dry_run=is_dry_run, is_yes=is_yes)


def _group(group: str) -> list[str]:
    """Split the addressings of ``--group``: a JSON list, or texts between commas."""
    if not group.startswith("["):
        return group.split(",")
    return msgspec.convert(parsed_json("--group", group), list[str])


@command(
    subject_app,
    "force-retract",
    asks_node=True,
    examples="tidings subject force-retract mpd-path:/a.flac --of org.example.library --reason stale --yes",
)
async def force_retract_addressing(
    session: Session,
    addressing: AddressingArgument,
    *,
    target_plugin: TargetPluginOption,
    reason: ReasonOption = None,
    admin: AdminOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Take back another plugin's addressing. A subject without any is forgotten, with its relations."""
    request = requests.ForceRetractAddressingRequest(
        target_plugin=target_plugin, addressing=addressing_of(addressing), reason=reason, admin=admin
    )
    plan = f"take {addressing} back from {target_plugin}"
    await administer(session, request, plan=plan, is_dry_run=is_dry_run, is_yes=is_yes)


@command(
    subject_app,
    "admin-log",
    asks_node=True,
    examples="tidings subject admin-log\ntidings subject admin-log --as curator --json",
)
async def admin_log(session: Session, *, admin: AdminOption = None, limit: LimitOption = None) -> None:
    """List what administrators did, oldest first: to subjects, relations, appointments, watches and types."""
    found: list[dict[str, Any]] = []
    request = requests.ListAdminEntriesRequest(admin_plugin=admin, page_size=LIST_PAGE_SIZE)
    async with ledger_of(session, capabilities=_ADMIN) as ledger:
        while True:
            page = await ledger.call(request)
            found += page["admin_entries"]
            if page["next_after"] is None or (limit is not None and len(found) >= limit):
                break
            request = msgspec.structs.replace(request, after=page["next_after"])
    columns = ("at", "by", "what", "to", "reason")
    session.out.listing(
        "What administrators did", columns, found[:limit], _entry_row, empty="administrators did nothing yet"
    )


def _entry_row(each: dict[str, Any]) -> tuple[object, ...]:
    target = each.get("target_subject") or each.get("target_addressing") or each.get("target_relation") or "-"
    shown = ":".join(target.values()) if isinstance(target, dict) else target
    return (
        shown_time(each["at_ms"]),
        each.get("admin_plugin", each.get("admin_token")),
        each["kind"],
        shown,
        each.get("reason") or "-",
    )


@command(
    subject_app, "conflicts", asks_node=True, examples="tidings subject conflicts\ntidings subject conflicts --json"
)
async def conflicts(session: Session) -> None:
    """List the subjects that a plugin takes for one; merging them, or forgetting one, settles it."""
    async with ledger_of(session, capabilities=_ADMIN) as ledger:
        found = (await ledger.call(requests.ListConflictsRequest()))["conflicts"]
    columns = ("number>", "plugin", "at", "subjects")
    session.out.listing("Open conflicts", columns, found, _conflict_row, empty="there are no open conflicts")


def _conflict_row(each: dict[str, Any]) -> tuple[object, ...]:
    plugin = each.get("plugin", each.get("claimant_token"))
    return each["conflict_id"], plugin, shown_time(each["detected_at_ms"]), ", ".join(each["canonical_ids"])


# Relations


@command(
    relation_app,
    "list",
    asks_node=True,
    examples="tidings relation list\ntidings relation list --predicate album_of --json",
)
async def list_relations(
    session: Session,
    *,
    predicate: Annotated[str | None, typer.Option("--predicate", metavar="NAME", help="Only of this kind.")] = None,
    limit: LimitOption = None,
) -> None:
    """List the relations, hidden ones too, with who claims them."""
    async with ledger_of(session) as ledger:
        found = [
            each
            async for each in pages(ledger, requests.ListRelationsRequest(page_size=LIST_PAGE_SIZE), "relations", None)
            if predicate in (None, each["predicate"])
        ][:limit]
    columns = ("source", "predicate", "target", "claimed by", "hidden")
    session.out.listing("Relations", columns, found, _relation_row, empty="there are no relations")


def _relation_row(each: dict[str, Any]) -> tuple[object, ...]:
    claimants = each.get("claimants", each.get("claimant_tokens", []))
    is_hidden = "yes" if each["suppressed"] else "-"
    return each["source_id"], each["predicate"], each["target_id"], ", ".join(claimants), is_hidden


@command(
    relation_app,
    "claim",
    asks_node=True,
    examples="tidings relation claim mpd-path:/a.flac album_of mbid:77 --plugin org.example.library",
)
async def claim(
    session: Session,
    source: SubjectArgument,
    predicate: PredicateArgument,
    target: TargetArgument,
    *,
    plugin: PluginOption,
    reason: ReasonOption = None,
) -> None:
    """Say, in a plugin's name, that two subjects are related."""
    request = requests.ClaimRelationRequest(
        plugin=plugin, source=subject_of(source), predicate=predicate, target=subject_of(target), reason=reason
    )
    await change(session, request, _PLUGINS)


@command(
    relation_app,
    "retract",
    asks_node=True,
    examples="tidings relation retract mpd-path:/a.flac album_of mbid:77 --plugin org.example.library",
)
async def retract_relation(
    session: Session,
    source: SubjectArgument,
    predicate: PredicateArgument,
    target: TargetArgument,
    *,
    plugin: PluginOption,
    reason: ReasonOption = None,
) -> None:
    """Take back, in a plugin's name, its claim on a relation. One that nobody claims is forgotten."""
    request = requests.RetractRelationRequest(
        plugin=plugin, source=subject_of(source), predicate=predicate, target=subject_of(target), reason=reason
    )
    await change(session, request, _PLUGINS)


@command(
    relation_app,
    "suppress",
    asks_node=True,
    examples="tidings relation suppress mpd-path:/a.flac album_of mbid:77 --reason dispute --yes",
)
async def suppress(
    session: Session,
    source: SubjectArgument,
    predicate: PredicateArgument,
    target: TargetArgument,
    *,
    reason: ReasonOption = None,
    admin: AdminOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Hide a relation from neighbours and walks, or say otherwise why it is hidden. Claims stay."""
    request = requests.SuppressRelationRequest(
        source=subject_of(source), predicate=predicate, target=subject_of(target), reason=reason, admin=admin
    )
    plan = f"hide {source} {predicate} {target}"
    await administer(session, request, plan=plan, is_dry_run=is_dry_run, is_yes=is_yes)


@command(
    relation_app,
    "unsuppress",
    asks_node=True,
    examples="tidings relation unsuppress mpd-path:/a.flac album_of mbid:77 --yes",
)
async def unsuppress(
    session: Session,
    source: SubjectArgument,
    predicate: PredicateArgument,
    target: TargetArgument,
    *,
    admin: AdminOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Show a hidden relation again."""
    request = requests.UnsuppressRelationRequest(
        source=subject_of(source), predicate=predicate, target=subject_of(target), admin=admin
    )
    plan = f"show {source} {predicate} {target} again"
    await administer(session, request, plan=plan, is_dry_run=is_dry_run, is_yes=is_yes)


@command(
    relation_app,
    "force-retract",
    asks_node=True,
    examples="tidings relation force-retract mpd-path:/a.flac album_of mbid:77 --of org.example.library --yes",
)
async def force_retract_relation(
    session: Session,
    source: SubjectArgument,
    predicate: PredicateArgument,
    target: TargetArgument,
    *,
    target_plugin: TargetPluginOption,
    reason: ReasonOption = None,
    admin: AdminOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Take back another plugin's claim on a relation. One that nobody claims any more is forgotten."""
    request = requests.ForceRetractRelationRequest(
        target_plugin=target_plugin,
        source=subject_of(source),
        predicate=predicate,
        target=subject_of(target),
        reason=reason,
        admin=admin,
    )
    plan = f"take the claim on {source} {predicate} {target} back from {target_plugin}"
    await administer(session, request, plan=plan, is_dry_run=is_dry_run, is_yes=is_yes)


# Custody


@command(custody_app, "list", asks_node=True, examples="tidings custody list\ntidings custody list --json")
async def list_custodies(session: Session, *, limit: LimitOption = None) -> None:
    """List what plugins have custody of, and how it is doing."""
    async with ledger_of(session) as ledger:
        request = requests.ListActiveCustodiesRequest(page_size=LIST_PAGE_SIZE)
        found = [each async for each in pages(ledger, request, "active_custodies", limit)]
    columns = ("plugin", "handle", "shelf", "type", "state", "health", "started")
    session.out.listing("Custodies", columns, found, _custody_row, empty="there are no custodies")


def _custody_row(each: dict[str, Any]) -> tuple[object, ...]:
    last, state = each["last_state"], each["state"]
    reason = f" ({state['reason']})" if "reason" in state else ""
    return (
        each.get("plugin", each.get("claimant_token")),
        each["handle_id"],
        each["shelf"] or "-",
        each["custody_type"] or "-",
        f"{state['kind']}{reason}",
        "-" if last is None else last["health"],
        shown_time(each["started_at_ms"]),
    )


@command(custody_app, "release", asks_node=True, examples="tidings custody release audio.playback 6f1d… --yes")
async def release(
    session: Session,
    shelf: Annotated[str, typer.Argument(metavar="RACK.SHELF", help="The shelf of the plugin that has it.")],
    handle: Annotated[str, typer.Argument(metavar="HANDLE", help="The handle of the custody.")],
    *,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the plugin would be asked, and ask nobody.")
    ] = False,
    is_yes: YesOption = False,
) -> None:
    """Have the plugin on a shelf end what it has custody of. It must be running."""
    plan = f"end the custody {handle} on {shelf}"
    if goes_ahead(session, plan, is_dry_run=is_dry_run, is_yes=is_yes):
        await change(session, requests.ReleaseCustodyRequest(shelf=shelf, handle=handle), ())
