"""
``tidings group seek | pause | resume | delete``: changes to a group that nobody runs.

Each opens the log as its one writer, so a bus that runs the group keeps them out (exit code 4); each leaves a record in
the topic ``audit`` before it does anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tidings.bus.cursor import Cursor
from tidings.bus.offsets import GroupPlace
from tidings.core.errors import TidingsError
from tidings.core.names import check_group, check_topic
from tidings.log.embedded.disk import OsDisk
from tidings.log.errors import WorkspaceBusy
from tidings.log.interface import Log, Query, TopicInfo

from .confirm import audit, is_confirmed
from .errors import ExitCode, UsageProblem
from .group_facts import OffsetsKeyOption, known_group, load_if_readable, offsets_of
from .session import Session, command
from .values import parse_time

__all__ = ["register"]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done only.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def register(app: typer.Typer) -> None:
    """Add the commands to their noun."""
    command(
        app,
        "seek",
        examples="""
            tidings group seek actions learner --earliest --dry-run
            tidings group seek actions learner --to-offset 1200 --yes
            tidings group seek actions learner --to-time 2h
        """,
    )(seek)
    command(app, "pause", examples="tidings group pause actions learner")(pause)
    command(app, "resume", examples="tidings group resume actions learner")(resume)
    command(
        app,
        "delete",
        examples="tidings group delete actions learner --dry-run\ntidings group delete actions learner --yes",
    )(delete)


async def seek(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", min=0, metavar="N", help="This event is the next it gets.")
    ] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", metavar="TIME", help="The first event written at this time or later.")
    ] = None,
    is_earliest: Annotated[bool, typer.Option("--earliest", help="The oldest event kept.")] = False,
    is_latest: Annotated[bool, typer.Option("--latest", help="Only what comes from now on.")] = False,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """
    Set the group's place: back to see events again, forward to pass over some.

    Islands and attempts are forgotten. This also mends a group whose offset file is damaged, or that counts in another
    epoch. Dead letters stay as they are.
    """
    topic, group = _names(topic, group, is_dry_run, is_yes)
    if sum((to_offset is not None, to_time is not None, is_earliest, is_latest)) != 1:
        raise UsageProblem("give one place to go to", "--to-offset, --to-time, --earliest or --latest")

    async def target_in(log: Log) -> int:
        info = log.topics().get(topic)
        if to_time is not None:
            query = Query(topic=topic, from_time=parse_time("--to-time", to_time, session.clock))
            page = await log.read(query, limit=1)
            return page.records[0].offset if page.records else _end(info)
        if to_offset is not None:
            return _checked_offset(topic, to_offset, info)
        return (info.first_offset if info is not None else 0) if is_earliest else _end(info)

    async with session.reading() as follower:
        store = offsets_of(session, follower, offsets_key)
        known_group(store, topic, group)
        planned = _move(load_if_readable(store, topic, group), await target_in(follower))
    if not _may_go_on(session, f"seek {topic}/{group}", planned, is_dry_run=is_dry_run, is_yes=is_yes):
        return
    async with session.writing() as log:
        store = offsets_of(session, log, offsets_key)
        known_group(store, topic, group)
        before = load_if_readable(store, topic, group)
        target = await target_in(log)
        done = _move(before, target)
        done["audit_seq"] = await audit(log, "group.seek", {"topic": topic, "group": group, **done})
        is_paused = isinstance(before, GroupPlace) and before.paused
        segment = _segment_of(log.topics().get(topic), target)
        for _ in range(2):  # the backup too: it must not lead back to the place that was left
            store.save(topic, group, Cursor(target - 1), {}, segment=segment, paused=is_paused)
    _tell(session, topic, group, f"the next event it gets is offset {target}", done, is_done=True)


async def pause(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """Hand out nothing to the group when it next runs, until it is resumed."""
    await _set_paused(session, topic, group, offsets_key, is_paused=True, is_dry_run=is_dry_run)


async def resume(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """Let a paused group go on when it next runs."""
    await _set_paused(session, topic, group, offsets_key, is_paused=False, is_dry_run=is_dry_run)


async def delete(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """
    Forget the group's place. Its events stay in the log, its dead letters in their file.

    A group of that name that subscribes later is a new one. Retention no longer waits for it.
    """
    topic, group = _names(topic, group, is_dry_run, is_yes)
    async with session.reading() as follower:
        store = offsets_of(session, follower, offsets_key)
        known_group(store, topic, group)
        planned = _place(load_if_readable(store, topic, group))
    if not _may_go_on(session, f"delete {topic}/{group}", planned, is_dry_run=is_dry_run, is_yes=is_yes):
        return
    async with session.writing() as log:
        store = offsets_of(session, log, offsets_key)
        known_group(store, topic, group)
        done = _place(load_if_readable(store, topic, group))
        done["audit_seq"] = await audit(log, "group.delete", {"topic": topic, "group": group, **done})
        # Claims first: what a crash left in them must not be counted against a new group of the same name.
        OsDisk().remove(session.layout.root / "claims" / f"{topic}__{group}.slots")
        store.remove(topic, group)
    _tell(session, topic, group, "is forgotten", done, is_done=True)


async def _set_paused(
    session: Session, topic: str, group: str, offsets_key: Path | None, *, is_paused: bool, is_dry_run: bool
) -> None:
    topic, group = check_topic(topic), check_group(group)
    verb = "pause" if is_paused else "resume"
    if is_dry_run:
        async with session.reading() as follower:
            store = offsets_of(session, follower, offsets_key)
            known_group(store, topic, group)
            place = store.load(topic, group)
        is_change = place is not None and place.paused != is_paused
        _tell(session, topic, group, f"would {verb}" if is_change else "is so already", {"changes": is_change})
        return
    async with session.writing() as log:
        store = offsets_of(session, log, offsets_key)
        known_group(store, topic, group)
        place = store.load(topic, group)
        assert place is not None
        done: dict[str, Any] = {"changes": place.paused != is_paused}
        if done["changes"]:
            done["audit_seq"] = await audit(log, f"group.{verb}", {"topic": topic, "group": group})
            segment = _segment_of(log.topics().get(topic), place.cursor.committed + 1)
            store.save(topic, group, place.cursor, place.attempts, segment=segment, paused=is_paused)
    words = ("paused" if is_paused else "resumed") if done["changes"] else "is so already"
    _tell(session, topic, group, words, done, is_done=True)


def _names(topic: str, group: str, is_dry_run: bool, is_yes: bool) -> tuple[str, str]:
    if is_dry_run and is_yes:
        raise UsageProblem("--dry-run and --yes exclude each other")
    return check_topic(topic), check_group(group)


def _may_go_on(session: Session, what: str, planned: dict[str, Any], *, is_dry_run: bool, is_yes: bool) -> bool:
    """Show the plan; whether it is to be carried out."""
    out = session.out
    if is_dry_run:
        if out.is_json:
            out.json({"carried_out": False, **planned})
        else:
            out.facts(f"Would {what}", planned.items())
        return False
    if (writer := session.writer()) is not None:  # before anybody is asked about what cannot be done
        raise WorkspaceBusy(session.workspace, writer)
    if not is_yes and not out.is_json:
        out.facts(what.capitalize(), planned.items())
        out.flush()
    if not is_confirmed(out, "Carry this out?", is_yes=is_yes):
        out.note("nothing was changed")
        raise typer.Exit(ExitCode.PROBLEM)
    return True


def _tell(
    session: Session, topic: str, group: str, words: str, facts: dict[str, Any], *, is_done: bool = False
) -> None:
    if session.out.is_json:
        session.out.json({"carried_out": is_done, "topic": topic, "group": group, **facts})
    else:
        session.out.text(f"group {group} of topic {topic}: {words}")


def _place(before: GroupPlace | TidingsError) -> dict[str, Any]:
    if isinstance(before, TidingsError):
        return {"committed": None, "problem": str(before)}
    return {"committed": before.cursor.committed, "islands": before.cursor.early_count}


def _move(before: GroupPlace | TidingsError, target: int) -> dict[str, Any]:
    """What moving comes to: how many events come again, and how many never come."""
    found = {**_place(before), "next_offset": target}
    if isinstance(before, GroupPlace):
        old = before.cursor.committed + 1
        early = sum(max(0, min(last, target - 1) - first + 1) for first, last in before.cursor.ranges)
        found["comes_again"] = max(0, old - target) + before.cursor.early_count - early
        found["passed_over"] = max(0, target - old) - early
    return found


def _end(info: TopicInfo | None) -> int:
    return info.next_offset if info is not None else 0


def _checked_offset(topic: str, offset: int, info: TopicInfo | None) -> int:
    first = info.first_offset if info is not None else 0
    # A cursor ahead of its topic would later pass for proof that acknowledged records are lost.
    if first <= offset <= _end(info):
        return offset
    raise UsageProblem(f"topic {topic} has no offset {offset}", f"give one from {first} to {_end(info)}")


def _segment_of(info: TopicInfo | None, offset: int) -> int:
    segments = info.segments if info is not None else ()
    return next((each.number for each in reversed(segments) if each.first_offset <= offset), 1)
