"""``tidings key``: files with the keys of sealed spaces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidings.core.names import check_space
from tidings.log.encryption import KeyFile, NoSealingKey

from .confirm import YesOption, ask, audit
from .errors import ExitCode
from .session import Session, command

__all__ = ["app"]

app = typer.Typer(help="Make and change key files.", rich_markup_mode=None)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The key file.")]
SpaceArgument = Annotated[str, typer.Argument(metavar="SPACE", help="Whose keys.")]


async def create(session: Session, file: FileArgument) -> None:
    """
    Make a key file without keys, readable by its owner only.

    Back it up apart from the log: who has both can read everything, and without it nobody can.
    """
    KeyFile.create(file)
    if session.out.is_json:
        session.out.json({"file": str(file)})
    else:
        session.out.text(f"made {file}; add a key with: tidings key add {file} SPACE")


async def add(session: Session, file: FileArgument, space: SpaceArgument) -> None:
    """
    Give a space a new key, which seals from now on.

    Older keys of the space stay and go on opening what they sealed. Processes that have the file loaded use
    the new key once they load it again.
    """
    key_id = KeyFile(file).add_key(space)
    if session.out.is_json:
        session.out.json({"file": str(file), "space_id": space, "key_id": key_id})
    else:
        session.out.text(f"space {space} is sealed with key {key_id} from now on")


async def shred(
    session: Session,
    file: FileArgument,
    space: SpaceArgument,
    *,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    is_yes: YesOption = False,
    is_audited: Annotated[
        bool, typer.Option("--audit", help="Record it in the workspace's topic `audit` before it is done.")
    ] = False,
) -> None:
    """
    Take all keys of a space away: what they sealed can never be read again.

    Copies of the key file still hold the keys, and so do processes that loaded it. Exit code 1 if the file
    has no key of the space.
    """
    keys = KeyFile(file)
    if not _has_keys(keys, check_space(space)):
        _tell(session, file, space, 0, f"{file} holds no key of space {space}")
        raise typer.Exit(ExitCode.PROBLEM)
    if is_dry_run:
        _tell(session, file, space, 0, f"the keys of space {space} would be shredded; nothing was changed")
        return
    ask(session.out, f"Shred the keys of space {space}, for good?", is_yes=is_yes)
    if is_audited:
        told = {"file": str(file), "space_id": space}
        async with session.writing() as log, audit(log, "key_shred", told):
            count = keys.shred(space)
    else:
        count = keys.shred(space)
    _tell(session, file, space, count, f"shredded {count} keys of space {space}")


def _has_keys(keys: KeyFile, space: str) -> bool:
    try:
        return keys.current(space) is not None
    except NoSealingKey:  # shredded before
        return False


def _tell(session: Session, file: Path, space: str, count: int, text: str) -> None:
    if session.out.is_json:
        session.out.json({"file": str(file), "space_id": space, "shredded": count})
    else:
        session.out.text(text)


command(app, "create", examples="tidings key create keys.json")(create)
command(app, "add", examples="tidings key add keys.json shared:home")(add)
command(
    app,
    "shred",
    examples="tidings key shred keys.json person:alice --dry-run\ntidings key shred keys.json person:alice --audit",
)(shred)
