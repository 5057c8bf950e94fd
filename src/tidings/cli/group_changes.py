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

from tidings.bus.admin import GroupAdmin, SeekTarget, offset_of, plan_seek
from tidings.bus.cursors import bounds
from tidings.bus.store import GroupPosition
from tidings.core.errors import TidingsError
from tidings.core.names import check_topic_and_group
from tidings.log.embedded.engine import EmbeddedLog
from tidings.log.interface import Log

from .confirm import YesOption, asker, changing, check_dry_run
from .errors import UsageProblem
from .group_facts import OffsetsKeyOption, admin_of
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
    Set the group's position: back to have events delivered again, forward to skip some.

    What was acknowledged early and failed attempts are forgotten. This also repairs a group whose offset file is damaged, or
    that counts in another epoch. Dead letters stay as they are.
    """
    which = _Which(session, topic, group, offsets_key)
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    if sum((to_offset is not None, to_time is not None, is_earliest, is_latest)) != 1:
        raise UsageProblem("give one place to go to", "--to-offset, --to-time, --earliest or --latest")
    aim: SeekTarget = "earliest" if is_earliest else "latest"
    if to_time is not None:
        aim = parse_time("--to-time", to_time, session.clock)
    elif to_offset is not None:
        aim = to_offset

    async with session.reading() as follower:
        _, before = await which.look(follower)
        planned = _seek_facts(before, await _target(follower, topic, aim))
    if is_dry_run:
        which.show_dry("seek", planned)
        return
    async with which.changing("seek", planned, is_yes=is_yes) as log:
        admin, before = await which.look(log)
        target = await _target(log, topic, aim)
        done = _seek_facts(before, target)
        audit = asker()
        await admin.seek(topic, group, target, audit=audit)
        done["audit_seq"] = audit.seq
    which.tell(f"the next event it gets is offset {target}", done, is_done=True)


async def pause(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """Deliver nothing to the group when it next runs, until it is resumed."""
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
    Forget the group's position. Its events stay in the log, its dead letters in their file.

    A group of that name that subscribes later is a new one. Retention no longer waits for it.
    """
    which = _Which(session, topic, group, offsets_key)
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    async with session.reading() as follower:
        planned = _position_facts((await which.look(follower))[1])
    if is_dry_run:
        which.show_dry("delete", planned)
        return
    async with which.changing("delete", planned, is_yes=is_yes) as log:
        admin, before = await which.look(log)
        done = _position_facts(before)
        audit = asker()
        await admin.delete(topic, group, audit=audit)
        done["audit_seq"] = audit.seq
    which.tell("is forgotten", done, is_done=True)


async def _set_paused(
    session: Session, topic: str, group: str, offsets_key: Path | None, *, is_paused: bool, is_dry_run: bool
) -> None:
    which = _Which(session, topic, group, offsets_key)
    verb = "pause" if is_paused else "resume"
    if is_dry_run:
        async with session.reading() as follower:
            is_change = (await which.position(follower))[1].paused != is_paused
        which.tell(f"would {verb}" if is_change else "is so already", {"changes": is_change})
        return
    async with session.writing() as log:
        admin, position = await which.position(log)
        done: dict[str, Any] = {"changes": position.paused != is_paused}
        if done["changes"]:
            audit = asker()
            await (admin.pause if is_paused else admin.resume)(topic, group, audit=audit)
            done["audit_seq"] = audit.seq
    words = ("paused" if is_paused else "resumed") if done["changes"] else "is so already"
    which.tell(words, done, is_done=True)


class _Which:
    """The group that a command is about."""

    def __init__(self, session: Session, topic: str, group: str, offsets_key: Path | None) -> None:
        self._session = session
        self._topic, self._group = check_topic_and_group(topic, group)
        self._offsets_key = offsets_key

    async def look(self, log: Log) -> tuple[GroupAdmin, GroupPosition | TidingsError]:
        """Operations on the group, and its position or why it cannot be read."""
        admin = admin_of(self._session, log, self._offsets_key)
        await admin.check_known(self._topic, self._group)
        return admin, await admin.position(self._topic, self._group)

    async def position(self, log: Log) -> tuple[GroupAdmin, GroupPosition]:
        """The same for what needs to know the position."""
        admin, before = await self.look(log)
        if isinstance(before, TidingsError):
            raise before
        return admin, before

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


def _position_facts(before: GroupPosition | TidingsError) -> dict[str, Any]:
    if isinstance(before, TidingsError):
        return {"committed": None, "problem": str(before)}
    return {"committed": before.cursor.committed, "acknowledged_early": before.cursor.early_count}


def _seek_facts(before: GroupPosition | TidingsError, target: int) -> dict[str, Any]:
    plan = plan_seek(before, target)
    found = {**_position_facts(before), "next_offset": target}
    if plan.committed is not None:
        found |= {"redelivered": plan.redelivered, "skipped": plan.skipped}
    return found


async def _target(log: Log, topic: str, target: SeekTarget) -> int:
    offset = await offset_of(log, topic, target)
    if offset is None:
        first, end = bounds(log, topic)
        raise UsageProblem(f"topic {topic} has no offset {target}", f"give one from {first} to {end}")
    return offset
