"""A node in a process of its own, as benches and the soak test load it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tidings.access.context import TokenClaims
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK

__all__ = ["NodeProcess", "serving"]

_SECRET: Final = "a secret for benches, 32 bytes and more"
_START_S_MAX: Final = 60.0
_DAY_S: Final = 24 * 3600


class NodeProcess(NamedTuple):
    """A node that serves."""

    url: str
    pid: int

    def token(self, subject: str = "admin", client_id: str | None = None) -> str:
        """Make an administrator's token for a day."""
        issuer = TokenIssuer(TokenSettings(secret=_SECRET), SYSTEM_CLOCK)
        return issuer.issue(
            subject, client_id=client_id, claims=TokenClaims(roles=frozenset({"admin"})), lifetime_s=_DAY_S
        )


@contextmanager
def serving(folder: Path, config: str, catalogue: str) -> Iterator[NodeProcess]:
    """
    Serve the workspace ``folder/w`` until the block ends.

    Args:
        folder: Where the configuration and the node's output are kept.
        config: TOML besides ``[access.tokens]``, ``[ledger]`` and the port, which are set here.
        catalogue: The ledger's catalogue, as TOML.

    Raises:
        RuntimeError: The node did not start in time; the error has its output.
    """
    (folder / "catalogue.toml").write_text(catalogue)
    fixed = f'[access.tokens]\nsecret = "{_SECRET}"\n[ledger]\ncatalogue_file = "{folder / "catalogue.toml"}"\n'
    (folder / "node.toml").write_text(f"{config}\n{fixed}")
    command = [sys.executable, "-m", "tidings.cli", "serve", "--port", "0", "--workspace", str(folder / "w")]
    output = folder / "node.log"
    with (
        output.open("wb") as log,
        subprocess.Popen(
            [*command, "--config", str(folder / "node.toml")], stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield NodeProcess(_url(output), process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _url(output: Path) -> str:
    end_s = time.monotonic() + _START_S_MAX
    while time.monotonic() < end_s:
        if match := re.search(r"http://127\.0\.0\.1:\d+", output.read_text(errors="replace")):
            return match.group()
        time.sleep(0.1)
    raise RuntimeError(f"the node did not start: {output.read_text(errors='replace')}")
