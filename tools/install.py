"""
Installs pinned packages into the environment that runs it, several at a time, and says how far it is.

    .venv/bin/python tools/install.py "the node" requirements/server.txt --package

All versions are pinned, so nothing is resolved. What is there already is left alone, so an interrupted set-up goes on. Needs nothing but
Python and pip; where nothing is missing it says nothing. On a terminal one line counts; elsewhere, and with ``--lines``, there is a line every few seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from pip._vendor.packaging.requirements import Requirement

PIP: Final = (sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", "--no-deps")
SLOW_TO_BUILD: Final = frozenset({"pyspark"})  # comes as source, and takes long to unpack and pack
LOOK_EVERY_S: Final = 0.5
LINE_EVERY_S: Final = 5.0
ERROR_LINES: Final = 15


def missing(requirements: Path) -> list[Requirement]:
    """The pins of a file that are for this interpreter and not installed."""
    lines = [line.strip() for line in requirements.read_text(encoding="utf-8").splitlines()]
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [pin for pin in pins if (pin.marker is None or pin.marker.evaluate()) and not is_installed(pin)]


def is_installed(pin: Requirement) -> bool:
    """Whether a package is there, in its pinned version."""
    try:
        found = importlib.metadata.version(pin.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(found and pin.specifier.contains(found))  # of one that is just being written it is None


class Part:
    """One pip, and what it says, which is in a file of the environment."""

    def __init__(self, number: int, arguments: list[str]) -> None:
        self._log = Path(sys.prefix) / f"install-{number}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*PIP, *arguments], stdout=log, stderr=subprocess.STDOUT)

    def said(self) -> list[str]:
        """All lines so far."""
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()

    def fetched_count(self) -> int:
        """How many packages it has begun to fetch, or found at hand."""
        return sum(line.startswith(("Collecting ", "Processing ")) for line in self.said())


class Screen:
    """Where progress is shown."""

    def __init__(self, *, has_lines: bool) -> None:
        self._has_lines = has_lines or not sys.stdout.isatty()
        self._last = ""
        self._last_s = time.monotonic() - LINE_EVERY_S

    def show(self, text: str, *, is_end: bool = False) -> None:
        """Replace the line, or add one if it is time."""
        if not self._has_lines:
            print(f"\r\x1b[K{text}", end="\n" if is_end else "", flush=True)
        elif is_end or (text != self._last and time.monotonic() - self._last_s >= LINE_EVERY_S):
            print(text, flush=True)
            self._last, self._last_s = text, time.monotonic()


def main() -> int:
    """Install; 1 if a pip failed, after its last lines."""
    parser = argparse.ArgumentParser(description="Install pinned packages, and say how far it is.")
    parser.add_argument("label", help="what they are for, as it is shown")
    parser.add_argument("requirements", type=Path)
    parser.add_argument("--package", action="store_true", help="and this checkout itself, editable")
    parser.add_argument("--lines", action="store_true", help="no line that moves, even on a terminal")
    options = parser.parse_args()
    started_s = time.monotonic()
    pins = missing(options.requirements)
    screen = Screen(has_lines=options.lines)
    slow = [str(pin) for pin in pins if pin.name in SLOW_TO_BUILD]
    rest = [str(pin) for pin in pins if pin.name not in SLOW_TO_BUILD]
    own = ["-e", "."] if options.package else []
    parts = [Part(number, each) for number, each in enumerate((slow, rest[::2], rest[1::2], own)) if each]
    try:
        while any(part.process.poll() is None for part in parts):
            there = sum(map(is_installed, pins))
            fetched = min(sum(part.fetched_count() for part in parts), len(pins))
            screen.show(f"set-up of {options.label}: {len(pins)} packages, {fetched} fetched, {there} installed")
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        for part in parts:
            part.process.terminate()
        screen.show(f"set-up of {options.label}: interrupted; the same command goes on", is_end=True)
        return 130
    if not parts:
        return 0
    failed = [part for part in parts if part.process.returncode]
    for part in failed:
        print("\n".join(["", *part.said()[-ERROR_LINES:]]), file=sys.stderr)
    if failed:
        return 1
    seconds = time.monotonic() - started_s
    screen.show(f"set-up of {options.label}: done in {seconds:.0f} s, {len(pins)} packages were missing", is_end=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
