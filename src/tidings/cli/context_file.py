"""
Contexts: nodes under names, with the token to show each, in one file of the user's (``~/.config/tidings/contexts.json``).

The file is for its owner's eyes (0600) and replaced as a whole; tokens are never printed.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import typer

from tidings.server.address import NodeAddress

from .node_log import Token
from .output import FileUnusable, UsageProblem

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_BYTES_MAX: Final = 1 << 20
_TOKEN_VARIABLE: Final = "TIDINGS_TOKEN"


class SavedNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node, and what to show it."""

    url: str
    token: str | None = None
    certificate: str | None = None
    """The file with the certificate that the node shows; the system's authorities decide if there is none."""

    @property
    def address(self) -> NodeAddress:
        """Where it is."""
        return NodeAddress(url=self.url, pid=0, certificate=self.certificate)


class Contexts(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of them, and which is in use."""

    contexts: dict[str, SavedNode] = {}
    current: str | None = None

    def named(self, name: str) -> SavedNode:
        """
        One of them.

        Raises:
            UsageProblem: There is none of that name.
        """
        if name not in self.contexts:
            there = f"there are: {', '.join(sorted(self.contexts))}" if self.contexts else "there are none yet"
            if ":" in name or "/" in name:
                raise UsageProblem(f"{name!r} is neither a context nor an address", f"is http://{name} meant?")
            raise UsageProblem(f"there is no context {name!r}", f"{there}; add one with `tidings context add`")
        return self.contexts[name]


def checked_name(name: str) -> str:
    """
    The name of a context, which no address can be taken for.

    Raises:
        UsageProblem: It will not do.
    """
    if not _NAME.fullmatch(name):
        raise UsageProblem(f"{name!r} is no name for a context", "use letters, digits, dots, hyphens, up to 64 of them")
    return name


def checked_url(url: str) -> str:
    """
    The address of a node, as it prints it.

    Raises:
        UsageProblem: It is none, or it says more than where: a password in it would be kept and printed as any address is.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if is_address and ("@" in parts.netloc or parts.query or parts.fragment):
        raise UsageProblem(
            "a node's address has no user, password, query or fragment", "who asks is said by a token: TIDINGS_TOKEN"
        )
    if not is_address:
        raise UsageProblem(f"{url!r} is not the address of a node", "give one such as http://127.0.0.1:8787")
    return url.rstrip("/")


def contexts_path() -> Path:
    """Where they are kept."""
    return Path(typer.get_app_dir("tidings")) / "contexts.json"


def load_contexts() -> Contexts:
    """
    The contexts as they are stored.

    Raises:
        FileUnusable: The file is there and cannot be read.
    """
    path = contexts_path()
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_BYTES_MAX), type=Contexts)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except (msgspec.DecodeError, OSError) as error:
        raise FileUnusable(str(path), f"cannot be read as contexts ({error})") from error


def save_contexts(contexts: Contexts) -> None:
    """Store them in the place of what was there; a reader sees the whole file or none of it."""
    path = contexts_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(contexts)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def is_context_in_use() -> bool:
    """Whether one is; not if the file cannot be read."""
    with contextlib.suppress(FileUnusable):
        return load_contexts().current is not None
    return False


def chosen_node(
    given: str | None, token: str | None, *, has_workspace: bool
) -> tuple[NodeAddress | None, Token | None]:
    """
    The node that a command line asks for, and the token to show; no node where it asks for a workspace.

    Args:
        given: What ``--node`` says: an address or a context's name.
        token: What ``--token`` or ``TIDINGS_TOKEN`` says; it goes before the context's own.
        has_workspace: Whether the command line names a workspace: then the context in use does not count.
    """
    shown = None
    if token is not None:
        is_from_environment = token == os.environ.get(_TOKEN_VARIABLE)  # noqa: TID251 - where the option looks, too
        shown = Token(token, _TOKEN_VARIABLE if is_from_environment else "that of --token")
    if given is not None and "://" in given:
        return NodeAddress(url=checked_url(given), pid=0), shown
    if given is None and has_workspace:
        return None, shown
    kept = load_contexts()
    name = given if given is not None else kept.current
    if name is None:
        return None, shown
    saved = kept.named(name)
    own = None if saved.token is None else Token(saved.token, f"the context {name}'s")
    if shown is not None and own is not None:
        shown = shown._replace(instead=f"{own.origin} own is shown without it")
    return saved.address, shown or own
