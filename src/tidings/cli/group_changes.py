"""
``tidings group seek | pause | resume | delete``: changes to a group that nobody runs.

Each opens the log as its one writer, so a bus that runs the group keeps them out (exit code 4); each leaves a record in
the topic ``audit`` before it does anything.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from tidings.bus.claims import claims_file
from tidings.bus.offsets import GroupPlace, OffsetStore
from tidings.bus.places import Aim, bounds, offset_of, plan_move, segment_at
from tidings.bus.standing import stored_place
from tidings.core.errors import TidingsError
from tidings.core.names import check_topic_and_group
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.engine import EmbeddedLog
from tidings.log.interface import Log

from .confirm import YesOption, audit, changing, check_dry_run
from .errors import UsageProblem
from .group_facts import OffsetsKeyOption, known_group, offsets_of
from .session import Session, command
from .values import parse_time

__all__ = ["register"]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done only.")]


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
    which = _Which(session, topic, group, offsets_key)
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    if sum((to_offset is not None, to_time is not None, is_earliest, is_latest)) != 1:
        raise UsageProblem("give one place to go to", "--to-offset, --to-time, --earliest or --latest")
    aim: Aim = "earliest" if is_earliest else "latest"
    if to_time is not None:
        aim = parse_time("--to-time", to_time, session.clock)
    elif to_offset is not None:
        aim = to_offset

    async with session.reading() as follower:
        _, before = which.look(follower)
        planned = _move(before, await _target(follower, topic, aim))
    if is_dry_run:
        which.show_dry("seek", planned)
        return
    async with which.changing("seek", planned, is_yes=is_yes) as log:
        store, before = which.look(log)
        target = await _target(log, topic, aim)
        done = _move(before, target)
        told = {"topic": topic, "group": group, **done}
        async with audit(log, "group.seek", told, frees_space=True) as done["audit_seq"]:
            is_paused = isinstance(before, GroupPlace) and before.paused
            store.move(topic, group, target, segment=segment_at(log, topic, target), paused=is_paused)
    which.tell(f"the next event it gets is offset {target}", done, is_done=True)


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
    which = _Which(session, topic, group, offsets_key)
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    async with session.reading() as follower:
        planned = _place(which.look(follower)[1])
    if is_dry_run:
        which.show_dry("delete", planned)
        return
    async with which.changing("delete", planned, is_yes=is_yes) as log:
        store, before = which.look(log)
        done = _place(before)
        told = {"topic": topic, "group": group, **done}
        async with audit(log, "group.delete", told, frees_space=True) as done["audit_seq"]:
            # Claims first: what a crash left in them must not be counted against a new group of the same name.
            OsDisk().remove(claims_file(session.layout.claims, topic, group))
            store.remove(topic, group)
    which.tell("is forgotten", done, is_done=True)


async def _set_paused(
    session: Session, topic: str, group: str, offsets_key: Path | None, *, is_paused: bool, is_dry_run: bool
) -> None:
    which = _Which(session, topic, group, offsets_key)
    verb = "pause" if is_paused else "resume"
    if is_dry_run:
        async with session.reading() as follower:
            is_change = which.place(follower)[1].paused != is_paused
        which.tell(f"would {verb}" if is_change else "is so already", {"changes": is_change})
        return
    async with session.writing() as log:
        store, place = which.place(log)
        done: dict[str, Any] = {"changes": place.paused != is_paused}
        if done["changes"]:
            async with audit(log, f"group.{verb}", {"topic": topic, "group": group}) as done["audit_seq"]:
                segment = segment_at(log, topic, place.cursor.committed + 1)
                store.save(topic, group, place.cursor, place.attempts, segment=segment, paused=is_paused)
    words = ("paused" if is_paused else "resumed") if done["changes"] else "is so already"
    which.tell(words, done, is_done=True)


class _Which:
    """The group that a command is about."""

    def __init__(self, session: Session, topic: str, group: str, offsets_key: Path | None) -> None:
        self._session = session
        self._topic, self._group = check_topic_and_group(topic, group)
        self._offsets_key = offsets_key

    def look(self, log: Log) -> tuple[OffsetStore, GroupPlace | TidingsError]:
        """The offset files, and where the group stands or why that is not known."""
        store = offsets_of(self._session, log, self._offsets_key)
        known_group(store, self._topic, self._group)
        return store, stored_place(store, self._topic, self._group)

    def place(self, log: Log) -> tuple[OffsetStore, GroupPlace]:
        """The same for what makes no sense without knowing where it stands."""
        store, before = self.look(log)
        if isinstance(before, TidingsError):
            raise before
        return store, before

    def show_dry(self, verb: str, planned: dict[str, Any]) -> None:
        """What would be done."""
        if self._session.out.is_json:
            self._session.out.json({"carried_out": False, **planned})
        else:
            self._session.out.facts(f"Would {verb} {self._topic}/{self._group}", planned.items())

    def changing(self, verb: str, planned: dict[str, Any], *, is_yes: bool) -> AbstractAsyncContextManager[EmbeddedLog]:
        """Ask about the plan, and open the log."""
        title = f"{verb} {self._topic}/{self._group}".capitalize()

        def show() -> None:
            self._session.out.facts(title, planned.items())

        return changing(self._session, "Carry this out?", show, is_yes=is_yes)

    def tell(self, words: str, facts: dict[str, Any], *, is_done: bool = False) -> None:
        """What came of it."""
        out = self._session.out
        if out.is_json:
            out.json({"carried_out": is_done, "topic": self._topic, "group": self._group, **facts})
        else:
            out.text(f"group {self._group} of topic {self._topic}: {words}")


def _place(before: GroupPlace | TidingsError) -> dict[str, Any]:
    if isinstance(before, TidingsError):
        return {"committed": None, "problem": str(before)}
    return {"committed": before.cursor.committed, "islands": before.cursor.early_count}


def _move(before: GroupPlace | TidingsError, target: int) -> dict[str, Any]:
    plan = plan_move(before, target)
    found = {**_place(before), "next_offset": target}
    if plan.committed is not None:
        found |= {"comes_again": plan.comes_again, "passed_over": plan.passed_over}
    return found


async def _target(log: Log, topic: str, aim: Aim) -> int:
    target = await offset_of(log, topic, aim)
    if target is None:
        first, end = bounds(log, topic)
        raise UsageProblem(f"topic {topic} has no offset {aim}", f"give one from {first} to {end}")
    return target
