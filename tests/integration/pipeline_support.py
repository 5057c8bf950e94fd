"""What the pipeline's integration tests share: the tool as a process, and Spark as a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyspark

from tidings.pipeline.java import Java, bundled_java

__all__ = ["cluster", "ended", "environment", "tool"]

SECONDS_MAX: Final = 240.0


def environment(folder: Path, *, has_java: bool = True) -> dict[str, str]:
    """This process's environment; without ``has_java`` no Java can be found in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDINGS_", "SPARK_"))}
    if not has_java:
        kept.pop("JAVA_HOME", None)
        tools = folder / "tools"
        tools.mkdir(exist_ok=True)
        for path in {each.name: each for place in ("/usr/bin", "/bin") for each in Path(place).iterdir()}.values():
            if not path.name.startswith("java") and not (tools / path.name).is_symlink():
                (tools / path.name).symlink_to(path)
        kept["PATH"] = str(tools)
    kept["HOME"] = str(folder)
    kept["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1"  # for little data compiling well takes longer than it saves
    return kept


def tool(*args: object, env: dict[str, str], code: int = 0) -> Any:
    """Run a command line with ``--json`` to its end; what it printed, as one value or a list of them."""
    command = [sys.executable, "-m", "tidings.cli", *map(str, args), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS_MAX, check=False, env=env, text=True)
    assert done.returncode == code, done.stderr or done.stdout
    lines = [json.loads(line) for line in (done.stdout if code == 0 else done.stdout or done.stderr).splitlines()]
    return lines[0] if len(lines) == 1 else lines


@contextlib.contextmanager
def cluster(
    folder: Path, place: Mapping[str, str] | None = None
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """
    A standalone cluster of one master and two workers on loopback: its address, and the workers.

    Args:
        folder: For its files.
        place: More of its processes' environment, such as their time zone.
    """
    port = _free_port()
    address = f"spark://127.0.0.1:{port}"
    master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "1g"]
    worker += ["--webui-port", "0", address]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_spark_class(folder, "master", master, place))
        _await_port(port)
        workers = [stack.enter_context(_spark_class(folder, f"worker{number}", worker, place)) for number in (1, 2)]
        log = folder / "master.log"
        _await(lambda: log.read_bytes().count(b"Registering worker") == 2)
        yield address, workers


@contextlib.contextmanager
def _spark_class(
    folder: Path, name: str, main: list[str], place: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Spark's own, by its main class."""
    folder.mkdir(exist_ok=True)
    home = Path(pyspark.__file__).parent
    java = bundled_java(folder / "cache")
    assert isinstance(java, Java), java
    env = environment(folder, has_java=False) | {
        "JAVA_HOME": str(java.home),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / name),
        "PYSPARK_PYTHON": sys.executable,
        **(place or {}),
    }
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [home / "bin" / "spark-class", *main], stdout=log, stderr=log, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        ended(process)


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a process and those it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _await_port(port: int) -> None:
    def is_open() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    _await(is_open)


def _await(is_so: Any) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, "Spark did not come up"
        time.sleep(0.1)
