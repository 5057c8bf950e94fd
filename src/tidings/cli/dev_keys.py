"""
``<workspace>/.bus/dev``: the secret and the tokens of a node that is tried on one machine, for ``serve --dev`` and ``demo``.

The secret is made once; tokens are made at every start, and one of an earlier start stays good until it expires. Only the user who made
them can read either. While the node runs, ``tidings.server.address.read_token`` finds the administrator's for the tool.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidings.core.clock import Clock
from tidings.log.embedded.layout import Layout

if TYPE_CHECKING:
    from tidings.access.context import TokenClaims
    from tidings.access.settings import TokenSettings

_LIFETIME_S: Final = 30 * 86_400
_SECRET_BYTES: Final = 48


def dev_secret(workspace: Path) -> str:
    """The workspace's secret; made if there is none."""
    path = _folder(workspace) / "secret"
    if not path.exists():
        _write_private(path, secrets.token_urlsafe(_SECRET_BYTES), may_replace=False)
    return path.read_text().strip()


def write_token(
    workspace: Path,
    settings: TokenSettings,
    clock: Clock,
    *,
    subject: str = "dev",
    client_id: str | None = None,
    claims: TokenClaims | None = None,
) -> Path:
    """A fresh token, in a file that is called like its subject; without claims an administrator's, in the file that the tool reads."""
    from tidings.access.context import TokenClaims
    from tidings.access.tokens import TokenIssuer

    may = TokenClaims(roles=frozenset({"admin"})) if claims is None else claims
    lifetime_s = min(_LIFETIME_S, settings.lifetime_s_max)
    token = TokenIssuer(settings, clock).issue(subject, client_id=client_id, claims=may, lifetime_s=lifetime_s)
    path = Layout(workspace).dev_token if claims is None else _folder(workspace) / subject
    _write_private(path, token, may_replace=True)
    return path


def _folder(workspace: Path) -> Path:
    folder = Layout(workspace).dev
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _write_private(path: Path, text: str, *, may_replace: bool) -> None:
    """A file that nobody else can read, at any moment; whole or not there."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        if may_replace:
            fresh.replace(path)
        else:
            with contextlib.suppress(FileExistsError):  # of two that start at once, both use what the first one wrote
                path.hardlink_to(fresh)
    finally:
        fresh.unlink(missing_ok=True)
