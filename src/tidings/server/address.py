"""
``<workspace>/.bus/node.json``: where the node that owns a workspace can be reached.

Written when a node listens, taken away when it stops. One that a killed node left behind is replaced by the next; whether a node
really runs is known by the workspace's lock, not by this file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.reserve import Reserve

_BYTES_MAX = 4096
_TOKEN_BYTES_MAX = 16_384


class NodeAddress(msgspec.Struct, frozen=True):
    """Where a node listens."""

    url: str
    pid: int
    unix: str | None = None
    certificate: str | None = None
    """The file with the certificate that it shows, if it speaks TLS."""
    steward: str | None = None
    """Its steward socket, if it has one."""
    is_dev: bool = False
    """Whether it is a node to try things with, whose token lies in the workspace for the tools of its own user."""


def _path(workspace: Path) -> Path:
    return workspace / ".bus" / "node.json"


def publish_address(workspace: Path, address: NodeAddress) -> None:
    """Write where the node is; a reader sees the whole file or none."""
    path = _path(workspace)
    fresh = path.with_suffix(".json.new")
    data = msgspec.json.encode(address) + b"\n"
    reserve = Reserve(OsDisk(), Layout(workspace).reserve)  # a node starts on a full disk too
    reserve.run(lambda: fresh.write_bytes(data), len(data))
    fresh.replace(path)


def forget_address(workspace: Path) -> None:
    """Remove the file when the node has stopped; a file of another process stays."""
    known = read_address(workspace)
    if known is not None and known.pid == os.getpid():
        with contextlib.suppress(OSError):
            _path(workspace).unlink()


def read_address(workspace: Path) -> NodeAddress | None:
    """Where the workspace's node said it is; ``None`` if nothing legible says so."""
    try:
        with _path(workspace).open("rb") as file:
            return msgspec.json.decode(file.read(_BYTES_MAX), type=NodeAddress)
    except (OSError, msgspec.DecodeError):
        return None


def read_token(workspace: Path) -> str | None:
    """
    The token that the workspace's node has for the tools of its own user.

    ``None`` if it is no node to try things with, or somebody else's. Nothing outside the workspace is read: what is found goes to the
    address that a file of the workspace names.
    """
    address, path = read_address(workspace), Layout(workspace).dev_token
    if address is None or not address.is_dev:
        return None
    try:
        if path.resolve(strict=True) != path.parents[2].resolve() / path.relative_to(path.parents[2]):
            return None
        with path.open(encoding="ascii") as file:
            return file.read(_TOKEN_BYTES_MAX).strip() or None
    except (OSError, UnicodeDecodeError):
        return None
